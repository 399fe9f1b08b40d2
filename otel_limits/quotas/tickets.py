"""A model call on its way past the quotas: what it wants of each, what it took, why it may not go.

Everything here is a value or a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry import baggage

from otel_limits.core.limits import QUOTA_EXCEEDED_STOP_REASON, Breach
from otel_limits.core.policy import Action, Verdict
from otel_limits.core.usage import NO_COST, Usage
from otel_limits.quotas.quota import Quota, Unit, in_unit, in_words, parts_of_usd, unit_name
from otel_limits.quotas.store import Charge, Count, Demand, Reply, Standing

if TYPE_CHECKING:
    from otel_limits.quotas.estimates import WorstCase
    from otel_limits.quotas.keys import Key, Lookup
    from otel_limits.quotas.store import Store
    from otel_limits.runs.gate import Request

UNPRICED: Final = -1
"""Stands for an amount of money that nobody knows."""

PriceOf: TypeAlias = Callable[[str, Usage], "Decimal | None"]
Known: TypeAlias = Callable[[Count], "Standing | None"]
Denied: TypeAlias = "tuple[Want, Breach]"


@dataclass(frozen=True, slots=True)
class Want:
    """What a call wants of one quota."""

    quota: Quota
    key: Key
    amount: int
    """The most that it may take, in parts."""
    certain: bool
    """True when it will not turn out bigger."""
    action: Action

    @property
    def is_enforced(self) -> bool:
        """Tell whether the call stays where it is when there is not enough."""
        return self.action != "observe"


@dataclass(slots=True)
class Ticket:
    """One call that asked to go out, until it is settled."""

    id: str
    request: Request
    wants: list[Want]
    demands: tuple[Demand, ...] = ()
    """What was asked of the store, in the order of the wants."""
    reserved_in: Store | None = None
    """Where it was reserved when the store did not answer."""
    calls: int = 0
    """1 once it has ended, 0 until then and where it never went out."""
    tokens: int = 0
    cost: Decimal = NO_COST

    def leave_out(self, wants: Sequence[Want]) -> None:
        """Don't ask for these."""
        self.wants = [each for each in self.wants if each not in wants]

    def charges(self) -> tuple[Charge, ...]:
        """What the call took; nothing where it was never asked for."""
        return tuple(
            Charge(count=demand.count, amount=taken(want.quota.unit, self), known=demand.known)
            for want, demand in zip(self.wants, self.demands, strict=False)
        )


@dataclass(slots=True)
class Guest:
    """What is remembered of a live invocation."""

    ticket: Ticket | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Trace attributes of its agent."""
    counted: set[str] = field(default_factory=set)
    """Names of the quotas that have counted the invocation."""


def lookup_of(request: Request) -> Lookup:
    """Make what reads the sources of keys for a request."""

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


def want_of(
    quota: Quota, request: Request, lookup: Lookup, worst: WorstCase, price: PriceOf
) -> Want:
    """Say what a request wants of a quota that applies to it."""
    action = quota.action or request.action
    return Want(
        quota=quota,
        key=quota.key.key(quota.name, lookup),
        amount=_amount(quota.unit, request.model, worst.usage, price),
        certain=worst.certain or quota.unit in ("model_calls", "invocations"),
        action="halt" if action == "ask" else action,  # nobody can extend a quota in passing
    )


def demand_of(want: Want, now: float, known: Known, *, forced: bool) -> Demand:
    """Say the same to a store whose clock shows `now`."""
    quota = want.quota
    count = Count(quota.name, want.key.id, quota.windows.at(now), want.key.shown)
    standing = known(count)
    return Demand(
        count=count,
        amount=want.amount,
        limit=quota.amount,
        enforced=want.is_enforced and not forced,
        certain=want.certain,
        known=standing.used if standing is not None else 0,
    )


def taken(unit: Unit, ticket: Ticket) -> int:
    """What a call took, in parts of a unit."""
    if unit == "tokens":
        return ticket.tokens
    if unit in ("model_calls", "invocations"):
        return ticket.calls
    return parts_of_usd(ticket.cost)


def lacking(ticket: Ticket, reply: Reply, *, enforced: bool) -> list[Denied]:
    """Return the wants that could not be met, the enforced ones or the others."""
    return [
        (ticket.wants[n], exceeded(ticket.wants[n], reply.standings[n], reply.status))
        for n in reply.lacking
        if ticket.wants[n].is_enforced == enforced
    ]


def verdict_of(denied: Sequence[Denied]) -> Verdict | None:
    """Decide by the quota that comes first; `None` when nothing was denied."""
    if not denied:
        return None
    breaches = tuple(breach for _, breach in denied)
    return Verdict(QUOTA_EXCEEDED_STOP_REASON, breaches, denied[0][0].action)


def exceeded(want: Want, standing: Standing, status: str) -> Breach:
    """Say what the count comes to with this call."""
    total = standing.used + standing.reserved + (want.amount if status == "refused" else 0)
    unit = want.quota.unit
    note = (
        f"quota {want.quota.name} permits {in_words(unit, standing.limit)} and with this call "
        f"{in_words(unit, total)} could be used"
    )
    return _breach(want, standing.limit, total, note)


def unanswered(want: Want) -> Breach:
    """Say that nobody knows whether there is enough."""
    note = f"quota {want.quota.name} could not be checked, because its store does not answer"
    return _breach(want, want.quota.amount, 0, note)


def without_price(want: Want) -> Breach:
    """Say that nobody knows what the call costs."""
    note = f"quota {want.quota.name} is in USD and the price of the model is unknown"
    return _breach(want, want.quota.amount, 0, note)


def _breach(want: Want, cap: int, observed: int, note: str) -> Breach:
    unit = want.quota.unit
    return Breach(
        limit=want.quota.name,
        cap=in_unit(unit, cap),
        observed=in_unit(unit, observed),
        reason=QUOTA_EXCEEDED_STOP_REASON,
        unit=unit_name(unit),
        note=note,
    )


def _amount(unit: Unit, model: str, worst: Usage, price: PriceOf) -> int:
    """What the call may take at most, in parts; `UNPRICED` when nobody knows."""
    if unit == "tokens":
        return worst.total
    if unit != "usd":
        return 1
    cost = price(model, worst)
    return UNPRICED if cost is None else parts_of_usd(cost)
