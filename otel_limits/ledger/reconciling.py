"""Counts that metrics have too: live model calls by agent and model, ends by agent and reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import sqlalchemy as sa

from otel_limits.ledger.repricing import RECORDED_PICO
from otel_limits.ledger.rows import LOST
from otel_limits.ledger.schema import (
    CALLS,
    DAY_MICROSECONDS,
    INVOCATION_TABLE,
    MODEL_CALL_TABLE,
    RUNS,
)
from otel_limits.ledger.selection import REASON_COUNTED

RECORDED_LIVE: Final = "live"
"""Imported calls were counted elsewhere, if at all."""


def calls(
    connection: sa.Connection, since_us: int, until_us: int
) -> Iterator[tuple[tuple[str, str], dict[str, int]]]:
    """Add up calls, tokens and picodollars by agent and model, at the recorded prices."""
    sums = (
        sa.func.count(),
        sa.func.sum(CALLS.input_tokens),
        sa.func.sum(CALLS.output_tokens),
        sa.func.sum(RECORDED_PICO),
    )
    keys = (CALLS.agent, CALLS.model)
    statement = (
        sa.select(*keys, *sums)
        .select_from(MODEL_CALL_TABLE)
        .where(
            CALLS.source == RECORDED_LIVE,
            CALLS.day.between(since_us // DAY_MICROSECONDS, until_us // DAY_MICROSECONDS),
            CALLS.at_us >= since_us,
            CALLS.at_us < until_us,
        )
        .group_by(*keys)
    )
    for agent, model, *figures in connection.execute(statement):
        names = ("calls", "input", "output", "pico")
        yield (
            (agent, model),
            {name: int(figure or 0) for name, figure in zip(names, figures, strict=True)},
        )


def stops(
    connection: sa.Connection, since_us: int, until_us: int
) -> Iterator[tuple[tuple[str, str], dict[str, int]]]:
    """Count ended invocations by agent and reason."""
    keys = (RUNS.agent, REASON_COUNTED.label("counted"))
    statement = (
        sa.select(*keys, sa.func.count().label("stops"))
        .select_from(INVOCATION_TABLE)
        .where(
            RUNS.source == RECORDED_LIVE,
            # No process counted their end.
            RUNS.action != LOST,
            RUNS.ended_us >= since_us,
            RUNS.ended_us < until_us,
        )
        .group_by(*keys)
    )
    for row in connection.execute(statement):
        yield (row.agent, row.counted), {"stops": int(row.stops)}
