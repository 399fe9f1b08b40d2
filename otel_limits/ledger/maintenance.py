"""Interventions in a ledger, each recorded: deleted, lost and accepted rows.

| kind | subject | amount | until_us |
|---|---|---|---|
| `damaged` | the kept spill file, or the memory of a process | its lost lines | |
| `accepted` | the same | the same | |
| `lost` | an invocation that was ended as lost | | |
| `pruned` | | | trees that ended before this time were deleted |
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.labels import clean
from otel_limits.ledger.database import insert
from otel_limits.ledger.files import user_and_host
from otel_limits.ledger.rows import LOST, MAX_SENTENCE, microseconds, name, portions
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    DAY_MICROSECONDS,
    INVOCATION_TABLE,
    MAINTENANCE_TABLE,
    MODEL_CALL_TABLE,
    POLICY_TABLE,
    QUOTA_CHANGE_TABLE,
    RECORDS,
    RUNS,
    TABLES,
    TOOL_CALL_TABLE,
    UNCOUNTED_TABLE,
)
from otel_limits.ledger.totals import recount

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.ledger.address import Address
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.rows import Row


DAMAGED: Final = "damaged"
ACCEPTED: Final = "accepted"
PRUNED: Final = "pruned"


@dataclass(frozen=True, slots=True)
class Damage:
    """Lines of a spill file that were not rows."""

    id: str
    file: str
    lines: int
    accepted: Any = None
    """The record that accepts them; `None` if there is none."""


def damaged_row(kept: Path, lines: Sequence[bytes]) -> Row:
    """Record the damaged lines of a restored spill file, which is kept under another name."""
    file = os.fsencode(kept).decode(errors="backslashreplace")
    # Of the content too: a restored file that is restored again changes nothing, and another one of
    # the same name is recorded.
    digest = hashlib.blake2s(file.encode() + b"".join(lines), digest_size=16).hexdigest()
    return _row(f"{DAMAGED}-{digest}", DAMAGED, file, amount=len(lines))


def dropped_row(rows: int) -> Row:
    """Record that rows of this process were lost, as no file had accepted them in time."""
    identity = f"{DAMAGED}-{uuid.uuid4().hex}"
    return _row(identity, DAMAGED, f"memory of process {os.getpid()}", amount=rows)


def accepted_row(damage: Damage, reason: str) -> Row:
    """Record that an operator accepts the loss of damaged lines."""
    identity = damage.id.replace(DAMAGED, ACCEPTED)
    return _row(identity, ACCEPTED, damage.file, amount=damage.lines, reason=reason)


def declared_lost_row(invocation_id: str) -> Row:
    """Record that an operator ended an invocation as lost."""
    return _row(f"{LOST}-{invocation_id}", LOST, invocation_id)


def pruned_row(ledger: Address, before_us: int) -> Row:
    """Record up to which end budget trees were deleted: one row per day, with the latest time."""
    day = microseconds(time.time()) // DAY_MICROSECONDS
    # Those of two ledgers are different rows once these are merged: each is closed.
    digest = hashlib.blake2s(os.fsencode(ledger.name), digest_size=8).hexdigest()
    return _row(f"{PRUNED}-{day}-{digest}", PRUNED, "", until_us=before_us)


def _row(identity: str, kind: str, subject: str, **more: Any) -> Row:
    reason = more.pop("reason", None)
    return {
        "id": identity,
        "at_us": microseconds(time.time()),
        "kind": kind,
        "subject": subject,
        "amount": more.get("amount"),
        "until_us": more.get("until_us"),
        "changed_by": name(user_and_host()),
        "reason": None if reason is None else clean(reason, MAX_SENTENCE),
    }


def damages(connection: sa.Connection) -> list[Damage]:
    """List the damaged spill files that were restored, the oldest first."""
    wanted = RECORDS.kind.in_((DAMAGED, ACCEPTED))
    rows = connection.execute(
        sa.select(MAINTENANCE_TABLE).where(wanted).order_by(RECORDS.at_us, RECORDS.id)
    ).all()
    accepted = {row.id: row for row in rows if row.kind == ACCEPTED}
    return [
        Damage(row.id, row.subject, row.amount, accepted.get(row.id.replace(DAMAGED, ACCEPTED)))
        for row in rows
        if row.kind == DAMAGED
    ]


def pruned_before(connection: sa.Connection) -> int | None:
    """Return the time before which trees that had ended were deleted; `None` for never."""
    statement = sa.select(sa.func.max(RECORDS.until_us)).where(RECORDS.kind == PRUNED)
    found: int | None = connection.execute(statement).scalar()
    return found


# --- pruning old trees ----------------------------------------------------------------------------

CALL_TABLES: Final = (MODEL_CALL_TABLE, TOOL_CALL_TABLE, UNCOUNTED_TABLE)

SIGNS_OF_LIFE: Final = (MODEL_CALL_TABLE, TOOL_CALL_TABLE)
"""Calls by which a tree is younger than the start and end of its invocations."""

PORTION: Final = 500
"""Invocations per transaction: processes that record wait for no more than that."""

SMALL_PORTION: Final = 50
"""The same within a recording process: its own rows wait a few milliseconds."""

FREE_PAGES: Final = 2_000
"""Pages of an SQLite file that are freed together."""


def prune(database: Database, before_us: int, portion: int = PORTION) -> Iterator[int]:
    """Delete budget trees that recorded nothing since `before_us`, `portion` by `portion`.

    Yields:
        Deleted invocations, portion by portion.
    """
    younger = INVOCATION_TABLE.alias()
    has_younger = sa.exists().where(
        younger.c.root_id == RUNS.root_id, _last_known(younger.c) >= before_us
    )
    place = sa.tuple_(RUNS.started_us, RUNS.id)
    oldest = (
        sa.select(RUNS.id, RUNS.root_id, RUNS.started_us)
        .where(RUNS.started_us < before_us, ~has_younger)
        .order_by(RUNS.started_us, RUNS.id)
        .limit(portion)
    )
    following = oldest
    # Calls are deleted with their invocations, then those whose invocation was never recorded.
    while True:
        with database.changing() as connection:
            chosen = connection.execute(following).all()
            if not chosen:
                break
            seen = _last_seen(connection, {row.root_id for row in chosen})
            live = {root for root, last in seen.values() if last >= before_us}
            ids = [row.id for row in chosen if row.root_id not in live]
            for table in (*CALL_TABLES, ATTRIBUTE_TABLE):
                connection.execute(table.delete().where(table.c.invocation_id.in_(ids)))
            deleted = connection.execute(INVOCATION_TABLE.delete().where(RUNS.id.in_(ids)))
            if ids:
                insert(connection, MAINTENANCE_TABLE, [pruned_row(database.address, before_us)])
        yield deleted.rowcount  # another process may have deleted some in the meantime
        # Not those of live trees again.
        following = oldest.where(place > sa.tuple_(chosen[-1].started_us, chosen[-1].id))
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


def _last_known(runs: Any) -> sa.ColumnElement[int]:
    """Return when an invocation ended or, as long as it has no end, started."""
    return sa.func.coalesce(runs.ended_us, runs.started_us)


def retained_trees(before_us: int) -> sa.Select[tuple[str]]:
    """Select the IDs of all invocations that retention keeps: those that `prune` would not delete.

    One that started before the cutoff may have ended after it, and calls may have been made since
    then by one that has no end, or by a task that outlives its invocation.
    """
    seen, kept = INVOCATION_TABLE.alias().c, INVOCATION_TABLE.alias().c
    is_young = _last_known(seen) >= before_us
    for table in SIGNS_OF_LIFE:
        is_young |= sa.exists().where(table.c.invocation_id == seen.id, table.c.at_us >= before_us)
    return sa.select(kept.id).where(kept.root_id.in_(sa.select(seen.root_id).where(is_young)))


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


# --- ending lost invocations ----------------------------------------------------------------------

ENDED_AT_ONCE = 200
"""Invocations per transaction: processes that record wait for no more than that."""


def end_lost(database: Database, before_us: int) -> Iterator[int]:
    """End open invocations whose whole budget tree has recorded nothing since `before_us`.

    Their end is their last recorded sign of life, and their totals are those of their calls. A real
    end that is recorded later replaces this one.

    Yields:
        Invocations ended, portion by portion.
    """
    is_old = RUNS.ended_us.is_(None) & (RUNS.started_us < before_us)
    with database.reading() as connection:
        old = connection.execute(sa.select(RUNS.id, RUNS.root_id).where(is_old)).all()
    for portion in portions(old, ENDED_AT_ONCE):
        with database.changing() as connection:
            yield _end(connection, portion, before_us)


def _end(connection: sa.Connection, chosen: Sequence[Any], before_us: int) -> int:
    roots = {row.root_id for row in chosen}
    seen = _last_seen(connection, roots)
    live = {root for root, last in seen.values() if last >= before_us}
    # Read under the lock of this transaction: some may have ended in the meantime.
    still_open = set(
        connection.scalars(
            sa.select(RUNS.id).where(
                RUNS.id.in_([row.id for row in chosen]), RUNS.ended_us.is_(None)
            )
        )
    )
    lost = sorted(row.id for row in chosen if row.id in still_open and row.root_id not in live)
    for identity in lost:
        end = {"ended_us": seen[identity][1], "reason": LOST, "action": LOST}
        connection.execute(INVOCATION_TABLE.update().where(RUNS.id == identity).values(end))
    recount(connection, lost)
    if lost:
        insert(connection, MAINTENANCE_TABLE, [declared_lost_row(identity) for identity in lost])
    return len(lost)


def _last_seen(connection: sa.Connection, roots: set[str]) -> dict[str, tuple[str, int]]:
    """Return the root of each invocation of some trees, and when it last recorded anything."""
    of_tree = RUNS.root_id.in_(roots)
    rows = connection.execute(sa.select(RUNS.id, RUNS.root_id, _last_known(RUNS)).where(of_tree))
    seen = {identity: (root, int(at)) for identity, root, at in rows}
    for table in SIGNS_OF_LIFE:
        # Recorded at their end.
        at = sa.func.max(table.c.at_us)
        statement = (
            sa.select(RUNS.id, RUNS.root_id, at)
            .join(table, table.c.invocation_id == RUNS.id)
            .where(of_tree)
            .group_by(RUNS.id, RUNS.root_id)
        )
        for identity, root, found in connection.execute(statement):
            # PostgreSQL may show an invocation that was recorded since the query above.
            _, before = seen.get(identity, (root, 0))
            seen[identity] = (root, max(before, int(found)))
    return seen
