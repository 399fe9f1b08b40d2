"""What an answer is made of: tables and charts of exact values, however they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

CellKind: TypeAlias = Literal[
    "text", "sentence", "date", "id", "count", "money", "share", "time", "seconds", "number"
]
"""How a value is written: `money` is a `Decimal` in USD, `share` a part of 1, `time` microseconds
since the epoch, `id` something to copy. Where there is little room, a `text` is a name that may be
shortened, and a `sentence` is wrapped. Any value can be `None`: it is not known."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    title: str
    kind: CellKind = "text"
    is_key: bool = False
    """It stands in every layout: by this a row is known, or for this the question was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    total: Sequence[Any] | None = None
    """A last row with the sums of all of them."""
    note: str = ""
    """What a reader has to know to read it rightly."""
    levels: Sequence[int] = ()
    """How deep each row is indented, where the rows are a tree."""


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One colour of a chart: values, one per label."""

    name: str
    values: Sequence[float]
    tone: str = ""
    """`halted` for what a limit ended; a colour of its own otherwise."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across a chart, such as a cap."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """ChartSeries over labels, stacked on each other."""

    name: str
    title: str
    labels: Sequence[str]
    series: Sequence[ChartSeries]
    kind: CellKind = "count"
    horizontal: bool = False
    """Bars from left to right, for labels that are names."""
    wide: bool = False
    """Twice as wide as others, for many labels."""
    axis: str = ""
    """What the labels are."""
    marks: Sequence[Mark] = ()
    """Across the label axis, in labels as numbers."""
    note: str = ""
    """What is not in the picture."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is going to be spent by the end of a period: USD as `Decimal`, or whole tokens."""

    period: str
    """`day`, `week` or `month`."""
    until_us: int
    so_far: Any
    expected: Any
    low: Any
    """Of the 95 % interval, never below what is spent already."""
    high: Any


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is going to be spent, or why nobody can say."""

    sentence: str
    unit: Literal["usd", "tokens"] | None = None
    days: int = 0
    """Whole days that it is made from."""
    periods: Sequence[Outlook] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a question."""

    question: str
    """Such as `spend`."""
    title: str
    about: str
    """Which part of which ledger was asked."""
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    text: str = ""
    """An answer that is not a table, such as a policy file."""
    status: int = 0
    """Exit status of the command that asked."""
    summary: str = ""
    """What it comes to, in one sentence."""
    forecast: Forecast | None = None
    complete: str = ""
    """Whether the ledger has everything that the answer counts, in one line."""
    totals: Sequence[tuple[str, CellKind, Any]] = field(default=())
    """The few numbers that matter most, with their titles."""
