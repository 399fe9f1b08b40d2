"""OpenRouter's activity: rows by day and endpoint, or by generation, as CSV or JSON.

Days are those of UTC. The columns by day are those of
https://openrouter.ai/docs/api/api-reference/analytics/get-user-activity, and those by generation
of the export described at https://openrouter.ai/docs/cookbook/administration/activity-export; read
2026-11-29. Costs are USD: the credits spent, and with your own key the provider's charge in
addition. Prompt tokens contain cached ones, and completion tokens reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from otel_limits.audit.bills.bill import (
    UNSET,
    BilledTokens,
    BillPage,
    BillRow,
    ExportedObject,
    amount,
    count,
    day_of,
    invalid,
    named,
    optional_count,
    owner_of,
)
from otel_limits.core.usage import EXACT

GENERATIONS: Final = frozenset({"generation_id", "created_at", "cost_total", "model_permaslug"})
DAYS: Final = frozenset({"date", "model", "usage", "prompt_tokens", "completion_tokens"})
VALUES: Final = frozenset(
    {"usage", "byok_usage_inference", "requests", "prompt_tokens", "completion_tokens",
     "reasoning_tokens"}
)  # fmt: skip
"""Columns that do not identify a row by day."""
OWNERS: Final = ("api_key_name", "api_key_hash", "workspace_id", "user", "app_name")
STANDARD: Final = "standard"


@dataclass(frozen=True, slots=True)
class OpenRouterBill:
    """Reads OpenRouter's activity."""

    vendor: str = "openrouter"
    title: str = "OpenRouter"
    vendors: frozenset[str] = frozenset({"openrouter"})
    passes_on: bool = False

    def reads(self, first: ExportedObject) -> bool:
        """Return whether it is a row, or the API's list of rows."""
        data = first.get("data")
        if isinstance(data, list) and data and isinstance(data[0], dict):
            first = data[0]
        return first.keys() >= GENERATIONS or first.keys() >= DAYS

    def pages(self, objects: Sequence[ExportedObject], file: str) -> Iterator[BillPage]:
        """Read a file."""
        rows: list[BillRow] = []
        for each in objects:
            found: Any = each.get("data", [each])
            if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
                raise invalid(file, "data", found, "a list of rows")
            rows += [_row(row, file) for row in found]
        # A file has one kind of row, so its first one shows how it divides a day.
        divided = {"generation"} if rows and rows[0].is_call else {"day"}
        yield BillPage(file=file, report="activity", rows=rows, grouping=frozenset(divided))


def _row(row: ExportedObject, file: str) -> BillRow:
    if row.keys() >= GENERATIONS:
        return _generation(row, file)
    if not row.keys() >= DAYS:
        missing = ", ".join(sorted(DAYS - row.keys()))
        raise invalid(file, "each row", sorted(row), f"with {missing}")
    identity = tuple(sorted((name, str(row[name])) for name in row.keys() - VALUES))
    return BillRow(
        identity=("activity", *identity),
        day=day_of(row["date"], "date", file),
        models=(named(row, "model"), named(row, "model_permaslug", "model")),
        tokens=BilledTokens(
            fresh=count(row, "prompt_tokens", file), output=count(row, "completion_tokens", file)
        ),
        requests=optional_count(row, "requests", file),
        cost=_paid(row, "usage", file),
        owner=owner_of(row, OWNERS),
    )


def _generation(row: ExportedObject, file: str) -> BillRow:
    sent = count(row, "tokens_prompt", file)
    read = optional_count(row, "tokens_cached", file)
    model, variant = named(row, "model_permaslug"), named(row, "variant")
    if variant and variant != STANDARD:
        model = f"{model}:{variant}"
    return BillRow(
        identity=("generation", str(row["generation_id"])),
        day=day_of(row["created_at"], "created_at", file),
        models=(model,),
        tokens=BilledTokens(
            fresh=max(0, sent - (read or 0)),
            cache_read=read,
            output=count(row, "tokens_completion", file),
        ),
        requests=1,
        cost=_paid(row, "cost_total", file),
        owner=owner_of(row, OWNERS),
        is_call=True,
    )


def _paid(row: ExportedObject, name: str, file: str) -> Decimal:
    own_key = row.get("byok_usage_inference")
    # The activity has 0 for calls without your own key, and an export leaves the field empty.
    more = Decimal(0) if own_key in UNSET else amount(own_key, "byok_usage_inference", file)
    return EXACT.add(amount(row[name], name, file), more)
