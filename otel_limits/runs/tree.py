"""Budget trees: what started what, and for which invocation the present task works."""

from __future__ import annotations

import contextvars
import threading
import uuid
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel_context

from otel_limits.core.events import Invocation
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from otel_limits.core.policy import Policy
    from otel_limits.runs.budget import Budget
    from otel_limits.runs.run import Run


class Group:
    """What agents belong to that work together without one that started them, such as a graph."""

    __slots__ = ("finished", "invocation", "lock", "parent", "policy", "run", "trees")

    def __init__(
        self, name: str, policy: Policy, trees: tuple[Budget, ...], parent: Run | Group | None
    ) -> None:
        """Begin what those share, in these budget trees: the innermost is the first."""
        identity = uuid.uuid4().hex
        # The root is passed on, so that the rows of a tree are found by one id.
        root_id = parent.invocation.root_id if parent else identity
        self.invocation: Invocation = Invocation(agent=name, id=identity, root_id=root_id)
        self.policy = policy
        self.trees = trees
        self.parent = parent
        self.run: Run | None = None
        """What its members ask of models without an agent, once one does."""
        self.lock = threading.RLock()
        """Held while that begins, so that there is one, whichever thread asks first."""
        self.finished = False


class TaskScope:
    """A tool call or a node under way, as those see it who work for it: a task, and its threads."""

    __slots__ = ("has_ended", "outer", "owner")

    def __init__(self, scope: Run | Group, outer: TaskScope | None) -> None:
        """Begin one of `scope`, within that of another agent's if that asked."""
        self.owner = scope
        self.outer = outer
        self.has_ended = False
        """Stays false where it is broken off: nobody sees the end of a thread left behind."""


# Never in `invocation_state`, which Strands shares between the nodes of a graph.
CURRENT: Final[contextvars.ContextVar[Run | Group | None]] = contextvars.ContextVar(
    "otel_limits_run", default=None
)
"""The invocation that the present task works for: what it starts belongs to it."""


# Set only while the tool or the node runs. Whoever reads the stream, and leaves it in the middle,
# keeps the invocation as `CURRENT`; but what such a reader does then is not the work of a tool.
TASK_SCOPE: Final[contextvars.ContextVar[TaskScope | None]] = contextvars.ContextVar(
    "otel_limits_activity", default=None
)
"""The tool call or the node that the present task works for."""


# Tasks and `asyncio.to_thread` inherit Python's context variables, plain threads and pools do not.
# Those inherit OpenTelemetry's context, by its instrumentation of `threading`, which Strands
# switches on for itself.
FOR_THREADS: Final = otel_context.create_key("otel_limits")
"""Where OpenTelemetry's context says what a thread works for that is started within it."""


@suppress_errors("runs")
def for_threads(scope: Run | Group, activity: TaskScope | None, context: Context) -> Context:
    """Return `context`, in which whatever starts a thread works for these."""
    return otel_context.set_value(FOR_THREADS, (scope, activity), context)


def current_scope() -> tuple[Run | Group | None, TaskScope | None]:
    """Return what the present task or thread works for, be it over or not."""
    scope = CURRENT.get()
    if scope is not None:
        return scope, TASK_SCOPE.get()
    known = otel_context.get_value(FOR_THREADS)
    return known if isinstance(known, tuple) else (None, None)


def current() -> Run | Group | None:
    """Whatever the present task works for: what is over leaves it to what began it.

    A tool or a node belongs to what began it as long as it runs. A thread outlives an invocation
    that is broken off, and the agents that it goes on to ask must not get the budget of a tree once
    more.
    """
    scope, activity = current_scope()
    while scope is not None and scope.finished and not _is_active(scope, activity):
        scope = scope.parent
    return scope


def _is_active(scope: Run | Group, activity: TaskScope | None) -> bool:
    """Tell whether an activity is, or stands within, one of `scope` that has not ended."""
    while activity is not None and activity.owner is not scope:
        activity = activity.outer
    return activity is not None and not activity.has_ended
