"""Queries of tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.ledger.schema import (
    CALL_TOKENS,
    CALLS,
    IS_UNPRICED,
    MODEL_CALL_TABLE,
    TOOL_CALL_TABLE,
    TOOLS,
)
from otel_limits.ledger.selection import Joins, Selection
from otel_limits.ledger.spending import columns_for, grouped, keyed


def tool_uses(
    connection: sa.Connection, by: Sequence[str], selection: Selection
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]] | None:
    """Add up tool calls: their number, failures, and microseconds.

    Returns `None` if `by` or the selection has a property that tool calls lack, such as a model.
    """
    names = columns_for(by, selection.zone)
    sums = (
        sa.func.count(),
        sa.func.count().filter(TOOLS.status == "error"),
        sa.func.coalesce(sa.func.sum(TOOLS.duration_us), 0),
    )
    try:
        statement = grouped(TOOL_CALL_TABLE, names, selection, sums)
    except LedgerError:
        return None
    return keyed(connection.execute(statement), names)


def repeating(connection: sa.Connection, selection: Selection) -> Sequence[str]:
    """List invocations in which a tool call repeats an earlier one, in order."""
    joins = Joins(TOOL_CALL_TABLE)
    hashed, different = (
        sa.func.count(TOOLS.fingerprint),
        sa.func.count(TOOLS.fingerprint.distinct()),
    )
    statement = joins.select(selection, TOOLS.invocation_id).group_by(TOOLS.invocation_id)
    return list(connection.scalars(statement.having(hashed > different)))


def tool_calls_of(connection: sa.Connection, ids: Sequence[str]) -> Iterator[Any]:
    """Iterate over the tool calls of some invocations, in the order of the requests."""
    statement = (
        sa.select(
            TOOLS.invocation_id, TOOLS.agent, TOOLS.turn, TOOLS.tool, TOOLS.status,
            TOOLS.fingerprint, TOOLS.duration_us,
        )
        .where(TOOLS.invocation_id.in_(ids))
        .order_by(TOOLS.invocation_id, TOOLS.number, TOOLS.at_us)
    )  # fmt: skip
    yield from connection.execute(statement)


def turns_of(connection: sa.Connection, ids: Sequence[str]) -> Iterator[Any]:
    """Iterate over the turns of some invocations, with their usage; side calls have no turn."""
    is_of_loop = sa.not_(sa.func.coalesce(CALLS.side, sa.false()))
    keys = (CALLS.invocation_id, CALLS.turn)
    statement = (
        sa.select(
            *keys,
            sa.func.min(CALLS.at_us).label("at_us"),
            sa.func.max(CALLS.model).label("model"),
            sa.func.count().label("calls"),
            sa.func.sum(CALL_TOKENS).label("tokens"),
            sa.func.sum(CALLS.price_pico).label("price_pico"),
            sa.func.count().filter(IS_UNPRICED).label("unpriced"),
        )
        .select_from(MODEL_CALL_TABLE)
        .where(CALLS.invocation_id.in_(ids), is_of_loop, CALLS.turn.is_not(None))
        .group_by(*keys)
        .order_by(*keys)
    )
    yield from connection.execute(statement)
