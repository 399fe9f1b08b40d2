"""Prices are those of the policy file and of genai-prices, to the last digit, or unknown."""

from __future__ import annotations

import decimal
import importlib.metadata
import math
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from otel_limits import Limits, ModelCall, enable
from otel_limits.core.catalogue import UNREPORTED_RATES, CatalogEntry, current_list, price_of
from otel_limits.core.policy import Policy
from otel_limits.core.price import Price, PriceTier
from otel_limits.core.price_lookup import Prices
from otel_limits.core.terms import BillableCall, PricingTerms, billable_call
from otel_limits.core.usage import MAX_TOKENS, NO_COST, NO_USAGE, Usage, measured
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.registry import RunRegistry
from otel_limits.usage.normaliser import record_of_usage
from tests.price_list import listed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from genai_prices.types import ModelInfo, Provider

    from otel_limits import Event
    from otel_limits.core.price import Quote


GPT = Price(input=Decimal("2.50"), output=Decimal(10), cache_read=Decimal("1.25"))
CALL = Usage(input=1_000, output=100, cache_read=200, cache_write=50)
NOON = datetime(2026, 11, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if genai-prices were not installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


# --- prices of the policy file ----------------------------------------------------------------


def test_cached_tokens_are_a_part_of_the_input() -> None:
    """Each part of the input costs its own price, and an unset one costs as the input."""
    fresh, read, written, output = 750 * 2500, 200 * 1250, 50 * 2500, 100 * 10_000
    expected = Decimal(fresh + read + written + output) / 10**9
    assert Prices({"gpt": GPT}).price("gpt", CALL) == expected


def test_price_that_a_ledger_cannot_store_is_unknown() -> None:
    """An invocation must cost what its calls cost, also in the books."""
    most = Usage(input=922_337_203, output=0)  # below 2**63 picodollars, at 10,000 USD a million
    prices = Prices({"m": Price(input=Decimal(10_000), output=Decimal(10_000))})
    assert prices.price("m", most) == Decimal("9223372.03")
    assert prices.price("m", replace(most, output=100)) is None


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"cache_write": Decimal(6)}, "0.005"),
        ({"per_request": Decimal("0.01")}, "0.015"),
        ({}, "0.005"),
        ({"input": Decimal(0), "output": Decimal(0)}, "0"),
    ],
)
def test_a_price_is_exact(parts: dict[str, Decimal], expected: str) -> None:
    """A thousand tokens in and out, in USD, whatever is priced on top."""
    written: dict[str, Any] = {"input": Decimal(2), "output": Decimal(3), **parts}
    price = Price(**written)
    assert price.of(Usage(input=1_000, output=1_000)) == Decimal(expected)


@given(
    st.tuples(*[st.integers(0, 1_000)] * 4),
    st.tuples(*[st.none() | st.decimals(0, 20, places=3)] * 3),
    st.sampled_from([None, Decimal(7)]),
)
def test_cache_savings_equal_the_extra_cost_without_a_cache(
    parts: tuple[int, ...], prices: tuple[Decimal | None, ...], long: Decimal | None
) -> None:
    """At any read and write rates, and at the tier of the whole prompt."""
    fresh, read, written, kept = parts
    size = fresh + read + written + kept
    tiers = (PriceTier(above=size - 1, input=long),) if long and size > 1 else ()
    of_read, of_write, of_hour = prices
    price = Price(
        input=Decimal(3), output=Decimal(15), tiers=tiers,
        cache_read=of_read, cache_write=of_write, cache_write_1h=of_hour,
    )  # fmt: skip
    plain = Usage(input=size, output=10)
    cached = replace(plain, cache_read=read, cache_write=written + kept, cache_write_1h=kept)
    quote = Prices({"m": price}).quote(BillableCall(model="m", usage=cached))
    if quote.price is None or not read + written + kept:
        assert quote.cache_saved is None
    else:
        assert quote.cache_saved is not None
        assert quote.price + quote.cache_saved == Prices({"m": price}).price("m", plain)


def test_parts_that_exceed_the_whole_have_no_price() -> None:
    """More cached tokens than input is an invalid report that has no price."""
    assert Prices({"gpt": GPT}).price("gpt", Usage(input=10, cache_read=11)) is None


