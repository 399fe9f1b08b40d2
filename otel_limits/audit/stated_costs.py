"""Stated costs against prices by the policy file or the price list: a table of `spend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from otel_limits.audit.answer import Column, Table
from otel_limits.ledger.rows import dollars

if TYPE_CHECKING:
    from otel_limits.audit.question import AuditQuery

DIFFERENCES: Final = (
    Column("model", "Model", is_key=True),
    Column("calls", "Calls", "count"),
    Column("different_calls", "Different", "count", is_key=True),
    Column("stated_usd", "Stated", "money", is_key=True),
    Column("listed_usd", "Computed", "money", is_key=True),
)


def differences_table(inquiry: AuditQuery) -> Table | None:
    """Build a table of the models whose stated costs differ from the computed prices, if any do."""
    from otel_limits.ledger import queries

    found = queries.stated_costs(inquiry.connection, inquiry.selection)
    rows = [
        (each.model, each.calls, each.different, dollars(each.stated), dollars(each.listed))
        for each in found
    ]
    if not rows:
        return None
    return Table(
        name="differences",
        title="Stated costs that differ from computed prices",
        columns=DIFFERENCES,
        rows=rows,
        note="Models with a call whose response states a cost that differs by more than 1% from "
        "the price by the policy file or the price list. The sums are of all calls that have both. "
        "The stated cost of a vendor is the price; that of a gateway is only recorded.",
    )
