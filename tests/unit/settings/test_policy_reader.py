"""Models in a policy file, and files that would take long to read."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from otel_limits import enable, stop_of
from otel_limits.cli import main
from otel_limits.core.price import Price, PriceTier, Quote
from otel_limits.core.price_lookup import PriceOverride, Prices
from otel_limits.core.terms import PricingTerms, billable_call
from otel_limits.core.usage import Usage
from otel_limits.settings.policy.file import LOOK_INTERVAL_SECONDS, MAX_BYTES, PolicyFile
from otel_limits.settings.policy.reader import MAX_NODES, parse
from otel_limits.testing import ScriptedModel, endless, uses
from tests.policy_schema import schema
from tests.price_list import listed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeAgent


NOON = datetime(2026, 11, 25, 12, tzinfo=timezone.utc)
USAGE = Usage(input=100_000, output=1_000)


def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make genai-prices look as if it were not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "genai_prices" else found(name)
    )


PRICED = """
models:
  "gpt-4o*":
    provider: azure
    price:
      {input: 2.5, output: 10, cache_read: 1.25, cache_write: 3, cache_write_1h: 5,
       per_request: 0.01, web_search: 0.02, input_audio: 40, output_audio: 80,
       tiers: [{above: 200_000, input: 5, output: 15}]}
  "my-*": {local: true}
"""


def test_a_file_can_say_all_of_a_price() -> None:
    """Every part, tiers, and who sells; or that models run locally."""
    document, mistakes = parse(PRICED, "limits.yaml")
    assert mistakes == ()
    price = Price(
        input=Decimal("2.5"),
        output=Decimal(10),
        cache_read=Decimal("1.25"),
        cache_write=Decimal(3),
        cache_write_1h=Decimal(5),
        per_request=Decimal("0.01"),
        web_search=Decimal("0.02"),
        input_audio=Decimal(40),
        output_audio=Decimal(80),
        tiers=(PriceTier(above=200_000, input=Decimal(5), output=Decimal(15)),),
    )
    assert document.price_list() == {
        "gpt-4o*": PriceOverride(price=price, provider="azure"),
        "my-*": PriceOverride(),
    }
    rows = {row.name: row.value for row in document.rows({}, {})}
    assert rows['models["my-*"].local'] is True
    assert rows['models["gpt-4o*"].price']["tiers"] == [
        {"above": 200_000, "input": Decimal(5), "output": Decimal(15)}
    ]


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("{local: true, price: {input: 1, output: 1}}", "needs a price, as, or local: true."),
        ("{local: false}", "needs a price, as, or local: true."),
        ("{provider: azure}", "needs a price, as, or local: true."),
        ("{local: maybe}", ".local must be true or false"),
        ("{price: {input: 1, output: 1, tiers: {}}}", ".price.tiers must be a list"),
        ("{price: {input: 1, output: 1, tiers: [{input: 1}]}}", ".price.tiers[0] needs above"),
        (
            "{price: {input: 1, output: 1, tiers: [{above: 0}]}}",
            ".price.tiers[0].above must be a whole number of 1 or more, got 0.",
        ),
        (
            "{price: {input: 1, output: 1, tiers: [{above: 1, per_request: 1}]}}",
            ".price.tiers[0].per_request.",
        ),
        (
            "{price: {input: 1, output: 1, tiers: [{above: 9}]}}",
            ".price.tiers[0] needs a price, such as input.",
        ),
        (
            "{price: {input: 1, output: 1, tiers: [{above: 9, input: 2}, {above: 9, input: 3}]}}",
            ".price.tiers[1].above 9 is also used by another tier.",
        ),
        ("{local: true, as: azure/gpt-4o}", "needs a price, as, or local: true."),
        ("{as: 5}", ".as must be text, got 5."),
        ("{provider: '', local: true}", ".provider must not be empty."),
        ("{provider: 5, price: {input: 1, output: 1}}", ".provider must be text, got 5."),
        ("{price: {input: 1, output: 1, cache_read: x}}", ".price.cache_read must be USD per"),
        (
            "{price: {input: 1, output: 1, per_request: -1}}",
            ".price.per_request must be USD for each, 0 or more, such as 0.01, got -1.",
        ),
    ],
)
def test_a_mistake_is_a_sentence(written: str, sentence: str) -> None:
    """With the key that it is in, and no half of it becomes a price."""
    document, mistakes = parse(f"models: {{m: {written}}}", "limits.yaml")
    assert any(sentence in mistake for mistake in mistakes), mistakes
    assert not document.prices


# --- models that are priced as one on the list ----------------------------------------------------


def use_policy(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a policy file."""
    path = tmp_path / "limits.yaml"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))