def test_a_call_without_tokens_has_no_price() -> None:
    """Not even that of the request: it may have failed, and its bill is unknown."""
    runs = RunRegistry()
    fee = Price(input=Decimal(1), output=Decimal(1), per_request=Decimal(1))
    runs.prices = Prices({"gpt": fee})
    assert runs.quote(BillableCall(model="gpt", usage=NO_USAGE)).price is None
    assert runs.quote(BillableCall(model="gpt", usage=Usage(output=1))).price is not None


def test_the_decimal_context_of_the_application_does_not_matter() -> None:
    """Amounts stay exact where the application rounds to two digits, or traps what is inexact."""
    expected = Prices({"gpt": GPT}).price("gpt", CALL)
    with decimal.localcontext(decimal.Context(prec=2, traps=[decimal.Inexact])):
        assert Prices({"gpt": GPT}).price("gpt", CALL) == expected


@pytest.mark.parametrize("traps", [[], [decimal.Inexact]])
def test_decimal_context_does_not_change_sums(traps: list[Any]) -> None:
    """A sum of few digits would let an agent spend more; one that fails would be counted again."""
    runs = RunRegistry()
    runs.prices = Prices({"gpt": GPT})
    run = runs.start("a", Policy())
    with decimal.localcontext(decimal.Context(prec=3, traps=traps)):
        for _ in range(3):
            call = run.calls.open(InFlightCall("gpt", 1))
            run.calls.settle(call, measured(Usage(input=123_457, output=1)))
    assert run.tally.cost == 3 * (123_457 * GPT.input + GPT.output) / 10**6
    assert run.tally.input == 3 * 123_457


def test_the_most_specific_glob_decides() -> None:
    """Regardless of its position in the file, an exact name wins over any glob."""
    cents = {"gpt-*": 1, "*": 2, "gpt-4*": 3, "gpt-4o": 4}
    prices = Prices(
        {name: Price(input=Decimal(usd), output=Decimal(0)) for name, usd in cents.items()}
    )
    million = Usage(input=1_000_000)
    found = [prices.price(model, million) for model in ("gpt-4o", "gpt-4o-mini", "gpt-3", "llama")]
    assert found == [4, 3, 1, 2]


@pytest.mark.parametrize(
    "amount", [-1, -0.5, math.nan, "1", True, Decimal("NaN"), Decimal("inf"), None]
)
def test_invalid_price_is_rejected(amount: Any) -> None:
    """The message names the rate and the value."""
    with pytest.raises(
        ValueError, match=r"^output must be USD per million tokens, 0 or more, .*, got "
    ):
        Price(input=Decimal(1), output=amount)


def test_price_of_int_or_float_equals_its_decimal_form() -> None:
    """A float counts by its shortest decimal form, so 0.1 is a tenth."""
    price = Price(input=3, output=0.1)  # type: ignore[arg-type]
    assert price == Price(input=Decimal(3), output=Decimal("0.1"))


def test_price_too_high_for_a_ledger_is_named_as_such() -> None:
    """It is known, but an invocation must cost what its calls cost in the ledger."""
    most = Usage(input=MAX_TOKENS, output=MAX_TOKENS)
    call = billable_call("m", "openai", most, None, PricingTerms())
    found = Prices({"m": Price(input=Decimal(16), output=Decimal(16))}).quote(call)
    assert (found.price, found.unknown) == (
        None, "its price is above 9,223,372 USD, the most that a ledger can store",
    )  # fmt: skip
    assert Prices({"m": Price(input=Decimal(4), output=Decimal(4))}).quote(call).price is not None


# --- without any price ------------------------------------------------------------------------


@pytest.mark.usefixtures("no_package")
def test_without_a_source_every_price_is_unknown() -> None:
    """Prices are never guessed, and a cost limit can refuse unpriced calls."""
    prices = Prices()
    assert prices.price("gpt-4o", CALL) is None
    assert (prices.available, prices.source, prices.version) == (False, "none", "")


@pytest.mark.usefixtures("no_package")
def test_the_policy_alone_is_a_source() -> None:
    """Its models have prices, others have none."""
    prices = Prices({"gpt": GPT})
    assert (prices.available, prices.source) == (True, "policy")
    assert prices.price("claude", CALL) is None


@pytest.mark.usefixtures("no_package")
def test_the_version_follows_the_prices_of_the_policy() -> None:
    """Equal prices have equal versions, one other amount has another."""
    versions = [
        Prices({"gpt": Price(input=Decimal(usd), output=Decimal(1))}).version for usd in (1, 1, 2)
    ]
    assert versions[0] == versions[1] != versions[2]


