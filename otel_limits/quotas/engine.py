"""Admits model calls by quotas: reserves what they may take, settles what they took.

No network is touched by the thread of an agent: it waits for a courier, and no longer than the
timeout. When the store does not answer, every quota does what its `on_backend_error` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Final, TypeAlias

from opentelemetry import baggage

from otel_limits.facts import Decision, Fact, ModelCall, QuotaDecision, QuotaUse, Stop
from otel_limits.faults import FAULTS, unfelt
from otel_limits.gate import Request
from otel_limits.limits import (
    NO_COST,
    NO_USAGE,
    QUOTA_EXCEEDED_STOP_REASON,
    Action,
    Breach,
    Usage,
    Verdict,
)
from otel_limits.quotas.courier import Carrier
from otel_limits.quotas.estimates import Estimates, WorstCase
from otel_limits.quotas.keys import Key, Lookup, fits
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.quota import Quota, Unit, in_unit, in_words, parts_of_usd, unit_name
from otel_limits.quotas.store import (
    Charge,
    Count,
    Demand,
    Operation,
    Reply,
    Reserve,
    Settle,
    Standing,
    StoreError,
    StoreLost,
)

TIMEOUT_SECONDS: Final = 0.1
"""How long an agent waits for the store at most, each time it asks."""

LEASE_SECONDS: Final = 300.0
"""How long a reservation holds: after this, one whose worker died is free again."""

MAX_KNOWN: Final = 10_000
"""Counts whose last standing is remembered."""

UNPRICED: Final = -1
"""Stands for an amount of money that nobody knows."""

TRIES: Final = 3
"""How often a window is corrected by the store's time before the store counts as broken."""

PriceOf: TypeAlias = Callable[[str, Usage], "Decimal | None"]


@dataclass(frozen=True, slots=True)
class Want:
    """What a call wants of one quota."""

    quota: Quota
    key: Key
    amount: int
    certain: bool
    action: Action


@dataclass(slots=True)
class Ticket:
    """One call that was admitted, until it is settled."""

    id: str
    wants: list[Want]
    request: Request
    demands: tuple[Demand, ...] = ()
    is_local: bool = False
    calls: int = 0
    usage: Usage = NO_USAGE
    cost: Decimal = NO_COST


@dataclass(slots=True)
class Guest:
    """What is remembered of a live invocation."""

    ticket: Ticket | None = None
    counted: set[str] = field(default_factory=set)
    """Names of the quotas that have counted the invocation."""


