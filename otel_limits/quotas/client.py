"""Store client of the engine: reserves, settles and renews, within the store timeout."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError  # noqa: A004  not the built-in one before 3.11
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.quotas.fallback import Fallback
from otel_limits.quotas.needs import (
    SLOT_LEASE_SECONDS,
    QuotaNeed,
    QuotaReservation,
    demand_for,
)
from otel_limits.quotas.refusals import without_price
from otel_limits.quotas.store import (
    CountState,
    Demand,
    Operation,
    PermanentStoreError,
    ReadConversation,
    ReadCounts,
    Renew,
    Reply,
    Reserve,
    Settle,
    StoreError,
    StoreOutageError,
)

if TYPE_CHECKING:
    from otel_limits.core.limits import Breach
    from otel_limits.quotas.store_worker import StoreExecutor
    from otel_limits.runs.clock import Clock


# --- requests to the store ------------------------------------------------------------------------

# Longer than most model calls take, so that few have to be renewed.
LEASE_SECONDS: Final = 300.0
"""Lease of a reservation: one whose worker died is released after it."""

# Two renewals may be lost or late before a lease expires.
LEASE_RENEWALS: Final = 3
"""Renewals per lease."""

# One retry for a wrong local clock, one for a window that ended during the request.
ATTEMPTS: Final = 3
"""Attempts with corrected windows before the store counts as broken."""


class StoreClient:
    """Sends reservations and their settlements to the store, and tracks the store's clock.

    Args:
        executor: Sends operations to the store.
        timeout: Maximum seconds that an agent waits for the store.
        clock: The clock of the process.
        on_kill: Called when a reply reports a new kill.
    """

    def __init__(
        self,
        executor: StoreExecutor,
        timeout: float,
        clock: Clock,
        on_kill: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a client that has not contacted the store yet."""
        self.executor = executor
        self._on_kill = on_kill
        self.timeout = timeout
        self._clock = clock
        self.lease_seconds = LEASE_SECONDS
        """How long a reservation lasts that is not renewed."""
        self.in_flight: Callable[[], Sequence[QuotaReservation]] = tuple
        """Returns the reservations of in-flight calls."""
        self._leases = Leases(
            clock,
            lambda: self.in_flight(),  # noqa: PLW0108  the engine sets it afterwards
            self._renew,
        )
        self._reset()

    def _reset(self) -> None:
        # Until its first reply, the store's clock is assumed to equal the local one.
        self._clock_offset = self._clock.time() - self._clock.now()
        self._last_kill = 0.0
        self.fallback = Fallback(self._clock.now, self.now, self.lease_seconds)

    def start(self) -> None:
        """Connect in the background and start regular reads of shared counts."""
        self.executor.start(self.look_again, self._renewals)

    async def reserve(self, reservation: QuotaReservation) -> Reply:
        """Reserve what a call needs, in the current windows of the store's clock.

        Args:
            reservation: What to reserve.

        Returns:
            A reply that is `admitted` or `refused`.

        Raises:
            StoreError: The store did not answer.
        """
        # One deadline for all attempts, because the agent waits for all of them.
        deadline = self._clock.now() + self.timeout
        for _ in range(ATTEMPTS):
            self.fill(reservation, forced=False)
            asked = Reserve(
                reservation.id, reservation.demands, self.lease_seconds, reservation.waited
            )
            was_unclaimed, reservation.is_unclaimed = reservation.is_unclaimed, True
            try:
                reply = await self._ask(asked, deadline)
            except StoreOutageError:  # it was not sent
                reservation.is_unclaimed = was_unclaimed
                raise
            is_kept = any(need.waits for need in reservation.needs) or reservation.apart is not None
            if reply.status == "refused" and not is_kept:
                reservation.is_unclaimed = False
            if reply.status in ("admitted", "refused"):
                return reply
            # The reply contained the store's time, so the next attempt uses the right windows.
            if reply.status != "elsewhere":
                raise PermanentStoreError(f"the reservation is {reply.status} before its grant")
        raise StoreError("the store's clock is outside the requested windows")

    def fill(self, reservation: QuotaReservation, *, forced: bool) -> None:
        """Set the demands of a reservation for the current windows."""
        now = self.now()
        reservation.demands = tuple(
            demand_for(need, now, self.fallback.known, forced=forced) for need in reservation.needs
        )

    def without_price(self, need: QuotaNeed) -> Breach:
        """Return the breach for an unknown price, with the last known count."""
        now = self.now()
        demand = demand_for(need, now, self.fallback.known, forced=False)
        return without_price(need, demand, self.fallback.known(demand.count), now)

    async def settle(self, reservation: QuotaReservation) -> Reply:
        """Settle a reservation. On failure, the executor sends the settlement later.

        Raises:
            StoreError: The store did not answer.
        """
        return await self._ask(settlement_of(reservation), self._clock.now() + self.timeout)

    def remember(self, need: QuotaNeed, demand: Demand, state: CountState) -> CountState:
        """Cache the state of a count, and return it with its limit."""
        latest = self.fallback.remember(need, demand, state)
        # The first read is immediate: an outage may follow, and needs the number of workers.
        if not self.fallback.workers and need.quota.grace:
            self.look_again()
        return latest

    @suppress_errors("quotas")
    def look_again(self) -> float | None:
        """Read the counts that this worker may need a local share of.

        Returns:
            Seconds until the next read.
        """
        if self.executor.is_shared:
            # Also without a count to read: a process that knows counts must notice their loss.
            look = ReadCounts(self.fallback.shared(), self.executor.worker)
            self.executor.send(look).add_done_callback(partial(self._looked, look))
        return self.fallback.look_seconds

    @suppress_errors("quotas")
    def _looked(self, look: ReadCounts, future: Future[Reply]) -> None:
        error = future.exception()
        if isinstance(error, PermanentStoreError):
            damaged = [look.counts[n] for n in error.damaged]
            self.fallback.unshare(damaged or look.counts)
        elif error is not None:
            self.fallback.enter_outage()
        else:
            self.fallback.looked(look.counts, self._on_reply(future.result()))

    async def ask(self, look: ReadCounts) -> CountState:
        """Read a count.

        Raises:
            StoreError: The store did not answer.
        """
        return (await self._ask(look, self._clock.now() + self.timeout)).states[0]

    def ask_blocking(self, look: ReadCounts) -> CountState:
        """Read a count, blocking this thread.

        Raises:
            StoreError: The store did not answer.
        """
        future = self.executor.send(look)
        try:
            return future.result(self.timeout).states[0]
        except TimeoutError:
            future.cancel()
            raise StoreError("quota store timeout") from None

    async def read_conversation(
        self, key: str, on_reply: Callable[[Future[Reply]], object]
    ) -> None:
        """Read the record of a conversation.

        Args:
            key: Its hash.
            on_reply: Is called with the reply, also if that comes too late for this call.

        Raises:
            StoreError: The store did not answer in time.
        """
        deadline = self._clock.now() + self.timeout
        await self._ask(ReadConversation(key), deadline, on_reply)

    def settle_later(self, reservation: QuotaReservation) -> None:
        """Settle a reservation without waiting.

        That of a call without usage releases what the store has reserved, or reserves later, and
        what the call needed while it waited.
        """
        self.executor.send(settlement_of(reservation))

    def reserve_later(self, reservation: QuotaReservation) -> None:
        """Queue a reservation for a call that was admitted during an outage.

        It keeps other workers from using what the in-flight call still needs.
        """
        reservation.is_unclaimed = True
        demands = tuple(replace(each, enforced=False) for each in reservation.demands)
        self.executor.send(Reserve(reservation.id, demands, self.lease_seconds))

    def hold(self, reservation: QuotaReservation) -> None:
        """Renew the reservation of a call until the call ends."""
        reservation.leased_at = self._clock.now()
        self._leases.begin()

    def _renew(self, reservation: QuotaReservation) -> None:
        """Renew the slots of a reservation, and its amounts if due, without waiting."""
        slots = tuple(each for each in reservation.demands if each.lease_seconds)
        if slots:
            self.executor.send(Renew(reservation.id, slots, SLOT_LEASE_SECONDS))
        amounts = tuple(each for each in reservation.demands if not each.lease_seconds)
        now = self._clock.now()
        if not amounts or reservation.leased_at is None:
            return
        if now - reservation.leased_at >= self.lease_seconds / LEASE_RENEWALS:
            reservation.leased_at = now
            renewal = Renew(reservation.id, amounts, self.lease_seconds)
            self.executor.send(renewal)
            # Both, because local reservations decide during an outage.
            if reservation.reserved_in is not None:
                reservation.reserved_in.run([renewal])

    def _renewals(self) -> list[Renew]:
        """Return renewals that reserve again for all in-flight calls, after a store lost them."""
        return [
            Renew(reservation.id, (demand,), demand.lease_seconds or self.lease_seconds, again=True)
            for reservation in self.in_flight()
            for demand in reservation.demands
        ]

    def after_fork(self) -> None:
        """Reset inherited state in a forked child."""
        self.executor.after_fork()
        self._leases.reset()
        self._reset()

    def close(self) -> None:
        """Flush pending operations and close the store."""
        self._leases.close()
        self.executor.close()

    async def _ask(
        self,
        operation: Operation,
        deadline: float,
        on_reply: Callable[[Future[Reply]], object] = lambda _: None,
    ) -> Reply:
        """Send an operation and wait for its reply.

        Raises:
            StoreError: There was none in time.
        """
        future = self.executor.send(operation)
        future.add_done_callback(on_reply)  # before the one that wakes this task
        # An in-memory store is done by now; during an outage it failed immediately.
        if not future.done():
            await self._wait(future, deadline)
        if not future.done():
            # The executor still sends a settlement: actual usage must be counted.
            if not isinstance(operation, Settle):
                future.cancel()
            raise StoreError("quota store timeout")
        return self._on_reply(future.result())

    async def _wait(self, future: Future[Reply], deadline: float) -> None:
        """Wait until `future` is done, or until the deadline.

        Unlike with `asyncio.wrap_future`, cancelling one does not cancel the other.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()

        def answer() -> None:
            if not answered.done():
                answered.set_result(None)

        def wake(_: Future[Reply]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answer)

        future.add_done_callback(wake)
        await self._clock.wait(answered, deadline)

    def _on_reply(self, reply: Reply) -> Reply:
        """Record that the store answers, its time, and new kills."""
        self.fallback.on_reply(reply.now)
        # Monotonic time plus an offset: changes of the system clock do not move windows.
        self._clock_offset = reply.now - self._clock.now()
        if reply.last_kill > self._last_kill:
            self._last_kill = reply.last_kill
            self._on_kill()
        return reply

    def now(self) -> float:
        """Return the estimated time of the store."""
        return self._clock.now() + self._clock_offset


def settlement_of(reservation: QuotaReservation) -> Settle:
    """Return the settlement of a reservation, after settling any local reservation."""
    if reservation.apart is not None:
        settlement_of(reservation.apart)
    settlement = Settle(reservation.id, reservation.charges())
    # Both, because local usage must also reach the store after the outage.
    if reservation.reserved_in is not None:
        reservation.reserved_in.run([settlement])
    return settlement


# --- renewal of reservations ----------------------------------------------------------------------
# The store releases a killed worker's reservations when their leases expire: slots after 30
# seconds, all others after minutes.

RENEW_SECONDS: Final = SLOT_LEASE_SECONDS / LEASE_RENEWALS
"""How often a process checks for due renewals: a slot has the shortest lease."""


class Leases:
    """Renews leases while their calls last.

    Args:
        clock: The clock of the process.
        held: Returns the reservations of in-flight calls.
        renew: Renews the due leases of a reservation, without waiting.
    """

    def __init__(
        self,
        clock: Clock,
        held: Callable[[], Sequence[QuotaReservation]],
        renew: Callable[[QuotaReservation], None],
    ) -> None:
        """Create an idle renewer."""
        self._clock = clock
        self._held = held
        self._renew_one = renew
        self.reset()

    def reset(self) -> None:
        """Reset in a forked child: the timer belongs to its parent."""
        self._lock = threading.RLock()
        self._timer: int | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Start renewing, until no reservation is left."""
        with self._lock:
            if self._timer is None and not self._is_closed:
                self._timer = self._renew_later()

    def close(self) -> None:
        """Stop renewing."""
        with self._lock:
            self._is_closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            self._clock.cancel(timer)

    @suppress_errors("quotas")
    def _renew(self) -> None:
        with self._lock:
            held = () if self._is_closed else self._held()
            # A later reservation calls `begin` again.
            self._timer = self._renew_later() if held else None
        for reservation in held:
            self._renew_one(reservation)

    def _renew_later(self) -> int:
        return self._clock.schedule(self._clock.now() + RENEW_SECONDS, self._renew)