# --- genai-prices -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def genai() -> ModuleType:
    """The package itself, to compare with."""
    import genai_prices

    return genai_prices


def every_model() -> list[tuple[Provider, ModelInfo]]:
    """Every model of the list that the package brings along."""
    from genai_prices.data_snapshot import get_snapshot

    return [(provider, model) for provider in get_snapshot().providers for model in provider.models]


def as_genai(genai: ModuleType, usage: Usage) -> Any:
    """Write a usage as the package has it."""
    return genai.Usage(
        input_tokens=usage.input,
        output_tokens=usage.output,
        cache_read_tokens=usage.cache_read,
        cache_write_tokens=usage.cache_write,
    )


USAGES = st.builds(
    lambda fresh, read, write, output: Usage(
        input=fresh + read + write, output=output, cache_read=read, cache_write=write
    ),
    *[st.integers(0, 2_000) | st.integers(0, 300_000)] * 4,
)


@listed
@given(st.data(), USAGES, st.datetimes(datetime(2024, 1, 1), datetime(2027, 1, 1)))  # noqa: DTZ001  naive is UTC
def test_prices_of_listed_models_equal_the_packages(
    genai: ModuleType, data: st.DataObject, usage: Usage, when: datetime
) -> None:
    """Tiers, times of day, cached tokens and fees per request: equal to the last digit."""
    provider, model = data.draw(st.sampled_from(every_model()))
    price = price_of(
        CatalogEntry(model, provider.id, is_own=True), BillableCall(model="m", usage=usage), when
    )
    expected = model.calc_price(as_genai(genai, usage), provider, genai_request_timestamp=when)
    if price is not None:
        assert price.of(usage) == expected.total_price
    else:
        rates = expected.model_price
        is_untold = any(getattr(rates, part) for part in UNREPORTED_RATES)
        assert rates.input_mtok is None or rates.output_mtok is None or is_untold


@listed
@pytest.mark.parametrize(
    ("model", "provider", "reference"),
    [
        ("gpt-4o", "openai", "gpt-4o"),
        ("GPT-4o", "openai", "gpt-4o"),
        ("claude-sonnet-4-5", "anthropic", "claude-sonnet-4-5"),
        ("gemini-2.5-flash", "google", "gemini-2.5-flash"),
        ("mistral-small-latest", "mistral", "mistral-small-latest"),
        ("ft:gpt-3.5-turbo-0125:acme::x", "openai", "ft:gpt-3.5-turbo-0125:acme::x"),
        ("amazon.nova-lite-v1:0", "aws", "amazon.nova-lite-v1:0"),
        ("apac.amazon.nova-lite-v1:0", "aws", "amazon.nova-lite-v1:0"),
        (
            "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
            "aws",
            "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
        ),
        (
            "global.anthropic.claude-sonnet-4-5-20250929-v1:0",
            "aws",
            "global.anthropic.claude-sonnet-4-5-20250929-v1:0",
        ),
        (
            "arn:aws:bedrock:eu-west-1:123456789012:inference-profile/eu.amazon.nova-pro-v1:0",
            "aws",
            "eu.amazon.nova-pro-v1:0",
        ),
        ("bedrock/us.amazon.nova-pro-v1:0", "aws", "us.amazon.nova-pro-v1:0"),
        ("gemini/gemini-2.5-flash", "google", "gemini-2.5-flash"),
        ("openai/gpt-4o", "openai", "gpt-4o"),
        ("azure/gpt-4o", "azure", "gpt-4o"),
        ("xai/grok-4", "x-ai", "grok-4"),
        ("openrouter/openai/gpt-4o", "openrouter", "openai/gpt-4o"),
    ],
)
def test_a_model_id_names_its_provider(
    genai: ModuleType, model: str, provider: str, reference: str
) -> None:
    """Ids of the providers themselves, of Bedrock profiles and of gateways are understood."""
    expected = genai.calc_price(
        as_genai(genai, CALL), reference, provider_id=provider, genai_request_timestamp=NOON
    )
    assert expected.total_price > 0
    assert Prices().price(model, CALL, NOON) == expected.total_price


