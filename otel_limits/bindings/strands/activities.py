"""What works for an invocation beside its loop: its tools and nodes, and threads that they leave.

Python's context variables tell who works for whom. A tool in the background that has waited for a
place is the exception: its task has the context of the one that had the place before. So who asked
for a tool is noted when it is requested, and put in force again whenever it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from strands.hooks import AfterNodeCallEvent, BeforeNodeCallEvent

from otel_limits.bindings.strands.invocations import STATES
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.run import Group, Run
from otel_limits.runs.tree import CURRENT, TASK_SCOPE, TaskScope, for_threads

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from opentelemetry.context import Context
    from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent
    from strands.middleware import ExecuteToolContext, MiddlewareNext

    from otel_limits.bindings.strands.invocations import AgentState

MOST_REQUESTED: Final = 1_000
"""Tools of one agent that are remembered: one that is cancelled while it waits never ends."""


# --- tools ----------------------------------------------------------------------------------------


def note_request(event: BeforeToolCallEvent) -> None:
    """Remember for whom a tool is going to run."""
    run = CURRENT.get()
    if isinstance(run, Run):
        requested = STATES.of(event.agent).requested
        requested[_key(event)] = TaskScope(run, TASK_SCOPE.get()), otel_context.get_current()
        while len(requested) > MOST_REQUESTED:
            requested.pop(next(iter(requested)))


def owner_of(event: AfterToolCallEvent) -> Run | Group | None:
    """Return for whom a tool ran, where that is known."""
    requested = _requested(event)
    return None if requested is None else requested[0].owner


@suppress_errors("binding")
def forget_request(event: AfterToolCallEvent) -> None:
    """Forget a tool that has ended and is not tried again."""
    state = STATES.get(event.agent)
    if state is not None and not event.retry:
        state.requested.pop(_key(event), None)


def tool_stage(context: ExecuteToolContext, next_fn: MiddlewareNext[Any, Any]) -> Any:
    """Let a tool work for whoever asked for it; one that nobody followed passes through."""
    requested = _requested(context)
    events = next_fn(context)
    return events if requested is None else _follow(events, *requested)


@suppress_errors("binding")
def _requested(of: Any) -> tuple[TaskScope, Context] | None:
    state: AgentState | None = STATES.get(of.agent)
    return None if state is None else state.requested.get(_key(of))


def _key(of: Any) -> tuple[int, str]:
    """Tell a tool call from those of other invocations, whose ids may be the same.

    A tool that waits keeps its invocation state, so that no other one gets that identity; what was
    left behind under it by an earlier one is replaced when the tool is requested.
    """
    return id(of.invocation_state), of.tool_use["toolUseId"]


async def _follow(
    events: Any, activity: TaskScope, at_request: Context
) -> AsyncGenerator[Any, None]:
    """Run a tool in the name of whoever asked for it.

    What says so is set only while the tool itself runs: some executors run it in the task of who
    reads the agent's stream, and what the reader does in between is not the work of the tool.
    """
    scope: Run | Group | None = activity.owner
    activity.has_ended = False
    # Spans as well, where it was moved.
    spans = otel_context.get_current() if CURRENT.get() is scope else at_request
    spans = for_threads(activity.owner, activity, spans) or spans
    try:
        while True:
            tokens = CURRENT.set(scope), TASK_SCOPE.set(activity)
            attached = otel_context.attach(spans)
            try:
                event = await anext(events)
            except StopAsyncIteration:
                break
            finally:
                scope = CURRENT.get()  # an agent that is the tool
                spans = otel_context.get_current()
                otel_context.detach(attached)
                TASK_SCOPE.reset(tokens[1])
                CURRENT.reset(tokens[0])
            yield event
    except Exception:
        activity.has_ended = True
        raise
    else:  # not where it is broken off: nobody sees the end of a thread that it leaves behind
        activity.has_ended = True
    finally:
        await events.aclose()


# --- groups and their nodes -----------------------------------------------------------------------


async def within(scope: Run | Group | None, events: AsyncGenerator[Any, None]) -> Any:
    """Run a stream within `scope`, whatever who reads it does between two events."""
    try:
        while True:
            # Each time, as one task may read several streams in turns.
            if CURRENT.get() is not scope:
                CURRENT.set(scope)
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return
            scope = CURRENT.get()  # of an agent that runs in this task, in a swarm
            yield event
    finally:
        await events.aclose()


@suppress_errors("binding")
def watch_nodes(group: Any) -> None:
    """Be told where the nodes of a graph begin and end, each in a task of its own."""
    from strands.multiagent.graph import Graph

    if not isinstance(group, Graph):  # a swarm consists of agents, which run in its reader's task
        return
    if begin_node not in list(group.hooks.get_callbacks_for(BeforeNodeCallEvent(group, ""))):
        group.hooks.add_callback(BeforeNodeCallEvent, begin_node)
        group.hooks.add_callback(AfterNodeCallEvent, end_node)


@suppress_errors("binding")
def begin_node(event: BeforeNodeCallEvent) -> None:
    """A node begins, and the present task works for it."""
    del event
    scope = CURRENT.get()
    if isinstance(scope, Group):
        TASK_SCOPE.set(activity := TaskScope(scope, TASK_SCOPE.get()))
        # Never detached: the node has a task of its own.
        spans = otel_context.get_current()
        otel_context.attach(for_threads(scope, activity, spans) or spans)


@suppress_errors("binding")
def end_node(event: AfterNodeCallEvent) -> None:
    """A node has ended, unless it was broken off: then its threads go on."""
    from strands.multiagent.base import Status

    activity, graph = TASK_SCOPE.get(), event.source
    # Strands tells both alike, in a `finally`.
    if activity is not None and graph.nodes[event.node_id].execution_status != Status.EXECUTING:  # type: ignore[attr-defined]
        activity.has_ended = True
