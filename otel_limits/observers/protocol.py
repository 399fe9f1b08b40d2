"""Base classes of observers, with one life cycle: immediate ones, and those that do I/O.

An application's observer is any function that accepts an event (`otel_limits.Observer`). Built-in
ones are created when otel-limits is enabled, or at their first event (`LazyObserver`).
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from otel_limits.runs.registry import LIVE

if TYPE_CHECKING:
    from otel_limits.core.events import Event, Observer

    Queue: TypeAlias = "queue.SimpleQueue[Event | threading.Event | None]"


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


# --- observers that do I/O: a bounded queue and a worker thread for each --------------------------

MAX_QUEUED: Final = 10_000
FLUSH_SECONDS: Final = 5.0


class QueuedObserver(BaseObserver):
    """Handles events in a dedicated thread, in order.

    A full queue drops new events, so that a slow disk or network neither delays an agent nor fills
    the memory. Events that are dropped, or whose handler fails, are logged and counted.

    Args:
        handlers: The function that handles each type of event.
        max_queued: The size of the queue.
    """

    def __init__(
        self, handlers: Mapping[type, Callable[[Any], object]], max_queued: int = MAX_QUEUED
    ) -> None:
        """Subscribe; the thread starts with the first event."""
        self._handlers = handlers
        self._max_queued = max_queued
        self.subscribes_to = dict.fromkeys(handlers, self._enqueue)
        self.after_fork()

    def after_fork(self) -> None:
        """Start with an empty queue: the parent handles what it has queued."""
        # Reentrant, as is the lock: the garbage collector can close a forgotten coroutine at any
        # moment, which ends an invocation and publishes that.
        self._queue: Queue = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def flush(self) -> None:
        """Wait until every queued event has been handled, for 5 seconds at most."""
        if self._thread is None:
            return
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Handle what is queued and end the thread, in 5 seconds at most."""
        atexit.unregister(self.flush)
        with self._lock:  # not before it has started
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(FLUSH_SECONDS)

    def _enqueue(self, event: Event) -> None:
        if self._thread is None:
            self._start()
        if self._queue.qsize() >= self._max_queued:
            # Reported by the dispatcher, as any failure of an observer.
            raise RuntimeError(f"queue of {self._max_queued} events is full")
        self._queue.put(event)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(
                    target=self._work,
                    args=(self._queue,),
                    name=f"otel-limits-{self.component}",
                    daemon=True,
                )
                self._thread = thread  # before it starts, or an event in between starts another
                try:
                    thread.start()
                except BaseException:
                    self._thread = None
                    raise
                atexit.register(self.flush)

    def _work(self, waiting: Queue) -> None:
        while (item := waiting.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._handlers[type(item)](item)
            except Exception as error:  # noqa: BLE001  any failure, as in the dispatcher
                LIVE.observers.report_dropped_event(self, item, error)
