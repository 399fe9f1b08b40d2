"""Values of properties and audit keys that a ledger has, of those that a query selects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.ledger.schema import INVOCATION_TABLE, MODEL_CALL_TABLE, TOOL_CALL_TABLE
from otel_limits.ledger.selection import Joins, Selection

if TYPE_CHECKING:
    from otel_limits.ledger.options import Condition

TABLES: Final = (INVOCATION_TABLE, MODEL_CALL_TABLE, TOOL_CALL_TABLE)
"""The smallest first; each has properties that the others lack."""
MOST_VALUES: Final = 1000
"""Values that a misspelled one is compared with: a ledger may have a million sessions."""


def missing(connection: sa.Connection, selection: Selection) -> Iterator[Condition]:
    """Yield the conditions of a selection that no row meets, whenever it was recorded."""
    for each in selection.where:
        # An empty value means rows without one, and then none is misspelled.
        if each.value and not _is_met(connection, each, selection):
            yield each


def _is_met(connection: sa.Connection, condition: Condition, selection: Selection) -> bool:
    alone = Selection(where=(condition._replace(is_excluded=False),), zone=selection.zone)
    for table in TABLES:
        try:
            statement = Joins(table).select(alone, sa.literal(1)).limit(1)
        except LedgerError:  # its rows lack the property
            continue
        if connection.execute(statement).first() is not None:
            return True
    return False


def some(connection: sa.Connection, name: str) -> list[str]:
    """Return values of a property or audit key."""
    for table in TABLES:
        joins = Joins(table)
        try:
            column: Any = joins.column(name)
        except LedgerError:
            continue
        found = sa.select(column).select_from(joins.tables).distinct().limit(MOST_VALUES)
        # Sorted here, because databases have different orders of letters.
        return sorted(value for value in connection.scalars(found) if isinstance(value, str))
    return []
