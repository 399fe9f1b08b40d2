"""Base classes of the built-in observers, with one life cycle.

An application's observer is any function that accepts an event (`otel_limits.Observer`). Built-in
ones are created when otel-limits is enabled, or at their first event (`LazyObserver`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from otel_limits.core.events import Event, Observer


class BaseObserver:
    """Base class of observers. A failure is logged and counted and does not affect the agent."""

    component: str
    """Its name in logs and metrics."""

    subscribes_to: dict[type, Callable[[Any], None]]
    """Handlers by event type; other events are ignored."""

    def __call__(self, event: Event) -> None:
        """Handle one event if subscribed to its type."""
        handle = self.subscribes_to.get(type(event))
        if handle is not None:
            handle(event)

    def after_fork(self) -> None:
        """Reset inherited state in a forked child.

        Locks must be renewed: a thread that held one does not exist in the child.
        """

    def flush(self) -> None:
        """Send or store all received events, e.g. before the process ends."""

    def close(self) -> None:
        """Flush and release all resources; no events follow."""


T = TypeVar("T", bound=BaseObserver)


class LazyObserver(Generic[T]):
    """A placeholder that creates an observer at its first event.

    Importing an observer's dependencies may take longer than importing otel-limits.

    Args:
        component: The name of the observer in logs and metrics.
        make: Creates the observer, or logs why it cannot and returns `None`; called once.
        replace: Called with this placeholder and the observer that replaces it.

    Attributes:
        made: The observer, once created.
    """

    def __init__(
        self,
        component: str,
        make: Callable[[], T | None],
        replace: Callable[[Observer, Observer], None],
    ) -> None:
        """Create a placeholder."""
        self.component = component
        self.made: T | None = None
        self._make = make
        self._replace = replace
        self._tried = False
        self._lock = threading.RLock()

    def __call__(self, event: Event) -> None:
        """Create the observer, replace this placeholder with it and deliver the event."""
        observer = self.make()
        if observer is not None:
            self._replace(self, observer)  # a deeply recursive agent has no stack frame to spare
            observer(event)

    def make(self) -> T | None:
        """Return the observer, creating it at the first call."""
        with self._lock:
            if not self._tried:
                self._tried = True  # events published during creation must not create another
                try:
                    self.made = self._make()
                except BaseException:
                    self._tried = False
                    # Retried at the next event, e.g. if a file system was not mounted yet.
                    raise
        return self.made

    def make_if_free(self) -> T | None:
        """Return the observer as `make` does, or `None` while another thread creates it.

        For import hooks: the other thread may wait for the import that called the hook.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self.make()
        finally:
            self._lock.release()

    def after_fork(self) -> None:
        """Renew the lock, which another thread may have held, and reset the observer."""
        self._lock = threading.RLock()
        if self.made is not None:
            self.made.after_fork()

    def flush(self) -> None:
        """Flush the observer if it was created."""
        if self.made is not None:
            self.made.flush()

    def close(self) -> None:
        """Close the observer if it was created; it is no longer created afterwards."""
        with self._lock:
            self._tried = True
        if self.made is not None:
            self.made.close()
