"""A model call before the quotas: what it needs of each, what it took, why it may not go out.

Everything here is a value or a pure function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry import baggage

from otel_limits.core.events import Decision, QuotaDecision, QuotaUse
from otel_limits.core.limits import (
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    Breach,
)
from otel_limits.core.policy import Action, Verdict
from otel_limits.core.quota_state import QuotaRefusal
from otel_limits.core.usage import NO_COST, Usage
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
)
from otel_limits.quotas.windows import shown_time

if TYPE_CHECKING:
    from otel_limits.quotas.estimates import CallEstimate
    from otel_limits.quotas.keys import Key, Lookup
    from otel_limits.quotas.wait_queues import QueueKey
    from otel_limits.runs.gate import Request

SLOT_LEASE_SECONDS: Final = 30.0
"""How long a place among the calls at once is held for a worker that does not renew it."""

PLACE_RETRY_SECONDS: Final = 1.0
"""When to ask for such a place again: it is free as soon as some call ends."""

UNPRICED: Final = -1
"""Stands for an amount of money that nobody knows."""

PriceOf: TypeAlias = "Callable[[Request, Usage], Decimal | None]"
Known: TypeAlias = Callable[[Count], CountState | None]
Asked: TypeAlias = "tuple[QuotaNeed, Demand]"
Denied: TypeAlias = "tuple[QuotaNeed, Breach]"


@dataclass(frozen=True, slots=True)
class QuotaNeed:
    """What a call needs of one quota that applies to it."""

    quota: Quota
    key: Key
    amount: int
    """What is set aside for it, in parts."""
    certain: bool
    """True when it cannot turn out bigger."""
    action: Action

    @property
    def is_enforced(self) -> bool:
        """Whether the call is refused when there is not enough."""
        return self.action != "observe"

    @property
    def waits(self) -> bool:
        """Whether the call waits when there is not enough."""
        return self.is_enforced and self.quota.on_exceeded == "wait"

    @property
    def queue(self) -> QueueKey:
        """Where it waits."""
        return self.quota.name, self.key.id


@dataclass(slots=True)
class Ticket:
    """One call that asked to go out, until it is settled."""

    id: str
    request: Request
    needs: list[QuotaNeed]
    demands: tuple[Demand, ...] = ()
    """What was asked of the store, in the order of the needs."""
    reserved_in: QuotaStore | None = None
    """Where it was reserved when the store did not answer."""
    leased_at: float | None = None
    """When what is set aside for it was leased last, in monotonic seconds; `None` where nothing
    is."""
    calls: int = 0
    """1 once it has ended, 0 until then and where it never went out."""
    tokens: int = 0
    cost: Decimal = NO_COST

    def leave_out(self, needs: Sequence[QuotaNeed]) -> None:
        """Drop the needs that nobody is to be asked for."""
        self.needs = [each for each in self.needs if each not in needs]

    @property
    def asked(self) -> list[Asked]:
        """What is needed and what was asked of the store for it, in pairs."""
        return list(zip(self.needs, self.demands, strict=True))

    def charges(self) -> tuple[Charge, ...]:
        """What the call took; nothing where it was never asked for."""
        # Not strict: where the store was not asked, there are needs without demands.
        return tuple(
            Charge(
                count=demand.count, amount=charged_amount(need.quota.unit, self), known=demand.known
            )
            for need, demand in zip(self.needs, self.demands, strict=False)
        )


@dataclass(slots=True)
class InvocationState:
    """What is remembered of a live invocation."""

    ticket: Ticket | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Trace attributes of its agent."""
    counted: set[str] = field(default_factory=set)
    """Names of the quotas that have counted the invocation."""

    def close(self) -> Ticket | None:
        """Take the ticket, once: whoever takes it settles it."""
        ticket, self.ticket = self.ticket, None
        # Only with a call that went out: one that was refused leaves the invocation uncounted.
        if ticket is not None and ticket.calls:
            self.counted.update(
                need.quota.name for need in ticket.needs if need.quota.unit == "invocations"
            )
        return ticket


