"""Inserts rows so that each counts once, however often it comes."""

from __future__ import annotations

import functools
import importlib
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa

from otel_limits.ledger.rows import (
    ENDING,
    INVOCATIONS,
    LOST,
    MAINTENANCE,
    MODEL_CALLS,
    RECOUNTS,
    SUPERSEDED,
    TOOL_CALLS,
    Row,
    Rows,
)
from otel_limits.ledger.schema import (
    CALLS,
    INVOCATION_TABLE,
    IS_IMPORTED,
    IS_TOTAL,
    MAINTENANCE_TABLE,
    MODEL_CALL_TABLE,
    RUNS,
    TABLES,
    TOOL_CALL_TABLE,
    UNCOUNTED_TABLE,
    insertable_columns,
)
from otel_limits.ledger.totals import recount, with_later_calls

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

NUMBERED: Final = (MODEL_CALL_TABLE, TOOL_CALL_TABLE)
"""Tables whose rows are numbered within their invocation."""

MANY: Final = 500
"""Rows from which on columns without values are left out of a statement: SQLite's driver takes
longer to bind a null than all else."""


def write_rows(connection: sa.Connection, rows: Rows) -> dict[str, int]:
    """Insert rows, and recount the invocations that they change; returns changes by table."""
    # Table by table rather than row by row: one statement for many rows is many times faster.
    of_table: defaultdict[str, list[Row]] = defaultdict(list)
    for name, row in rows:
        of_table[name].append(row)
    # PostgreSQL rejects a statement that changes a row twice.
    of_table[INVOCATIONS] = _one_per_id(of_table[INVOCATIONS], _replaces_end)
    of_table[MAINTENANCE] = _one_per_id(of_table[MAINTENANCE], _is_later)
    for row in of_table[SUPERSEDED]:
        _delete(connection, row)
    changed = {
        table.name: insert(connection, table, of_table[table.name])
        for table in TABLES
        if of_table[table.name]
    }
    recount(connection, _delete_totals(connection, of_table[MODEL_CALLS]))
    recount(connection, [row["id"] for row in of_table[RECOUNTS]])
    ended = [row["id"] for row in of_table[INVOCATIONS] if row["ended_us"] is not None]
    recount(connection, with_later_calls(connection, ended))
    # Invocations that were ended as lost may still make calls.
    ids = {row["invocation_id"] for name in (MODEL_CALLS, TOOL_CALLS) for row in of_table[name]}
    is_lost = (RUNS.action == LOST) & RUNS.id.in_(ids)
    recount(connection, list(connection.scalars(sa.select(RUNS.id).where(is_lost))))
    return changed


def _delete(connection: sa.Connection, row: Row) -> None:
    """Delete what a ledger has of a span that is now known to be the sum of other calls."""
    for table in (MODEL_CALL_TABLE, UNCOUNTED_TABLE):
        is_it = (table.c.trace_id == row["trace_id"]) & (table.c.span_id == row["span_id"])
        is_it &= IS_IMPORTED if table is MODEL_CALL_TABLE else sa.true()
        connection.execute(table.delete().where(is_it))


def _delete_totals(connection: sa.Connection, calls: list[Row]) -> list[str]:
    """Delete the totals of agents that have calls now, e.g. after a merge; return their IDs."""
    ids = {row["invocation_id"] for row in calls if row["source"] == "import"}
    if not ids:
        return []
    other = MODEL_CALL_TABLE.alias().c
    is_other = (other.invocation_id == CALLS.invocation_id) & (other.span_id != CALLS.span_id)
    is_replaced = IS_TOTAL & CALLS.invocation_id.in_(ids) & sa.exists().where(is_other)
    found = list(connection.scalars(sa.select(CALLS.invocation_id).where(is_replaced)))
    if found:
        is_total = IS_TOTAL & CALLS.invocation_id.in_(found)
        connection.execute(MODEL_CALL_TABLE.delete().where(is_total))
    return found


def _one_per_id(rows: list[Row], replaces: Callable[[Row, Row], bool]) -> list[Row]:
    """Keep the first row of each ID, unless a later one replaces it."""
    kept: dict[str, Row] = {}
    for row in rows:
        before = kept.get(row["id"])
        if before is None or replaces(row, before):
            kept[row["id"]] = row
    return list(kept.values())


def _replaces_end(row: Row, before: Row) -> bool:
    """Return whether an invocation had no end before, or only an assumed one."""
    is_real = row["ended_us"] is not None and row["action"] != LOST
    return before["ended_us"] is None or (before["action"] == LOST and is_real)


def _is_later(row: Row, before: Row) -> bool:
    """Return whether retention deleted up to a later time; other records have none."""
    return bool((row["until_us"] or 0) > (before["until_us"] or 0))


