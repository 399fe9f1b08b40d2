"""Pricing terms come from a call's request and response; missing ones are unknown."""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from strands.models import BedrockModel, CacheConfig

from otel_limits import enable
from otel_limits.bindings.strands.readers import model_id
from otel_limits.bindings.strands.requests import terms_of
from otel_limits.core.price import Price, PriceTier
from otel_limits.core.price_lookup import PriceOverride, Prices
from otel_limits.core.terms import (
    BillableCall,
    PricingTerms,
    billable_call,
    billable_call_in_ledger,
)
from otel_limits.core.usage import Usage
from otel_limits.otel import kinds
from otel_limits.testing import ScriptedModel, says
from otel_limits.vendors.records import HIDDEN_REGION
from tests.price_list import listed

if TYPE_CHECKING:
    from pathlib import Path


NOON = datetime(2026, 11, 1, 12, tzinfo=timezone.utc)
MILLION = 1_000_000
SONNET = "claude-sonnet-4-5"
FLAT = Price(input=Decimal(2), output=Decimal(4))


def cost(
    model: str, provider: str, usage: Usage, terms: PricingTerms, tier: str | None = None
) -> Any:
    """USD by the list, or the reason for its absence."""
    quote = Prices().quote(billable_call(model, provider, usage, tier, terms), NOON)
    return quote.unknown if quote.price is None else quote.price


def bedrock(**config: Any) -> BedrockModel:
    """A Bedrock model that is never called."""
    return BedrockModel(model_id="m", region_name="us-east-1", **config)


def asked(module: str, client_args: Any = None, host: str = "", **config: Any) -> Any:
    """A model with the settings of a Strands class whose client is not installed here."""
    members = {"__module__": f"strands.models.{module}", "config": config, "host": host}
    model = type("Model", (), members)()
    if module == "anthropic":
        model.client = SimpleNamespace(base_url=(client_args or {}).get("base_url"))
    else:
        model.client_args = client_args or {}
    return model


HOUR = {"cachePoint": {"type": "default", "ttl": "1h"}}


@listed
@pytest.mark.parametrize(
    ("ttls", "usage", "expected"),
    [
        ({"5m"}, Usage(input=100_000, cache_write=100_000), Decimal("0.375")),
        ({"1h"}, Usage(input=100_000, cache_write=100_000), Decimal("0.6")),
        (
            {"5m"},
            Usage(input=100_000, cache_write=100_000, cache_write_1h=40_000),
            Decimal("0.465"),
        ),
        (
            {"5m", "1h"},
            Usage(input=100_000, cache_write=100_000, cache_write_1h=0),
            Decimal("0.375"),
        ),
        (
            {"5m", "1h"},
            Usage(input=100_000, cache_write=100_000),
            "it wrote to 5-minute and 1-hour caches, in unreported proportions",
        ),
        ({"5m", "1h"}, Usage(input=100_000), Decimal("0.3")),
    ],
)
def test_one_hour_cache_write_costs_more(
    ttls: set[str], usage: Usage, expected: Decimal | str
) -> None:
    """The response's split counts, else the request; mixed requests without a split are unknown."""
    assert cost(SONNET, "anthropic", usage, PricingTerms(cache_ttls=frozenset(ttls))) == expected


@listed
@pytest.mark.parametrize(
    ("model", "provider"),
    [
        ("gpt-5.6-sol", "openai"),
        ("gpt-5.6-sol", "openai_responses"),
        ("openai/gpt-5.6-sol", "litellm"),
    ],
)
def test_default_cache_ttl_adds_no_cost(model: str, provider: str) -> None:
    """Strands ignores lifetimes that OpenAI does not offer, and cache points in messages."""
    config = CacheConfig(ttl="1h")
    said = terms_of(asked(provider, model_id=model, cache_config=config), [HOUR])
    usage = Usage(input=1_000, cache_write=900)
    assert cost(model, provider, usage, said) == cost(model, provider, usage, PricingTerms())
    bought = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}  # OpenRouter's format
    assert terms_of(asked(provider, params=bought)).cache_ttls == {"1h"}


# --- the service tier -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tier"),
    [
        (bedrock(service_tier="flex"), "flex"),
        (bedrock(service_tier="default"), "standard"),
        (bedrock(additional_args={"performanceConfig": {"latency": "optimized"}}), "optimized"),
        (asked("openai", params={"service_tier": "priority"}), "priority"),
        (asked("openai", params={"extra_body": {"service_tier": "auto"}}), "auto"),
        (asked("openai_responses", params={"service_tier": "fast"}), "priority"),
        (asked("anthropic", params={"speed": "fast"}), "fast"),
        (asked("openai"), "standard"),
        (
            asked("anthropic", params={"service_tier": "standard_only"}),
            "standard",
        ),
    ],
)
def test_tier_is_read_from_the_request(model: Any, tier: str) -> None:
    """Under each vendor's name for it; without one it is the standard tier."""
    assert terms_of(model).tier == tier


