"""Halted invocations needed at least what they had: `suggest` and `backtest` say no more."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.audit.suggest import UsageSamples, policy_file
from otel_limits.audit.survival import curve, interval, percentile
from otel_limits.cli import main
from otel_limits.core.limits import Breach
from tests.ledger.book import Call, Entry, write

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

Output = pytest.CaptureFixture[str]

CAP = 5
HALT: dict[str, Any] = {
    "reason": "max_turns",
    "action": "halted",
    "breach": Breach("max_turns", CAP, CAP, "max_turns", "turns"),
}


def entries(ended: list[int], halted: int) -> list[Entry]:
    """Invocations with these numbers of turns, and some halted at the cap."""
    return [
        *(Entry(calls=[Call()] * turns) for turns in ended),
        *(Entry(calls=[Call()] * CAP, **HALT) for _ in range(halted)),
    ]


def suggested(capsys: Output) -> tuple[str, dict[str, Any]]:
    """The policy file, as text and read."""
    assert main(["audit", "suggest"]) == 0
    text = capsys.readouterr().out
    return text, yaml.safe_load(text)["agents"]


def test_a_cap_that_was_too_low_suggests_nothing(ledger: LedgerFile, capsys: Output) -> None:
    """Of 40 invocations 18 were halted at 5 turns: what 99 % need is not 5 and some headroom."""
    write(ledger.address, *entries([1, 2, 3, 4, 5] * 4 + [3, 4], halted=18))
    text, agents = suggested(capsys)
    assert agents == {}
    assert "18 of 40 invocations were halted or killed" in text
    assert "above 5 turns or 600 tokens" in text


def test_half_of_a_thousand_halted_at_fifteen_turns() -> None:
    """459 of 1,000 were halted there: the 99th percentile is unknown, not 15 plus a margin."""
    ended = [1 + n % 15 for n in range(541)]
    known = percentile(ended, [15] * 459, 0.99)
    assert (known.value, known.low, known.high) == (None, None, None)
    text = policy_file(
        {"a": UsageSamples(ended, ended, [15] * 459, [15] * 459)},
        share=0.99, headroom=0.2, min_invocations=20, about="x",
    )  # fmt: skip
    assert yaml.safe_load(text)["agents"] == {}
    assert "459 of 1,000 invocations were halted or killed" in text


def test_the_cap_that_was_in_force_would_halt_the_same_again(
    ledger: LedgerFile, capsys: Output
) -> None:
    """They were halted as they wanted to go on: that is known, and nothing is saved by it."""
    write(ledger.address, *entries([3] * 20, halted=10))
    for cap in ("--max-turns=5", "--max-model-calls=5", "--max-token-budget=600"):
        assert main(["audit", "backtest", cap, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)["backtest"][0]
        assert (found["halted"], found["unknown"], found["saved_tokens"]) == (10, 0, 0)


def test_longer_invocations_reveal_needs_of_halted_ones(ledger: LedgerFile, capsys: Output) -> None:
    """Invocations that continued for longer show the needs of those halted early."""
    write(ledger.address, *entries([2] * 20 + [8] * 20, halted=10))
    text, agents = suggested(capsys)
    assert agents["worker"]["limits"]["max_turns"] == math.ceil(8 * 1.2)
    assert "from 40 successful and 10 halted invocations" in text


def test_a_loop_indicates_no_need(ledger: LedgerFile, capsys: Output) -> None:
    """Halted or only observed, which may look like a success."""
    loop = Breach("max_identical_tool_calls", 5, 5, "loop_detected", "calls")
    observed = Entry(calls=[Call()] * 40, action="observed", breach=loop)
    halted = Entry(calls=[Call()] * 40, reason="loop_detected", action="halted", breach=loop)
    write(ledger.address, *entries([2] * 20, halted=0), observed, observed, halted)
    text, agents = suggested(capsys)
    assert agents["worker"]["limits"]["max_turns"] == math.ceil(2 * 1.2)
    assert '# Left out of "worker": 3 invocations that reached a loop limit.' in text


def test_suggest_with_nothing_to_suggest_names_a_command(
    ledger: LedgerFile, capsys: Output
) -> None:
    """An empty policy file alone does not say what to do."""
    write(ledger.address, *entries([1, 2, 3], halted=1))
    for options, command in (
        (["--agent", "other"], "otel-limits run -- python app.py"),
        ([], "otel-limits audit suggest --min-invocations 3 --ledger "),
    ):
        assert main(["audit", "suggest", *options]) == 0
        text = capsys.readouterr().out
        assert (yaml.safe_load(text), command in text) == ({"agents": {}}, True)


@pytest.mark.parametrize("calls", [[], [Call(input=0, output=0, kind="zero_token")]])
def test_an_agent_without_tokens_gets_no_limit(
    calls: list[Call], ledger: LedgerFile, capsys: Output
) -> None:
    """A budget of one token would halt its first real call."""
    write(ledger.address, *[Entry(calls=calls)] * 25)
    written, _ = suggested(capsys)
    assert ": no tokens in 25 invocations, so there is no limit to suggest." in written
    assert "max_" not in written.partition("agents:")[2]


def test_a_small_sample_has_a_wide_interval(ledger: LedgerFile, capsys: Output) -> None:
    """20 invocations are too few for a 99th percentile."""
    write(ledger.address, *entries([1, 2, 3, 4] * 5, halted=0))
    text, _ = suggested(capsys)
    assert "4 (95% interval: 4 or more) turns" in text


def test_backtest_names_its_uncertainty(ledger: LedgerFile, capsys: Output) -> None:
    """With a higher cap than the one in force the halted ones may have been halted or not."""
    write(ledger.address, *entries([3] * 20, halted=10))
    found = {}
    for cap in (CAP + 3, CAP - 1):
        assert main(["audit", "backtest", "--max-turns", str(cap), "--format", "json"]) == 0
        found[cap] = json.loads(capsys.readouterr().out)["backtest"][0]
    assert (found[8]["halted"], found[8]["unknown"]) == (0, 10)
    assert found[8]["halted_share_low"] == 0
    assert found[8]["halted_share_high"] > 10 / 30
    assert (found[4]["halted"], found[4]["unknown"]) == (10, 0)
    assert found[4]["halted_share_low"] < 10 / 30 < found[4]["halted_share_high"] < 0.6


def test_a_killed_invocation_may_have_continued(ledger: LedgerFile, capsys: Output) -> None:
    """As a halted one: both questions leave open what it would have needed."""
    killed = Entry(calls=[Call()] * CAP, reason="killed", action="killed")
    write(ledger.address, *entries([3] * 20, halted=0), killed)
    assert main(["audit", "backtest", "--max-turns", str(CAP + 3), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["backtest"][0]["unknown"] == 1
    assert "1 of 21 invocations were halted or killed" in suggested(capsys)[0]


def test_the_estimator_of_kaplan_and_meier() -> None:
    """The remission times under 6-MP of Freireich (1963), with which every textbook computes it."""
    ends = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    halts = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    steps = {step.value: round(step.beyond, 3) for step in curve(ends, halts)}
    assert steps == {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}
    assert percentile(ends, halts, 0.5).value == 23


def test_wilsons_interval() -> None:
    """10 of 100, as Wilson's formula gives it (Newcombe, 1998)."""
    assert interval(0.0, 0) == (0.0, 1.0)
    assert [round(each, 4) for each in interval(0.1, 100)] == [0.0552, 0.1744]


@pytest.mark.parametrize("size", [1, 5, 20, 73, 399])
def test_interval_of_none_or_all_reaches_the_end(size: int) -> None:
    """Without the noise of floating point, which CSV would show as 3e-18."""
    assert (interval(0.0, size)[0], interval(1.0, size)[1]) == (0.0, 1.0)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.lists(st.integers(1, 30), max_size=20),
    st.sampled_from([0.5, 0.9, 0.95, 0.99, 1.0]),
)
def test_halts_never_lower_a_percentile(met: list[int], halted: list[int], share: float) -> None:
    """Without halts it is the plain one; with them at least that of all that was seen."""
    plain = sorted(met)[max(1, math.ceil(round(share * len(met), 9))) - 1]
    assert percentile(met, [], share).value == plain
    known = percentile(met, halted, share)
    both = sorted([*met, *halted])
    lower = both[max(1, math.ceil(round(share * len(both), 9))) - 1]
    assert known.value is None or known.value >= min(lower, max(met))
    if known.value is not None and known.high is not None:
        assert known.low is not None
        assert known.low <= known.value <= known.high
