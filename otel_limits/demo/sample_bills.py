"""Bills of the vendors of the sample fleet, for the last week of its ledger.

They differ from the ledger as real bills do: on Friday, a script used Anthropic's key, and OpenAI
charged web searches. Calls whose usage is estimated in the ledger are billed with more tokens. The
readers of `otel_limits/audit/bills/` have the sources of the forms.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.usage import NO_COST, Usage

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.core.events import ModelCall
    from otel_limits.core.price import Price

DAY: Final = timedelta(days=1)
WEEK: Final = 7
FRIDAY: Final = 4
CENTS: Final = 100

SCRIPT_MODEL: Final = "claude-sonnet-4-5"
SCRIPT: Final = Usage(input=41_200, output=3_100)
"""A call without an agent."""
SCRIPT_CALLS: Final = 2
SEARCHES: Final = ("web search tool calls", Decimal("4.10"))
"""A line item without tokens."""
KEY_HASH: Final = hashlib.sha256(b"agents").hexdigest()
"""LiteLLM logs the hash of a key."""
UNDERESTIMATED: Final = 4
"""The vendor counts a quarter more input than an estimate."""


@dataclass(frozen=True, slots=True)
class BilledCall:
    """One call on a bill."""

    provider: str
    model: str
    price: Price
    usage: Usage
    id: str
    started: datetime
    ended: datetime

    @property
    def costs(self) -> Mapping[str, Decimal]:
        """USD by kind of tokens."""
        usage = self.usage
        read, written = usage.cache_read, usage.cache_write
        kinds = {
            "fresh": Usage(input=usage.input - read - written),
            "read": Usage(input=read, cache_read=read),
            "written": Usage(input=written, cache_write=written),
            "output": Usage(output=usage.output),
        }
        return {kind: self.price.of(part) or NO_COST for kind, part in kinds.items()}


def write_bills(
    folder: Path, calls: Iterable[ModelCall], prices: Mapping[str, Price], today: date
) -> tuple[list[Path], list[Path]]:
    """Write the bills of the seven days before `today`, except over files that exist.

    A user's own exports have the same names if they were requested as on the page about bills.

    Args:
        folder: Where to write them.
        calls: The calls of the ledger.
        prices: The price of each model.
        today: The day after the last one of the ledger.

    Returns:
        The files that were written, and those that existed.

    Raises:
        OSError: A file cannot be written.
    """
    days = [today - DAY * ago for ago in range(WEEK, 0, -1)]
    billed = [_billed(call, prices[call.model]) for call in calls if call.usage.total]
    week = [call for call in billed if call.ended.date() in days]
    openai, anthropic, proxied = (
        [call for call in week if call.provider == name]
        for name in ("openai", "anthropic", "gcp.gemini")
    )
    anthropic += _of_script(anthropic, prices[SCRIPT_MODEL])
    texts = {
        "openai-usage.json": _page_of_openai(days, openai, _openai_usage),
        "openai-costs.json": _page_of_openai(days, openai, _openai_costs),
        "anthropic-usage.json": _page_of_anthropic(days, anthropic, _anthropic_usage),
        "anthropic-costs.json": _page_of_anthropic(days, anthropic, _anthropic_costs),
        "litellm.csv": _litellm_log(proxied),
    }
    existing = [path for name in texts if (path := folder / name).exists()]
    written = [path for name in texts if (path := folder / name) not in existing]
    for path in written:
        path.write_text(texts[path.name], encoding="utf-8")
    return written, existing


def _billed(call: ModelCall, price: Price) -> BilledCall:
    more = call.usage.input // UNDERESTIMATED if call.estimated else 0
    ended = datetime.fromtimestamp(call.at, timezone.utc)
    return BilledCall(
        provider=call.provider,
        model=call.model,
        price=price,
        usage=replace(call.usage, input=call.usage.input + more),
        id=str(call.span_id),
        started=ended - timedelta(seconds=call.seconds or 0),
        ended=ended,
    )


def _of_script(calls: Iterable[BilledCall], price: Price) -> list[BilledCall]:
    friday = next(call for call in calls if call.ended.weekday() == FRIDAY)
    script = replace(friday, model=SCRIPT_MODEL, price=price, usage=SCRIPT)
    return [replace(script, id=f"script-{number}") for number in range(SCRIPT_CALLS)]


# --- the forms of the vendors ---------------------------------------------------------------------


def _page_of_openai(days: Sequence[date], calls: Sequence[BilledCall], results: Any) -> str:
    buckets = [
        {
            "object": "bucket",
            "start_time": int(_midnight(day).timestamp()),
            "end_time": int(_midnight(day + DAY).timestamp()),
            "results": list(results(day, calls)),
        }
        for day in days
    ]
    return _page({"object": "page", "data": buckets})


def _openai_usage(day: date, calls: Sequence[BilledCall]) -> Iterator[Mapping[str, Any]]:
    for model, found in _by_model(day, calls):
        yield {
            "object": "organization.usage.completions.result",
            "model": model,
            "num_model_requests": len(found),
            "input_tokens": sum(call.usage.input for call in found),
            "input_cached_tokens": sum(call.usage.cache_read for call in found),
            "output_tokens": sum(call.usage.output for call in found),
        }


def _openai_costs(day: date, calls: Sequence[BilledCall]) -> Iterator[Mapping[str, Any]]:
    amounts = {
        f"{model}, {item}": _cost(found, kind)
        for model, found in _by_model(day, calls)
        for kind, item in (("fresh", "input"), ("read", "cached input"), ("output", "output"))
    }
    if day.weekday() == FRIDAY:
        amounts |= [SEARCHES]
    for item, amount in amounts.items():
        yield {
            "object": "organization.costs.result",
            "line_item": item,
            "amount": {"value": float(amount), "currency": "usd"},
        }


def _page_of_anthropic(days: Sequence[date], calls: Sequence[BilledCall], results: Any) -> str:
    buckets = [
        {
            "starting_at": _midnight(day).isoformat(),
            "ending_at": _midnight(day + DAY).isoformat(),
            "results": list(results(day, calls)),
        }
        for day in days
    ]
    return _page({"data": buckets})


def _anthropic_usage(day: date, calls: Sequence[BilledCall]) -> Iterator[Mapping[str, Any]]:
    for model, found in _by_model(day, calls):
        read, written = (
            sum(getattr(call.usage, name) for call in found)
            for name in ("cache_read", "cache_write")
        )
        yield {
            "model": model,
            "uncached_input_tokens": sum(call.usage.input for call in found) - read - written,
            "cache_read_input_tokens": read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written,
                "ephemeral_1h_input_tokens": 0,
            },
            "output_tokens": sum(call.usage.output for call in found),
        }


def _anthropic_costs(day: date, calls: Sequence[BilledCall]) -> Iterator[Mapping[str, Any]]:
    kinds = {
        "fresh": "uncached_input_tokens",
        "read": "cache_read_input_tokens",
        "written": "cache_creation.ephemeral_5m_input_tokens",
        "output": "output_tokens",
    }
    for model, found in _by_model(day, calls):
        for kind, token_type in kinds.items():
            yield {
                "model": model,
                "token_type": token_type,
                "cost_type": "tokens",
                "currency": "USD",
                "amount": f"{_cost(found, kind) * CENTS:f}",
            }


def _litellm_log(calls: Iterable[BilledCall]) -> str:
    rows = [
        {
            "request_id": call.id,
            "call_type": "acompletion",
            "api_key": KEY_HASH,
            "spend": f"{sum(call.costs.values(), NO_COST):f}",
            "total_tokens": call.usage.total,
            "prompt_tokens": call.usage.input,
            "completion_tokens": call.usage.output,
            "startTime": call.started.isoformat(" "),
            "endTime": call.ended.isoformat(" "),
            "model": call.model,
            "model_group": call.model,
            "custom_llm_provider": "gemini",
            "status": "success",
        }
        for call in calls
    ]
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _page(page: Mapping[str, Any]) -> str:
    return f"{json.dumps({**page, 'has_more': False}, indent=1)}\n"


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), timezone.utc)


def _by_model(day: date, calls: Sequence[BilledCall]) -> Iterator[tuple[str, Sequence[BilledCall]]]:
    of_day = [call for call in calls if call.ended.date() == day]
    for model in sorted({call.model for call in of_day}):
        yield model, [call for call in of_day if call.model == model]


def _cost(calls: Iterable[BilledCall], kind: str) -> Decimal:
    return sum((call.costs[kind] for call in calls), NO_COST)