@listed
@pytest.mark.parametrize(
    "model",
    [
        "unknown",
        "",
        "gpt-99-turbo",
        "claude-foo-99",
        "gemini/gemini-3.8-flash-cyber",
        "mistral/mistral-large-latest",
        "xai/grok-code-fast",
        "xai/grok-4-latest",
        "openai/gpt-5.7",
        "anthropic/claude-sonnet-4-9",
        "gemini/gemini-5-pro",
        "openrouter/~openai/gpt-latest",
        "openrouter/fusion",
        "azure_ai/gpt-oss-120b",
        "azure_ai/deepseek-v4-pro",
        "azure_ai/deepseek-v3.2",
        "azure/gpt-4-turbo",
        "azure/eu/o4-mini",
        "llama3",
        "deepseek-r1:8b",
        "deepseek-ai/DeepSeek-R1",
        "mistralai/mistral-nemo",
        "acme/gpt-4o",
        "azure/my-deployment",
        "openrouter/deepseek/deepseek-chat:free",
        "whisper-1",
        "sonar-deep-research",
        "perplexity/sonar-deep-research",
        "us.anthropic.claude-99-v1:0",
        "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc123",
    ],
)
def test_unlisted_price_is_unknown(model: str) -> None:
    """A name that no provider has, a local copy of a model, an empty entry: no price, never 0."""
    assert Prices().price(model, CALL) is None


@listed
def test_tier_depends_on_one_call() -> None:
    """A call beyond a threshold costs more per token than two calls below it."""
    half, whole = Usage(input=150_000), Usage(input=300_000)
    prices = Prices()
    two, one = (prices.price("gemini-2.5-pro", usage, NOON) for usage in (half, whole))
    assert two is not None
    assert one is not None
    assert one > two * 2


@listed
def test_highest_reached_tier_applies() -> None:
    """A threshold is passed, not met, and the prices of all tokens follow the last one passed."""
    from genai_prices.types import ClauseEquals, ModelInfo, ModelPrice, Tier, TieredPrices

    tiers = [Tier(start=10, price=Decimal(2)), Tier(start=20, price=Decimal(3))]
    prices = ModelPrice(input_mtok=TieredPrices(base=Decimal(1), tiers=tiers))
    info = ModelInfo(id="m", match=ClauseEquals(equals="m"), prices=prices)
    listed = CatalogEntry(info, "x", is_own=True)
    sales = [BillableCall(model="m", usage=Usage(input=tokens)) for tokens in (10, 11, 20, 21)]
    found = [price_of(listed, sale, NOON) for sale in sales]
    assert [price and price.input for price in found] == [1, 2, 2, 3]


@listed
def test_price_cache_keeps_a_thousand_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more resets it: a program that makes up model IDs does not fill the memory with them."""
    from genai_prices.data_snapshot import DataSnapshot

    asked: list[str] = []

    def find(_: Any, model: str, *__: Any) -> None:
        asked.append(model)
        raise LookupError

    monkeypatch.setattr(DataSnapshot, "find_provider_model", find)
    prices = Prices()
    for number in (*range(1_000), 0, 999):
        prices.price(f"made-up-{number}", CALL)
    assert asked == [f"made-up-{number}" for number in range(1_000)]
    asked.clear()
    for number in (1_000, 0):
        prices.price(f"made-up-{number}", CALL)
    assert asked == ["made-up-1000", "made-up-0"]


@listed
def test_the_policy_comes_before_the_package() -> None:
    """A model that both know costs what the policy says, others what the package says."""
    prices, package = Prices({"gpt-4o": GPT}), Prices()
    assert prices.price("gpt-4o", CALL) == GPT.of(CALL)
    assert prices.price("o3", CALL, NOON) == package.price("o3", CALL, NOON) is not None


@listed
def test_the_version_is_that_of_the_package() -> None:
    """The ledger can say which list a price came from."""
    installed = importlib.metadata.version("genai-prices")
    assert (Prices().source, Prices().version) == ("genai-prices", installed)
    both = Prices({"gpt": GPT})
    assert both.source == "policy+genai-prices"
    assert both.version.endswith(f"+{installed}")


@pytest.fixture
def newer_list() -> Iterator[Any]:
    """Replace the package's list as its updater does: one provider fewer each time."""
    from genai_prices.data_snapshot import DataSnapshot, get_snapshot, set_custom_snapshot

    providers = get_snapshot().providers

    def replace() -> None:
        kept = [provider for provider in providers if provider.id != "openai"]
        set_custom_snapshot(DataSnapshot(kept, from_auto_update=True, timestamp=NOON))

    yield replace
    set_custom_snapshot(None)


