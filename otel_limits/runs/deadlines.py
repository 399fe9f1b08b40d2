"""Scheduled callbacks in one shared thread, which runs only while something is scheduled."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_WAIT_SECONDS: Final = 3600.0
"""Longest sleep of the thread; no system can wait for centuries."""

FEW: Final = 64
"""Canceled deadlines that may stay in the queue, with everything they reference."""


class Deadlines:
    """A queue of deadlines, each with its callback."""

    def __init__(self) -> None:
        """Create an empty queue, without a thread."""
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Return the number of pending deadlines."""
        return len(self._waiting)

    def schedule(self, seconds: float, callback: Callable[[], None]) -> int:
        """Call `callback` in `seconds` in the shared thread; return the number for `cancel`."""
        number = next(self._numbers)
        with self._changed:
            # The number breaks ties: callbacks cannot be compared.
            heapq.heappush(self._queue, (time.monotonic() + seconds, number, callback))
            self._waiting.add(number)
            # It may be due before the one that the thread waits for.
            self._changed.notify()
        self._start()
        return number

    def cancel(self, number: int) -> None:
        """Cancel a deadline; the thread ends when it was the last."""
        with self._changed:
            # It stays in the queue: removing it from the middle of a heap means rebuilding the
            # heap, and most invocations end long before their deadline.
            self._waiting.discard(number)
            # Rebuilt when most of it is canceled, so that it doesn't keep ended runs alive.
            if len(self._queue) > 2 * len(self._waiting) + FEW:
                self._queue = [each for each in self._queue if each[1] in self._waiting]
                heapq.heapify(self._queue)
            self._changed.notify()

    def after_fork(self) -> None:
        """Reset in a child process, where the thread does not exist."""
        # Replaces the condition, too: the thread may have held its lock during the fork.
        self.__init__()  # type: ignore[misc]

    @suppress_errors("deadlines")
    def _start(self) -> None:
        """Start the thread unless it runs; if that fails, the next deadline tries again."""
        with self._changed:
            if self._thread is None:
                # A daemon, so that a deadline an hour away does not keep a program from exiting.
                thread = threading.Thread(
                    target=self._work, name="otel-limits-deadlines", daemon=True
                )
                thread.start()
                self._thread = thread

    def _work(self) -> None:
        while (callback := self._next()) is not None:
            suppress_errors("deadlines")(callback)()

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next callback; `None` when nothing is scheduled."""
        with self._changed:
            while self._queue:
                when, number, callback = self._queue[0]
                left = when - time.monotonic()
                if number not in self._waiting:
                    heapq.heappop(self._queue)
                elif left <= 0:
                    heapq.heappop(self._queue)
                    self._waiting.discard(number)
                    return callback
                else:
                    self._changed.wait(min(left, LONGEST_WAIT_SECONDS))
            # Under the lock, as is the check in `_start`: a deadline added now either is seen
            # before this thread gets here, or starts the next thread.
            self._thread = None
            return None
