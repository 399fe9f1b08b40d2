"""Counts that metrics and bills have too: live calls, ends, and calls by day."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import Any, Final

import sqlalchemy as sa

from otel_limits.core.terms import billable_call_in_ledger, canonical, vendor_of
from otel_limits.core.usage import NO_USAGE
from otel_limits.ledger.calendar import QUARTER, QUARTER_SECONDS
from otel_limits.ledger.litellm_logs import LITELLM
from otel_limits.ledger.repricing import RECORDED_PICO
from otel_limits.ledger.rows import EPOCH, LOST, UNKNOWN_SIZE
from otel_limits.ledger.schema import (
    CALL_TOKENS,
    CALLS,
    DAY_MICROSECONDS,
    INVOCATION_TABLE,
    IS_IMPORTED,
    MODEL_CALL_TABLE,
    RUNS,
)
from otel_limits.ledger.selection import REASON_COUNTED, Joins, Selection

RECORDED_LIVE: Final = "live"
"""Imported calls were counted elsewhere, if at all."""


def live_calls(
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


def live_stops(
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


# --- calls that a vendor bills --------------------------------------------------------------------

# As a literal: PostgreSQL would not recognize grouped expressions with other parameters.
IS_OF_GATEWAY: Final = CALLS.agent == sa.literal(LITELLM, literal_execute=True)
"""A call from LiteLLM's log, which does not contain the agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCalls:
    """Calls of the ledger with the same day, model, vendor, origin, state and price or none."""

    day: date
    """In the time zone of the selection."""
    model: str
    vendor: str
    """That of their address, if it identifies one, else that of their provider."""
    is_addressed: bool
    """Whether their address identified the vendor."""
    calls: int
    input: int
    output: int
    cache_read: int
    cache_write: int
    pico: int
    """Their price in picodollars, 0 if it is unknown."""
    is_priced: bool
    """True also for calls without tokens, which need no price."""
    state: str
    is_imported: bool
    is_logged: bool
    """Whether they were imported from a gateway's log."""


def recorded_calls(
    connection: sa.Connection, selection: Selection, *, by_size: bool
) -> Iterator[RecordedCalls]:
    """Add up the calls that a vendor may have billed; `by_size` separates those of unequal tokens.

    Calls without tokens are left out, unless their usage is unknown.
    """
    joins = Joins(MODEL_CALL_TABLE)
    when = joins.column("day" if selection.zone is timezone.utc else QUARTER).label("at")
    labels: list[sa.ColumnElement[Any]] = [
        when,
        CALLS.model,
        CALLS.provider,
        CALLS.price_basis,
        CALLS.state,
        CALLS.price_pico.is_(None).label("is_unpriced"),
        IS_IMPORTED.label("is_imported"),
        IS_OF_GATEWAY.label("is_of_gateway"),
    ]
    sizes = [CALLS.input_tokens, CALLS.output_tokens] if by_size else []
    statement = (
        joins.select(
            selection,
            *labels,
            sa.func.count().label("calls"),
            sa.func.sum(CALLS.input_tokens).label("input"),
            sa.func.sum(CALLS.output_tokens).label("output"),
            sa.func.sum(CALLS.cache_read_tokens).label("cache_read"),
            sa.func.sum(CALLS.cache_write_tokens).label("cache_write"),
            sa.func.sum(CALLS.price_pico).label("pico"),
        )
        .where((CALL_TOKENS > 0) | CALLS.state.in_(UNKNOWN_SIZE))
        .group_by(*labels, *sizes)
    )
    for row in connection.execute(statement):
        call = billable_call_in_ledger(row.model, row.provider, NO_USAGE, None, row.price_basis)
        yield RecordedCalls(
            day=_day(row.at, selection),
            model=row.model,
            vendor=vendor_of(row.model, call.vendor or canonical(row.provider)),
            is_addressed=call.vendor is not None,
            calls=int(row.calls),
            input=int(row.input),
            output=int(row.output),
            cache_read=int(row.cache_read),
            cache_write=int(row.cache_write),
            pico=int(row.pico or 0),
            is_priced=not (row.is_unpriced and row.input + row.output),
            state=row.state,
            is_imported=bool(row.is_imported),
            is_logged=bool(row.is_imported and row.is_of_gateway),
        )


def _day(at: int, selection: Selection) -> date:
    if selection.zone is timezone.utc:
        return (EPOCH + timedelta(days=int(at))).date()
    return datetime.fromtimestamp(int(at) * QUARTER_SECONDS, selection.zone).date()
