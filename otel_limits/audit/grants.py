"""The question `grants`: who permitted whom how much more of a quota, and until when."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final

from otel_limits.audit.answers import Answer, Column, Table
from otel_limits.audit.question import WINDOW, Inquiry, Question

COLUMNS: Final = (
    Column("at", "Time", "time"),
    Column("quota", "Quota"),
    Column("key", "Key"),
    Column("change", "Change"),
    Column("amount", "Amount"),
    Column("unit", "Unit"),
    Column("until", "Until", "time"),
    Column("by", "By"),
)


def grants(inquiry: Inquiry) -> Answer:
    """Answer what people changed in quotas."""
    from otel_limits.ledger.queries import quota_changes

    return Answer(
        question="grants",
        title="Changes of quotas",
        about=inquiry.about,
        tables=[grants_table(quota_changes(inquiry.connection, inquiry.selection))],
    )


def grants_table(rows: Iterable[Any]) -> Table:
    """One row per grant or reset."""
    return Table(
        name="grants",
        title="Changes of quotas",
        columns=COLUMNS,
        rows=[
            (
                row.at_us,
                row.quota,
                row.share,
                row.change,
                f"{Decimal(row.amount):f}" if row.change == "grant" else None,
                row.unit,
                row.until_us,
                row.changed_by,
            )
            for row in rows
        ],
    )


GRANTS: Final = Question(
    name="grants",
    help="What people changed in quotas: who, when, how much, and until when.",
    answer=grants,
    selection=WINDOW,
)
