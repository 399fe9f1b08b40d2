"""Tables and charts of exact values that form an answer, independent of their layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

CellKind: TypeAlias = Literal[
    "text",
    "sentence",
    "command",
    "date",
    "id",
    "count",
    "money",
    "share",
    "time",
    "seconds",
    "number",
]
"""How a value is formatted: `money` is a `Decimal` in USD, `share` a fraction, `time` microseconds
since the epoch, `id` and `command` something to copy. In narrow layouts a `text` may be shortened,
a `sentence` is wrapped, and a `command` is printed below the table. `None` means unknown for any
kind."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    title: str
    kind: CellKind = "text"
    is_key: bool = False
    """Shown in every layout: it identifies the row, or is the main result."""


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
    complete: str = ""
    """Whether the ledger contains everything that the answer counts, in one line."""
    totals: Sequence[tuple[str, CellKind, Any]] = field(default=())
    """The most important numbers, with their titles."""
