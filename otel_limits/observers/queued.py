"""Base class of observers that do I/O: a bounded queue and a worker thread for each."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_limits.observers.protocol import BaseObserver
from otel_limits.runs.registry import LIVE

if TYPE_CHECKING:
    from otel_limits.core.events import Event

    Queue: TypeAlias = "queue.SimpleQueue[Event | threading.Event | None]"

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
