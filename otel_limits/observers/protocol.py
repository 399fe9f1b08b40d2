"""Base classes of the built-in observers, with one life cycle.

An observer of an application is any function that takes an event (`otel_limits.Observer`). Built-in
ones are created when otel-limits is enabled, or with their first event (`LazyObserver`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from otel_limits.core.events import Event, Observer


class BaseObserver:
    """One way to tell what happened. It may fail: that is logged, counted and never felt."""

    component: str
    """What its failures are counted under."""

    subscribes_to: dict[type, Callable[[Any], None]]
    """What takes the facts of each type; the other types are not for this observer."""

    def __call__(self, event: Event) -> None:
        """Take one event, if it is for this observer."""
        take = self.subscribes_to.get(type(event))
        if take is not None:
            take(event)

    def after_fork(self) -> None:
        """Leave to the parent what is the parent's, in a child that was just forked.

        No other thread runs in the child: a lock that one held would never be released.
        """

    def flush(self) -> None:
        """Send or store all received events, so that the end of the process loses none."""

    def close(self) -> None:
        """Write what is left and let go of everything; no event comes after this."""


T = TypeVar("T", bound=BaseObserver)


class LazyObserver(Generic[T]):
    """Stands for an observer until its first event, and goes through the same life cycle.

    The imports of an observer may cost more than all of ours.

    Args:
        component: What it is called in logs and metrics.
        make: Makes the observer, or says why not and returns `None`; called once.
        replace: Called with this and with what it stood for, to put the latter in its place.

    Attributes:
        made: The observer, once it was made.
    """

    def __init__(
        self,
        component: str,
        make: Callable[[], T | None],
        replace: Callable[[Observer, Observer], None],
    ) -> None:
        """Make nothing yet."""
        self.component = component
        self.made: T | None = None
        self._make = make
        self._replace = replace
        self._tried = False
        self._lock = threading.RLock()

    def __call__(self, event: Event) -> None:
        """Hand on one event."""
        observer = self.make()
        if observer is not None:
            self._replace(self, observer)  # a runaway agent has no frame to spare for us
            observer(event)

    def make(self) -> T | None:
        """Return the observer, made if it has not been."""
        with self._lock:
            if not self._tried:
                self._tried = True  # what is told while it is made must not make another
                try:
                    self.made = self._make()
                except BaseException:
                    self._tried = False
                    # Retried at the next event, e.g. if a file system was not mounted yet.
                    raise
        return self.made

    def after_fork(self) -> None:
        """Renew the lock, which another thread may have held, and pass it on."""
        self._lock = threading.RLock()
        if self.made is not None:
            self.made.after_fork()

    def flush(self) -> None:
        """Pass it on; where nothing was made nothing was told."""
        if self.made is not None:
            self.made.flush()

    def close(self) -> None:
        """Close the observer if it was made; none is made from now on."""
        with self._lock:
            self._tried = True
        if self.made is not None:
            self.made.close()
