"""Statements of audit questions, except for subjects with their own file, such as `spending`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.core.events import HALTED
from otel_limits.core.terms import UNPLACED
from otel_limits.ledger.rows import (
    IN_FORCE,
    LOST,
    MAX_INTEGER,
    NOT_KNOWN,
    PAUSED,
    UNKNOWN_SIZE,
)
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    CALL_TOKENS,
    CALLS,
    INVOCATION_TABLE,
    IS_OF_UNKNOWN_SIZE,
    IS_UNPRICED,
    MODEL_CALL_TABLE,
    POLICY_TABLE,
    QUOTA_CHANGE_TABLE,
    RUN_TOKENS,
    RUNS,
    TOOL_CALL_TABLE,
    TOOLS,
    UNCOUNTED_TABLE,
)
from otel_limits.ledger.selection import WOULD_BE, Joins, Selection
from otel_limits.ledger.spending import SUMS, columns_for, grouped, keyed
from otel_limits.ledger.totals import COST

EVERYTHING: Final = Selection()
TOOL: Final = "tool"

PORTION: Final = 1_000
"""Rows fetched together: few enough to stay in the processor's cache until they are read. Fetching
one by one takes 1.5 times as long, and so do 20,000."""


def _of_runs(selection: Selection, *columns: Any) -> sa.Select[Any]:
    """Select columns of the invocations of a selection."""
    return Joins(INVOCATION_TABLE).select(selection, *columns)


# --- ends of invocations --------------------------------------------------------------------------

NOT_HALTED: Final = ("none", "observed")


def stops(connection: sa.Connection, selection: Selection) -> Iterator[Any]:
    """Add up invocations, tokens and picodollars by agent, reason, action and would-be halt."""
    keys = (RUNS.agent, RUNS.reason, RUNS.action, WOULD_BE)
    has_ended = RUNS.ended_us.is_not(None)
    statement = _of_runs(
        selection,
        *keys,
        sa.func.count().label("invocations"),
        sa.func.count().filter(RUNS.synthetic).label("synthetic"),
        sa.func.sum(RUN_TOKENS).filter(has_ended).label("tokens"),
        sa.func.sum(COST).filter(has_ended).label("price_pico"),
        sa.func.sum(RUNS.unpriced_calls).filter(has_ended).label("unpriced_calls"),
    ).group_by(*keys)
    yield from connection.execute(statement)
    # The row of an unfinished invocation has no totals, so its calls are added up.
    unfinished = (
        _of_runs(
            selection,
            *keys,
            sa.literal_column("0").label("invocations"),
            sa.literal_column("0").label("synthetic"),
            sa.func.sum(CALL_TOKENS).label("tokens"),
            sa.func.sum(CALLS.price_pico).label("price_pico"),
            sa.func.count().filter(IS_UNPRICED).label("unpriced_calls"),
        )
        # An outer join starts with its left side: SQLite would start with all calls.
        .outerjoin(MODEL_CALL_TABLE, CALLS.invocation_id == RUNS.id)
        .where(RUNS.ended_us.is_(None))
        .group_by(*keys)
    )
    yield from connection.execute(unfinished)


def outcomes(
    connection: sa.Connection, by: Sequence[str], selection: Selection, successes: Collection[str]
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Add up ended invocations by outcome: outcome, number, picodollars, unpriced calls.

    Args:
        connection: The ledger.
        by: Properties of invocations.
        selection: Which invocations.
        successes: Reasons that are natural ends.
    """
    names = columns_for(by, selection.zone)
    succeeded = RUNS.reason.in_(sorted(successes)) & RUNS.action.in_(NOT_HALTED)
    outcome = sa.case(
        (succeeded, "successful"),
        (RUNS.action.in_(HALTED), "halted"),
        (RUNS.action == "killed", "killed"),
        (RUNS.action == LOST, "lost"),
        (RUNS.reason.in_(PAUSED) & RUNS.action.in_(NOT_HALTED), "interrupted"),
        (RUNS.reason == NOT_KNOWN, "unknown"),
        else_="failed",
    )
    sums = [
        outcome,
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(COST), 0),
        sa.func.coalesce(sa.func.sum(RUNS.unpriced_calls), 0),
    ]
    statement = grouped(INVOCATION_TABLE, names, selection, sums)
    statement = statement.where(RUNS.ended_us.is_not(None))
    statement = statement.group_by(f"k{len(names)}")  # the label of the outcome
    yield from keyed(connection.execute(statement), names)


