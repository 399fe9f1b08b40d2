"""Asks the store for model calls: reserves and settles, and waits no longer than the timeout."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from concurrent.futures import Future, TimeoutError  # noqa: A004  not the built-in one before 3.11
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.quotas.fallback import Fallback
from otel_limits.quotas.store import (
    Charge,
    CountState,
    Demand,
    Operation,
    PermanentStoreError,
    ReadCounts,
    Renew,
    Reply,
    Reserve,
    Settle,
    StoreError,
)
from otel_limits.quotas.tickets import (
    SLOT_LEASE_SECONDS,
    QuotaNeed,
    Ticket,
    demand_for,
    without_price,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.core.limits import Breach
    from otel_limits.quotas.keys import Key
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.store_worker import StoreExecutor

# Longer than most model calls take, so that few have to be renewed.
LEASE_SECONDS: Final = 300.0
"""How long a reservation holds that is not renewed: then one whose worker died is free again."""

# Two renewals may be lost, or come late, before a lease ends.
RENEWALS: Final = 3
"""How often a reservation is renewed in the time of a lease."""

# One is for a clock of ours that was wrong, one for a window that ended meanwhile.
ATTEMPTS: Final = 3
"""How often windows are corrected by the store's time before the store counts as broken."""


class StoreClient:
    """Sends what tickets ask for to the store, and knows what its clock shows.

    Args:
        executor: Brings operations to the store.
        timeout: Seconds that an agent waits for the store at most.
        on_kill: Is called when an answer tells of a kill that no answer had told of.
    """

    def __init__(
        self, executor: StoreExecutor, timeout: float, on_kill: Callable[[], None] = lambda: None
    ) -> None:
        """Begin with nothing known of the store."""
        self._executor = executor
        self._on_kill = on_kill
        self._timeout = timeout
        self._lease = LEASE_SECONDS
        self._reset()

    def _reset(self) -> None:
        # Until the store has answered, its clock is taken to show what ours does.
        self._clock_offset = time.time() - time.monotonic()
        self._worker = uuid.uuid4().hex
        self._last_kill = 0.0
        self.fallback = Fallback(self.now, self._lease)

    @property
    def is_shared(self) -> bool:
        """Whether others use the store too."""
        return self._executor.is_shared

    def start(self) -> None:
        """Connect in the background, and look again and again at what this worker has shares of."""
        self._executor.start(self.look_again)

    async def reserve(self, ticket: Ticket, *, forced: bool) -> Reply:
        """Reserve for a ticket, in the windows that hold the store's time.

        Args:
            ticket: What asks.
            forced: True to reserve also what is not there.

        Raises:
            StoreError: The store did not answer.
        """
        # One deadline over all attempts: the agent waits for the answer, not for each of them.
        deadline = time.monotonic() + self._timeout
        for _ in range(ATTEMPTS):
            self.fill(ticket, forced=forced)
            reply = await self._ask(Reserve(ticket.id, ticket.demands, self._lease), deadline)
            # The reply has told the store's time by now, so that the next attempt names
            # the right windows.
            if reply.status != "elsewhere":
                return reply
        raise StoreError("the store's clock is outside the requested windows")

    def fill(self, ticket: Ticket, *, forced: bool) -> None:
        """Work out what a ticket demands of the store now."""
        now = self.now()
        ticket.demands = tuple(
            demand_for(need, now, self.fallback.known, forced=forced) for need in ticket.needs
        )

    def without_price(self, need: QuotaNeed) -> Breach:
        """Say that a call costs what nobody knows, and how the count stood when last heard."""
        now = self.now()
        demand = demand_for(need, now, self.fallback.known, forced=False)
        return without_price(need, demand, self.fallback.known(demand.count), now)

    async def settle(self, ticket: Ticket) -> Reply:
        """Settle a ticket. What the store does not answer to, the executor keeps.

        Raises:
            StoreError: The store did not answer.
        """
        return await self._ask(settlement_of(ticket), time.monotonic() + self._timeout)

    def remember(self, need: QuotaNeed, demand: Demand, standing: CountState) -> CountState:
        """Note how a count stands, and return it with its limit."""
        latest = self.fallback.remember(need, demand, standing)
        # At once for the first: a store that is lost in the next second has told how many share.
        if not self.fallback.workers and need.quota.grace:
            self.look_again()
        return latest

    @suppress_errors("quotas")
    def look_again(self) -> float | None:
        """Ask how the counts stand that this worker may have to use a share of.

        Returns:
            Seconds after which to look again.
        """
        counts = self.fallback.shared() if self._executor.is_shared else ()
        if counts:
            look = ReadCounts(uuid.uuid4().hex, counts, self._worker)
            self._executor.send(look).add_done_callback(partial(self._looked, look))
        return self.fallback.look_seconds

    @suppress_errors("quotas")
    def _looked(self, look: ReadCounts, future: Future[Reply]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, PermanentStoreError):
            self.fallback.unshare(look.counts)
        elif error is not None:
            self.fallback.enter_outage()
        if future.cancelled() or error is not None:
            return
        self._on_reply(future.result())
        self.fallback.looked(look.counts, future.result())

    def question(self, quota: Quota, key: Key) -> ReadCounts:
        """Make the question how one key of a quota stands now."""
        return ReadCounts(uuid.uuid4().hex, ((quota.count(key, self.now()), quota.amount),))

    async def ask(self, question: ReadCounts) -> CountState:
        """Ask how a count stands.

        Raises:
            StoreError: The store did not answer.
        """
        return (await self._ask(question, time.monotonic() + self._timeout)).standings[0]

    def ask_blocking(self, question: ReadCounts) -> CountState:
        """Ask how a count stands, and keep this thread waiting.

        Raises:
            StoreError: The store did not answer.
        """
        future = self._executor.send(question)
        try:
            return future.result(self._timeout).standings[0]
        except TimeoutError:
            future.cancel()
            raise StoreError("quota store timeout") from None

    def settle_later(self, ticket: Ticket) -> None:
        """Settle a ticket without waiting."""
        self._executor.send(settlement_of(ticket))

    def reserve_later(self, ticket: Ticket) -> None:
        """Have the store know of a call that went out without it, as soon as it is back.

        Others must not be given what a call under way is still to use.
        """
        demands = tuple(replace(each, enforced=False) for each in ticket.demands)
        self._executor.send(Reserve(ticket.id, demands, self._lease))

    def start_lease(self, ticket: Ticket) -> None:
        """Note that something is set aside for a ticket from now on."""
        ticket.leased_at = time.monotonic()

    def renew(self, ticket: Ticket) -> None:
        """Renew the places of a ticket, and its reservations when they are due; do not wait."""
        places = tuple(each.count for each in ticket.demands if each.lease_seconds)
        if places:
            self._executor.send(Renew(ticket.id, places, SLOT_LEASE_SECONDS))
        amounts = tuple(each.count for each in ticket.demands if not each.lease_seconds)
        now = time.monotonic()
        if not amounts or ticket.leased_at is None:
            return
        if now - ticket.leased_at >= self._lease / RENEWALS:
            ticket.leased_at = now
            renewal = Renew(ticket.id, amounts, self._lease)
            self._executor.send(renewal)
            # Both, as what is reserved here decides as long as the store is away.
            if ticket.reserved_in is not None:
                ticket.reserved_in.run([renewal])

    def release(self, ticket: Ticket) -> None:
        """Take a reservation back whose reply did not come: it may have been made all the same."""
        # Settled with nothing: the store forgets the lease whichever of the two arrives first.
        charges = tuple(Charge(count=demand.count, amount=0) for demand in ticket.demands)
        self._executor.send(Settle(ticket.id, charges))

    def after_fork(self) -> None:
        """Start afresh in a child."""
        self._executor.after_fork()
        self._reset()

    def close(self) -> None:
        """Send what is left and let go of the store."""
        self._executor.close()

    async def _ask(self, operation: Operation, deadline: float) -> Reply:
        """Send an operation and wait for its reply.

        Raises:
            StoreError: There was none in time.
        """
        future = self._executor.send(operation)
        # In memory it is done by now, and where the store is lost, it was refused.
        if not future.done():
            await _wait(future, max(0.0, deadline - time.monotonic()))
        if not future.done():
            # A settlement is left to the executor, since what was used has to be counted.
            if not isinstance(operation, Settle):
                future.cancel()
            raise StoreError("quota store timeout")
        return self._on_reply(future.result())

    def _on_reply(self, reply: Reply) -> Reply:
        """Take note that the store answers, and of its time."""
        self.fallback.on_reply(reply.now)
        # Monotonic time plus an offset: setting the clock of this machine moves no window.
        self._clock_offset = reply.now - time.monotonic()
        if reply.last_kill > self._last_kill:
            self._last_kill = reply.last_kill
            self._on_kill()
        return reply

    def now(self) -> float:
        """Return what the store's clock shows, as far as is known."""
        return time.monotonic() + self._clock_offset


def settlement_of(ticket: Ticket) -> Settle:
    """Make the settlement of a ticket, and settle what was reserved in this process."""
    settlement = Settle(ticket.id, ticket.charges())
    # Both, as what was used here still has to reach the store once it is back.
    if ticket.reserved_in is not None:
        ticket.reserved_in.run([settlement])
    return settlement


async def _wait(future: Future[Reply], seconds: float) -> None:
    """Wait until `future` is done, or for so long.

    `asyncio.wrap_future` would cancel the one when the other is cancelled; here neither does.
    """
    loop = asyncio.get_running_loop()
    answered = loop.create_future()

    def answer() -> None:
        if not answered.done():
            answered.set_result(None)

    def wake(_: Future[Reply]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(answer)

    future.add_done_callback(wake)
    timer = loop.call_later(seconds, answer)
    try:
        await answered
    finally:
        timer.cancel()
