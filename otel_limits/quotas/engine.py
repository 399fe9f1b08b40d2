"""Admits model calls by quotas: reserves what they may take, settles what they took.

No network is touched by the thread of an agent: it waits for a courier, and no longer than the
timeout. While the store does not answer, every quota does what its `on_backend_error` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from otel_limits.core.facts import Decision, Fact, ModelCall, QuotaDecision, QuotaUse, Stop
from otel_limits.core.faults import FAULTS, never_raises
from otel_limits.core.usage import NO_COST
from otel_limits.quotas.estimates import Estimates
from otel_limits.quotas.fallback import Fallback
from otel_limits.quotas.keys import fits
from otel_limits.quotas.quota import Quota, in_unit, unit_name
from otel_limits.quotas.recovery import as_text
from otel_limits.quotas.store import (
    Charge,
    Operation,
    Reply,
    Reserve,
    Settle,
    Standing,
    StoreError,
    StoreLostError,
)
from otel_limits.quotas.tickets import (
    UNPRICED,
    Denied,
    Guest,
    PriceOf,
    Ticket,
    Want,
    demand_of,
    exceeded,
    lacking,
    lookup_of,
    unanswered,
    verdict_of,
    want_of,
    without_price,
)
from otel_limits.runs.gate import Request

if TYPE_CHECKING:
    from otel_limits.core.policy import Verdict
    from otel_limits.quotas.courier import Carrier

TIMEOUT_SECONDS: Final = 0.1
"""How long an agent waits for the store at most, each time it asks."""

LEASE_SECONDS: Final = 300.0
"""How long a reservation holds: after this, one whose worker died is free again."""

TRIES: Final = 3
"""How often a window is corrected by the store's time before the store counts as broken."""


