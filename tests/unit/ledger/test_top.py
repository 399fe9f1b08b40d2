"""`spend --top`: the groups that cost most, and the others added up."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from tests.ledger.book import DAY, NINE, Call, Entry, write

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

Output = pytest.CaptureFixture[str]

PRICES = ("0.1", "0.4", "0.2", "0.3")


@pytest.fixture(autouse=True)
def four(ledger: LedgerFile) -> None:
    """Four agents on four days, of which the second costs most."""
    entries = [
        Entry(agent=f"a{n}", calls=[Call(price=price)], at=NINE + n * DAY)
        for n, price in enumerate(PRICES)
    ]
    write(ledger.address, *entries)


def rows_of(capsys: Output, *arguments: str) -> list[dict[str, Any]]:
    """Rows of the table."""
    assert main(["audit", "spend", "--format", "json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["spend"]  # type: ignore[no-any-return]


def test_the_most_expensive_stand_alone(capsys: Output) -> None:
    """The others are one row, and all rows add up to the total."""
    rows = rows_of(capsys, "--by", "agent,model", "--top", "2")
    assert [row["agent"] for row in rows] == ["a1", "a3", "(2 others)"]
    assert sum(Decimal(row["cost_usd"]) for row in rows) == Decimal("1.0")
    assert [row["tokens"] for row in rows] == [120, 120, 240]


def test_days_stay_in_their_order(capsys: Output) -> None:
    """The most expensive days are chosen, and then stand as days do."""
    rows = rows_of(capsys, "--by", "day,agent", "--top", "3")
    assert [row["agent"] for row in rows] == ["a1", "a2", "a3", ""]


@pytest.mark.parametrize("arguments", [("--by", "agent", "--top", "4"), ("--by", "agent")])
def test_without_others_there_is_no_such_row(capsys: Output, arguments: tuple[str, ...]) -> None:
    """Items that fit are listed."""
    assert len(rows_of(capsys, *arguments)) == len(PRICES)
