"""Budget trees: what started what, and for which invocation the present task works."""

from __future__ import annotations

import contextvars
import uuid
from typing import TYPE_CHECKING, Final

from otel_limits.core.facts import Invocation
from otel_limits.core.usage import Tally

if TYPE_CHECKING:
    from otel_limits.core.limits import Limits
    from otel_limits.runs.run import Run


class Tree:
    """What an invocation and everything that it started have used together."""

    __slots__ = ("limits", "started", "tally")

    def __init__(self, limits: Limits, started: float) -> None:
        """Begin with nothing used."""
        self.limits = limits
        self.started = started
        self.tally = Tally()


class Group:
    """What agents belong to that work together without one that started them, such as a graph."""

    __slots__ = ("finished", "invocation", "tree")

    def __init__(self, name: str, tree: Tree | None, parent: Run | Group | None) -> None:
        """Begin a tree, or a branch of the parent's."""
        identity = uuid.uuid4().hex
        root_id = parent.invocation.root_id if parent else identity
        self.invocation: Invocation = Invocation(agent=name, id=identity, root_id=root_id)
        self.tree = tree
        self.finished = False


CURRENT: Final[contextvars.ContextVar[Run | Group | None]] = contextvars.ContextVar(
    "otel_limits_run", default=None
)
"""The invocation that the present task works for: what it starts belongs to it."""


def current() -> Run | Group | None:
    """Whatever live thing the present task works for."""
    scope = CURRENT.get()
    return None if scope is None or scope.finished else scope
