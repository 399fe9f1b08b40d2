"""Tokens of imported spans that are not counted, as a table and as a clause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from otel_limits.audit.answer import Column, Table
from otel_limits.core.wording import pluralize
from otel_limits.ledger.options import OF_CALLS

if TYPE_CHECKING:
    import sqlalchemy as sa

    from otel_limits.audit.question import AuditQuery

COLUMNS: Final = (
    Column("agent", "Agent"),
    Column("span", "Span", is_key=True),
    Column("cause", "Cause", "sentence", is_key=True),
    Column("spans", "Spans", "count"),
    Column("tokens", "Tokens", "count", is_key=True),
)
MOST_ROWS: Final = 10
MOST_CAUSES: Final = 3
"""Causes that the clause names."""


def uncounted_table(inquiry: AuditQuery) -> Table | None:
    """Build a table of the spans with the most tokens, and one row for the rest.

    Returns `None` if there is none, or if the selection is by a property of calls.
    """
    from otel_limits.ledger.queries import uncounted, uncounted_sums

    if any(each.name in OF_CALLS for each in inquiry.selection.where):
        return None
    spans, tokens = uncounted_sums(inquiry.connection, inquiry.selection)
    if not spans:
        return None
    found = uncounted(inquiry.connection, inquiry.selection, MOST_ROWS)
    rows = [(*keys, count, int(each)) for *keys, count, each in found]  # a Decimal in PostgreSQL
    shown, shown_tokens = (sum(row[place] for row in rows) for place in (-2, -1))
    if shown < spans:
        rows.append(("(others)", "", "", spans - shown, tokens - shown_tokens))
    return Table(
        name="uncounted",
        title="Tokens that are not counted",
        columns=COLUMNS,
        rows=rows,
        total=("total", "", "", spans, tokens),
        note="Imported spans report these tokens, and none of the model calls has them.",
    )


def uncounted_clause(connection: sa.Connection) -> str:
    """Describe how many tokens are not counted in a ledger, and why; empty if there are none."""
    from otel_limits.ledger.queries import uncounted_by_cause, uncounted_sums
    from otel_limits.ledger.selection import Selection

    spans, tokens = uncounted_sums(connection, Selection())
    if not spans:
        return ""
    causes = [each.cause for each in uncounted_by_cause(connection, MOST_CAUSES + 1)]
    why = "; ".join(causes[:MOST_CAUSES]) + ("; …" if len(causes) > MOST_CAUSES else "")
    told = pluralize(tokens, "token")
    spans_were = pluralize(spans, f"span with {told} was", f"spans with {told} were")
    return f"{spans_were} not counted ({why})"
