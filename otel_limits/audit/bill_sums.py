"""Divides the differences of a bill that has sums: tokens are valued at the rates of the bill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from otel_limits.audit.bill_parts import (
    DAY,
    ESTIMATED,
    IMPORTED,
    ONLY_BILLED,
    ONLY_RECORDED,
    OTHER_DAY,
    UNMEASURED,
    UNPRICED,
    DifferencePart,
    cause_of,
    in_usd,
)
from otel_limits.audit.bill_sides import cost_cells
from otel_limits.audit.bills.bill import KINDS, Kind
from otel_limits.ledger.rows import PICODOLLARS

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.audit.bill_sides import ModelDay, Place, Sides

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