def costliest_halted(connection: sa.Connection, selection: Selection, top: int) -> Iterator[Any]:
    """Iterate over the costliest halted invocations: by price, then tokens, then ID."""
    statement = (
        _of_runs(selection, INVOCATION_TABLE, COST.label("cost_pico"))
        .where(RUNS.action.in_(HALTED))
        # Unknown prices last: they are not known to be high.
        .order_by(sa.func.coalesce(COST, 0).desc(), RUN_TOKENS.desc(), RUNS.id)
        .limit(min(top, MAX_INTEGER))
    )
    yield from connection.execute(statement)


def repeated_failures(connection: sa.Connection, selection: Selection) -> Iterator[Any]:
    """Add up invocations that failed like the one before, with the same input: the most first.

    With a selected tool there are none, as an invocation uses several.
    """
    if any(each.name == TOOL for each in selection.where):
        return
    keys = (RUNS.agent, RUNS.reason)
    statement = (
        _of_runs(
            selection,
            *keys,
            sa.func.count().label("repeats"),
            sa.func.max(RUNS.repeated_failures).label("most"),
            sa.func.sum(RUN_TOKENS).label("tokens"),
            sa.func.sum(COST).label("price_pico"),
            sa.func.sum(RUNS.unpriced_calls).label("unpriced_calls"),
        )
        .where(RUNS.repeated_failures > 1)
        .group_by(*keys)
        .order_by(sa.func.count().desc(), *keys)
    )
    yield from connection.execute(statement)


