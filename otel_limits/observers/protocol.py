"""What every observer of ours is: told facts, and taken through one life cycle.

An application's observer is any function that takes a fact (`otel_limits.Observer`). Ours are made
when otel-limits is switched on, or with the first fact (`LazyObserver`), and let go in two ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from otel_limits.core.facts import Fact


class OwnObserver:
    """One way to tell what happened. It may fail: that is logged, counted and never felt."""

    component: str
    """What its failures are counted under."""

    subscribes_to: dict[type, Callable[[Any], None]]
    """What takes the facts of each type; the other types are not for this observer."""

    def __call__(self, fact: Fact) -> None:
        """Take one fact, if it is for this observer."""
        take = self.subscribes_to.get(type(fact))
        if take is not None:
            take(fact)

    def after_fork(self) -> None:
        """Leave to the parent what is the parent's, in a child that was just forked.

        No other thread runs in the child: a lock that one held would never be released.
        """

    def close(self) -> None:
        """Write what is left and let go of everything; no fact comes after this."""
