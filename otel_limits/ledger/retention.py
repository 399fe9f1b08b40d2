"""Forgets what ended long ago: whole budget trees, with everything that belongs to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    INVOCATION_TABLE,
    MODEL_CALL_TABLE,
    QUOTA_CHANGE_TABLE,
    TOOL_CALL_TABLE,
)

if TYPE_CHECKING:
    from otel_limits.ledger.database import Database

RUNS: Final = INVOCATION_TABLE.c

PORTION: Final = 500
"""Invocations per transaction: whoever records meanwhile waits for no more than that."""

FREE_PAGES: Final = 2_000
"""Pages of an SQLite file that are given back at once."""


def prune(database: Database, before_us: int) -> Iterator[int]:
    """Delete budget trees of which nothing is younger than `before_us`.

    Yields:
        Invocations deleted, portion by portion.
    """
    # Calls go with their invocations. Those of an invocation that was never recorded come after.
    while True:
        with database.changing() as connection:
            ids = _oldest(connection, before_us)
            _delete(connection, ids)
        if not ids:
            break
        yield len(ids)
    while _delete_orphans(database, before_us):
        yield 0
    with database.changing() as connection:
        connection.execute(
            QUOTA_CHANGE_TABLE.delete().where(QUOTA_CHANGE_TABLE.c.at_us < before_us)
        )
    if database.address.file is not None:
        _shrink(database)


def _oldest(connection: sa.Connection, before_us: int) -> list[str]:
    younger = INVOCATION_TABLE.alias()
    last_seen = sa.func.coalesce(younger.c.ended_us, younger.c.started_us)
    has_younger = sa.exists().where(younger.c.root_id == RUNS.root_id, last_seen >= before_us)
    statement = sa.select(RUNS.id).where(RUNS.started_us < before_us, ~has_younger).limit(PORTION)
    return list(connection.scalars(statement))


def _delete(connection: sa.Connection, ids: list[str]) -> None:
    for table in (MODEL_CALL_TABLE, TOOL_CALL_TABLE, ATTRIBUTE_TABLE):
        connection.execute(table.delete().where(table.c.invocation_id.in_(ids)))
    connection.execute(INVOCATION_TABLE.delete().where(RUNS.id.in_(ids)))


def _delete_orphans(database: Database, before_us: int) -> int:
    """Delete a portion of the old calls whose invocation was never recorded."""
    gone = 0
    with database.changing() as connection:
        for table in (MODEL_CALL_TABLE, TOOL_CALL_TABLE):
            has_owner = sa.exists().where(RUNS.id == table.c.invocation_id)
            old = sa.select(table.c.id).where(table.c.at_us < before_us, ~has_owner).limit(PORTION)
            result = connection.execute(table.delete().where(table.c.id.in_(old)))
            gone += result.rowcount
    return gone


def _shrink(database: Database) -> None:
    """Give free pages back to the file system, a few per transaction."""
    left = _vacuum(database)
    while left:
        before, left = left, _vacuum(database)
        if left >= before:
            return  # a file that was made without the means to shrink


def _vacuum(database: Database) -> int:
    """Give back a portion; returns the free pages that are left."""
    with database.changing() as connection:
        driver: Any = connection.connection.driver_connection
        driver.execute(f"PRAGMA incremental_vacuum({FREE_PAGES})").fetchall()
        return int(driver.execute("PRAGMA freelist_count").fetchone()[0])
