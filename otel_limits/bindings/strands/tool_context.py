"""Tools, graph nodes and threads, within the context of the invocation that they work for.

Python's context variables usually hold the invocation. The exception is a background tool that has
waited for a slot: its task has the context of the slot's previous user. So the invocation is noted
when a tool is requested, and restored whenever the tool runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from strands.hooks import AfterNodeCallEvent, BeforeNodeCallEvent

from otel_limits.bindings.invocation import InvocationInProgress, RequestedTool
from otel_limits.bindings.strands.invocations import STATES
from otel_limits.bindings.strands.notes import reworded
from otel_limits.bindings.strands.readers import status_of, text_of
from otel_limits.bindings.tool_call import ToolCallInProgress
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.current import CURRENT, TASK_SCOPE, for_threads
from otel_limits.runs.run import Group, TaskScope

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent
    from strands.middleware import ExecuteToolContext, MiddlewareNext

MOST_REQUESTED: Final = 1_000
"""Most requested tools kept per agent: a tool cancelled while waiting never ends."""


# --- tools ----------------------------------------------------------------------------------------


class StrandsTool(ToolCallInProgress):
    """One attempt of a tool, from its request on: it may wait for a slot in another context."""

    def refused(self, note: str) -> str:
        """Return the note: Strands makes it the result, and an error."""
        return note

    def text_of(self, result: Any) -> str:
        """Return the text of a result."""
        return text_of(result)

    def with_text(self, result: Any, text: str) -> Any:
        """Return a result with a text instead of its content."""
        return {**result, "content": [{"text": text}]}

    def is_error(self, result: Any) -> bool:
        """Return whether a result is that of a tool that failed."""
        return status_of(result) == "error"

    def reword(self, result: Any, text: str, *, is_error: bool) -> tuple[Any, str]:  # noqa: ARG002
        """Reword each part of a result, which may have several texts, and pictures."""
        result = reworded(result, self.invocation.run, self.scope)
        return result, text_of(result)


def begin_tool(event: BeforeToolCallEvent, requested: RequestedTool | None) -> StrandsTool | None:
    """Begin an attempt of a tool for the invocation that requests it.

    Args:
        event: The hook's event.
        requested: The request in the model's response; `None` if other code calls the tool.
    """
    invocation = getattr(CURRENT.get(), "state", None)
    if not isinstance(invocation, InvocationInProgress):
        return None
    use = event.tool_use
    attempt = StrandsTool(invocation, requested or RequestedTool(use["name"], use["input"]))
    attempt.context = otel_context.get_current()
    begun = STATES.of(event.agent).requested
    begun[_key(event)] = attempt
    while len(begun) > MOST_REQUESTED:
        begun.pop(next(iter(begun)))
    return attempt


@suppress_errors("binding")
def forget_request(event: AfterToolCallEvent) -> None:
    """Forget a tool that has ended and is not retried."""
    state = STATES.get(event.agent)
    if state is not None and not event.retry:
        state.requested.pop(_key(event), None)


def tool_stage(context: ExecuteToolContext, next_fn: MiddlewareNext[Any, Any]) -> Any:
    """Run a tool for the invocation that requested it. Pass untracked tools through."""
    attempt = attempt_of(context)
    events = next_fn(context)
    return events if attempt is None else _follow(events, attempt)


@suppress_errors("binding")
def attempt_of(of: Any) -> ToolCallInProgress | None:
    """Return the attempt that an event or a context is about, if it is followed."""
    state = STATES.get(of.agent)
    return None if state is None else state.requested.get(_key(of))


def _key(of: Any) -> tuple[int, str]:
    """Identify a tool call among those of other invocations, whose IDs may be the same.

    A waiting tool keeps its invocation state alive, so no other gets that identity. An entry left
    by an earlier one is replaced when the tool is requested.
    """
    return id(of.invocation_state), of.tool_use["toolUseId"]


async def _follow(events: Any, attempt: ToolCallInProgress) -> AsyncGenerator[Any, None]:
    """Run a tool as part of the invocation that requested it.

    Its context is set only while the tool itself runs: some executors run it in the task that reads
    the agent's stream, and that task's other work does not belong to the tool.
    """
    attempt.scope.has_ended = False
    if (
        CURRENT.get() is attempt.invocation.run
    ):  # else the tool runs in another context: its spans, too
        attempt.context = None
    try:
        while True:
            with attempt:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    break
            yield event
    except Exception:
        attempt.scope.has_ended = True
        raise
    else:  # not when it is broken off: a thread that it started may still run
        attempt.scope.has_ended = True
    finally:
        await events.aclose()


# --- groups and their nodes -----------------------------------------------------------------------


@suppress_errors("binding")
def watch_nodes(group: Any) -> None:
    """Add hooks for the start and end of a graph's nodes, which run in separate tasks."""
    from strands.multiagent.graph import Graph

    if not isinstance(group, Graph):  # the agents of a swarm run in its reader's task
        return
    if begin_node not in list(group.hooks.get_callbacks_for(BeforeNodeCallEvent(group, ""))):
        group.hooks.add_callback(BeforeNodeCallEvent, begin_node)
        group.hooks.add_callback(AfterNodeCallEvent, end_node)


@suppress_errors("binding")
def begin_node(event: BeforeNodeCallEvent) -> None:
    """Start a node, which the current task works for."""
    del event
    owner = CURRENT.get()
    if isinstance(owner, Group):
        TASK_SCOPE.set(scope := TaskScope(owner, TASK_SCOPE.get()))
        # Never detached: the task ends with the node.
        spans = otel_context.get_current()
        otel_context.attach(for_threads(owner, scope, spans) or spans)


@suppress_errors("binding")
def end_node(event: AfterNodeCallEvent) -> None:
    """End a node, unless it was broken off: then its threads continue."""
    from strands.multiagent.base import Status

    activity, graph = TASK_SCOPE.get(), event.source
    # Strands fires the event in both cases, in a `finally`.
    if activity is not None and graph.nodes[event.node_id].execution_status != Status.EXECUTING:  # type: ignore[attr-defined]
        activity.has_ended = True
