"""Queues of model calls waiting for quota: first come, first served, or in turns.

A queued call holds no reservation. Only the first of a queue tries again, when woken: a thousand
waiters are a thousand entries in a table, and no load on the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.quota_gate import BLOCKED_LOOPS

if TYPE_CHECKING:
    from otel_limits.runs.clock import Clock

LOOK_SECONDS: Final = 0.25
"""How often waiting calls are checked for cancellation."""

QueueKey: TypeAlias = tuple[str, str]
"""Quota and key ID. Without the window: a queue continues into the next one."""


class Waiter:
    """One call that requests quota, or waits to retry.

    Args:
        clock: The clock of the process.
        number: Earlier calls have lower numbers.
        queues: Queues in which it may wait → with whom it shares its turns there.
        is_cancelled: Returns whether the call was cancelled.
    """

    def __init__(
        self,
        clock: Clock,
        number: int,
        queues: Mapping[QueueKey, str],
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Create a waiter for the running event loop."""
        self._clock = clock
        self.number = number
        self.is_cancelled = is_cancelled
        self.queues = queues
        self.lacks: frozenset[QueueKey] = frozenset()
        """Queues in which it waits; empty during its first attempt."""
        self._loop = asyncio.get_running_loop()
        self._is_woken = False
        self._sleep: asyncio.Future[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its event loop runs, and is not blocked: otherwise it cannot try for now."""
        return self._loop.is_running() and self._loop not in BLOCKED_LOOPS

    @property
    def is_woken(self) -> bool:
        """Whether it was woken since it tried last."""
        return self._is_woken

    def wake(self) -> None:
        """Let it try, from any thread. If it is trying now, it tries again when refused."""
        self._is_woken = True
        sleep = self._sleep
        if sleep is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_end, sleep)

    async def sleep(self, until: float) -> bool:
        """Wait until woken, or until a time; return whether it was woken."""
        # Created before `_is_woken` is read: `wake` does the two in the opposite order.
        self._sleep = self._loop.create_future()
        if not self._is_woken:
            await self._clock.wait(self._sleep, until)
        self._sleep = None
        is_woken, self._is_woken = self._is_woken, False
        return is_woken


class Ending:
    """A block of a coroutine, at whose end a function is called.

    It is called later if the garbage collector closes the coroutine. That happens at any moment,
    also in a thread that holds a lock, where the function could wait forever for another one.

    Args:
        end: The function.
        abandoned: Receives it if it is called later.
    """

    def __init__(self, end: Callable[[], None], abandoned: deque[Callable[[], None]]) -> None:
        """Create the block."""
        self._end = end
        self._abandoned = abandoned

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call the function, or leave that to others."""
        if kind is GeneratorExit:
            self._abandoned.append(self._end)
        else:
            self._end()


class WaitQueues:
    """The queues of a process. A new call joins the back of each of its queues.

    Args:
        clock: The clock of the process.
    """

    def __init__(self, clock: Clock) -> None:
        """Create empty queues."""
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        """Empty all queues, in a child: their calls wait in the parent."""
        # Reentrant, as the garbage collector ends an invocation at any moment, which settles calls.
        self._lock = threading.RLock()
        self._abandoned: deque[Callable[[], None]] = deque()
        """The ends of coroutines that the garbage collector has closed."""
        self._numbers = itertools.count()
        self._waiters: dict[QueueKey, list[tuple[int, int, Waiter]]] = {}
        """The turn and number of each waiter, in the order in which they are served."""
        self._timer: int | None = None
        self.is_closed = False

    def ending(self, end: Callable[[], None]) -> Ending:
        """Return a block of a coroutine at whose end `end` is called."""
        return Ending(end, self._abandoned)

    @suppress_errors("quotas")
    def end_abandoned(self) -> None:
        """End what is left of coroutines that the garbage collector has closed."""
        while self._abandoned:
            try:
                end = self._abandoned.popleft()
            except IndexError:  # another thread has taken the last one
                return
            end()

    def join(self, queues: Mapping[QueueKey, str], is_cancelled: Callable[[], bool]) -> Waiter:
        """Join each queue, behind others of the same sharer; wait if any is non-empty."""
        with self._lock:
            waiter = Waiter(self.clock, next(self._numbers), queues, is_cancelled)
            taken = (queue for queue in waiter.queues if self._first(queue) is not None)
            waiter.lacks = frozenset(taken)
            for queue, sharer in queues.items():
                turn = self._turn(queue, sharer)
                insort(self._waiters.setdefault(queue, []), (turn, waiter.number, waiter))
            self._look_later()
            return waiter

    def requeue(self, waiter: Waiter, queues: Collection[QueueKey]) -> None:
        """Move to these queues, leaving all others."""
        with self._lock:
            former, waiter.lacks = waiter.lacks, frozenset(queues)
            self._wake_first_of(former - waiter.lacks)
            self._look_later()

    def leave(self, waiter: Waiter) -> None:
        """Leave all queues and wake the next waiter."""
        with self._lock:
            # Those behind it have nothing to gain where others are before them.
            led = [queue for queue in waiter.lacks if self._first(queue) is waiter]
            waiter.lacks = frozenset()
            for queue in waiter.queues:
                others = [each for each in self._waiters.get(queue, ()) if each[2] is not waiter]
                if others:
                    self._waiters[queue] = others
                else:
                    self._waiters.pop(queue, None)
            self._wake_first_of(led)

    def notify_freed(self, queue: QueueKey | None) -> None:
        """Wake the first waiter of a queue, or of every queue if `queue` is `None`."""
        with self._lock:
            self._wake_first_of(tuple(self._waiters) if queue is None else (queue,))

    def notify_next(self, waiter: Waiter) -> None:
        """Wake the first waiter of each queue in which `waiter` waits."""
        with self._lock:
            self._wake_first_of(tuple(waiter.lacks))

    def close(self) -> None:
        """Wake every waiter and stop queueing."""
        with self._lock:
            self.is_closed = True
            timer, self._timer = self._timer, None
            for queue in tuple(self._waiters):
                for waiter in self._in_order(queue):
                    waiter.wake()
        if timer is not None:
            self.clock.cancel(timer)

    @suppress_errors("quotas")
    def _look(self) -> None:
        """Wake cancelled waiters: a cancel signal has no callback."""
        self.end_abandoned()
        with self._lock:
            self._timer = None
            for waiter in self._sleepers():
                if waiter.is_cancelled():
                    waiter.wake()
            self._look_later()

    # --- under the lock ---------------------------------------------------------------------------

    def _sleepers(self) -> set[Waiter]:
        return {
            each for queue in tuple(self._waiters) for each in self._in_order(queue) if each.lacks
        }

    def _turn(self, queue: QueueKey, sharer: str) -> int:
        """Return the turn of a new waiter: the one after the last of its sharer."""
        waiters = self._waiters.get(queue, [])
        own = (turn for turn, _, each in reversed(waiters) if each.queues[queue] == sharer)
        # A sharer without a waiter takes part in the current turn.
        current = waiters[0][0] if waiters else 0
        return next(own, current - 1) + 1

    def _in_order(self, queue: QueueKey) -> tuple[Waiter, ...]:
        # A copy: the garbage collector may remove one in a loop.
        return tuple(waiter for _, _, waiter in tuple(self._waiters.get(queue, ())))

    def _look_later(self) -> None:
        if self._timer is None and not self.is_closed and self._sleepers():
            self._timer = self.clock.schedule(self.clock.now() + LOOK_SECONDS, self._look)

    def _first(self, queue: QueueKey) -> Waiter | None:
        waiters = tuple(self._waiters.get(queue, ()))
        return next((each for _, _, each in waiters if queue in each.lacks and each.is_alive), None)

    def _wake_first_of(self, queues: Collection[QueueKey]) -> None:
        for queue in queues:
            self._wake_first(queue)

    def _wake_first(self, queue: QueueKey) -> None:
        for waiter in self._in_order(queue):
            if not waiter.lacks:
                # It asks for the first time, and its refusal may be on the way already.
                waiter.wake()
            elif queue in waiter.lacks and waiter.is_alive:
                if all(self._first(each) is waiter for each in waiter.lacks):
                    waiter.wake()
                    return
                # It still waits in another queue and must not block this one. Once it is first
                # there, it requests all of its counts and can rejoin this queue at its position.
                waiter.lacks -= {queue}


def _end(sleep: asyncio.Future[None]) -> None:
    if not sleep.done():
        sleep.set_result(None)
