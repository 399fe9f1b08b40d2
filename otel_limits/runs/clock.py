"""The clock of time limits and quota waits, and the callbacks that it calls at a given time."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.secrets import quote_value

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from typing_extensions import Self

LONGEST_WAIT_SECONDS: Final = 3600.0
"""Longest sleep of the thread; no system can wait for centuries."""

FEW: Final = 64
"""Canceled callbacks that may stay in the queue, with everything they reference."""

PATIENCE_SECONDS: Final = 60.0
"""Longest wait of `advance` for callbacks that are due."""

STEPS: Final = 2**20
"""Frozen time moves in steps of 1/STEPS seconds. Sums of them are exact, so that a limit of 0.3 s
is reached after 0.1 s and 0.2 s."""


class Clock:
    """Monotonic time, and a queue of callbacks with one thread, which runs while there are any.

    A test can freeze it, with `FakeTime`.
    """

    def __init__(self) -> None:
        """Create a clock without callbacks or a thread."""
        self._ahead = 0.0
        """Seconds by which it was advanced more than time has passed."""
        self._frozen: float | None = None
        """The time at which it is frozen."""
        self._goal = 0.0
        """The frozen time after all running calls of `advance`."""
        self._epoch = 0.0
        """The time of day at the frozen time 0."""
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None
        self._is_calling = False

    # --- time -------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time in monotonic seconds."""
        frozen = self._frozen
        return time.monotonic() + self._ahead if frozen is None else frozen

    def time(self) -> float:
        """Return the time of day, in seconds since 1970."""
        frozen = self._frozen
        return time.time() if frozen is None else self._epoch + frozen

    async def wait(self, future: asyncio.Future[Any], until: float) -> None:
        """Wait for `future` until a time."""
        import asyncio  # not needed by commands, and a tenth of their imports

        if self._frozen is None:
            await asyncio.wait([future], timeout=max(0.0, until - self.now()))
            return
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        number = self.schedule(until, partial(_end_in, loop, over))
        try:
            await asyncio.wait([future, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.cancel(number)

    def wait_for_notice(self, condition: threading.Condition, until: float) -> None:
        """Wait until `condition`, which is held, is notified, or until a time; `inf` for never."""
        if self._frozen is None or until == math.inf:
            condition.wait(None if until == math.inf else max(0.0, until - self.now()))
            return
        number = self.schedule(until, partial(_notify, condition))
        try:
            condition.wait()
        finally:
            self.cancel(number)

    # --- callbacks --------------------------------------------------------------------------------

    @property
    def scheduled(self) -> int:
        """The number of scheduled callbacks."""
        return len(self._waiting)

    def schedule(self, at: float, callback: Callable[[], None]) -> int:
        """Call `callback` in the clock's thread at a time; return the number for `cancel`."""
        number = next(self._numbers)
        with self._changed:
            # The number breaks ties: callbacks cannot be compared.
            heapq.heappush(self._queue, (at, number, callback))
            self._waiting.add(number)
            # It may be due before the one that the thread waits for.
            self._changed.notify_all()
            self._start()
        return number

    def cancel(self, number: int) -> None:
        """Cancel a callback; the thread ends when it was the last."""
        with self._changed:
            # It stays in the queue: removing it from the middle of a heap means rebuilding the
            # heap, and most invocations end long before their deadline.
            self._waiting.discard(number)
            # Rebuilt when most of it is canceled, so that it doesn't keep ended runs alive.
            if len(self._queue) > 2 * len(self._waiting) + FEW:
                self._queue = [each for each in self._queue if each[1] in self._waiting]
                heapq.heapify(self._queue)
            self._changed.notify_all()

    def after_fork(self) -> None:
        """Reset in a child process, where the thread does not exist."""
        # Replaces the condition, too: the thread may have held its lock during the fork.
        self._reset()

    @suppress_errors("deadlines")
    def _start(self) -> None:
        """Start the thread unless it runs; if that fails, the next callback tries again."""
        if self._thread is None:
            # A daemon, so that a deadline an hour away does not keep a program from exiting.
            thread = threading.Thread(target=self._work, name="otel-limits-deadlines", daemon=True)
            thread.start()
            self._thread = thread

    @suppress_errors("deadlines")
    def _work(self) -> None:
        try:
            while (callback := self._next()) is not None:
                suppress_errors("deadlines")(callback)()
        finally:
            with self._changed:
                # After an internal error: the next callback starts another thread.
                if self._thread is threading.current_thread():
                    self._thread = None

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next callback; `None` when nothing is scheduled."""
        with self._changed:
            self._is_calling = False
            self._changed.notify_all()
            while (first := self._first()) is not None:
                at, number, callback = first
                left = at - self.now()
                if left <= 0:
                    heapq.heappop(self._queue)
                    self._waiting.discard(number)
                    self._is_calling = True
                    return callback
                is_frozen = self._frozen is not None
                self._changed.wait(None if is_frozen else min(left, LONGEST_WAIT_SECONDS))
            # Under the lock, as is the check in `_start`: a callback added now either is seen
            # before this thread gets here, or starts the next thread.
            self._thread = None
            return None

    def _first(self) -> tuple[float, int, Callable[[], None]] | None:
        while self._queue and self._queue[0][1] not in self._waiting:
            heapq.heappop(self._queue)
        return self._queue[0] if self._queue else None

    # --- for tests --------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Freeze time.

        Raises:
            RuntimeError: It is frozen already.
        """
        with self._changed:
            if self._frozen is not None:
                raise RuntimeError("A FakeTime is active already. Use one at a time in a process.")
            now = float(math.ceil(self.now()))
            self._goal, self._epoch = now, time.time() - now
            self._frozen = now
            self._changed.notify_all()

    def unfreeze(self) -> None:
        """Let time pass again, from where it was frozen."""
        with self._changed:
            if self._frozen is not None:
                self._ahead = self._frozen - time.monotonic()
                self._frozen = None
                self._changed.notify_all()

    def advance(self, seconds: float) -> None:
        """Move frozen time, and wait for each callback that becomes due, in their order.

        Raises:
            RuntimeError: Time is not frozen.
            TimeoutError: A callback did not return within a minute.
        """
        with self._changed:
            self._goal += math.ceil(seconds * STEPS) / STEPS
            goal = self._goal
            while True:
                if self._frozen is None:
                    raise RuntimeError("FakeTime is not active. Use it in a `with` statement.")
                first = self._first()
                due = goal if first is None else min(first[0], goal)
                self._frozen = max(self._frozen, due)
                # A callback that advances the time cannot wait for itself to return.
                if threading.current_thread() is self._thread:
                    self._frozen = max(self._frozen, goal)
                    return
                self._changed.notify_all()
                if not self._changed.wait_for(self._is_quiet, PATIENCE_SECONDS):
                    raise TimeoutError("A time limit's callback did not return in a minute.")
                if self.now() >= goal:
                    return

    def _is_quiet(self) -> bool:
        """Return whether everything that is due was called."""
        # Without a thread, as none could be started, nothing is ever called.
        if self._thread is None:
            return True
        first = self._first()
        return not self._is_calling and (first is None or first[0] > self.now())


def _end_in(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_end, future)


def _notify(condition: threading.Condition) -> None:
    with condition:
        condition.notify_all()


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


CLOCK: Final = Clock()
"""The clock of this process."""


MOST_SECONDS: Final = 1_000_000_000
"""The longest step of a test."""


class FakeTime:
    """Time that a test advances, for time limits and quota waits.

    with FakeTime() as time:
        ...  # start an agent with `max_duration_seconds=30`, in another thread or task
        time.advance(30)

    In this process, it moves `max_duration_seconds`, durations of invocations, waits for a quota
    and for its store, windows of quotas in memory, checks of the policy file, and the pauses of a
    ledger after a failure. It does not move timestamps in a ledger, a shared quota store, or the
    sleeps of a program and of its framework.

    Time is frozen between two calls of `advance`. Only one can be active in a process. Afterwards,
    time passes again.
    """

    def __enter__(self) -> Self:
        """Freeze time.

        Raises:
            RuntimeError: Another one is active.
        """
        CLOCK.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        """Let time pass again."""
        CLOCK.unfreeze()

    def advance(self, seconds: float) -> None:
        """Move the time, from any thread, e.g. from a tool or a model that takes this long.

        When it returns, each time limit that was reached has been applied, in order. An agent that
        is halted by it ends on its own, so await its end.

        Args:
            seconds: How far, in seconds: from 0 to a billion, which is 31 years.

        Raises:
            ValueError: It is anything else.
            RuntimeError: It was called outside the `with` statement.
        """
        # Beyond, floats of seconds become too coarse for time limits.
        given: object = seconds  # a test without types may give a text
        if not isinstance(given, (int, float)) or not 0 <= given <= MOST_SECONDS:
            raise ValueError(
                f"advance() needs seconds from 0 to {MOST_SECONDS:,}, got {quote_value(seconds)}."
            )
        CLOCK.advance(seconds)
