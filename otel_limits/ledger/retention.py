"""Deletes old budget trees, with everything that belongs to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.ledger.insertion import insert
from otel_limits.ledger.maintenance import pruned_row
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    DAY_MICROSECONDS,
    INVOCATION_TABLE,
    MAINTENANCE_TABLE,
    MODEL_CALL_TABLE,
    POLICY_TABLE,
    QUOTA_CHANGE_TABLE,
    RUNS,
    TABLES,
    TOOL_CALL_TABLE,
    UNCOUNTED_TABLE,
)

if TYPE_CHECKING:
    from otel_limits.ledger.database import Database

CALL_TABLES: Final = (MODEL_CALL_TABLE, TOOL_CALL_TABLE, UNCOUNTED_TABLE)

PORTION: Final = 500
"""Invocations per transaction: processes that record wait for no more than that."""

SMALL_PORTION: Final = 50
"""The same within a recording process: its own rows wait a few milliseconds."""

FREE_PAGES: Final = 2_000
"""Pages of an SQLite file that are freed together."""


def prune(database: Database, before_us: int, portion: int = PORTION) -> Iterator[int]:
    """Delete budget trees that ended before `before_us`, `portion` by `portion`.

    Yields:
        Deleted invocations, portion by portion.
    """
    has_younger = _last_seen_after(before_us, RUNS.root_id)
    oldest = sa.select(RUNS.id).where(RUNS.started_us < before_us, ~has_younger).limit(portion)
    # Calls are deleted with their invocations, then those whose invocation was never recorded.
    while True:
        with database.changing() as connection:
            ids = list(connection.scalars(oldest))
            for table in (*CALL_TABLES, ATTRIBUTE_TABLE):
                connection.execute(table.delete().where(table.c.invocation_id.in_(ids)))
            deleted = connection.execute(INVOCATION_TABLE.delete().where(RUNS.id.in_(ids)))
            if ids:
                insert(connection, MAINTENANCE_TABLE, [pruned_row(database.address, before_us)])
        if not ids:
            break
        yield deleted.rowcount  # another process may have deleted some in the meantime
    while _delete_orphans(database, before_us, portion):
        yield 0
    with database.changing() as connection:
        old = (
            table.delete().where(table.c.at_us < before_us)
            for table in (QUOTA_CHANGE_TABLE, POLICY_TABLE)
        )
        if sum(connection.execute(each).rowcount for each in old):
            insert(connection, MAINTENANCE_TABLE, [pruned_row(database.address, before_us)])
    if database.address.file is not None:
        yield from _shrink(database)


def reclaim_space(database: Database, *, is_full: bool) -> list[str]:
    """Reclaim the space of deleted rows. Concurrent rows wait in spill files.

    A file shrinks automatically, unless it was restored from a dump: then it is copied. PostgreSQL
    keeps the space for new rows, and copies its tables only with `is_full`.

    Args:
        database: The ledger.
        is_full: Copy everything, even if not needed.

    Returns:
        Warnings of PostgreSQL about what it refused.
    """
    if database.address.file is None:
        return _vacuum_tables(database, is_full=is_full)
    driver: Any
    with database.reading() as connection:
        driver = connection.connection.driver_connection
        can_shrink = driver.execute("PRAGMA auto_vacuum").fetchone()[0]
        has_free_pages = driver.execute("PRAGMA freelist_count").fetchone()[0]
        if is_full or (has_free_pages and not can_shrink):
            connection.rollback()  # VACUUM fails within a transaction
            driver.execute("PRAGMA auto_vacuum = INCREMENTAL")
            driver.execute("VACUUM")
            # With a write-ahead log the file shrinks only when the log is moved into it.
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return []


def _vacuum_tables(database: Database, *, is_full: bool) -> list[str]:
    """Vacuum PostgreSQL's tables. Without FULL no query waits, and new rows reuse the space."""
    refused: list[str] = []
    engine = database.engine().execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        # Missing privileges are reported as a warning, not as an error.
        driver.add_notice_handler(lambda notice: refused.append(notice.message_primary))
        for table in TABLES:
            option = "(FULL, ANALYZE)" if is_full else "(ANALYZE)"
            connection.exec_driver_sql(f"VACUUM {option} {table.name}")
    return refused


def _last_seen_after(before_us: int, root_id: sa.ColumnElement[Any]) -> sa.Exists:
    """Whether a tree was seen later: one that started before the cutoff may have ended after it."""
    younger = INVOCATION_TABLE.alias()
    last_seen = sa.func.coalesce(younger.c.ended_us, younger.c.started_us)
    return sa.exists().where(younger.c.root_id == root_id, last_seen >= before_us)


def retained_trees(before_us: int) -> sa.Select[tuple[str]]:
    """Select the IDs of all invocations that retention keeps."""
    kept = INVOCATION_TABLE.alias().c
    return sa.select(kept.id).where(_last_seen_after(before_us, kept.root_id))


def _delete_orphans(database: Database, before_us: int, portion: int) -> int:
    """Delete a portion of the old calls whose invocation was never recorded."""
    gone = 0
    with database.changing() as connection:
        for table in CALL_TABLES:
            has_owner = sa.exists().where(RUNS.id == table.c.invocation_id)
            is_old = table.c.at_us < before_us
            if "day" in table.c:  # the first column of an index
                is_old &= table.c.day <= before_us // DAY_MICROSECONDS
            old = sa.select(table.c.id).where(is_old, ~has_owner).limit(portion)
            # By a subquery, as PostgreSQL and most builds of SQLite lack `DELETE … LIMIT`.
            result = connection.execute(table.delete().where(table.c.id.in_(old)))
            gone += result.rowcount
        if gone:
            insert(connection, MAINTENANCE_TABLE, [pruned_row(database.address, before_us)])
    return gone


def _shrink(database: Database) -> Iterator[int]:
    """Return free pages to the file system, a few per transaction."""
    left = _vacuum(database)
    while left:
        yield 0
        before, left = left, _vacuum(database)
        if left >= before:
            return  # the file was created without auto_vacuum


def _vacuum(database: Database) -> int:
    """Free a portion of pages; returns how many free pages remain."""
    with database.changing() as connection:
        driver: Any = connection.connection.driver_connection
        # Directly in the driver, fetching all rows: the pragma frees one page per fetched row.
        driver.execute(f"PRAGMA incremental_vacuum({FREE_PAGES})").fetchall()
        return int(driver.execute("PRAGMA freelist_count").fetchone()[0])
