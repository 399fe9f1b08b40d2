"""What a ledger is asked: statements whose rows the questions of an audit are answered from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.ledger.rows import HALTED, UNKNOWN_SIZE
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    DAY_MICROSECONDS,
    INVOCATION_TABLE,
    IS_OF_UNKNOWN_SIZE,
    MODEL_CALL_TABLE,
    QUOTA_CHANGE_TABLE,
    TOOL_CALL_TABLE,
)
from otel_limits.ledger.words import OWN_NAMES

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.sql.elements import ColumnElement
    from sqlalchemy.sql.selectable import FromClause

CALLS: Final = MODEL_CALL_TABLE.c
RUNS: Final = INVOCATION_TABLE.c
TOOLS: Final = TOOL_CALL_TABLE.c
ATTRIBUTES: Final = ATTRIBUTE_TABLE.c

PORTION: Final = 20_000
"""Rows that are fetched at once."""
HOUR_MICROSECONDS: Final = DAY_MICROSECONDS // 24
DAYS: Final = ("day", "week", "month")
"""Ways to group that follow from the day of a call."""

FROM_INDEX: Final = frozenset({"agent", "model", *DAYS})
"""Ways to group that the indexes on spending answer without touching the table."""
BY_INDEX: Final = ["day", "agent", "model"]
"""What those indexes begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of a ledger a question is about."""

    since_us: int | None = None
    until_us: int | None = None
    where: tuple[tuple[str, str], ...] = ()
    """Names and values; one name can stand there several times, for any of its values. In a value,
    `*` stands for any characters."""


class Source:
    """The tables that a statement needs, joined one by one as columns are asked for."""

    def __init__(self, base: sa.Table) -> None:
        """Begin with the table that is counted: model calls, tool calls, or invocations."""
        self.tables: FromClause = base
        self._base = base
        self._owner = base.c.id if base is INVOCATION_TABLE else base.c.invocation_id
        self._time = base.c.started_us if base is INVOCATION_TABLE else base.c.at_us
        self._has_invocations = base is INVOCATION_TABLE
        self._attributes: dict[str, ColumnElement[Any]] = {}

    def column(self, name: str) -> ColumnElement[Any]:
        """The column that an auditor calls `name`: one of ours, or an audit key."""
        if name not in OWN_NAMES:
            return self._attribute(name)
        if name == "hour":
            return self._time // HOUR_MICROSECONDS
        if name in DAYS:
            return CALLS.day if self._base is MODEL_CALL_TABLE else self._time // DAY_MICROSECONDS
        if name in NAMED_RUNS:
            self._join_invocations()
            return NAMED_RUNS[name]
        columns = NAMED[self._base.name]
        if name not in columns:
            raise LedgerError(f"{name} is no property of what this question counts.")
        return columns[name]

    def conditions(self, selection: Selection) -> list[ColumnElement[bool]]:
        """What restricts the rows to a selection."""
        wanted: dict[str, list[ColumnElement[bool]]] = {}
        for name, value in selection.where:
            wanted.setdefault(name, []).append(matches(self.column(name), value))
        conditions = [sa.or_(*alternatives) for alternatives in wanted.values()]
        on_calls = self._base is MODEL_CALL_TABLE
        if selection.since_us is not None:
            conditions.append(self._time >= selection.since_us)
            if on_calls:
                conditions.append(CALLS.day >= selection.since_us // DAY_MICROSECONDS)
        if selection.until_us is not None:
            conditions.append(self._time < selection.until_us)
            if on_calls:
                conditions.append(CALLS.day <= selection.until_us // DAY_MICROSECONDS)
        return conditions

    def _join_invocations(self) -> None:
        if not self._has_invocations:
            self._has_invocations = True
            self.tables = self.tables.outerjoin(INVOCATION_TABLE, RUNS.id == self._owner)

    def _attribute(self, key: str) -> ColumnElement[Any]:
        """An audited attribute: the invocation's own, or else that of the root of its tree."""
        if key not in self._attributes:
            values = []
            for identity in (self._owner, self._base.c.root_id):
                table = ATTRIBUTE_TABLE.alias()
                self.tables = self.tables.outerjoin(
                    table, (table.c.invocation_id == identity) & (table.c.key == key)
                )
                values.append(table.c.value)
            self._attributes[key] = sa.func.coalesce(*values)
        return self._attributes[key]


