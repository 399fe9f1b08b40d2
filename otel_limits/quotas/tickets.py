"""Tickets of model calls: quota needs, usage and reasons for refusal. Values and pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry import baggage

from otel_limits.core.events import Decision, QuotaDecision, QuotaUse
from otel_limits.core.labels import clean
from otel_limits.core.limits import (
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    Breach,
)
from otel_limits.core.policy import Action, Verdict
from otel_limits.core.price import NO_QUOTE, Quote
from otel_limits.core.quota_state import QuotaRefusal
from otel_limits.core.usage import NO_COST, Usage
from otel_limits.quotas.keys import key_text
from otel_limits.quotas.quota import Quota, Unit, in_unit, in_words, parts_of_usd, unit_name
from otel_limits.quotas.store import (
    FOREVER,
    Block,
    Charge,
    Count,
    CountState,
    Demand,
    QuotaStore,
    Reply,
    resets_at,
)
from otel_limits.quotas.windows import shown_time

if TYPE_CHECKING:
    from otel_limits.quotas.estimates import CallEstimate
    from otel_limits.quotas.keys import Key, Lookup
    from otel_limits.quotas.wait_queues import QueueKey
    from otel_limits.runs.calls import AdmissionRequest

SLOT_LEASE_SECONDS: Final = 30.0
"""Lease of a concurrency slot: a worker that does not renew it loses it."""

SLOT_RETRY_SECONDS: Final = 1.0
"""Suggested retry delay for a slot, which is free as soon as any call ends."""

UNPRICED: Final = -1
"""Marks an unknown amount of money."""

PriceOf: TypeAlias = "Callable[[AdmissionRequest, Usage], Quote]"
Known: TypeAlias = Callable[[Count], CountState | None]
Asked: TypeAlias = "tuple[QuotaNeed, Demand]"
Denied: TypeAlias = "tuple[QuotaNeed, Breach]"


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
    sharer: str = ""
    """With whom it shares its turns in a queue."""

    @property
    def is_enforced(self) -> bool:
        """Whether the call is refused if the remainder is too small."""
        return self.action != "observe"

    @property
    def waits(self) -> bool:
        """Whether the call waits if the remainder is too small."""
        return self.is_enforced and self.quota.on_exceeded == "wait"

    @property
    def queue(self) -> QueueKey:
        """The queue in which it waits."""
        return self.quota.name, self.key.id


@dataclass(slots=True)
class Ticket:
    """A model call from its admission request to its settlement."""

    id: str
    request: AdmissionRequest
    needs: list[QuotaNeed]
    demands: tuple[Demand, ...] = ()
    """Requested from the store, in the order of the needs."""
    reserved_in: QuotaStore | None = None
    """The local store that holds its reservation during an outage."""
    leased_at: float | None = None
    """When its reservation was last leased, in monotonic seconds; `None` without a reservation."""
    waited: float = 0.0
    """Seconds that it has waited for quota."""
    calls: int = 0
    """1 once it has ended; 0 until then and if it was never sent."""
    tokens: int = 0
    cost: Decimal = NO_COST

    def leave_out(self, needs: Sequence[QuotaNeed]) -> None:
        """Drop needs that are not reserved."""
        self.needs = [each for each in self.needs if each not in needs]

    @property
    def asked(self) -> list[Asked]:
        """Pairs of needs and their demands."""
        return list(zip(self.needs, self.demands, strict=True))

    def charges(self) -> tuple[Charge, ...]:
        """Return the usage of the call; empty if nothing was requested."""
        # Not strict: without a store request, needs have no demands.
        return tuple(
            Charge(
                count=demand.count,
                amount=charged_amount(need.quota.unit, self),
                known=demand.known,
                # A call that was not sent says nothing about others.
                model=demand.model if self.calls else "",
            )
            for need, demand in zip(self.needs, self.demands, strict=False)
        )


@dataclass(slots=True)
class InvocationState:
    """Quota state of an invocation in progress."""

    tickets: dict[str, Ticket] = field(default_factory=dict)
    """The open ticket of each call in flight, by its ID."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Trace attributes of its agent."""
    counted: set[str] = field(default_factory=set)
    """Names of quotas that already counted the invocation."""

    def counts_invocation(self, quota: str) -> bool:
        """Return whether a quota has counted the invocation, or is about to."""
        return quota in self.counted or any(
            need.quota.name == quota and need.quota.unit == "invocations"
            for ticket in self.tickets.values()
            for need in ticket.needs
        )

    def close(self, call_id: str) -> Ticket | None:
        """Remove and return the ticket of a call; the caller must settle it."""
        ticket = self.tickets.pop(call_id, None)
        # Only after a sent call: a refused call leaves the invocation uncounted.
        if ticket is not None and ticket.calls:
            self.counted.update(
                need.quota.name for need in ticket.needs if need.quota.unit == "invocations"
            )
        return ticket


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
        # A quota cannot be extended by a prompt: the whole fleet shares it.
        action="halt" if action == "ask" else action,
        sharer=key_text(lookup(quota.fair_by)) if quota.fair_by else "",
    )


