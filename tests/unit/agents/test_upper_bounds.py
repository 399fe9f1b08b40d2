"""A limit or a quota in USD holds although a price is unknown: it counts the upper bound."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool

import otel_limits
from otel_limits import Limits, ModelCall, Stop, enable, stop_of
from otel_limits.core.price import Price
from otel_limits.core.price_lookup import Prices
from otel_limits.core.terms import PricingTerms, billable_call
from otel_limits.core.usage import Usage
from otel_limits.testing import ScriptedModel, endless, says, uses
from otel_limits.usage.normaliser import record_of_usage
from otel_limits.vendors.records import HIDDEN_REGION
from tests.price_list import listed

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.core.events import Event
    from otel_limits.core.price import Quote
    from tests.conftest import MakeAgent


NOON = datetime(2026, 11, 25, 12, tzinfo=timezone.utc)
USAGE = Usage(input=100_000, output=1_000)


def quote(model: str, provider: str, usage: Usage = USAGE, **terms: Any) -> Quote:
    """Price a call by the list."""
    call = billable_call(model, provider, usage, None, PricingTerms(**terms))
    return Prices().quote(call, NOON)


def price(model: str, provider: str, usage: Usage = USAGE, **terms: Any) -> Decimal:
    """Return the known price of a call."""
    found = quote(model, provider, usage, **terms).price
    assert found is not None
    return found


# --- what bounds a price --------------------------------------------------------------------------


@listed
@pytest.mark.parametrize("model", ["gpt-5", "gpt-4o", "o4-mini"])
def test_tier_of_the_vendors_choice_counts_as_the_dearest(model: str) -> None:
    """A call with `auto` may be billed as priority, for twice the price."""
    found = quote(model, "openai", tier="auto")
    tiers = ("standard", "flex", "batch", "priority", "fast")
    known = [quote(model, "openai", tier=tier).price for tier in tiers]
    assert (found.price, found.at_most) == (None, max(filter(None, known)))
    assert found.at_most > price(model, "openai")  # type: ignore[operator]


@listed
def test_unlisted_discount_counts_as_the_standard_tier() -> None:
    """Nothing is known of a discount but that it is one."""
    found = quote("gpt-4", "openai", tier="flex")
    assert (found.price, found.at_most) == (None, price("gpt-4", "openai"))


@listed
@pytest.mark.parametrize(
    ("model", "provider", "region", "factor"),
    [
        ("amazon.nova-pro-v1:0", "bedrock", "eu-central-1", "1.7"),
        ("meta.llama3-70b-instruct-v1:0", "bedrock", "sa-east-1", "1.7"),
        ("gpt-4o", "azure", "eu", "1.2"),
        ("claude-sonnet-4-6", "google", HIDDEN_REGION, "1.1"),
        ("gemini-3-pro-preview", "google", "europe-west4", "1.1"),
    ],
)
def test_place_without_a_price_counts_as_the_dearest_place(
    model: str, provider: str, region: str, factor: str
) -> None:
    """The vendor's highest premium applies, whatever the region costs."""
    found = quote(model, provider, region=region)
    assert (found.price, found.at_most) == (None, price(model, provider) * Decimal(factor))


@listed
def test_cache_read_that_the_lists_dispute_counts_as_input() -> None:
    """No list charges more for a cached token than for a fresh one."""
    found = quote("mistral-tiny", "mistral", Usage(input=1_000, output=10, cache_read=800))
    fresh = price("mistral-tiny", "mistral", Usage(input=1_000, output=10))
    assert (found.price, found.at_most) == (None, fresh)


@listed
@pytest.mark.parametrize(
    ("model", "provider", "usage", "at_most"),
    [
        # The first list has the premium for long prompts, 6 and 22.50; the second has 3 and 15.
        ("claude-sonnet-4-5", "anthropic", Usage(input=300_000, output=2_000), "1.845"),
        # Here the second has the premium: twice the regional 3.30 and, at most, twice 16.50.
        (
            "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
            "bedrock",
            Usage(input=300_000, output=2_000),
            "2.046",
        ),
        # 0.15 and 0.15 on the first list, 0.30 and 0.30 on the second.
        ("mistral-nemo", "mistral", Usage(input=1_000_000, output=1_000_000), "0.6"),
    ],
)
def test_price_that_the_lists_dispute_counts_as_the_dearer_one(
    model: str, provider: str, usage: Usage, at_most: str
) -> None:
    """An agent with a limit in USD has one for long prompts, too."""
    found = quote(model, provider, usage)
    assert (found.price, found.at_most) == (None, Decimal(at_most))