class Engine:
    """The gate of a process.

    Args:
        quotas: What is to be held.
        carrier: Brings operations to the store.
        tell: Takes facts.
        price: Model id and usage → USD, for quotas in money.
        timeout: Seconds that an agent waits for the store at most.
        lease_seconds: How long a reservation of a dead worker holds.
    """

    component = "quotas"

    def __init__(
        self,
        quotas: Sequence[Quota],
        carrier: Carrier,
        *,
        tell: Callable[[Fact], None],
        price: PriceOf,
        timeout: float = TIMEOUT_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """Begin with nobody admitted."""
        self._quotas = tuple(quotas)
        self._carrier = carrier
        self._tell = tell
        self._price = price
        self._timeout = timeout
        self._lease = lease_seconds
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._owner = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._guests: dict[str, Guest] = {}
        self._known: OrderedDict[Count, Standing] = OrderedDict()
        self._estimates = Estimates()
        self._ahead = time.time() - time.monotonic()
        self._local = MemoryStore(self._now)
        self._local_since = 0

    # --- the gate ---------------------------------------------------------------------------------

    async def admit(self, request: Request) -> Verdict | None:
        """Reserve what the call may take; a verdict when it may not go out."""
        try:
            ticket = self._ticket(request)
            if ticket is None:
                return None
            return self._unpriced(ticket) or await self._admit(ticket)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            FAULTS.report(self.component, error)
            return None

    async def settle(self, invocation_id: str) -> None:
        """Count what the call took."""
        try:
            operation, ticket = self._close(invocation_id)
            if operation is not None and ticket is not None:
                reply = await self._ask(operation, self._deadline())
                self._note_use(ticket, reply.standings)
        except StoreError:
            pass  # the courier keeps it
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            FAULTS.report(self.component, error)

    @unfelt("quotas")
    def __call__(self, fact: Fact) -> None:
        """Note what an admitted call took; give back what an invocation that is over left."""
        if isinstance(fact, ModelCall):
            guest = self._guests.get(fact.invocation.id)
            if guest is not None and guest.ticket is not None:
                self._note_call(guest.ticket, fact)
        elif isinstance(fact, Stop):
            operation, _ = self._close(fact.invocation_id)
            self._guests.pop(fact.invocation_id, None)
            if operation is not None:
                self._carrier.send(operation)

    def reset_after_fork(self) -> None:
        """Start afresh in a child."""
        self._carrier.reset_after_fork()
        self._start_afresh()

    def close(self) -> None:
        """Send what is left and let go of the store."""
        self._carrier.close()

    # --- what a call wants ------------------------------------------------------------------------

    def _ticket(self, request: Request) -> Ticket | None:
        """Open a ticket; `None` when no quota applies."""
        lookup = _lookup(request)
        applying = [quota for quota in self._quotas if fits(quota.where, lookup)]
        if not applying:
            return None
        guest = self._guests.setdefault(request.invocation.id, Guest())
        worst = self._estimates.worst_case(request.model, request.input, request.output_cap)
        wants = [
            Want(
                quota=quota,
                key=quota.key.key(quota.name, lookup),
                amount=self._amount(quota.unit, request, worst),
                certain=worst.certain or quota.unit in ("model_calls", "invocations"),
                action=_action(quota, request),
            )
            for quota in applying
            if quota.name not in guest.counted
        ]
        if not wants:
            return None
        guest.ticket = Ticket(f"{self._owner}-{next(self._numbers)}", wants, request)
        return guest.ticket

    def _amount(self, unit: Unit, request: Request, worst: WorstCase) -> int:
        """What the call may take of a quota, in parts; `UNPRICED` when nobody knows."""
        if unit == "tokens":
            return worst.usage.total
        if unit == "usd":
            price = self._price(request.model, worst.usage)
            return UNPRICED if price is None else parts_of_usd(price)
        return 1

    def _unpriced(self, ticket: Ticket) -> Verdict | None:
        """Leave out the quotas in money where no price is known, or refuse because of them."""
        unpriced = [want for want in ticket.wants if want.amount == UNPRICED]
        for want in unpriced:
            self._decide(ticket, want, "unpriced")
            ticket.wants.remove(want)
        denied = [(want, _no_price(want)) for want in unpriced if want.action != "observe"]
        if not denied or ticket.request.unpriced != "halt":
            return None
        self._drop(ticket)
        return _verdict_of(denied)

    def _demands(self, ticket: Ticket, *, forced: bool) -> tuple[Demand, ...]:
        now = self._now()
        return tuple(self._demand(want, now, forced=forced) for want in ticket.wants)

    def _demand(self, want: Want, now: float, *, forced: bool) -> Demand:
        quota = want.quota
        count = Count(quota.name, want.key.id, quota.windows.at(now), want.key.shown)
        known = self._known.get(count)
        return Demand(
            count=count,
            amount=want.amount,
            limit=quota.amount,
            enforced=want.action != "observe" and not forced,
            certain=want.certain,
            known=known.used if known else 0,
        )

    # --- asking the store -------------------------------------------------------------------------

    async def _admit(self, ticket: Ticket) -> Verdict | None:
        if not ticket.wants:
            return None
        try:
            reply = await self._reserve(ticket)
        except StoreError as error:
            return self._degrade(ticket, was_sent=not isinstance(error, StoreLost))
        lacking = [ticket.wants[position] for position in reply.lacking]
        if reply.status == "refused":
            return await self._refuse(ticket, reply, lacking)
        for want in ticket.wants:
            self._decide(ticket, want, "observed" if want in lacking else "admitted")
        self._note_use(ticket, reply.standings)
        return self._verdict(ticket, reply, observed=True)

    async def _refuse(self, ticket: Ticket, reply: Reply, lacking: list[Want]) -> Verdict | None:
        """Say why the call may not go out. Before a last answer, which is let go, book that."""
        verdict = self._verdict(ticket, reply, observed=False)
        for want in lacking:
            if want.action != "observe":
                self._decide(ticket, want, "refused")
        self._note_use(ticket, reply.standings)
        if verdict is not None and verdict.action == "wrap_up":
            with contextlib.suppress(StoreError):  # then its settlement books it
                await self._reserve(ticket, forced=True)
        else:
            self._drop(ticket)
        return verdict

    async def _reserve(self, ticket: Ticket, *, forced: bool = False) -> Reply:
        """Reserve in the windows that hold the store's time.

        Raises:
            StoreError: The store did not answer.
        """
        deadline = self._deadline()
        for _ in range(TRIES):
            ticket.demands = self._demands(ticket, forced=forced)
            reply = await self._ask(Reserve(ticket.id, ticket.demands, self._lease), deadline)
            if reply.status != "elsewhere":
                return reply
        raise StoreError("the store's clock does not stand still")

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

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout

    def _now(self) -> float:
        """Return what the store's clock shows, as far as is known."""
        return time.monotonic() + self._ahead

    # --- without the store ------------------------------------------------------------------------

    def _degrade(self, ticket: Ticket, *, was_sent: bool) -> Verdict | None:
        """Do what every quota says for this case; one that denies is enough."""
        ticket.demands = self._demands(ticket, forced=False)
        denied = [
            (want, _unanswered(want))
            for want in ticket.wants
            if want.quota.on_backend_error == "deny" and want.action != "observe"
        ]
        for want, _ in denied:
            self._decide(ticket, want, "degraded_denied")
        if not denied:
            denied = self._reserve_locally(ticket)
        if denied:
            self._drop(ticket)
            if was_sent:
                self._take_back(ticket)
            return _verdict_of(denied)
        for want in ticket.wants:
            if want.quota.on_backend_error != "local":
                self._decide(ticket, want, "degraded_allowed")
        return None

    def _reserve_locally(self, ticket: Ticket) -> list[tuple[Want, Breach]]:
        """Hold the quotas that are local in this process; returns those that refuse."""
        if self._local_since != self._carrier.outages:
            self._local, self._local_since = MemoryStore(self._now), self._carrier.outages
        chosen = [
            (want, self._left(demand))
            for want, demand in zip(ticket.wants, ticket.demands, strict=True)
            if want.quota.on_backend_error == "local"
        ]
        if not chosen:
            return []
        demands = tuple(demand for _, demand in chosen)
        (reply,) = self._local.run([Reserve(ticket.id, demands, self._lease)])
        ticket.is_local = reply.status == "admitted"
        for want, _ in chosen:
            self._decide(ticket, want, _local_decision(reply, want))
        if ticket.is_local:
            return []
        return [
            (chosen[n][0], _breach(chosen[n][0], reply.standings[n]))
            for n in reply.lacking
            if chosen[n][1].enforced
        ]

    def _left(self, demand: Demand) -> Demand:
        """What this process may still take: what was left when the store was last heard."""
        known = self._known.get(demand.count)
        if known is None:
            return demand
        return replace(demand, limit=known.remaining, known=0)

    def _take_back(self, ticket: Ticket) -> None:
        """Have a reservation undone that may have been made all the same."""
        charges = tuple(Charge(count=demand.count, amount=0) for demand in ticket.demands)
        self._carrier.send(Settle(ticket.id, charges))

    def _drop(self, ticket: Ticket) -> None:
        guest = self._guests.get(ticket.request.invocation.id)
        if guest is not None:
            guest.ticket = None

    # --- what a call took -------------------------------------------------------------------------

    def _note_call(self, ticket: Ticket, call: ModelCall) -> None:
        ticket.calls += 1
        ticket.usage += call.usage
        ticket.cost += call.price or NO_COST
        if call.kind == "measured":
            self._estimates.learn(ticket.request.model, ticket.request.input, call.usage)

    def _close(self, invocation_id: str) -> tuple[Settle | None, Ticket | None]:
        """Make the settlement of an invocation's open ticket, once."""
        guest = self._guests.get(invocation_id)
        ticket = guest.ticket if guest is not None else None
        if guest is None or ticket is None:
            return None, None
        guest.ticket = None
        if ticket.calls:
            guest.counted.update(
                want.quota.name for want in ticket.wants if want.quota.unit == "invocations"
            )
        charges = tuple(
            Charge(count=demand.count, amount=_taken(want.quota, ticket), known=demand.known)
            for want, demand in zip(ticket.wants, ticket.demands, strict=False)
        )
        operation = Settle(ticket.id, charges)
        if ticket.is_local:
            self._local.run([operation])
        return operation, ticket

    # --- what is told -----------------------------------------------------------------------------

    def _decide(self, ticket: Ticket, want: Want, decision: Decision) -> None:
        self._tell(
            QuotaDecision(
                invocation=ticket.request.invocation,
                quota=want.quota.name,
                key=want.key.shown,
                decision=decision,
                wanted=in_unit(want.quota.unit, want.amount),
                unit=unit_name(want.quota.unit),
            )
        )

    def _note_use(self, ticket: Ticket, standings: Iterable[Standing]) -> None:
        """Remember and tell how the counts stand now."""
        for want, demand, standing in zip(ticket.wants, ticket.demands, standings, strict=True):
            limit = standing.limit or self._limit_of(demand)
            latest = Standing(standing.used, standing.reserved, limit)
            with self._lock:
                self._known[demand.count] = latest
                self._known.move_to_end(demand.count)
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
            unit = want.quota.unit
            self._tell(
                QuotaUse(
                    quota=want.quota.name,
                    key=want.key.shown,
                    unit=unit_name(unit),
                    used=in_unit(unit, latest.used),
                    reserved=in_unit(unit, latest.reserved),
                    limit=in_unit(unit, latest.limit),
                )
            )

    def _limit_of(self, demand: Demand) -> int:
        known = self._known.get(demand.count)
        return known.limit if known is not None else demand.limit

    def _verdict(self, ticket: Ticket, reply: Reply, *, observed: bool) -> Verdict | None:
        """Make the verdict of the quotas that lack and are only observed, or of those enforced."""
        return _verdict_of(
            [
                (ticket.wants[n], _breach(ticket.wants[n], reply.standings[n], reply.status))
                for n in reply.lacking
                if (ticket.wants[n].action == "observe") == observed
            ]
        )


# --- helpers without state ------------------------------------------------------------------------


def _lookup(request: Request) -> Lookup:
    def look_up(source: str) -> object:
        kind, _, name = source.partition(".")
        if kind == "agent":
            return request.invocation.agent
        if kind == "model":
            return request.model
        if kind == "baggage":
            return baggage.get_baggage(name)
        return request.attributes.get(name)

    return look_up


def _action(quota: Quota, request: Request) -> Action:
    """What is done at this quota; nobody can be asked to extend one."""
    action = quota.action or request.action
    return "halt" if action == "ask" else action


def _taken(quota: Quota, ticket: Ticket) -> int:
    """What the call took of a quota, in parts."""
    if quota.unit == "tokens":
        return ticket.usage.total
    if quota.unit == "model_calls":
        return ticket.calls
    if quota.unit == "invocations":
        return min(1, ticket.calls)
    return parts_of_usd(ticket.cost)


def _breach(want: Want, standing: Standing, status: str = "refused") -> Breach:
    """Say what the count would have come to with this call."""
    unit = want.quota.unit
    taken = standing.used + standing.reserved
    total = taken + want.amount if status == "refused" else taken
    note = (
        f"quota {want.quota.name} permits {in_words(unit, standing.limit)} and with this call "
        f"{in_words(unit, total)} could be used"
    )
    return _breach_of(want, standing.limit, total, note)


def _unanswered(want: Want) -> Breach:
    note = f"quota {want.quota.name} could not be checked, because its store does not answer"
    return _breach_of(want, want.quota.amount, 0, note)


def _no_price(want: Want) -> Breach:
    note = f"quota {want.quota.name} is in USD and the price of the model is unknown"
    return _breach_of(want, want.quota.amount, 0, note)


def _breach_of(want: Want, cap: int, observed: int, note: str) -> Breach:
    unit = want.quota.unit
    return Breach(
        limit=want.quota.name,
        cap=in_unit(unit, cap),
        observed=in_unit(unit, observed),
        reason=QUOTA_EXCEEDED_STOP_REASON,
        unit=unit_name(unit),
        note=note,
    )


def _verdict_of(denied: Sequence[tuple[Want, Breach]]) -> Verdict | None:
    """Decide by the quota that comes first."""
    if not denied:
        return None
    return Verdict(
        QUOTA_EXCEEDED_STOP_REASON,
        tuple(breach for _, breach in denied),
        denied[0][0].action,
    )


def _local_decision(reply: Reply, want: Want) -> Decision:
    return "degraded_local_admitted" if reply.status == "admitted" else "degraded_local_refused"


async def _wait(future: Future[Reply], seconds: float) -> None:
    """Wait until `future` is done, or not; neither cancels the other."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def wake(_: Future[Reply]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(None))

    future.add_done_callback(wake)
    await asyncio.wait([done], timeout=seconds)
