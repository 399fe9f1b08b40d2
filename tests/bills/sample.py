"""Bills of the vendors of the example ledger, for one of its weeks."""

from __future__ import annotations

import contextlib
import sqlite3
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from tests.bills import exports
from tests.bills.billed import BilledCall
from tests.wire.usages import Bill

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.bills.billed import Vendor

PROVIDERS: Final[Mapping[str, Vendor]] = {
    "anthropic": "anthropic",
    "openai": "openai",
    "gcp.gemini": "litellm",
}
"""Gemini is called through a gateway."""
WEEK: Final = ("2026-11-16", "2026-11-23")
FRIDAY: Final = date(2026, 11, 20)
SEARCHES: Final = {FRIDAY: {"web search tool calls": Decimal("4.10")}}
"""The vendor's tool, which does not use tokens."""
MICROSECONDS: Final = 1_000_000
SCRIPT: Final = Bill(input=41_200, output=3_100)
"""A call without an agent."""


def write_bills(ledger: Path, folder: Path) -> None:
    """Write the bills of a week of the example ledger, with what it does not have."""
    calls = list(_calls(ledger))
    of: Mapping[Vendor, list[BilledCall]] = {
        vendor: [call for call in calls if call.vendor == vendor] for vendor in PROVIDERS.values()
    }
    at_noon = next(call for call in of["anthropic"] if call.day() == FRIDAY)
    of["anthropic"].extend(
        BilledCall(
            vendor="anthropic",
            model="claude-sonnet-4-5",
            identity=f"script-{number}",
            started=at_noon.started,
            ended=at_noon.ended,
            bill=SCRIPT,
        )
        for number in range(2)
    )
    (usage,), (costs,) = (
        exports.openai_usage(of["openai"]),
        exports.openai_costs(of["openai"], others=SEARCHES),
    )
    texts = {
        "openai-usage.json": usage,
        "openai-costs.json": costs,
        "anthropic-usage.json": exports.anthropic_usage(of["anthropic"])[0],
        "anthropic-costs.json": exports.anthropic_costs(of["anthropic"])[0],
        "litellm.csv": exports.litellm_csv(of["litellm"]),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _calls(ledger: Path) -> Iterator[BilledCall]:
    query = """
        SELECT id, provider, model, at_us, duration_us, input_tokens, output_tokens,
            cache_read_tokens, cache_write_tokens, estimated
        FROM otel_limits_model_calls
        WHERE at_us BETWEEN unixepoch(?) * 1000000 AND unixepoch(?) * 1000000 - 1
            AND input_tokens + output_tokens > 0
        ORDER BY at_us
    """
    with contextlib.closing(sqlite3.connect(ledger)) as connection:
        for row in connection.execute(query, WEEK):
            number, provider, model, at_us, duration_us, sent, output, read, written, guess = row
            yield BilledCall(
                vendor=PROVIDERS[provider],
                model=model,
                identity=f"chatcmpl-{number}",
                started=(at_us - (duration_us or 0)) / MICROSECONDS,
                ended=at_us / MICROSECONDS,
                # An estimate is not what the vendor counted.
                bill=Bill(input=sent + guess * sent // 4, output=output, read=read, write=written),
            )