def lookup_of(request: Request) -> Lookup:
    """Return the function that reads the sources of keys from a request."""

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
    quota: Quota, request: Request, lookup: Lookup, estimate: CallEstimate, price: PriceOf
) -> QuotaNeed:
    """Work out what a request needs of a quota that applies to it."""
    action = quota.action or request.action
    return QuotaNeed(
        quota=quota,
        key=quota.key.key(quota.name, lookup),
        amount=_amount(quota.unit, request, estimate.usage, price),
        # A call is one call, however long its answer.
        certain=estimate.certain or quota.unit not in ("tokens", "usd"),
        # Nobody can be asked to extend a quota in passing: the whole fleet shares it.
        action="halt" if action == "ask" else action,
    )


def demand_for(need: QuotaNeed, now: float, known: Known, *, forced: bool) -> Demand:
    """Put a need into the terms of a store whose clock shows `now`."""
    quota = need.quota
    count = quota.count(need.key, now)
    standing = known(count)
    return Demand(
        count=count,
        amount=need.amount,
        limit=quota.amount,
        enforced=need.is_enforced and not forced,
        # What is expected has room for longer answers already: it is set aside twice the mean.
        certain=need.certain or quota.reserve == "expected",
        alone=not need.certain,
        # A store that restarted without its data goes on from what the fleet last saw, and
        # not from 0.
        known=standing.used if standing is not None else 0,
        lease_seconds=SLOT_LEASE_SECONDS if quota.unit == "concurrency" else None,
        waits=quota.max_wait if need.waits and not forced else 0.0,
    )


def charged_amount(unit: Unit, ticket: Ticket) -> int:
    """Return what a call took, in parts of a unit."""
    if unit == "tokens":
        return ticket.tokens
    # A place is free when the call is over: nothing of it stays used.
    if unit == "concurrency":
        return 0
    if unit in ("model_calls", "invocations"):
        return ticket.calls
    return parts_of_usd(ticket.cost)


def unmet_needs(asked: Sequence[Asked], reply: Reply, *, enforced: bool) -> list[Denied]:
    """Return the needs that could not be met, the enforced ones or the others."""
    return [
        (asked[n][0], exceeded(*asked[n], reply, reply.standings[n]))
        for n in reply.unmet
        if asked[n][0].is_enforced == enforced
    ]


def verdict_of(denied: Sequence[Denied]) -> Verdict | None:
    """Return the verdict, whose action is that of the first quota; `None` when none denied."""
    if not denied:
        return None
    breaches = tuple(breach for _, breach in denied)
    return Verdict(breaches[0].reason, breaches, denied[0][0].action)


def exceeded(need: QuotaNeed, demand: Demand, reply: Reply, standing: CountState) -> Breach:
    """Say what the count comes to with this call, and when it begins again."""
    # An admitted call, which is only observed, is in what is reserved already.
    this = need.amount if reply.status == "refused" else 0
    total = standing.used + standing.reserved + this
    quota, window = need.quota, demand.count.window
    figures = quota.figures(standing)
    if standing.block is not None:
        return _blocked(need, standing, standing.block, window.end, reply.now)
    whose = _whose(need)
    if quota.unit == "concurrency":
        return _no_slot(need, standing, total, reply.now)
    wait = max(0, math.ceil(window.end - reply.now))
    note = (
        f"quota {quota.name} permits {in_words(quota.unit, standing.limit)}{whose} and with this "
        f"call {in_words(quota.unit, total)} could be used: {figures.used} are used, "
        f"{figures.reserved} reserved by calls under way; "
        f"it begins again in {wait} s, at {shown_time(window.end)}"
    )
    refusal = _refusal(need, standing, resets_at=window.end, retry_after=wait)
    return _breach(need, standing.limit, total, note, refusal)


def _whose(need: QuotaNeed) -> str:
    """Say whose share it is, where each has one."""
    return f" for {need.key.shown}" if need.quota.key.text else ""


def _no_slot(need: QuotaNeed, standing: CountState, total: int, now: float) -> Breach:
    """Say that as many calls as may be are under way."""
    quota, retry = need.quota, PLACE_RETRY_SECONDS
    note = (
        f"quota {quota.name} permits {in_words(quota.unit, standing.limit)}{_whose(need)}, and "
        f"with this call it would be {total}; {standing.reserved} are under way, and there is a "
        f"place as soon as one of them ends; ask again in {retry:g} s"
    )
    refusal = _refusal(need, standing, resets_at=now + retry, retry_after=retry)
    return _breach(need, standing.limit, total, note, refusal)


