"""Tables and charts of exact values that form an answer, and values as readers see them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias

from otel_limits.ledger.rows import time_of

CellKind: TypeAlias = Literal[
    "text",
    "sentence",
    "command",
    "date",
    "id",
    "count",
    "amount",
    "money",
    "share",
    "time",
    "seconds",
    "number",
]
"""How a value is formatted: `amount` is a number as exact text, `money` a `Decimal` in USD, `share`
a fraction, `time` microseconds since the epoch, `id` and `command` something to copy. In narrow
layouts a `text` may be shortened, a `sentence` is wrapped, and a `command` is printed below the
table. `None` means unknown for any kind."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    title: str
    kind: CellKind = "text"
    is_key: bool = False
    """Shown in every layout: it identifies the row, or is the main result. Where there is too
    little room, a main result that is 0 in each row is only named."""
    is_detail: bool = False
    """Hidden before the others where there is too little room."""
    note: str = ""
    """A sentence below the table, where the column is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    total: Sequence[Any] | None = None
    """A last row with the totals."""
    note: str = ""
    """A hint for readers of the table."""
    levels: Sequence[int] = ()
    """Indentation of each row, if the rows are a tree."""
    empty: str = "None."
    """Shown if there are no rows."""

    def note_with(self, columns: Iterable[Column]) -> str:
        """Return the hint after those of the columns that are shown; empty without rows."""
        notes = [*(column.note for column in columns), self.note] if self.rows else []
        # Two columns may have the same.
        return " ".join(dict.fromkeys(filter(None, notes)))


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One color of a chart: a value per label."""

    name: str
    values: Sequence[float]
    tone: str = ""
    """`halted` or `killed` for what a limit or a person ended; a color of the palette otherwise."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across a chart, such as a cap."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Stacked series over labels."""

    name: str
    title: str
    labels: Sequence[str]
    series: Sequence[ChartSeries]
    kind: CellKind = "count"
    horizontal: bool = False
    """Horizontal bars, for labels that are names."""
    wide: bool = False
    """Twice as wide, for many labels."""
    axis: str = ""
    """Name of the label axis."""
    marks: Sequence[Mark] = ()
    """Positions on the label axis, in labels as numbers."""
    note: str = ""
    """Data that the chart leaves out."""


@dataclass(frozen=True, slots=True)
class Projection:
    """Projected spend by the end of a period: USD as `Decimal`, or whole tokens."""

    period: str
    """`day`, `week` or `month`."""
    until_us: int
    so_far: Any
    expected: Any
    low: Any
    """Of the 95% interval; at least what is already spent."""
    high: Any


@dataclass(frozen=True, slots=True)
class Forecast:
    """A spend forecast, or why none is available."""

    sentence: str
    unit: Literal["usd", "tokens"] | None = None
    days: int = 0
    """Whole days that it is based on."""
    periods: Sequence[Projection] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to an audit question."""

    question: str
    """Its name, e.g. `spend`."""
    title: str
    about: str
    """The part of the ledger that it covers."""
    made: str = ""
    """When and by which version it was made, and the time that it covers; only for pages."""
    tables: Sequence[Table] = ()
    csv: Table | None = None
    """The table for CSV, if it is not the first one."""
    charts: Sequence[Chart] = ()
    text: str = ""
    """An answer that is not a table, e.g. a policy file."""
    status: int = 0
    """Exit status of the command."""
    passed: bool | None = None
    """Whether everything that was checked is as it must be; `None` if nothing was."""
    summary: str = ""
    """The result in one sentence."""
    forecast: Forecast | None = None
    since_us: int | None = None
    """The earliest time that it covers, if that is not the start of the selection."""
    complete: str = ""
    """Whether the ledger contains everything that the answer counts, in one line."""
    pruned_us: int | None = None
    """The time before which rows were pruned, if it covers an earlier time."""
    totals: Sequence[tuple[str, CellKind, Any]] = field(default=())
    """The most important numbers, with their titles."""


# --- values as readers see them -------------------------------------------------------------------

UNKNOWN: Final = "–"  # noqa: RUF001  the dash used in tables
CENTS: Final = Decimal("0.01")
NUMBERS: Final = ("count", "amount", "money", "share", "seconds", "number")
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
    is_number = kind in ("count", "amount") and value != ""
    return f"{Decimal(value):,f}" if is_number else str(value)


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
