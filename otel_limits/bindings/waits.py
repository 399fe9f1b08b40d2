"""Waits of an invocation: interrupted when it is ended, or in a thread that may block."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from otel_limits.bindings.gateways import chain_of
from otel_limits.core.internal_errors import report_suppressed, suppress_errors
from otel_limits.runs.quota_gate import BLOCKED_LOOPS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable

T = TypeVar("T")

PATIENCE_SECONDS: Final = 0.25
"""Time for clean-up after an interruption, before that is interrupted, too."""

WHY: Final = "otel-limits ends the invocation"
"""Message of our cancellation, for tracebacks, and to recognize it in Python 3.10."""


class InvocationEndedError(Exception):
    """The invocation was ended during a wait."""


class EndedBeforeError(InvocationEndedError):
    """It was ended before the wait, which has not begun."""


class PendingWaits:
    """The waits of an invocation, over all of its legs."""

    def __init__(self) -> None:
        """Create an empty set of waits."""
        self.is_cut = False
        """True once the invocation was ended: there are no further waits."""
        self.is_requesting = False
        """True from when a response is requested until it arrives, including between attempts."""
        self.open: list[Wait] = []

    def cut(self) -> None:
        """End every wait, from any thread."""
        self.is_cut = True
        for wait in tuple(self.open):
            wait.interrupt()


class Wait:
    """Repeated waits for the next event, in the task that reads the agent's stream.

    To interrupt a wait, the task is cancelled, and uncancelled here, like in `asyncio.timeout`. A
    separate task for each wait would cost two switches per chunk, and would move the provider's
    code into another context.
    """

    # No `__init__`: an error in it could not be suppressed.
    _joined: tuple[PendingWaits, ...] = ()
    """The waits of the invocations that end it: after a hand-off, those of two agents."""
    _task: asyncio.Task[Any] | None = None
    """The waiting task; `None` between two waits, when the stream's reader runs."""
    _reader: asyncio.Task[Any] | None = None
    """The task that waited last, and how often others had cancelled it before."""
    _others = 0
    _cancellations = 0
    """How often we have cancelled the task in the current wait."""

    grace_seconds: ClassVar[float] = 0
    """Delay before it is interrupted."""

    def may_begin_late(self) -> bool:
        """Return whether it may begin although the invocation was ended."""
        return False

    def may_be_cut(self, waits: PendingWaits) -> bool:  # noqa: ARG002  not every wait asks
        """Return whether it can be interrupted now, or later in the same wait."""
        return True

    def is_innermost(self, waits: PendingWaits) -> bool:  # noqa: ARG002
        """Return whether it is interrupted itself, and not a wait within it."""
        return True

    @suppress_errors("binding")
    def join(self, waits: PendingWaits) -> None:
        """Join the waits of an invocation, in addition to those of another one."""
        self._joined += (waits,)
        waits.open.append(self)

    @suppress_errors("binding")
    def close(self) -> None:
        """Leave the waits of each invocation."""
        for each in self._joined:
            if self in each.open:
                each.open.remove(self)

    async def next_of(self, events: AsyncIterator[Any]) -> Any:
        """Wait for the next event.

        Raises:
            InvocationEndedError: The invocation was ended during the wait.
            EndedBeforeError: It was ended before.
            StopAsyncIteration: There is no further event.
        """
        # Kept short, as this runs for each event of a stream.
        try:
            try:
                self._task = task = asyncio.current_task()
            except RuntimeError:  # outside of asyncio
                self._task = task = None
            if task is not self._reader:
                self._reader, self._others = task, _cancellations_of(task)
            # Read after the task is set, as `cut` writes and reads in the opposite order.
            is_late = any(each.is_cut for each in self._joined) and not self.may_begin_late()
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)
            is_late = False
        if is_late:
            self._task = None
            raise EndedBeforeError
        try:
            event = await anext(events)
        except BaseException as error:
            if self._cancellations and self._is_cut_off(error):
                raise InvocationEndedError from error
            raise
        finally:
            self._task = None
        if self._cancellations and self._uncancel():
            raise InvocationEndedError
        return event

    @suppress_errors("binding")
    def _is_cut_off(self, error: BaseException) -> bool:
        """Return whether a wait ended with an error because of our cancellation."""
        return bool(self._uncancel()) and _is_ours(self._reader, self._others, error)

    def interrupt(self) -> None:
        """End the current wait, if any, from any thread."""
        task = self._task
        if task is None:
            return
        loop = task.get_loop()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(loop.call_later, self.grace_seconds, self._cancel)

    def _cancel(self) -> None:
        """Cancel the task in its loop, repeatedly, as some code swallows cancellations."""
        task = self._task
        if task is None or not all(map(self.may_be_cut, self._joined)):
            return
        if all(map(self.is_innermost, self._joined)):
            self._cancellations += 1
            task.cancel(WHY)
        task.get_loop().call_later(PATIENCE_SECONDS, self._cancel)

    @property
    def is_waiting(self) -> bool:
        """True during a wait."""
        return self._task is not None

    @suppress_errors("binding")
    def _uncancel(self) -> bool:
        """Undo our cancellations, which must stay invisible. Return whether there were any."""
        number, self._cancellations = self._cancellations, 0
        if sys.version_info >= (3, 11) and self._reader is not None:
            for _ in range(number):
                self._reader.uncancel()
        return number > 0


def _cancellations_of(task: asyncio.Task[Any] | None) -> int:
    """Return the number of a task's pending cancellations."""
    return task.cancelling() if sys.version_info >= (3, 11) and task is not None else 0


def _is_ours(task: asyncio.Task[Any] | None, others: int, error: BaseException) -> bool:
    """Return whether a wait ended by our cancellation, not by another one.

    Any other error, such as a connection error of the provider, follows from our cancellation.
    """
    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, Exception)
    if sys.version_info < (3, 11):
        # `asyncio.gather` raises another one, without the message.
        return any(each.args == (WHY,) for each in chain_of(error))
    else:  # noqa: RET505  so that mypy checks one branch
        return _cancellations_of(task) <= others


# --- in a thread that may block -------------------------------------------------------------------


@suppress_errors("quotas")
def wait_for(awaitable: Awaitable[T]) -> T:
    """Return the result of an awaitable, also in a thread whose event loop is running.

    Such a thread is blocked in any case, by the synchronous call of the application. `None` after
    an error, e.g. if no further thread can be started.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return _run(awaitable)
    context, future = contextvars.copy_context(), Future[T]()

    def run() -> None:
        try:
            future.set_result(context.run(_run, awaitable))
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            future.set_exception(error)

    # Not a pool, which takes no work once the main thread has ended, while others may continue.
    thread = threading.Thread(target=run, name="otel-limits-quota", daemon=True)
    BLOCKED_LOOPS.add(loop)
    try:
        thread.start()
        try:
            return future.result()
        finally:
            thread.join()
    finally:
        BLOCKED_LOOPS.discard(loop)


def _run(awaitable: Awaitable[T]) -> T:
    """Run an awaitable in a separate event loop, as `asyncio.run` does.

    Afterwards, that leaves a thread without a current event loop, which an application may use.
    """
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_result_of(awaitable))
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(_end_of(left))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()


async def _end_of(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _result_of(awaitable: Awaitable[T]) -> T:
    return await awaitable
