"""The quotas section of a policy file."""

from __future__ import annotations

import decimal
import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits import ConfigurationError, enable
from otel_limits.quotas.keys import Template
from otel_limits.quotas.quota import MAX_PARTS, Quota, in_unit, parts_of_usd
from otel_limits.quotas.windows import Windows
from otel_limits.settings.policy.reader import parse

if TYPE_CHECKING:
    from pathlib import Path

PRICES = "models: {'*': {price: {input: 1, output: 1}}}\n"
"""The message for a quota in USD without an installed price list."""


def file_with(section: object) -> str:
    """A policy file with these quotas; JSON is YAML."""
    return f"{PRICES}quotas: {json.dumps(section, default=float)}"


def quotas_of(section: object) -> list[Quota]:
    """The quotas of a valid section."""
    document, wrong = parse(file_with(section), "limits.yaml")
    assert wrong == ()
    return [entry.value for entry in document.quotas.values()]


def mistakes(section: object) -> list[str]:
    """All messages about a section."""
    _, wrong = parse(file_with(section), "limits.yaml")
    return [sentence.removeprefix("limits.yaml:2: ") for sentence in wrong]


def test_quota_with_every_key_is_parsed() -> None:
    """Every key is accepted."""
    (quota,) = quotas_of(
        {
            "acme-day": {
                "tokens": 5_000_000,
                "window": "day",
                "time_zone": "Europe/Berlin",
                "key": "{agent}/{baggage.tenant.id}",
                "where": {"agent": "nightly-*", "baggage.tenant.id": "acme"},
                "action": "wrap_up",
                "reserve": "expected",
                "on_exceeded": "wait",
                "max_wait": "5m",
                "grace": "2m",
                "on_store_error": "local",
            }
        }
    )
    assert quota == Quota(
        name="acme-day",
        unit="tokens",
        amount=5_000_000,
        windows=Windows("day", "Europe/Berlin"),
        key=Template("{agent}/{baggage.tenant.id}"),
        where=(("agent", "nightly-*"), ("baggage.tenant.id", "acme")),
        action="wrap_up",
        reserve="expected",
        on_exceeded="wait",
        max_wait=300.0,
        grace=120.0,
        on_store_error="local",
    )
    assert str(quota).endswith(
        "where baggage.tenant.id is acme; action wrap_up; reserve expected; calls wait up to "
        "300 s; grace 120 s; on_store_error local"
    )


def test_an_amount_and_a_window_are_enough() -> None:
    """One count for all calls, refused in an outage, with the action of the agent."""
    (quota,) = quotas_of({"all": {"model_calls": 10, "window": "hour"}})
    assert (quota.key.sources, quota.where, quota.action) == ((), (), None)
    assert (quota.on_exceeded, quota.max_wait, quota.on_store_error) == ("refuse", 30.0, "deny")


@pytest.mark.parametrize("written", ["20", "20.00", "2e1"])
def test_money_is_exact_however_it_is_written(written: str) -> None:
    """YAML numbers come in several forms."""
    document, _ = parse(f"{PRICES}quotas: {{q: {{usd: {written}, window: day}}}}", "limits.yaml")
    assert in_unit("usd", document.quotas["q"].value.amount) == 20


@given(st.decimals(min_value=0, max_value=9_000_000, allow_nan=False, places=12))
def test_no_call_is_cheaper_than_its_price(price: Decimal) -> None:
    """Fractions of a dollar are rounded up, by less than a billionth."""
    counted = Decimal(parts_of_usd(price)) / 10**9
    assert 0 <= counted - price < Decimal("1e-9")


