"""Ends invocations whose process vanished, such as after SIGKILL, as lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from otel_limits.ledger.insertion import insert
from otel_limits.ledger.maintenance import declared_lost_row
from otel_limits.ledger.rows import LOST, portions
from otel_limits.ledger.schema import (
    INVOCATION_TABLE,
    MAINTENANCE_TABLE,
    MODEL_CALL_TABLE,
    RUNS,
    TOOL_CALL_TABLE,
)
from otel_limits.ledger.totals import recount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.ledger.database import Database

PORTION = 200
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
    for portion in portions(old, PORTION):
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
    last = sa.func.coalesce(RUNS.ended_us, RUNS.started_us)
    rows = connection.execute(sa.select(RUNS.id, RUNS.root_id, last).where(of_tree))
    seen = {identity: (root, int(at)) for identity, root, at in rows}
    for table in (MODEL_CALL_TABLE, TOOL_CALL_TABLE):
        # Recorded at their end.
        at = sa.func.max(table.c.at_us)
        statement = (
            sa.select(RUNS.id, at)
            .join(table, table.c.invocation_id == RUNS.id)
            .where(of_tree)
            .group_by(RUNS.id)
        )
        for identity, found in connection.execute(statement):
            root, before = seen[identity]
            seen[identity] = (root, max(before, int(found)))
    return seen