@listed
@pytest.mark.parametrize(
    ("asked", "answered", "expected"),
    [
        ("standard", None, Decimal("1.25")),
        ("flex", None, Decimal("0.625")),
        ("priority", None, Decimal("2.5")),
        ("auto", "flex", Decimal("0.625")),
        ("priority", "default", Decimal("1.25")),
        ("standard", "ON_DEMAND", Decimal("1.25")),
        ("standard", "TRAFFIC_TYPE_UNSPECIFIED", Decimal("1.25")),
        (
            "auto",
            None,
            "the service tier is the vendor's choice, and its answer does not name it",
        ),
        ("scale", None, "no price is known for it at the service tier scale"),
    ],
)
def test_tier_decides_the_price(asked: str, answered: str | None, expected: Decimal | str) -> None:
    """The response's tier, else the requested one; a tier without a price has none."""
    usage = Usage(input=MILLION)
    assert cost("gpt-5", "openai", usage, PricingTerms(tier=asked), answered) == expected


@listed
def test_tiers_differ_between_vendors_of_a_model() -> None:
    """Azure sells OpenAI's models, at different tiers."""
    unknown = cost("gpt-5", "azure", Usage(input=MILLION), PricingTerms(tier="flex"))
    assert unknown == "no price is known for it at the service tier flex"


# --- regions --------------------------------------------------------------------------------------

EAST5 = "us-east5"
EU = "eu-central-1"
EAST = {"vertex_location": EAST5}


@pytest.mark.parametrize(
    ("model", "region"),
    [
        (asked("anthropic", params={"inference_geo": "us"}), "us"),
        (asked("anthropic", params={"inference_geo": "global"}), None),
        (asked("litellm", client_args=EAST, model_id="vertex_ai/claude-sonnet-4-5"), "us-east5"),
        (asked("litellm", params={"vertex_ai_location": "eu"}), "eu"),
        (asked("litellm", params={"vertex_location": "global"}), None),
        (asked("gemini", client_args={"vertexai": True, "location": "us-east1"}), "us-east1"),
        (asked("openai", client_args={"base_url": "https://eu.api.openai.com/v1"}), "eu"),
        (asked("openai", client_args={"base_url": "https://api.openai.com/v1"}), None),
        (asked("anthropic", {"base_url": "https://us-east5-aiplatform.googleapis.com"}), EAST5),
        (asked("anthropic", {"base_url": "https://aiplatform.eu.rep.googleapis.com/v1/"}), "eu"),
        (asked("anthropic", {"base_url": "https://aiplatform.googleapis.com/v1/"}), None),
        (asked("openai", {"base_url": f"https://bedrock-runtime.{EU}.amazonaws.com/v1"}), EU),
        (asked("openai", {"base_url": f"https://bedrock-mantle.{EU}.api.aws/v1"}), EU),
        (asked("litellm", {"api_base": f"https://bedrock-runtime.{EU}.amazonaws.com"}), EU),
        (asked("litellm", model_id="bedrock/eu.amazon.nova-pro-v1:0"), "eu"),
        (asked("litellm", model_id="bedrock/global.anthropic.claude-opus-4-6-v1"), None),
        (asked("openai"), None),
    ],
)  # fmt: skip
def test_region_is_read_from_the_request(model: Any, region: str | None) -> None:
    """From the model's settings or its address."""
    assert terms_of(model).region == region


