"""The invocation, the tool and the model call that the current task or thread works for."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel_context

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.run import Group, Run, TaskScope

# --- the current invocation or group --------------------------------------------------------------

# Never in `invocation_state`, which Strands shares between the nodes of a graph.
CURRENT: Final[contextvars.ContextVar[Run | Group | None]] = contextvars.ContextVar(
    "otel_limits_run", default=None
)
"""The invocation that the current task works for: whatever it starts belongs to it."""


# Set only while the tool or the node runs. A reader that leaves a stream in the middle keeps the
# invocation as `CURRENT`, but what it does afterwards is not the work of a tool.
TASK_SCOPE: Final[contextvars.ContextVar[TaskScope | None]] = contextvars.ContextVar(
    "otel_limits_task_scope", default=None
)
"""The tool call or the node that the current task works for."""


# Tasks and `asyncio.to_thread` inherit Python's context variables, plain threads and pools do not.
# Those inherit OpenTelemetry's context, through its instrumentation of `threading`, which Strands
# enables.
FOR_THREADS: Final = otel_context.create_key("otel_limits")
"""Key in OpenTelemetry's context for what a thread that is started within it works for."""


@suppress_errors("runs")
def for_threads(owner: Run | Group, scope: TaskScope | None, context: Context) -> Context:
    """Return `context` with the owner and the scope of threads that are started within it."""
    return otel_context.set_value(FOR_THREADS, (owner, scope), context)


def current_scope() -> tuple[Run | Group | None, TaskScope | None]:
    """Return what the current task or thread works for, even if that has ended."""
    owner = CURRENT.get()
    if owner is not None:
        return owner, TASK_SCOPE.get()
    inherited = otel_context.get_value(FOR_THREADS)
    return inherited if isinstance(inherited, tuple) else (None, None)


def has_owner() -> bool:
    """Return whether the current task or thread works for anything."""
    return current_scope()[0] is not None


def current() -> Run | Group | None:
    """Return what the current task works for, or the nearest parent that is still active.

    A running tool or node counts as active. A thread can outlive an aborted invocation, and agents
    that it calls later must not get the budget of a tree a second time.
    """
    owner, scope = current_scope()
    while owner is not None and owner.finished and not _is_active(owner, scope):
        owner = owner.parent
    return owner


def _is_active(owner: Run | Group, scope: TaskScope | None) -> bool:
    """Return whether a scope is, or is within, one of `owner` that has not ended."""
    while scope is not None and scope.owner is not owner:
        scope = scope.outer
    return scope is not None and not scope.has_ended


def is_within(run: Run, scope: TaskScope | None) -> bool:
    """Return whether a tool call or node started an invocation, directly or not."""
    around: TaskScope | None = run.task_scope
    while around is not None and around is not scope:
        around = around.outer
    return around is not None


def leave_all() -> None:
    """Make the current task or thread work for nothing that was started before."""
    CURRENT.set(None)
    TASK_SCOPE.set(None)
    if otel_context.get_value(FOR_THREADS) is not None:
        otel_context.attach(otel_context.set_value(FOR_THREADS, None))


# --- the current model call -----------------------------------------------------------------------


class EnclosingCall:
    """A model call within which a provider may make further requests."""

    # No `__init__`: a RecursionError raised in it could not be caught here.
    run: Run | None = None
    call: InFlightCall | None = None
    model: object = None
    """The model that is called."""
    request: object = None
    """The binding's own state of the call."""


# Set only while the provider's code runs, never across a `yield`: an async generator has no own
# context (PEP 568 was never accepted), so the reader of the stream would be within the call.
ENCLOSING_CALL: Final[contextvars.ContextVar[EnclosingCall | None]] = contextvars.ContextVar(
    "otel_limits_enclosing_call", default=None
)
"""The call that the current task is within: a provider's own requests and spans belong to it."""


def enclosing_call_of(run: Run) -> InFlightCall | None:
    """Return the call of `run` that the current task is within, or was within when it began.

    The call may have ended: a client can keep its context and report the call later.
    """
    within = ENCLOSING_CALL.get()
    return within.call if within is not None and within.run is run else None
