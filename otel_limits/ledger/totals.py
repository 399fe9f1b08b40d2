"""Totals of invocations, computed from their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from otel_limits.ledger.rows import LOST, UNANSWERED, tokens
from otel_limits.ledger.schema import CALLS, INVOCATION_TABLE, IS_UNPRICED, RUNS, TOOLS

COST: Final[sa.ColumnElement[Any]] = sa.func.coalesce(
    RUNS.price_pico,
    sa.select(sa.func.sum(CALLS.price_pico))
    .where(CALLS.invocation_id == RUNS.id)
    .correlate(INVOCATION_TABLE)
    .scalar_subquery(),
)
"""Picodollars of an invocation; from its calls if its row has none, as beyond 64 bits."""


def _sum(each: Any) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(sa.func.sum(each), 0)


def _exact(pico: Any) -> sa.ColumnElement[Any]:
    """Add up in two halves: null if the sum exceeds 64 bits, which would be an error."""
    half = 2**32
    high, low = _sum(pico // half), _sum(pico % half)
    return sa.case((high + low / half < half // 2, high * half + low))


MADE: Final = sa.case(
    (sa.func.max(CALLS.number) > sa.func.count(), sa.func.max(CALLS.number)), else_=sa.func.count()
)
"""How many calls an invocation made. Numbers count missing calls too: totals of the existing ones
would be balanced even after a loss."""

SUMMED: Final[dict[str, Any]] = {
    "model_calls": MADE,
    **{column: _sum(CALLS[column]) for column in tokens(None)},
    "price_pico": _exact(CALLS.price_pico),
    "unpriced_calls": _sum(sa.case((IS_UNPRICED, 1), else_=0)),
}
"""How calls determine the columns of their invocation."""


ANSWERED: Final = _sum(sa.case((CALLS.state.not_in(UNANSWERED), 1), else_=0))


def recount(connection: sa.Connection, ids: Sequence[str]) -> None:
    """Recount the totals of finished invocations from their calls.

    A live call may end after its invocation; imported and lost ones have no other totals.
    """
    if not ids:
        return
    tools = sa.select(sa.func.count()).where(TOOLS.invocation_id == RUNS.id).scalar_subquery()
    counted = {**_sums({"turns": ANSWERED, "cycles": ANSWERED}), "tool_calls": tools}
    # Live invocations count these themselves: not every answer became a turn.
    is_derived = (RUNS.source == "import") | (RUNS.action == LOST)
    derived = {
        name: sa.case((is_derived, total), else_=RUNS[name]) for name, total in counted.items()
    }
    ended = RUNS.id.in_(ids) & RUNS.ended_us.is_not(None)
    connection.execute(INVOCATION_TABLE.update().where(ended).values({**_sums(SUMMED), **derived}))


def with_later_calls(connection: sa.Connection, ids: Sequence[str]) -> Sequence[str]:
    """Return which invocations have more calls than their end says.

    An end that was in a spill file may come after a call that outlived its invocation.
    """
    if not ids:
        return ()
    made = sa.select(MADE).where(CALLS.invocation_id == RUNS.id).scalar_subquery()
    later = RUNS.id.in_(ids) & (RUNS.model_calls < made)
    return connection.scalars(sa.select(RUNS.id).where(later)).all()


def add_prices(connection: sa.Connection, ids: Sequence[str]) -> None:
    """Recount the cost of invocations from their calls."""
    values = _sums({column: SUMMED[column] for column in ("price_pico", "unpriced_calls")})
    ended = RUNS.id.in_(ids) & RUNS.ended_us.is_not(None)
    connection.execute(INVOCATION_TABLE.update().where(ended).values(values))


def _sums(summed: dict[str, Any]) -> dict[str, Any]:
    of_run = CALLS.invocation_id == RUNS.id
    return {
        column: sa.select(each).where(of_run).scalar_subquery() for column, each in summed.items()
    }