def demand_for(need: QuotaNeed, now: float, known: Known, *, forced: bool) -> Demand:
    """Return the demand for a need at the store's time `now`."""
    quota = need.quota
    count = quota.count(need.key, now)
    standing = known(count)
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
        known=standing.used if standing is not None and count.refill is None else 0,
        lease_seconds=SLOT_LEASE_SECONDS if quota.unit == "concurrency" else None,
        waits=quota.max_wait if need.waits and not forced else 0.0,
        model=need.model if quota.on_lost == "charge" else "",
    )


def charged_amount(unit: Unit, ticket: Ticket) -> int:
    """Return the usage of a call, in parts of a unit."""
    if unit == "tokens":
        return ticket.tokens
    # A slot is free when its call ends: nothing remains used.
    if unit == "concurrency":
        return 0
    if unit in ("model_calls", "invocations"):
        return ticket.calls
    return parts_of_usd(ticket.cost)


def unmet_needs(asked: Sequence[Asked], reply: Reply, *, enforced: bool) -> list[Denied]:
    """Return the needs that could not be met, either enforced or observed."""
    return [
        (asked[n][0], exceeded(*asked[n], reply, reply.standings[n]))
        for n in reply.unmet
        if asked[n][0].is_enforced == enforced
    ]


def verdict_of(denied: Sequence[Denied]) -> Verdict | None:
    """Return a verdict with the action of the first quota; `None` if none denied."""
    if not denied:
        return None
    breaches = tuple(breach for _, breach in denied)
    return Verdict(breaches[0].reason, breaches, denied[0][0].action)


def exceeded(need: QuotaNeed, demand: Demand, reply: Reply, standing: CountState) -> Breach:
    """Describe a refusal: usage including this call, and the reset time."""
    # The reserved amount already includes an admitted call.
    is_refused = reply.status == "refused"
    this = need.amount if is_refused else 0
    total = standing.used + standing.reserved + this
    quota, count = need.quota, demand.count
    ends = resets_at(count, standing, reply.now)
    if standing.block is not None:
        return _blocked(need, standing, standing.block, ends, reply.now)
    including = "" if is_refused else ", including this one"
    if quota.unit == "concurrency":
        return _no_slot(need, standing, total, reply.now, including)
    wait = max(0, math.ceil(room_at(demand, standing, reply.now) - reply.now))
    figures = quota.figures(standing)
    reserved = f", {figures.reserved} reserved by in-flight calls" if standing.reserved else ""
    amount = f"{'at most ' if need.at_most else ''}{in_unit(quota.unit, this)}"
    needs = f", and this call needs {amount}" if is_refused else including
    burst = " in a burst" if count.refill else ""
    note = (
        f"quota {quota.name!r} allows {in_words(quota.unit, standing.limit)}{burst}"
        f"{_whose(need)}: {figures.used} used{reserved}{needs}; {_ends(need)} at {shown_time(ends)}"
    )
    refusal = _refusal(need, standing, resets_at=ends, retry_after=wait)
    return _breach(need, standing.limit, total, note, refusal)


def room_at(demand: Demand, standing: CountState, now: float) -> float:
    """Return when a refused call may fit if nothing is released: the store's time."""
    ends = resets_at(demand.count, standing, now)
    level = standing.used + standing.reserved
    if demand.count.refill is None or not level:
        return ends
    lacking = level + min(demand.amount, standing.limit) - standing.limit
    return now + (ends - now) * lacking / level


def _ends(need: QuotaNeed) -> str:
    return "full" if need.quota.refill else "resets"


def _whose(need: QuotaNeed) -> str:
    """Name the key of a keyed quota."""
    return f" for {need.key.shown}" if need.quota.key.text else ""


def _no_slot(
    need: QuotaNeed, standing: CountState, total: int, now: float, including: str
) -> Breach:
    """Describe a refusal for lack of a free slot."""
    quota, retry = need.quota, SLOT_RETRY_SECONDS
    note = (
        f"quota {quota.name!r} allows {in_words(quota.unit, standing.limit)}{_whose(need)}: "
        f"{standing.reserved} in flight{including}; a slot is released when a call ends"
    )
    refusal = _refusal(need, standing, resets_at=now + retry, retry_after=retry)
    return _breach(need, standing.limit, total, note, refusal)


def after_wait(need: QuotaNeed, breach: Breach, waited: Mapping[str, float]) -> Breach:
    """Add the waiting time if the call gave up waiting."""
    seconds = waited.get(need.quota.name)
    if seconds is None:
        return breach
    return replace(breach, note=f"{breach.note}; the call waited {seconds:.0f} s for it")


