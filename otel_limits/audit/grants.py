"""The question `grants`: changes to quotas by operators."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from otel_limits.audit.answer import Answer, Column, Table
from otel_limits.audit.question import WINDOW, AuditQuery, Question

COLUMNS: Final = (
    Column("at", "Time", "time", is_key=True),
    Column("quota", "Quota", is_key=True),
    Column("key", "Key", is_key=True),
    Column("change", "Change", is_key=True),
    Column("amount", "Amount"),
    Column("unit", "Unit"),
    Column("until", "Until", "time"),
    Column("by", "By", is_key=True),
    Column("reason", "Reason"),
)


def grants(inquiry: AuditQuery) -> Answer:
    """Answer which quotas were changed."""
    from otel_limits.ledger.queries import quota_changes

    rows = [
        (
            row.at_us,
            row.quota,
            row.share,
            row.change,
            f"{Decimal(row.amount):f}" if row.change in ("grant", "set") else None,
            row.unit,
            row.until_us,
            row.changed_by,
            row.reason,
        )
        for row in quota_changes(inquiry.connection, inquiry.selection)
    ]
    title = "Quota changes"
    table = Table(name="grants", title=title, columns=COLUMNS, rows=rows)
    return Answer(question="grants", title=title, about=inquiry.about, tables=[table])


GRANTS: Final = Question(
    name="grants",
    help="List quota grants, set amounts, resets and blocks.",
    answer=grants,
    tables={"grants": COLUMNS},
    selection=WINDOW,
)
