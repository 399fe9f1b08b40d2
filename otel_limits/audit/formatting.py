"""Values formatted for readers: digit groups, dollars, percentages, UTC."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.ledger.rows import time_of

if TYPE_CHECKING:
    from otel_limits.audit.answer import CellKind

UNKNOWN: Final = "–"  # noqa: RUF001  the dash used in tables
CENTS: Final = Decimal("0.01")
NUMBERS: Final = ("count", "money", "share", "seconds", "number")
"""Kinds that are aligned right."""
UNFINISHED: Final = "(unfinished)"
"""Shown as the stop reason of an invocation without a recorded end."""
SMALL: Final = Decimal("0.000001")
MOST_PLACES: Final = 6
MOST_PLACES_OF_DOLLARS: Final = 4
"""Decimal places in a column of USD; fewer if an amount in it is at least one dollar."""


def column_texts(values: Sequence[Any], kind: CellKind) -> list[str]:
    """Format the values of a column; amounts of USD have the same number of decimal places."""
    amounts = [Decimal(each) for each in values if each and kind == "money"]
    most = MOST_PLACES_OF_DOLLARS if any(abs(each) >= 1 for each in amounts) else MOST_PLACES
    places = max((min(_places(each), most) for each in amounts), default=2)
    return [
        ""
        if value == ""
        else _amount(Decimal(value), places)
        if kind == "money" and value is not None
        else written(value, kind)
        for value in values
    ]


def _places(amount: Decimal) -> int:
    """Return how many decimal places show cents, and two digits of a smaller amount."""
    needed = -int(amount.normalize().as_tuple().exponent)
    return max(2, min(1 - amount.adjusted(), needed))


def _amount(amount: Decimal, places: int) -> str:
    """Format USD with a number of decimal places."""
    sign, amount = "-" if amount < 0 else "", abs(amount)
    least = Decimal(1).scaleb(-places)
    return f"{sign}< ${least:f}" if 0 < amount < least / 2 else f"{sign}${amount:,.{places}f}"


def written(value: Any, kind: CellKind) -> str:
    """Format a value; a dash if unknown."""
    if value is None:
        return UNKNOWN
    if kind == "money":
        return money(Decimal(value))
    if kind == "share":
        return f"{value:.1%}"
    if kind == "time":
        # Not by `strftime`, which drops the zeros of early years.
        return time_of(value).replace(tzinfo=None).isoformat(" ", "seconds")
    if kind in ("seconds", "number"):
        return f"{value:,.1f}" + (" s" if kind == "seconds" else "")
    return f"{value:,}" if kind == "count" and value != "" else str(value)


def ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers, combining consecutive ones: `2-5, 9`."""
    # For consecutive numbers, the difference to the index is constant.
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else f"{each[0]}" for each in spans)


def money(amount: Decimal) -> str:
    """Format USD: cents, and down to a millionth below one dollar."""
    if amount < 0:
        return f"-{money(-amount)}"
    if amount == 0 or amount >= 1:
        return f"${amount.quantize(CENTS):,}"
    if amount < SMALL:
        return "< $0.000001"
    whole, _, rest = f"{amount.quantize(SMALL):f}".partition(".")
    return f"${whole}.{rest.rstrip('0'):0<2}"


def exact(value: Any, kind: CellKind) -> Any:
    """Format a value for programs: money as exact text, times in ISO 8601, nothing rounded."""
    if value is None:
        return None
    if kind == "money":
        return f"{Decimal(value):f}"
    if kind == "time":
        return time_of(value).isoformat()
    return value
