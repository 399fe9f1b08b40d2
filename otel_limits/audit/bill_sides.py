"""A bill and the ledger side by side: the same days, and the same names of models."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Final, TypeAlias

from otel_limits.audit.bills.bill import KINDS, BilledTokens, Kind
from otel_limits.core.usage import EXACT, NO_COST
from otel_limits.ledger.rows import UNKNOWN_SIZE
from otel_limits.vendors.records import vendors

if TYPE_CHECKING:
    from otel_limits.audit.bills.bill import Bill, BillRow
    from otel_limits.ledger.reconciling import RecordedCalls

ALL_MODELS: Final = "(all models)"
"""The name of a group if the bill is not divided by model."""
SNAPSHOT: Final = re.compile(r"[-@](?:\d{4}-\d\d-\d\d|\d{8}|latest|0)$")
"""The date of a model's version, which a request may leave out, or have as `latest`. Anthropic's
`claude-opus-4-0` is `claude-opus-4-20250514`."""
CENT: Final = -2
"""Amounts are at least as exact as a cent: the decimal places of a float omit zeros."""
HALF: Final = Decimal("0.5")
HALF_A_PICODOLLAR: Final = HALF.scaleb(-12)

Place: TypeAlias = tuple[date, str]
"""A day and a model."""
Tokens: TypeAlias = dict[Kind, int]


def no_tokens() -> Tokens:
    """Return a count of 0 for each kind."""
    return dict.fromkeys(KINDS, 0)


@dataclass(slots=True)
class ModelDay:
    """The use of a model on a day, on both sides."""

    day: date
    model: str
    billed: Tokens = field(default_factory=no_tokens)
    requests: int = 0
    paid: Decimal = NO_COST
    paid_for: dict[Kind, Decimal] = field(default_factory=dict)
    """The part of `paid` that is for one kind of tokens."""
    amounts: int = 0
    """Amounts on the bill, each of which was rounded."""
    recorded: Tokens = field(default_factory=no_tokens)
    unpriced: Tokens = field(default_factory=no_tokens)
    """The tokens of `recorded` without a known price."""
    calls: int = 0
    pico: int = 0
    unpriced_calls: int = 0
    estimated: int = 0
    unmeasured: int = 0
    imported: int = 0
    listed_as: tuple[str, str] | None = None
    """A model and vendor by which a price list may have it."""

    @property
    def more_tokens(self) -> Tokens:
        """How many more tokens of each kind the bill has."""
        return {kind: self.billed[kind] - self.recorded[kind] for kind in KINDS}

    def add_row(self, row: BillRow, tokens: Tokens | None, vendor: str) -> None:
        """Add a row of the bill of a vendor."""
        if row.models and self.listed_as is None:
            self.listed_as = (row.models[0], vendor)
        for kind, number in (tokens or {}).items():
            self.billed[kind] += number
        self.requests += row.requests or 0
        if row.cost is not None:
            self.paid = EXACT.add(self.paid, row.cost)
            self.amounts += 1
        if row.cost is not None and row.kind is not None:
            before = self.paid_for.get(row.kind, NO_COST)
            self.paid_for[row.kind] = EXACT.add(before, row.cost)

    def add_calls(self, calls: RecordedCalls, tokens: Tokens) -> None:
        """Add calls of the ledger."""
        for kind, number in tokens.items():
            self.recorded[kind] += number
            self.unpriced[kind] += 0 if calls.is_priced else number
        self.calls += calls.calls
        self.pico += calls.pico
        self.unpriced_calls += 0 if calls.is_priced else calls.calls
        is_guess = calls.state in UNKNOWN_SIZE
        has_tokens = calls.input + calls.output > 0
        self.estimated += calls.calls if is_guess and has_tokens else 0
        self.unmeasured += calls.calls if is_guess and not has_tokens else 0
        self.imported += calls.calls if calls.is_imported else 0
        self.listed_as = (calls.model, calls.vendor)


@dataclass(slots=True, kw_only=True)
class Sides:
    """A bill, the calls of the ledger that may be on it, and both by day and model."""

    bill: Bill
    rows: list[tuple[Place, BillRow]]
    calls: list[tuple[Place, RecordedCalls]]
    """Calls that are evidence: not those that were imported from this bill."""
    later: list[tuple[Place, RecordedCalls]]
    """Calls that ended on the day after one of the bill, on which they may have started."""
    logged: list[tuple[Place, RecordedCalls]]
    """Calls that were imported from the gateway's log, which cannot confirm it."""
    groups: dict[Place, ModelDay]
    tokens_of: Callable[[BillRow], Tokens | None]
    has_requests: bool
    has_cache_reads: bool
    has_cache_writes: bool
    scope: str
    """A sentence about which calls are compared, if that is not obvious."""
    rounding: Decimal
    """USD by which an amount may be rounded."""

    def may_be_rounding(self, amount: Decimal, groups: Iterable[ModelDay]) -> bool:
        """Return whether rounded amounts and prices of calls explain a difference."""
        bound = NO_COST
        for each in groups:
            bound += self.rounding * each.amounts + HALF_A_PICODOLLAR * each.calls
        return abs(amount) <= bound


def name_of(model: str) -> str:
    """Return a model's name without vendor and date, by which both sides agree on it."""
    return SNAPSHOT.sub("", model.rpartition("/")[2].lower())


