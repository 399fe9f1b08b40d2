"""Statements about tasks: an invocation, and those that answer its interrupts.

Limits count a task as a whole, and so do `suggest` and `backtest`. A task belongs to a selection if
one of its invocations does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from otel_limits.core.events import CUT_SHORT
from otel_limits.ledger.queries import PORTION
from otel_limits.ledger.schema import (
    BIG,
    CALLS,
    INVOCATION_TABLE,
    MODEL_CALL_TABLE,
    RUN_TOKENS,
    RUNS,
)
from otel_limits.ledger.selection import Joins, Selection
from otel_limits.ledger.totals import COST

OTHERS: Final = INVOCATION_TABLE.alias()
RESUMED: Final = sa.select(OTHERS.c.task_id).where(OTHERS.c.task_id != OTHERS.c.id)
"""Tasks of several invocations. An index has only these; nearly all tasks have a single one."""

IS_SINGLE: Final = RUNS.task_id.not_in(RESUMED)

ENDS: Final = (
    *("id", "task_id", "agent", "trace_id", "limits", "ended_us"),
    *("reason", "action", "breach_limit"),
)
"""Columns of a task's last invocation that are those of the task."""
SUMS: Final = ("turns", "model_calls", "input_tokens", "output_tokens")


def totals_by_agent(connection: sa.Connection, selection: Selection) -> Iterator[Any]:
    """Count tasks, and those cut short, and add up tokens, by agent; one may have two rows."""
    tokens = sa.func.coalesce(sa.func.sum(RUN_TOKENS), 0).label("tokens")
    cut_short = sa.func.count().filter(RUNS.action.in_(CUT_SHORT)).label("cut_short")
    single = _of_runs(selection, RUNS.agent, sa.func.count().label("tasks"), tokens, cut_short)
    several = sa.func.count(RUNS.task_id.distinct()).label("tasks")
    resumed = sa.select(RUNS.agent, several, tokens, cut_short).where(_is_resumed(selection))
    # Added up in the database, so no query reads every invocation.
    yield from connection.execute(single.where(IS_SINGLE).group_by(RUNS.agent))
    yield from connection.execute(resumed.group_by(RUNS.agent))


def tasks(
    connection: sa.Connection, selection: Selection, totals: Mapping[str, int] | None = None
) -> Iterator[Any]:
    """Iterate over the tasks of a selection, or only those that used `totals`."""
    columns = (*(RUNS[name] for name in (*ENDS, "started_us", *SUMS)), COST.label("price_pico"))
    single = _of_runs(selection, *columns).where(IS_SINGLE)
    whole = _resumed(selection)
    resumed = sa.select(whole)
    if totals is not None:
        single = single.where(used(RUNS, COST, totals))
        resumed = resumed.where(used(whole.c, whole.c.price_pico, totals))
    yield from _portions(connection, single)
    yield from _portions(connection, resumed)


def invocations_of(connection: sa.Connection, ids: Iterable[str]) -> list[Any]:
    """List the invocations of some tasks, in order, unless a task has only its first one."""
    several = RESUMED.where(OTHERS.c.task_id.in_(ids)).distinct()
    resumed = connection.execute(several).scalars().all()
    # An index has those that continue a task; the first one has the ID of its task.
    continues = (RUNS.task_id != RUNS.id) & RUNS.task_id.in_(resumed)
    statement = (
        sa.select(INVOCATION_TABLE)
        .where(continues | RUNS.id.in_(resumed))
        .order_by(RUNS.task_id, RUNS.started_us, RUNS.id)
    )
    return list(connection.execute(statement)) if resumed else []


def used(columns: Any, price: Any, totals: Mapping[str, int]) -> sa.ColumnElement[bool]:
    """Whether a task used at least one of `totals`, or has not ended."""
    # An unfinished invocation has no totals yet, so its calls are needed.
    tokens = columns.input_tokens + columns.output_tokens
    of_name = {**columns, "tokens": tokens, "price_pico": price}
    reached = [of_name[name] >= least for name, least in totals.items()]
    return sa.or_(columns.ended_us.is_(None), *reached)


def count_using(connection: sa.Connection, selection: Selection, totals: Mapping[str, int]) -> int:
    """Count tasks that used at least one of `totals`."""
    chosen = (_single_using(selection, totals), _resumed_using(selection, totals))
    counts = [sa.select(sa.func.count()).select_from(each.subquery()) for each in chosen]
    return sum(int(connection.execute(each).scalar_one()) for each in counts)