def after_wait(need: QuotaNeed, breach: Breach, waited: Mapping[str, float]) -> Breach:
    """Say for how long the call waited before it gave up, where it did."""
    seconds = waited.get(need.quota.name)
    if seconds is None:
        return breach
    return replace(breach, note=f"{breach.note}; the call waited {seconds:.0f} s for it")


def _blocked(
    need: QuotaNeed, standing: CountState, block: Block, resets_at: float, now: float
) -> Breach:
    """Say that an operator has blocked the key."""
    until = "it is unblocked" if block.until >= FOREVER else shown_time(block.until)
    reason = f": {block.reason}" if block.reason else ""
    note = (
        f"quota {need.quota.name} is blocked for {need.key.shown} until {until}{reason}; "
        f"{_state(need, standing, resets_at)}"
    )
    wait = math.ceil(block.until - now)
    refusal = _refusal(need, standing, resets_at=resets_at, retry_after=wait)
    return _breach(need, standing.limit, standing.used, note, refusal)


def unanswered(need: QuotaNeed, demand: Demand, known: CountState | None, retry: float) -> Breach:
    """Say that nobody knows whether there is enough.

    Args:
        need: What could not be asked for.
        demand: Where it would have been counted.
        known: How the count stood when the store was last heard.
        retry: Seconds after which the store is looked for again.
    """
    quota = need.quota
    resets_at = demand.count.window.end
    heard = "nothing was heard of it yet"
    if known is not None:
        heard = f"when it was last heard: {_state(need, known, resets_at)}"
    note = (
        f"quota {quota.name} could not be checked{_whose(need)}, because its store does not "
        f"answer; {heard}; it is asked again in {retry:g} s"
    )
    refusal = _refusal(
        need,
        known or CountState(0, 0, quota.amount),
        resets_at=resets_at,
        retry_after=retry,
    )
    breach = _breach(need, quota.amount, 0, note, refusal)
    return replace(breach, reason=QUOTA_UNAVAILABLE_STOP_REASON)


def _state(need: QuotaNeed, standing: CountState, resets_at: float) -> str:
    """Say how a count stands."""
    quota, figures = need.quota, need.quota.figures(standing)
    permitted = in_words(quota.unit, standing.limit)
    again = "" if quota.unit == "concurrency" else f", begins again at {shown_time(resets_at)}"
    return f"used {figures.used} of {permitted}, reserved {figures.reserved}{again}"


def without_price(need: QuotaNeed, demand: Demand, known: CountState | None, now: float) -> Breach:
    """Say that nobody knows what the call costs."""
    note = f"quota {need.quota.name} is in USD{_whose(need)} and the price of the model is unknown"
    ends = demand.count.window.end
    refusal = _refusal(
        need,
        known or CountState(0, 0, need.quota.amount),
        resets_at=ends,
        retry_after=max(0, math.ceil(ends - now)),
    )
    return _breach(need, need.quota.amount, 0, note, refusal)


def decision_of(ticket: Ticket, need: QuotaNeed, decision: Decision) -> QuotaDecision:
    """Make the event that a quota decided about a call."""
    unit = need.quota.unit
    return QuotaDecision(
        invocation=ticket.request.invocation,
        quota=need.quota.name,
        key=need.key.shown,
        decision=decision,
        wanted=in_unit(unit, max(0, need.amount)),
        unit=unit_name(unit),
    )


def use_of(need: QuotaNeed, demand: Demand, standing: CountState) -> QuotaUse:
    """Make the event how a quota stands after a call was reserved or settled."""
    figures = need.quota.figures(standing)
    return QuotaUse(
        quota=need.quota.name,
        key=need.key.shown,
        unit=figures.unit,
        used=figures.used,
        reserved=figures.reserved,
        limit=figures.limit,
        resets=demand.count.window.end,
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


def _amount(unit: Unit, request: Request, worst: Usage, price: PriceOf) -> int:
    """Return what the call may take at most, in parts; `UNPRICED` when nobody knows."""
    if unit == "tokens":
        return worst.total
    if unit != "usd":
        return 1
    cost = price(request, worst)
    return UNPRICED if cost is None else parts_of_usd(cost)
