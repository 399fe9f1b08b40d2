"""Attributes tools, graph nodes and threads to the invocation that they work for.

Python's context variables usually hold the invocation. The exception is a background tool that has
waited for a slot: its task has the context of the slot's previous user. So the invocation is noted
when a tool is requested, and restored whenever the tool runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from strands.hooks import AfterNodeCallEvent, BeforeNodeCallEvent

from otel_limits.bindings.strands.invocations import STATES
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.current import CURRENT, TASK_SCOPE, TaskScope, for_threads
from otel_limits.runs.run import Group, Run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from opentelemetry.context import Context
    from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent
    from strands.middleware import ExecuteToolContext, MiddlewareNext

    from otel_limits.bindings.strands.invocations import AgentState

MOST_REQUESTED: Final = 1_000
"""Most requested tools kept per agent: a tool cancelled while waiting never ends."""


# --- tools ----------------------------------------------------------------------------------------


def note_request(event: BeforeToolCallEvent) -> None:
    """Remember the invocation that requests a tool."""
    run = CURRENT.get()
    if isinstance(run, Run):
        requested = STATES.of(event.agent).requested
        requested[_key(event)] = TaskScope(run, TASK_SCOPE.get()), otel_context.get_current()
        while len(requested) > MOST_REQUESTED:
            requested.pop(next(iter(requested)))


def scope_of(event: AfterToolCallEvent) -> TaskScope | None:
    """Return the scope of a tool call, if known: its owner is the invocation that it ran for."""
    requested = _requested(event)
    return None if requested is None else requested[0]


@suppress_errors("binding")
def forget_request(event: AfterToolCallEvent) -> None:
    """Forget a tool that has ended and is not retried."""
    state = STATES.get(event.agent)
    if state is not None and not event.retry:
        state.requested.pop(_key(event), None)


def tool_stage(context: ExecuteToolContext, next_fn: MiddlewareNext[Any, Any]) -> Any:
    """Run a tool for the invocation that requested it. Pass untracked tools through."""
    requested = _requested(context)
    events = next_fn(context)
    return events if requested is None else _follow(events, *requested)


@suppress_errors("binding")
def _requested(of: Any) -> tuple[TaskScope, Context] | None:
    state: AgentState | None = STATES.get(of.agent)
    return None if state is None else state.requested.get(_key(of))


def _key(of: Any) -> tuple[int, str]:
    """Identify a tool call among those of other invocations, whose IDs may be the same.

    A waiting tool keeps its invocation state alive, so no other gets that identity. An entry left
    by an earlier one is replaced when the tool is requested.
    """
    return id(of.invocation_state), of.tool_use["toolUseId"]


async def _follow(
    events: Any, activity: TaskScope, at_request: Context
) -> AsyncGenerator[Any, None]:
    """Run a tool in the scope of the invocation that requested it.

    The scope is set only while the tool itself runs: some executors run it in the task that reads
    the agent's stream, and that task's other work does not belong to the tool.
    """
    scope = activity.owner
    activity.has_ended = False
    # The spans as well, if the tool runs in another context.
    spans = otel_context.get_current() if CURRENT.get() is scope else at_request
    spans = for_threads(scope, activity, spans) or spans
    try:
        while True:
            tokens = CURRENT.set(scope), TASK_SCOPE.set(activity)
            attached = otel_context.attach(spans)
            try:
                event = await anext(events)
            except StopAsyncIteration:
                break
            finally:
                spans = otel_context.get_current()
                otel_context.detach(attached)
                TASK_SCOPE.reset(tokens[1])
                CURRENT.reset(tokens[0])
            yield event
    except Exception:
        activity.has_ended = True
        raise
    else:  # not when it is broken off: a thread that it started may still run
        activity.has_ended = True
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
    scope = CURRENT.get()
    if isinstance(scope, Group):
        TASK_SCOPE.set(activity := TaskScope(scope, TASK_SCOPE.get()))
        # Never detached: the task ends with the node.
        spans = otel_context.get_current()
        otel_context.attach(for_threads(scope, activity, spans) or spans)


@suppress_errors("binding")
def end_node(event: AfterNodeCallEvent) -> None:
    """End a node, unless it was broken off: then its threads continue."""
    from strands.multiagent.base import Status

    activity, graph = TASK_SCOPE.get(), event.source
    # Strands fires the event in both cases, in a `finally`.
    if activity is not None and graph.nodes[event.node_id].execution_status != Status.EXECUTING:  # type: ignore[attr-defined]
        activity.has_ended = True
