"""Refusals of model calls by quotas: their sentences, verdicts and events."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from otel_limits.core.events import Decision, QuotaDecision, QuotaUse
from otel_limits.core.labels import clean
from otel_limits.core.limits import (
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    Breach,
)
from otel_limits.core.policy import Verdict
from otel_limits.core.usage import QuotaRefusal
from otel_limits.quotas.quota import in_unit, in_words, unit_name
from otel_limits.quotas.store import FOREVER, Block, CountState, Demand, Reply, resets_at
from otel_limits.quotas.windows import shown_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_limits.quotas.needs import Asked, QuotaNeed, QuotaReservation

SLOT_RETRY_SECONDS: Final = 1.0
"""Suggested retry delay for a slot, which is free as soon as any call ends."""

Denied: TypeAlias = "tuple[QuotaNeed, Breach]"


def unmet_needs(asked: Sequence[Asked], reply: Reply, *, enforced: bool) -> list[Denied]:
    """Return the needs that could not be met, either enforced or observed."""
    return [
        (asked[n][0], exceeded(*asked[n], reply, reply.states[n]))
        for n in reply.unmet
        if asked[n][0].is_enforced == enforced
    ]


def verdict_of(denied: Sequence[Denied]) -> Verdict | None:
    """Return a verdict with the action of the first quota; `None` if none denied."""
    if not denied:
        return None
    breaches = tuple(breach for _, breach in denied)
    return Verdict(breaches[0].reason, breaches, denied[0][0].action)


def exceeded(need: QuotaNeed, demand: Demand, reply: Reply, state: CountState) -> Breach:
    """Describe a refusal: usage including this call, the reset time, and who set the limit."""
    breach = _exceeded(need, demand, reply, state)
    if state.limit == demand.capacity:
        return breach
    return replace(breach, origin=f"{breach.origin}, and was changed by an operator")


def _exceeded(need: QuotaNeed, demand: Demand, reply: Reply, state: CountState) -> Breach:
    # The reserved amount already includes an admitted call.
    is_refused = reply.status == "refused"
    this = need.amount if is_refused else 0
    total = state.used + state.reserved + this
    quota, count = need.quota, demand.count
    ends = resets_at(count, state, reply.now)
    if state.block is not None:
        return _blocked(need, state, state.block, ends, reply.now)
    including = "" if is_refused else ", including this one"
    if quota.unit == "concurrency":
        return _no_slot(need, state, total, reply.now, including)
    wait = max(0, math.ceil(room_at(demand, state, reply.now) - reply.now))
    figures = quota.figures(state)
    reserved = f", {figures.reserved} reserved by in-flight calls" if state.reserved else ""
    amount = f"{'at most ' if need.at_most else ''}{in_unit(quota.unit, this)}"
    needs = f", and this call needs {amount}" if is_refused else including
    burst = " in a burst" if count.refill else ""
    note = (
        f"quota {quota.name!r} allows {in_words(quota.unit, state.limit)}{burst}"
        f"{_whose(need)}: {figures.used} used{reserved}{needs}; {_ends(need)} at {shown_time(ends)}"
    )
    return _breach(need, state, note, observed=total, resets_at=ends, retry_after=wait)


def room_at(demand: Demand, state: CountState, now: float) -> float:
    """Return when a refused call may fit if nothing is released: the store's time."""
    ends = resets_at(demand.count, state, now)
    level = state.used + state.reserved
    if demand.count.refill is None or not level:
        return ends
    lacking = level + min(demand.amount, state.limit) - state.limit
    return now + (ends - now) * lacking / level


def _ends(need: QuotaNeed) -> str:
    return "full" if need.quota.refill else "resets"


def _whose(need: QuotaNeed) -> str:
    """Name the key of a keyed quota."""
    return f" for {need.key.shown}" if need.quota.key.text else ""


def _no_slot(need: QuotaNeed, state: CountState, total: int, now: float, including: str) -> Breach:
    """Describe a refusal for lack of a free slot."""
    quota, retry = need.quota, SLOT_RETRY_SECONDS
    needs = f", and this request needs {need.amount}" if need.amount > 1 and not including else ""
    note = (
        f"quota {quota.name!r} allows {in_words(quota.unit, state.limit)}{_whose(need)}: "
        f"{state.reserved} in flight{including}{needs}; a slot is released when a call ends"
    )
    return _breach(need, state, note, observed=total, resets_at=now + retry, retry_after=retry)


def after_wait(need: QuotaNeed, breach: Breach, waited: Mapping[str, float]) -> Breach:
    """Add the waiting time if the call gave up waiting."""
    seconds = waited.get(need.quota.name)
    if seconds is None:
        return breach
    return replace(breach, note=f"{breach.note}; the call waited {seconds:.0f} s for it")