def _blocked(
    need: QuotaNeed, standing: CountState, block: Block, ends: float, now: float
) -> Breach:
    """Describe a refusal because of an operator's block."""
    until = "it is unblocked" if block.until >= FOREVER else shown_time(block.until)
    reason = f": {block.reason}" if block.reason else ""
    note = (
        f"quota {need.quota.name!r} is blocked{_whose(need)} until {until}{reason}; "
        f"{_state(need, standing, ends)}"
    )
    wait = math.ceil(block.until - now)
    refusal = _refusal(need, standing, resets_at=ends, retry_after=wait)
    return _breach(need, standing.limit, standing.used, note, refusal)


def unanswered(
    need: QuotaNeed, demand: Demand, known: CountState | None, now: float, retry: float
) -> Breach:
    """Describe a refusal because the store is unavailable.

    Args:
        need: What could not be reserved.
        demand: Where it would have been counted.
        known: Last known state of the count.
        now: The store's time.
        retry: Seconds until the store is tried again.
    """
    ends = resets_at(demand.count, known, now)
    last = "" if known is None else f"; last known state: {_state(need, known, ends)}"
    note = (
        f"quota {need.quota.name!r} could not be checked{_whose(need)} because the quota store is "
        f"unavailable{last}"
    )
    refusal = _refusal(
        need,
        known or CountState(0, 0, demand.capacity),
        resets_at=ends,
        retry_after=retry,
    )
    breach = _breach(need, need.limit, 0, note, refusal)
    return replace(breach, reason=QUOTA_UNAVAILABLE_STOP_REASON)


def _state(need: QuotaNeed, standing: CountState, ends: float) -> str:
    """Describe the state of a count."""
    quota, figures = need.quota, need.quota.figures(standing)
    permitted = in_words(quota.unit, standing.limit)
    again = "" if quota.unit == "concurrency" else f", {_ends(need)} at {shown_time(ends)}"
    return f"{figures.used} of {permitted} used, {figures.reserved} reserved{again}"


def without_price(need: QuotaNeed, demand: Demand, known: CountState | None, now: float) -> Breach:
    """Describe a refusal because the price is unknown."""
    note = (
        f"quota {need.quota.name!r}{_whose(need)} is in USD, and no price for model "
        f"{clean(need.model)!r} is known"
    )
    ends = resets_at(demand.count, known, now)
    refusal = _refusal(
        need,
        known or CountState(0, 0, demand.capacity),
        resets_at=ends,
        retry_after=max(0, math.ceil(ends - now)),
    )
    return replace(_breach(need, need.limit, 0, note, refusal), uncounted=True)


def decision_of(ticket: Ticket, need: QuotaNeed, decision: Decision) -> QuotaDecision:
    """Return the event for a quota decision."""
    unit = need.quota.unit
    return QuotaDecision(
        invocation=ticket.request.invocation,
        quota=need.quota.name,
        key=need.key.shown,
        decision=decision,
        wanted=in_unit(unit, max(0, need.amount)),
        unit=unit_name(unit),
    )


def use_of(need: QuotaNeed, demand: Demand, standing: CountState, now: float) -> QuotaUse:
    """Return the event for the quota state after a reservation or settlement."""
    figures = need.quota.figures(standing)
    return QuotaUse(
        quota=need.quota.name,
        key=need.key.shown,
        unit=figures.unit,
        used=figures.used,
        reserved=figures.reserved,
        limit=figures.limit,
        resets=resets_at(demand.count, standing, now),
    )


def _refusal(
    need: QuotaNeed, standing: CountState, *, resets_at: float, retry_after: float
) -> QuotaRefusal:
    figures = need.quota.figures(standing)
    return QuotaRefusal(
        quota=need.quota.name,
        key=need.key.shown,
        unit=figures.unit,
        used=figures.used,
        reserved=figures.reserved,
        limit=figures.limit,
        resets_at=resets_at,
        retry_after_seconds=retry_after,
    )


def _breach(
    need: QuotaNeed, cap: int, observed: int, note: str, refusal: QuotaRefusal | None = None
) -> Breach:
    unit = need.quota.unit
    return Breach(
        limit=need.quota.name,
        cap=in_unit(unit, cap),
        observed=in_unit(unit, observed),
        reason=QUOTA_EXCEEDED_STOP_REASON,
        unit=unit_name(unit),
        note=note,
        quota=refusal,
        origin=need.quota.origin,
    )


def _amount(unit: Unit, worst: Usage, quote: Quote) -> int:
    """Return the worst case of a call, in parts; `UNPRICED` if no price and no bound is known."""
    if unit == "tokens":
        return worst.total
    if unit != "usd":
        return 1
    return UNPRICED if quote.charge is None else parts_of_usd(quote.charge)
