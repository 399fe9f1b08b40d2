"""`anomalies`: unusual days, and no finding where there is too little data."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.audit.anomalies import outliers
from otel_limits.cli import main
from tests.ledger.book import DAY, NINE, Call, Entry, write

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

Output = pytest.CaptureFixture[str]

USUAL = ("1.0", "1.1", "0.9", "1.0", "1.2", "1.0", "0.8", "1.0", "1.1", "1.0")


def days(*prices: str | None, agent: str = "worker", turns: int = 1) -> list[Entry]:
    """One invocation per day with these prices."""
    return [
        Entry(agent=agent, calls=[Call(price=price)] * turns, at=NINE + n * DAY)
        for n, price in enumerate(prices)
    ]


def answer(capsys: Output, *arguments: str) -> dict[str, Any]:
    """The answer as JSON."""
    assert main(["audit", "anomalies", "--format", "json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("by", ["agent", "model", "agent,model"])
def test_an_expensive_day_is_named(ledger: LedgerFile, capsys: Output, by: str) -> None:
    """With its value and the range that was usual; the other days are none."""
    write(ledger.address, *days(*USUAL, "5.0"))
    (found,) = answer(capsys, "--by", by)["cost"]
    assert (found["day"], found["value"]) == ("2025-10-19", "5.000000000000")
    assert float(found["low"]) < 1 < float(found["high"]) < 5


def test_a_cheap_day_is_one_too(ledger: LedgerFile, capsys: Output) -> None:
    """An agent that all but stopped is as unusual as one that ran away."""
    write(ledger.address, *days(*USUAL, "0.01"))
    (found,) = answer(capsys)["cost"]
    assert found["score"] < -3.5


def test_little_data_is_silence(ledger: LedgerFile, capsys: Output) -> None:
    """Nine days have no usual range; with `--min-days 9` they have."""
    write(ledger.address, *days(*USUAL[:8], "50.0"))
    assert answer(capsys)["cost"] == []
    assert len(answer(capsys, "--min-days", "9")["cost"]) == 1


def test_groups_that_are_not_tested_are_not_said_to_be_usual(
    ledger: LedgerFile, capsys: Output
) -> None:
    """Instead of `None.`, which would be a result."""
    write(ledger.address, *days("50.0"), *days(*USUAL, agent="older"))
    assert main(["audit", "anomalies", "--agent", "worker"]) == 0
    shown = capsys.readouterr().out
    needed = "Not tested: 1 day with calls per group at most, at least 10 needed (--min-days)."
    assert shown.count(needed) == 2  # cost, and turns
    assert "Not tested: there is nothing to compare." in shown  # no call is without a price
    assert "None." not in shown
    assert main(["audit", "anomalies"]) == 0
    shown = capsys.readouterr().out
    assert "None in 1 group. Not tested: 1 other group has fewer than 10 days." in shown


def test_without_prices_tokens_are_compared(ledger: LedgerFile, capsys: Output) -> None:
    """Turns are checked as well: ten times as many on the last day."""
    more = Entry(calls=[Call()] * 10, at=NINE + 11 * DAY)
    write(ledger.address, *days(*[None] * 11), more)
    found = answer(capsys)
    assert [row["value"] for row in found["tokens"]] == [1200]
    assert [(row["value"], row["median"]) for row in found["turns"]] == [(10.0, 1.0)]
    assert answer(capsys, "--by", "model")["turns"] == []


def test_each_group_has_its_own_range(ledger: LedgerFile, capsys: Output) -> None:
    """A large agent's usual day is unusual for a small one."""
    large = days(*["100"] * 11, agent="large")
    write(ledger.address, *large, *days(*USUAL, "9.0", agent="small"))
    assert [row["agent"] for row in answer(capsys)["cost"]] == ["small"]


def test_equal_days_leave_room_for_a_little_more() -> None:
    """Without any deviation a change of some percent is none."""
    same = {f"d{n}": 100.0 for n in range(10)}
    assert list(outliers({**same, "more": 110.0})) == []
    assert [row[0] for row in outliers({**same, "more": 130.0})] == ["more"]


def test_today_can_only_be_too_high() -> None:
    """It is not over."""
    same = {f"d{n}": 100.0 for n in range(10)}
    assert list(outliers({**same, "now": 1.0}, today="now")) == []
    assert len(list(outliers({**same, "now": 500.0}, today="now"))) == 1


@pytest.mark.parametrize("key", ["value", "score", "day", "level"])
def test_an_audit_key_hides_no_figure(ledger: LedgerFile, capsys: Output, key: str) -> None:
    """Its column has a prefix where another column has its name."""
    entries = days(*USUAL, "5.0")
    write(ledger.address, *(replace(each, attributes={key: "acme"}) for each in entries))
    (found,) = answer(capsys, "--by", f"key:{key}")["cost"]
    assert (found[f"key:{key}"], found["value"]) == ("acme", "5.000000000000")


@pytest.mark.parametrize("name", ["day", "month", "tool"])
def test_days_have_no_days(ledger: LedgerFile, capsys: Output, name: str) -> None:
    """Columns without days, or without a usual range, are rejected with a message."""
    write(ledger.address, Entry())
    assert main(["audit", "anomalies", "--by", name]) == 2
    assert f"cannot group by {name}" in capsys.readouterr().err
