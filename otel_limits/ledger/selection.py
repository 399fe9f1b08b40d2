"""Selection of a part of a ledger: times, names and values, as conditions of statements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timezone, tzinfo
from typing import Any, Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.core.limits import (
    CONVERSATION_PREFIX,
    LIMITS,
    QUOTA_EXCEEDED_STOP_REASON,
    TREE_PREFIX,
)
from otel_limits.ledger.calendar import PERIODS, QUARTER, QUARTER_SECONDS, span
from otel_limits.ledger.options import AFTER_TOOLS, KEY_PREFIX, OWN_NAMES, Condition
from otel_limits.ledger.rows import MICROSECONDS
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    CALLS,
    DAY_MICROSECONDS,
    INVOCATION_TABLE,
    MODEL_CALL_TABLE,
    RUNS,
)

HOUR_MICROSECONDS: Final = DAY_MICROSECONDS // 24
DAYS: Final = ("day", "week", "month")
"""Grouping keys derived from the day of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of a ledger that a query covers."""

    since_us: int | None = None
    until_us: int | None = None
    where: tuple[Condition, ...] = ()
    """Any of several values of a name matches; all values to exclude are excluded."""
    zone: tzinfo = timezone.utc
    """Time zone of hours, days, weeks and months."""

    def reaches_before(self, time_us: int) -> bool:
        """Return whether a row of the selection can be from a time before `time_us`.

        Excluded periods are ignored: what is left of a time before is rarely nothing.
        """
        window = (
            -math.inf if self.since_us is None else self.since_us,
            math.inf if self.until_us is None else self.until_us,
        )
        # One of the periods of each name must contain the time of a row, as in `conditions`.
        wanted: dict[str, list[tuple[float, float]]] = {"": [window]}
        for name, value, is_excluded in self.where:
            if name in PERIODS and not is_excluded:
                wanted.setdefault(name, []).append(span(name, value, self.zone))
        # The earliest time that they have in common is the beginning of one of them.
        return any(
            time < time_us
            and all(any(begin <= time < end for begin, end in each) for each in wanted.values())
            for time in (begin for each in wanted.values() for begin, _ in each)
        )


class Joins:
    """The tables of a statement, joined as columns are requested."""

    def __init__(self, base: sa.Table) -> None:
        """Start with the table that is counted: model calls, tool calls, or invocations."""
        self.tables: sa.FromClause = base
        self._base = base
        self._owner = base.c.id if base is INVOCATION_TABLE else base.c.invocation_id
        self._time = base.c.started_us if base is INVOCATION_TABLE else base.c.at_us
        self._has_invocations = base is INVOCATION_TABLE
        self._attributes: dict[str, sa.ColumnElement[Any]] = {}

    def column(self, name: str) -> sa.ColumnElement[Any]:
        """Return the column of a property or audit key."""
        if name in (QUARTER, AFTER_TOOLS):
            quarter = self._time // (QUARTER_SECONDS * MICROSECONDS)
            return quarter if name == QUARTER else CALLS.after_tools
        if name not in OWN_NAMES:
            return self._attribute(name.removeprefix(KEY_PREFIX))
        if name == "hour":
            return self._time // HOUR_MICROSECONDS
        if name in DAYS:
            return CALLS.day if self._base is MODEL_CALL_TABLE else self._time // DAY_MICROSECONDS
        if name in NAMED_RUNS:
            self._join_invocations()
            return NAMED_RUNS[name]
        return self._identity(name) if name in IDENTITIES else self._own(name)

    def _identity(self, name: str) -> sa.ColumnElement[Any]:
        if name == "invocation":
            return self._owner
        if name == "root":
            return sa.func.coalesce(self._base.c.root_id, self._owner)
        if self._base is INVOCATION_TABLE:
            return RUNS.trace_id
        self._join_invocations()  # live calls do not repeat the trace of their invocation
        return sa.func.coalesce(self._base.c.trace_id, RUNS.trace_id)

    def _own(self, name: str) -> sa.ColumnElement[Any]:
        column = self._base.c.get(name)
        if column is None:
            raise LedgerError(f"This query has no {name}.")
        return IS_SIDE if column is CALLS.side else column

    def conditions(self, selection: Selection) -> list[sa.ColumnElement[bool]]:
        """Build the conditions of a selection; may join further tables."""
        wanted: dict[str, list[sa.ColumnElement[bool]]] = {}
        excluded = []
        for name, value, is_excluded in selection.where:
            if name in PERIODS:
                condition = sa.and_(*self._within(*span(name, value, selection.zone)))
            elif name in SELECTED_BY_CALLS and self._base is not MODEL_CALL_TABLE:
                # An invocation matches if one of its model calls does.
                call = MODEL_CALL_TABLE.alias().c
                condition = sa.exists().where(
                    call.invocation_id == self._owner, matches(call[name], value)
                )
            elif name == "reason":
                # For metrics an observed limit is the reason: match both.
                condition = matches(self.column(name), value) | matches(REASON_COUNTED, value)
            else:
                condition = matches(self.column(name), value)
            if is_excluded:
                # A comparison with a missing value is neither true nor false in SQL.
                excluded.append(sa.not_(sa.func.coalesce(condition, sa.false())))
            else:
                wanted.setdefault(name, []).append(condition)
        conditions = [sa.or_(*alternatives) for alternatives in wanted.values()]
        return [*conditions, *excluded, *self._within(selection.since_us, selection.until_us)]

    def _within(
        self, since_us: int | None, until_us: int | None
    ) -> Iterator[sa.ColumnElement[bool]]:
        # The index on spend starts with the day: by time alone it would be scanned. At day
        # boundaries the time is redundant.
        on_calls = self._base is MODEL_CALL_TABLE
        if since_us is not None:
            day, rest = divmod(since_us, DAY_MICROSECONDS)
            if on_calls:
                yield CALLS.day >= day
            if rest or not on_calls:
                yield self._time >= since_us
        if until_us is not None:
            day, rest = divmod(until_us, DAY_MICROSECONDS)
            if on_calls:
                yield CALLS.day <= day if rest else CALLS.day < day
            if rest or not on_calls:
                yield self._time < until_us

    def select(self, selection: Selection, *columns: Any) -> sa.Select[Any]:
        """Select columns of the rows of a selection, after `column` has provided them."""
        conditions = self.conditions(selection)
        return sa.select(*columns).select_from(self.tables).where(*conditions)

    def _join_invocations(self) -> None:
        if not self._has_invocations:
            self._has_invocations = True
            self.tables = self.tables.outerjoin(INVOCATION_TABLE, RUNS.id == self._owner)

    def _attribute(self, key: str) -> sa.ColumnElement[Any]:
        """An audited attribute of the invocation, or else of the root of its tree."""
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


SELECTED_BY_CALLS: Final = ("model", "provider")
"""Properties by which model calls select their invocation and its tool calls."""

IDENTITIES: Final = ("invocation", "root", "trace")

NAMED_RUNS: Final[dict[str, sa.ColumnElement[Any]]] = {
    "session": RUNS.session_id,
    "conversation": RUNS.conversation,
    "task": RUNS.task_id,
    "reason": RUNS.reason,
    "action": RUNS.action,
    "limit": RUNS.breach_limit,
}


def _inlined(text: str) -> sa.ColumnElement[str]:
    # PostgreSQL would not recognize the grouping expression with another parameter.
    return sa.literal(text, literal_execute=True)


IS_OBSERVED: Final = (RUNS.action == "observed") & (RUNS.breach_limit != "")

REASON_COUNTED: Final[sa.ColumnElement[Any]] = sa.case(
    {
        prefix + name: _inlined(limit.reason)
        for name, limit in LIMITS.items()
        for prefix in ("", TREE_PREFIX, CONVERSATION_PREFIX)
    },
    value=RUNS.breach_limit,
    # Quotas have their own names.
    else_=sa.case((IS_OBSERVED, _inlined(QUOTA_EXCEEDED_STOP_REASON)), else_=RUNS.reason),
)
"""The reason under which metrics count an end: the limit's, even if only observed."""

WOULD_BE: Final = sa.case((IS_OBSERVED, REASON_COUNTED), else_=_inlined("")).label("would_be")
"""The reason of a would-be halt; empty if there is none."""


IS_SIDE: Final[sa.ColumnElement[Any]] = sa.case((CALLS.side, "yes"), (~CALLS.side, "no"))
"""As text, as an auditor writes it; null for imported calls."""


def matches(column: sa.ColumnElement[Any], value: str) -> sa.ColumnElement[bool]:
    """Compare with a value in which `*` matches any characters; an empty one is a missing one."""
    if not value:
        return column.is_(None) | (column == "")
    if "*" not in value:
        return column == value
    # Only the star is a wildcard: those of SQL are escaped.
    pattern = value.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return column.like(pattern.replace("*", "%"), escape="\\")


def audit_keys(connection: sa.Connection) -> list[str]:
    """List the audit keys that occur in the ledger."""
    return list(
        connection.scalars(
            sa.select(ATTRIBUTE_TABLE.c.key).distinct().order_by(ATTRIBUTE_TABLE.c.key)
        )
    )