def models_of_gateways(bills: Iterable[Bill]) -> frozenset[str]:
    """Return the names of the models on the bills of gateways."""
    return frozenset(
        name_of(model)
        for bill in bills
        if bill.reader.passes_on
        for row in bill.rows
        for model in row.models
    )


def side_by_side(
    bill: Bill, recorded: Iterable[RecordedCalls], passed_on: frozenset[str] = frozenset()
) -> Sides:
    """Put a bill and the calls of a ledger side by side.

    Args:
        bill: The bill.
        recorded: Calls of the ledger.
        passed_on: The models on the bills of gateways that are compared, too.
    """
    rows = bill.rows
    has_reads = any(row.tokens and row.tokens.cache_read is not None for row in rows)
    has_writes = any(row.tokens and row.tokens.cache_write is not None for row in rows)

    def tokens_of(tokens: BilledTokens) -> Tokens:
        read, written = tokens.cache_read or 0, tokens.cache_write or 0
        return {
            "fresh": tokens.fresh + (0 if has_reads else read) + (0 if has_writes else written),
            "cache_read": read if has_reads else 0,
            "cache_write": written if has_writes else 0,
            "output": tokens.output,
        }

    undivided = {row.day for row in rows if row.tokens and not row.models}
    every = list(recorded)
    known = {name_of(each.model) for each in every}
    placed = [((row.day, _billed_name(row, known, undivided)), row) for row in rows]
    named = {name for (_, name), _ in placed}
    days = bill.used_days | bill.cost_days
    names_gateway = any(each.vendor in bill.reader.vendors for each in every if each.day in days)
    sides = Sides(
        bill=bill,
        rows=placed,
        calls=[],
        later=[],
        logged=[],
        groups={},
        tokens_of=lambda row: None if row.tokens is None else tokens_of(row.tokens),
        has_requests=all(row.requests is not None for row in rows if row.tokens),
        has_cache_reads=has_reads,
        has_cache_writes=has_writes,
        scope=_scope(bill, names_gateway=names_gateway),
        rounding=_rounding(rows),
    )
    for place, row in placed:
        _group(sides, place).add_row(row, sides.tokens_of(row), bill.reader.vendor)
    for each in every:
        name = name_of(each.model)
        is_named = name in named
        if not _is_on(bill, each, is_named=is_named, names_gateway=names_gateway):
            continue
        # A client of a vendor that calls a gateway: the gateway's bill has it, and this one not.
        if name in passed_on and not (is_named or each.is_addressed):
            continue
        place = (each.day, ALL_MODELS if each.day in undivided else name)
        if each.is_logged and bill.reader.passes_on:
            sides.logged.append((place, each))
            continue
        if each.day not in days:
            sides.later.append((place, each))
            continue
        sides.calls.append((place, each))
        fresh = max(0, each.input - each.cache_read - each.cache_write)
        tokens = BilledTokens(fresh, each.cache_read, each.cache_write, each.output)
        _group(sides, place).add_calls(each, tokens_of(tokens))
    return sides


def _billed_name(row: BillRow, known: set[str], undivided: set[date]) -> str:
    if not row.models or row.day in undivided:
        return ALL_MODELS
    names = [name_of(model) for model in row.models]
    return next((name for name in names if name in known), names[0])


def _is_on(bill: Bill, calls: RecordedCalls, *, is_named: bool, names_gateway: bool) -> bool:
    """Return whether calls may be on a bill."""
    if calls.vendor in bill.reader.vendors:
        return True
    if bill.reader.passes_on:
        # The address of a private gateway is not recorded, nor does every client name it.
        passed_on = calls.is_logged or (not names_gateway and not calls.is_addressed)
        return is_named and passed_on
    # A ledger may have only the name of a framework.
    return is_named and calls.vendor not in vendors()


def _scope(bill: Bill, *, names_gateway: bool) -> str:
    if not bill.reader.passes_on:
        return ""
    title = bill.reader.title
    if names_gateway:
        return f"Compared with the calls that name {title} as their provider."
    return (
        f"No call in the ledger names {title} as its provider, so all calls to the bill's models "
        "are compared, except those at the address of another vendor."
    )


def _group(sides: Sides, place: Place) -> ModelDay:
    return sides.groups.setdefault(place, ModelDay(*place))


def _rounding(rows: Iterable[BillRow]) -> Decimal:
    places = [CENT]
    for row in rows:
        exponent = NO_COST.as_tuple().exponent if row.cost is None else row.cost.as_tuple().exponent
        places.append(exponent if isinstance(exponent, int) else 0)
    return HALF.scaleb(min(places))


def cost_cells(sides: Sides) -> Iterator[list[ModelDay]]:
    """Yield the groups whose costs can be compared: of a model, or of a whole day."""
    by_day: defaultdict[date, list[ModelDay]] = defaultdict(list)
    for place in sorted(sides.groups):
        by_day[place[0]].append(sides.groups[place])
    whole: Mapping[date, bool] = {
        day: any(group.model == ALL_MODELS for group in groups) for day, groups in by_day.items()
    }
    for day, groups in by_day.items():
        if day in sides.bill.cost_days:
            yield from [groups] if whole[day] else ([group] for group in groups)
