"""Executes store operations: inline in memory, or in a worker thread over a network.

The thread sends queued operations in batches. During an outage it fails operations immediately,
buffers settlements and checks once a second whether the store has recovered: waiting calls lose one
timeout, and later calls lose no time.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.wording import pluralize
from otel_limits.quotas.fallback import look_seconds
from otel_limits.quotas.known_counts import KnownCounts
from otel_limits.quotas.store import (
    CountConversation,
    Diagnoses,
    KnownCount,
    Operation,
    PermanentStoreError,
    QuotaStore,
    ReadConversation,
    ReadCounts,
    Renew,
    Reply,
    Reserve,
    Restores,
    Settle,
    SharedStore,
    StoreError,
    StoreOutageError,
)

if TYPE_CHECKING:
    from otel_limits.quotas.wait_queues import QueueKey


logger = logging.getLogger("otel_limits")

BATCH: Final = 500
"""Operations that are sent together at most."""

# A settlement has a few hundred bytes, so that an outage costs some megabytes at most.
MAX_KEPT: Final = 10_000
"""Calls that are kept during an outage; the oldest is lost when one more comes."""

LOOK_INTERVAL_SECONDS: Final = 1.0
"""How often to check whether the store is back."""

REJOIN_SECONDS: Final = 1.5
"""How long calls wait after a restart of the store for processes that the others do not know yet.
They notice it within a second, and then connect."""

RESTORE_SECONDS: Final = 2.0
"""How long a process may take to connect and to restore what it knows, over a slow network."""

CLOSE_SECONDS: Final = 1.0
"""How long the end of a process is delayed at most."""

RESTORING: Final = "counts that it lost are being restored"

TICK_SECONDS: Final = 1.0
"""When a tick that failed is tried again."""

Tick: TypeAlias = Callable[[], float | None]
InFlight: TypeAlias = Callable[[], Sequence[Renew]]


class InlineExecutor:
    """Applies operations to a store in this process.

    Args:
        store: Where they go.
        free: Wakes waiters after a settlement.
    """

    is_shared = False
    """Whether others use the store too, so that it outlives this process."""
    worker = ""
    """ID of this process among those that use the store."""

    def __init__(self, store: QuotaStore, free: Callable[[QueueKey], None]) -> None:
        """Take the store."""
        self._store = store
        self._free = free

    def start(self, tick: Tick, in_flight: InFlight) -> None:
        """Nothing has to be connected, and nothing is ever lost."""

    def send(self, operation: Operation) -> Future[Reply]:
        """Apply an operation immediately."""
        (reply,) = self._store.run([operation])
        if isinstance(operation, Settle):
            for charge in operation.charges:
                self._free((charge.count.quota, charge.count.key))
        future: Future[Reply] = Future()
        future.set_result(reply)
        return future

    def after_fork(self) -> None:
        """Reset the store."""
        self._store.after_fork()

    def close(self) -> None:
        """Nothing is open."""


class ThreadedExecutor:
    """Sends operations to a store from a worker thread.

    Args:
        store: Where they go.
        on_restored: Called when this process has restored what it knows of a store's earlier run.
    """

    is_shared = True

    def __init__(self, store: SharedStore, on_restored: Callable[[], None] = lambda: None) -> None:
        """Start no thread yet."""
        self._store = store
        self._on_restored = on_restored
        self._tick: Tick = lambda: None
        self._in_flight: InFlight = tuple
        self._reset()
        # A daemon thread is killed at interpreter exit, with any unsent operations.
        atexit.register(self.close)

    def _reset(self) -> None:
        # Also after a fork: a lock that another thread held stays locked in the child.
        self._wake = threading.Condition()
        self._waiting: deque[tuple[Operation, Future[Reply]]] = deque()
        self._kept: OrderedDict[str, Reserve | Settle | CountConversation] = OrderedDict()
        self._next_tick = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_down = False
        self.worker = uuid.uuid4().hex
        self._known_counts = KnownCounts()
        self._living = 0
        self._to_restore: Sequence[KnownCount] | None = None

    def start(self, tick: Tick, in_flight: InFlight) -> None:
        """Connect in the background, or the first call would wait for several round trips.

        Args:
            tick: Is called now and then while the store answers; returns the seconds until the
                next time.
            in_flight: Returns renewals that reserve again for all in-flight calls.
        """
        self._tick, self._in_flight = tick, in_flight
        with self._wake:
            self._ensure_thread()

    def send(self, operation: Operation) -> Future[Reply]:
        """Queue an operation, or fail it immediately during an outage.

        The future fails with `StoreError` if the operation did not arrive. Settlements are sent
        again until they arrive.
        """
        future: Future[Reply] = Future()
        with self._wake:
            # Otherwise every agent would wait its timeout for a store known to be unavailable.
            if self._is_down or self._closing.is_set() or not self._ensure_thread():
                self._buffer(operation)
                future.set_exception(StoreOutageError("quota store unavailable"))
                return future
            self._waiting.append((operation, future))
            self._wake.notify()
        return future

    def _ensure_thread(self) -> bool:
        """Start the thread if needed; False if the system has none left."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="otel-limits-quotas", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                INTERNAL_ERRORS.report("quotas", error)
                return False
            self._thread = thread
        return True

    def after_fork(self) -> None:
        """Reset inherited state after a fork; the parent sends its own operations."""
        self._store.after_fork()
        self._reset()
        self.start(self._tick, self._in_flight)

    def close(self) -> None:
        """Send pending operations within a second, then close the store."""
        # Or a process that switches quotas on and off would keep every thread until its end.
        atexit.unregister(self.close)
        self._closing.set()
        with self._wake:
            self._wake.notify()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)
        # Settlements of refused calls charge nothing.
        lost = sum(
            isinstance(each, CountConversation)
            or (isinstance(each, Settle) and any(charge.amount for charge in each.charges))
            for each in self._kept.values()
        )
        if lost:
            what = pluralize(lost, "settlement was", "settlements were")
            sentence = f"{what} lost at exit, because the quota store is unavailable"
            INTERNAL_ERRORS.report("quotas", StoreError(sentence), sentence)
        self._store.close()

    # --- in the thread ----------------------------------------------------------------------------

    @suppress_errors("quotas")
    def _work(self) -> None:
        self._warm()
        self._send_buffered()  # what came while no thread could be started
        while not self._closing.is_set():
            batch = self._next_batch()
            if batch:
                self._send(batch)
            if self._is_down:
                self._wait_for_store()
            if time.monotonic() >= self._next_tick and not self._closing.is_set():
                self._next_tick = time.monotonic() + (self._tick() or TICK_SECONDS)
        while batch := self._next_batch():
            self._send(batch)
        self._send_buffered()

    def _warm(self) -> None:
        """Connect, so that a store that is away is known to be so before a call waits for it."""
        try:
            if isinstance(self._store, Diagnoses) and (problem := self._store.warm()):
                logger.warning("otel-limits: quota store: %s", problem)
            self._join()
        except Exception as error:  # noqa: BLE001  whatever it is, the store did not answer
            # At the end of a process the connection is closed while this thread waits on it.
            if not self._closing.is_set():
                self._enter_outage((), error)
                self._wait_for_store()

    def _next_batch(self) -> list[tuple[Operation, Future[Reply]]]:
        """Return the next batch; empty when a tick is due, and at the end."""
        with self._wake:
            left = self._next_tick - time.monotonic()
            if not self._waiting and not self._closing.is_set() and left > 0:
                self._wake.wait(left)
            return [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]

    def _send(self, batch: Sequence[tuple[Operation, Future[Reply]]]) -> None:
        # Reservations of agents that gave up are dropped; from here on none can be cancelled.
        live = [each for each in batch if each[1].set_running_or_notify_cancel()]
        try:
            replies = self._run([operation for operation, _ in live])
        except Exception as error:  # noqa: BLE001  whatever it is, nothing was answered
            self._enter_outage(live, error)
            return
        for (operation, future), reply in zip(live, replies, strict=True):
            if reply.status == "failed":
                quarantine(operation, reply)
                future.set_exception(PermanentStoreError(reply.error, reply.unmet))
            else:
                future.set_result(reply)

    def _enter_outage(
        self, batch: Sequence[tuple[Operation, Future[Reply]]], error: Exception
    ) -> None:
        """Refuse everything that waits, and all that comes, until the store is back."""
        with self._wake:
            # Under the same lock as the queue: nothing can be queued between the loss
            # and the clearing.
            self._is_down = True
            late = [each for each in self._waiting if each[1].set_running_or_notify_cancel()]
            self._waiting.clear()
            for operation, _ in (*batch, *late):
                self._buffer(operation)
        # Counted without a second line in the log: the one below says more.
        INTERNAL_ERRORS.publish("quotas")
        logger.error(
            "otel-limits: quota store unavailable (%s). For a quota, this process uses its share "
            "of what is left, then on_store_error decides. For a new invocation in a conversation, "
            "conversation_on_store_error decides.",
            error,
        )
        # Outside the lock, because waking waiters runs their code.
        for _, future in (*batch, *late):
            future.set_exception(StoreError(str(error)))

    def _buffer(self, operation: Operation) -> None:
        # Reads, renewals and enforced reservations are useless later. Calls that were sent anyway
        # must be counted, however late.
        if isinstance(operation, ReadCounts | ReadConversation | Renew):
            return
        if isinstance(operation, Reserve) and any(each.enforced for each in operation.demands):
            return
        # A settlement takes the place of its reservation, as its call is over.
        self._kept[operation.id] = operation
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
            INTERNAL_ERRORS.report("quotas", StoreError("settlement dropped: buffer full"))

    def _wait_for_store(self) -> None:
        # In this thread and not by an agent's call: while the store is down, no agent waits for it.
        while not self._closing.wait(LOOK_INTERVAL_SECONDS):
            if self._has_recovered() and self._send_buffered():
                logger.warning("otel-limits: quota store recovered; pending settlements sent.")
                return

    def _has_recovered(self) -> bool:
        try:
            self._store.check()
            self._join()
        except Exception:  # noqa: BLE001  it was reported when it began
            return False
        return True

    # --- a store that lost counts -----------------------------------------------------------------

    def _run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Run operations; if the store lost counts, restore these first.

        Raises:
            StoreError: The store is unavailable, or others have yet to restore what they know.
        """
        replies = self._store.run(operations)
        lost = [n for n, reply in enumerate(replies) if reply.status == "lost"]
        if lost:
            self._join()
            again = self._store.run([_of_earlier_run(operations[n]) for n in lost])
            for n, reply in zip(lost, again, strict=True):
                replies[n] = reply
        if any(reply.status in ("lost", "closed") for reply in replies):
            raise StoreError(RESTORING)
        for operation, reply in zip(operations, replies, strict=True):
            self._known_counts.observe(operation, reply)
            if isinstance(operation, ReadCounts) and operation.worker:
                self._living = reply.living
        return replies

    def _join(self) -> None:
        """Join the current run of the store, after restoring what it lost.

        Raises:
            StoreError: The store is unavailable, or others have yet to restore what they know.
        """
        store = self._store
        if not isinstance(store, Restores):
            return
        most = 2 * look_seconds(self._living) + LOOK_INTERVAL_SECONDS + RESTORE_SECONDS
        waits = store.join(self.worker, self._living, REJOIN_SECONDS, most)
        if waits is None:
            self._restore(store)
            waits = store.join(self.worker, self._living, REJOIN_SECONDS, most)
        if waits is None or waits > REJOIN_SECONDS:
            raise StoreError(RESTORING)
        # So shortly that calls can wait, instead of being decided as in an outage.
        self._closing.wait(waits)
        if self._to_restore is not None:
            self._to_restore = None
            self._on_restored()

    def _restore(self, store: Restores) -> None:
        """Send what is known of earlier runs, and all that happened since."""
        # The same again if it fails half-way: usage seen afterwards may be of the new run.
        if self._to_restore is None:
            known = self._known_counts
            self._to_restore = known.of_windows_at(store.now()) if known else ()
            if self._living:
                logger.warning(
                    "otel-limits: quota store restarted or replaced; restoring %s.",
                    pluralize(len(self._to_restore), "count", "counts"),
                )
        store.follow(store.restore(self._to_restore))
        # Before others are admitted: calls that ended in the outage, and those still in flight.
        with self._wake:
            kept = list(self._kept.values())
        for first in range(0, len(kept), BATCH):
            store.run([_of_earlier_run(each) for each in kept[first : first + BATCH]])
        store.run(self._in_flight())

    def _send_buffered(self) -> bool:
        """Send buffered settlements; True if none is left."""
        while True:
            with self._wake:
                # Looked at and not taken: what is being sent when the connection breaks must not be
                # lost. Sent twice it counts once, as a store knows ids of operations.
                batch = list(islice(self._kept.values(), BATCH))
                # Only with nothing left, and under the lock: new settlements go behind those
                # that were kept.
                if not batch:
                    self._is_down = False
                    return True
            try:
                replies = self._run(batch)
            except Exception:  # noqa: BLE001  it was reported when it began
                return False
            for operation, reply in zip(batch, replies, strict=True):
                if reply.status == "failed":
                    quarantine(operation, reply)
            with self._wake:
                # New ones may have been added and the oldest dropped in the meantime.
                for each in batch:
                    if self._kept.get(each.id) is each:
                        del self._kept[each.id]


def _of_earlier_run(operation: Operation) -> Operation:
    return replace(operation, is_earlier=True) if isinstance(operation, Settle) else operation


def quarantine(operation: Operation, reply: Reply) -> None:
    """Report an operation that cannot succeed; retrying it would block the others."""
    what = type(operation).__name__.lower()
    sentence = f"quota operation {what} quarantined: {reply.error}"
    INTERNAL_ERRORS.report("quotas", StoreError(reply.error), sentence)


StoreExecutor: TypeAlias = InlineExecutor | ThreadedExecutor
"""Executes operations on the store."""


# --- threads with their own store -----------------------------------------------------------------


class StoreThread(ABC):
    """A background thread, restarted in forked children.

    Args:
        store: A store that only this thread uses.
    """

    name: ClassVar[str]
    """Name of the thread."""

    def __init__(self, store: SharedStore) -> None:
        """Start the thread."""
        self._store = store
        self._start()

    def after_fork(self) -> None:
        """Restart in a child: threads are not inherited."""
        self._store.after_fork()
        self._start()

    def close(self) -> None:
        """Stop the thread without waiting for it."""
        self._closing.set()

    @abstractmethod
    def work(self, closing: threading.Event) -> None:
        """Work until `closing` is set."""

    def _start(self) -> None:
        # A new event: the inherited one may be set.
        self._closing = threading.Event()
        threading.Thread(
            target=self._run, args=(self._closing,), name=self.name, daemon=True
        ).start()

    @suppress_errors("quotas")
    def _run(self, closing: threading.Event) -> None:
        self.work(closing)
        # In the thread that used it: no other thread may close its connection.
        self._store.close()
