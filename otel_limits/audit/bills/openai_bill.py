"""OpenAI's organization usage and costs, as the Admin API returns them.

The forms are those of https://platform.openai.com/docs/api-reference/usage (usage of completions,
embeddings and others, and costs), read 2026-11-29. Days begin at 00:00 UTC. `input_tokens` contains
cached and cache-write tokens. A cost has a model only with `group_by=line_item`, whose items are
like "gpt-5-2025-08-07, input"; the value is a number of USD.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.bills.bill import (
    BilledTokens,
    BillPage,
    BillRow,
    BucketedPage,
    ExportedObject,
    Kind,
    TimeBucket,
    amount,
    count,
    invalid,
    named,
    optional_count,
    owner_of,
    read_pages,
    require_usd,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

COSTS: Final = "organization.costs.result"
OWNERS: Final = ("project_id", "user_id", "api_key_id")
GROUPS: Final = (*OWNERS, "model", "batch", "service_tier", "line_item")
KINDS: Final[Mapping[str, Kind]] = {
    "input": "fresh",
    "cached input": "cache_read",
    "cache write": "cache_write",
    "cache writes": "cache_write",
    "output": "output",
}
"""The last part of a line item."""


@dataclass(frozen=True, slots=True)
class OpenAIBill:
    """Reads pages of OpenAI's usage and costs."""

    vendor: str = "openai"
    title: str = "OpenAI"
    vendors: frozenset[str] = frozenset({"openai"})
    passes_on: bool = False

    def reads(self, first: ExportedObject) -> bool:
        """Return whether it is a page."""
        return first.get("object") == "page" and isinstance(first.get("data"), list)

    def pages(self, objects: Sequence[ExportedObject], file: str) -> Iterator[BillPage]:
        """Read pages."""
        form = BucketedPage(
            begin="start_time", end="end_time", report=_report, groups=GROUPS, row=_row
        )
        yield from read_pages(objects, file, form)


def _report(result: ExportedObject) -> str:
    name = str(result.get("object") or "result")
    return name.removeprefix("organization.").removesuffix(".result")


def _row(result: ExportedObject, bucket: TimeBucket) -> BillRow:
    if result.get("object") == COSTS:
        return _cost(result, bucket)
    file = bucket.file
    if "input_tokens" not in result and "num_model_requests" not in result:
        raise invalid(file, "input_tokens", None, "in each result of a usage page")
    sent = count(result, "input_tokens", file)
    read = optional_count(result, "input_cached_tokens", file)
    written = optional_count(result, "input_cache_write_tokens", file)
    model = named(result, "model")
    return BillRow(
        identity=bucket.identity(result),
        day=bucket.day,
        models=(model,) if model else (),
        tokens=BilledTokens(
            fresh=max(0, sent - (read or 0) - (written or 0)),
            cache_read=read,
            cache_write=written,
            output=count(result, "output_tokens", file),
        ),
        requests=optional_count(result, "num_model_requests", file),
        owner=owner_of(result, OWNERS),
    )


def _cost(result: ExportedObject, bucket: TimeBucket) -> BillRow:
    paid: Any = result.get("amount") or {}
    if not isinstance(paid, dict):
        raise invalid(bucket.file, "amount", paid, "an object with value and currency")
    require_usd(paid.get("currency") or "usd", bucket.file)
    item = named(result, "line_item")
    model, _, last = item.rpartition(", ")
    kind = KINDS.get(last.lower())
    return BillRow(
        identity=bucket.identity(result),
        day=bucket.day,
        models=((model if kind else item),) if item else (),
        cost=amount(paid.get("value"), "amount.value", bucket.file),
        kind=kind,
        owner=owner_of(result, OWNERS),
    )
