"""The parts of a difference between a bill and the ledger, each with its cause.

The parts of a day and model add up to its difference exactly. A part that no cause explains is
`unexplained`, which includes prices that are not those of the bill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from otel_limits.audit.bill_sides import ALL_MODELS
from otel_limits.core.usage import EXACT, NO_COST
from otel_limits.ledger.rows import dollars

if TYPE_CHECKING:
    from otel_limits.audit.bill_sides import ModelDay

ONLY_BILLED: Final = "only on the bill"
ONLY_RECORDED: Final = "only in the ledger"
OTHER_DAY: Final = "on another day"
UNPRICED: Final = "unpriced"
UNMEASURED: Final = "unmeasured"
ESTIMATED: Final = "estimated"
IMPORTED: Final = "imported"
ROUNDING: Final = "rounding"
UNEXPLAINED: Final = "unexplained"

DAY: Final = timedelta(days=1)


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
