"""Whether a ledger is whole: totals against calls, numbers without gaps, nothing counted twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from otel_limits.ledger.rows import SAME_CALL_MICROSECONDS
from otel_limits.ledger.schema import (
    CALL_TOKENS,
    CALLS,
    INVOCATION_TABLE,
    IS_OF_UNKNOWN_SIZE,
    MODEL_CALL_TABLE,
    RUNS,
)
from otel_limits.ledger.totals import COST

if TYPE_CHECKING:
    from sqlalchemy.sql.selectable import Subquery

HAS_ENDED: Final = RUNS.ended_us.is_not(None)


class Sum(NamedTuple):
    """Model calls added up: how many, their tokens and their picodollars."""

    calls: int
    input: int
    output: int
    pico: int

    @property
    def tokens(self) -> int:
        """Input and output together."""
        return self.input + self.output


class Balance(NamedTuple):
    """The calls of a ledger, and the same by way of its invocations."""

    calls: Sum
    ended: Sum
    """What the rows of invocations that have ended say of their calls."""
    open: Sum
    """Calls of invocations without an end."""
    invocations: int
    open_invocations: int
    oldest_open_us: int | None
    unmeasured_calls: int
    unpriced_tokens: int

    @property
    def missing(self) -> Sum:
        """By how much the calls are more than what the invocations say, or below 0 less."""
        of_both = zip(self.calls, self.ended, self.open, strict=True)
        return Sum(*(calls - ended - still_open for calls, ended, still_open in of_both))

    @property
    def is_even(self) -> bool:
        """Whether both agree; each price is rounded by itself, to a picodollar."""
        *counts, pico = self.missing
        return not any(counts) and abs(pico) <= self.calls.calls


def balance(connection: sa.Connection, calls: Sequence[int] | None = None) -> Balance:
    """Add up calls and invocations; each sum is read from one index.

    Args:
        connection: The ledger.
        calls: What all calls come to, where somebody has added them up already, which takes
            longest: how many, their input and output tokens, their picodollars, and their tokens
            without a price.
    """
    calls = calls or _one(connection, sa.select(*SUMS, UNPRICED).select_from(MODEL_CALL_TABLE))
    ended = _one(connection, sa.select(*SUMS_OF_RUNS, sa.func.count()).where(HAS_ENDED))
    # Split by this, since the row of an invocation has no sums before its end.
    is_open = RUNS.ended_us.is_(None)
    its_calls = INVOCATION_TABLE.join(MODEL_CALL_TABLE, CALLS.invocation_id == RUNS.id)
    # By their calls, as the row of an invocation says what it used only at its end.
    of_open = _one(connection, sa.select(*SUMS).select_from(its_calls).where(is_open))
    oldest = sa.select(sa.func.count(), sa.func.min(RUNS.started_us)).where(is_open)
    waiting = _one(connection, oldest)
    unmeasured = sa.select(sa.func.count()).select_from(MODEL_CALL_TABLE).where(IS_OF_UNKNOWN_SIZE)
    return Balance(
        calls=Sum(*calls[:4]),
        ended=Sum(*ended[:4]),
        open=Sum(*of_open),
        invocations=ended[4] + waiting[0],
        open_invocations=waiting[0],
        oldest_open_us=waiting[1] or None,
        unmeasured_calls=_one(connection, unmeasured)[0],
        unpriced_tokens=calls[4],
    )


SUMS: Final = (
    sa.func.count(),
    sa.func.sum(CALLS.input_tokens),
    sa.func.sum(CALLS.output_tokens),
    sa.func.sum(CALLS.price_pico),
)
UNPRICED: Final = sa.func.sum(CALL_TOKENS).filter(CALLS.price_pico.is_(None))
SUMS_OF_RUNS: Final = (
    sa.func.sum(RUNS.model_calls),
    sa.func.sum(RUNS.input_tokens),
    sa.func.sum(RUNS.output_tokens),
    sa.func.sum(COST),
)


def _one(connection: sa.Connection, statement: Any) -> list[int]:
    # Sums come as Decimal from PostgreSQL, and as None of no rows.
    return [int(value or 0) for value in connection.execute(statement).one()]


# --- row by row -----------------------------------------------------------------------------------


def _by_invocation() -> Subquery:
    """The calls of each invocation: read in the order of an index that has all of it."""
    return (
        sa.select(
            CALLS.invocation_id,
            sa.func.count().label("calls"),
            sa.func.count(CALLS.number).label("numbered"),
            sa.func.max(CALLS.number).label("last"),
            sa.func.sum(CALLS.input_tokens).label("input"),
            sa.func.sum(CALLS.output_tokens).label("output"),
            sa.func.coalesce(sa.func.sum(CALLS.price_pico), 0).label("pico"),
            UNPRICED.label("unpriced"),
        )
        .group_by(CALLS.invocation_id)
        .subquery()
    )


def _is_suspect(c: Any) -> sa.ColumnElement[bool]:
    """Whether the row of an invocation and its calls differ, or those are not numbered through."""
    # Only live calls have numbers: what was imported cannot have gaps.
    is_live = RUNS.source == "live"
    differs = HAS_ENDED & (
        (c.calls != RUNS.model_calls)
        | (c.input != RUNS.input_tokens)
        | (c.output != RUNS.output_tokens)
        | (sa.func.abs(c.pico - RUNS.price_pico) > c.calls)
    )
    has_gap = HAS_ENDED & is_live & (c.last != c.numbered)
    has_namesakes = is_live & (c.numbered != c.calls)
    return sa.or_(RUNS.id.is_(None), differs, has_gap, has_namesakes)


def looked_through(connection: sa.Connection) -> tuple[Sequence[int], int]:
    """Add up all calls as `balance` wants them, and count what `suspects` has: in one pass."""
    if connection.dialect.name == "sqlite":
        # 32 MiB: the invocations of a million calls stay in memory while each is looked up. Other
        # questions go through a ledger in its order, for which 2 are enough.
        connection.exec_driver_sql("PRAGMA cache_size = -32768")
    calls = _by_invocation()
    c = calls.c
    sums = [sa.func.sum(each) for each in (c.calls, c.input, c.output, c.pico, c.unpriced)]
    suspicious = sa.func.count().filter(_is_suspect(c))
    joined = calls.outerjoin(INVOCATION_TABLE, RUNS.id == c.invocation_id)
    *added, found = _one(connection, sa.select(*sums, suspicious).select_from(joined))
    return added, found


def suspects(connection: sa.Connection) -> Iterator[Any]:
    """Invocations whose row and calls do not agree, or whose calls are not numbered through."""
    calls = _by_invocation()
    c = calls.c
    columns = (
        c.invocation_id,
        c.calls,
        c.numbered,
        c.last,
        c.input,
        c.output,
        c.pico,
        RUNS.id,
        RUNS.ended_us,
        RUNS.source,
        RUNS.model_calls,
        RUNS.input_tokens,
        RUNS.output_tokens,
        RUNS.price_pico,
    )
    statement = (
        sa.select(*columns)
        .select_from(calls.outerjoin(INVOCATION_TABLE, RUNS.id == c.invocation_id))
        .where(_is_suspect(c))
    )
    yield from connection.execute(statement)


def without_calls(connection: sa.Connection) -> Iterator[Any]:
    """Invocations that say that they made calls, of which none is there.

    There is none where everything is even and nothing is suspect: its calls would be missing.
    """
    has_calls = sa.exists().where(CALLS.invocation_id == RUNS.id)
    statement = sa.select(RUNS.id, RUNS.model_calls).where(
        HAS_ENDED, RUNS.model_calls > 0, ~has_calls
    )
    yield from connection.execute(statement)


def unnumbered(connection: sa.Connection, invocation_id: str) -> list[int]:
    """Rows of calls whose number another call had: both were made, and both are kept."""
    statement = sa.select(CALLS.id).where(
        CALLS.invocation_id == invocation_id, CALLS.number.is_(None)
    )
    return list(connection.scalars(statement))


def numbers(connection: sa.Connection, invocation_id: str) -> list[int]:
    """The numbers of the calls of an invocation, in their order."""
    statement = (
        sa.select(CALLS.number)
        .where(CALLS.invocation_id == invocation_id, CALLS.number.is_not(None))
        .order_by(CALLS.number)
    )
    return list(connection.scalars(statement))


def counted_twice(connection: sa.Connection) -> Iterator[Any]:
    """Imported calls that were recorded live as well, by the ids of their span and their time."""
    # Asked first, as SQLite would begin with the live calls, which are many more.
    # As a literal, since SQLite uses a partial index only for the very condition it has.
    is_imported = CALLS.source == sa.literal_column("'import'")
    if not connection.execute(sa.select(sa.exists().where(is_imported))).scalar():
        return
    live = MODEL_CALL_TABLE.alias()
    statement = (
        sa.select(CALLS.id, CALLS.invocation_id, live.c.id.label("live_id"))
        .join(INVOCATION_TABLE, RUNS.trace_id == CALLS.trace_id)
        .join(live, (live.c.invocation_id == RUNS.id) & (live.c.span_id == CALLS.span_id))
        .where(
            is_imported,
            live.c.source == "live",
            sa.func.abs(live.c.at_us - CALLS.at_us) <= SAME_CALL_MICROSECONDS,
        )
    )
    yield from connection.execute(statement)
