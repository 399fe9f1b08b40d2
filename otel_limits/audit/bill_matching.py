"""Matches the calls of a log with those of the ledger, by day, model and tokens.

A log has no ID that the ledger has. Calls with equal tokens are interchangeable, so nothing depends
on which of them is matched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import chain
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
from otel_limits.core.usage import EXACT, NO_COST
from otel_limits.ledger.rows import UNKNOWN_SIZE

if TYPE_CHECKING:
    from otel_limits.audit.bill_sides import Place, Sides
    from otel_limits.ledger.reconciling import RecordedCalls

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