class Engine:
    """The gate of a process.

    Args:
        quotas: What is to be held now.
        carrier: Brings operations to the store.
        tell: Takes facts.
        price: Model id and usage → USD, for quotas in money.
        timeout: Seconds that an agent waits for the store at most.
        lease_seconds: How long a reservation of a dead worker holds.
    """

    component = "quotas"

    def __init__(
        self,
        quotas: Callable[[], Sequence[Quota]],
        carrier: Carrier,
        *,
        tell: Callable[[Fact], None],
        price: PriceOf,
        timeout: float,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """Begin with nobody admitted."""
        self._quotas = quotas
        self._carrier = carrier
        self._tell = tell
        self._price = price
        self._timeout = timeout
        self._lease = lease_seconds
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._lock = threading.RLock()  # threads of one invocation may ask models at once
        self._owner = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._guests: dict[str, Guest] = {}
        self._estimates = Estimates()
        self._ahead = time.time() - time.monotonic()
        self._fallback = Fallback(self._now, self._lease)

    # --- the gate ---------------------------------------------------------------------------------

    async def admit(self, request: Request) -> Verdict | None:
        """Reserve what the call may take; a verdict when it may not go out."""
        try:
            with self._lock:
                ticket = self._open(request)
            if ticket is None:
                return None
            return self._leave_unpriced(ticket) or await self._admit(ticket)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            FAULTS.report(self.component, error)
            return None

    async def settle(self, invocation_id: str) -> None:
        """Count what the call took; while the store does not answer, the courier keeps it."""
        try:
            with self._lock:
                ticket = self._close(invocation_id)
            if ticket is not None:
                operation = Settle(ticket.id, ticket.charges())
                reply = await self._ask(operation, time.monotonic() + self._timeout)
                self._note_use(ticket, reply.standings)
        except StoreError:
            return
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            FAULTS.report(self.component, error)

    @never_raises("quotas")
    def __call__(self, fact: Fact) -> Fact:
        """Note what an admitted call took; settle what an invocation that is over left open."""
        if isinstance(fact, ModelCall):
            with self._lock:
                ticket = self._book(fact)
            if ticket is not None and self._carrier.is_shared:
                charges = as_text(ticket.charges())
                return replace(fact, quota_operation=ticket.id, quota_charges=charges)
        elif isinstance(fact, Stop):
            with self._lock:
                self._settle_later(fact.invocation_id)
                self._guests.pop(fact.invocation_id, None)
        return fact

    def reset_after_fork(self) -> None:
        """Start afresh in a child."""
        self._carrier.reset_after_fork()
        self._start_afresh()

    def close(self) -> None:
        """Send what is left and let go of the store."""
        self._carrier.close()

    # --- before a call ----------------------------------------------------------------------------

    def _open(self, request: Request) -> Ticket | None:
        """Open a ticket; `None` when no quota applies."""
        lookup = lookup_of(request)
        applying = [quota for quota in self._quotas() if fits(quota.where, lookup)]
        if not applying:
            return None
        guest = self._guests.setdefault(request.invocation.id, Guest())
        self._settle_later(request.invocation.id)  # the end of a call before it was not seen
        guest.attributes = request.attributes
        worst = self._estimates.worst_case(request.model, request.input, request.output_cap)
        wants = [
            want_of(quota, request, lookup, worst, self._price)
            for quota in applying
            if quota.name not in guest.counted
        ]
        if wants:
            guest.ticket = Ticket(f"{self._owner}-{next(self._numbers)}", request, wants)
        return guest.ticket

    def _leave_unpriced(self, ticket: Ticket) -> Verdict | None:
        """Leave out the quotas in money where no price is known, or refuse because of them."""
        unpriced = [want for want in ticket.wants if want.amount == UNPRICED]
        for want in unpriced:
            self._decide(ticket, want, "unpriced")
        ticket.leave_out(unpriced)
        if ticket.request.unpriced != "halt":
            return None
        verdict = verdict_of([(each, without_price(each)) for each in unpriced if each.is_enforced])
        if verdict is not None:
            self._drop(ticket)
        return verdict

    async def _admit(self, ticket: Ticket) -> Verdict | None:
        if not ticket.wants:
            return None
        try:
            reply = await self._reserve(ticket, forced=False)
        except StoreError as error:
            return self._degrade(ticket, was_sent=not isinstance(error, StoreLostError))
        self._note_use(ticket, reply.standings)
        if reply.status == "refused":
            return await self._refuse(ticket, reply)
        observed = lacking(ticket, reply, enforced=False)
        seen = [want for want, _ in observed]
        for want in ticket.wants:
            self._decide(ticket, want, "observed" if want in seen else "admitted")
        return verdict_of(observed)

    async def _refuse(self, ticket: Ticket, reply: Reply) -> Verdict | None:
        """Say why the call may not go out. Where a last answer is let go, book that."""
        denied = lacking(ticket, reply, enforced=True)
        for want, _ in denied:
            self._decide(ticket, want, "refused")
        verdict = verdict_of(denied)
        if verdict is not None and verdict.action == "wrap_up":
            with contextlib.suppress(StoreError):  # then its settlement books it
                await self._reserve(ticket, forced=True)
        else:
            self._drop(ticket)
        return verdict

    async def _reserve(self, ticket: Ticket, *, forced: bool) -> Reply:
        """Reserve in the windows that hold the store's time.

        Raises:
            StoreError: The store did not answer.
        """
        deadline = time.monotonic() + self._timeout
        for _ in range(TRIES):
            self._fill(ticket, forced=forced)
            reply = await self._ask(Reserve(ticket.id, ticket.demands, self._lease), deadline)
            if reply.status != "elsewhere":
                self._fallback.end()
                return reply
        raise StoreError("the clock of the store does not stand still")

    def _fill(self, ticket: Ticket, *, forced: bool) -> None:
        """Say what the ticket demands now."""
        now = self._now()
        ticket.demands = tuple(
            demand_of(want, now, self._fallback.known, forced=forced) for want in ticket.wants
        )

    async def _ask(self, operation: Operation, deadline: float) -> Reply:
        """Send an operation and wait for its reply.

        Raises:
            StoreError: There was none in time.
        """
        future = self._carrier.send(operation)
        if not future.done():
            await _wait(future, max(0.0, deadline - time.monotonic()))
        if not future.done():
            if isinstance(operation, Reserve):
                future.cancel()
            raise StoreError("the store did not answer in time")
        reply = future.result()
        self._ahead = reply.now - time.monotonic()
        return reply

    def _now(self) -> float:
        """Return what the store's clock shows, as far as is known."""
        return time.monotonic() + self._ahead

    # --- without the store ------------------------------------------------------------------------

    def _degrade(self, ticket: Ticket, *, was_sent: bool) -> Verdict | None:
        """Do what every quota says for this case; one that denies is enough."""
        self._fill(ticket, forced=False)
        denied: list[Denied] = [
            (want, unanswered(want))
            for want in ticket.wants
            if want.quota.on_backend_error == "deny" and want.is_enforced
        ]
        for want, _ in denied:
            self._decide(ticket, want, "degraded_denied")
        denied = denied or self._reserve_here(ticket)
        if not denied:
            return None
        self._drop(ticket)
        if was_sent:  # it may have been done all the same
            charges = tuple(Charge(count=demand.count, amount=0) for demand in ticket.demands)
            self._carrier.send(Settle(ticket.id, charges))
        return verdict_of(denied)

    def _reserve_here(self, ticket: Ticket) -> list[Denied]:
        """Hold the quotas that are local in this process, and let go what the others permit."""
        local, reply = self._fallback.reserve(ticket)
        for want in ticket.wants:
            if want not in local:
                self._decide(ticket, want, "degraded_allowed")
            elif ticket.reserved_in is not None:
                self._decide(ticket, want, "degraded_local_admitted")
            else:
                self._decide(ticket, want, "degraded_local_refused")
        if reply is None or ticket.reserved_in is not None:
            return []
        return [
            (local[n], exceeded(local[n], reply.standings[n], reply.status))
            for n in reply.lacking
            if local[n].is_enforced
        ]

    # --- after a call -----------------------------------------------------------------------------

    def _book(self, call: ModelCall) -> Ticket | None:
        """Note what a call took on its ticket; `None` when no quota applies.

        A second call on one permission gets a ticket of its own: others may have settled the first
        by then, and a ticket counts once.
        """
        guest = self._guests.get(call.invocation.id)
        if guest is None or guest.ticket is None or guest.ticket.calls:
            return self._book_unasked(call, guest)
        self._note_call(guest.ticket, call)
        return guest.ticket

    def _note_call(self, ticket: Ticket, call: ModelCall) -> None:
        ticket.calls = 1
        ticket.tokens = call.usage.total
        ticket.cost = call.price or NO_COST
        if call.kind == "measured":
            self._estimates.learn(ticket.request.model, ticket.request.input, call.usage)

    def _book_unasked(self, call: ModelCall, guest: Guest | None) -> Ticket | None:
        """Count a call that went out without asking, such as a summary or a direct request."""
        request = Request(
            invocation=call.invocation,
            model=call.model,
            input=call.usage.input,
            attributes=guest.attributes if guest is not None else {},
        )
        ticket = self._open(request)
        if ticket is not None:
            ticket.leave_out([want for want in ticket.wants if want.amount == UNPRICED])
            self._fill(ticket, forced=True)
            self._note_call(ticket, call)
            self._settle_later(call.invocation.id)
        return ticket

    def _settle_later(self, invocation_id: str) -> None:
        """Settle without waiting."""
        ticket = self._close(invocation_id)
        if ticket is not None:
            self._carrier.send(Settle(ticket.id, ticket.charges()))

    def _close(self, invocation_id: str) -> Ticket | None:
        """Take the open ticket of an invocation, once."""
        guest = self._guests.get(invocation_id)
        if guest is None or guest.ticket is None:
            return None
        ticket, guest.ticket = guest.ticket, None
        if ticket.calls:
            guest.counted.update(
                want.quota.name for want in ticket.wants if want.quota.unit == "invocations"
            )
        if ticket.reserved_in is not None:
            ticket.reserved_in.run([Settle(ticket.id, ticket.charges())])
        return ticket

    def _drop(self, ticket: Ticket) -> None:
        """Forget a call that does not go out."""
        guest = self._guests.get(ticket.request.invocation.id)
        if guest is not None:
            guest.ticket = None

    # --- what is told -----------------------------------------------------------------------------

    def _decide(self, ticket: Ticket, want: Want, decision: Decision) -> None:
        unit = want.quota.unit
        self._tell(
            QuotaDecision(
                invocation=ticket.request.invocation,
                quota=want.quota.name,
                key=want.key.shown,
                decision=decision,
                wanted=in_unit(unit, max(0, want.amount)),
                unit=unit_name(unit),
            )
        )

    def _note_use(self, ticket: Ticket, standings: Iterable[Standing]) -> None:
        """Remember and tell how the counts stand now."""
        for want, demand, standing in zip(ticket.wants, ticket.demands, standings, strict=True):
            latest = self._fallback.remember(demand, standing)
            unit = want.quota.unit
            self._tell(
                QuotaUse(
                    quota=want.quota.name,
                    key=want.key.shown,
                    unit=unit_name(unit),
                    used=in_unit(unit, latest.used),
                    reserved=in_unit(unit, latest.reserved),
                    limit=in_unit(unit, latest.limit),
                    resets=demand.count.window.end,
                )
            )


async def _wait(future: Future[Reply], seconds: float) -> None:
    """Wait until `future` is done, or not; neither cancels the other."""
    loop = asyncio.get_running_loop()
    answered = loop.create_future()

    def answer() -> None:
        if not answered.done():
            answered.set_result(None)

    def wake(_: Future[Reply]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(answer)

    future.add_done_callback(wake)
    await asyncio.wait([answered], timeout=seconds)
