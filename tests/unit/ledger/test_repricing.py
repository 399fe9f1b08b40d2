"""Calls of a ledger are priced again by the prices of today, and what they cost before stays."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from otel_limits import enable
from otel_limits.cli.parser import main
from otel_limits.core import catalogue
from otel_limits.core.catalogue import current_list
from otel_limits.core.price import Price, PriceTier
from otel_limits.core.price_lookup import PriceOverride, Prices
from otel_limits.ledger.repricing import RowPrices
from otel_limits.ledger.rows import picodollars
from otel_limits.ledger.schema import DAY_MICROSECONDS
from otel_limits.testing import ScriptedModel, says
from tests.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile


PRICE = "models: {{scripted: {{price: {{input: {}, output: 0}}}}}}\n"
FORMER = ("former_price_pico", "former_price_source", "former_price_version")


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy file that is in force, without a price of the scripted model."""
    path = tmp_path / "limits.yaml"
    path.write_text("models: {other: {price: {input: 1, output: 1}}}\n")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    return path


@pytest.fixture
def recorded(ledger: LedgerFile, policy: Path, make_agent: Callable[..., Any]) -> LedgerFile:
    """A ledger with two calls of 10 input tokens that have no price."""
    assert policy.exists()
    enable()
    for _ in range(2):
        usage = {"inputTokens": 10, "outputTokens": 0, "totalTokens": 10}
        make_agent(ScriptedModel([says("x", usage=usage)]))("go")
    assert [call["price_pico"] for call in ledger.calls()] == [None, None]
    return ledger