def calls_in_order(
    connection: sa.Connection, selection: Selection, totals: Mapping[str, int]
) -> Iterator[Sequence[Any]]:
    """Iterate over the model calls of tasks that used `totals`, in order, by task.

    Imported calls have no number and are ordered by time.

    Yields:
        Task, turn, iteration, input tokens, output tokens and picodollars of a call. No other
        columns, since reading them takes most of the time.
    """
    tokens = (CALLS.input_tokens, CALLS.output_tokens)
    values = (CALLS.turn, CALLS.iteration, *tokens, CALLS.price_pico)
    # Two queries: ordering by a coalesced column could not use the index on numbers.
    for belongs, place in (
        (CALLS.number.is_not(None), CALLS.number),
        (CALLS.number.is_(None), CALLS.at_us),
    ):
        statement = (
            sa.select(CALLS.invocation_id, *values)
            .where(belongs, CALLS.invocation_id.in_(_single_using(selection, totals)))
            .order_by(CALLS.invocation_id, place)
        )
        yield from _portions(connection, statement)
    resumed = (
        sa.select(RUNS.task_id, *values, RUNS.id, RUNS.turns)
        .join(MODEL_CALL_TABLE, CALLS.invocation_id == RUNS.id)
        .where(RUNS.task_id.in_(_resumed_using(selection, totals)))
        .order_by(RUNS.task_id, RUNS.started_us, RUNS.id, CALLS.number, CALLS.at_us)
    )
    yield from _with_turns_of_tasks(_portions(connection, resumed))


def _with_turns_of_tasks(calls: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Number the turns of each task: those of an invocation follow those before its interrupt."""
    task = invocation = None
    before = made = 0
    for of_task, turn, *values, of_invocation, turns in calls:
        if of_task != task:
            task, before, made = of_task, 0, 0
        elif of_invocation != invocation:
            before += made
        invocation, made = of_invocation, turns or 0
        yield of_task, turn and turn + before, *values


def _of_runs(selection: Selection, *columns: Any) -> sa.Select[Any]:
    return Joins(INVOCATION_TABLE).select(selection, *columns)


def _is_resumed(selection: Selection) -> sa.ColumnElement[bool]:
    """Whether an invocation is of a task of several that a selection has."""
    chosen = _of_runs(selection, RUNS.task_id).where(RUNS.task_id.in_(RESUMED))
    return RUNS.task_id.in_(sa.select(chosen.subquery().c.task_id))


def _resumed(selection: Selection) -> sa.Subquery:
    """Add up the invocations of each task of several; how it ended is in its last one."""
    # PostgreSQL's sums would be decimal numbers.
    counts = [sa.cast(sa.func.sum(RUNS[name]), BIG).label(name) for name in SUMS]
    started, price = sa.func.min(RUNS.started_us), sa.func.sum(COST)
    added_up = (
        sa.select(RUNS.task_id, started.label("started_us"), *counts, price.label("price_pico"))
        .where(_is_resumed(selection))
        .group_by(RUNS.task_id)
        .subquery()
        .c
    )
    later = OTHERS.c.started_us > RUNS.started_us
    as_late = (OTHERS.c.started_us == RUNS.started_us) & (OTHERS.c.id > RUNS.id)
    follows = RESUMED.where(OTHERS.c.task_id == RUNS.task_id, later | as_late).exists()
    sums = (added_up[name] for name in ("started_us", *SUMS, "price_pico"))
    return (
        sa.select(*(RUNS[name] for name in ENDS), *sums)
        .where(RUNS.task_id == added_up.task_id, ~follows)
        .subquery()
    )


def _single_using(selection: Selection, totals: Mapping[str, int]) -> sa.Select[Any]:
    return _of_runs(selection, RUNS.id).where(IS_SINGLE, used(RUNS, COST, totals))


def _resumed_using(selection: Selection, totals: Mapping[str, int]) -> sa.Select[Any]:
    whole = _resumed(selection)
    return sa.select(whole.c.task_id).where(used(whole.c, whole.c.price_pico, totals))


def _portions(connection: sa.Connection, statement: sa.Select[Any]) -> Iterator[Any]:
    found = connection.execute(statement, execution_options={"yield_per": PORTION})
    # The driver's own rows, in portions: a million would not fit in memory.
    for portion in found.partitions():
        yield from portion