def quote(written: str, model: str, provider: str, usage: Usage = USAGE, **terms: Any) -> Quote:
    """Price a call by a policy file and the list."""
    document, mistakes = parse(f"models: {{{model!r}: {written}}}", "limits.yaml")
    assert mistakes == ()
    call = billable_call(model, provider, usage, None, PricingTerms(**terms))
    return Prices(document.price_list()).quote(call, NOON)


def listed_price(model: str, provider: str, usage: Usage = USAGE, **terms: Any) -> Decimal | None:
    """Return the price of a model on the list."""
    call = billable_call(model, provider, usage, None, PricingTerms(**terms))
    return Prices().quote(call, NOON).price


PROFILE = "arn:aws:bedrock:us-east-1:111122223333:application-inference-profile/abc"
CLAUDE = "anthropic.claude-sonnet-4-5-20250929-v1:0"


@listed
@pytest.mark.parametrize(
    ("model", "provider", "priced_as", "sold_as"),
    [
        ("my-deployment", "openai", "azure/gpt-4o", ("gpt-4o", "azure")),
        ("my-deployment", "VLLMModel", "azure/gpt-4o", ("gpt-4o", "azure")),
        ("my-deployment", "azure", "gpt-4o", ("gpt-4o", "azure")),
        (PROFILE, "bedrock", f"us.{CLAUDE}", (f"us.{CLAUDE}", "bedrock")),
        (PROFILE, "bedrock", f"global.{CLAUDE}", (f"global.{CLAUDE}", "bedrock")),
        ("litellm_proxy/smart", "litellm", "anthropic/claude-sonnet-4-6",
         ("claude-sonnet-4-6", "anthropic")),
        ("litellm_proxy/fast", "litellm", "bedrock/us.amazon.nova-pro-v1:0",
         ("us.amazon.nova-pro-v1:0", "bedrock")),
        ("smart", "openai", "openrouter/anthropic/claude-sonnet-4.5",
         ("anthropic/claude-sonnet-4.5", "openrouter")),
        ("mine", "together", "meta-llama/Llama-3.3-70B-Instruct-Turbo",
         ("meta-llama/Llama-3.3-70B-Instruct-Turbo", "together")),
    ],
)  # fmt: skip
def test_alias_has_the_price_of_its_model(
    model: str, provider: str, priced_as: str, sold_as: tuple[str, str]
) -> None:
    """The prefix names the seller, else it is that of the call; every tier is that of the list."""
    for usage in (USAGE, replace(USAGE, cache_read=90_000), replace(USAGE, input=300_000)):
        for tier in ("standard", "priority"):
            found = quote(f"{{as: {priced_as!r}}}", model, provider, usage, tier=tier)
            assert found.price == listed_price(*sold_as, usage, tier=tier)
            assert (found.price is None) == (found.source is None)
    standard = quote(f"{{as: {priced_as!r}}}", model, provider)
    assert (standard.source, standard.price is None) == ("genai-prices", False)


@listed
def test_price_beats_alias_and_alias_beats_list() -> None:
    """The price of the file is the contract's."""
    own = quote("{as: azure/gpt-4o, price: {input: 1, output: 1}}", "gpt-4.1", "azure")
    assert (own.source, own.price) == ("policy", Decimal("0.101"))
    assert quote("{as: azure/gpt-4o}", "gpt-4.1", "azure").price == listed_price("gpt-4o", "azure")
    assert listed_price("gpt-4.1", "azure") != listed_price("gpt-4o", "azure")


@listed
def test_alias_applies_to_its_provider_only() -> None:
    """Like a price."""
    written = "{as: azure/gpt-4o, provider: azure}"
    assert quote(written, "mine", "azure").price is not None
    assert quote(written, "mine", "openai").price is None


@listed
def test_alias_keeps_the_place_of_the_call() -> None:
    """A profile in Frankfurt costs more than one in the US, whatever it is named after."""
    nova = "us.amazon.nova-pro-v1:0"
    assert quote(f"{{as: {nova}}}", PROFILE, "bedrock", region="us-east-1").price is not None
    assert quote(f"{{as: {nova}}}", PROFILE, "bedrock", region="eu-central-1").price is None
    europe = nova.replace("us.", "eu.")
    found = quote(f"{{as: {europe}}}", PROFILE, "bedrock")
    assert (found.price, found.unknown) == (None, "no price is known for it in eu")