@pytest.mark.parametrize("traps", [[], [decimal.Inexact]])
def test_money_is_exact_whatever_context_the_application_has_set(traps: list[Any]) -> None:
    """The application's decimal context must not affect amounts."""
    price = Decimal("1234.567890123")
    with decimal.localcontext(decimal.Context(prec=3, traps=traps)):
        assert in_unit("usd", parts_of_usd(price)) == price
        (quota,) = quotas_of({"q": {"usd": price, "window": "day"}})
    assert in_unit("usd", quota.amount) == price


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"window": "day"}, "one of tokens, usd, model_calls, invocations, concurrency, got none."),
        ({"tokens": 1, "usd": 1, "window": "day"}, "must have exactly one of tokens, usd"),
        ({"tokens": 1}, "must have a window, such as day."),
        ({"tokens": 0, "window": "day"}, "tokens must be a whole number from 1 to"),
        ({"tokens": True, "window": "day"}, "tokens must be a whole number from 1 to"),
        ({"tokens": 2.5, "window": "day"}, "tokens must be a whole number from 1 to"),
        ({"tokens": "5", "window": "day"}, "tokens must be a whole number from 1 to"),
        ({"tokens": None, "window": "day"}, "tokens must be a whole number from 1 to"),
        ({"tokens": MAX_PARTS + 1, "window": "day"}, "tokens must be a whole number from 1 to"),
        (
            {"usd": 0, "window": "day"},
            "usd must be an amount of USD above 0 and up to 9007199, such as 0.50, got 0.",
        ),
        ({"usd": "nan", "window": "day"}, "usd must be an amount of USD above 0"),
        ({"usd": "much", "window": "day"}, "usd must be an amount of USD above 0"),
        ({"usd": True, "window": "day"}, "usd must be an amount of USD above 0"),
        ({"usd": 10_000_000, "window": "day"}, "usd must be an amount of USD above 0"),
        (
            {"tokens": 1, "window": "daily"},
            "window must be hour, day, week, month, quarter",
        ),
        ({"tokens": 1, "window": 1}, "window must be text, got 1."),
        ({"tokens": 1, "window": "day", "time_zone": "Mars"}, "must be a time zone, e.g."),
        ({"tokens": 1, "window": "PT1H", "time_zone": "Europe/Berlin"}, "time_zone needs"),
        ({"tokens": 1, "window": "day", "key": 1}, "key must be text, got 1."),
        ({"tokens": 1, "window": "day", "key": "tenant"}, "key must consist of agent, model,"),
        (
            {"tokens": 1, "window": "day", "where": "x"},
            "where must be a mapping, such as agent: nig",
        ),
        (
            {"tokens": 1, "window": "day", "where": {}},
            "where must be a mapping, such as agent: nigh",
        ),
        (
            {"tokens": 1, "window": "day", "where": {"agent": 1}},
            'where["agent"] must be text, got 1.',
        ),
        (
            {"tokens": 1, "window": "day", "where": {"x": "y"}},
            'where["x"] must consist of agent, model',
        ),
        ({"tokens": 1, "window": "day", "action": "ask"}, "action must be one of observe, halt"),
        ({"tokens": 1, "window": "day", "on_store_error": "x"}, "one of deny, allow, local"),
        (
            {"tokens": 1, "window": "day", "max_wait": "5m"},
            "has a max_wait but refuses calls immediately: add on_exceeded: wait, or remove",
        ),
        (
            {"tokens": 1, "window": "day", "max_wait": "5m", "on_exceeded": "refuse"},
            "has a max_wait but refuses calls immediately: add on_exceeded: wait, or remove",
        ),
        (
            {"model_calls": 1, "window": "day", "reserve": "expected"},
            "counts model_calls, and each call uses one: remove reserve.",
        ),
        (
            {"concurrency": 1, "reserve": "worst_case"},
            "counts concurrency, and each call uses one: remove reserve.",
        ),
        (
            {"concurrency": 1, "on_lost": "charge"},
            "limits concurrent calls and charges nothing: remove on_lost.",
        ),
        ({"tokens": 1, "window": "day", "on_lost": "x"}, "on_lost must be one of free, charge"),
        (
            {"tokens": 1, "window": "day", "amount": 1},
            'quotas["q"]: Unknown key amount. Valid keys: tok',
        ),
        (
            {"tokens": {"pro": 5}, "window": "day", "plan": "attribute.plan"},
            "tokens must have an amount for calls of any other plan, such as default: 100.",
        ),
        (
            {"tokens": {"pro": 0, "default": 1}, "window": "day", "plan": "attribute.plan"},
            'tokens["pro"] must be a whole number from 1 to',
        ),
        (
            {"tokens": {"pro": 5, "default": 1}, "window": "day"},
            "has amounts by plan but no plan: add the source of a call's plan",
        ),
        (
            {"tokens": 5, "window": "day", "plan": "attribute.plan"},
            "has a plan but one amount for all: write amounts by plan",
        ),
        (
            {"tokens": {"default": 1}, "window": "day", "plan": "tier"},
            "plan must consist of agent, model, baggage.NAME and attribute.NAME, got 'tier'.",
        ),
        (
            {"tokens": 5, "window": "day", "keys": {"acme": 9}},
            "has amounts for single keys but one count for all calls: add a key",
        ),
        (
            {"tokens": 5, "window": "day", "key": "agent", "keys": {"acme": "many"}},
            'keys["acme"] must be a whole number from 1 to',
        ),
        (
            {"tokens": 5, "window": "day", "key": "{agent}/{model}", "keys": {"acme": 9}},
            "Keys of quota 'q' look like '{agent}/{model}', got 'acme'.",
        ),
        (
            {"tokens": 5, "window": "day", "key": "agent", "keys": {"a\u3000b": 9}},
            "a value contains the character '\\u3000', which is not printable.",
        ),
        (
            {"tokens": 5, "window": "day", "key": "baggage.user", "keys": {"#77f94bd05649": 9}},
            "#77f94bd05649 is a hash, so write the value itself.",
        ),
        (
            {"tokens": 5, "window": "day", "key": "{agent}/{model}", "keys": {"a/b/c": 9}},
            "'a/b/c' can be several keys of quota 'q'. In the policy file, separate the parts of",
        ),
        ("5 tokens", "must be a mapping with an amount and a window."),
    ],
)
def test_a_mistake_is_a_sentence_that_names_its_key(entry: Any, sentence: str) -> None:
    """There is one sentence, and it gives the fix."""
    (mistake,) = mistakes({"q": entry})
    assert mistake.startswith('quotas["q"]')
    assert sentence in mistake


