"""Ledger integrity checks: totals against calls, gaps in numbers, double counting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from otel_limits.ledger.database import reason_of
from otel_limits.ledger.recorded_live import CALLS_TWICE
from otel_limits.ledger.rows import LOST, MODEL_CALLS
from otel_limits.ledger.schema import (
    CALL_TOKENS,
    CALLS,
    INVOCATION_TABLE,
    IS_IMPORTED,
    IS_OF_UNKNOWN_SIZE,
    IS_UNPRICED,
    MODEL_CALL_TABLE,
    RUNS,
    SPEND_INDEX,
    TABLES,
    TOOLS,
)
from otel_limits.ledger.totals import COST

if TYPE_CHECKING:
    from sqlalchemy.sql.selectable import Subquery

HAS_ENDED: Final = RUNS.ended_us.is_not(None)


class Sum(NamedTuple):
    """Sums of model calls: their number, tokens and picodollars."""

    calls: int
    input: int
    output: int
    pico: int

    @property
    def tokens(self) -> int:
        """Input and output tokens."""
        return self.input + self.output


class Balance(NamedTuple):
    """Sums of the calls of a ledger, and of its invocations."""

    calls: Sum
    ended: Sum
    """The totals recorded with finished invocations."""
    open: Sum
    """Calls of unfinished invocations."""
    invocations: int
    open_invocations: int
    oldest_open_us: int | None
    estimated_calls: int
    unmeasured_calls: int
    unpriced_tokens: int

    @property
    def missing(self) -> Sum:
        """How much the calls exceed the totals of the invocations; negative if they fall short."""
        of_both = zip(self.calls, self.ended, self.open, strict=True)
        return Sum(*(calls - ended - still_open for calls, ended, still_open in of_both))

    @property
    def is_balanced(self) -> bool:
        """Whether both agree. Each price is rounded to a picodollar."""
        *counts, pico = self.missing
        return not any(counts) and abs(pico) <= self.calls.calls


def balance(connection: sa.Connection, calls: Sequence[int] | None = None) -> Balance:
    """Add up calls and invocations; each sum is read from one index.

    Args:
        connection: The ledger.
        calls: The sums of all calls if already known, as they take longest: their number, input
            and output tokens, picodollars, and tokens without a price.
    """
    calls = calls or _one(connection, sa.select(*SUMS, UNPRICED).select_from(MODEL_CALL_TABLE))
    ended = _one(connection, sa.select(*SUMS_OF_RUNS, sa.func.count()).where(HAS_ENDED))
    # Separate queries, since the row of an invocation has no totals before its end.
    is_open = RUNS.ended_us.is_(None)
    its_calls = INVOCATION_TABLE.join(MODEL_CALL_TABLE, CALLS.invocation_id == RUNS.id)
    # Added up from calls, as the row gets its totals only at the end.
    of_open = _one(connection, sa.select(*SUMS).select_from(its_calls).where(is_open))
    oldest = sa.select(sa.func.count(), sa.func.min(RUNS.started_us)).where(is_open)
    waiting = _one(connection, oldest)
    is_estimate = (CALLS.estimated, ~CALLS.estimated)
    unknown = sa.select(*(sa.func.count().filter(each) for each in is_estimate))
    of_unknown_size = _one(connection, unknown.where(IS_OF_UNKNOWN_SIZE))
    return Balance(
        calls=Sum(*calls[:4]),
        ended=Sum(*ended[:4]),
        open=Sum(*of_open),
        invocations=ended[4] + waiting[0],
        open_invocations=waiting[0],
        oldest_open_us=waiting[1] or None,
        estimated_calls=of_unknown_size[0],
        unmeasured_calls=of_unknown_size[1],
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
    # Sums are Decimal from PostgreSQL, and None over no rows.
    return [int(value or 0) for value in connection.execute(statement).one()]


# --- the file or the heap -------------------------------------------------------------------------

MAX_ERRORS: Final = 20
"""Errors of a damaged database that are listed."""


def damage(connection: sa.Connection) -> list[str]:
    """Read the whole database, and list its errors.

    SQLite checks the structure of every page, and the sums of the rows are compared with those of
    the largest index: comparing each entry of each index takes five times as long. PostgreSQL reads
    every value of every row.
    """
    try:
        if connection.dialect.name == "sqlite":
            return _damage_of_file(connection)
        for table in TABLES:
            statement = f"SELECT sum(octet_length(t::text)) FROM {table.name} t"  # noqa: S608
            connection.exec_driver_sql(statement).scalar()
    except (sa.exc.SQLAlchemyError, UnicodeDecodeError) as error:
        return [reason_of(error)]
    return []


def _damage_of_file(connection: sa.Connection) -> list[str]:
    there = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")
    missing = {table.name for table in TABLES} - set(there.scalars())
    if missing:
        return [f"no such table: {name}" for name in sorted(missing)]
    found = connection.exec_driver_sql(f"PRAGMA quick_check({MAX_ERRORS})").scalars().all()
    if list(found) != ["ok"]:
        return [str(each) for each in found]
    names = [column.name for column in SPEND_INDEX.columns]
    measured = [name for name in names if name.endswith(("_tokens", "_pico"))]
    # Remainders, which add up to 64 bits at most.
    sums = ", ".join(["count(*)", *(f"sum({name} % 1000000007)" for name in measured)])
    of_rows, of_index = (
        connection.exec_driver_sql(f"SELECT {sums} FROM {MODEL_CALLS} {how}").one()  # noqa: S608
        for how in ("NOT INDEXED", f"INDEXED BY {SPEND_INDEX.name}")
    )
    return [] if of_rows == of_index else [f"{SPEND_INDEX.name} differs from its rows"]


def has_checksums(connection: sa.Connection) -> bool:
    """Return whether the database can recognize a changed value: PostgreSQL with checksums."""
    if connection.dialect.name == "sqlite":
        return False
    return bool(connection.exec_driver_sql("SHOW data_checksums").scalar() == "on")


# --- row by row -----------------------------------------------------------------------------------


def _by_invocation() -> Subquery:
    """Add up the calls of each invocation, in the order of an index, from the rows themselves."""
    return (
        sa.select(
            CALLS.invocation_id,
            sa.func.count().label("calls"),
            sa.func.count(CALLS.number).label("numbered"),
            sa.func.max(CALLS.number).label("last"),
            sa.func.sum(CALLS.input_tokens).label("input"),
            sa.func.sum(CALLS.output_tokens).label("output"),
            sa.func.sum(CALLS.cache_read_tokens).label("cache_read"),
            sa.func.sum(CALLS.cache_write_tokens).label("cache_write"),
            sa.func.coalesce(sa.func.sum(CALLS.price_pico), 0).label("pico"),
            UNPRICED.label("unpriced"),
            sa.func.count().filter(IS_UNPRICED).label("unpriced_calls"),
            sa.func.min(CALLS.agent).label("first_agent"),
            sa.func.max(CALLS.agent).label("last_agent"),
        )
        .group_by(CALLS.invocation_id)
        .subquery()
    )


def _is_suspect(c: Any) -> sa.ColumnElement[bool]:
    """Whether the row of an invocation differs from its calls, or their numbers have gaps."""
    # Only live calls have numbers, so imported ones have no gaps.
    is_live = RUNS.source == "live"
    differs = HAS_ENDED & (
        (c.calls != RUNS.model_calls)
        | (c.input != RUNS.input_tokens)
        | (c.output != RUNS.output_tokens)
        | (c.cache_read != RUNS.cache_read_tokens)
        | (c.cache_write != RUNS.cache_write_tokens)
        | (c.unpriced_calls != RUNS.unpriced_calls)
        | (sa.func.abs(c.pico - RUNS.price_pico) > c.calls)
    )
    has_gap = HAS_ENDED & is_live & (c.last != c.numbered)
    has_namesakes = is_live & (c.numbered != c.calls)
    is_of_another = (c.first_agent != RUNS.agent) | (c.last_agent != RUNS.agent)
    return sa.or_(RUNS.id.is_(None), differs, has_gap, has_namesakes, is_of_another)


def scan_totals(connection: sa.Connection) -> tuple[Sequence[int], int]:
    """Add up all calls as `balance` needs them, and count the `suspects`, in one pass."""
    if connection.dialect.name == "sqlite":
        # 32 MiB: the invocations of a million calls stay cached while each is looked up. Other
        # queries read a ledger sequentially, for which 2 suffice.
        connection.exec_driver_sql("PRAGMA cache_size = -32768")
    calls = _by_invocation()
    c = calls.c
    sums = [sa.func.sum(each) for each in (c.calls, c.input, c.output, c.pico, c.unpriced)]
    suspicious = sa.func.count().filter(_is_suspect(c))
    joined = calls.outerjoin(INVOCATION_TABLE, RUNS.id == c.invocation_id)
    *added, found = _one(connection, sa.select(*sums, suspicious).select_from(joined))
    return added, found


def suspects(connection: sa.Connection) -> Iterator[Any]:
    """Iterate over invocations whose row and calls differ, or whose numbers have gaps."""
    calls = _by_invocation()
    c = calls.c
    columns = (
        *c,
        RUNS.id,
        RUNS.agent,
        RUNS.ended_us,
        RUNS.source,
        RUNS.model_calls,
        RUNS.input_tokens,
        RUNS.output_tokens,
        RUNS.cache_read_tokens,
        RUNS.cache_write_tokens,
        RUNS.price_pico,
        # Under another name than the sum of its calls.
        RUNS.unpriced_calls.label("recorded_unpriced"),
    )
    statement = (
        sa.select(*columns)
        .select_from(calls.outerjoin(INVOCATION_TABLE, RUNS.id == c.invocation_id))
        .where(_is_suspect(c))
    )
    yield from connection.execute(statement)


def without_calls(connection: sa.Connection) -> Iterator[Any]:
    """Iterate over invocations that recorded calls of which none exists.

    If totals are balanced and nothing is suspect, there is none: its calls would be missing.
    """
    has_calls = sa.exists().where(CALLS.invocation_id == RUNS.id)
    statement = sa.select(RUNS.id, RUNS.model_calls).where(
        HAS_ENDED, RUNS.model_calls > 0, ~has_calls
    )
    yield from connection.execute(statement)


MAY_LEAVE_TOOLS: Final = ("aborted", "cancelled", "error", "evicted", "killed", "max_duration")
"""Reasons of ends during which a tool may run, which then counts but has no row."""


def tool_suspects(connection: sa.Connection) -> Iterator[Any]:
    """Iterate over live invocations whose tool calls differ from their count, or have gaps."""
    # Others do not count: a limit refused them, or no tool answered them, which takes no time.
    has_failed = (TOOLS.status == "error") & TOOLS.duration_us.is_not(None)
    has_run = (TOOLS.status == "success") | has_failed
    tools = (
        sa.select(
            TOOLS.invocation_id,
            sa.func.count().label("rows"),
            sa.func.count(TOOLS.number).label("numbered"),
            sa.func.max(TOOLS.number).label("last"),
            sa.func.count().filter(has_run).label("ran"),
        )
        .where(TOOLS.source == "live")
        .group_by(TOOLS.invocation_id)
        .subquery()
    )
    c = tools.c
    columns = (*c, RUNS.id, RUNS.ended_us, RUNS.tool_calls)
    differs = HAS_ENDED & RUNS.reason.not_in(MAY_LEAVE_TOOLS) & (c.ran != RUNS.tool_calls)
    differs &= RUNS.action != LOST  # counted from these rows
    has_gap = HAS_ENDED & ((c.last != c.numbered) | (c.numbered != c.rows))
    joined = tools.outerjoin(INVOCATION_TABLE, RUNS.id == c.invocation_id)
    yield from connection.execute(
        sa.select(*columns).select_from(joined).where(sa.or_(RUNS.id.is_(None), differs, has_gap))
    )
    has_tools = sa.exists().where(TOOLS.invocation_id == RUNS.id)
    nulls = [sa.null().label(column.name) for column in c if column.name != "invocation_id"]
    yield from connection.execute(
        sa.select(RUNS.id.label("invocation_id"), *nulls, *columns[len(c) :]).where(
            HAS_ENDED,
            RUNS.source == "live",
            RUNS.tool_calls > 0,
            RUNS.reason.not_in(MAY_LEAVE_TOOLS),
            ~has_tools,
        )
    )


def unnumbered(connection: sa.Connection, invocation_id: str) -> list[int]:
    """List rows of calls that shared their number with another call; both were made."""
    statement = sa.select(CALLS.id).where(
        CALLS.invocation_id == invocation_id, CALLS.number.is_(None)
    )
    return list(connection.scalars(statement))


def numbers(connection: sa.Connection, invocation_id: str) -> list[int]:
    """List the numbers of an invocation's calls, in order."""
    statement = (
        sa.select(CALLS.number)
        .where(CALLS.invocation_id == invocation_id, CALLS.number.is_not(None))
        .order_by(CALLS.number)
    )
    return list(connection.scalars(statement))


def counted_twice(connection: sa.Connection) -> Iterator[Any]:
    """Iterate over imported calls that were recorded live too, by span IDs and time."""
    # Checked first, as SQLite would start with the live calls, which are many more.
    if connection.execute(sa.select(sa.exists().where(IS_IMPORTED))).scalar():
        yield from connection.execute(CALLS_TWICE)
