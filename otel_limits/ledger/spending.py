"""Sums of model calls by any property: the slowest part of all queries.

Two indexes contain everything that is summed by day, agent and model, so such sums never read the
table: one has every call, the other the few of unknown size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timezone, tzinfo
from typing import Any, Final

import sqlalchemy as sa

from otel_limits.ledger.calendar import PERIODS, QUARTER
from otel_limits.ledger.repricing import RECORDED_PICO
from otel_limits.ledger.rows import UNKNOWN_SIZE
from otel_limits.ledger.schema import (
    CALL_TOKENS,
    CALLS,
    DAY_MICROSECONDS,
    IS_OF_UNKNOWN_SIZE,
    MODEL_CALL_TABLE,
)
from otel_limits.ledger.selection import DAYS, Joins, Selection

FROM_INDEX: Final = frozenset({"agent", "model", *DAYS})
"""Grouping keys that the indexes on spend cover."""
BY_INDEX: Final = ["day", "agent", "model"]
"""Their first columns."""


def _sums(
    pico: sa.ColumnElement[Any], saved: sa.ColumnElement[Any]
) -> tuple[sa.ColumnElement[Any], ...]:
    """Sums over calls; `pico` is their price, `saved` what caching saved."""
    return (
        sa.func.count(),
        sa.func.sum(CALLS.input_tokens),
        sa.func.sum(CALLS.output_tokens),
        sa.func.sum(CALLS.cache_read_tokens),
        sa.func.sum(CALLS.cache_write_tokens),
        sa.func.sum(pico),
        saved,
        # Filters, since SQLite takes 20% longer to sum cases.
        sa.func.coalesce(sa.func.sum(CALL_TOKENS).filter(pico.is_(None)), 0),
    )


IS_UNKNOWN: Final = CALLS.state.in_(UNKNOWN_SIZE)
OF_UNKNOWN_SIZE: Final = (
    sa.func.count().filter(IS_UNKNOWN, CALLS.estimated),
    sa.func.count().filter(IS_UNKNOWN, ~CALLS.estimated),
)
"""Calls that count by an estimate, and those that do not count."""
SUMS_OF_ALL: Final = _sums(CALLS.price_pico, sa.func.sum(CALLS.cache_saved_pico))
SUMS: Final = (*SUMS_OF_ALL, *OF_UNKNOWN_SIZE)
RECORDED_SUMS: Final = (*_sums(RECORDED_PICO, sa.null()), *OF_UNKNOWN_SIZE)
"""The same at recorded prices; what caching saved was not recorded."""

NOTHING: Final[sa.ColumnElement[int]] = sa.literal_column("0")
SUMS_OF_NONE: Final = (*(NOTHING,) * 5, sa.null(), sa.null(), NOTHING)


FIRST_AND_LAST_DAY: Final = sa.select(
    # Separate statements: only then does SQLite read one end of an index.
    sa.select(sa.func.min(CALLS.day)).scalar_subquery(),
    sa.select(sa.func.max(CALLS.day)).scalar_subquery(),
)


def spend(
    connection: sa.Connection, by: Sequence[str], selection: Selection, *, recorded: bool = False
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Add up model calls, finer than `by` where that is faster.

    With `recorded` at the prices that were recorded, before any repricing.

    Yields:
        The properties of a group, `day` as days and `hour` as hours since the epoch, or `QUARTER`
        instead if days are not those of UTC; and its calls, input, output, cached and written
        tokens, picodollars, those that caching saved, unpriced tokens, estimated and unmeasured
        calls. A group may come in several parts.
    """
    named = {*by, *(each.name for each in selection.where)}
    rows: Iterable[Sequence[Any]]
    if named <= FROM_INDEX and not recorded:
        names = ["agent", "model", *columns_for(by, selection.zone)]
        names = list(dict.fromkeys(names)) if QUARTER in names else BY_INDEX
        rows = _from_indexes(connection, names, selection)
    else:
        names = columns_for(by, selection.zone)
        rows = connection.execute(
            grouped(MODEL_CALL_TABLE, names, selection, RECORDED_SUMS if recorded else SUMS)
        )
    yield from keyed(rows, names)


def by_quarter(connection: sa.Connection, selection: Selection) -> Iterator[Sequence[Any]]:
    """Add up picodollars, tokens and unpriced tokens by quarter hour since the epoch."""
    joins = Joins(MODEL_CALL_TABLE)
    quarter = joins.column(QUARTER)
    tokens = sa.func.sum(CALL_TOKENS)
    unpriced = tokens.filter(CALLS.price_pico.is_(None))
    statement = joins.select(selection, quarter, sa.func.sum(CALLS.price_pico), tokens, unpriced)
    yield from connection.execute(statement.group_by(quarter))


