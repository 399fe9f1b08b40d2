"""What a ledger is asked: statements whose rows the questions of an audit are answered from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.core.events import HALTED
from otel_limits.ledger.database import DatabaseError
from otel_limits.ledger.reading import asking
from otel_limits.ledger.rows import MAX_INTEGER, UNKNOWN_SIZE
from otel_limits.ledger.schema import (
    CALL_TOKENS,
    CALLS,
    INVOCATION_TABLE,
    IS_OF_UNKNOWN_SIZE,
    IS_UNPRICED,
    MODEL_CALL_TABLE,
    QUOTA_CHANGE_TABLE,
    RUN_TOKENS,
    RUNS,
)
from otel_limits.ledger.selection import WOULD_BE, Joins, Selection
from otel_limits.ledger.spending import SUMS, columns_for, grouped, keyed
from otel_limits.ledger.totals import COST

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address

PORTION: Final = 1_000
"""Rows that are fetched at once: few enough that they are still in the processor's cache when they
are looked at. One by one takes half as long again, and so do 20,000."""


def _of_runs(selection: Selection, *columns: Any) -> sa.Select[Any]:
    """Select columns of the invocations of a selection."""
    return Joins(INVOCATION_TABLE).select(selection, *columns)


# --- stops ----------------------------------------------------------------------------------------


def stops(connection: sa.Connection, selection: Selection) -> Iterator[Any]:
    """Invocations by agent, reason, action and would-be halt, with tokens and picodollars."""
    keys = (RUNS.agent, RUNS.reason, RUNS.action, WOULD_BE)
    has_ended = RUNS.ended_us.is_not(None)
    statement = _of_runs(
        selection,
        *keys,
        sa.func.count().label("invocations"),
        sa.func.sum(RUN_TOKENS).filter(has_ended).label("tokens"),
        sa.func.sum(COST).filter(has_ended).label("price_pico"),
        sa.func.sum(RUNS.unpriced_calls).filter(has_ended).label("unpriced_calls"),
    ).group_by(*keys)
    yield from connection.execute(statement)
    # A row says what its invocation used once that has ended; until then its calls do.
    unfinished = (
        _of_runs(
            selection,
            *keys,
            sa.literal_column("0").label("invocations"),
            sa.func.sum(CALL_TOKENS).label("tokens"),
            sa.func.sum(CALLS.price_pico).label("price_pico"),
            sa.func.count().filter(IS_UNPRICED).label("unpriced_calls"),
        )
        # An outer join begins with its left side: SQLite would begin with the calls, all of them.
        .outerjoin(MODEL_CALL_TABLE, CALLS.invocation_id == RUNS.id)
        .where(RUNS.ended_us.is_(None))
        .group_by(*keys)
    )
    yield from connection.execute(unfinished)


def odd_calls(connection: sa.Connection, selection: Selection) -> Iterator[Any]:
    """Model calls without a measured size, by what `stops` has their invocations by."""
    keys = (RUNS.agent, RUNS.reason, RUNS.action, WOULD_BE)
    # Both parts are answered by an index; the state of every call would be read from the table.
    of_unknown_size = sa.select(CALLS.id).where(IS_OF_UNKNOWN_SIZE)
    without_tokens = sa.select(CALLS.id).where(CALLS.input_tokens == 0, CALLS.output_tokens == 0)
    candidates = sa.union_all(of_unknown_size, without_tokens)
    call = MODEL_CALL_TABLE.alias()
    statement = (
        _of_runs(selection, *keys, call.c.state, sa.func.count().label("calls"))
        .join(call, call.c.invocation_id == RUNS.id)
        .where(call.c.id.in_(candidates), call.c.state.in_(("zero", *UNKNOWN_SIZE)))
        .group_by(*keys, call.c.state)
    )
    yield from connection.execute(statement)


def costliest_halted(connection: sa.Connection, selection: Selection, top: int) -> Iterator[Any]:
    """The halted invocations that had cost most, by price and then by tokens, then by id."""
    statement = (
        _of_runs(selection, INVOCATION_TABLE, COST.label("cost_pico"))
        .where(RUNS.action.in_(HALTED))
        # Unknown prices last: they are not known to be high.
        .order_by(sa.func.coalesce(COST, 0).desc(), RUN_TOKENS.desc(), RUNS.id)
        .limit(min(top, MAX_INTEGER))
    )
    yield from connection.execute(statement)


# --- show -----------------------------------------------------------------------------------------


def tree(connection: sa.Connection, identity: str) -> list[Any]:
    """Every invocation of the budget trees that a trace, or an invocation, belongs to.

    `identity` is the beginning of a trace id or of an invocation id, both hexadecimal.
    """
    # The first letter beyond the hexadecimal ones: a range uses the index, and `LIKE` does not in a
    # PostgreSQL database whose collation is that of a language.
    beyond = identity + "g"
    roots = sa.select(RUNS.root_id).where(
        sa.or_(RUNS.trace_id.between(identity, beyond), RUNS.id.between(identity, beyond))
    )
    statement = (
        sa.select(INVOCATION_TABLE)
        .where(RUNS.root_id.in_(roots))
        .order_by(RUNS.started_us, RUNS.id)
    )
    return list(connection.execute(statement))


def calls_of(connection: sa.Connection, ids: Sequence[str]) -> Iterator[Any]:
    """Sums of the model calls of some invocations, by invocation and model."""
    statement = (
        sa.select(CALLS.invocation_id, CALLS.model, *SUMS)
        .where(CALLS.invocation_id.in_(ids))
        .group_by(CALLS.invocation_id, CALLS.model)
    )
    yield from connection.execute(statement)


def side_calls_of(connection: sa.Connection, ids: Sequence[str]) -> Iterator[Any]:
    """How many side calls each of some invocations has; those that have none are left out."""
    statement = (
        sa.select(CALLS.invocation_id, sa.func.count().label("calls"))
        .where(CALLS.invocation_id.in_(ids), CALLS.side)
        .group_by(CALLS.invocation_id)
    )
    yield from connection.execute(statement)


def invocations_of(connection: sa.Connection, ids: Sequence[str]) -> Iterator[Any]:
    """Some invocations by their ids."""
    yield from connection.execute(sa.select(INVOCATION_TABLE).where(RUNS.id.in_(ids)))


# --- backtest and suggest -------------------------------------------------------------------------


def totals_by_agent(connection: sa.Connection, selection: Selection) -> Iterator[Any]:
    """Invocations of every agent, their tokens, and how many were halted."""
    count, tokens = sa.func.count(), sa.func.coalesce(sa.func.sum(RUN_TOKENS), 0)
    halted = count.filter(RUNS.action.in_(HALTED))
    columns = (
        RUNS.agent,
        count.label("invocations"),
        tokens.label("tokens"),
        halted.label("halted"),
    )
    # Added up in the database: no question has to read every invocation.
    yield from connection.execute(_of_runs(selection, *columns).group_by(RUNS.agent))


def invocations(
    connection: sa.Connection, selection: Selection, totals: Mapping[str, int] | None = None
) -> Iterator[Any]:
    """Every invocation of a selection, or those that used `totals`: its end and what it used."""
    statement = _of_runs(
        selection,
        RUNS.id,
        RUNS.agent,
        RUNS.trace_id,
        RUNS.limits,
        RUNS.started_us,
        RUNS.ended_us,
        RUNS.reason,
        RUNS.action,
        RUNS.turns,
        RUNS.model_calls,
        RUNS.input_tokens,
        RUNS.output_tokens,
        COST.label("price_pico"),
    )
    if totals is not None:
        statement = statement.where(used(totals))
    yield from _portions(connection, statement)


def used(totals: Mapping[str, int]) -> sa.ColumnElement[bool]:
    """Whether an invocation used at least one of `totals`, or has not ended."""
    # An invocation without an end has no totals yet, so that its calls are looked at.
    columns = {**RUNS, "tokens": RUN_TOKENS, "price_pico": COST}
    reached = [columns[name] >= least for name, least in totals.items()]
    return sa.or_(RUNS.ended_us.is_(None), *reached)


def using(selection: Selection, totals: Mapping[str, int]) -> sa.Select[Any]:
    """Select the ids of invocations that used at least one of `totals`, or have not ended."""
    return _of_runs(selection, RUNS.id).where(used(totals))


def count_using(connection: sa.Connection, selection: Selection, totals: Mapping[str, int]) -> int:
    """How many invocations used at least one of `totals`."""
    chosen = using(selection, totals).subquery()
    return int(connection.execute(sa.select(sa.func.count()).select_from(chosen)).scalar_one())


def calls_in_order(
    connection: sa.Connection, selection: Selection, totals: Mapping[str, int]
) -> Iterator[Sequence[Any]]:
    """The model calls of invocations that used `totals`, each in its place, by invocation.

    Imported ones have no number: their times tell the order.

    Yields:
        Invocation, turn, iteration, input tokens, output tokens and picodollars of a call. No
        more, since the columns are what takes the time.
    """
    # Two queries: an order by whichever of the two is there could not use the index on numbers.
    for belongs, place in (
        (CALLS.number.is_not(None), CALLS.number),
        (CALLS.number.is_(None), CALLS.at_us),
    ):
        statement = (
            sa.select(
                CALLS.invocation_id,
                CALLS.turn,
                CALLS.iteration,
                CALLS.input_tokens,
                CALLS.output_tokens,
                CALLS.price_pico,
            )
            .where(belongs, CALLS.invocation_id.in_(using(selection, totals)))
            .order_by(CALLS.invocation_id, place)
        )
        yield from _portions(connection, statement)


def _portions(connection: sa.Connection, statement: sa.Select[Any]) -> Iterator[Any]:
    found = connection.execute(statement, execution_options={"yield_per": PORTION})
    # The driver's own rows, one list at a time: a million of them at once would not fit.
    for portion in found.partitions():
        yield from portion


# --- anomalies ------------------------------------------------------------------------------------


def turns_by_day(
    connection: sa.Connection, by: Sequence[str], selection: Selection
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Properties and day of invocations that have ended, how many they are, and their turns."""
    # Days are cut by quarters of an hour, as a database knows no time zones of questions.
    names = columns_for((*by, "day"), selection.zone)
    sums = (sa.func.count(), sa.func.coalesce(sa.func.sum(RUNS.turns), 0))
    statement = grouped(INVOCATION_TABLE, names, selection, sums)
    # Without those that have not ended: the turns of one that is under way are not all of its
    # turns.
    yield from keyed(connection.execute(statement.where(RUNS.ended_us.is_not(None))), names)


# --- quotas ---------------------------------------------------------------------------------------


def charges_in(address: Address, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Return those of `operations` that a ledger has, with what quotas count of them.

    A ledger that cannot be read has none: it is asked again later.
    """
    statement = (
        sa.select(CALLS.quota_operation, CALLS.quota_charges)
        .where(CALLS.quota_operation.in_(operations))
        .order_by(CALLS.number)  # of old rows that share one the last has the sum
    )
    with (
        contextlib.suppress(LedgerError, DatabaseError, OSError),
        asking(address) as (connection, _),
    ):
        # Read before the ledger is closed, which a generator would have left to whoever reads it.
        return {each[0]: each[1] for each in connection.execute(statement)}.items()
    return ()


def quota_changes(connection: sa.Connection, selection: Selection) -> Sequence[Any]:
    """What people changed in quotas, the oldest first."""
    at = QUOTA_CHANGE_TABLE.c.at_us
    statement = sa.select(QUOTA_CHANGE_TABLE).order_by(at)
    if selection.since_us is not None:
        statement = statement.where(at >= selection.since_us)
    if selection.until_us is not None:
        statement = statement.where(at < selection.until_us)
    return connection.execute(statement).all()