@listed
def test_alias_of_a_search_model_leaves_the_price_unknown() -> None:
    """The fee of its searches is on no list, whatever the deployment is named."""
    found = quote("{as: openai/gpt-4o-search-preview}", "mine", "openai")
    assert (found.price, found.at_most) == (None, None)
    assert "it may have searched the web" in str(found.unknown)


@listed
def test_alias_of_own_class_needs_a_vendor() -> None:
    """Without a prefix, the seller is that of the call, which is unknown."""
    terms: dict[str, Any] = {"own_class": "VLLMModel"}
    named = quote("{as: openai/gpt-4o}", "gpt-4o", "VLLMModel", **terms)
    assert named.price == listed_price("gpt-4o", "openai")
    bare = quote("{as: gpt-4o}", "mine", "VLLMModel", **terms)
    assert bare.price is None
    assert "`as: openai/gpt-4o` in the policy file names one" in str(bare.unknown)


@listed
@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("azure/gpt4o", "azure/gpt-4o"),
        ("gpt4o", "gpt-4o"),
        ("anthropic/claude-sonet-4-5", "anthropic/claude-sonnet-4-5"),
        ("us.anthropic.claude-sonnet-45", "us.anthropic."),
        ("ollama/llama3", "VENDOR/MODEL"),
        ("''", "VENDOR/MODEL"),
    ],
)
def test_unknown_alias_is_refused_with_the_nearest_names(written: str, near: str) -> None:
    """A misspelled name would leave every call without a price."""
    document, (mistake,) = parse(f"models: {{m: {{as: {written}}}}}", "limits.yaml")
    assert not document.prices
    start = 'limits.yaml:1: models["m"].as must be a model on the price list, got '
    assert mistake.startswith(start)
    assert near in mistake.removeprefix(start), mistake


def test_alias_without_a_list_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no mistake of the file, but such calls have no price, and `check` says so."""
    without_package(monkeypatch)
    found = quote("{as: azure/gpt-4o}", "mine", "azure")
    need = "`as: azure/gpt-4o` in the policy file needs the price list. Run: pip install"
    assert found.price is None
    assert need in str(found.unknown)
    use_policy("models: {mine: {as: azure/gpt-4o}}", tmp_path, monkeypatch)
    assert main(["check"]) == 0
    said = capsys.readouterr()
    assert 'models["mine"].as' in said.out
    assert "azure/gpt-4o" in said.out
    assert 'limits.yaml:1: models["mine"].as needs the price list' in said.err


def test_alias_alone_does_not_price_a_limit_in_usd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a list it prices nothing, so a cap in USD would never be reached."""
    without_package(monkeypatch)
    text = "defaults: {limits: {max_cost_usd: 1}}\nmodels: {mine: {as: azure/gpt-4o}}"
    _, mistakes = parse(text, "limits.yaml")
    (mistake,) = mistakes
    assert "max_cost_usd needs prices, and there are none." in mistake


