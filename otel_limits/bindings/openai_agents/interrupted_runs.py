"""Names, in the state of an interrupted run, the tasks that an answer continues.

The state has a record of the tools that each agent has used. The SDK ignores what it says about
agents that do not exist, and writes and reads it with the rest of the state.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from agents import RunState

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

WAITING: Final = "otel_limits_waiting"
"""Attribute of a result with the keys of its tasks, by agent."""

ENTRY: Final = "otel_limits:"
"""Prefix of the names of our entries in a state; the rest is the name of an agent."""


def key_of(invocation: object) -> str:
    """Return the key of the task of an invocation, by the ID of the invocation."""
    return f"openai-agents:{invocation}"


def keep(result: Any, waiting: Mapping[str, str]) -> None:
    """Keep the keys of tasks in the result of an interrupted run.

    Args:
        result: The result.
        waiting: The key of each agent's task, by the name of the agent.
    """
    setattr(result, WAITING, waiting)


def track_to_state(original: Any) -> Any:
    """Wrap `to_state` of a class of results."""

    @functools.wraps(original)
    def to_state(result: Any) -> Any:
        state = original(result)
        _write(state, vars(result).get(WAITING, {}))
        return state

    return to_state


@suppress_errors("binding")
def _write(state: Any, waiting: Mapping[str, str]) -> None:
    if waiting:
        ours = {ENTRY + agent: [key] for agent, key in waiting.items()}
        state.set_tool_use_tracker_snapshot({**state.get_tool_use_tracker_snapshot(), **ours})


@suppress_errors("binding")
def waiting_in(given: Any) -> Mapping[str, str] | None:
    """Return the keys of the tasks that a run continues, by agent."""
    if not isinstance(given, RunState) or not given.get_interruptions():
        return None
    entries = given.get_tool_use_tracker_snapshot().items()
    return {
        name.removeprefix(ENTRY): texts[0]
        for name, texts in entries
        if name.startswith(ENTRY) and texts
    }
