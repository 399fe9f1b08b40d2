"""How a policy file writes quotas."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.errors import ConfigurationError
from otel_limits.quotas.keys import Template
from otel_limits.quotas.quota import MAX_PARTS, Quota, in_unit, parse_quotas, parts_of_usd
from otel_limits.quotas.windows import Windows


def mistakes(section: object) -> tuple[str, ...]:
    """Every sentence that a section earns."""
    with pytest.raises(ConfigurationError) as caught:
        parse_quotas(section)
    return caught.value.mistakes


def test_a_quota_says_who_may_use_how_much_of_what_in_which_window() -> None:
    """Everything that can be written."""
    (quota,) = parse_quotas(
        {
            "acme-day": {
                "tokens": 5_000_000,
                "window": "day",
                "time_zone": "Europe/Berlin",
                "key": "{agent}/{baggage.tenant.id}",
                "where": {"agent": "nightly-*", "baggage.tenant.id": "acme"},
                "action": "wrap_up",
                "on_backend_error": "local",
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
        on_backend_error="local",
    )


def test_an_amount_and_a_window_are_enough() -> None:
    """One count for all, refused while nobody can check it, with the action of the agent."""
    (quota,) = parse_quotas({"all": {"model_calls": 10, "window": "hour"}})
    assert (quota.key.sources, quota.where, quota.action) == ((), (), None)
    assert quota.on_backend_error == "deny"


@pytest.mark.parametrize("written", [20, 20.0, "20", Decimal(20), "20.00"])
def test_money_is_exact_however_it_is_written(written: object) -> None:
    """YAML may hand over any number."""
    (quota,) = parse_quotas({"q": {"usd": written, "window": "day"}})
    assert in_unit("usd", quota.amount) == 20


@given(st.decimals(min_value=0, max_value=9_000_000, allow_nan=False, places=12))
def test_no_call_is_cheaper_than_its_price(price: Decimal) -> None:
    """Parts of a dollar are rounded up, by less than a billionth."""
    counted = Decimal(parts_of_usd(price)) / 10**9
    assert 0 <= counted - price < Decimal("1e-9")


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"window": "day"}, "exactly one of tokens, usd, model_calls, invocations, got none"),
        ({"tokens": 1, "usd": 1, "window": "day"}, "exactly one of .* got tokens, usd"),
        ({"tokens": 1}, "must have a window, such as day"),
        ({"tokens": 0, "window": "day"}, r"quotas\.q\.tokens: must be a whole number from 1"),
        ({"tokens": True, "window": "day"}, "must be a whole number from 1"),
        ({"tokens": 2.5, "window": "day"}, "must be a whole number from 1"),
        ({"tokens": "5", "window": "day"}, "must be a whole number from 1"),
        ({"tokens": MAX_PARTS + 1, "window": "day"}, "must be a whole number from 1"),
        ({"usd": 0, "window": "day"}, r"quotas\.q\.usd: must be an amount of USD from"),
        ({"usd": "nan", "window": "day"}, "must be an amount of USD from"),
        ({"usd": "much", "window": "day"}, "must be an amount of USD from"),
        ({"usd": True, "window": "day"}, "must be an amount of USD from"),
        ({"usd": 10_000_000, "window": "day"}, "must be an amount of USD from"),
        ({"tokens": 1, "window": "week"}, r"quotas\.q\.window: window must be hour, day, month"),
        ({"tokens": 1, "window": 1}, "window and time_zone must be text"),
        ({"tokens": 1, "window": "day", "time_zone": "Mars"}, "time_zone must be a name such as"),
        ({"tokens": 1, "window": "hour", "time_zone": "Europe/Berlin"}, "a time zone needs"),
        ({"tokens": 1, "window": "day", "key": 1}, r"quotas\.q\.key: must be text"),
        ({"tokens": 1, "window": "day", "key": "tenant"}, r"quotas\.q\.key: key must be made of"),
        ({"tokens": 1, "window": "day", "where": "x"}, r"quotas\.q\.where: must map sources"),
        ({"tokens": 1, "window": "day", "where": {"agent": 1}}, "globs in quotes, got 1"),
        ({"tokens": 1, "window": "day", "where": {"x": "y"}}, "key must be made of"),
        ({"tokens": 1, "window": "day", "action": "ask"}, "must be one of observe, halt, wrap_up"),
        ({"tokens": 1, "window": "day", "on_backend_error": "x"}, "one of deny, allow, local"),
        ({"tokens": 1, "window": "day", "amount": 1}, r"quotas\.q\.amount is no setting"),
        ("5 tokens", "must be a mapping with an amount and a window"),
    ],
)
def test_a_mistake_is_a_sentence_that_names_its_key(entry: Any, sentence: str) -> None:
    """There is one sentence, and it says what to write."""
    (mistake,) = mistakes({"q": entry})
    assert mistake.startswith("quotas.q")
    with pytest.raises(ValueError, match=sentence):
        parse_quotas({"q": entry})


def test_all_mistakes_are_told_at_once() -> None:
    """Over all quotas, in order."""
    wrong = mistakes({"a": {"window": "day"}, "B!": {}, "c": {"tokens": -1, "window": "x"}})
    assert [mistake.split(" ")[0].rstrip(":") for mistake in wrong] == [
        "quotas.a",
        "quotas.B!",
        "quotas.c.tokens",
        "quotas.c.window",
    ]


@pytest.mark.parametrize("name", ["", "Daily", "a b", "a/b", "x" * 65, "{x}", 1, None])
def test_a_name_is_plain(name: object) -> None:
    """It becomes a label and a part of keys."""
    (mistake,) = mistakes({name: {"tokens": 1, "window": "day"}})
    assert "must have a name of up to 64 lower case letters" in mistake


def test_a_section_that_is_no_mapping_is_refused() -> None:
    """A list of quotas has no names."""
    assert mistakes([{"name": "a"}]) == ("quotas must map names to quotas, got [{'name': 'a'}].",)
