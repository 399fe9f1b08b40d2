"""Copies the rows of one ledger into another, of the same or of another kind of database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.ledger.rows import portions
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    INVOCATION_TABLE,
    MAINTENANCE_TABLE,
    MODEL_CALL_TABLE,
    POLICY_TABLE,
    QUOTA_CHANGE_TABLE,
    RUNS,
    TOOL_CALL_TABLE,
    UNCOUNTED_TABLE,
    insertable_columns,
)

if TYPE_CHECKING:
    from otel_limits.ledger.rows import Row, Rows

PORTION: Final = 500
"""Invocations, or other rows, that are copied in one transaction."""

OF_INVOCATIONS: Final = (ATTRIBUTE_TABLE, MODEL_CALL_TABLE, TOOL_CALL_TABLE, UNCOUNTED_TABLE)


def merge(source: sa.Connection, write: Callable[[Rows], dict[str, int]]) -> Iterator[Counter[str]]:
    """Copy every row; rows that are already there are unchanged. Repeating it changes nothing.

    Args:
        source: The other ledger, with the rows of its spill files.
        write: Writes rows in one transaction of the other ledger; returns changes by table.

    Yields:
        Rows that are new, by table, after each transaction.
    """
    for rows in _rows(source):
        yield Counter(write(rows))


def _rows(source: sa.Connection) -> Iterator[Rows]:
    """Read an invocation together with its calls, so that totals agree with them at any time."""
    after: tuple[int, str] | None = None
    while portion := _next_invocations(source, after):
        _, last = portion[-1]
        after = (last["started_us"], last["id"])
        ids = [row["id"] for _, row in portion]
        for table in OF_INVOCATIONS:
            portion += _read(source, table, table.c.invocation_id.in_(ids))
        yield portion
    for table in OF_INVOCATIONS:
        has_owner = sa.exists().where(RUNS.id == table.c.invocation_id)
        yield from portions(_read(source, table, ~has_owner), PORTION)
    for table in (QUOTA_CHANGE_TABLE, POLICY_TABLE, MAINTENANCE_TABLE):
        yield from portions(_read(source, table, sa.true()), PORTION)


def _next_invocations(source: sa.Connection, after: tuple[int, str] | None) -> Rows:
    """Read the next invocations by time and ID, so that not all IDs are in memory."""
    place = sa.tuple_(RUNS.started_us, RUNS.id)
    statement = sa.select(*_columns(INVOCATION_TABLE)).order_by(RUNS.started_us, RUNS.id)
    if after is not None:
        statement = statement.where(place > sa.tuple_(*after))
    found = source.execute(statement.limit(PORTION)).mappings()
    return [(INVOCATION_TABLE.name, dict(row)) for row in found]


def _read(
    source: sa.Connection, table: sa.Table, which: sa.ColumnElement[bool]
) -> Iterator[tuple[str, Row]]:
    number = table.autoincrement_column
    order = [] if number is None else [number]  # in the order in which they were recorded
    statement = sa.select(*_columns(table)).where(which).order_by(*order)
    for row in source.execute(statement, execution_options={"yield_per": PORTION}).mappings():
        yield table.name, dict(row)


def _columns(table: sa.Table) -> list[sa.Column[Any]]:
    return [table.c[name] for name in insertable_columns(table)]
