"""Bills in each vendor's own form, made from the calls on them.

The forms are those of the vendors' documentation, read 2026-11-29; the readers of
`otel_limits/audit/bills/` have the addresses.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import date

    from tests.bills.billed import BilledCall, Part

DAY: Final = timedelta(days=1)
PAGE_DAYS: Final = 7
"""Buckets of a page, by default."""
CENTS: Final = 100

LINE_ITEMS: Final[Mapping[Part, str]] = {
    "input": "input",
    "cache_read": "cached input",
    "output": "output",
}
TOKEN_TYPES: Final[Mapping[Part, str]] = {
    "input": "uncached_input_tokens",
    "cache_read": "cache_read_input_tokens",
    "cache_write": "cache_creation.ephemeral_5m_input_tokens",
    "cache_write_1h": "cache_creation.ephemeral_1h_input_tokens",
    "output": "output_tokens",
}
UPSTREAM: Final = {"smart": "gpt-4o-mini"}
"""The models that a gateway calls, if it offers them by other names."""
ROUTED: Final = (
    "generation_id", "created_at", "cost_total", "cost_web_search", "cost_cache",
    "cost_file_processing", "byok_usage_inference", "tokens_prompt", "tokens_completion",
    "tokens_reasoning", "tokens_cached", "model_permaslug", "provider_name", "variant",
    "cancelled", "streamed", "user", "finish_reason_raw", "finish_reason_normalized",
    "generation_time_ms", "time_to_first_token_ms", "app_name", "api_key_name",
)  # fmt: skip


def openai_usage(calls: Sequence[BilledCall], zone: timezone = timezone.utc) -> list[str]:
    """Pages of `/v1/organization/usage/completions`, by day and model."""

    def results(of_day: Sequence[BilledCall]) -> Iterator[Any]:
        for model, of_model in _by(of_day, lambda call: call.model):
            yield {
                "object": "organization.usage.completions.result",
                "input_tokens": sum(call.bill.input for call in of_model),
                "output_tokens": sum(call.bill.output for call in of_model),
                "input_cached_tokens": sum(call.bill.read for call in of_model),
                "input_audio_tokens": 0,
                "output_audio_tokens": 0,
                "num_model_requests": len(of_model),
                "project_id": None,
                "user_id": None,
                "api_key_id": None,
                "model": model,
                "batch": None,
            }

    return _openai_pages(calls, results, zone)


def openai_costs(
    calls: Sequence[BilledCall],
    zone: timezone = timezone.utc,
    others: Mapping[date, Mapping[str, Decimal]] | None = None,
) -> list[str]:
    """Pages of `/v1/organization/costs`, by day and line item.

    Args:
        calls: The billed calls.
        zone: The time zone of the days.
        others: Amounts that are not for tokens, by day and line item.
    """

    def results(of_day: Sequence[BilledCall]) -> Iterator[Any]:
        amounts = {
            f"{model}, {item}": _cost(of_model, part)
            for model, of_model in _by(of_day, lambda call: call.model)
            for part, item in LINE_ITEMS.items()
        }
        for day in {call.day(zone) for call in of_day}:
            amounts.update((others or {}).get(day, {}))
        for item, amount in amounts.items():
            yield {
                "object": "organization.costs.result",
                "amount": {"value": float(amount), "currency": "usd"},
                "line_item": item,
                "project_id": None,
            }

    return _openai_pages(calls, results, zone)


def _openai_pages(
    calls: Sequence[BilledCall],
    results: Callable[[Sequence[BilledCall]], Iterable[Any]],
    zone: timezone,
) -> list[str]:
    buckets = [
        {
            "object": "bucket",
            "start_time": int(begin.timestamp()),
            "end_time": int((begin + DAY).timestamp()),
            "results": list(results(of_day)),
        }
        for begin, of_day in _days(calls, zone)
    ]
    return [json.dumps({"object": "page", **page}) for page in _pages(buckets)]


def anthropic_usage(calls: Sequence[BilledCall]) -> list[str]:
    """Pages of `/v1/organizations/usage_report/messages`, by day and model."""

    def results(of_day: Sequence[BilledCall]) -> Iterator[Any]:
        for model, of_model in _by(of_day, lambda call: call.model):
            tokens = {
                part: sum(call.tokens[part] for call in of_model) for part in of_model[0].tokens
            }
            yield {
                "uncached_input_tokens": tokens["input"],
                "cache_creation": {
                    "ephemeral_1h_input_tokens": tokens["cache_write_1h"],
                    "ephemeral_5m_input_tokens": tokens["cache_write"],
                },
                "cache_read_input_tokens": tokens["cache_read"],
                "output_tokens": tokens["output"],
                "server_tool_use": {"web_search_requests": 0},
                "api_key_id": None,
                "workspace_id": None,
                "model": model,
                "service_tier": None,
                "context_window": None,
            }

    return _anthropic_pages(calls, results)


def anthropic_costs(calls: Sequence[BilledCall]) -> list[str]:
    """Pages of `/v1/organizations/cost_report`, by day and description; amounts are cents."""

    def results(of_day: Sequence[BilledCall]) -> Iterator[Any]:
        for model, of_model in _by(of_day, lambda call: call.model):
            for part, kind in TOKEN_TYPES.items():
                yield {
                    "currency": "USD",
                    "amount": f"{_cost(of_model, part) * CENTS:f}",
                    "workspace_id": None,
                    "description": f"{model} Usage - {kind}",
                    "cost_type": "tokens",
                    "context_window": "0-200k",
                    "model": model,
                    "service_tier": "standard",
                    "token_type": kind,
                }

    return _anthropic_pages(calls, results)


def _anthropic_pages(
    calls: Sequence[BilledCall], results: Callable[[Sequence[BilledCall]], Iterable[Any]]
) -> list[str]:
    buckets = [
        {
            "starting_at": f"{begin:%Y-%m-%dT%H:%M:%SZ}",
            "ending_at": f"{begin + DAY:%Y-%m-%dT%H:%M:%SZ}",
            "results": list(results(of_day)),
        }
        for begin, of_day in _days(calls, timezone.utc)
    ]
    return [json.dumps(page) for page in _pages(buckets)]


def openrouter(
    calls: Sequence[BilledCall], shifted: date | None = None, by: timedelta = timedelta(0)
) -> str:
    """The activity by generation, as CSV; the times of one day may be those of another zone."""

    def created(call: BilledCall) -> datetime:
        return call.at + (by if call.day() == shifted else timedelta(0))

    rows = [
        {
            "generation_id": call.identity,
            "created_at": f"{created(call):%Y-%m-%d %H:%M:%S.%f}"[:-3],
            "cost_total": float(call.cost),
            "tokens_prompt": call.bill.input,
            "tokens_completion": call.bill.output,
            "tokens_reasoning": call.bill.reasoning,
            "tokens_cached": call.bill.read,
            "model_permaslug": call.model,
            "provider_name": "OpenAI",
            "cancelled": "false",
            "streamed": "true",
            "finish_reason_normalized": "stop",
            "api_key_name": "agents",
        }
        for call in calls
    ]
    return _csv(ROUTED, rows)


def litellm_rows(calls: Sequence[BilledCall]) -> list[dict[str, Any]]:
    """Rows of `LiteLLM_SpendLogs`, as `/spend/logs` returns them."""
    return [
        {
            "request_id": call.identity,
            "call_type": "acompletion",
            "api_key": "88dc28d0f030c55ed4ab77ed8faf0981",
            "spend": float(call.cost),
            "total_tokens": call.bill.input + call.bill.output,
            "prompt_tokens": call.bill.input,
            "completion_tokens": call.bill.output,
            "startTime": _iso(call.started),
            "endTime": _iso(call.ended),
            "model": UPSTREAM.get(call.model, call.model),
            "model_group": call.model,
            "custom_llm_provider": "gemini" if call.model.startswith("gemini") else "azure",
            "user": "default_user_id",
            "metadata": {
                "additional_usage_values": {
                    "prompt_tokens_details": {"cached_tokens": call.bill.read}
                }
            },
            "cache_hit": "False",
            "end_user": "",
            "session_id": f"session-{call.identity}",
            "status": call.status,
        }
        for call in calls
    ]


def litellm_json(calls: Sequence[BilledCall]) -> str:
    """The answer of `/spend/logs`."""
    return json.dumps(litellm_rows(calls))


def litellm_csv(calls: Sequence[BilledCall]) -> str:
    """The table as PostgreSQL's `COPY … CSV HEADER` writes it."""
    rows = litellm_rows(calls)
    for row in rows:
        row["metadata"] = json.dumps(row["metadata"])
        for name in ("startTime", "endTime"):
            row[name] = row[name].replace("T", " ").removesuffix("Z").rstrip("0").rstrip(".")
    return _csv(list(rows[0]), rows)