def test_all_mistakes_are_reported_together() -> None:
    """For all quotas, in order, each with its line."""
    text = """\
quotas:
  a: {window: day}
  B!: {}
  fine: {tokens: 1, window: day}
  c:
    tokens: -1
    window: x
    max_wait: 5m
  d: {tokens: 1, window: day, key: agent,
      keys: {acme: 0}}
  e: {tokens: 1, window: day, key: agent,
      keys: {a: 1,
             "a\\tb": 2}}
"""
    _, wrong = parse(text, "limits.yaml")
    assert [mistake.split(" must ")[0].split(" has ")[0] for mistake in wrong] == [
        'limits.yaml:2: quotas["a"]',
        'limits.yaml:3: quotas["B!"]',
        'limits.yaml:6: quotas["c"]: tokens',
        'limits.yaml:7: quotas["c"]: window',
        'limits.yaml:8: quotas["c"]',
        'limits.yaml:10: quotas["d"]: keys["acme"]',
        "limits.yaml:13: quotas[\"e\"]: Quota 'e'",
    ]


def test_a_mistake_in_a_file_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the file is rejected as a whole."""
    path = tmp_path / "limits.yaml"
    path.write_text("quotas:\n  daily:\n    window: day\n    tokens: many\n")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    with pytest.raises(ConfigurationError, match=r"limits.yaml:4: quotas\[.daily.\]: tokens must"):
        enable()


@pytest.fixture
def no_price_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a missing genai-prices."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


def test_a_quota_in_usd_needs_prices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_price_list: None
) -> None:
    """It could never be enforced otherwise."""
    path = tmp_path / "limits.yaml"
    path.write_text("quotas: {daily: {window: day, usd: 20}}\n")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    with pytest.raises(ConfigurationError, match="usd needs prices, and there are none"):
        enable()


def test_a_quota_is_among_the_effective_settings() -> None:
    """In words, with its place in the file."""
    text = "quotas:\n  users: {window: hour, tokens: 9, key: agent, where: {model: gpt-*}}\n"
    document, _ = parse(text, "limits.yaml")
    rows = {row.name: (str(row.value), row.source) for row in document.rows({}, {})}
    assert rows == {
        'quotas["users"]': (
            "9 tokens per hour for each agent where model is gpt-*",
            "policy limits.yaml:2",
        )
    }


@pytest.mark.parametrize("name", ["", "Daily", "a b", "a/b", "x" * 65, "{x}"])
def test_a_name_is_plain(name: str) -> None:
    """It becomes a label and a part of store keys."""
    (mistake,) = mistakes({name: {"tokens": 1, "window": "day"}})
    assert "must have a name of up to 64 lower case letters" in mistake


@pytest.mark.parametrize("section", [[{"name": "a"}], "daily", None])
def test_a_section_that_is_no_mapping_is_refused(section: object) -> None:
    """A list of quotas has no names."""
    assert mistakes(section) == ["quotas must map names to quotas, such as daily: {tokens: 5000}."]