def _blocked(need: QuotaNeed, state: CountState, block: Block, ends: float, now: float) -> Breach:
    """Describe a refusal because of an operator's block."""
    has_end = block.until < FOREVER
    until = shown_time(block.until) if has_end else "it is unblocked"
    reason = f": {block.reason}" if block.reason else ""
    note = (
        f"quota {need.quota.name!r} is blocked{_whose(need)} until {until}{reason}; "
        f"{_describe(need, state, ends)}"
    )
    wait = math.ceil(block.until - now) if has_end else None
    return _breach(need, state, note, observed=state.used, resets_at=ends, retry_after=wait)


UNAVAILABLE: Final = "the quota store is unavailable"


def unanswered(
    need: QuotaNeed,
    demand: Demand,
    known: CountState | None,
    now: float,
    retry: float,
    why: str,
) -> Breach:
    """Describe a refusal because the store cannot be asked.

    Args:
        need: What could not be reserved.
        demand: Where it would have been counted.
        known: Last known state of the count.
        now: The store's time.
        retry: Seconds until the store is tried again.
        why: Why it cannot be asked.
    """
    ends = resets_at(demand.count, known, now)
    last = "" if known is None else f"; last known state: {_describe(need, known, ends)}"
    note = f"quota {need.quota.name!r} could not be checked{_whose(need)} because {why}{last}"
    state = known or CountState(0, 0, demand.capacity)
    breach = _breach(need, state, note, observed=0, resets_at=ends, retry_after=retry)
    cap = in_unit(need.quota.unit, need.limit)
    return replace(breach, cap=cap, reason=QUOTA_UNAVAILABLE_STOP_REASON)


def _describe(need: QuotaNeed, state: CountState, ends: float) -> str:
    """Describe the state of a count."""
    quota, figures = need.quota, need.quota.figures(state)
    permitted = in_words(quota.unit, state.limit)
    again = "" if quota.unit == "concurrency" else f", {_ends(need)} at {shown_time(ends)}"
    return f"{figures.used} of {permitted} used, {figures.reserved} reserved{again}"


def without_price(need: QuotaNeed, demand: Demand, known: CountState | None, now: float) -> Breach:
    """Describe a refusal because the price is unknown."""
    note = (
        f"quota {need.quota.name!r}{_whose(need)} is in USD, and no price for model "
        f"{clean(need.model)!r} is known{need.because}"
    )
    ends = resets_at(demand.count, known, now)
    state, wait = known or CountState(0, 0, demand.capacity), max(0, math.ceil(ends - now))
    breach = _breach(need, state, note, observed=0, resets_at=ends, retry_after=wait)
    return replace(breach, cap=in_unit(need.quota.unit, need.limit), uncounted=True)


def decision_of(
    reservation: QuotaReservation, need: QuotaNeed, decision: Decision
) -> QuotaDecision:
    """Return the event for a quota decision."""
    unit = need.quota.unit
    return QuotaDecision(
        invocation=reservation.request.invocation,
        quota=need.quota.name,
        key=need.key.shown,
        decision=decision,
        wanted=in_unit(unit, max(0, need.amount)),
        unit=unit_name(unit),
    )


def use_of(need: QuotaNeed, demand: Demand, state: CountState, now: float) -> QuotaUse:
    """Return the event for the quota state after a reservation or settlement."""
    figures = need.quota.figures(state)
    return QuotaUse(
        quota=need.quota.name,
        key=need.key.shown,
        unit=figures.unit,
        used=figures.used,
        reserved=figures.reserved,
        limit=figures.limit,
        resets=resets_at(demand.count, state, now),
    )


def _breach(
    need: QuotaNeed,
    state: CountState,
    note: str,
    *,
    observed: int,
    resets_at: float,
    retry_after: float | None,
) -> Breach:
    """Return a breach of the limit in a state, with the refusal that describes it."""
    figures = need.quota.figures(state)
    return Breach(
        limit=need.quota.name,
        cap=figures.limit,
        observed=in_unit(need.quota.unit, observed),
        reason=QUOTA_EXCEEDED_STOP_REASON,
        unit=figures.unit,
        note=note,
        quota=QuotaRefusal(
            quota=need.quota.name,
            key=need.key.shown,
            unit=figures.unit,
            used=figures.used,
            reserved=figures.reserved,
            limit=figures.limit,
            resets_at=resets_at,
            retry_after_seconds=retry_after,
        ),
        origin=need.quota.origin,
    )