CLAUDE = "vertex_ai/claude-sonnet-4-5"
VERTEX = {"GOOGLE_GENAI_USE_VERTEXAI": "True", "GOOGLE_CLOUD_LOCATION": EAST5}
BY_VARIABLES = [
    (asked("litellm", model_id=CLAUDE), {"VERTEXAI_LOCATION": EAST5}, EAST5),
    (asked("litellm", model_id=CLAUDE), {}, "us-central1"),  # LiteLLM's default
    (asked("litellm", model_id=CLAUDE), {"VERTEXAI_LOCATION": "global"}, None),
    (asked("litellm", model_id=CLAUDE, params={"vertex_location": "global"}),
     {"VERTEXAI_LOCATION": EAST5}, None),
    (asked("litellm", model_id="gemini/gemini-3.5-flash"), {"VERTEXAI_LOCATION": EAST5}, None),
    (asked("litellm", model_id="openai/gpt-5.4"), {"VERTEXAI_LOCATION": EAST5}, None),
    (asked("litellm", model_id="bedrock/amazon.nova-lite-v1:0"), {"AWS_REGION": "eu-west-1"},
     "eu-west-1"),
    (asked("litellm", model_id="bedrock/eu-west-3/mistral.mistral-large-2402-v1:0"),
     {"AWS_REGION": "us-east-1"}, "eu-west-3"),
    (asked("litellm", model_id="bedrock/amazon.nova-lite-v1:0"), {}, HIDDEN_REGION),
    (asked("gemini"), VERTEX, EAST5),
    (asked("gemini"), {"GOOGLE_GENAI_USE_ENTERPRISE": "1", "GOOGLE_CLOUD_LOCATION": EAST5}, EAST5),
    (asked("gemini"), {**VERTEX, "GOOGLE_GENAI_USE_ENTERPRISE": "false"}, None),
    (asked("gemini"), {"GOOGLE_CLOUD_LOCATION": EAST5}, None),  # its own API has no regions
    (asked("gemini", client_args={"vertexai": True}), {"GOOGLE_CLOUD_LOCATION": EAST5}, EAST5),
    (asked("gemini", client_args={"vertexai": False}), VERTEX, None),
    (asked("gemini", client_args={"api_key": "x"}), VERTEX, None),
    (asked("gemini", client_args={"location": "global"}), VERTEX, None),
    (asked("openai"), {"OPENAI_BASE_URL": "https://eu.api.openai.com/v1"}, "eu"),
    (asked("openai", client_args={"base_url": "https://api.openai.com/v1"}),
     {"OPENAI_BASE_URL": "https://eu.api.openai.com/v1"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("model", "variables", "region"), BY_VARIABLES)
def test_region_variable_applies_where_the_client_reads_it(
    monkeypatch: pytest.MonkeyPatch, model: Any, variables: dict[str, str], region: str | None
) -> None:
    """If set at the time of the call, by the rules of each vendor's client."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert terms_of(model).region == region


def test_endpoint_variable_sets_the_vendor_where_the_client_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenAI's client, redirected by an environment variable, is not billed by OpenAI."""
    monkeypatch.setenv("OPENAI_BASE_URL", "https://api.x.ai/v1")
    asking = [asked("openai"), asked("openai_responses"), asked("litellm", model_id="openai/m")]
    assert [terms_of(model).vendor for model in asking] == ["x-ai"] * 3
    assert terms_of(asked("litellm", model_id="groq/m")).vendor is None


@pytest.mark.parametrize("module", ["openai", "openai_responses"])
@pytest.mark.parametrize("endpoint", ["bedrock-mantle", "bedrock-runtime"])
def test_openai_endpoint_of_bedrock_has_a_vendor_and_a_region(
    module: str, endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strands resolves its address for each request, from its own setting or AWS' variables."""
    models = importlib.import_module(f"strands.models.{module}")
    make = models.OpenAIModel if module == "openai" else models.OpenAIResponsesModel
    config = {"endpoint": endpoint, "region": EU}
    terms = terms_of(make(model_id="openai.gpt-oss-120b-1:0", bedrock_mantle_config=config))
    assert (terms.vendor, terms.region) == ("aws", EU)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    terms = terms_of(make(model_id="m", bedrock_mantle_config={"endpoint": endpoint}))
    assert (terms.vendor, terms.region) == ("aws", "us-west-2")


@listed
@pytest.mark.parametrize(
    ("model", "attributes", "expected"),
    [
        ("eu.amazon.nova-pro-v1:0", {}, None),
        ("us.amazon.nova-pro-v1:0", {}, "0.08"),
        ("amazon.nova-pro-v1:0", {}, "0.08"),
        ("amazon.nova-pro-v1:0", {"aws.region": EU}, None),
        ("amazon.nova-pro-v1:0", {"aws.region": "us-east-1"}, "0.08"),
        ("amazon.nova-pro-v1:0", {"cloud.region": EU}, "0.08"),
        ("amazon.nova-pro-v1:0", {"server.address": f"bedrock-runtime.{EU}.amazonaws.com"}, None),
        (f"arn:aws:bedrock:{EU}::foundation-model/amazon.nova-pro-v1:0", {}, None),
        ("gpt-5.4-mini", {"gen_ai.system": "openai", "server.address": "eu.api.openai.com"},
         "0.0825"),
        ("grok-4", {"gen_ai.system": "openai", "server.address": "api.x.ai"}, "0.3"),
    ],
)  # fmt: skip
def test_place_of_an_imported_call_decides_its_price(
    model: str, attributes: dict[str, Any], expected: str | None
) -> None:
    """For 100,000 tokens: an address, AWS' region or the ID shows it, not the caller's region."""
    terms = kinds.terms_of({"gen_ai.request.model": model, **attributes}, None)
    found = cost(model, attributes.get("gen_ai.system", "aws.bedrock"), Usage(input=100_000), terms)
    assert (isinstance(found, str), expected) == (True, None) or found == Decimal(str(expected))


@listed
def test_unknown_region_leaves_price_unknown() -> None:
    """Only if prices differ by region: a uniform price applies anyway."""
    model = asked("gemini")
    model._custom_client = SimpleNamespace(vertexai=True)
    terms = terms_of(model)
    assert cost("gemini-2.5-flash", "gemini", Usage(input=100_000), terms) == Decimal("0.03")
    assert "not exposed" in cost("gemini-3.5-flash", "gemini", Usage(input=9), terms)
    model._custom_client.vertexai = False
    assert terms_of(model).region is None


@listed
@pytest.mark.parametrize(
    ("model", "region", "expected"),
    [
        ("amazon.nova-lite-v1:0", "us-west-2", "0.006"),
        ("eu.amazon.nova-lite-v1:0", "eu-central-1", None),
        ("meta.llama3-70b-instruct-v1:0", "sa-east-1", None),
        ("anthropic.claude-sonnet-4-5-20250929-v1:0", "eu-west-1", "0.33"),
        ("global.anthropic.claude-sonnet-4-5-20250929-v1:0", "eu-west-1", "0.3"),
        ("us-gov.anthropic.claude-sonnet-4-5-20250929-v1:0", "us-gov-west-1", None),
    ],
)
def test_bedrock_price_depends_on_listed_region(
    model: str, region: str, expected: str | None
) -> None:
    """For 100,000 tokens; it lists American regions, and others if IDs distinguish them."""
    told = cost(model, "bedrock", Usage(input=100_000), PricingTerms(region=region))
    assert told == (f"no price is known for it in {region}" if not expected else Decimal(expected))


def test_policy_prices_unlisted_region() -> None:
    """Under the name of the vendor, as on the page about prices."""
    own = Prices({"eu.amazon.nova-*": PriceOverride(price=FLAT, provider="aws")})
    terms = PricingTerms(region="eu-central-1")
    billed = billable_call("eu.amazon.nova-pro-v1:0", "bedrock", Usage(input=MILLION), None, terms)
    assert own.quote(billed, NOON).price == FLAT.input


@listed
@pytest.mark.parametrize(
    ("model", "provider", "expected"),
    [
        ("vertex_ai/claude-sonnet-4-5@20250929", "litellm", "0.33"),
        ("vertex_ai/claude-opus-4-6", "litellm", "0.55"),
        ("vertex_ai/claude-3-5-haiku", "litellm", "0.08"),
        ("vertex_ai/gemini-2.5-flash", "litellm", "0.03"),
        ("gpt-5", "openai", "0.125"),
        ("gpt-5.4-mini", "openai", "0.0825"),
        (SONNET, "anthropic", "0.33"),
    ],
)
def test_regional_premium_of_ten_percent_applies(model: str, provider: str, expected: str) -> None:
    """For 100,000 tokens; an older model costs the same everywhere."""
    usage = Usage(input=100_000)
    assert cost(model, provider, usage, PricingTerms(region="us")) == Decimal(expected)
    worldwide = cost(model, provider, usage, PricingTerms())
    assert Decimal(expected) in (worldwide, worldwide * Decimal("1.1"))


@listed
def test_regional_premium_applies_to_cache_and_savings() -> None:
    """The premium applies to all tokens, but not to web searches or the policy file's prices."""
    usage = Usage(input=100_000, cache_read=100_000, output=1_000, web_searches=1)
    billed = billable_call(SONNET, "anthropic", usage, None, PricingTerms(region="us"))
    quote = Prices().quote(billed, NOON)
    assert (quote.price, quote.cache_saved) == (Decimal("0.0595"), Decimal("0.297"))
    own = Prices({SONNET: replace(FLAT, web_search=Decimal("0.01"))})
    assert own.quote(billed, NOON).price == Decimal("0.214")


@listed
def test_unknown_regional_premium_leaves_the_price_unknown() -> None:
    """As without any price source: never a guess."""
    told = cost(
        "vertex_ai/gemini-3-pro-preview", "litellm", Usage(input=9), PricingTerms(region="eu")
    )
    assert told == "no price is known for it in eu"


# --- audio, searches ------------------------------------------------------------------------------


def test_audio_and_search_are_detected_in_the_request() -> None:
    """An audio block, an answer that may be spoken, and the vendors' search tools."""
    audio = [{"role": "user", "content": [{"audio": {"format": "wav", "source": {}}}]}]
    speaks = asked("openai", params={"modalities": ["text", "audio"]})
    responses = asked("openai_responses", params={"tools": [{"type": "web_search"}]})
    search = {"type": "web_search_20250305", "name": "web_search"}
    claude = asked("anthropic", params={"tools": [search]})
    assert terms_of(speaks, audio) == PricingTerms(audio_in=True, audio_out=True)
    assert [terms_of(model).searches for model in (responses, claude, speaks)] == [
        True,
        True,
        False,
    ]


NOVA_TOOL = {"tools": [{"systemTool": {"name": "nova_grounding"}}]}
SEARCHING: list[tuple[str, dict[str, Any]]] = [
    ("openai_responses", {"params": {"tools": [{"type": "x_search"}]}}),
    ("openai", {"params": {"tools": [{"type": "openrouter:web_search"}]}}),
    ("openai", {"params": {"extra_body": {"plugins": [{"id": "web", "max_results": 3}]}}}),
    ("openai", {"params": {"tools": [{"type": "builtin_function", "function": {"name": "$x"}}]}}),
    ("litellm", {"params": {"extra_body": {"enable_search": True}}}),
    ("bedrock", {"additional_args": {"toolConfig": NOVA_TOOL}}),
]
OFFLINE: list[tuple[str, dict[str, Any]]] = [
    ("openai", {"params": {"extra_body": {"plugins": [{"id": "file-parser"}, "web"]}}}),
    ("openai", {"params": {"tools": [{"type": "function", "function": {"name": "x_search"}}]}}),
    ("litellm", {"params": {"extra_body": {"enable_search": False}}}),
    ("bedrock", {"additional_args": {"toolConfig": {"tools": [{"systemTool": {"name": "x"}}]}}}),
]


@pytest.mark.parametrize(("module", "config"), [*SEARCHING, *OFFLINE])
def test_search_by_any_vendor_is_detected(module: str, config: dict[str, Any]) -> None:
    """xAI's, OpenRouter's, Kimi's, Alibaba's and Amazon's; none if it is switched off."""
    assert terms_of(asked(module, **config)).searches == ((module, config) in SEARCHING)


@pytest.mark.parametrize(
    ("model", "vendor"),
    [
        ("openrouter/openai/gpt-4o:online", None),
        ("openai/gpt-oss-20b:free:online", "openrouter"),
        ("openrouter/perplexity/sonar", None),
        ("perplexity/sonar", "openrouter"),
    ],
)
def test_searching_openrouter_model_has_no_price(model: str, vendor: str | None) -> None:
    """Each request or result has a fee, which no price list includes."""
    billed = billable_call(model, "litellm", Usage(input=9), None, PricingTerms(vendor=vendor))
    assert billed.unknowns == ("it may have searched the web, an unreported number of times",)
    assert not billable_call(
        "perplexity/sonar", "litellm", Usage(input=9), None, PricingTerms()
    ).unknowns


GOOGLE_TOOLS = ["google_search", "google_maps", "enterprise_web_search", "googleMaps", "retrieval"]


@pytest.mark.parametrize("tool", GOOGLE_TOOLS)
def test_google_search_leaves_price_unknown(tool: str) -> None:
    """Each is billed by prompt or search, which no usage field reports."""
    model = asked("gemini", gemini_tools=[{tool: {}}])
    assert terms_of(model).searches
    told = cost("gemini-2.5-flash", "gemini", Usage(input=9), terms_of(model))
    assert told == "it may have searched the web, an unreported number of times"


@listed
@pytest.mark.parametrize(
    ("model", "provider"),
    [
        ("gpt-4o-search-preview", "openai"),
        ("openrouter/openai/gpt-4o-mini-search-preview", "litellm"),
        ("gpt-5-search-api-2025-10-14", "openai"),
        ("gemini-2.5-flash-image", "gemini"),
        ("gemini-3-pro-image-preview", "gemini"),
    ],
)
def test_model_with_built_in_search_or_drawing_has_no_price(model: str, provider: str) -> None:
    """A fee per search, and another price for pictures: the amounts of both are unreported."""
    assert isinstance(cost(model, provider, Usage(input=9, output=9), PricingTerms()), str)


SERVER_TOOLS = [
    ("anthropic", "claude-haiku-4-5", "advisor_20260301", "advisor"),
    ("openai", "m", "openrouter:advisor", "openrouter:advisor"),
    ("openai", "m", "openrouter:image_generation", "openrouter:image_generation"),
    ("openai", "m", "openrouter:fusion", "openrouter:fusion"),
    ("openai_responses", "gpt-5", "code_interpreter", "code_interpreter"),
    ("openai_responses", "gpt-5", "image_generation", "image_generation"),
    ("openai_responses", "gpt-5", "file_search", "file_search"),
    ("openai_responses", "gpt-5", "shell", "shell"),
    ("openai_responses", "gpt-5", "made_up_2027_01_01", "made_up"),
    ("litellm", "xai/grok-4", "code_execution", "code_execution"),
    ("litellm", "xai/grok-4", "collections_search", "collections_search"),
    ("bedrock", "amazon.nova-2-lite-v1:0", "nova_code_interpreter", "nova_code_interpreter"),
]


@pytest.mark.parametrize(("provider", "model", "tool", "named"), SERVER_TOOLS)
def test_server_tool_leaves_price_unknown(provider: str, model: str, tool: str, named: str) -> None:
    """A new tool may call another model or bill by item, which the usage we get omits."""
    told: Any = {"type": tool, "name": "x"}
    if provider == "bedrock":
        told = {"systemTool": {"name": tool}}
    terms = terms_of(asked(provider, model_id=model, params={"tools": [told]}))
    assert terms == PricingTerms(server_tools=frozenset({named}))
    found = cost(model, provider, Usage(input=100), terms)
    assert found == f"it may have used the vendor's tool {named}, at an unreported cost"


SCHEMA = {"type": "object", "properties": {"tools": {"type": "array", "items": {"type": "x"}}}}
FREE_TOOLS = [
    ("openai", "gpt-4o", {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}),
    ("openai_responses", "gpt-5", {"type": "custom", "name": "x"}),
    ("openai_responses", "gpt-5", {"type": "mcp", "server_label": "x"}),
    ("openai_responses", "gpt-5", {"type": "shell", "environment": {"type": "local"}}),
    ("anthropic", "claude-haiku-4-5", {"name": "x", "description": "x", "input_schema": SCHEMA}),
    ("anthropic", "claude-haiku-4-5", {"type": "web_fetch_20250910", "name": "web_fetch"}),
    ("anthropic", "claude-haiku-4-5", {"type": "text_editor_20250728", "name": "x"}),
    ("litellm", "anthropic/claude-haiku-4-5", {"type": "code_execution_20250825", "name": "x"}),
    ("litellm", "gemini/gemini-2.5-flash", {"urlContext": {}}),
    ("bedrock", "anthropic.claude-x", {"toolSpec": {"name": "x"}}),
    ("gemini", "gemini-2.5-flash", {"code_execution": {}}),
]


@pytest.mark.parametrize(("provider", "model", "tool"), FREE_TOOLS)
def test_tool_that_costs_only_tokens_keeps_the_price(
    provider: str, model: str, tool: dict[str, Any]
) -> None:
    """Tools that the application runs, and those whose tokens are all that a vendor bills."""
    assert terms_of(asked(provider, model_id=model, params={"tools": [tool]})) == PricingTerms()


def test_openrouter_plugin_leaves_price_unknown() -> None:
    """Some call further models; only what is known to be free keeps the price."""
    plugins = [{"id": "response-healing"}, {"id": "fusion"}]
    model = asked(
        "openai", {"base_url": "https://openrouter.ai/api/v1"}, params={"plugins": plugins}
    )
    assert terms_of(model).server_tools == {"fusion"}


@pytest.mark.parametrize(
    ("edit", "tools"),
    [
        ("compact_20260112", {"compact"}),
        ("clear_tool_uses_20250919", set()),
        ("clear_thinking_20251015", set()),
    ],
)
@pytest.mark.parametrize(
    ("provider", "field"),
    [("anthropic", "params"), ("bedrock", "additional_request_fields"), ("litellm", "params")],
)
def test_summary_by_the_vendor_leaves_price_unknown(
    provider: str, field: str, edit: str, tools: set[str]
) -> None:
    """Its tokens are billed, and are not in the totals; edits that only remove text are free."""
    editing: Any = {"context_management": {"edits": [{"type": edit}]}}
    assert terms_of(asked(provider, **{field: editing})).server_tools == tools


def test_google_file_search_is_free() -> None:
    """In its tool, `file_search` is a key, unlike the type of the same name billed by OpenAI."""
    assert (
        terms_of(asked("gemini", params={"gemini_tools": [{"file_search": {}}]})) == PricingTerms()
    )


@listed
@pytest.mark.parametrize(
    ("model", "usage", "terms", "expected"),
    [
        ("gemini-2.5-flash", Usage(input=MILLION, input_audio=MILLION), {}, Decimal(1)),
        ("gemini-2.5-flash", Usage(input=MILLION, input_audio=0), {"audio_in": True}, "0.3"),
        ("gemini-2.5-flash", Usage(input=MILLION), {"audio_in": True}, "it has audio"),
        ("gemini-2.5-pro", Usage(input=100_000, input_audio=100_000), {}, "0.125"),
        ("gpt-4o-audio-preview", Usage(input=9, input_audio=9), {}, "no price for audio input"),
        ("gpt-4o-audio-preview", Usage(output=9), {"audio_out": True}, "it may have answered"),
        (SONNET, Usage(input=100_000, web_searches=3), {"searches": True}, "0.33"),
        (SONNET, Usage(input=100_000, web_searches=0), {"searches": True}, "0.3"),
        (SONNET, Usage(input=100_000), {"searches": True}, "it may have searched the web"),
    ],
)
def test_audio_and_searches_have_their_own_prices(
    model: str, usage: Usage, terms: dict[str, Any], expected: Any
) -> None:
    """If the response counts them; without a count or a price, the cost is unknown."""
    provider = {"ge": "gemini", "gp": "openai", "cl": "anthropic"}[model[:2]]
    found = cost(model, provider, usage, PricingTerms(**terms))
    if isinstance(found, str):
        assert found.startswith(expected)
    else:
        assert found == Decimal(expected)


# --- vendors --------------------------------------------------------------------------------------


@listed
@pytest.mark.parametrize(
    ("model", "provider", "same_as"),
    [
        ("models/gemini-2.5-flash", "gemini", ("gemini-2.5-flash", "google")),
        ("publishers/google/models/gemini-2.5-flash", "gemini", ("gemini-2.5-flash", "google")),
        (
            "arn:aws:bedrock:us-east-1::foundation-model/amazon.nova-pro-v1:0",
            "bedrock",
            ("amazon.nova-pro-v1:0", "aws"),
        ),
        ("gpt-4o", "az.ai.openai", ("gpt-4o", "azure")),
        ("bedrock/us-east-1/amazon.nova-pro-v1:0", "litellm", ("amazon.nova-pro-v1:0", "aws")),
        ("litellm_proxy/gpt-4o", "litellm", None),
        ("gpt-4o", "sagemaker", None),
        ("claude-sonnet-4-5", "openai", None),
        ("arn:aws:bedrock:us-east-1:1:application-inference-profile/x", "bedrock", None),
    ],
)
def test_model_class_sets_the_vendor(
    model: str, provider: str, same_as: tuple[str, str] | None
) -> None:
    """Resource names are recognized; an alias or an endpoint's name is on no price list."""
    usage = Usage(input=1_000, output=10)
    found = Prices().quote(BillableCall(model=model, provider=provider, usage=usage), NOON).price
    if same_as is None:
        assert found is None
    else:
        billed = BillableCall(model=same_as[0], provider=same_as[1], usage=usage)
        assert found == Prices().quote(billed, NOON).price is not None


@pytest.mark.parametrize(
    ("model", "vendor"),
    [
        (asked("openai", client_args={"base_url": "https://api.x.ai/v1"}), "x-ai"),
        (
            asked("openai", client_args={"base_url": "https://me.openai.azure.com/"}),
            "azure",
        ),
        (asked("openai", client_args={"base_url": "http://localhost:4000"}), None),
        (asked("openai"), None),
        (
            asked(
                "anthropic",
                client_args={"api_key": "k", "base_url": "https://api.z.ai/api/anthropic"},
            ),
            "zai",
        ),
        (asked("ollama", host="https://ollama.com"), "ollama-cloud"),
        (asked("ollama", host="http://localhost:11434"), None),
    ],
)
def test_endpoint_address_sets_the_vendor(model: Any, vendor: str | None) -> None:
    """Clients are pointed at other vendors; a gateway's address reveals none."""
    assert terms_of(model).vendor == vendor


def test_local_models_are_free() -> None:
    """Free, although in no price list; calls to Ollama's cloud service are not local."""
    usage = Usage(input=MILLION)
    prices = Prices({"paid": FLAT})
    local = [
        prices.quote(BillableCall(model=model, provider=provider, usage=usage))
        for model, provider in (("llama3", "ollama"), ("x", "llamacpp"), ("ollama/x", "litellm"))
    ]
    assert [(each.price, each.source) for each in local] == [(0, "local")] * 3
    cloud = BillableCall(model="x", provider="ollama", vendor="ollama-cloud", usage=usage)
    assert prices.quote(cloud).price is None
    for model, provider in (("gpt-oss:120b-cloud", "ollama"), ("ollama/gemma4:cloud", "litellm")):
        assert prices.quote(BillableCall(model=model, provider=provider, usage=usage)).price is None
    assert prices.quote(BillableCall(model="paid", provider="ollama", usage=usage)).price == 2


def test_sagemaker_endpoint_is_named() -> None:
    """The policy file can then give it a price."""

    class Endpoint:
        def __init__(self) -> None:
            self.endpoint_config = {"endpoint_name": "my-endpoint"}

    assert model_id(Endpoint()) == "my-endpoint"


# --- the policy file ------------------------------------------------------------------------------


def test_policy_entry_can_apply_to_one_vendor() -> None:
    """The same model from another vendor costs the list price, or is unknown."""
    prices = Prices(
        {
            "m*": PriceOverride(price=FLAT, provider="Azure"),
            "azure/m*": PriceOverride(price=FLAT, provider="azure"),
            "mine": PriceOverride(),
            "us.anthropic.*": PriceOverride(price=FLAT, provider="bedrock"),
            "arn:*": PriceOverride(price=FLAT, provider="bedrock"),
        }
    )
    usage = Usage(input=MILLION)
    found = [
        prices.quote(BillableCall(model=model, provider=provider, usage=usage)).source
        for model, provider in (
            ("mx", "azure"),
            ("mx", "azure.ai.openai"),
            ("azure/mx", "litellm"),
            ("mx", "openai"),
            ("mine", "openai"),
            ("us.anthropic.claude-x", "strands-agents"),  # as Strands' own spans say
            ("arn:aws:bedrock:us-east-1:1:application-inference-profile/x", "strands-agents"),
            ("mx", "strands-agents"),
        )
    ]
    assert found == ["policy", "policy", "policy", None, "local", "policy", "policy", None]


@pytest.mark.parametrize(
    ("prompt", "expected"), [(100, "0.0002"), (101, "0.000606"), (200, "0.0012"), (201, "0.00201")]
)
def test_a_long_prompt_costs_more_as_a_whole(prompt: int, expected: str) -> None:
    """Above a tier, and of the tiers that it passes the highest, in whatever order they stand."""
    tiers = (PriceTier(above=200, input=Decimal(10)), PriceTier(above=100, input=Decimal(6)))
    price = Price(input=Decimal(2), output=Decimal(4), tiers=tiers)
    assert price.of(Usage(input=prompt)) == Decimal(expected)


def test_a_price_of_the_policy_holds_at_every_tier() -> None:
    """It states the author's own prices, and an hour in a cache costs the write price."""
    price = Price(input=Decimal(2), output=Decimal(4), cache_write=Decimal(3))
    billed = BillableCall(model="m", usage=Usage(input=MILLION), tier="scale")
    assert Prices({"m": price}).quote(billed).price == 2
    hour = Usage(input=MILLION, cache_write=MILLION, cache_write_1h=MILLION)
    assert (price.of(hour), FLAT.of(hour)) == (None, 2)


# --- told and recorded ----------------------------------------------------------------------------


def test_pricing_terms_survive_the_ledger() -> None:
    """Put together from its columns again, a call has the same price, or is as open as before."""
    usage = Usage(input=9, output=3, cache_write=4, cache_write_1h=1, input_audio=2, web_searches=1)
    terms = PricingTerms(vendor="x-ai", tier="flex", audio_out=True)
    billed = billable_call("m", "openai", usage, None, terms)
    again = billable_call_in_ledger("m", "openai", billed.usage, billed.tier, billed.basis)
    assert again == billed
    assert billable_call("m", "openai", Usage(input=1), None, PricingTerms()).basis is None


@pytest.mark.parametrize("basis", ["{", "[]", "5", "[" * 99_999])
def test_unreadable_pricing_terms_leave_the_price_unknown(basis: str) -> None:
    """It is not taken for nothing."""
    billed = billable_call_in_ledger("m", "openai", Usage(input=1), None, basis)
    assert Prices({"m": FLAT}).quote(billed).unknown == "its pricing inputs cannot be read"


def test_why_a_price_is_unknown_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For each model, however many calls there are."""
    from strands import Agent

    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {other: {price: {input: 1, output: 1}}}\n")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    monkeypatch.setenv("OTEL_LIMITS_MAX_COST_USD", "1")
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "9")  # otherwise unpriced calls halt
    enable()
    model = ScriptedModel([says("x"), says("y")], model_id="unheard-of")
    with caplog.at_level(logging.WARNING, "otel_limits"):
        for _ in range(2):
            Agent(model=model, callback_handler=None)("go")
    said = [each.getMessage() for each in caplog.records if "unheard-of" in each.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("Cannot price model 'unheard-of': no price is known for")
