"""Calls of a ledger are priced again by the prices of today, and what they cost before stays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import enable
from otel_limits.cli.parser import main
from otel_limits.testing import ScriptedModel, says
from tests.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
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
    assert capsys.readouterr().out == "0 of 2 model calls were repriced.\n"
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
    assert capsys.readouterr().out == "0 of 2 model calls were repriced.\n"
    assert {call["price_pico"] for call in recorded.calls()} == {30_000_000}


def test_calls_of_a_time_can_be_chosen(
    recorded: LedgerFile, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others are not looked at."""
    policy.write_text(PRICE.format(3))
    assert main(["ledger", "reprice", "--until", "2020-01-01"]) == 0
    assert capsys.readouterr().out == "0 of 0 model calls were repriced.\n"
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
        "2 model calls still have no price: scripted.\n"
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