NAMED: Final[dict[str, dict[str, ColumnElement[Any]]]] = {
    MODEL_CALL_TABLE.name: {
        "agent": CALLS.agent,
        "model": CALLS.model,
        "provider": CALLS.provider,
        "state": CALLS.state,
        "trace": CALLS.trace_id,
        "invocation": CALLS.invocation_id,
        "root": CALLS.root_id,
    },
    TOOL_CALL_TABLE.name: {
        "agent": TOOLS.agent,
        "tool": TOOLS.tool,
        "trace": TOOLS.trace_id,
        "invocation": TOOLS.invocation_id,
        "root": TOOLS.root_id,
    },
    INVOCATION_TABLE.name: {
        "agent": RUNS.agent,
        "trace": RUNS.trace_id,
        "invocation": RUNS.id,
        "root": RUNS.root_id,
    },
}
NAMED_RUNS: Final[dict[str, ColumnElement[Any]]] = {
    "session": RUNS.session_id,
    "reason": RUNS.reason,
    "action": RUNS.action,
    "limit": RUNS.breach_limit,
}


def matches(column: ColumnElement[Any], value: str) -> ColumnElement[bool]:
    """Compare with a value in which `*` stands for any characters."""
    if "*" not in value:
        return column == value
    pattern = value.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return column.like(pattern.replace("*", "%"), escape="\\")


def audit_keys(connection: Connection) -> list[str]:
    """Every audit key that the ledger has a value of."""
    return list(connection.scalars(sa.select(ATTRIBUTES.key).distinct().order_by(ATTRIBUTES.key)))


# --- spend ----------------------------------------------------------------------------------------

SUMS_OF_ALL: Final = (
    sa.func.count(),
    sa.func.sum(CALLS.input_tokens),
    sa.func.sum(CALLS.output_tokens),
    sa.func.sum(CALLS.cache_read_tokens),
    sa.func.sum(CALLS.price_pico),
    # Filters, since SQLite takes a fifth longer to sum cases.
    sa.func.coalesce(
        sa.func.sum(CALLS.input_tokens + CALLS.output_tokens).filter(CALLS.price_pico.is_(None)), 0
    ),
)
SUMS: Final = (*SUMS_OF_ALL, sa.func.count().filter(CALLS.state.in_(UNKNOWN_SIZE)))

NOTHING: Final[ColumnElement[int]] = sa.literal_column("0")
SUMS_OF_NONE: Final = (NOTHING, NOTHING, NOTHING, NOTHING, sa.null(), NOTHING)


FIRST_AND_LAST_DAY: Final = sa.select(
    # Each in a statement of its own: only then does SQLite look at one end of an index.
    sa.select(sa.func.min(CALLS.day)).scalar_subquery(),
    sa.select(sa.func.max(CALLS.day)).scalar_subquery(),
)


