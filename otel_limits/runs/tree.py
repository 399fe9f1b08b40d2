"""Budget trees: what started what, and for which invocation the present task works."""

from __future__ import annotations

import contextvars
import threading
import uuid
from typing import TYPE_CHECKING, Final

from otel_limits.core.facts import Invocation

if TYPE_CHECKING:
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


# Tasks and `asyncio.to_thread` inherit it, a plain `threading.Thread` does not. Never in
# `invocation_state`, which Strands shares between the nodes of a graph.
CURRENT: Final[contextvars.ContextVar[Run | Group | None]] = contextvars.ContextVar(
    "otel_limits_run", default=None
)
"""The invocation that the present task works for: what it starts belongs to it."""


def current() -> Run | Group | None:
    """Whatever live thing the present task works for: what is over leaves it to what began it."""
    scope = CURRENT.get()
    while scope is not None and scope.finished:
        scope = scope.parent
    return scope
