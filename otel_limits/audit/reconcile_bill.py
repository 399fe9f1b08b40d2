"""The ledger against the bills of vendors and gateways, by day and model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Answer, Column, Table, money, written
from otel_limits.audit.bill_differences import (
    ROUNDING,
    UNEXPLAINED,
    CallMatching,
    DifferencePart,
    ListPrices,
    ModelDay,
    Sides,
    cost_cells,
    difference_of,
    label_of,
    merged,
    models_of_gateways,
    parts_by_sum,
    side_by_side,
)
from otel_limits.audit.bills.bill import DAY
from otel_limits.audit.bills.bill_reading import read_bills
from otel_limits.audit.charts import bill_charts
from otel_limits.audit.parsing import to_microseconds
from otel_limits.core.errors import LedgerError
from otel_limits.core.terms import BillableCall
from otel_limits.core.usage import EXACT, NO_COST, Usage
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import dollars

if TYPE_CHECKING:
    from otel_limits.audit.bills.bill import Bill, Kind
    from otel_limits.audit.question import AuditQuery
    from otel_limits.ledger.selection import Selection


# --- the tables -----------------------------------------------------------------------------------

VENDOR: Final = Column("vendor", "Bill", is_key=True)
PLACE: Final = (
    VENDOR,
    Column("day", "Day", "date", is_key=True),
    Column("model", "Model", is_key=True),
)
COSTS: Final = (
    *PLACE,
    Column("ledger", "Ledger", "money"),
    Column("billed", "Billed", "money"),
    Column("difference", "Difference", "money", is_key=True),
    Column("difference_share", "Share of ledger", "share"),
    Column("unexplained", "Unexplained", "money", is_key=True),
    Column("accepted", "Within tolerance", is_key=True),
)
TOKENS: Final = (
    *PLACE,
    Column("measure", "Figure", is_key=True),
    Column("ledger", "Ledger", "count"),
    Column("billed", "Billed", "count"),
    Column("difference", "Difference", "count", is_key=True),
    Column("difference_share", "Share of ledger", "share"),
    Column("accepted", "Within tolerance", is_key=True),
)
PARTS: Final = (
    *PLACE,
    Column("cause", "Cause", "sentence", is_key=True),
    Column("calls", "Calls", "count"),
    Column("tokens", "Tokens", "count"),
    Column("cost", "Cost", "money", is_key=True),
)
OWNERS: Final = (
    VENDOR,
    Column("owner", "Key, project or user", is_key=True),
    Column("requests", "Requests", "count"),
    Column("tokens", "Tokens", "count"),
    Column("cost", "Cost", "money", is_key=True),
)
BILL_TABLES: Final[Mapping[str, Sequence[Column]]] = {
    "bill_cost": COSTS,
    "bill_tokens": TOKENS,
    "bill_parts": PARTS,
    "bill_owners": OWNERS,
}
PARTS_NOTE: Final = (
    "A difference is the bill less the ledger, and its parts add up to it. A part has two causes, "
    "joined by or, if the bill does not show which of them it is. Unexplained includes prices that "
    "differ. Calls are those that a part concerns; a dash if the bill does not count requests."
)
NO_COSTS_NOTE: Final = "Without amounts, only tokens are compared: pass the cost report, too."

TITLES: Final = {
    "bill_cost": "Cost",
    "bill_tokens": "Requests and tokens",
    "bill_parts": "Parts of the differences",
    "bill_owners": "The bill by key, project or user",
}
NOTES: Final = {
    "bill_tokens": "Input includes cached tokens.",
    "bill_parts": PARTS_NOTE,
    "bill_owners": "The ledger does not record them.",
}


# --- the comparison -------------------------------------------------------------------------------

NAMED_FILES: Final = 2
"""More are only counted: a month may have a page for each day."""
NAMED_GAPS: Final = 3
"""Missing days that an error names."""


def reconcile_bill(inquiry: AuditQuery, files: Sequence[Path], tolerance: float) -> Answer:
    """Compare cost and tokens per day and model, and divide each difference by its cause.

    Raises:
        LedgerError: The files are not a whole bill, or have no day to compare.
    """
    from otel_limits.ledger.maintenance import pruned_before

    asked, outside = _selected(read_bills(files), inquiry.selection)
    found, gone = _recorded(asked, pruned_before(inquiry.connection))
    for bill in found:
        _require_all_days(bill)
    costs, tokens, parts, owners, sentences = [], [], [], [], []
    passed_on = models_of_gateways(found)
    remarks: list[str] = []
    list_prices = _list_prices(remarks)
    for bill in found:
        sides = _sides(inquiry, bill, passed_on)
        divided = _divided(sides, list_prices)
        title = bill.reader.title
        costs += [(title, *row) for row in _cost_rows(sides, divided, tolerance)]
        tokens += [(title, *row) for row in _token_rows(sides, tolerance)]
        parts += [
            (title, str(each.day), each.model, each.cause, each.calls, each.tokens, cost)
            for each in divided
            for cost in [_known_cost(each, sides)]
        ]
        owners += [(title, *row) for row in _owner_rows(sides)]
        sentences.append(_sentence(sides, divided))
    rows = {"bill_cost": costs, "bill_tokens": tokens, "bill_parts": parts, "bill_owners": owners}
    compared = {
        "bill_cost": any(bill.cost_days for bill in found),
        "bill_tokens": any(bill.used_days for bill in found),
        "bill_parts": True,
    }
    return Answer(
        question="reconcile",
        title="Ledger and bill",
        about=_about(inquiry, found, tolerance),
        tables=[
            Table(name=name, title=TITLES[name], columns=BILL_TABLES[name], rows=each, note=note)
            for name, each in rows.items()
            if each or compared.get(name)
            for note in [NOTES.get(name, "") if each else ""]
        ],
        charts=bill_charts(costs, parts) if inquiry.has_charts else (),
        summary=" ".join([*sentences, *outside, *gone, *filter(None, remarks)]),
        status=int(bool(gone) or any(row[-1] == "no" for row in (*costs, *tokens))),
        since_us=min(_bounds(min(bill.days), max(bill.days), bill)[0] for bill in asked),
    )


def _selected(bills: Iterable[Bill], selection: Selection) -> tuple[list[Bill], list[str]]:
    """Return the bills within the window, and a sentence about each that is outside of it.

    Raises:
        LedgerError: No bill has a day in it.
    """
    covered = [bill for bill in bills if bill.days]
    if not covered:
        raise LedgerError("The bills have no days. Export them again, with the days to compare.")
    within = [_within(bill, selection.since_us, selection.until_us) for bill in covered]
    found = [bill for bill in within if bill.days]
    if not found:
        raise LedgerError(
            "The bills have no whole day between --since and --until. Leave out both to compare "
            "all days of the bills."
        )
    outside = [
        f"{bill.reader.title}: not compared, as its bill has no whole day between --since and "
        "--until."
        for bill in within
        if not bill.days
    ]
    return found, outside


def _recorded(bills: Iterable[Bill], pruned_us: int | None) -> tuple[list[Bill], list[str]]:
    """Return the days of which no row was pruned, and a sentence about the other days of each bill.

    Raises:
        LedgerError: Rows of all days were pruned.
    """
    if pruned_us is None:
        return list(bills), []
    why = f"the ledger's rows before {written(pruned_us, 'time')} UTC were pruned"
    found, sentences = [], []
    for bill in bills:
        left = _within(bill, pruned_us, None)
        if left.days:
            found.append(left)
        if gone := sorted(bill.days - left.days):
            days = f"{gone[0]} to {gone[-1]}" if len(gone) > 1 else str(gone[0])
            sentences.append(f"{bill.reader.title}: {days} not compared, as {why}.")
    if not found:
        raise LedgerError(f"No day of the bills can be compared: {why}. Export later days.")
    return found, sentences


def _require_all_days(bill: Bill) -> None:
    """Reject a bill with a report that lacks a day of the others, one between two, or part of one.

    The day cannot be compared, and the sums of the answer would be those of other days than it
    names.
    """
    if not (gaps := bill.gaps):
        return
    report, days = next(iter(gaps.items()))
    named = ", ".join(map(str, days[:NAMED_GAPS]))
    if (others := len(days) - NAMED_GAPS) > 0:
        named += f" and {pluralize(others, 'other day')}"
    raise LedgerError(
        f"{bill.reader.title}'s bill of {min(bill.days)} to {max(bill.days)} lacks all or part of "
        f"the {report or 'report'} of {named}. Export each of these days as a whole, or leave it "
        "out with --since and --until."
    )


def _within(bill: Bill, since_us: int | None, until_us: int | None) -> Bill:
    """Return the whole days of a bill within a window, in microseconds."""

    def is_within(day: date) -> bool:
        begin, end = _bounds(day, day, bill)
        return (since_us is None or begin >= since_us) and (until_us is None or end <= until_us)

    return replace(
        bill,
        rows=[row for row in bill.rows if is_within(row.day)],
        used_days=frozenset(filter(is_within, bill.used_days)),
        cost_days=frozenset(filter(is_within, bill.cost_days)),
    )


def _bounds(first: date, last: date, bill: Bill) -> tuple[int, int]:
    """Return when days begin and end, in microseconds."""
    begin = datetime.combine(first, time(), bill.zone)
    end = datetime.combine(last, time(), bill.zone) + DAY
    return to_microseconds(begin), to_microseconds(end)


def _about(inquiry: AuditQuery, bills: Sequence[Bill], tolerance: float) -> str:
    compared = []
    for bill in bills:
        days, number = bill.days, len(bill.files)
        files = ", ".join(bill.files) if number <= NAMED_FILES else pluralize(number, "file")
        compared.append(
            f"{bill.reader.title}'s bill ({files}) of {min(days)} to {max(days)}, "
            f"days of {bill.zone}"
        )
    return f"ledger {inquiry.ledger}, against {'; '.join(compared)}; tolerance {tolerance:.2%}"


def _sides(inquiry: AuditQuery, bill: Bill, passed_on: frozenset[str]) -> Sides:
    from otel_limits.ledger.reconciling import recorded_calls

    # A log has the day on which a call started, and the ledger that on which it ended.
    later = DAY if bill.has_calls else timedelta()
    since_us, until_us = _bounds(min(bill.days), max(bill.days) + later, bill)
    selection = replace(inquiry.selection, since_us=since_us, until_us=until_us, zone=bill.zone)
    calls = recorded_calls(inquiry.connection, selection, by_size=bill.has_calls)
    return side_by_side(bill, inquiry.work.through(calls), passed_on)


def _divided(sides: Sides, list_prices: ListPrices) -> list[DifferencePart]:
    """Divide all differences into parts, including those without a cause."""
    known = list(
        CallMatching(sides).parts() if sides.bill.has_calls else parts_by_sum(sides, list_prices)
    )
    return merged([*known, *_rest(sides, known)])


def _rest(sides: Sides, known: Sequence[DifferencePart]) -> Iterator[DifferencePart]:
    """Yield the parts without a cause: rounding, or unexplained."""
    tokens: defaultdict[tuple[date, str], int] = defaultdict(int)
    costs: defaultdict[tuple[date, str], Decimal] = defaultdict(Decimal)
    for part in known:
        tokens[part.day, part.model] += part.tokens
        costs[part.day, part.model] = EXACT.add(costs[part.day, part.model], part.cost)
    for place, group in sorted(sides.groups.items()):
        if group.day in sides.bill.used_days:
            rest = sum(group.more_tokens.values()) - tokens[place]
            yield DifferencePart(day=group.day, model=group.model, cause=UNEXPLAINED, tokens=rest)
    for cell in cost_cells(sides):
        cost = difference_of(cell)
        for group in cell:
            cost = EXACT.subtract(cost, costs[group.day, group.model])
        cause = ROUNDING if sides.may_be_rounding(cost, cell) else UNEXPLAINED
        yield DifferencePart(day=cell[0].day, model=label_of(cell), cause=cause, cost=cost)


def _known_cost(part: DifferencePart, sides: Sides) -> Decimal | None:
    """Return the USD of a part; `None` if the ledger has calls there, and no price of them."""
    group = sides.groups.get((part.day, part.model))
    is_unpriced = group is not None and group.unpriced_calls == group.calls > 0
    return None if is_unpriced and not part.cost else part.cost


def _list_prices(remarks: list[str]) -> ListPrices:
    """Return how to look up the rates of a model, for amounts that are for all its tokens.

    Once a price is looked up, `remarks` says if those of the policy file are missing.
    """
    from otel_limits.core.price_lookup import Prices
    from otel_limits.settings.policy.file import usable_document

    @cache  # most bills have amounts by kind of tokens, and need no list
    def prices() -> Prices:
        document, remark = usable_document()
        remarks.append(remark)
        return Prices(document.price_list())

    def listed(model: str, vendor: str) -> Mapping[Kind, Fraction] | None:
        usage = Usage(input=1, output=1)
        rates = prices().quote(BillableCall(model=model, provider=vendor, usage=usage)).rates
        if rates is None:
            return None
        read, written, _ = rates.cache_rates
        by_kind: Mapping[Kind, Decimal] = {
            "fresh": rates.input,
            "cache_read": read,
            "cache_write": written,
            "output": rates.output,
        }
        return {kind: Fraction(rate) for kind, rate in by_kind.items()}

    return listed


def _cost_rows(
    sides: Sides, parts: Iterable[DifferencePart], tolerance: float
) -> Iterator[tuple[Any, ...]]:
    unexplained: defaultdict[tuple[date, str], Decimal] = defaultdict(Decimal)
    for part in parts:
        if part.cause == UNEXPLAINED:
            place = (part.day, part.model)
            unexplained[place] = EXACT.add(unexplained[place], part.cost)
    for cell in cost_cells(sides):
        difference = difference_of(cell)
        recorded = dollars(sum(group.pico for group in cell)) or NO_COST
        billed = EXACT.add(recorded, difference)
        if not (recorded or billed):
            continue
        day, model = cell[0].day, label_of(cell)
        share = _share(difference, recorded)
        is_near = _is_near(share, difference, tolerance) or sides.may_be_rounding(difference, cell)
        yield (
            str(day),
            model,
            recorded,
            billed,
            difference,
            share,
            unexplained[day, model],
            "yes" if is_near else "no",
        )


def _share(difference: Decimal | int, ledger: Decimal | int) -> float | None:
    if not ledger:
        return None
    return float(EXACT.divide(Decimal(difference).copy_abs(), Decimal(ledger)))


def _is_near(share: float | None, difference: Decimal | int, tolerance: float) -> bool:
    return not difference if share is None else share <= tolerance


def _token_rows(sides: Sides, tolerance: float) -> Iterator[tuple[Any, ...]]:
    for _, group in sorted(sides.groups.items()):
        if group.day not in sides.bill.used_days:
            continue
        for measure, recorded, billed in _figures(sides, group):
            difference = billed - recorded
            share = _share(difference, recorded)
            if recorded or billed:
                near = "yes" if _is_near(share, difference, tolerance) else "no"
                day = str(group.day)
                yield day, group.model, measure, recorded, billed, difference, share, near


def _figures(sides: Sides, group: ModelDay) -> Iterator[tuple[str, int, int]]:
    ours, theirs = group.recorded, group.billed
    if sides.has_requests:
        yield "requests", group.calls, group.requests
    sent, billed = (sum(each.values()) - each["output"] for each in (ours, theirs))
    yield "input tokens", sent, billed
    yield "output tokens", ours["output"], theirs["output"]
    if sides.has_cache_reads:
        yield "cached input tokens", ours["cache_read"], theirs["cache_read"]
    if sides.has_cache_writes:
        yield "cache write tokens", ours["cache_write"], theirs["cache_write"]


def _owner_rows(sides: Sides) -> list[tuple[Any, ...]]:
    """Add up the bill by owner, the costliest first."""
    sums: dict[str, ModelDay] = {}
    for _, row in sides.rows:
        if row.owner:
            group = sums.setdefault(row.owner, ModelDay(row.day, row.owner))
            group.add_row(row, sides.tokens_of(row), sides.bill.reader.vendor)
    in_order = sorted(sums.items(), key=lambda item: (-item[1].paid, item[0]))
    has_cost = bool(sides.bill.cost_days)
    return [
        (
            owner,
            group.requests if sides.has_requests else None,
            sum(group.billed.values()),
            group.paid if has_cost else None,
        )
        for owner, group in in_order
    ]


def _sentence(sides: Sides, parts: Iterable[DifferencePart]) -> str:
    """Summarize a comparison: what is billed and recorded, and why they differ."""
    sentences = [_of_costs(sides, parts) if sides.bill.cost_days else _of_tokens(sides)]
    if sides.scope:
        sentences.append(sides.scope)
    days = sides.bill.days
    logged = sum(each.calls for (day, _), each in sides.logged if day in days)
    if logged:
        sentences.append(
            f"{pluralize(logged, 'call')} in the ledger came from this log by ledger import, and "
            "cannot confirm it."
        )
    return " ".join(sentences)


def _of_costs(sides: Sides, parts: Iterable[DifferencePart]) -> str:
    cells = list(cost_cells(sides))
    recorded = dollars(sum(group.pico for cell in cells for group in cell)) or NO_COST
    difference = difference_of(group for cell in cells for group in cell)
    by_cause: defaultdict[str, Decimal] = defaultdict(Decimal)
    for part in parts:
        by_cause[part.cause] = EXACT.add(by_cause[part.cause], part.cost)
    unexplained = by_cause.pop(UNEXPLAINED, NO_COST)
    in_order = sorted(by_cause.items(), key=lambda item: (-abs(item[1]), item[0]))
    found = [f"{cause} {money(cost)}" for cause, cost in in_order if cost]
    unpriced = sum(group.unpriced_calls for cell in cells for group in cell)
    without = f", without {pluralize(unpriced, 'call')} of unknown price" if unpriced else ""
    return (
        f"{sides.bill.reader.title}: {money(EXACT.add(recorded, difference))} billed, "
        f"{money(recorded)} in the ledger{without}. Difference {money(difference)}: "
        f"{', '.join([*found, f'unexplained {money(unexplained)}'])}."
    )


def _of_tokens(sides: Sides) -> str:
    billed = sum(sum(group.billed.values()) for group in sides.groups.values())
    recorded = sum(sum(group.recorded.values()) for group in sides.groups.values())
    return (
        f"{sides.bill.reader.title}: {billed:,} tokens billed, {recorded:,} in the ledger. "
        f"{NO_COSTS_NOTE}"
    )
