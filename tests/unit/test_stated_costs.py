"""The price of a call by the policy file, by its response, or by the list."""

from __future__ import annotations

from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from otel_limits import Limits, ModelCall, enable
from otel_limits.core.price import Price
from otel_limits.core.price_lookup import Prices
from otel_limits.core.terms import PricingTerms, billable_call
from otel_limits.core.usage import NO_COST
from otel_limits.usage.normaliser import record_of_usage

if TYPE_CHECKING:
    from otel_limits import Event
    from otel_limits.core.price import Quote

NOON = datetime(2026, 11, 20, 12, tzinfo=timezone.utc)
TOKENS = {"prompt_tokens": 1_000_000, "completion_tokens": 0, "total_tokens": 1_000_000}
GPT, GROK, SONAR = "openai/gpt-4o", "grok-3", "sonar-pro"
LISTED = {GPT: "2.5", GROK: "3", SONAR: "3.006"}
"""USD of these tokens on the list."""

CLAUDE = "anthropic/claude-3.7-sonnet"
"""The list has no price of its cached tokens at OpenRouter."""

OWN_KEY = {"upstream_inference_cost": 2.0}


def quote(vendor: str | None, model: str, fields: dict[str, Any], **own: Price) -> Quote:
    """The price of a call whose usage has some fields."""
    record = record_of_usage({**TOKENS, **fields}, "openai", model)
    call = billable_call(model, "openai", record.usage, None, PricingTerms(vendor=vendor), record)
    return Prices(own).quote(call, NOON)


@pytest.mark.parametrize(
    ("vendor", "model", "fields", "amount"),
    [
        ("openrouter", GPT, {"cost": 2.4, "is_byok": False, "cost_details": OWN_KEY}, "2.4"),
        ("openrouter", GPT, {"cost": 0.1, "is_byok": True, "cost_details": OWN_KEY}, "2.1"),
        ("openrouter", GPT, {"cost": 0}, "0"),
        (
            "perplexity",
            SONAR,
            {"cost": {"total_cost": 3.008}, "search_context_size": "low"},
            "3.008",
        ),
        ("x-ai", GROK, {"cost_in_usd_ticks": 25_000_000_001}, "2.5000000001"),
    ],
)
def test_cost_of_the_vendor_that_bills_is_the_price(
    vendor: str, model: str, fields: dict[str, Any], amount: str
) -> None:
    """To the last digit, next to the price of the list."""
    found = quote(vendor, model, fields)
    assert (found.price, found.source, found.version) == (Decimal(amount), "stated", vendor)
    assert (found.stated, found.listed) == (Decimal(amount), Decimal(LISTED[model]))


@pytest.mark.parametrize(
    ("vendor", "model", "fields"),
    [
        # A gateway, behind any address, computes it from its own list.
        (None, "gpt-4o", {"cost": 2.4}),
        (None, "openrouter/openai/gpt-4o", {"cost": 2.4}),
        ("openrouter", GPT, {"x-litellm-response-cost": "2.4"}),
        ("perplexity", SONAR, {"cost": 2.4, "search_context_size": "low"}),
    ],
)
def test_cost_of_a_gateway_is_only_recorded(
    vendor: str | None, model: str, fields: dict[str, Any]
) -> None:
    """It bills nothing."""
    found = quote(vendor, model, fields)
    assert (found.source, found.stated) == ("genai-prices", Decimal("2.4"))
    assert found.price == found.listed == Decimal(LISTED.get(model, "2.5"))


def test_policy_file_precedes_a_stated_cost() -> None:
    """It has what the contract says."""
    found = quote(
        "openrouter", GPT, {"cost": 2.4}, **{GPT: Price(input=Decimal(1), output=NO_COST)}
    )
    assert (found.price, found.source, found.stated) == (1, "policy", Decimal("2.4"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0.01", "not a number"),
        (True, "not a number"),
        (float("nan"), "not a number"),
        (10**400, "more than 100 times what the call can cost"),
        (-0.01, "negative"),
        (251.0, "more than 100 times what the call can cost"),
        (1e9, "more than 100 times what the call can cost"),
    ],
)
def test_amount_that_is_not_a_cost_is_refused(value: object, reason: str) -> None:
    """The list applies as before."""
    found = quote("openrouter", GPT, {"cost": value})
    assert (found.stated_refused, found.stated_by, found.stated) == (reason, "openrouter", None)
    assert (found.price, found.source) == (Decimal("2.5"), "genai-prices")


def test_fee_without_the_amount_of_the_own_key_is_refused() -> None:
    """The maker bills the rest."""
    found = quote("openrouter", GPT, {"cost": 0.1, "is_byok": True})
    assert found.stated_refused.startswith("without the amount")
    assert found.price == Decimal("2.5")


def test_stated_cost_replaces_an_unknown_price() -> None:
    """It contains what no list has, such as searches and cached tokens."""
    cached = {"prompt_tokens_details": {"cached_tokens": 900_000}}
    unknown = quote("openrouter", CLAUDE, cached)
    assert (unknown.price, unknown.at_most) == (None, 3)
    assert unknown.unknown == "no price of its cached tokens is known"
    found = quote("openrouter", CLAUDE, {**cached, "cost": 1.3})
    assert (found.price, found.charge, found.unknown) == (Decimal("1.3"), Decimal("1.3"), None)


def test_cost_in_a_header_of_a_gateway_is_recorded(events: list[Event]) -> None:
    """LangChain hands on headers if asked; LiteLLM's proxy writes the cost in digits."""
    enable(Limits(max_turns=9), observers=[events.append])
    answer = AIMessage(
        "Done.",
        usage_metadata={"input_tokens": 9, "output_tokens": 1, "total_tokens": 10},
        response_metadata={"headers": {"x-litellm-response-cost": "0.0021"}},
    )
    given: Any = {"messages": [("user", "Go.")]}
    create_agent(GenericFakeChatModel(messages=iter([answer])), []).invoke(given)
    (call,) = [event for event in events if isinstance(event, ModelCall)]
    assert (call.stated_cost, call.stated_by) == (Decimal("0.0021"), "litellm_proxy")
    assert call.price_source != "stated"