@listed
def test_cache_writes_of_unknown_duration_count_as_one_hour() -> None:
    """They cost twice the input instead of 1.25 times."""
    both = frozenset({"5m", "1h"})
    written = Usage(input=9_000, output=10, cache_write=5_000)
    hours = Usage(input=9_000, output=10, cache_write=5_000, cache_write_1h=5_000)
    found = quote("claude-sonnet-4-6", "anthropic", written, cache_ttls=both)
    assert (found.price, found.at_most) == (None, price("claude-sonnet-4-6", "anthropic", hours))


def test_one_hour_cache_write_without_a_price_counts_as_twice_the_input() -> None:
    """So does a price of the policy file that has only that of 5 minutes."""
    own = Price(input=Decimal(3), output=Decimal(15), cache_write=Decimal("3.75"))
    usage = Usage(input=1_000_000, cache_write=1_000_000, cache_write_1h=1_000_000)
    call = billable_call("m", "anthropic", usage, None, PricingTerms())
    found = Prices({"m": own}).quote(call)
    assert (found.price, found.at_most, found.charge) == (None, Decimal(6), Decimal(6))


def test_audio_without_a_share_counts_as_audio_only() -> None:
    """Text and cached tokens cost less."""
    own = Price(
        input=Decimal(1), output=Decimal(2), input_audio=Decimal(10), output_audio=Decimal(20),
        cache_read=Decimal("0.1"),
    )  # fmt: skip
    usage = Usage(input=1_000_000, output=1_000_000, cache_read=500_000)
    terms = PricingTerms(audio_in=True, audio_out=True)
    found = Prices({"m": own}).quote(billable_call("m", "openai", usage, None, terms))
    assert (found.price, found.at_most) == (None, Decimal(30))


@listed
@pytest.mark.parametrize(
    ("model", "provider", "usage", "at_most"),
    [
        # 7,000 tokens more than the parts are cached input, and writing it costs most.
        (
            "us.anthropic.claude-sonnet-4-20250514-v1:0",
            "bedrock",
            {"inputTokens": 12, "outputTokens": 150, "totalTokens": 7_162},
            "0.028536",
        ),
        # For others, they may as well be output.
        (
            "gpt-4o",
            "openai",
            {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 210},
            "0.00135",
        ),
        # Cached tokens within the input, or next to it.
        (
            "claude-sonnet-4-5",
            "MyModel",
            {"input_tokens": 1_000, "output_tokens": 10, "cache_read_tokens": 400},
            "0.00387",
        ),
    ],
)
def test_unplaced_tokens_count_at_the_highest_rate_of_their_side(
    model: str, provider: str, usage: dict[str, int], at_most: str
) -> None:
    """The books do not know their price, and a limit counts the most that they can cost."""
    record = record_of_usage(usage, provider, model)
    call = billable_call(model, provider, record.usage, None, PricingTerms(), record)
    found = Prices().quote(call, NOON)
    assert record.unplaced is not None
    assert (found.price, found.unknown) == (None, record.unplaced.reason)
    assert found.at_most == Decimal(at_most)


@pytest.mark.parametrize("part", [40, 1_000])
@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": 1_000, "output_tokens": 10, "cache_read_tokens": "{}"},
        {"input_tokens": 1_000, "output_tokens": 10, "quantum_input_tokens": "{}"},
        {"input_tokens": 1_000, "output_tokens": 10, "quantum_output_tokens": "{}"},
        {"input_tokens": 1_000, "output_tokens": 10, "total_tokens": "{}"},
        {"input_tokens": 1_000, "output_tokens": 10, "cached_tokens": "{}", "cache_hits_tokens": 3},
    ],
    ids=lambda usage: list(usage)[2],
)
def test_bound_is_at_least_the_price_of_any_reading(usage: dict[str, Any], part: int) -> None:
    """All of them may be read, written, audio or output, inside the input or outside."""
    rates: dict[str, Any] = {
        "input": 3, "output": 15, "cache_read": Decimal("0.3"), "cache_write": Decimal("3.75"),
        "input_audio": 10, "output_audio": 20,
    }  # fmt: skip
    counts = {name: part if count == "{}" else count for name, count in usage.items()}
    counts["total_tokens"] = counts["total_tokens"] + 1_010 if "total_tokens" in counts else None
    record = record_of_usage(counts, "MyModel", "claude")
    call = billable_call("m", "MyModel", record.usage, None, PricingTerms(), record)
    found = Prices({"m": Price(**rates)}).quote(call)
    readings = [
        Usage(input=1_000 + part * outside, output=10, **{name: part})
        for outside in (0, 1)
        for name in ("cache_read", "cache_write", "input_audio")
    ]
    if "quantum_output_tokens" in usage:
        readings = [Usage(input=1_000, output=10 + part, output_audio=part)]
    known = [Price(**rates).of(each) for each in readings]
    assert found.price is None
    assert found.charge is not None
    assert found.charge >= max(each for each in known if each is not None)


