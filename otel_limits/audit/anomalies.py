"""The question `anomalies`: days on which spend or turns left their usual range.

The usual range is that of the median and the median absolute deviation (MAD) of all days with
calls, which single days hardly move, however high they are. A day is outside when its modified
z-score is above 3.5 (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer, CellKind, Column, Table
from otel_limits.audit.by_tool import TOOL
from otel_limits.audit.question import Inquiry, Option, Question
from otel_limits.audit.sums import fold, property_of
from otel_limits.core.errors import LedgerError
from otel_limits.core.wording import pluralize
from otel_limits.ledger.calendar import PERIODS
from otel_limits.ledger.rows import dollars
from otel_limits.ledger.words import OF_CALLS

OUTSIDE: Final = 3.5
DEVIATION: Final = 0.6745
"""MADs in one standard deviation of a normal distribution."""
LEAST_SPREAD: Final = 0.05
"""Of the median: days that are all but equal would make the smallest change an anomaly."""

ValuesByDay = Mapping[str, float]
ValuesByGroup = dict[tuple[Any, ...], dict[str, float]]
"""Days with their values, by group."""


def _columns(kind: CellKind) -> tuple[Column, ...]:
    return (
        Column("day", "Day", "date", is_key=True),
        Column("value", "Value", kind, is_key=True),
        Column("median", "Usual", kind, is_key=True),
        Column("low", "Usual from", kind),
        Column("high", "to", kind),
        Column("score", "Score", "number"),
    )


COLUMNS: Final = {"cost": _columns("money"), "tokens": _columns("count"),
                  "turns": _columns("number")}  # fmt: skip


def anomalies(inquiry: Inquiry, by: Sequence[str], enough: int) -> Answer:
    """Answer when spend or turns were not as usual."""
    inquiry.require_known(by)
    dates = [name for name in by if name in PERIODS]
    # A group that is a day has nothing to be compared with, and a tool belongs to calls.
    if dates or TOOL in by:
        raise LedgerError(
            f"anomalies compares the days of a group, which cannot be made of {[*dates, TOOL][0]}. "
            f"Name an agent, a model or an audit key."
        )
    cost, tokens = _spend(inquiry, by)
    # In the time zone that was asked for: elsewhere the day may be over.
    today = f"{datetime.fromtimestamp(time.time(), inquiry.selection.zone):%Y-%m-%d}"
    titles = {"cost": "Cost of a day", "tokens": "Tokens of a day without a price",
              "turns": "Turns per invocation of a day"}  # fmt: skip
    every: dict[str, ValuesByGroup] = {"cost": cost, "tokens": tokens, "turns": {}}
    # An invocation has one agent, and may have asked several models: whose turns would it be?
    if not OF_CALLS & {*by}:
        every["turns"] = _turns(inquiry, by)
    tables = [
        Table(
            name=name,
            title=f"{titles[name]}, by {', '.join(by)}",
            columns=(*inquiry.key_columns(by, COLUMNS[name]), *COLUMNS[name]),
            rows=[_written(name, row) for row in _found(series, enough, today)],
            note=f"Groups with fewer than {pluralize(enough, 'day')} are left out; today can only be "
            "too high.",
        )
        for name, series in every.items()
    ]
    return Answer(question="anomalies", title="Anomalies", about=inquiry.about, tables=tables)


def _spend(inquiry: Inquiry, by: Sequence[str]) -> tuple[ValuesByGroup, ValuesByGroup]:
    """Picodollars of each day, or its tokens in groups that have no price at all."""
    from otel_limits.ledger import spending

    names, zone = (*by, "day"), inquiry.selection.zone
    groups = fold(spending.spend(inquiry.connection, names, inquiry.selection), names, zone)
    # Money and tokens are not added up: a group is judged by money as soon as one of its days has a
    # price. Otherwise a new price would look like a jump.
    priced = {key[:-1] for key, sums in groups.items() if sums.has_price}
    cost: ValuesByGroup = {}
    tokens: ValuesByGroup = {}
    for (*key, day), sums in groups.items():
        group = tuple(key)
        if group in priced:
            cost.setdefault(group, {})[day] = sums.pico
        else:
            tokens.setdefault(group, {})[day] = sums.tokens
    return cost, tokens


def _turns(inquiry: Inquiry, by: Sequence[str]) -> ValuesByGroup:
    """Mean turns of the invocations that began on each day."""
    from otel_limits.ledger.queries import turns_by_day

    zone = inquiry.selection.zone
    sums: dict[tuple[Any, ...], list[int]] = {}
    for keys, (invocations, turns) in turns_by_day(inquiry.connection, by, inquiry.selection):
        key = tuple(property_of(keys, name, zone) for name in (*by, "day"))
        each = sums.setdefault(key, [0, 0])
        each[0] += invocations
        each[1] += int(turns)
    series: ValuesByGroup = {}
    for (*group, day), (invocations, turns) in sums.items():
        # The mean of all, out of two sums: the ledger gives parts of a day apart, of different
        # sizes.
        series.setdefault(tuple(group), {})[day] = turns / invocations
    return series


def _found(series: ValuesByGroup, enough: int, today: str) -> list[tuple[Any, ...]]:
    """The days outside the usual range of their group, the furthest first."""
    rows = [
        (*group, *row)
        for group, days in series.items()
        if len(days) >= enough
        for row in outliers(days, today)
    ]
    return sorted(rows, key=lambda row: (-abs(row[-1]), *map(str, row[:-1])))


def outliers(days: ValuesByDay, today: str = "") -> Iterator[tuple[Any, ...]]:
    """Days outside the usual range: day, value, median, lowest and highest usual value, score."""
    # Medians and not means: the day that is looked for would pull a mean, and its deviation, its
    # way.
    middle = median(days.values())
    deviation = median(abs(value - middle) for value in days.values())
    spread = max(deviation / DEVIATION, LEAST_SPREAD * middle)
    low, high = max(0.0, middle - OUTSIDE * spread), middle + OUTSIDE * spread
    for day, value in days.items():
        # Today is not over: it says nothing when it is low.
        if spread and (value > high or (value < low and day != today)):
            yield day, value, middle, low, high, (value - middle) / spread


def _written(name: str, row: Iterable[Any]) -> tuple[Any, ...]:
    *head, value, middle, low, high, score = row
    numbers = (value, middle, low, high)
    if name == "cost":
        return (*head, *(dollars(round(each)) for each in numbers), score)
    return (*head, *(map(round, numbers) if name == "tokens" else numbers), score)


ANOMALIES: Final = Question(
    name="anomalies",
    help="Days on which spend or turns left their usual range.",
    answer=anomalies,
    tables=COLUMNS,
    options=(
        Option(
            "--by",
            "NAMES",
            asking.properties,
            "whose range, such as agent, model or tenant.id, separated by commas (default: agent)",
            default=("agent",),
        ),
        Option(
            "--enough",
            "N",
            asking.cap,
            "days with calls that a group needs to have a usual range (default: 10)",
            default=10,
        ),
    ),
)