def _from_indexes(
    connection: sa.Connection, names: Sequence[str], selection: Selection
) -> Iterator[Sequence[Any]]:
    """Query earlier and later days concurrently: SQLite uses one core per query."""
    earlier, later = _halves(connection, selection)
    if later is None:
        yield from connection.execute(from_indexes(names, earlier))
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        rest = thread.submit(_apart, connection.engine, from_indexes(names, later))
        yield from connection.execute(from_indexes(names, earlier))
        yield from rest.result()


def _apart(engine: sa.Engine, statement: sa.Executable) -> Sequence[Sequence[Any]]:
    """Run a statement on its own connection."""
    with engine.connect() as connection:
        return connection.execute(statement).all()


def _halves(connection: sa.Connection, selection: Selection) -> tuple[Selection, Selection | None]:
    """Split a selection in the middle of its days; `None` as second half if impossible."""
    if connection.dialect.name != "sqlite" or ADDS_EXACTLY in connection.info:
        return selection, None
    first, last = connection.execute(FIRST_AND_LAST_DAY).one()
    if first is None:
        return selection, None
    begin, end = first * DAY_MICROSECONDS, (last + 1) * DAY_MICROSECONDS
    begin, end = max(begin, selection.since_us or begin), min(end, selection.until_us or end)
    middle = (begin + end) // 2 // DAY_MICROSECONDS * DAY_MICROSECONDS
    if not begin < middle < end:
        return selection, None
    return replace(selection, until_us=middle), replace(selection, since_us=middle)


def from_indexes(names: Sequence[str], selection: Selection) -> sa.CompoundSelect[Any]:
    """Sum all calls, and count those without a measured size, each from its own index.

    One statement, so that both see the same calls.
    """
    calls = grouped(MODEL_CALL_TABLE, names, selection, (*SUMS_OF_ALL, NOTHING, NOTHING))
    counts = [sa.func.count().filter(each) for each in (CALLS.estimated, ~CALLS.estimated)]
    unknown = grouped(MODEL_CALL_TABLE, names, selection, (*SUMS_OF_NONE, *counts))
    return sa.union_all(calls, unknown.where(IS_OF_UNKNOWN_SIZE))


def grouped(
    table: sa.Table, names: Sequence[str], selection: Selection, sums: Sequence[Any]
) -> sa.Select[Any]:
    """Add up the rows of a table by the properties of `columns_for`.

    Raises:
        LedgerError: Its rows lack one of them.
    """
    joins = Joins(table)
    columns = [joins.column(name) for name in names]
    # Generated labels, as an audit key may have the name of any column.
    labelled = (column.label(f"k{n}") for n, column in enumerate((*columns, *sums)))
    return joins.select(selection, *labelled).group_by(*columns)


def keyed(
    rows: Iterable[Sequence[Any]], names: Sequence[str]
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Split each row of such a statement into its properties, by name, and its sums."""
    for row in rows:
        yield dict(zip(names, row, strict=False)), row[len(names) :]


def columns_for(by: Sequence[str], zone: tzinfo) -> list[str]:
    """List the columns to group by: weeks and months consist of days, or of quarter hours."""
    if zone is not timezone.utc:
        return list(dict.fromkeys(QUARTER if name in PERIODS else name for name in by))
    return list(dict.fromkeys("day" if name in DAYS else name for name in by))


# --- sums beyond 64 bits --------------------------------------------------------------------------

ADDS_EXACTLY: Final = "otel_limits_adds_exactly"
"""Marks a connection whose sums have no bound; those of another one would."""


class ExactSum:
    """An unbounded `sum()` that replaces SQLite's: many times slower, and exact."""

    def __init__(self) -> None:
        """Start with no values, whose sum is null."""
        self._sum: int | None = None

    def step(self, value: int | None) -> None:
        """Add one value; nulls are ignored."""
        if value is not None:
            self._sum = (self._sum or 0) + int(value)

    def finalize(self) -> int | str | None:
        """Return the sum, as text if it exceeds a column."""
        if self._sum is None or -(2**63) <= self._sum < 2**63:
            return self._sum
        return str(self._sum)


def add_up_exactly(connection: sa.Connection) -> None:
    """Make a SQLite connection add up without a bound."""
    driver: Any = connection.connection.driver_connection
    driver.create_aggregate("sum", 1, ExactSum)
    connection.info[ADDS_EXACTLY] = True