@listed
def test_field_that_a_vendor_adds_halts_no_agent(
    make_agent: MakeAgent, events: list[Event], source: str
) -> None:
    """Its tokens have no price in the books, and the limit counts the most that they can cost."""
    usage = {"inputTokens": 90, "outputTokens": 10, "totalTokens": 100, "quantumInputTokens": 5}
    enable(Limits(max_cost_usd=Decimal(1), max_turns=4), observers=[events.append])
    model = ScriptedModel(
        endless(uses("search", usage=usage)), "gpt-4o", base_url="https://api.openai.com/v1"
    )
    assert make_agent(model)("go").stop_reason == "max_turns"
    calls = [each for each in events if isinstance(each, ModelCall)]
    assert [each.price for each in calls] == [None] * 4
    assert all(each.price_at_most for each in calls)


@listed
@pytest.mark.parametrize(
    "terms",
    [
        {"searches": True},
        {"server_tools": frozenset({"advisor"})},
        {"tier": "priority"},
        {"region": "us-gov-west-1"},
        {"own_class": "VLLMModel"},
        {"audio_in": True},
    ],
    ids=str,
)
def test_price_without_a_documented_bound_has_none(terms: dict[str, Any]) -> None:
    """A number that could be too low would let an agent spend more than its limit."""
    model, vendor = ("amazon.nova-pro-v1:0", "aws") if "region" in terms else ("gpt-4", "openai")
    found = quote(model, vendor, **terms)
    assert (found.price, found.at_most, found.charge) == (None, None, None)
    assert found.unknown is not None


@listed
def test_known_price_has_no_bound() -> None:
    """The price itself counts."""
    found = quote("gpt-4o", "openai")
    assert (found.charge, found.at_most) == (found.price, None)


# --- who counts it --------------------------------------------------------------------------------

EUROPE = "https://bedrock-runtime.eu-central-1.amazonaws.com"
NOVA = "amazon.nova-pro-v1:0"
TOKENS = {"inputTokens": 100_000, "outputTokens": 1_000, "totalTokens": 101_000}
EACH = Decimal("0.14144")
"""USD at most for a call with these tokens: 1.7 times the 0.0832 of US regions."""


def runaway() -> ScriptedModel:
    """Make a model in a region without a price, that never ends."""
    return ScriptedModel(endless(uses("search", usage=TOKENS)), NOVA, base_url=EUROPE)


