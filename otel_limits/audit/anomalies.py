"""The question `anomalies`: days with unusual spend or turns.

The usual range is based on the median and the median absolute deviation (MAD) of all days with
calls, which single outliers hardly change. A day is an anomaly if its modified z-score is above 3.5
(Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import Answer, CellKind, Column, Table
from otel_limits.audit.question import AuditQuery, Option, Question
from otel_limits.audit.spend import TOOL
from otel_limits.audit.sums import fold, property_of
from otel_limits.core.errors import LedgerError
from otel_limits.core.wording import pluralize
from otel_limits.ledger.calendar import PERIODS
from otel_limits.ledger.options import OF_CALLS
from otel_limits.ledger.rows import dollars

OUTSIDE: Final = 3.5
DEVIATION: Final = 0.6745
"""MADs in one standard deviation of a normal distribution."""
LEAST_SPREAD: Final = 0.05
"""Fraction of the median: otherwise tiny changes after nearly equal days would be anomalies."""

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


def anomalies(inquiry: AuditQuery, by: Sequence[str], min_days: int) -> Answer:
    """Answer on which days spend or turns were unusual."""
    inquiry.require_known(by)
    dates = [name for name in by if name in PERIODS]
    # Groups of one day have no range, and tools have no turns.
    if dates or TOOL in by:
        raise LedgerError(
            f"anomalies cannot group by {[*dates, TOOL][0]}. Use agent, model or an audit key."
        )
    cost, tokens = _spend(inquiry, by)
    # In the selected time zone: elsewhere the day may be over.
    today = f"{datetime.fromtimestamp(time.time(), inquiry.selection.zone):%Y-%m-%d}"
    titles = {"cost": "Cost per day", "tokens": "Unpriced tokens per day",
              "turns": "Turns per invocation and day"}  # fmt: skip
    every: dict[str, ValuesByGroup] = {"cost": cost, "tokens": tokens, "turns": {}}
    # An invocation may use several models, so its turns belong to none of them.
    if not OF_CALLS & {*by}:
        every["turns"] = _turns(inquiry, by)
    tables = [
        Table(
            name=name,
            title=f"{titles[name]}, by {', '.join(by)}",
            columns=(*inquiry.key_columns(by, COLUMNS[name]), *COLUMNS[name]),
            rows=[_written(name, row) for row in _found(series, min_days, today)],
            note=f"Groups with fewer than {pluralize(min_days, 'day')} are left out; today is "
            "only checked for high values. The score is the distance from the usual value, in "
            "standard deviations that outliers hardly change; a day is listed above "
            f"{OUTSIDE:g}.",
            empty=_tested(series, min_days),
        )
        for name, series in every.items()
    ]
    return Answer(question="anomalies", title="Anomalies", about=inquiry.about, tables=tables)


def _spend(inquiry: AuditQuery, by: Sequence[str]) -> tuple[ValuesByGroup, ValuesByGroup]:
    """Add up picodollars by day, or tokens in groups without any price."""
    from otel_limits.ledger import spending

    names, zone = (*by, "day"), inquiry.selection.zone
    groups = fold(spending.spend(inquiry.connection, names, inquiry.selection), names, zone)
    # A group is compared by cost once any of its days has a price: otherwise a new price would
    # look like a jump.
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


def _turns(inquiry: AuditQuery, by: Sequence[str]) -> ValuesByGroup:
    """Return the mean turns of the invocations that started on each day."""
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
        # The mean over all parts of a day, which differ in size.
        series.setdefault(tuple(group), {})[day] = turns / invocations
    return series


def _tested(series: ValuesByGroup, min_days: int) -> str:
    """Say in how many groups no day is unusual, or that no group has enough days."""
    if not series:
        return "Not tested: there is nothing to compare."
    longest = max(map(len, series.values()))
    if longest < min_days:
        return (
            f"Not tested: {pluralize(longest, 'day')} with calls per group at most, at least "
            f"{min_days:,} needed (--min-days)."
        )
    untested = sum(len(days) < min_days for days in series.values())
    if not untested:
        return "None."
    groups = pluralize(untested, "other group has", "other groups have")
    tested = pluralize(len(series) - untested, "group")
    return f"None in {tested}. Not tested: {groups} fewer than {pluralize(min_days, 'day')}."


def _found(series: ValuesByGroup, min_days: int, today: str) -> list[tuple[Any, ...]]:
    """List the days outside the usual range of their group, the most extreme first."""
    rows = [
        (*group, *row)
        for group, days in series.items()
        if len(days) >= min_days
        for row in outliers(days, today)
    ]
    return sorted(rows, key=lambda row: (-abs(row[-1]), *map(str, row[:-1])))


def outliers(days: ValuesByDay, today: str = "") -> Iterator[tuple[Any, ...]]:
    """Yield unusual days: day, value, median, lowest and highest usual value, score."""
    from statistics import median  # it imports fractions and random numbers

    # Medians, as an anomaly would shift the mean and the standard deviation.
    middle = median(days.values())
    deviation = median(abs(value - middle) for value in days.values())
    spread = max(deviation / DEVIATION, LEAST_SPREAD * middle)
    low, high = max(0.0, middle - OUTSIDE * spread), middle + OUTSIDE * spread
    for day, value in days.items():
        # Today is not over, so a low value means nothing.
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
    help="Find days with unusual spend or turns.",
    answer=anomalies,
    tables=COLUMNS,
    options=(
        Option(
            "--by",
            "NAMES",
            parsing.properties,
            "properties to group by, e.g. agent, model or tenant.id, separated by commas (default: "
            "agent)",
            default=("agent",),
        ),
        Option(
            "--min-days",
            "N",
            parsing.cap,
            "minimum days with calls per group (default: 10)",
            default=10,
        ),
    ),
)