def spent(ledger: LedgerFile, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """The audit's answer about cost."""
    capsys.readouterr()
    assert main(["audit", "spend", "--ledger", str(ledger.path), "--format", "json", *options]) == 0
    return json.loads(capsys.readouterr().out)["totals"]["spend"]


def test_unpriced_calls_are_priced(
    recorded: LedgerFile, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calls and their invocations, with source and version; doing it again changes nothing."""
    policy.write_text(PRICE.format(3))
    assert main(["ledger", "reprice", "--dry-run"]) == 0
    assert capsys.readouterr().out == (
        "2 of 2 model calls would be repriced.\n"
        "scripted: 2 calls, 2 without a price; $0.00 before, $0.00006 now.\n"
    )
    assert [call["price_pico"] for call in recorded.calls()] == [None, None]
    assert main(["ledger", "reprice"]) == 0
    for call in recorded.calls():
        assert (call["price_pico"], call["price_source"]) == (30_000_000, "policy")
        assert call["price_version"]
        assert [call[name] for name in FORMER] == [None, "none", None]
    ended = [(row["price_pico"], row["unpriced_calls"]) for row in recorded.invocations()]
    assert ended == [(30_000_000, 0)] * 2
    rows = recorded.calls()
    capsys.readouterr()
    assert main(["ledger", "reprice", "--all"]) == 0
    assert capsys.readouterr().out == (
        "0 of 2 model calls were repriced.\n2 model calls have the current price already.\n"
    )
    assert main(["ledger", "reprice"]) == 0
    assert capsys.readouterr().out == (
        "0 of 0 model calls were repriced.\n"
        "No selected call lacks a price. To replace prices, add --all.\n"
    )
    assert recorded.calls() == rows


def test_stated_cost_is_repriced_by_the_policy_file_only(
    recorded: LedgerFile, policy: Path
) -> None:
    """It precedes the list, and stays with the calls."""
    import sqlite3

    with sqlite3.connect(recorded.path) as connection:
        connection.execute(
            "UPDATE otel_limits_model_calls SET stated_pico = 7, price_basis = ?",
            (json.dumps({"stated_by": "openrouter"}),),
        )
    connection.close()
    assert main(["ledger", "reprice"]) == 0
    prices = {(call["price_pico"], call["price_source"]) for call in recorded.calls()}
    assert prices == {(7, "stated")}
    policy.write_text(PRICE.format(3))
    assert main(["ledger", "reprice", "--all"]) == 0
    prices = {(call["price_pico"], call["price_source"]) for call in recorded.calls()}
    assert prices == {(30_000_000, "policy")}


def test_the_first_price_stays(
    recorded: LedgerFile, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often calls are priced again; an audit can ask by it."""
    policy.write_text(PRICE.format(3))
    assert main(["ledger", "reprice"]) == 0
    policy.write_text(PRICE.format(5))
    assert main(["ledger", "reprice"]) == 0  # none is without a price
    assert {call["price_pico"] for call in recorded.calls()} == {30_000_000}
    assert main(["ledger", "reprice", "--all"]) == 0
    assert {call["price_pico"] for call in recorded.calls()} == {50_000_000}
    assert {call["former_price_source"] for call in recorded.calls()} == {"none"}
    now, former = spent(recorded, capsys), spent(recorded, capsys, "--prices", "recorded")
    assert (now["cost_usd"], now["unpriced_tokens"]) == ("0.000100000000", 0)
    assert (former["cost_usd"], former["unpriced_tokens"]) == (None, 20)


def test_price_no_longer_listed_stays(
    recorded: LedgerFile, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing takes a known price away."""
    policy.write_text(PRICE.format(3))
    assert main(["ledger", "reprice"]) == 0
    policy.write_text("models: {other: {price: {input: 1, output: 1}}}\n")
    capsys.readouterr()
    assert main(["ledger", "reprice", "--all"]) == 0
    assert capsys.readouterr().out == (
        "0 of 2 model calls were repriced.\n"
        "2 model calls keep their prices, as they have no current price: scripted (no price is "
        "known for it). If they were priced by a policy file, name it with --policy or "
        "OTEL_LIMITS_POLICY.\n"
    )
    assert {call["price_pico"] for call in recorded.calls()} == {30_000_000}


def test_calls_of_a_time_can_be_chosen(
    recorded: LedgerFile, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others are not looked at."""
    policy.write_text(PRICE.format(3))
    assert main(["ledger", "reprice", "--until", "2020-01-01"]) == 0
    assert capsys.readouterr().out.startswith("0 of 0 model calls were repriced.\n")
    assert {call["price_pico"] for call in recorded.calls()} == {None}


def test_unknowable_price_stays_unpriced(
    recorded: LedgerFile, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why it was not known when it was recorded is in the row; it is no text by now."""
    import sqlite3

    policy.write_text(PRICE.format(3))
    with sqlite3.connect(recorded.path) as connection:
        basis = json.dumps({"open": ["it has audio, and its text share is unreported"]})
        connection.execute("UPDATE otel_limits_model_calls SET price_basis = ?", (basis,))
    connection.close()
    assert main(["ledger", "reprice"]) == 0
    assert capsys.readouterr().out == (
        "0 of 2 model calls were repriced.\n"
        "2 model calls still have no price: scripted (it has audio, and its text share is "
        "unreported).\n"
        "Set their prices in USD per million tokens in the policy file, and run this again with "
        "--policy: models: {NAME: {price: {input: 1, output: 2}}}\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        ("reprice",),
        ("import", str(ROOT / "tests/emitters/strands.jsonl")),
        ("export", "--focus"),
    ],
    ids=lambda command: command[0],
)
def test_a_mistake_in_the_policy_file_is_a_refusal(
    command: tuple[str, ...],
    recorded: LedgerFile,
    policy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is priced by half of it, or by the list instead."""
    monkeypatch.setenv("OTEL_LIMITS_BILLING_ACCOUNT", "123456789012")
    policy.write_text("models: {scripted: {price: {input: 1}}}\nagent: {}\n")
    calls = recorded.calls()
    assert main(["ledger", *command]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f'otel-limits: {policy}:1: models["scripted"].price needs output: USD per million output '
        "tokens.\n"
        f"otel-limits: {policy}:2: Unknown key agent. Did you mean agents?\n"
    )
    assert recorded.calls() == calls


def test_prices_can_be_of_another_policy_file(
    recorded: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of `--policy` is read instead of that of the environment."""
    (tmp_path / "other.yaml").write_text(PRICE.format(3))
    assert main(["ledger", "reprice", "--policy", str(tmp_path / "other.yaml")]) == 0
    assert "2 of 2 model calls were repriced." in capsys.readouterr().out


# --- the fast price of a row ----------------------------------------------------------------------

of_the_list = pytest.mark.skipif(
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


@of_the_list
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


@of_the_list
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


@of_the_list
@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("count", ["many", 10.5, None])
def test_edited_count_does_not_change_the_price_of_others(count: object) -> None:
    """SQLite stores it; its row has no price, and later ones have theirs."""
    fast = RowPrices(Prices(OWN))
    assert fast.picodollars(Row(10**15, "gpt-4o", "openai", count, 10)) is None
    assert fast.picodollars(Row(10**15, "gpt-4o", "openai", 10, 10, count)) is None
    assert fast.picodollars(Row(10**15, "gpt-4o", "openai", 10, 10)) is not None


@of_the_list
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
