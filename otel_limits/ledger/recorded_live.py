"""Imported rows whose spans the ledger also recorded live: the live rows stay, as these know more.

An import leaves out what it finds in the ledger. Here are the other ways in which both meet: a
merge in either direction, and live rows that come later, e.g. from a spill file.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from otel_limits.ledger.rows import (
    INVOCATIONS,
    MODEL_CALLS,
    RECORDED_LIVE,
    SAME_CALL_MICROSECONDS,
    TOOL_CALLS,
    portions,
)
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    CALLS,
    INVOCATION_TABLE,
    IS_IMPORTED,
    MODEL_CALL_TABLE,
    RUNS,
    TOOL_CALL_TABLE,
    TOOLS,
    UNCOUNTED_TABLE,
)
from otel_limits.ledger.totals import recount

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_limits.ledger.otlp import SpanKey
    from otel_limits.ledger.rows import Row

PORTION: Final = 2_000
"""Parameters in a statement: SQLite allows 32,766, PostgreSQL 65,535."""

_LIVE_CALL: Final = MODEL_CALL_TABLE.alias()
_LIVE_TOOL: Final = TOOL_CALL_TABLE.alias()
_LIVE_RUN: Final = INVOCATION_TABLE.alias()

CALLS_TWICE: Final = (
    sa.select(
        CALLS.id,
        CALLS.invocation_id,
        CALLS.trace_id,
        CALLS.span_id,
        _LIVE_CALL.c.id.label("live_id"),
    )
    .join(INVOCATION_TABLE, RUNS.trace_id == CALLS.trace_id)
    .join(
        _LIVE_CALL,
        (_LIVE_CALL.c.invocation_id == RUNS.id) & (_LIVE_CALL.c.span_id == CALLS.span_id),
    )
    .where(
        IS_IMPORTED,
        _LIVE_CALL.c.source == "live",
        sa.func.abs(_LIVE_CALL.c.at_us - CALLS.at_us) <= SAME_CALL_MICROSECONDS,
    )
)
"""Imported calls that were recorded live too, by span and time."""

TOOLS_TWICE: Final = (
    sa.select(TOOLS.id, TOOLS.invocation_id, TOOLS.trace_id, TOOLS.span_id)
    .join(INVOCATION_TABLE, RUNS.trace_id == TOOLS.trace_id)
    .join(
        _LIVE_TOOL,
        (_LIVE_TOOL.c.invocation_id == RUNS.id) & (_LIVE_TOOL.c.tool == TOOLS.tool),
    )
    .where(
        TOOLS.source == sa.literal_column("'import'"),
        TOOLS.invocation_id == TOOLS.trace_id,
        _LIVE_TOOL.c.source == "live",
        sa.func.abs(_LIVE_TOOL.c.at_us - TOOLS.at_us) <= SAME_CALL_MICROSECONDS,
    )
)
"""Imported tool calls without an agent that were recorded live too, by trace, tool and time.

