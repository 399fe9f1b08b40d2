"""Anthropic's usage and cost reports, as the Admin API returns them.

The forms are those of https://platform.claude.com/docs/en/api/admin/usage_report/retrieve_messages
and https://platform.claude.com/docs/en/api/admin/cost_report/retrieve, read 2026-11-29. Days begin
at 00:00 UTC. An amount is text in cents: "123.45" is $1.2345. It has a model and a kind of token
only with `group_by[]=description`, and omits the Priority Tier. No report counts requests.
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
    owner_of,
    read_pages,
    require_usd,
)
from otel_limits.core.usage import EXACT

if TYPE_CHECKING:
    from collections.abc import Mapping

OWNERS: Final = ("workspace_id", "api_key_id", "account_id", "service_account_id")
GROUPS: Final = (
    *OWNERS, "model", "service_tier", "context_window", "inference_geo", "speed", "description",
    "cost_type", "token_type",
)  # fmt: skip
KINDS: Final[Mapping[str, Kind]] = {
    "uncached_input_tokens": "fresh",
    "cache_read_input_tokens": "cache_read",
    "cache_creation.ephemeral_1h_input_tokens": "cache_write",
    "cache_creation.ephemeral_5m_input_tokens": "cache_write",
    "output_tokens": "output",
}
CENTS: Final = -2


@dataclass(frozen=True, slots=True)
class AnthropicBill:
    """Reads pages of Anthropic's usage and cost reports."""

    vendor: str = "anthropic"
    title: str = "Anthropic"
    vendors: frozenset[str] = frozenset({"anthropic"})
    passes_on: bool = False

    def reads(self, first: ExportedObject) -> bool:
        """Return whether it is a page."""
        data = first.get("data")
        if "object" in first or "has_more" not in first or not isinstance(data, list):
            return False
        return all(isinstance(each, dict) and "starting_at" in each for each in data)

    def pages(self, objects: Sequence[ExportedObject], file: str) -> Iterator[BillPage]:
        """Read pages."""
        form = BucketedPage(
            begin="starting_at", end="ending_at", report=_report, groups=GROUPS, row=_row
        )
        yield from read_pages(objects, file, form)


def _report(result: ExportedObject) -> str:
    return "cost report" if "amount" in result else "usage report"


def _row(result: ExportedObject, bucket: TimeBucket) -> BillRow:
    model = named(result, "model")
    models = (model,) if model else ()
    identity, owner = bucket.identity(result), owner_of(result, OWNERS)
    if "amount" in result:
        require_usd(result.get("currency") or "USD", bucket.file)
        return BillRow(
            identity=identity,
            day=bucket.day,
            models=models,
            cost=amount(result["amount"], "amount", bucket.file).scaleb(CENTS, EXACT),
            kind=KINDS.get(named(result, "token_type")),
            owner=owner,
        )
    if "uncached_input_tokens" not in result:
        raise invalid(bucket.file, "uncached_input_tokens", None, "in each result of a usage page")
    created: Any = result.get("cache_creation")
    written = created if isinstance(created, dict) else {}
    return BillRow(
        identity=identity,
        day=bucket.day,
        models=models,
        tokens=BilledTokens(
            fresh=count(result, "uncached_input_tokens", bucket.file),
            cache_read=count(result, "cache_read_input_tokens", bucket.file),
            cache_write=sum(count(written, name, bucket.file) for name in written),
            output=count(result, "output_tokens", bucket.file),
        ),
        owner=owner,
    )
