"""Makes an observer when there is something to observe: its imports cost more than all of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from otel_limits.observers.protocol import OwnObserver

if TYPE_CHECKING:
    from otel_limits.core.facts import Fact, Observer

T = TypeVar("T", bound=OwnObserver)


class LazyObserver(Generic[T]):
    """Stands for an observer until its first fact, and goes through the same life cycle.

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

    def __call__(self, fact: Fact) -> None:
        """Hand on one fact."""
        observer = self.make()
        if observer is not None:
            self._replace(self, observer)  # a runaway agent has no frame to spare for us
            observer(fact)

    def make(self) -> T | None:
        """Return the observer, made if it has not been."""
        with self._lock:
            if not self._tried:
                self._tried = True  # what is told while it is made must not make another
                try:
                    self.made = self._make()
                except BaseException:
                    self._tried = False
                    raise
        return self.made

    def after_fork(self) -> None:
        """Renew the lock, which another thread may have held, and pass it on."""
        self._lock = threading.RLock()
        if self.made is not None:
            self.made.after_fork()

    def close(self) -> None:
        """Close the observer if it was made; none is made from now on."""
        with self._lock:
            self._tried = True
        if self.made is not None:
            self.made.close()
