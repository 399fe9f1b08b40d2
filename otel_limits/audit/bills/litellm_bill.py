"""LiteLLM's spend logs: rows of its table, as JSON or CSV.

The columns are those of `LiteLLM_SpendLogs` in
https://github.com/BerriAI/litellm/blob/main/schema.prisma, and the pages those of `/spend/logs/v2`,
read 2026-11-29. Times are UTC, and a call belongs to the day on which it started. `spend` is what
LiteLLM computed, in USD. `prompt_tokens` contains cached tokens, whose number is in the metadata.
An answer from LiteLLM's own cache costs nothing, although the row has tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from otel_limits.audit.bills.bill import (
    BilledTokens,
    BillPage,
    BillRow,
    ExportedObject,
    amount,
    count,
    day_of,
    invalid,
    named,
    owner_of,
)

ROW: Final = frozenset({"request_id", "spend", "startTime", "prompt_tokens", "completion_tokens"})
OWNERS: Final = ("api_key", "team_id", "user", "end_user")


@dataclass(frozen=True, slots=True)
class LiteLLMBill:
    """Reads LiteLLM's spend logs."""

    vendor: str = "litellm"
    title: str = "LiteLLM"
    vendors: frozenset[str] = frozenset({"litellm", "litellm_proxy"})
    passes_on: bool = True

    def reads(self, first: ExportedObject) -> bool:
        """Return whether it is a row, or a page of rows."""
        data = first.get("data")
        if isinstance(data, list) and "total_pages" in first:
            return all(isinstance(row, dict) and row.keys() >= ROW for row in data)
        return first.keys() >= ROW

    def pages(self, objects: Sequence[ExportedObject], file: str) -> Iterator[BillPage]:
        """Read rows, or pages of rows."""
        rows = []
        for each in objects:
            if "total_pages" not in each:
                rows += _billed([each], file)
                continue
            number, pages = count(each, "page", file), count(each, "total_pages", file)
            found = _billed(each["data"], file)
            yield BillPage(file=file, report="logs", rows=found, number=(number, pages))
        yield BillPage(file=file, report="logs", rows=rows)


def _billed(found: Sequence[Any], file: str) -> list[BillRow]:
    rows = []
    for row in found:
        if not isinstance(row, dict) or not row.keys() >= ROW:
            raise invalid(file, "each row", row, f"an object with {', '.join(sorted(ROW))}")
        read = _row(row, file)
        is_cached = str(row.get("cache_hit")).lower() == "true"
        # Calls that failed have a row, too.
        if read.cost or (not is_cached and any(read.tokens or ())):
            rows.append(read)
    return rows


def _row(row: ExportedObject, file: str) -> BillRow:
    # Agents ask for the group, which is the public name of the model.
    names = (named(row, "model_group", "model"), named(row, "model", "model_group"))
    sent = count(row, "prompt_tokens", file)
    read, written = _cached(row, file)
    return BillRow(
        identity=("log", str(row["request_id"])),
        day=day_of(row["startTime"], "startTime", file),
        models=names if any(names) else (),
        tokens=BilledTokens(
            fresh=max(0, sent - (read or 0) - (written or 0)),
            cache_read=read,
            cache_write=written,
            output=count(row, "completion_tokens", file),
        ),
        requests=1,
        cost=amount(row["spend"], "spend", file),
        owner=owner_of(row, OWNERS),
        is_call=True,
    )


def _cached(row: ExportedObject, file: str) -> tuple[int | None, int | None]:
    """Return the tokens read from and written to the vendor's cache; `None` without a usage."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):  # in CSV
        try:
            metadata = json.loads(metadata or "{}")
        except (ValueError, RecursionError):
            raise invalid(file, "metadata", metadata, "JSON") from None
    usage = metadata.get("usage_object") if isinstance(metadata, dict) else None
    if not isinstance(usage, dict):
        return None, None
    details = usage.get("prompt_tokens_details")
    parts = details if isinstance(details, dict) else {}
    # Other vendors than Anthropic have only the details.
    read = count(usage, "cache_read_input_tokens", file) or count(parts, "cached_tokens", file)
    written = count(usage, "cache_creation_input_tokens", file)
    return read, written or count(parts, "cache_creation_tokens", file)
