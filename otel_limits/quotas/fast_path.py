"""Lets one call at a time ask a shared store from its own event loop, with no thread in between.

A thread would have to be woken for the question, and the loop for the answer: that takes longer
than a store nearby does. Nothing here waits but the call itself, and only as one that awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.quotas.store import SilentError, StoreError

if TYPE_CHECKING:
    from otel_limits.quotas.store import Connection, Operation, Reply, SharedStore

REOPEN_SECONDS: Final = 1.0
"""How often a connection is opened at most."""


class FastPath:
    """A connection to the store that whoever comes first has for one question.

    Only a plain answer is taken from it. Whatever else happens, it is closed, and the question is
    for the courier, which knows what to do: an operation can be sent twice, as it has an id.

    Args:
        store: Where it leads; nobody else uses this one.
    """

    def __init__(self, store: SharedStore) -> None:
        """Open nothing yet."""
        self._store = store
        self._start_afresh()

    def _start_afresh(self) -> None:
        # Taken and put back as a whole, so that no two can have it: both are atomic.
        self._free: list[Connection] = []
        self._is_open = False
        self._opens_at = 0.0
        self._is_closed = False

    def open_soon(self) -> None:
        """Open a connection where there is none, in a thread, as this can take long."""
        if self._is_open or self._is_closed or time.monotonic() < self._opens_at:
            return
        self._opens_at = time.monotonic() + REOPEN_SECONDS
        self._is_open = True
        thread = threading.Thread(target=self._open, name="otel-limits-fast", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has none left: the courier can do it all
            self._lose()

    @suppress_errors("quotas")
    def _open(self) -> None:
        connection = None
        try:
            connection = self._store.connect()
        except StoreError:  # whether the store is lost is for the courier to say
            return
        finally:
            if connection is None:
                self._lose()
        self._put_back(self._free, connection)

    async def ask(self, operation: Operation, seconds: float) -> Reply | None:
        """Do an operation; `None` where the courier has to do it.

        Raises:
            SilentError: There was no answer in time.
        """
        # The same list to the end: in a child, what its parent had open is put where nobody looks.
        free = self._free
        try:
            connection = free.pop()
        except IndexError:  # somebody else has it, or there is none
            return None
        reply = None
        try:
            reply = await _exchange(connection, operation, seconds)
        except StoreError:
            return None
        except NotImplementedError:  # this loop cannot watch a connection, as that of Windows
            self._opens_at = math.inf
            return None
        finally:
            # What is still to come on it must not be taken for the answer to something else.
            if reply is None:
                connection.close()
                self._lose()
            else:
                self._put_back(free, connection)
        return reply

    def after_fork(self) -> None:
        """Leave what the parent has open alone, and open another in a child."""
        self._store.after_fork()
        self._start_afresh()

    def close(self) -> None:
        """Close the connection, at once or when its question has been answered."""
        self._is_closed = True
        with contextlib.suppress(IndexError):
            self._free.pop().close()
            self._is_open = False
        if not self._is_open:
            self._store.close()

    def _lose(self) -> None:
        self._is_open = False
        if self._is_closed:
            self._store.close()

    def _put_back(self, free: list[Connection], connection: Connection) -> None:
        free.append(connection)
        # Looked at afterwards, as `close` does both in the opposite order.
        if self._is_closed:
            self.close()


async def _exchange(connection: Connection, operation: Operation, seconds: float) -> Reply:
    """Send an operation and await its reply.

    Raises:
        SilentError: It did not come in time.
        StoreError: Something else came, or nothing ever will.
    """
    # First, so that the store works while we get ready for its answer.
    connection.send(operation)
    loop = asyncio.get_running_loop()
    woken, is_late = loop.create_future(), False

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def give_up() -> None:
        nonlocal is_late
        is_late = True
        wake()

    number = connection.fileno()
    loop.add_reader(number, wake)
    timer = loop.call_later(seconds, give_up)
    try:
        while True:
            await woken
            # Looked for also when it is late: it may be that only the loop was.
            reply = connection.receive()
            if reply is not None:
                return reply
            if is_late:
                raise SilentError("the store did not answer in time")
            woken = loop.create_future()
    finally:
        timer.cancel()
        if not loop.is_closed():  # as it is where its call was forgotten
            loop.remove_reader(number)
