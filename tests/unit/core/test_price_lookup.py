"""The fast price of a row is that of `Prices.quote`, to the picodollar."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from otel_limits.core import catalogue
from otel_limits.core.catalogue import current_list
from otel_limits.core.price import Price, PriceTier
from otel_limits.core.price_lookup import PriceOverride, Prices
from otel_limits.ledger.repricing import RowPrices
from otel_limits.ledger.rows import picodollars
from otel_limits.ledger.schema import DAY_MICROSECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="genai-prices cannot be installed on Python 3.10"
)

CALLS: Final = 500

OWN: Final[dict[str, PriceOverride | Price]] = {
    "own-*": Price(
        # A third in another currency: not a whole number of picodollars per token.
        input=Decimal("1.23456789"),
        output=Decimal("9.87654321"),
        cache_read=Decimal("0.1"),
        cache_write=Decimal(2),
        tiers=(PriceTier(above=1_000, input=Decimal(5)), PriceTier(above=9_000, output=Decimal(7))),
        per_request=Decimal("0.0125"),
    ),
    "deployment": PriceOverride(priced_as="azure/gpt-4o"),
    "mine": PriceOverride(),
}
SOLD: Final = (
    *(("own-model", "openai"), ("deployment", "azure"), ("mine", "openai"), ("llama3", "ollama")),
    *(("no-such-model", "openai"), ("gpt-4o", "openai"), ("gpt-4o-audio-preview", "openai")),
    *(("gpt-5.4", "openai"), ("claude-sonnet-4-5", "anthropic"), ("gemini-2.5-pro", "google")),
    *(("deepseek-chat", "deepseek"), ("deepseek-reasoner", "deepseek"), ("grok-4", "x-ai")),
    *(("us.anthropic.claude-sonnet-4-5-20250929-v1:0", "bedrock"), ("sonar-pro", "perplexity")),
    ("ft:gpt-4o-mini-2024-07-18:org::id", "openai"),
)
DATED: Final = (
    ("o3", "openai", date(2025, 6, 10)),
    ("grok-4.20", "x-ai", date(2026, 4, 30)),
    ("mistral-large-4", "mistral", date(2026, 10, 29)),
)
"""Models, and days on which their prices changed."""
TIERS: Final = (None, None, None, "priority", "batch", "flex", "auto")
BASES: Final[Sequence[dict[str, Any]]] = (
    *({}, {}, {}, {"region": "eu-central-1"}, {"region": "us"}, {"vendor": "azure"}),
    *({"own_class": "Mine"}, {"web_searches": 2}, {"input_audio": 5}, {"output_audio": 3}),
    *({"search_context_size": "low"}, {"search_context_size": "high"}),
    {"open": ["its pricing inputs are unreported"]},
)


class Row(NamedTuple):
    """The columns that a price depends on."""

    at_us: int
    model: str
    provider: str
    input_tokens: Any
    output_tokens: Any
    cache_read_tokens: Any = 0
    cache_write_tokens: Any = 0
    cache_write_1h_tokens: Any = None
    tier: str | None = None
    price_basis: str | None = None
    stated_pico: int | None = None


def rows(prices: Prices) -> Iterator[Row]:
    """Random calls, many of them next to a step, each followed by similar ones."""
    rolled = random.Random(35)  # noqa: S311
    steps = prices.steps()
    assert steps is not None
    assert steps.dates
    assert steps.times
    for _ in range(CALLS):
        row = _row(rolled, steps)
        read = row.cache_read_tokens and rolled.randrange(1, row.cache_read_tokens + 1)
        yield from (
            row,
            row._replace(cache_read_tokens=read, output_tokens=row.output_tokens * 2),
            row._replace(input_tokens=row.input_tokens + 1),
            row._replace(at_us=row.at_us + 1),
            row._replace(cache_read_tokens=0),
            row._replace(cache_write_1h_tokens=row.cache_write_tokens),
            row._replace(tier=rolled.choice(TIERS)),
            row._replace(provider="openrouter"),
        )
    for model, provider, day in DATED:
        at = microseconds(datetime.combine(day, time(), timezone.utc))
        # At the same time of day.
        yield from (Row(each, model, provider, 100, 10) for each in (at - DAY_MICROSECONDS, at))


def microseconds(moment: datetime) -> int:
    """Return a time as it is stored."""
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)


def _row(rolled: random.Random, steps: catalogue.PriceSteps) -> Row:
    day = rolled.choice(steps.dates) + timedelta(days=rolled.randint(-1, 1))
    at = datetime.combine(day, rolled.choice((time(), *steps.times)), timezone.utc)
    at += timedelta(microseconds=rolled.choice((-1, 0, 1, rolled.randrange(10**10))))
    given = rolled.choice(
        (0, rolled.randrange(2_000), rolled.choice(steps.prompts) + rolled.randint(-1, 1))
    )
    # Now and then parts are more than the whole, as in a row that was edited.
    read, written = (
        rolled.choice((0, 0, rolled.randrange(given + 1) // 2, rolled.randrange(given + 9)))
        for _ in range(2)
    )
    model, provider = rolled.choice(SOLD)
    basis = rolled.choice(BASES)
    return Row(
        at_us=microseconds(at),
        model=model,
        provider=provider,
        input_tokens=given,
        output_tokens=rolled.choice((0, rolled.randrange(5_000))),
        cache_read_tokens=read,
        cache_write_tokens=written,
        cache_write_1h_tokens=rolled.choice((None, 0, max(written, 0) // 2, written)),
        tier=rolled.choice(TIERS),
        price_basis=json.dumps(basis) if basis else None,
    )


def test_fast_price_equals_the_quote() -> None:
    """Of any usage, at any time: tiers, dates, hours, regions, the policy file, no price."""
    prices = Prices(OWN)
    fast = RowPrices(prices)
    of_model: Counter[str] = Counter()
    for row in rows(prices):
        found = fast.picodollars(row)
        assert found == picodollars(fast.quote(row).price), row
        of_model[row.model] += found is not None
    # Nothing was compared if all were unknown.
    assert {model for model, _ in SOLD if of_model[model] < 9} == {"no-such-model"}


def test_similar_rows_are_quoted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up takes twenty times as long as a multiplication."""
    fast = RowPrices(Prices(OWN))
    asked = Counter[str]()
    quote = Prices.quote

    def counted(prices: Prices, call: Any, when: Any = None) -> Any:
        asked[call.model] += 1
        return quote(prices, call, when)

    monkeypatch.setattr(Prices, "quote", counted)
    for model in ("gpt-4o", "own-model", "no-such-model", "mine"):
        for tokens in range(1, 200):
            fast.picodollars(Row(10**15, model, "openai", tokens, 2 * tokens))
    assert set(asked.values()) == {1}


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("count", ["many", 10.5, None])
def test_edited_count_does_not_change_the_price_of_others(count: object) -> None:
    """SQLite stores it; its row has no price, and later ones have theirs."""
    fast = RowPrices(Prices(OWN))
    assert fast.picodollars(Row(10**15, "gpt-4o", "openai", count, 10)) is None
    assert fast.picodollars(Row(10**15, "gpt-4o", "openai", 10, 10, count)) is None
    assert fast.picodollars(Row(10**15, "gpt-4o", "openai", 10, 10)) is not None


def test_list_with_unknown_conditions_is_quoted_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer list may have prices that depend on something else."""

    class Weekend:
        def active(self, when: datetime) -> bool:
            return when.weekday() >= 5

    changed = current_list()
    model = next(
        model
        for provider in changed.providers
        for model in provider.models
        if isinstance(model.prices, list)
    )
    assert isinstance(model.prices, list)
    monkeypatch.setattr(model.prices[-1], "constraint", Weekend())
    monkeypatch.setattr(catalogue, "current_list", lambda: changed)
    prices = Prices(OWN)
    assert prices.steps() is None
    row = Row(10**15, "gpt-4o", "openai", 10, 10)
    assert RowPrices(prices).picodollars(row) == picodollars(RowPrices(prices).quote(row).price)