@listed
def test_alias_counts_toward_a_limit(
    make_agent: MakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """From the policy file to the halt: 200,000 tokens of gpt-4o on Azure cost $0.50."""
    use_policy(
        "defaults: {limits: {max_cost_usd: 0.6, max_turns: 9}}\n"
        "models: {my-deployment: {as: azure/gpt-4o}}",
        tmp_path,
        monkeypatch,
    )
    enable()
    usage = {"inputTokens": 200_000, "outputTokens": 0, "totalTokens": 200_000}
    model = ScriptedModel(endless(uses("search", usage=usage)), "my-deployment")
    result = make_agent(model)("go")
    stop = stop_of(result)
    assert stop is not None
    assert (result.stop_reason, model.calls, stop.cost) == ("max_cost_usd", 2, 1)


def test_schema_permits_a_price_an_as_or_local() -> None:
    """An editor marks the same combinations as the reader."""
    import jsonschema

    def is_valid(model: dict[str, Any]) -> bool:
        found = jsonschema.Draft7Validator(schema()).iter_errors({"models": {"m": model}})
        return not list(found)

    price = {"input": 1, "output": 1}
    assert is_valid({"as": "azure/gpt-4o"})
    assert is_valid({"as": "azure/gpt-4o", "price": price, "provider": "azure"})
    assert not is_valid({"as": "azure/gpt-4o", "local": True})
    assert not is_valid({"provider": "azure"})


# --- files that take long to read -----------------------------------------------------------------


def bomb(section: str, depth: int, width: int) -> str:
    """Write a mapping that repeats the one before it `width` times, `depth` times over."""
    lines = [f"{section}:", "  a0: &a0 {tokens: 5, window: day}"]
    for number in range(1, depth):
        repeated = ", ".join(f"k{each}: *a{number - 1}" for each in range(width))
        lines.append(f"  a{number}: &a{number} {{{repeated}}}")
    return "\n".join(lines)


@pytest.mark.parametrize("section", ["quotas", "defaults", "agents", "models", "tools", "else"])
@pytest.mark.parametrize(("depth", "width"), [(8, 9), (20, 2), (40, 9), (300, 2)])
def test_aliases_cost_what_they_are_written_with(
    tmp_path: Path, section: str, depth: int, width: int
) -> None:
    """Not what they would be written out."""
    path = tmp_path / "policy.yaml"
    path.write_text(bomb(section, depth, width), encoding="utf-8")
    begin = time.process_time()
    mistakes = PolicyFile(str(path)).mistakes
    assert time.process_time() - begin < 2
    assert mistakes == (
        f"{path}:1: The file has more than {MAX_NODES:,} values, counting aliases.",
    )


@pytest.mark.parametrize("section", ["quotas", "agents"])
def test_a_few_aliases_are_fine(tmp_path: Path, section: str) -> None:
    """They are there to be used."""
    said = {"quotas": "{tokens: 5, window: day}", "agents": "{limits: {max_turns: 3}}"}[section]
    names = "".join(f"  n{number}: *first\n" for number in range(200))
    path = tmp_path / "policy.yaml"
    path.write_text(f"{section}:\n  n: &first {said}\n{names}", encoding="utf-8")
    file = PolicyFile(str(path))
    assert file.mistakes == ()
    assert len(getattr(file.document, section)) == 201


def test_nested_aliases_need_no_deep_stack() -> None:
    """The agent that reads the file may be deep in recursion itself."""
    levels = ["l0: &l0 [x]", *(f"l{n}: &l{n} [*l{n - 1}]" for n in range(1, 400))]
    text = "\n".join([*levels, "quotas: {q: {window: day, tokens: *l399}}"])
    expected = parse(text, "limits.yaml")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        assert parse(text, "limits.yaml") == expected
    finally:
        sys.setrecursionlimit(limit)
    assert expected[1][-1].startswith('limits.yaml:401: quotas["q"]: tokens must be a whole number')


def test_recursive_mapping_is_rejected(tmp_path: Path) -> None:
    """It has no end."""
    path = tmp_path / "policy.yaml"
    path.write_text("agents: &a\n  x: *a\n", encoding="utf-8")
    assert any("its own parent" in mistake for mistake in PolicyFile(str(path)).mistakes)


def test_a_file_is_not_longer_than_a_megabyte(tmp_path: Path) -> None:
    """One byte more is a sentence, and nothing of it is parsed."""
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"#" * MAX_BYTES)
    assert PolicyFile(str(path)).mistakes == (f"{path}:1: The file is empty.",)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert PolicyFile(str(path)).mistakes == (
        f"{path} cannot be read: it is longer than 1,000,000 bytes.",
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are none")
@pytest.mark.usefixtures("faulty")
def test_a_fifo_is_a_sentence(tmp_path: Path) -> None:
    """Reading a pipe must not block, at the start or after it replaced a file."""
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump({"defaults": {"limits": {"max_turns": 3}}}), encoding="utf-8")
    now = [0.0]
    file = PolicyFile(str(path), clock=lambda: now[0])
    assert file.mistakes == ()
    path.unlink()
    os.mkfifo(path)
    refused = (f"{path} cannot be read: it is not a regular file.",)
    assert PolicyFile(str(path)).mistakes == refused
    now[0] += LOOK_INTERVAL_SECONDS
    file.refresh()
    newest: tuple[str, ...] = file.mistakes
    assert newest == refused
    assert file.document.defaults["max_turns"].value == 3


@pytest.mark.parametrize("name", ["", "/dev/zero", "/dev/null"])
def test_non_file_path_is_rejected_with_a_message(tmp_path: Path, name: str) -> None:
    """A directory, and devices, one of which never ends."""
    assert len(PolicyFile(name or str(tmp_path)).mistakes) == 1