def use_policy(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a policy file."""
    path = tmp_path / "limits.yaml"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))


@listed
@pytest.mark.parametrize("part", ["limits", "tree"])
def test_limit_in_usd_halts_at_the_upper_bound(
    make_agent: MakeAgent, source: str, events: list[Event], part: str
) -> None:
    """The books keep the price as unknown, and the limit holds: it says "at most"."""
    caps = Limits(max_cost_usd=Decimal("0.4"))
    enable(Limits(max_turns=9), observers=[events.append], **{part: caps} if part == "tree" else {
        "max_cost_usd": Decimal("0.4")
    })  # fmt: skip
    model = runaway()
    result = make_agent(model)("go")
    assert (result.stop_reason, model.calls) == ("max_cost_usd", 3)
    calls = [each for each in events if isinstance(each, ModelCall)]
    assert [(each.price, each.price_at_most) for each in calls] == [(None, EACH)] * 3
    stop = stop_of(result)
    assert stop is not None
    assert (stop.cost, stop.unpriced_calls) == (0, 3)
    assert stop.breach is not None
    assert (stop.breach.observed, stop.breach.at_most) == (3 * EACH, True)
    assert f"at most {3 * EACH} of 0.4 USD used" in stop.sentence
    assert "add a price under models in the policy file to count them exactly" in stop.sentence


@listed
def test_limit_in_usd_alone_does_not_halt_at_a_bounded_price(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """`unpriced` decides only about calls that the limit cannot count at all."""
    enable(Limits(max_cost_usd=Decimal("0.4")))
    model = runaway()
    with caplog.at_level(logging.INFO, "otel_limits"):
        make_agent(model)("go")
    assert model.calls == 3
    (why,) = [each.getMessage() for each in caplog.records if "Cannot price" in each.getMessage()]
    assert "no price is known for it in eu-central-1" in why
    assert "Limits and quotas in USD count its upper bound." in why
    assert "count as 0 USD" not in caplog.text


@listed
def test_known_and_bounded_prices_add_up(make_agent: MakeAgent) -> None:
    """A tree with a model of each kind counts both, and its cost is that of the known price."""
    enable(Limits(max_turns=3), tree=Limits(max_cost_usd=Decimal("0.2")))
    inner = make_agent(
        ScriptedModel([says("x", usage=TOKENS)], NOVA, base_url=EUROPE), name="inner"
    )
    outer = ScriptedModel(
        endless(uses("inner", arguments={"input": "go"}, usage=TOKENS)),
        NOVA,
        base_url=EUROPE.replace("eu-central-1", "us-east-1"),
    )
    result = make_agent(outer, tools=[inner.as_tool()], name="outer")("go")
    stop = stop_of(result)
    assert stop is not None
    assert stop.breach is not None
    known = Decimal("0.0832")
    assert (outer.calls, stop.cost) == (1, known)
    assert (stop.breach.observed, stop.breach.at_most) == (known + EACH, True)


@listed
def test_soft_limit_counts_the_upper_bound(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning comes at the threshold, and says that it is one at most."""
    monkeypatch.setenv("OTEL_LIMITS_WARN_AT", "0.5")
    enable(Limits(max_cost_usd=Decimal("0.4")))
    make_agent(runaway())("go")
    assert f"has used 71% of max_cost_usd: at most {2 * EACH} of 0.4." in caplog.text


@listed
def test_question_and_refusal_say_at_most(make_agent: MakeAgent) -> None:
    """So does the human's question, and the stop after the answer no."""
    enable(Limits(max_cost_usd=Decimal("0.1")), action="ask")
    agent = make_agent(runaway())
    asked = (agent("go").interrupts or [])[0]
    assert f"at most {EACH} of 0.1 USD used" in asked.reason["sentence"]
    answer: Any = [{"interruptResponse": {"interruptId": asked.id, "response": "no"}}]
    stop = stop_of(agent(answer))
    assert stop is not None
    assert f"at most {EACH} of 0.1 USD used" in stop.sentence


@listed
def test_quota_in_usd_charges_the_upper_bound(
    make_agent: MakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """It reserves and settles what the calls cost at most, and refuses when that is used up."""
    use_policy("quotas: {month: {usd: 0.45, window: P366D}}", tmp_path, monkeypatch)
    enable(observers=[events.append])
    model = runaway()
    result = make_agent(model)("go")
    assert (result.stop_reason, model.calls) == ("quota_exceeded", 2)
    assert otel_limits.remaining("month").used == 2 * EACH
    stop = stop_of(result)
    assert stop is not None
    assert "and this call needs at most 0.2" in stop.sentence


@listed
def test_quota_in_usd_charges_a_side_call(
    make_agent: MakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that the loop does not make is charged by its own terms, such as its region."""
    use_policy(
        "models: {free: {local: true}}\nquotas: {month: {usd: 9, window: P366D}}",
        tmp_path,
        monkeypatch,
    )
    enable()
    aside = ScriptedModel([says("x", usage=TOKENS)], NOVA, base_url=EUROPE)

    async def ask() -> str:
        """Ask another model."""
        async for _ in aside.stream([{"role": "user", "content": [{"text": "go"}]}]):
            pass
        return "done"

    outer = ScriptedModel([uses("ask"), says("done")], "free")
    make_agent(outer, tools=[tool(ask)])("go")
    assert otel_limits.remaining("month").used == EACH


def test_quota_in_usd_without_a_price_asks_for_one(
    make_agent: MakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting, or a higher quota, would not help."""
    use_policy(
        "models: {other: {price: {input: 1, output: 1}}}\nquotas: {daily: {usd: 1, window: day}}",
        tmp_path,
        monkeypatch,
    )
    enable()
    stop = stop_of(make_agent(ScriptedModel([says("x")], "unheard-of"))("go"))
    assert stop is not None
    assert "is in USD, and no price for model 'unheard-of' is known" in stop.sentence
    assert stop.sentence.endswith("Add a price under models in the policy file.")
    assert "raise" not in stop.sentence


@listed
def test_quota_in_usd_names_the_entry_for_a_listed_model_of_an_unknown_vendor(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To name its vendor is less work than to write its price."""
    use_policy("quotas: {daily: {usd: 1, window: day}}", tmp_path, monkeypatch)
    enable()
    stop = stop_of(make_agent(ScriptedModel([says("x")], "gpt-4o"))("go"))
    assert stop is not None
    assert "(`as: openai/gpt-4o` in the policy file names one)" in stop.sentence


def test_stop_after_an_upper_bound_survives_the_message(make_agent: MakeAgent) -> None:
    """The marker in the last message keeps that the amount is one at most."""
    from otel_limits.core.events import stop_from_json, stop_to_json
    from otel_limits.core.limits import Breach

    breach = Breach("max_cost_usd", 1, 2, "max_cost_usd", "USD", at_most=True)
    stop = Stop(reason="max_cost_usd", action="halted", breach=breach, breaches=(breach,))
    assert stop_from_json(stop_to_json(stop)).breach == breach
