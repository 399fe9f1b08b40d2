"""Sums of invocations by outcome."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.events import HALTED
from otel_limits.ledger.schema import INVOCATION_TABLE, RUNS
from otel_limits.ledger.spending import columns_for, grouped, keyed
from otel_limits.ledger.totals import COST

if TYPE_CHECKING:
    from otel_limits.ledger.selection import Selection

NOT_HALTED: Final = ("none", "observed")


def outcomes(
    connection: sa.Connection, by: Sequence[str], selection: Selection, successes: Collection[str]
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Add up invocations: all, successful and halted ones, their picodollars, unpriced calls.

    Args:
        connection: The ledger.
        by: Properties of invocations.
        selection: Which invocations.
        successes: Reasons that are natural ends.
    """
    names = columns_for(by, selection.zone)
    succeeded = RUNS.reason.in_(sorted(successes)) & RUNS.action.in_(NOT_HALTED)
    halted = RUNS.action.in_(HALTED)
    count, pico = sa.func.count(), sa.func.sum(COST)
    sums = [
        count,
        count.filter(succeeded),
        count.filter(halted),
        sa.func.coalesce(pico, 0),
        sa.func.coalesce(pico.filter(succeeded), 0),
        sa.func.coalesce(pico.filter(halted), 0),
        sa.func.coalesce(sa.func.sum(RUNS.unpriced_calls), 0),
    ]
    statement = grouped(INVOCATION_TABLE, names, selection, sums)
    yield from keyed(connection.execute(statement.where(RUNS.ended_us.is_not(None))), names)
