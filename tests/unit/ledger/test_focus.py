"""FOCUS exports have the specification's columns, and add up to the ledger exactly."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from otel_limits.cli import main
from otel_limits.ledger.focus import COLUMNS, UNDIVIDED
from tests.ledger.book import DAY, NINE, Call, Entry, write
from tests.unit.audit.test_completeness import ask

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

SPECIFIED = json.loads((Path(__file__).parent / "focus_1.2.json").read_text())["columns"]
"""Level, type and nullability of each column of FOCUS 1.2, from the address in that file."""

POLICY = """
models:
  claude-x:
    price:
      {input: 3, output: 15, cache_read: 0.3, cache_write: 3.75, per_request: 0.001,
       tiers: [{above: 200000, input: 6, output: 22.5, cache_read: 0.6, cache_write: 7.5}]}
"""
SHORT = Call(model="claude-x", input=1_000, cached=600, written=100, output=50, price="0.003205")
LONG = Call(model="claude-x", input=300_001, output=10, price="1.801231")
ENTRIES = (
    Entry(agent="a", calls=[SHORT] * 3, attributes={"tenant.id": "acme", "user.id": "u,1"}),
    Entry(agent="a", calls=[SHORT, LONG], at=NINE + DAY),
    Entry(agent="b", calls=[Call(model="claude-x", price="0.5"), Call(model="claude-x")]),
)


@pytest.fixture
def books(ledger: LedgerFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LedgerFile:
    """A ledger with two prices of one model, a price from elsewhere, and an unpriced call."""
    path = tmp_path / "limits.yaml"
    path.write_text(POLICY)
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    monkeypatch.setenv("OTEL_LIMITS_BILLING_ACCOUNT", "123456789012")
    write(ledger.address, *ENTRIES)
    return ledger


def export(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[dict[str, str]], str]:
    """Export charges as CSV; returns rows, and standard error."""
    capsys.readouterr()
    assert main(["ledger", "export", "--focus", *options]) == 0
    said = capsys.readouterr()
    return list(csv.DictReader(io.StringIO(said.out))), said.err


def test_columns_are_those_of_the_specification(
    books: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every mandatory one, no unknown one, and values where nulls are forbidden."""
    rows, _ = export(capsys)
    names = [name for name in rows[0] if not name.startswith("x_")]
    assert list(rows[0]) == [*names, "x_Agent", "x_Model"]
    assert set(names) <= set(SPECIFIED)
    assert {name for name, (level, *_) in SPECIFIED.items() if level == "Mandatory"} <= set(names)
    kinds = {"Decimal": "decimal", "String": "text", "JSON": "text", "Date/Time": "midnight"}
    assert all(COLUMNS[name] == kinds[SPECIFIED[name][1]] for name in names)
    for row in rows:
        assert all(row[name] for name in names if not SPECIFIED[name][2])
        assert isinstance(json.loads(row["Tags"] or "{}"), dict)


def test_each_row_has_the_unit_price_of_its_meter(
    books: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long prompts have their own; quantity times price is the cost of a row, exactly."""
    rows, _ = export(capsys, "--where", "agent=a")
    first = [row for row in rows if row["ChargePeriodStart"] == "2025-10-09T00:00:00Z"]
    assert [(row["SkuMeter"], row["ConsumedQuantity"], row["ListUnitPrice"]) for row in first] == [
        ("Input", "900", "3"),
        ("Cache read", "1800", "0.3"),
        ("Cache write", "300", "3.75"),
        ("Output", "150", "15"),
        ("Requests", "3", "0.001"),
    ]
    prices = [row["ListUnitPrice"] for row in rows if row["SkuMeter"] == "Input"]
    assert prices == ["3", "3", "6"]
    for row in rows:
        product = Decimal(row["PricingQuantity"]) * Decimal(row["ListUnitPrice"])
        assert {Decimal(row[f"{each}Cost"]) for each in ("Billed", "List")} == {product}
        assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == (
            "2025-10-01T00:00:00Z",
            "2025-11-01T00:00:00Z",
        )


def test_costs_add_up_to_those_of_the_ledger(
    books: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A price from elsewhere is not divided by a guess; unpriced calls are counted."""
    rows, said = export(capsys)
    spent = ask(capsys, "spend")[1]["totals"]["spend"]["cost_usd"]
    assert sum(Decimal(row["BilledCost"]) for row in rows) == Decimal(str(spent))
    (undivided,) = [row for row in rows if row["SkuMeter"] == UNDIVIDED]
    assert (undivided["x_Agent"], Decimal(undivided["BilledCost"])) == ("b", Decimal("0.5"))
    assert "1 call without a price left out" in said
    assert "1 call with the meter Undivided: priced by a policy file, at other" in said


def test_prices_of_a_policy_file_are_divided_by_that_file(
    books: LedgerFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repricing without it would keep them, so the advice names the file."""
    rows, said = export(capsys, "--agent", "a")
    assert UNDIVIDED not in {row["SkuMeter"] for row in rows}
    assert said == ""
    monkeypatch.delenv("OTEL_LIMITS_POLICY")
    rows, said = export(capsys, "--agent", "a")
    assert {row["SkuMeter"] for row in rows} == {UNDIVIDED}
    assert "5 calls with the meter Undivided: priced by a policy file, at other" in said
    assert "set OTEL_LIMITS_POLICY to that file" in said


def test_audit_keys_are_tags_and_the_sub_account(
    books: LedgerFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are split by them; another key can be the sub-account."""
    (row, *_), _ = export(capsys, "--where", "tenant.id=acme")
    assert json.loads(row["Tags"]) == {"tenant.id": "acme", "user.id": "u,1"}
    assert (row["BillingAccountId"], row["SubAccountId"]) == ("123456789012", "acme")
    monkeypatch.setenv("OTEL_LIMITS_SUB_ACCOUNT_KEY", "user.id")
    (row, *_), _ = export(capsys, "--where", "tenant.id=acme")
    assert row["SubAccountId"] == "u,1"
    (row, *_), _ = export(capsys, "--where", "tenant.id=")
    assert (row["SubAccountId"], row["SubAccountType"], row["Tags"]) == ("", "", "")


def test_region_is_where_the_call_was_processed(
    books: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is known if it may affect the price, and otherwise null rather than a guess."""
    with closing(sqlite3.connect(books.path)) as connection, connection:
        connection.execute(
            "UPDATE otel_limits_model_calls SET price_basis = ? WHERE agent = 'b'",
            ['{"region": "eu-west-1"}'],
        )
    rows, _ = export(capsys)
    regions = {(row["x_Agent"], row["RegionId"], row["RegionName"]) for row in rows}
    assert regions == {("a", "", ""), ("b", "eu-west-1", "eu-west-1")}


@pytest.mark.parametrize(
    ("account", "options", "problem"),
    [
        ("", (), "OTEL_LIMITS_BILLING_ACCOUNT=123456789012"),
        ("1", ("--format", "jsonl"), "as csv. Remove"),
        ("1", ("--what", "tools"), "as csv. Remove"),
    ],
)
def test_export_without_its_parts_is_refused(
    books: LedgerFile,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    account: str,
    options: tuple[str, ...],
    problem: str,
) -> None:
    """The specification has no row without a billing account."""
    monkeypatch.setenv("OTEL_LIMITS_BILLING_ACCOUNT", account)
    assert main(["ledger", "export", "--focus", *options]) != 0
    assert problem in capsys.readouterr().err
