"""Keeps the tasks of an interrupted run in its state, from which the SDK itself continues it.

The state has a record of the tools that each agent has used. The SDK ignores what it says about
agents that do not exist, and writes and reads it with the rest of the state.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import uuid4

from agents import RunState

from otel_limits.bindings.openai_agents.state_usage import task_of
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.labels import quoted
from otel_limits.runs.tasks import InvalidRecordError, Task

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Host
    from otel_limits.runs.tasks import InterruptedTasks

Entries: TypeAlias = "Mapping[str, Sequence[str]]"
"""Tasks that wait for an answer, by agent: the key and the record of each."""

logger = logging.getLogger("otel_limits")

RECOUNTED: Final = (
    "Its turns, model calls, tool calls and tokens are those that the state shows; its cost, its "
    "time and the usage of agents within it start from zero"
)

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
def recalled(given: Any, agent: str, host: Host) -> Entries:
    """Return the tasks that a run continues with the state that it is given.

    Args:
        given: The input of the run.
        agent: The name of its first agent.
        host: The runtime of the process.
    """
    if not isinstance(given, RunState) or not given.get_interruptions():
        return {}
    interrupted = host.runs.interrupted
    entries = {
        name.removeprefix(ENTRY): texts
        for name, texts in given.get_tool_use_tracker_snapshot().items()
        if name.startswith(ENTRY) and len(texts) == 2  # noqa: PLR2004  key and record
    }
    if host.policy(agent).on_resume != "continue":
        return entries
    for key, record in entries.values():
        problem = _problem_with(record)
        if problem is not None and interrupted.find([key]) is None:
            INTERNAL_ERRORS.report("tasks", problem, f"{problem} {RECOUNTED}")
            _recount(given, key, interrupted)
        else:
            interrupted.recall([(key, record)])
    if agent not in entries:
        _report_missing(agent)
        key = key_of(uuid4().hex)
        for name in (agent, *_recount(given, key, interrupted)):
            entries.setdefault(name, [key, ""])
    return entries


def _problem_with(record: str) -> InvalidRecordError | None:
    try:
        Task.from_record(record)
    except InvalidRecordError as error:
        return error
    return None


@suppress_errors("binding")
def _recounted(state: RunState[Any], key: str, interrupted: InterruptedTasks) -> Sequence[str]:
    shown = state.to_json(context_serializer=lambda _: {})
    interrupted.keep([key], task_of(uuid4().hex, shown))
    return (shown["current_agent"]["name"],)


def _recount(state: RunState[Any], key: str, interrupted: InterruptedTasks) -> Sequence[str]:
    """Keep a task with what a state shows; return the agents that it is about besides the first."""
    return _recounted(state, key, interrupted) or ()


MISSING: Final[set[str]] = set()
"""Agents whose states had no record."""


def _report_missing(agent: str) -> None:
    """Log, once for each agent, that a state has no record."""
    if agent not in MISSING:
        MISSING.add(agent)
        logger.warning(
            "otel-limits: agent %s continues from a RunState without a record of its task. %s.",
            quoted(agent),
            RECOUNTED,
        )
