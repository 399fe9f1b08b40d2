"""Makes an observer when there is something to observe: its imports cost more than all of ours."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from otel_limits.core.facts import Fact, Observer

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T", bound=Observer)


class LazyObserver(Generic[T]):
    """Stands for an observer until its first fact.

    Args:
        component: What it is called in logs and metrics.
        make: Makes it, or says why not and returns `None`; called once.
        replace: Called with this and with what it stood for, to put the latter in its place.
    """

    def __init__(
        self,
        component: str,
        make: Callable[[], T | None],
        replace: Callable[[Observer, Observer], None],
    ) -> None:
        """Make nothing yet."""
        self.component = component
        self._replace = replace
        self._make = make
        self._made: T | None = None
        self._tried = False
        self._lock = threading.RLock()

    def __call__(self, fact: Fact) -> None:
        """Hand on one fact."""
        observer = self.now()
        if observer is not None:
            self._replace(self, observer)  # a runaway agent has no frame to spare for us
            observer(fact)

    def now(self) -> T | None:
        """Return the observer, made if it has not been."""
        with self._lock:
            if not self._tried:
                self._tried = True  # what is told while it is made must not make another
                try:
                    self._made = self._make()
                except BaseException:
                    self._tried = False
                    raise
        return self._made

    def made(self) -> T | None:
        """Return the observer if it was made."""
        return self._made

    def close(self) -> None:
        """Make none from now on, and close the one that was made."""
        with self._lock:
            self._tried = True
        if (close := getattr(self._made, "close", None)) is not None:
            close()

    def after_fork(self) -> None:
        """Replace the lock in a forked child, as another thread may have held it."""
        self._lock = threading.RLock()
        if (after_fork := getattr(self._made, "after_fork", None)) is not None:
            after_fork()
