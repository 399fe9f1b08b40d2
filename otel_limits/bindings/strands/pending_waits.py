"""Waits of an invocation for what may never come, and how they end when it is ended meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.internal_errors import report_suppressed, suppress_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATIENCE_SECONDS: Final = 0.25
"""How long what was interrupted may clean up, before that is interrupted as well."""

GRACE_SECONDS: Final = 0.02
"""How much later a leg is interrupted than what it waits for, which ends it better."""

WHY: Final = "otel-limits ends the invocation"
"""Message of our cancellation, for whoever reads a traceback, and to know it by in Python 3.10."""


class InvocationEndedError(Exception):
    """The invocation was ended while something was waited for."""


class PendingWaits:
    """What an invocation waits for, over all of its legs."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.is_cut = False
        """True when the invocation was ended: nothing is waited for any more."""
        self.is_asking = False
        """True from when a response is asked for until there is one, between two attempts too."""
        self.open: list[Wait] = []

    def cut(self) -> None:
        """End every wait, from any thread."""
        self.is_cut = True
        for wait in tuple(self.open):
            wait.interrupt()


class Wait:
    """A place that waits again and again, in whichever task reads the agent's stream.

    Its task is cancelled, and takes that back here, as `asyncio.timeout` does it. A task of its
    own for each wait would cost two switches per chunk, and would move the provider's code into
    another context.
    """

    # No `__init__`: a fault in it would come out where nobody could take it.
    _waits: PendingWaits | None = None
    """What it is among; nobody ends it before it is."""
    _is_leg = False
    _task: asyncio.Task[Any] | None = None
    """Who waits; `None` between two waits, when the code of the stream's reader runs."""
    _reader: asyncio.Task[Any] | None = None
    """Who waited last, and how often others had cancelled it before it began to."""
    _others = 0
    _cancellations = 0
    """How often we have cancelled it in the present wait."""

    @suppress_errors("binding")
    def join(self, waits: PendingWaits, *, is_leg: bool = False) -> None:
        """Be among `waits` from now on.

        Args:
            waits: Those of the invocation.
            is_leg: It waits for whatever a leg does. That is only interrupted while a response is
                asked for, and by nothing that ends it better: tools are waited for.
        """
        self._waits, self._is_leg = waits, is_leg
        waits.open.append(self)

    @suppress_errors("binding")
    def close(self) -> None:
        """Nothing will be waited for here any more."""
        if self._waits is not None and self in self._waits.open:
            self._waits.open.remove(self)

    async def next_of(self, events: AsyncIterator[Any]) -> Any:
        """Wait for the next event.

        Raises:
            CutOffError: The invocation was ended, before or meanwhile.
            StopAsyncIteration: There is none.
        """
        # Little is done here, as it is for each event of a stream.
        try:
            self._task = task = current_task()
            if task is not self._reader:
                self._reader, self._others = task, _cancellations_of(task)
            # Looked at when it is known who waits, as whoever cuts does both in the opposite order.
            is_late = self._waits is not None and self._waits.is_cut
            if is_late and self._is_leg:  # which still has to come to its end
                self.interrupt()
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)
            is_late = False
        if is_late and not self._is_leg:
            self._task = None
            raise InvocationEndedError
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
        """Tell whether it is by us that a wait has ended with an error."""
        return bool(self._uncancel()) and _is_ours(self._reader, self._others, error)

    def interrupt(self) -> None:
        """End the present wait, if there is one, from any thread."""
        task = self._task
        if task is None:
            return
        loop = task.get_loop()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(
                loop.call_later, GRACE_SECONDS if self._is_leg else 0, self._cancel
            )

    def _cancel(self) -> None:
        """Cancel the task, in its loop, and again while it does not end: some swallow it."""
        task, waits = self._task, self._waits
        if task is None or waits is None or (self._is_leg and not waits.is_asking):
            return
        if not (self._is_leg and any(each.is_waiting for each in waits.open if each is not self)):
            self._cancellations += 1
            task.cancel(WHY)
        task.get_loop().call_later(PATIENCE_SECONDS, self._cancel)

    @property
    def is_waiting(self) -> bool:
        """True while something is waited for."""
        return self._task is not None

    @suppress_errors("binding")
    def _uncancel(self) -> bool:
        """Take our cancellations back, which nobody else may see; False when there are none."""
        number, self._cancellations = self._cancellations, 0
        if sys.version_info >= (3, 11) and self._reader is not None:
            for _ in range(number):
                self._reader.uncancel()
        return number > 0


def current_task() -> asyncio.Task[Any] | None:
    """Return the task that runs; `None` where it is not asyncio that runs it."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _cancellations_of(task: asyncio.Task[Any] | None) -> int:
    """Return how often a task was cancelled and has not taken it back."""
    return task.cancelling() if sys.version_info >= (3, 11) and task is not None else 0


def _is_ours(task: asyncio.Task[Any] | None, others: int, error: BaseException) -> bool:
    """Tell whether a wait that we cancelled ended by that, and not by somebody's own cancellation.

    What a provider makes of ours, such as an error of a broken line, is ours as well.
    """
    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, Exception)
    if sys.version_info < (3, 11):
        return error.args == (WHY,)
    else:  # noqa: RET505  mypy knows then which of the two it checks
        return _cancellations_of(task) <= others