Rows of live tool calls have no span. The literal selects the index of imported ones.
"""

RUNS_TWICE: Final = (
    sa.select(RUNS.id)
    .join(
        _LIVE_RUN,
        (_LIVE_RUN.c.trace_id == RUNS.trace_id) & (_LIVE_RUN.c.span_id == RUNS.span_id),
    )
    .where(
        RUNS.source == "import",
        _LIVE_RUN.c.source == "live",
        sa.func.abs(_LIVE_RUN.c.started_us - RUNS.started_us) <= SAME_CALL_MICROSECONDS,
    )
)
"""Imported invocations that were recorded live too."""


def delete_recorded_live(
    connection: sa.Connection, written: Mapping[str, list[Row]]
) -> Counter[str]:
    """Delete imported rows that are live rows, too, in the traces of rows that were just written.

    A live invocation has counted its calls, also those that its spans show differently.

    Args:
        connection: The transaction that wrote them.
        written: The rows, by table.

    Returns:
        Deleted rows by table, as far as they are among those written, and all deleted model calls
        as `RECORDED_LIVE`.
    """
    # Of most ledgers it is all that is asked.
    if not connection.scalar(sa.select(sa.exists().where(IS_IMPORTED))):
        return Counter()
    runs, spans, calls = set[str](), set[tuple[str, str]](), 0
    for traces in portions(sorted(_traces(connection, written)), PORTION):
        found = connection.scalars(RUNS_TWICE.where(RUNS.trace_id.in_(traces))).all()
        calls += _delete_runs(connection, found)
        runs.update(found)
        # Of other invocations, such as a trace that has the calls without an agent.
        changed = set[str]()
        for table, statement in ((MODEL_CALL_TABLE, CALLS_TWICE), (TOOL_CALL_TABLE, TOOLS_TWICE)):
            twice = connection.execute(statement.where(table.c.trace_id.in_(traces))).all()
            for rows in portions(twice, PORTION):
                is_one = table.c.id.in_([row.id for row in rows])
                deleted = connection.execute(table.delete().where(is_one)).rowcount
                calls += deleted if table is MODEL_CALL_TABLE else 0
            spans.update((row.trace_id, row.span_id) for row in twice)
            changed.update(row.invocation_id for row in twice)
        runs |= _recount(connection, sorted(changed))
    return _among(written, runs, spans) + Counter({RECORDED_LIVE: calls})


def _traces(connection: sa.Connection, written: Mapping[str, list[Row]]) -> set[str]:
    """Return the traces of rows; a live call has the trace of its invocation."""
    found = {row["trace_id"] for row in written.get(INVOCATIONS, ())}
    # Calls may be written without their invocation, which the ledger then has already.
    owners = {row["invocation_id"] for row in written.get(MODEL_CALLS, ())}
    for ids in portions(sorted(owners), PORTION):
        found.update(connection.scalars(sa.select(RUNS.trace_id).where(RUNS.id.in_(ids))))
    return found - {None}


def _delete_runs(connection: sa.Connection, runs: Sequence[str]) -> int:
    """Delete invocations with their rows; returns the number of their model calls."""
    calls = 0
    for ids in portions(runs, PORTION):
        for table in (ATTRIBUTE_TABLE, TOOL_CALL_TABLE):
            connection.execute(table.delete().where(table.c.invocation_id.in_(ids)))
        # Those of a trace without an agent stay: nothing shows that a live invocation has them.
        uncounted = UNCOUNTED_TABLE.c
        is_of_agent = uncounted.invocation_id != uncounted.trace_id
        connection.execute(
            UNCOUNTED_TABLE.delete().where(uncounted.invocation_id.in_(ids), is_of_agent)
        )
        of_runs = CALLS.invocation_id.in_(ids)
        calls += connection.execute(MODEL_CALL_TABLE.delete().where(of_runs)).rowcount
        connection.execute(INVOCATION_TABLE.delete().where(RUNS.id.in_(ids)))
    return calls


def _recount(connection: sa.Connection, runs: Sequence[str]) -> set[str]:
    """Recount invocations that lost calls; returns traces without any left, which are deleted.

    A trace whose model calls are all live loses its tool calls, too, as in an import.
    """
    without = set[str]()
    for ids in portions(runs, PORTION):
        has_calls = sa.exists().where(CALLS.invocation_id == RUNS.id)
        is_empty = RUNS.id.in_(ids) & RUNS.span_id.is_(None) & ~has_calls
        without.update(connection.scalars(sa.select(RUNS.id).where(is_empty)))
        recount(connection, ids)
    _delete_runs(connection, sorted(without))
    return without


def _among(written: Mapping[str, list[Row]], runs: set[str], spans: set[SpanKey]) -> Counter[str]:
    """Count the rows of deleted invocations and calls among those written, by table."""

    def deleted(table: str) -> int:
        return sum(
            row["invocation_id"] in runs or (row["trace_id"], row["span_id"]) in spans
            for row in written.get(table, ())
        )

    invocations = sum(row["id"] in runs for row in written.get(INVOCATIONS, ()))
    calls = {table: deleted(table) for table in (MODEL_CALLS, TOOL_CALLS)}
    return Counter({INVOCATIONS: invocations, **calls})