def _iso(seconds: float) -> str:
    at = datetime.fromtimestamp(seconds, timezone.utc)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond:06d}Z"


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _cost(calls: Iterable[BilledCall], part: Part) -> Decimal:
    return sum((call.cost_of(part) for call in calls), Decimal(0))


def _by(
    calls: Iterable[BilledCall], key: Callable[[BilledCall], Any]
) -> list[tuple[Any, list[BilledCall]]]:
    groups: defaultdict[Any, list[BilledCall]] = defaultdict(list)
    for call in calls:
        groups[key(call)].append(call)
    return sorted(groups.items())


def _days(
    calls: Sequence[BilledCall], zone: timezone
) -> Iterator[tuple[datetime, list[BilledCall]]]:
    """Every day from the first to the last one, also without calls, with its begin in UTC."""
    of_day: Mapping[date, list[BilledCall]] = dict(_by(calls, lambda call: call.day(zone)))
    day = min(of_day)
    while day <= max(of_day):
        begin = datetime.combine(day, time(), zone)
        yield begin.astimezone(timezone.utc), of_day.get(day, [])
        day += DAY


def _pages(buckets: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(buckets), PAGE_DAYS):
        has_more = start + PAGE_DAYS < len(buckets)
        yield {
            "data": buckets[start : start + PAGE_DAYS],
            "has_more": has_more,
            "next_page": f"page_{start + PAGE_DAYS}" if has_more else None,
        }