@listed
def test_newer_price_list_is_used_and_named(newer_list: Any) -> None:
    """An application that updates the package's prices gets the new ones, and a new version."""
    prices = Prices()
    assert prices.price("gpt-4o", CALL) is not None
    newer_list()
    assert prices.price("gpt-4o", CALL) is None
    assert prices.version.endswith("@2026-11-01T12:00:00")


@listed
def test_concurrent_threads_get_prices() -> None:
    """All of them get the same price, the first ones too."""
    prices = Prices()
    found: list[Decimal | None] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.extend(prices.price("gpt-4o", CALL, NOON) for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Prices().price("gpt-4o", CALL, NOON)] * 160


@listed
@pytest.mark.usefixtures("faulty")
def test_failing_package_leaves_price_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent does not feel it."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError

    monkeypatch.setattr("genai_prices.data_snapshot.DataSnapshot.find_provider_model", fail)
    assert Prices().price("gpt-4o", CALL) is None


def run(program: str) -> None:
    """Run a program in a separate process; it must succeed."""
    subprocess.run([sys.executable, "-c", program], check=True)


@listed
def test_price_list_is_shared_with_the_application() -> None:
    """It is not made a second time."""
    from genai_prices.data_snapshot import get_snapshot

    assert current_list() is get_snapshot()


@listed
def test_look_ups_do_not_fill_the_memory_of_the_package() -> None:
    """Its own look-ups are unbounded, and model IDs may come from outside."""
    known = vars(current_list())
    sizes = {name: len(each) for name, each in known.items() if hasattr(each, "__len__")}
    prices = Prices()
    for model in ("gpt-4o-2024-11-20", "ft:gpt-4o:mine", "made-up-1", "made-up-2"):
        prices.price(model, CALL)
    assert {name: len(known[name]) for name in sizes} == sizes


# --- costs that a response states -----------------------------------------------------------------

LISTED_AT = datetime(2026, 11, 20, 12, tzinfo=timezone.utc)
TOKENS = {"prompt_tokens": 1_000_000, "completion_tokens": 0, "total_tokens": 1_000_000}
GPT_4O, GROK, SONAR = "openai/gpt-4o", "grok-3", "sonar-pro"
LISTED = {GPT_4O: "2.5", GROK: "3", SONAR: "3.006"}
"""USD of these tokens on the list."""

CLAUDE = "anthropic/claude-3.7-sonnet"
"""The list has no price of its cached tokens at OpenRouter."""

OWN_KEY = {"upstream_inference_cost": 2.0}


def quote(vendor: str | None, model: str, fields: dict[str, Any], **own: Price) -> Quote:
    """The price of a call whose usage has some fields."""
    record = record_of_usage({**TOKENS, **fields}, "openai", model)
    call = billable_call(model, "openai", record.usage, None, PricingTerms(vendor=vendor), record)
    return Prices(own).quote(call, LISTED_AT)


@listed
@pytest.mark.parametrize(
    ("vendor", "model", "fields", "amount"),
    [
        ("openrouter", GPT_4O, {"cost": 2.4, "is_byok": False, "cost_details": OWN_KEY}, "2.4"),
        ("openrouter", GPT_4O, {"cost": 0.1, "is_byok": True, "cost_details": OWN_KEY}, "2.1"),
        ("openrouter", GPT_4O, {"cost": 0}, "0"),
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


@listed
@pytest.mark.parametrize(
    ("vendor", "model", "fields"),
    [
        # A gateway, behind any address, computes it from its own list.
        (None, "gpt-4o", {"cost": 2.4}),
        (None, "openrouter/openai/gpt-4o", {"cost": 2.4}),
        ("openrouter", GPT_4O, {"x-litellm-response-cost": "2.4"}),
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
        "openrouter", GPT_4O, {"cost": 2.4}, **{GPT_4O: Price(input=Decimal(1), output=NO_COST)}
    )
    assert (found.price, found.source, found.stated) == (1, "policy", Decimal("2.4"))


@listed
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
    found = quote("openrouter", GPT_4O, {"cost": value})
    assert (found.stated_refused, found.stated_by, found.stated) == (reason, "openrouter", None)
    assert (found.price, found.source) == (Decimal("2.5"), "genai-prices")


@listed
def test_fee_without_the_amount_of_the_own_key_is_refused() -> None:
    """The maker bills the rest."""
    found = quote("openrouter", GPT_4O, {"cost": 0.1, "is_byok": True})
    assert found.stated_refused.startswith("without the amount")
    assert found.price == Decimal("2.5")


@listed
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
