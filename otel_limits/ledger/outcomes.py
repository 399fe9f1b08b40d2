"""Invocations of a ledger added up by how they ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import sqlalchemy as sa

from otel_limits.ledger.rows import HALTED
from otel_limits.ledger.schema import INVOCATION_TABLE
from otel_limits.ledger.selection import RUNS, Selection, Source
from otel_limits.ledger.spending import columns_for
from otel_limits.ledger.totals import COST

OF_CALLS: Final = frozenset({"model", "provider", "state", "side", "tool"})
"""What an invocation can have several of."""
NOT_HALTED: Final = ("none", "observed")


def outcomes(
    connection: sa.Connection, by: Sequence[str], selection: Selection, successes: Collection[str]
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Sums of invocations: all, successful and halted ones, their picodollars, unpriced calls.

    Args:
        connection: The ledger.
        by: Properties of invocations.
        selection: Which of them.
        successes: Reasons that are natural ends.
    """
    source = Source(INVOCATION_TABLE)
    names = columns_for(by, selection.zone)
    columns = [source.column(name) for name in names]
    labelled = [column.label(f"k{n}") for n, column in enumerate(columns)]
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
    statement = source.select(selection, *labelled, *sums).where(RUNS.ended_us.is_not(None))
    for row in connection.execute(statement.group_by(*columns)):
        yield dict(zip(names, row[: len(names)], strict=True)), row[len(names) :]
