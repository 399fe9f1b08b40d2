"""Copies the rows of one ledger into another, of the same or of another kind of database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from otel_limits.ledger.database import insertable_columns
from otel_limits.ledger.rows import portions
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    INVOCATION_TABLE,
    MAINTENANCE_TABLE,
    MODEL_CALL_TABLE,
    QUOTA_CHANGE_TABLE,
    RUNS,
    TOOL_CALL_TABLE,
)

if TYPE_CHECKING:
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.rows import Rows

PORTION: Final = 500
"""Invocations, or other rows, that are copied in one transaction."""

OF_INVOCATIONS: Final = (ATTRIBUTE_TABLE, MODEL_CALL_TABLE, TOOL_CALL_TABLE)


def merge(source: sa.Connection, database: Database) -> Iterator[Counter[str]]:
    """Copy every row; rows that are already there are unchanged. Repeating it changes nothing.

    Args:
        source: The other ledger, with the rows of its spill files.
        database: The ledger that receives the rows.

    Yields:
        Rows that are new, by table, after each transaction.
    """
    for rows in _rows(source):
        yield Counter(database.write(rows))


def _rows(source: sa.Connection) -> Iterator[Rows]:
    """Read an invocation together with its calls, so that totals agree with them at any time."""
    identities = source.scalars(sa.select(RUNS.id).order_by(RUNS.started_us, RUNS.id)).all()
    for ids in portions(identities, PORTION):
        yield [
            *_read(source, INVOCATION_TABLE, RUNS.id.in_(ids)),
            *(
                row
                for each in OF_INVOCATIONS
                for row in _read(source, each, each.c.invocation_id.in_(ids))
            ),
        ]
    for table in OF_INVOCATIONS:
        has_owner = sa.exists().where(RUNS.id == table.c.invocation_id)
        yield from portions(_read(source, table, ~has_owner), PORTION)
    for table in (QUOTA_CHANGE_TABLE, MAINTENANCE_TABLE):
        yield from portions(_read(source, table, sa.true()), PORTION)


def _read(source: sa.Connection, table: sa.Table, which: sa.ColumnElement[bool]) -> Rows:
    columns = [table.c[name] for name in insertable_columns(table)]
    number = table.autoincrement_column
    order = [] if number is None else [number]  # in the order in which they were recorded
    found = source.execute(sa.select(*columns).where(which).order_by(*order))
    return [(table.name, dict(row)) for row in found.mappings()]
