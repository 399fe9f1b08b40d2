"""Needs and usage of a model call in each quota. Values and pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry import baggage

from otel_limits.core.price import NO_QUOTE, Quote
from otel_limits.core.price_lookup import because_of
from otel_limits.core.usage import NO_COST, Usage
from otel_limits.quotas.keys import key_text
from otel_limits.quotas.quota import Quota, Unit, parts_of_usd
from otel_limits.quotas.store import (
    Charge,
    Count,
    CountState,
    Demand,
    QuotaStore,
)

if TYPE_CHECKING:
    from otel_limits.core.events import ModelCall
    from otel_limits.core.policy import Action
    from otel_limits.quotas.estimates import CallEstimate
    from otel_limits.quotas.keys import Key, Lookup
    from otel_limits.quotas.wait_queues import QueueKey
    from otel_limits.runs.quota_gate import AdmissionRequest

SLOT_LEASE_SECONDS: Final = 30.0
"""Lease of a concurrency slot: a worker that does not renew it loses it."""

UNPRICED: Final = -1
"""Marks an unknown amount of money."""

PriceOf: TypeAlias = "Callable[[AdmissionRequest, Usage], Quote]"
Known: TypeAlias = Callable[[Count], CountState | None]
Asked: TypeAlias = "tuple[QuotaNeed, Demand]"


@dataclass(frozen=True, slots=True)
class QuotaNeed:
    """The amount of one applicable quota that a call needs."""

    quota: Quota
    key: Key
    limit: int
    """The amount of the quota for this key and plan, before changes in the store."""
    amount: int
    """Reserved parts."""
    at_most: bool
    """True if it is the upper bound of an unknown price."""
    certain: bool
    """True if actual usage cannot exceed it."""
    model: str
    action: Action
    because: str = ""
    """Why its price is unknown, as part of a sentence."""
    sharer: str = ""
    """With whom it shares its turns in a queue."""
    is_of_last: bool = False
    """True for a last answer, which is sent and counted even if too little is left."""

    @property
    def is_enforced(self) -> bool:
        """Whether the call is refused if the remainder is too small."""
        return self.action != "observe" and not self.is_of_last

    @property
    def waits(self) -> bool:
        """Whether the call waits if the remainder is too small."""
        return self.is_enforced and self.quota.on_exceeded == "wait"

    @property
    def admits_last(self) -> bool:
        """Whether a last answer may exceed it. Also that call needs a slot, like any other."""
        return self.action == "wrap_up" and self.quota.unit != "concurrency"

    @property
    def queue(self) -> QueueKey:
        """The queue in which it waits."""
        return self.quota.name, self.key.id


@dataclass(slots=True, eq=False)
class QuotaReservation:
    """The amounts of a request to a model in quotas, from its admission to its settlement.

    It belongs to the request for admission until it is granted, and then to the model calls, the
    last of which settles it. If the request ends without a grant, however that happens, it
    releases what the store may have reserved.
    """

    id: str
    request: AdmissionRequest
    needs: list[QuotaNeed]
    demands: tuple[Demand, ...] = ()
    """Requested from the store, in the order of the needs."""
    reserved_in: QuotaStore | None = None
    """The local store that holds it during an outage."""
    apart: QuotaReservation | None = None
    """The part in quotas whose data in the store cannot be read: only this process has it."""
    loop: object = None
    """The event loop in which its request waits."""
    waits_until: float = 0.0
    """When its request gives up waiting for quota, in monotonic seconds; 0 unless it waits."""
    is_unclaimed: bool = False
    """True if the store may have reserved it, or leaves room for it, and it is not granted."""
    repeated: frozenset[str] = frozenset()
    """Quotas that another call of the invocation has counted it in."""
    leased_at: float | None = None
    """When it was last leased, in monotonic seconds; `None` before it is held."""
    waited: float = 0.0
    """Seconds that the call has waited for quota."""
    ended: list[str] = field(default_factory=list)
    """The IDs of its calls that were sent and have ended."""
    tokens: int = 0
    cost: Decimal = NO_COST

    @property
    def counts_invocation_in(self) -> frozenset[str]:
        """Names of the quotas that count the invocation by this call."""
        names = (each.quota.name for each in self.needs if each.quota.unit == "invocations")
        return frozenset(names)

    def leave_out(self, needs: Sequence[QuotaNeed]) -> None:
        """Drop needs that are not reserved."""
        self.needs = [each for each in self.needs if each not in needs]

    def split(self, positions: Collection[int]) -> QuotaReservation:
        """Move the needs at these positions to a reservation that only this process has."""
        needs = [self.needs[n] for n in positions]
        self.leave_out(needs)
        self.demands = ()
        self.apart = QuotaReservation(f"{self.id}-apart", self.request, needs, apart=self.apart)
        return self.apart

    @property
    def asked(self) -> list[Asked]:
        """Pairs of needs and their demands."""
        return list(zip(self.needs, self.demands, strict=True))

    def charges(self) -> tuple[Charge, ...]:
        """Return the usage of its calls; empty if nothing was requested."""
        # Neither a call that was not sent nor a sum says anything about others.
        says_more = len(self.ended) == len(self.request.calls) == 1
        # Not strict: without a store request, needs have no demands.
        return tuple(
            Charge(
                count=demand.count,
                amount=charged_amount(need.quota, self),
                known=demand.known,
                model=demand.model if says_more else "",
            )
            for need, demand in zip(self.needs, self.demands, strict=False)
        )

    def note(self, call: ModelCall) -> tuple[Charge, ...]:
        """Add the usage of a call that has ended, and return it."""
        if self.apart is not None:
            self.apart.note(call)
        earlier = self.charges()
        self.ended.append(call.call_id)
        self.tokens += call.usage.total
        self.cost += call.charge or NO_COST
        pairs = zip(self.charges(), earlier, strict=True)
        return tuple(replace(each, amount=each.amount - before.amount) for each, before in pairs)


def lookup_of(request: AdmissionRequest) -> Lookup:
    """Return a function that reads key sources from a request."""

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


def need_of(
    quota: Quota, request: AdmissionRequest, lookup: Lookup, estimate: CallEstimate, price: PriceOf
) -> QuotaNeed:
    """Return what a request needs of an applicable quota."""
    action = quota.action or request.action
    key = quota.key.key(quota.name, lookup)
    quote = price(request, estimate.usage) if quota.unit == "usd" else NO_QUOTE
    return QuotaNeed(
        quota=quota,
        key=key,
        limit=quota.amount_of(key, lookup),
        amount=_amount(quota.unit, estimate.usage, quote),
        at_most=quote.at_most is not None,
        # Counts of calls do not depend on the answer.
        certain=estimate.certain or quota.unit not in ("tokens", "usd"),
        model=request.model,
        because=because_of(quote),
        # A quota cannot be extended by a prompt: the whole fleet shares it.
        action="halt" if action == "ask" else action,
        sharer=key_text(lookup(quota.fair_by)) if quota.fair_by else "",
    )


def sum_of(needs: Sequence[QuotaNeed]) -> QuotaNeed:
    """Return what calls that are admitted together need of a quota.

    Args:
        needs: The need of each.
    """
    first = needs[0]
    # An invocation is counted by its first call only.
    if len(needs) == 1 or first.quota.unit == "invocations":
        return first
    amounts = [each.amount for each in needs]
    return replace(
        first,
        amount=UNPRICED if UNPRICED in amounts else sum(amounts),
        at_most=any(each.at_most for each in needs),
        certain=all(each.certain for each in needs),
    )


def demand_for(need: QuotaNeed, now: float, known: Known, *, forced: bool) -> Demand:
    """Return the demand for a need at the store's time `now`."""
    quota = need.quota
    count = quota.count(need.key, now)
    state = known(count)
    return Demand(
        count=count,
        amount=need.amount,
        limit=need.limit,
        planned=bool(quota.plan),
        enforced=need.is_enforced and not forced,
        # `expected` already includes a margin: it reserves twice the mean.
        certain=need.certain or quota.reserve == "expected",
        alone=not need.certain,
        # A store that restarted without its data continues from the last usage seen.
        known=state.used if state is not None and count.refill is None else 0,
        lease_seconds=SLOT_LEASE_SECONDS if quota.unit == "concurrency" else None,
        waits=quota.max_wait if need.waits and not forced else 0.0,
        model=need.model if quota.on_lost == "charge" else "",
    )


def charged_amount(quota: Quota, reservation: QuotaReservation) -> int:
    """Return the usage of a call, in parts of the quota's unit."""
    match quota.unit:
        case "tokens":
            return reservation.tokens
        case "usd":
            return parts_of_usd(reservation.cost)
        case "model_calls":
            return len(reservation.ended)
        case "invocations":
            return int(bool(reservation.ended) and quota.name not in reservation.repeated)
        case "concurrency":  # A slot is free when its call ends: nothing remains used.
            return 0


def _amount(unit: Unit, worst: Usage, quote: Quote) -> int:
    """Return the worst case of a call, in parts; `UNPRICED` if no price and no bound is known."""
    match unit:
        case "tokens":
            return worst.total
        case "usd":
            return UNPRICED if quote.charge is None else parts_of_usd(quote.charge)
        case "model_calls" | "invocations" | "concurrency":
            return 1
