"""Keeps the tasks of an interrupted run in its state, from which the SDK itself continues it.

The state has a record of the tools that each agent has used. The SDK ignores what it says about
agents that do not exist, and writes and reads it with the rest of the state.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from agents import RunState

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from otel_limits.runs.tasks import InterruptedTasks

Entries: TypeAlias = "Mapping[str, Sequence[str]]"
"""Tasks that wait for an answer, by agent: the key and the record of each."""

WAITING: Final = "otel_limits_waiting"
"""Attribute of a result with the tasks that wait for an answer."""

ENTRY: Final = "otel_limits:"
"""Prefix of the names of our entries in a state; the rest is the name of an agent."""


def key_of(invocation: object) -> str:
    """Return the key of the task of an invocation, by the ID of the invocation."""
    return f"openai-agents:{invocation}"


def keep(result: Any, waiting: Entries) -> None:
    """Keep tasks in the result of an interrupted run."""
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
def _write(state: Any, waiting: Entries) -> None:
    if waiting:
        ours = {ENTRY + agent: texts for agent, texts in waiting.items()}
        state.set_tool_use_tracker_snapshot({**state.get_tool_use_tracker_snapshot(), **ours})


@suppress_errors("binding")
def recalled(given: Any, interrupted: InterruptedTasks) -> Entries:
    """Return the tasks that a run continues with the state that it is given."""
    if not isinstance(given, RunState) or not given.get_interruptions():
        return {}
    entries = {
        name.removeprefix(ENTRY): texts
        for name, texts in given.get_tool_use_tracker_snapshot().items()
        if name.startswith(ENTRY) and len(texts) == 2  # noqa: PLR2004  key and record
    }
    interrupted.recall([(key, record) for key, record in entries.values()])
    return entries