def insert(connection: sa.Connection, table: sa.Table, rows: list[Row]) -> int:
    """Insert new rows. The end of an invocation updates its row."""
    if table in NUMBERED:
        # No index identifies a live row without a number.
        rows = [
            row
            for row in rows
            if row["number"] is not None
            or row["source"] != "live"
            or not _is_known(connection, table, row)
        ]
    inserted = execute(connection, table, rows)
    if table in NUMBERED and inserted < len(rows):
        # Rarely: it queries each row separately.
        again = find_conflicts(connection, table, rows)
        if again:
            inserted += execute(connection, table, again)
    return inserted


def execute(connection: sa.Connection, table: sa.Table, rows: list[Row]) -> int:
    """Insert rows, and return how many rows changed.

    The driver is called with the compiled statement: SQLAlchemy's parameter handling takes ten
    times as long as SQLite's insertion.
    """
    columns = insertable_columns(table)
    if len(rows) >= MANY:
        columns = [name for name in columns if any(row[name] is not None for row in rows)]
    compiled = insertion(table, connection.dialect, tuple(columns))
    values: Any
    if connection.dialect.name == "sqlite":
        values = list(map(operator.itemgetter(*cast("list[str]", compiled.positiontup)), rows))
    else:
        values = {name: [row[name] for row in rows] for name in columns}
    return connection.exec_driver_sql(compiled.string, values).rowcount


@functools.lru_cache
def insertion(table: sa.Table, dialect: sa.Dialect, columns: tuple[str, ...]) -> SQLCompiler:
    """Compile the insertion into a table, which leaves existing rows unchanged.

    Its parameters are the values of one row for SQLite, and an array per column for PostgreSQL: one
    statement for all rows, which no server has to parse again for each.
    """
    maker: Any = importlib.import_module(f"sqlalchemy.dialects.{dialect.name}")
    values = maker.insert(table)
    if dialect.name == "sqlite":
        values = values.values({name: sa.bindparam(name) for name in columns})
    else:
        arrays = (sa.bindparam(name, type_=sa.ARRAY(table.c[name].type)) for name in columns)
        rows = sa.func.unnest(*arrays).table_valued(*columns).render_derived(name="new")
        values = values.from_select(list(columns), sa.select(*rows.c))
    if table is INVOCATION_TABLE:
        lost: Any = sa.literal_column(f"'{LOST}'")  # no parameter: rows have a value for each
        statement = values.on_conflict_do_update(
            index_elements=["id"],
            set_={column: values.excluded[column] for column in ENDING},
            # Only once: the first recorded end is the true one, unless an operator only assumed it.
            where=values.excluded.ended_us.is_not(None)
            & (
                table.c.ended_us.is_(None)
                | ((table.c.action == lost) & (values.excluded.action != lost))
            ),
        )
    elif table is MAINTENANCE_TABLE:
        statement = values.on_conflict_do_update(
            index_elements=["id"],
            set_={column: values.excluded[column] for column in ("at_us", "until_us")},
            # Retention deletes up to a later time each time.
            where=values.excluded.until_us > table.c.until_us,
        )
    else:
        # A spill file that is restored twice changes nothing.
        statement = values.on_conflict_do_nothing()
    return cast("SQLCompiler", statement.compile(dialect=dialect))


def _is_known(connection: sa.Connection, table: sa.Table, row: Row) -> bool:
    """Whether there is a row of the same invocation and time."""
    same = sa.exists().where(
        table.c.invocation_id == row["invocation_id"], table.c.at_us == row["at_us"]
    )
    return bool(connection.execute(sa.select(same)).scalar())


def find_conflicts(connection: sa.Connection, table: sa.Table, rows: list[Row]) -> list[Row]:
    """Find live rows that only look like replays, and clear their number.

    A replay is the same row again. A row with the same number at another time is not: it is kept,
    and an audit reports it.
    """
    numbered = [row for row in rows if row["number"] is not None]
    query = sa.select(table.c.at_us).where(
        table.c.invocation_id == sa.bindparam("invocation"), table.c.number == sa.bindparam("place")
    )
    unnumbered = sa.select(sa.func.count()).where(
        table.c.invocation_id == sa.bindparam("invocation"),
        table.c.number.is_(None),
        table.c.at_us == sa.bindparam("time"),
    )
    again: dict[tuple[str, int], Row] = {}
    for row in numbered:
        place = {"invocation": row["invocation_id"], "place": row["number"]}
        if connection.execute(query, place).scalar() == row["at_us"]:
            continue
        there = {"invocation": row["invocation_id"], "time": row["at_us"]}
        if not connection.execute(unnumbered, there).scalar():
            again[row["invocation_id"], row["at_us"]] = {**row, "number": None}
    return list(again.values())