def turns_by_day(
    connection: sa.Connection, by: Sequence[str], selection: Selection
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Count finished invocations and their turns, by properties and day."""
    # Days are made of quarter hours, as the database does not know the time zones of queries.
    names = columns_for((*by, "day"), selection.zone)
    sums = (sa.func.count(), sa.func.coalesce(sa.func.sum(RUNS.turns), 0))
    statement = grouped(INVOCATION_TABLE, names, selection, sums)
    # Finished ones only: an invocation in progress has not made all of its turns.
    yield from keyed(connection.execute(statement.where(RUNS.ended_us.is_not(None))), names)


def first_and_last(connection: sa.Connection) -> tuple[int | None, int | None]:
    """Return when the first and the last invocation started; `None` in an empty ledger."""
    times = (sa.func.min(RUNS.started_us), sa.func.max(RUNS.started_us))
    # One by one, because SQLite uses the index for a single one only.
    first, last = (connection.execute(sa.select(time)).scalar() for time in times)
    return first, last


# --- model calls ----------------------------------------------------------------------------------


def odd_calls(connection: sa.Connection, selection: Selection) -> Iterator[Any]:
    """Count model calls without a measured size, by the same keys as `stops`.

    All calls of the selected invocations, because the tokens of `stops` are theirs, too.
    """
    keys = (RUNS.agent, RUNS.reason, RUNS.action, WOULD_BE)
    # Indexes answer both parts; the state of every call would be read from the table.
    of_unknown_size = sa.select(CALLS.id).where(IS_OF_UNKNOWN_SIZE)
    without_tokens = sa.select(CALLS.id).where(CALLS.input_tokens == 0, CALLS.output_tokens == 0)
    candidates = sa.union_all(of_unknown_size, without_tokens)
    call = MODEL_CALL_TABLE.alias()
    statement = (
        _of_runs(
            selection,
            *keys,
            call.c.state,
            call.c.estimated,
            sa.func.count().label("calls"),
        )
        .join(call, call.c.invocation_id == RUNS.id)
        .where(call.c.id.in_(candidates), call.c.state.in_(("zero", *UNKNOWN_SIZE)))
        .group_by(*keys, call.c.state, call.c.estimated)
    )
    yield from connection.execute(statement)


def unmeasured_calls(connection: sa.Connection, selection: Selection) -> Iterator[Any]:
    """Count calls without a measured size, or with tokens of unknown rates."""
    keys = (CALLS.agent, CALLS.model, CALLS.state, CALLS.estimated, CALLS.price_basis)
    is_unplaced = CALLS.price_basis.like(f'%"{UNPLACED}"%')
    sums = (sa.func.count().label("calls"), sa.func.sum(CALL_TOKENS).label("tokens"))
    statement = (
        Joins(MODEL_CALL_TABLE)
        .select(selection, *keys, *sums)
        .where(CALLS.state.in_(UNKNOWN_SIZE) | is_unplaced)
        .group_by(*keys)
    )
    yield from connection.execute(statement)


def stated_costs(connection: sa.Connection, selection: Selection) -> Sequence[Any]:
    """Add up stated and computed costs of models for which any call has two that differ."""
    off = sa.func.abs(CALLS.stated_pico - CALLS.listed_pico)
    different = sa.func.count().filter(off > CALLS.listed_pico / sa.literal_column("100"))
    stated = sa.func.sum(CALLS.stated_pico)
    statement = (
        Joins(MODEL_CALL_TABLE)
        .select(
            selection,
            CALLS.model,
            sa.func.count().label("calls"),
            different.label("different"),
            stated.label("stated"),
            sa.func.sum(CALLS.listed_pico).label("listed"),
        )
        .where(CALLS.stated_pico.is_not(None), CALLS.listed_pico.is_not(None))
        .group_by(CALLS.model)
        .having(different > 0)
        .order_by(stated.desc(), CALLS.model)
    )
    return connection.execute(statement).all()


# --- tokens that are not counted ------------------------------------------------------------------


def uncounted(connection: sa.Connection, selection: Selection, most: int) -> Sequence[Any]:
    """Add up the spans and tokens that are not counted by agent, name and cause: the most first."""
    own = UNCOUNTED_TABLE.c
    keys = (own.agent, own.span, own.cause)
    tokens = sa.func.sum(own.tokens)
    statement = (
        Joins(UNCOUNTED_TABLE)
        .select(selection, *keys, sa.func.count(), tokens)
        .group_by(*keys)
        .order_by(tokens.desc(), *keys)
        .limit(most)
    )
    return connection.execute(statement).all()


def uncounted_sums(connection: sa.Connection, selection: Selection) -> tuple[int, int]:
    """Count the spans that are not counted, and their tokens."""
    sums = (sa.func.count(), sa.func.coalesce(sa.func.sum(UNCOUNTED_TABLE.c.tokens), 0))
    spans, tokens = connection.execute(Joins(UNCOUNTED_TABLE).select(selection, *sums)).one()
    return spans, int(tokens)


def uncounted_by_cause(connection: sa.Connection, most: int) -> Sequence[Any]:
    """List why spans of a ledger are not counted, the cause with the most tokens first."""
    cause = UNCOUNTED_TABLE.c.cause
    order = (sa.func.sum(UNCOUNTED_TABLE.c.tokens).desc(), cause)
    statement = sa.select(cause).group_by(cause).order_by(*order).limit(most)
    return connection.execute(statement).all()


# --- tool calls -----------------------------------------------------------------------------------


def tool_uses(
    connection: sa.Connection, by: Sequence[str], selection: Selection
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]] | None:
    """Add up tool calls: their number, failures, refusals, and microseconds.

    Returns `None` if `by` or the selection has a property that tool calls lack, such as a model.
    """
    names = columns_for(by, selection.zone)
    sums = (
        sa.func.count(),
        sa.func.count().filter(TOOLS.status == "error"),
        sa.func.count().filter(TOOLS.status == "refused"),
        sa.func.coalesce(sa.func.sum(TOOLS.duration_us), 0),
    )
    try:
        statement = grouped(TOOL_CALL_TABLE, names, selection, sums)
    except LedgerError:
        return None
    return keyed(connection.execute(statement), names)


def refused_tools(connection: sa.Connection, selection: Selection) -> Iterator[Any]:
    """Count the tool calls that a limit refused, or would have refused, the most first.

    All of the selected invocations, because `stops` shows whether one of them was halted.
    """
    keys = (TOOLS.agent, TOOLS.tool, TOOLS.breach_limit)
    is_refused = TOOLS.status == "refused"
    refused = sa.func.count().filter(is_refused).label("refused")
    would_be = sa.func.count().filter(~is_refused).label("would_be")
    statement = (
        _of_runs(selection, *keys, refused, would_be)
        .join(TOOL_CALL_TABLE, TOOLS.invocation_id == RUNS.id)
        .where(TOOLS.breach_limit.is_not(None))  # an index has only these calls
        .group_by(*keys)
        .order_by(sa.func.count().desc(), *keys)
    )
    yield from connection.execute(statement)


def repeating(connection: sa.Connection, selection: Selection) -> Sequence[str]:
    """List invocations in which a tool call repeats an earlier one, in order."""
    joins = Joins(TOOL_CALL_TABLE)
    hashed, different = (
        sa.func.count(TOOLS.fingerprint),
        sa.func.count(TOOLS.fingerprint.distinct()),
    )
    statement = joins.select(selection, TOOLS.invocation_id).group_by(TOOLS.invocation_id)
    return list(connection.scalars(statement.having(hashed > different)))


# --- parts of one budget tree ---------------------------------------------------------------------


def tree(connection: sa.Connection, identity: str) -> list[Any]:
    """List the invocations of the budget trees that contain a trace or an invocation.

    `identity` is the start of a trace ID or invocation ID, both hexadecimal.
    """
    # The first letter after the hexadecimal ones: a range uses the index; `LIKE` does not in a
    # PostgreSQL database with the collation of a language.
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


def invocations_of(connection: sa.Connection, ids: Sequence[str]) -> Iterator[Any]:
    """Iterate over invocations with some IDs."""
    yield from connection.execute(sa.select(INVOCATION_TABLE).where(RUNS.id.in_(ids)))


def calls_of(connection: sa.Connection, ids: Sequence[str]) -> Iterator[Any]:
    """Add up the model calls of some invocations, by invocation and model."""
    statement = (
        sa.select(CALLS.invocation_id, CALLS.model, *SUMS)
        .where(CALLS.invocation_id.in_(ids))
        .group_by(CALLS.invocation_id, CALLS.model)
    )
    yield from connection.execute(statement)


def side_calls_of(connection: sa.Connection, ids: Sequence[str]) -> Iterator[Any]:
    """Count the side calls of some invocations; those without any are left out."""
    statement = (
        sa.select(CALLS.invocation_id, sa.func.count().label("calls"))
        .where(CALLS.invocation_id.in_(ids), CALLS.side)
        .group_by(CALLS.invocation_id)
    )
    yield from connection.execute(statement)


def turns_of(
    connection: sa.Connection, ids: Sequence[str], selection: Selection = EVERYTHING
) -> Iterator[Any]:
    """Iterate over the turns of some invocations, with their usage; side calls have no turn.

    The selection is that of their model calls, which belong to no tool.
    """
    is_of_loop = sa.not_(sa.func.coalesce(CALLS.side, sa.false()))
    keys = (CALLS.invocation_id, CALLS.turn)
    where = tuple(each for each in selection.where if each.name != TOOL)
    statement = (
        Joins(MODEL_CALL_TABLE)
        .select(
            replace(selection, where=where),
            *keys,
            sa.func.min(CALLS.at_us).label("at_us"),
            sa.func.max(CALLS.model).label("model"),
            sa.func.count().label("calls"),
            sa.func.sum(CALL_TOKENS).label("tokens"),
            sa.func.sum(CALLS.price_pico).label("price_pico"),
            sa.func.count().filter(IS_UNPRICED).label("unpriced"),
        )
        .where(CALLS.invocation_id.in_(ids), is_of_loop, CALLS.turn.is_not(None))
        .group_by(*keys)
        .order_by(*keys)
    )
    yield from connection.execute(statement)


def tool_calls_of(
    connection: sa.Connection, ids: Sequence[str], selection: Selection = EVERYTHING
) -> Iterator[Any]:
    """Iterate over the tool calls of some invocations, in the order of the requests.

    All of them, as the results of a turn share the cost of a request: `is_selected` says which of
    them are of the selection.
    """
    joins = Joins(TOOL_CALL_TABLE)
    is_selected = sa.and_(sa.true(), *joins.conditions(selection))
    statement = (
        sa.select(
            TOOLS.invocation_id, TOOLS.agent, TOOLS.turn, TOOLS.tool, TOOLS.status,
            TOOLS.fingerprint, TOOLS.duration_us, is_selected.label("is_selected"),
        )
        .select_from(joins.tables)
        .where(TOOLS.invocation_id.in_(ids))
        .order_by(TOOLS.invocation_id, TOOLS.number, TOOLS.at_us)
    )  # fmt: skip
    yield from connection.execute(statement)


# --- limits, policies and quotas over time --------------------------------------------------------


def limits_in_force(
    connection: sa.Connection, selection: Selection
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Count invocations by day, agent and their `IN_FORCE`."""
    names = columns_for(("day", "agent"), selection.zone)
    columns = [RUNS[name] for name in IN_FORCE]
    statement = grouped(INVOCATION_TABLE, names, selection, (*columns, sa.func.count()))
    yield from keyed(connection.execute(statement.group_by(*columns)), names)


def policy_versions(connection: sa.Connection, selection: Selection) -> Sequence[Any]:
    """List versions of policy files, the first that was read first."""
    return _listed(connection, POLICY_TABLE, selection)


def quota_changes(connection: sa.Connection, selection: Selection) -> Sequence[Any]:
    """List changes to quotas by operators, the oldest first."""
    return _listed(connection, QUOTA_CHANGE_TABLE, selection)


def _listed(connection: sa.Connection, table: sa.Table, selection: Selection) -> Sequence[Any]:
    at = table.c.at_us
    statement = sa.select(table).order_by(at, table.c.id)
    if selection.since_us is not None:
        statement = statement.where(at >= selection.since_us)
    if selection.until_us is not None:
        statement = statement.where(at < selection.until_us)
    return connection.execute(statement).all()


# --- where a name is recorded ---------------------------------------------------------------------

SEEN: Final = (sa.func.count(), sa.func.min(RUNS.started_us), sa.func.max(RUNS.started_us))


class Place(NamedTuple):
    """Where a name, or the hash of a conversation, is recorded."""

    kind: str
    of: str
    records: int
    first_us: int
    last_us: int


def charged_keys(connection: sa.Connection) -> Iterator[tuple[int, str]]:
    """Iterate over the times and quota charges of calls."""
    statement = sa.select(CALLS.at_us, CALLS.quota_charges).where(CALLS.quota_charges.is_not(None))
    for row in connection.execute(statement, execution_options={"yield_per": PORTION}):
        yield row.at_us, row.quota_charges


def changed_keys(connection: sa.Connection) -> Iterator[tuple[int, str, str]]:
    """Iterate over the times, quotas and keys of changes by operators."""
    columns = QUOTA_CHANGE_TABLE.c
    for row in connection.execute(sa.select(columns.at_us, columns.quota, columns.share)):
        yield row.at_us, row.quota, row.share


def halts_naming(connection: sa.Connection, text: str) -> Iterator[tuple[int, str, str]]:
    """Iterate over the starts, limits or quotas, and sentences of halts that contain a text."""
    columns = (RUNS.started_us, RUNS.breach_limit, RUNS.halt)
    is_named = RUNS.halt.contains(text, autoescape=True)
    for row in connection.execute(sa.select(*columns).where(is_named)):
        yield row.started_us, row.breach_limit, row.halt


def agents(connection: sa.Connection) -> list[str]:
    """List the agents with a conversation."""
    found = sa.select(RUNS.agent).where(RUNS.conversation.is_not(None)).distinct()
    return sorted(connection.scalars(found))


def conversations(connection: sa.Connection, hashes: Collection[str]) -> Iterator[Place]:
    """Find conversations by their hashes, each with the agent that began it."""
    return _conversations(connection, RUNS.conversation.in_(list(hashes)))


def conversations_from(connection: sa.Connection, start: str) -> Iterator[Place]:
    """Find conversations whose hash begins with `start`."""
    # A range, as in `tree`: "g" is the first letter after the hexadecimal ones.
    return _conversations(connection, RUNS.conversation.between(start, f"{start}g"))


def _conversations(connection: sa.Connection, condition: Any) -> Iterator[Place]:
    outermost = sa.func.min(RUNS.agent).filter(RUNS.parent_id.is_(None))
    agent = sa.func.coalesce(outermost, sa.func.min(RUNS.agent))
    columns = (RUNS.conversation, agent, *SEEN)
    statement = sa.select(*columns).where(condition).group_by(RUNS.conversation)
    for row in connection.execute(statement.order_by(RUNS.conversation)):
        yield Place(*row)


def audit_values(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    """Iterate over the audit keys and their values, each once."""
    columns = (ATTRIBUTE_TABLE.c.key, ATTRIBUTE_TABLE.c.value)
    statement = sa.select(*columns).distinct().order_by(*columns)
    for row in connection.execute(statement, execution_options={"yield_per": PORTION}):
        yield row.key, row.value


def names_within(connection: sa.Connection, conversation: str) -> Iterator[tuple[str, str, str]]:
    """Iterate over agents, audit keys and values of a conversation; sessions have no key."""
    is_within = RUNS.conversation == conversation
    sessions = sa.select(RUNS.agent, RUNS.session_id).where(is_within).distinct()
    for agent, session in connection.execute(sessions):
        if session is not None:
            yield agent, "", session
    columns = (RUNS.agent, ATTRIBUTE_TABLE.c.key, ATTRIBUTE_TABLE.c.value)
    joined = ATTRIBUTE_TABLE.join(INVOCATION_TABLE, RUNS.id == ATTRIBUTE_TABLE.c.invocation_id)
    values = sa.select(*columns).select_from(joined).where(is_within).distinct()
    for agent, key, value in connection.execute(values):
        yield agent, key, value


def places(connection: sa.Connection, name: str) -> Iterator[Place]:
    """Find a name among agents, sessions and the values of audit keys."""
    columns: dict[str, Any] = {"agent": RUNS.agent, "session": RUNS.session_id}
    for kind, column in columns.items():
        records, *seen = connection.execute(sa.select(*SEEN).where(column == name)).one()
        if records:
            yield Place(kind, name, records, *seen)
    attribute = ATTRIBUTE_TABLE.c
    statement = (
        sa.select(attribute.key, *SEEN)
        .select_from(ATTRIBUTE_TABLE.join(INVOCATION_TABLE, RUNS.id == attribute.invocation_id))
        .where(attribute.value == name)
        .group_by(attribute.key)
        .order_by(attribute.key)
    )
    for key, *seen in connection.execute(statement):
        yield Place("audit key", key, *seen)
