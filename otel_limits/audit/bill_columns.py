"""The tables of a comparison with a bill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from otel_limits.audit.answer import Column

VENDOR: Final = Column("vendor", "Bill", is_key=True)
PLACE: Final = (
    VENDOR,
    Column("day", "Day", "date", is_key=True),
    Column("model", "Model", is_key=True),
)
COSTS: Final = (
    *PLACE,
    Column("ledger", "Ledger", "money"),
    Column("billed", "Billed", "money"),
    Column("difference", "Difference", "money", is_key=True),
    Column("difference_share", "Share of ledger", "share"),
    Column("unexplained", "Unexplained", "money", is_key=True),
    Column("accepted", "Within tolerance", is_key=True),
)
TOKENS: Final = (
    *PLACE,
    Column("measure", "Figure", is_key=True),
    Column("ledger", "Ledger", "count"),
    Column("billed", "Billed", "count"),
    Column("difference", "Difference", "count", is_key=True),
    Column("difference_share", "Share of ledger", "share"),
    Column("accepted", "Within tolerance", is_key=True),
)
PARTS: Final = (
    *PLACE,
    Column("cause", "Cause", "sentence", is_key=True),
    Column("calls", "Calls", "count"),
    Column("tokens", "Tokens", "count"),
    Column("cost", "Cost", "money", is_key=True),
)
OWNERS: Final = (
    VENDOR,
    Column("owner", "Key, project or user", is_key=True),
    Column("requests", "Requests", "count"),
    Column("tokens", "Tokens", "count"),
    Column("cost", "Cost", "money", is_key=True),
)
BILL_TABLES: Final[Mapping[str, Sequence[Column]]] = {
    "bill_cost": COSTS,
    "bill_tokens": TOKENS,
    "bill_parts": PARTS,
    "bill_owners": OWNERS,
}
PARTS_NOTE: Final = (
    "A difference is the bill less the ledger, and its parts add up to it. A part has two causes, "
    "joined by or, if the bill does not show which of them it is. Unexplained includes prices that "
    "differ. Calls are those that a part concerns; a dash if the bill does not count requests."
)
NO_COSTS_NOTE: Final = "Without amounts, only tokens are compared: pass the cost report, too."

TITLES: Final = {
    "bill_cost": "Cost",
    "bill_tokens": "Requests and tokens",
    "bill_parts": "Parts of the differences",
    "bill_owners": "The bill by key, project or user",
}
NOTES: Final = {
    "bill_tokens": "Input includes cached tokens.",
    "bill_parts": PARTS_NOTE,
    "bill_owners": "The ledger does not record them.",
}
