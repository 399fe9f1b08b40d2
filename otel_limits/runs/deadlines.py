"""Ends invocations when their time is up: one shared thread, and none while nobody waits."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.runs.run import Run

LONGEST_WAIT_SECONDS: Final = 3600.0
"""How long the thread sleeps at most; no system waits for centuries at once."""

FEW: Final = 64
"""Cancelled deadlines that may stay in the queue, with all that they hold, until their time."""


class Deadlines:
    """A queue of moments, each with what is to be done then."""

    def __init__(self) -> None:
        """Wait for nothing, without a thread."""
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Deadlines that are waited for."""
        return len(self._waiting)

    def schedule(self, seconds: float, callback: Callable[[], None]) -> int:
        """Call `callback` in `seconds`, in the shared thread; returns what `cancel` takes."""
        number = next(self._numbers)
        with self._changed:
            # The number stands between, as two callbacks of the same moment cannot be compared.
            heapq.heappush(self._queue, (time.monotonic() + seconds, number, callback))
            self._waiting.add(number)
            # It may be due before the one that the thread sleeps for.
            self._changed.notify()
        self._start()
        return number

    def cancel(self, number: int) -> None:
        """Forget a deadline; the thread ends when it was the last."""
        with self._changed:
            # It stays in the queue: taking one out of the middle of a heap means making it anew,
            # and most invocations end long before their deadline.
            self._waiting.discard(number)
            self._sweep()
            self._changed.notify()

    def after_fork(self) -> None:
        """Forget everything in a child, where the thread does not exist."""
        # Also the condition: the thread may have held its lock at the moment of the fork.
        self.__init__()  # type: ignore[misc]

    @suppress_errors("deadlines")
    def _start(self) -> None:
        """Start the thread unless it runs; where that fails, the next deadline tries again."""
        with self._changed:
            if self._thread is None:
                # A daemon, so that a program is not kept from ending by a deadline an hour away.
                thread = threading.Thread(
                    target=self._work, name="otel-limits-deadlines", daemon=True
                )
                thread.start()
                self._thread = thread

    def _sweep(self) -> None:
        """Make the queue anew when most of it was cancelled, so that it holds no ended runs."""
        if len(self._queue) > 2 * len(self._waiting) + FEW:
            self._queue = [each for each in self._queue if each[1] in self._waiting]
            heapq.heapify(self._queue)

    def _work(self) -> None:
        while (callback := self._next()) is not None:
            suppress_errors("deadlines")(callback)()

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next callback; `None` when there is nothing left to wait for."""
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
            # Under the lock, as is the look at it in `_start`: who adds a deadline now either is
            # seen by this thread before it gets here, or starts the next one.
            self._thread = None
            return None


class TimeLimit:
    """The deadline of one invocation: its own, or that of a budget tree if that comes first."""

    def __init__(self, run: Run) -> None:
        """Wait for nothing yet."""
        self._run = run
        self._number: int | None = None
        self._told = -math.inf
        """Deadlines until this moment have been told as observed ones."""

    @suppress_errors("deadlines")
    def start(self) -> None:
        """Have the invocation cancelled when its time is up; again after a limit was extended."""
        self.cancel()
        run, now = self._run, self._run.services.now()
        # Without those that were told as observed: otherwise the thread would tell them for ever.
        ends = [
            budget.started + seconds
            for budget in run.budgets
            if (seconds := budget.policy.limits.max_duration_seconds) is not None
            and budget.started + seconds > self._told
        ]
        if ends and run.cancel is not None:
            self._number = run.services.deadlines.schedule(
                max(0.0, min(ends) - now), self._time_is_up
            )

    def cancel(self) -> None:
        """Wait no longer."""
        # Taken away first, as the callback of a deadline comes by here as well.
        number, self._number = self._number, None
        if number is not None:
            self._run.services.deadlines.cancel(number)

    @suppress_errors("deadlines")
    def _time_is_up(self) -> None:
        # Judged once more, as a human may have extended the limit after the thread took this
        # callback.
        run, verdict = self._run, self._run.check_limits()
        if verdict is None or run.cancel is None:
            return
        if verdict.action != "observe":
            run.cancel(verdict)
            return
        run.halt(verdict, "observed")  # it would have been ended now, whatever it waits for
        self._told = run.services.now()
        self.start()  # a tree around it may have a deadline that acts
