"""A bill and the ledger side by side, and the parts of each difference with its cause."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

from otel_limits.audit.bills.bill import DAY, KINDS, BilledTokens, Kind
from otel_limits.core.usage import EXACT, NO_COST
from otel_limits.ledger.rows import PICODOLLARS, UNKNOWN_SIZE, dollars
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
    days = bill.days
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


# --- parts and causes -----------------------------------------------------------------------------
# The parts of a day and model add up to its difference exactly. A part that no cause explains is
# `unexplained`, which includes prices that are not those of the bill.

ONLY_BILLED: Final = "only on the bill"
ONLY_RECORDED: Final = "only in the ledger"
OTHER_DAY: Final = "on another day"
UNPRICED: Final = "unpriced"
UNMEASURED: Final = "unmeasured"
ESTIMATED: Final = "estimated"
IMPORTED: Final = "imported"
ROUNDING: Final = "rounding"
UNEXPLAINED: Final = "unexplained"


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferencePart:
    """A part of the difference of a day and model, the bill less the ledger."""

    day: date
    model: str
    cause: str
    """Several are joined by "or" if the export does not show which of them it is."""
    calls: int | None = None
    """How many calls it concerns; `None` if unknown."""
    tokens: int = 0
    cost: Decimal = NO_COST
    """USD."""


def cause_of(found: Iterable[str]) -> str:
    """Join the causes that a part may have."""
    return " or ".join(found)


def merged(parts: Iterable[DifferencePart]) -> list[DifferencePart]:
    """Add up the parts of a day and model that have the same cause, in order."""
    found: dict[tuple[date, str, str], DifferencePart] = {}
    for part in parts:
        key = (part.day, part.model, part.cause)
        before = found.get(key)
        if before is None:
            found[key] = part
            continue
        are_known = part.calls is not None and before.calls is not None
        found[key] = replace(
            before,
            calls=(part.calls or 0) + (before.calls or 0) if are_known else None,
            tokens=part.tokens + before.tokens,
            cost=EXACT.add(part.cost, before.cost),
        )
    return [found[key] for key in sorted(found) if found[key].tokens or found[key].cost]


def in_usd(pico: Fraction) -> Decimal:
    """Round picodollars to whole ones, and convert them to USD."""
    return dollars(round(pico)) or NO_COST


def difference_of(cell: Iterable[ModelDay]) -> Decimal:
    """Return the USD that a bill has more than the ledger."""
    difference = NO_COST
    for group in cell:
        paid = EXACT.subtract(group.paid, dollars(group.pico) or NO_COST)
        difference = EXACT.add(difference, paid)
    return difference


def label_of(cell: Sequence[ModelDay]) -> str:
    """Return the model of a cell, or that it has all of a day."""
    return cell[0].model if len(cell) == 1 else ALL_MODELS


# --- bills of single calls ------------------------------------------------------------------------
# A log has no ID that the ledger has. Calls with equal tokens are interchangeable, so nothing
# depends on which of them is matched.

Size: TypeAlias = tuple[int, int]
"""Input and output tokens of a call."""


@dataclass(slots=True)
class UnmatchedCalls:
    """Recorded calls of one size, and how many of them no billed call has matched yet."""

    calls: RecordedCalls
    left: int

    @property
    def is_guess(self) -> bool:
        """Whether the ledger has only an estimate of their tokens, or none."""
        return self.calls.state in UNKNOWN_SIZE

    @property
    def tokens(self) -> int:
        """The tokens of one of them."""
        return (self.calls.input + self.calls.output) // self.calls.calls

    def cost_of(self, number: int) -> Decimal:
        """Return the recorded USD of some of them."""
        return in_usd(Fraction(self.calls.pico * number, self.calls.calls))


class CallMatching:
    """Billed calls and recorded calls, until they are matched."""

    def __init__(self, sides: Sides) -> None:
        """Start with all calls of both sides."""
        self.billed: defaultdict[tuple[Place, Size], list[Decimal]] = defaultdict(list)
        """The cost of each call on the bill, in USD."""
        self.recorded = _by_size(sides.calls)
        self.later = _by_size(sides.later)
        self.logged = _by_size(sides.logged)
        for place, row in sides.rows:
            tokens = sides.tokens_of(row) or {}
            output = tokens.get("output", 0)
            size = (sum(tokens.values()) - output, output)
            self.billed[place, size].append(row.cost or NO_COST)

    def parts(self) -> Iterator[DifferencePart]:
        """Match all calls, and yield the parts of the difference that have a cause."""
        for key, costs in self.billed.items():
            yield from self._same(key, costs)
        for key, costs in self.billed.items():
            yield from self._logged(key, costs)
        for key, costs in self.billed.items():
            yield from self._on_other_days(key, costs)
        for key, costs in self.billed.items():
            yield from self._after_the_bill(key, costs)
        billed: defaultdict[Place, list[tuple[Size, list[Decimal]]]] = defaultdict(list)
        recorded: defaultdict[Place, list[UnmatchedCalls]] = defaultdict(list)
        for (place, size), costs in self.billed.items():
            if costs:
                billed[place].append((size, costs))
        for (place, _), found in self.recorded.items():
            recorded[place] += [each for each in found if each.left]
        for place in sorted({*billed, *recorded}):
            yield from _unmatched(place, billed[place], recorded[place])

    def _same(self, key: tuple[Place, Size], costs: list[Decimal]) -> Iterator[DifferencePart]:
        (day, model), _ = key
        # Priced ones first, so that as little as possible is unpriced.
        found = sorted(
            self.recorded.get(key, ()), key=lambda e: (e.is_guess, not e.calls.is_priced)
        )
        for each in found:
            paid = _withdrawn(costs, each)
            if paid and not each.calls.is_priced:
                cost = _sum(paid)
                yield DifferencePart(
                    day=day, model=model, cause=UNPRICED, calls=len(paid), cost=cost
                )

    def _logged(self, key: tuple[Place, Size], costs: list[Decimal]) -> Iterator[DifferencePart]:
        (day, model), size = key
        # An imported call has the day on which it ended.
        found = (self.logged.get(((at, model), size), ()) for at in (day, day + DAY))
        for each in chain.from_iterable(found):
            paid = _withdrawn(costs, each)
            yield DifferencePart(
                day=day,
                model=model,
                cause=IMPORTED,
                calls=len(paid),
                tokens=len(paid) * sum(size),
                cost=_sum(paid),
            )

    def _on_other_days(
        self, key: tuple[Place, Size], costs: list[Decimal]
    ) -> Iterator[DifferencePart]:
        (day, model), size = key
        for other in (day - DAY, day + DAY):
            for each in self.recorded.get(((other, model), size), ()):
                paid = [] if each.is_guess else _withdrawn(costs, each)
                number, tokens = len(paid), len(paid) * sum(size)
                there = each.cost_of(number)
                for at, sign, cost in ((day, 1, _sum(paid)), (other, -1, EXACT.minus(there))):
                    yield DifferencePart(
                        day=at,
                        model=model,
                        cause=OTHER_DAY,
                        calls=number,
                        tokens=sign * tokens,
                        cost=cost,
                    )

    def _after_the_bill(
        self, key: tuple[Place, Size], costs: list[Decimal]
    ) -> Iterator[DifferencePart]:
        (day, model), size = key
        for each in self.later.get(((day + DAY, model), size), ()):
            paid = [] if each.is_guess else _withdrawn(costs, each)
            if paid:
                yield DifferencePart(
                    day=day,
                    model=model,
                    cause=OTHER_DAY,
                    calls=len(paid),
                    tokens=len(paid) * sum(size),
                    cost=_sum(paid),
                )


def _unmatched(
    place: Place, billed: Sequence[tuple[Size, list[Decimal]]], recorded: Sequence[UnmatchedCalls]
) -> Iterator[DifferencePart]:
    """Yield the part of all calls of a place that are still unmatched, if it has a cause."""
    requests = sum(len(costs) for _, costs in billed)
    cause = _cause_of(requests, recorded)
    if cause:
        paid = _sum(cost for _, costs in billed for cost in costs)
        yield DifferencePart(
            day=place[0],
            model=place[1],
            cause=cause,
            calls=max(requests, sum(each.left for each in recorded)),
            tokens=sum(sum(size) * len(costs) for size, costs in billed)
            - sum(each.tokens * each.left for each in recorded),
            cost=EXACT.subtract(paid, _sum(each.cost_of(each.left) for each in recorded)),
        )


def _cause_of(requests: int, recorded: Sequence[UnmatchedCalls]) -> str:
    """Name the causes of unmatched calls; an empty text without any."""
    calls = sum(each.left for each in recorded)
    guessed = [each for each in recorded if each.is_guess]
    if requests and calls and not guessed:
        # The same calls with other tokens, or other calls: nothing shows which.
        return ""
    found = [ESTIMATED] * any(each.tokens for each in guessed)
    found += [UNMEASURED] * any(not each.tokens for each in guessed)
    if requests > calls:
        found.append(ONLY_BILLED)
    elif requests < calls:
        found.append(ONLY_RECORDED)
        found += [IMPORTED] * any(each.calls.is_imported for each in recorded)
    return cause_of(found)


def _by_size(
    placed: Iterable[tuple[Place, RecordedCalls]],
) -> dict[tuple[Place, Size], list[UnmatchedCalls]]:
    found: defaultdict[tuple[Place, Size], list[UnmatchedCalls]] = defaultdict(list)
    for place, calls in placed:
        size = (calls.input // calls.calls, calls.output // calls.calls)
        found[place, size].append(UnmatchedCalls(calls, calls.calls))
    return dict(found)


def _withdrawn(costs: list[Decimal], found: UnmatchedCalls) -> list[Decimal]:
    """Match as many calls as possible, and return the costs of those on the bill."""
    number = min(len(costs), found.left)
    paid = costs[len(costs) - number :]
    del costs[len(costs) - number :]
    found.left -= number
    return paid


def _sum(costs: Iterable[Decimal]) -> Decimal:
    total = NO_COST
    for cost in costs:
        total = EXACT.add(total, cost)
    return total


# --- bills of sums --------------------------------------------------------------------------------

ListPrices: TypeAlias = Callable[[str, str], Mapping[Kind, Fraction] | None]
"""Returns the listed rates of a model at a vendor, per token."""
Rates: TypeAlias = dict[tuple[str, Kind], Fraction]
"""Picodollars per token, by model and kind."""


def parts_by_sum(sides: Sides, list_prices: ListPrices) -> Iterator[DifferencePart]:
    """Divide the differences of sums, at the rates of the bill."""
    moved = _moved(sides)
    in_cells: set[Place] = set()
    for cell in cost_cells(sides):
        rates = _rates(cell, list_prices, has_use=cell[0].day in sides.bill.used_days)
        for group in cell:
            in_cells.add((group.day, group.model))
            yield from _parts_of_group(sides, group, moved, rates)
    for place, group in sides.groups.items():
        if place not in in_cells and group.day in sides.bill.used_days:
            yield from _parts_of_group(sides, group, moved, {})


def _parts_of_group(
    sides: Sides, group: ModelDay, moved: set[Place], rates: Rates
) -> Iterator[DifferencePart]:
    def cost_of(tokens: Mapping[Kind, int]) -> Decimal:
        each = (tokens[kind] * rates.get((group.model, kind), Fraction(0)) for kind in KINDS)
        return in_usd(sum(each, Fraction(0)))

    more = group.more_tokens
    has_use = group.day in sides.bill.used_days and any(more.values())
    if has_use and (cause := _cause_of_tokens(sides, group, moved)):
        yield DifferencePart(
            day=group.day,
            model=group.model,
            cause=cause,
            calls=_calls_of(sides, group, cause),
            tokens=sum(more.values()),
            cost=cost_of(more),
        )
    if any(group.unpriced.values()):
        yield DifferencePart(
            day=group.day,
            model=group.model,
            cause=UNPRICED,
            calls=group.unpriced_calls,
            cost=cost_of(group.unpriced),
        )


def _cause_of_tokens(sides: Sides, group: ModelDay, moved: set[Place]) -> str:
    """Name the causes that unequal tokens may have; an empty text without any."""
    if (group.day, group.model) in moved:
        return OTHER_DAY
    more = group.more_tokens
    guessed = [ESTIMATED] * bool(group.estimated) + [UNMEASURED] * bool(group.unmeasured)
    difference = group.requests - group.calls if sides.has_requests else sum(more.values())
    aside = []
    if difference > 0 and (guessed or min(more.values()) >= 0):
        aside = [ONLY_BILLED]
    elif difference < 0 and (guessed or max(more.values()) <= 0):
        aside = [ONLY_RECORDED] + [IMPORTED] * bool(group.imported)
    return cause_of([*guessed, *aside])


def _calls_of(sides: Sides, group: ModelDay, cause: str) -> int | None:
    """Return how many calls unequal tokens concern, as far as the bill counts requests."""
    if cause in (ESTIMATED, UNMEASURED):
        return group.estimated + group.unmeasured
    return abs(group.requests - group.calls) if sides.has_requests else None


def _moved(sides: Sides) -> set[Place]:
    """Return the places of adjacent days whose differences cancel each other out."""
    found: set[Place] = set()
    for first, model in sorted(sides.groups):
        run: list[Place] = []
        total = Counter[str]()
        while (place := (first + len(run) * DAY, model)) in sides.groups and place not in found:
            group = sides.groups[place]
            if not any(group.more_tokens.values()):
                break
            run.append(place)
            total.update(group.more_tokens)
            total["requests"] += group.requests - group.calls if sides.has_requests else 0
            if not any(total.values()):
                found.update(run)
    return found


def _rates(cell: Sequence[ModelDay], list_prices: ListPrices, *, has_use: bool) -> Rates:
    """Return picodollars per token of each model and kind in a cell, as the bill has them.

    Args:
        cell: Groups whose costs are compared together.
        list_prices: Returns the listed rates of a model.
        has_use: Whether the bill has the tokens of the day, also if there are none.
    """
    rates: Rates = {}
    undivided: list[tuple[ModelDay, Kind]] = []
    rest = Fraction(0)
    for group in cell:
        rest += Fraction(group.paid)
        for kind in KINDS:
            if group.billed[kind] and kind in group.paid_for:
                paid = Fraction(group.paid_for[kind])
                rest -= paid
                rates[group.model, kind] = paid * PICODOLLARS / group.billed[kind]
            elif group.billed[kind] or group.recorded[kind]:
                undivided.append((group, kind))
    if undivided:
        rates |= _rates_of_rest(cell, undivided, rest * PICODOLLARS, list_prices, has_use=has_use)
    return rates


def _rates_of_rest(
    cell: Sequence[ModelDay],
    undivided: Sequence[tuple[ModelDay, Kind]],
    paid: Fraction,
    list_prices: ListPrices,
    *,
    has_use: bool,
) -> Rates:
    """Return the rates of tokens that have no amount for their kind alone.

    They share the rest of the amounts as on the price list, or equally. Tokens that only the ledger
    has are priced as in the ledger, by the same shares.
    """
    weights = _weights(cell, list_prices)
    # A report of costs alone has no tokens: those of the ledger are assumed.
    counted = [
        (group.model, kind, group.billed[kind] if has_use else group.recorded[kind])
        for group, kind in undivided
    ]
    on_bill = sum(weights[model, kind] * number for model, kind, number in counted)
    in_ledger = sum(
        weights[group.model, kind] * (group.recorded[kind] - group.unpriced[kind])
        for group in cell
        for kind in KINDS
    )
    recorded = Fraction(sum(group.pico for group in cell))
    rates: Rates = {}
    for model, kind, number in counted:
        if number and on_bill:
            rates[model, kind] = weights[model, kind] * paid / on_bill
        elif in_ledger:
            rates[model, kind] = weights[model, kind] * recorded / in_ledger
    return rates


def _weights(cell: Sequence[ModelDay], list_prices: ListPrices) -> Rates:
    listed = {
        group.model: None if group.listed_as is None else list_prices(*group.listed_as)
        for group in cell
    }
    # Rates of one model and guesses of another cannot be compared.
    is_listed = all(listed.values())
    return {
        (group.model, kind): (listed[group.model] or {}).get(kind, Fraction(1))
        if is_listed
        else Fraction(1)
        for group in cell
        for kind in KINDS
    }
