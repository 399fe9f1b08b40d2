"""Exports of vendors that are made up, in the forms that the vendors document."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

THIRD = 1_793_664_000
"""2026-11-03 00:00 UTC."""
DAY = 86_400
GENERATIONS = (
    "generation_id,created_at,cost_total,byok_usage_inference,tokens_prompt,tokens_completion,"
    "tokens_reasoning,tokens_cached,model_permaslug,provider_name,variant,api_key_name\n"
)
ACTIVITY = (
    "date,model,model_permaslug,endpoint_id,provider_name,usage,byok_usage_inference,requests,"
    "prompt_tokens,completion_tokens,reasoning_tokens\n"
)
LOGS = (
    "request_id,call_type,api_key,spend,total_tokens,prompt_tokens,completion_tokens,startTime,"
    "endTime,model,model_group,custom_llm_provider,cache_hit,metadata,status\n"
)


def openai(*results: Mapping[str, Any], day: int = 0, **page: Any) -> str:
    """A page of OpenAI with one day."""
    begin = THIRD + day * DAY
    bucket = {"object": "bucket", "start_time": begin, "end_time": begin + DAY, "results": results}
    return json.dumps({"object": "page", "data": [bucket], "has_more": False, **page})


def used(**result: Any) -> dict[str, Any]:
    """A result of OpenAI's usage."""
    kind = {"object": "organization.usage.completions.result"}
    return {**kind, "input_tokens": 10, "output_tokens": 2, "num_model_requests": 1, **result}


def paid(value: str, **result: Any) -> dict[str, Any]:
    """A result of OpenAI's costs."""
    amount = {"value": float(value), "currency": "usd"}
    return {"object": "organization.costs.result", "amount": amount, **result}


def anthropic(*results: Mapping[str, Any], **page: Any) -> str:
    """A page of Anthropic with one day."""
    times = {"starting_at": "2026-11-03T00:00:00Z", "ending_at": "2026-11-04T00:00:00Z"}
    return json.dumps({"data": [{**times, "results": results}], "has_more": False, **page})


@dataclass(frozen=True, kw_only=True)
class BilledCall:
    """A call as its vendor has billed it, for 2 USD per million input tokens and 10 of output."""

    at: float
    input: int
    output: int
    model: str = "m-2026-01-01"

    @property
    def price(self) -> Decimal:
        """Its exact price in USD."""
        return self.input * Decimal("0.000002") + self.output * Decimal("0.00001")

    @property
    def day(self) -> int:
        """The day after November 3 on which it was."""
        return int((self.at - THIRD) // DAY)

    def at_time(self) -> str:
        """When it was."""
        return datetime.fromtimestamp(self.at, timezone.utc).isoformat()


def openai_bill(calls: Sequence[BilledCall]) -> list[str]:
    """OpenAI's usage by model, and costs by line item."""
    pages = []
    for day, found in by_day(calls).items():
        sent, received = sum(each.input for each in found), sum(each.output for each in found)
        model = found[0].model
        result = used(
            model=model, input_tokens=sent, output_tokens=received, num_model_requests=len(found)
        )
        amounts = [
            paid(f"{sent * Decimal('0.000002')}", line_item=f"{model}, input"),
            paid(f"{received * Decimal('0.00001')}", line_item=f"{model}, output"),
        ]
        pages += [openai(result, day=day), openai(*amounts, day=day)]
    return pages


def anthropic_bill(calls: Sequence[BilledCall]) -> list[str]:
    """Anthropic's usage by model, and costs by description, each as one page."""
    usage, costs = [], []
    for day, found in by_day(calls).items():
        sent, received = sum(each.input for each in found), sum(each.output for each in found)
        model = {"model": found[0].model}
        tokens = {"uncached_input_tokens": sent, "output_tokens": received}
        usage.append((day, [{**tokens, **model}]))
        amounts = {
            "uncached_input_tokens": sent * Decimal("0.0002"),
            "output_tokens": received * Decimal("0.001"),
        }
        costs.append(
            (
                day,
                [
                    {"amount": str(cents), "currency": "USD", "token_type": kind, **model}
                    for kind, cents in amounts.items()
                ],
            )
        )
    return [anthropic_days(usage), anthropic_days(costs)]


def anthropic_days(days: Iterable[tuple[int, Sequence[Mapping[str, Any]]]]) -> str:
    """A page of Anthropic."""

    def midnight(day: int) -> str:
        return datetime.fromtimestamp(THIRD + day * DAY, timezone.utc).isoformat()

    buckets = [
        {"starting_at": midnight(day), "ending_at": midnight(day + 1), "results": results}
        for day, results in days
    ]
    return json.dumps({"data": buckets, "has_more": False})


def openrouter_days(calls: Sequence[BilledCall]) -> list[str]:
    """OpenRouter's activity by day."""
    lines = [ACTIVITY]
    for found in by_day(calls).values():
        model, price = found[0].model, sum(each.price for each in found)
        sent, received = sum(each.input for each in found), sum(each.output for each in found)
        day = found[0].at_time()[:10]
        lines.append(f"{day},a/m,a/{model},e,A,{price},0,{len(found)},{sent},{received},0\n")
    return ["".join(lines)]


def openrouter_generations(calls: Sequence[BilledCall]) -> list[str]:
    """OpenRouter's activity by generation."""
    lines = [GENERATIONS]
    for number, each in enumerate(calls):
        lines.append(
            f"gen-{number},{each.at_time()},{each.price},0,{each.input},{each.output},0,0,"
            f"a/{each.model},A,standard,key\n"
        )
    return ["".join(lines)]


def litellm_logs(calls: Sequence[BilledCall]) -> list[str]:
    """LiteLLM's spend logs."""
    lines = [LOGS]
    for number, each in enumerate(calls):
        lines.append(
            f"r-{number},acompletion,hash,{each.price},{each.input + each.output},{each.input},"
            f"{each.output},{each.at_time()},{each.at_time()},{each.model},m,openai,,{{}},success\n"
        )
    return ["".join(lines)]


def by_day(calls: Sequence[BilledCall]) -> dict[int, list[BilledCall]]:
    """Calls by day."""
    found: defaultdict[int, list[BilledCall]] = defaultdict(list)
    for each in calls:
        found[each.day].append(each)
    return dict(found)


BILLS: Mapping[str, Callable[[Sequence[BilledCall]], list[str]]] = {
    "openai": openai_bill,
    "anthropic": anthropic_bill,
    "openrouter by day": openrouter_days,
    "openrouter": openrouter_generations,
    "litellm": litellm_logs,
}
"""Writers of bills; the first word is the vendor in the ledger."""
