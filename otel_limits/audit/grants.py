"""What people changed in quotas: who permitted whom how much more, and until when."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final

from otel_limits.audit.answers import Column, Table

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