def spend(
    connection: Connection, by: Sequence[str], selection: Selection
) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Sums of model calls, finer than `by` where that is quicker.

    Yields:
        The properties of a group, `day` as days and `hour` as hours since the epoch; and its calls,
        input, output and cached tokens, picodollars, unpriced tokens and unmeasured calls. A group
        can come in several parts.
    """
    named = {*by, *(name for name, _ in selection.where)}
    rows: Iterable[Sequence[Any]]
    if named <= FROM_INDEX:
        names = BY_INDEX
        rows = _from_indexes(connection, selection)
    else:
        names = columns_for(by)
        rows = connection.execute(_grouped(names, selection, SUMS))
    for row in rows:
        keys = dict(zip(names, row[: len(names)], strict=True))
        yield keys, tuple(row[len(names) :])


def _from_indexes(connection: Connection, selection: Selection) -> Iterator[Sequence[Any]]:
    """Ask for the earlier and the later days at once: SQLite uses one core for a question."""
    earlier, later = _halves(connection, selection)
    if later is None:
        yield from connection.execute(from_indexes(earlier))
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        rest = thread.submit(_apart, connection.engine, from_indexes(later))
        yield from connection.execute(from_indexes(earlier))
        yield from rest.result()


def _apart(engine: Engine, statement: sa.Executable) -> Sequence[Sequence[Any]]:
    """Ask on a connection of its own."""
    with engine.connect() as connection:
        return connection.execute(statement).all()


def _halves(connection: Connection, selection: Selection) -> tuple[Selection, Selection | None]:
    """Split a selection in the middle of its days; what cannot be split has no second half."""
    if connection.dialect.name != "sqlite":
        return selection, None
    first, last = connection.execute(FIRST_AND_LAST_DAY).one()
    if first is None:
        return selection, None
    begin, end = first * DAY_MICROSECONDS, (last + 1) * DAY_MICROSECONDS
    begin, end = max(begin, selection.since_us or begin), min(end, selection.until_us or end)
    middle = (begin + end) // 2 // DAY_MICROSECONDS * DAY_MICROSECONDS
    if not begin < middle < end:
        return selection, None
    return replace(selection, until_us=middle), replace(selection, since_us=middle)


def from_indexes(selection: Selection) -> sa.CompoundSelect[Any]:
    """Sum all calls, and count those without a measured size, each from an index of its own.

    One statement, so that both see the same calls.
    """
    calls = _grouped(BY_INDEX, selection, (*SUMS_OF_ALL, NOTHING))
    unknown = _grouped(BY_INDEX, selection, (*SUMS_OF_NONE, sa.func.count()))
    return sa.union_all(calls, unknown.where(IS_OF_UNKNOWN_SIZE))


def _grouped(names: Sequence[str], selection: Selection, sums: Sequence[Any]) -> sa.Select[Any]:
    source = Source(MODEL_CALL_TABLE)
    columns = [source.column(name) for name in names]
    conditions = source.conditions(selection)
    labelled = (column.label(f"k{n}") for n, column in enumerate((*columns, *sums)))
    return sa.select(*labelled).select_from(source.tables).where(*conditions).group_by(*columns)


def columns_for(by: Sequence[str]) -> list[str]:
    """The columns to group by for `by`: weeks and months are made of days."""
    return list(dict.fromkeys("day" if name in DAYS else name for name in by))


# --- stops ----------------------------------------------------------------------------------------

TOKENS: Final = RUNS.input_tokens + RUNS.output_tokens


def stops(connection: Connection, selection: Selection) -> Iterator[Any]:
    """Invocations by agent, reason and action, with their tokens and picodollars."""
    source = Source(INVOCATION_TABLE)
    conditions = source.conditions(selection)
    keys = (RUNS.agent, RUNS.reason, RUNS.action)
    statement = (
        sa.select(
            *keys,
            sa.func.count().label("invocations"),
            sa.func.sum(TOKENS).label("tokens"),
            sa.func.sum(RUNS.price_pico).label("price_pico"),
            sa.func.sum(RUNS.unpriced_calls).label("unpriced_calls"),
        )
        .select_from(source.tables)
        .where(*conditions)
        .group_by(*keys)
    )
    yield from connection.execute(statement)


def odd_calls(connection: Connection, selection: Selection) -> Iterator[Any]:
    """Model calls without a measured size, by agent, reason and action of their invocation."""
    source = Source(INVOCATION_TABLE)
    conditions = source.conditions(selection)
    keys = (RUNS.agent, RUNS.reason, RUNS.action)
    statement = (
        sa.select(*keys, CALLS.state, sa.func.count().label("calls"))
        .select_from(source.tables.join(MODEL_CALL_TABLE, CALLS.invocation_id == RUNS.id))
        .where(CALLS.state.in_(("zero", *UNKNOWN_SIZE)), *conditions)
        .group_by(*keys, CALLS.state)
    )
    yield from connection.execute(statement)


def costliest_halted(connection: Connection, selection: Selection, top: int) -> Iterator[Any]:
    """The halted invocations that had cost most, by price and then by tokens."""
    source = Source(INVOCATION_TABLE)
    conditions = source.conditions(selection)
    statement = (
        sa.select(INVOCATION_TABLE)
        .select_from(source.tables)
        .where(RUNS.action.in_(HALTED), *conditions)
        .order_by(sa.func.coalesce(RUNS.price_pico, 0).desc(), TOKENS.desc())
        .limit(top)
    )
    yield from connection.execute(statement)


# --- show -----------------------------------------------------------------------------------------


def tree(connection: Connection, identity: str) -> list[Any]:
    """Every invocation of the budget trees that a trace, or an invocation, belongs to.

    `identity` is the beginning of a trace id or of an invocation id, both hexadecimal.
    """
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


def calls_of(connection: Connection, ids: Sequence[str]) -> Iterator[Any]:
    """Sums of the model calls of some invocations, by invocation and model."""
    statement = (
        sa.select(CALLS.invocation_id, CALLS.model, *SUMS)
        .where(CALLS.invocation_id.in_(ids))
        .group_by(CALLS.invocation_id, CALLS.model)
    )
    yield from connection.execute(statement)


def tools_of(connection: Connection, ids: Sequence[str]) -> Iterator[Any]:
    """Tool calls of some invocations, by invocation, tool and status."""
    keys = (TOOLS.invocation_id, TOOLS.tool, TOOLS.status)
    statement = (
        sa.select(*keys, sa.func.count().label("calls"))
        .where(TOOLS.invocation_id.in_(ids))
        .group_by(*keys)
        .order_by(*keys)
    )
    yield from connection.execute(statement)


# --- quotas ---------------------------------------------------------------------------------------


def charges_of(connection: Connection, operations: Sequence[str]) -> dict[str, str]:
    """What quotas count of model calls, by the operations under which they do."""
    statement = (
        sa.select(CALLS.quota_operation, CALLS.quota_charges)
        .where(CALLS.quota_operation.in_(operations))
        .order_by(CALLS.number)  # of old rows that share one the last has the sum
    )
    return {row.quota_operation: row.quota_charges for row in connection.execute(statement)}


# --- backtest and suggest -------------------------------------------------------------------------


def totals_by_agent(connection: Connection, selection: Selection) -> Iterator[Any]:
    """Invocations and tokens of every agent."""
    source = Source(INVOCATION_TABLE)
    conditions = source.conditions(selection)
    statement = (
        sa.select(
            RUNS.agent,
            sa.func.count().label("invocations"),
            sa.func.coalesce(sa.func.sum(TOKENS), 0).label("tokens"),
        )
        .select_from(source.tables)
        .where(*conditions)
        .group_by(RUNS.agent)
    )
    yield from connection.execute(statement)


def invocations(
    connection: Connection, selection: Selection, totals: Mapping[str, int] | None = None
) -> Iterator[Any]:
    """Every invocation of a selection, or those that used `totals`: its end and what it used."""
    source = Source(INVOCATION_TABLE)
    conditions = source.conditions(selection)
    if totals is not None:
        conditions.append(used(totals))
    statement = (
        sa.select(
            RUNS.id,
            RUNS.agent,
            RUNS.trace_id,
            RUNS.limits,
            RUNS.started_us,
            RUNS.ended_us,
            RUNS.reason,
            RUNS.action,
            RUNS.turns,
            RUNS.input_tokens,
            RUNS.output_tokens,
            RUNS.price_pico,
        )
        .select_from(source.tables)
        .where(*conditions)
    )
    yield from _portions(connection, statement)


def used(totals: Mapping[str, int]) -> ColumnElement[bool]:
    """Whether an invocation used at least one of `totals`, or has not ended."""
    reached = [
        (TOKENS if name == "tokens" else RUNS[name]) >= least for name, least in totals.items()
    ]
    return sa.or_(RUNS.ended_us.is_(None), *reached)


def using(selection: Selection, totals: Mapping[str, int]) -> sa.Select[Any]:
    """Select the ids of invocations that used at least one of `totals`, or have not ended."""
    source = Source(INVOCATION_TABLE)
    conditions = source.conditions(selection)
    return sa.select(RUNS.id).select_from(source.tables).where(used(totals), *conditions)


def count_using(connection: Connection, selection: Selection, totals: Mapping[str, int]) -> int:
    """How many invocations used at least one of `totals`."""
    chosen = using(selection, totals).subquery()
    return int(connection.execute(sa.select(sa.func.count()).select_from(chosen)).scalar_one())


def calls_in_order(
    connection: Connection, selection: Selection, totals: Mapping[str, int]
) -> Iterator[Sequence[Any]]:
    """The model calls of invocations that used `totals`, each in its place, by invocation.

    Imported ones have no number: their times tell the order.

    Yields:
        Invocation, turn, iteration, input tokens, output tokens and picodollars of a call. No
        more, since the columns are what takes the time.
    """
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


def _portions(connection: Connection, statement: sa.Select[Any]) -> Iterator[Any]:
    """Fetch many rows at once: one at a time takes half as long again."""
    found = connection.execute(statement, execution_options={"yield_per": PORTION})
    for portion in found.partitions():
        yield from portion


def caps_of(row: Any) -> dict[str, Any]:
    """The caps that were in force for an invocation."""
    caps: dict[str, Any] = json.loads(row.limits) if row.limits else {}
    return caps


def quota_changes(connection: Connection, selection: Selection) -> Sequence[Any]:
    """What people changed in quotas, the oldest first."""
    at = QUOTA_CHANGE_TABLE.c.at_us
    statement = sa.select(QUOTA_CHANGE_TABLE).order_by(at)
    if selection.since_us is not None:
        statement = statement.where(at >= selection.since_us)
    if selection.until_us is not None:
        statement = statement.where(at < selection.until_us)
    return connection.execute(statement).all()
