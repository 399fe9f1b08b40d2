"""Models in a policy file: prices with their tiers, vendors, and local models."""

from __future__ import annotations

from decimal import Decimal

import pytest

from otel_limits.core.price import Price, PriceTier
from otel_limits.core.pricing import PriceOverride
from otel_limits.settings.policy.reader import parse

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
        ("{local: true, price: {input: 1, output: 1}}", "needs either price or local: true."),
        ("{local: false}", "needs either price or local: true."),
        ("{provider: azure}", "needs either price or local: true."),
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
