"""Vendors' bills against our counts, through real model classes and clients.

One process runs all cases in every mode (`tests/wire/run.py`); each test checks its counts.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from tests.paths import ROOT
from tests.readme import with_tables
from tests.wire.caps import OFFSETS, names_of
from tests.wire.cases import CASES, MAX_TURNS, STATUSES
from tests.wire.providers import BY_NAME, PROVIDERS
from tests.wire.run import CAPPED, MODES, PICO, called, results
from tests.wire.table import (
    BY_CLIENT,
    ESTIMATED,
    EXACT,
    NONE,
    cells,
    counted,
    vendors,
)
from tests.wire.usages import Bill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.wire.cases import Ask
    from tests.wire.run import Results

pytestmark = pytest.mark.timeout(600)  # the first one waits for the run: half a minute of one core

BILLED = {
    (each.name, name): ask
    for each in PROVIDERS
    for name, case in CASES.items()
    if (ask := case(each)) is not None
}
every_vendor = pytest.mark.parametrize("vendor_name", BY_NAME)
NAMED = MODES[:1]
"""The mode in which every vendor is called."""

LITELLM = tuple(each.name for each in PROVIDERS if each.name.startswith("LiteLLM"))
UNSEEN = tuple((name, "no usage, image") for name in LITELLM)
"""LiteLLM counts 85 tokens for any picture when it makes up the usage."""
OTHERWISE = {
    ("Mistral", "cache read"): "no cached tokens",
    ("Writer", "cache read"): "no cached tokens",
    **{(name, case): BY_CLIENT for name in LITELLM for case in ("null usage", "no usage")},
    ("LiteLLM, Vertex", "null usage"): ESTIMATED,  # LiteLLM itself fails
    **dict.fromkeys(UNSEEN, BY_CLIENT),
}
"""Billed usage that Strands' classes and LiteLLM drop or invent."""


@pytest.fixture(scope="module")
def run() -> Results:
    """All counts with spans. Each of the other modes calls some of the vendors, at night all."""
    return results(NAMED)


@pytest.fixture(scope="module")
def words(run: Results) -> dict[tuple[str, str], set[str]]:
    """The count of each cell, in every mode."""
    return {(each.name, name): said for each, name, said in cells(run)}


def billed_by(vendor_name: str) -> dict[str, Ask]:
    """Return what a vendor bills, by case."""
    return {case: ask for (vendor, case), ask in BILLED.items() if vendor == vendor_name}


def records(run: Results, vendor_name: str, case: str) -> Iterator[dict[str, Any]]:
    """The counts of one case, by mode."""
    return (run[mode][vendor_name][case] for mode in MODES if vendor_name in run[mode])


@every_vendor
def test_counts_equal_the_bill(words: dict[tuple[str, str], set[str]], vendor_name: str) -> None:
    """Exact where the vendor reports usage and Strands' class passes it on, otherwise estimated."""
    expected = {}
    for case, ask in billed_by(vendor_name).items():
        usual = EXACT if ask.is_known and ask.bill.input else "0" if ask.is_known else ESTIMATED
        expected[case] = {OTHERWISE.get((vendor_name, case), usual)}
    assert {case: words[vendor_name, case] for case in expected} == expected


@pytest.mark.parametrize(
    "vendor_name", [each.name for mode in MODES[1:] for each in called(mode, NAMED)]
)
def test_all_modes_count_alike(run: Results, vendor_name: str) -> None:
    """With spans, and with hooks alone or with `OTEL_SDK_DISABLED=true`."""
    first, other = calls_by_mode(run, vendor_name)
    assert all(first.values())
    assert other == first


def calls_by_mode(run: Results, vendor_name: str) -> list[dict[str, Any]]:
    """The counted calls by case, in each mode in which the vendor was called."""
    return [
        {name: each["calls"] for name, each in run[mode][vendor_name].items()}
        for mode in MODES
        if vendor_name in run[mode]
    ]


@every_vendor
def test_estimates_are_near_the_bill(run: Results, vendor_name: str) -> None:
    """Estimates are between half and twice the tokens that the vendor must have counted."""
    for case, ask in billed_by(vendor_name).items():
        if ask.is_known or (vendor_name, case) in UNSEEN:
            continue
        bill = ask.bill
        for record in records(run, vendor_name, case):
            sums = counted(record)
            assert bill.input / 2 <= sums.input <= bill.input * 2, case
            if case not in NOT_HANDED_ON.get(vendor_name, NEVER_HANDED_ON):
                assert bill.output / 2 <= sums.output <= bill.output * 2, case


NEVER_HANDED_ON = ("`structured_output`, invalid",)
"""Cases in which no class passes on the answer, so only the input counts."""
NOT_HANDED_ON = {
    "llama.cpp": ("connection lost",),  # its class reads the whole body first
    "LiteLLM, Vertex": ("null usage", *NEVER_HANDED_ON),
}


@every_vendor
def test_sums_metrics_ledger_and_money_agree(run: Results, vendor_name: str) -> None:
    """The sums of an invocation, counters, ledger rows and prices are those of its calls."""
    for case in run[MODES[0]][vendor_name]:
        for record in records(run, vendor_name, case):
            sums, calls = counted(record), record["calls"]
            cost = Decimal(0) if BY_NAME[vendor_name].is_local else sums.cost
            assert sum(Decimal(call["price"]) for call in calls if call["price"]) == cost, case
            told = [sum(stop[name] for stop in record["stops"]) for name in ("input", "output")]
            assert told == [sums.input, sums.output], case
            assert metered(record) == (len(calls), *parts(sums), pytest.approx(cost)), case
            assert in_ledger(record) == (len(calls), *parts(sums), cost), case


def parts(bill: Bill) -> tuple[int, ...]:
    """The counts in metrics and ledger."""
    return bill.input, bill.output, bill.read, bill.write


def metered(record: dict[str, Any]) -> tuple[Any, ...]:
    """The increase of the metrics: calls, tokens and USD."""
    told = {
        name.removeprefix("otel_limits_"): Decimal(value) / PICO
        for name, value in record["metrics"].items()
    }
    return (
        told.get("model_calls_total", 0),
        told.get("tokens_total input", 0),
        told.get("tokens_total output", 0),
        told.get("cached_tokens_total read", 0),
        told.get("cached_tokens_total write", 0),
        told.get("cost_usd_total", 0),
    )


def in_ledger(record: dict[str, Any]) -> tuple[Any, ...]:
    """The ledger's rows."""
    rows = [row for row in record["ledger"] if row is not None]
    names = ("calls", "input", "output", "read", "write")
    pico = sum(row["pico"] or 0 for row in rows)
    return *(sum(row[name] for row in rows) for name in names), Decimal(pico) / PICO


@every_vendor
def test_halt_reports_the_billed_usage(run: Results, vendor_name: str) -> None:
    """`stop_of(result).usage` is the sum of its calls."""
    for record in records(run, vendor_name, "halted"):
        (said,) = record["said"]
        assert counted(record) == Bill(input=120 * MAX_TURNS, output=24 * MAX_TURNS)
        assert (said["usage"]["input"], said["usage"]["output"]) == (360, 72)


@every_vendor
def test_each_refusal_is_one_failed_call(run: Results, vendor_name: str) -> None:
    """Errors must not count, regardless of status and of when the class starts streaming."""
    for record in records(run, vendor_name, "refused"):
        assert [call["kind"] for call in record["calls"]] == ["failed"] * len(STATUSES)


@every_vendor
def test_overflow_retry_counts_once(run: Results, vendor_name: str) -> None:
    """The rejected request costs nothing; the shortened one counts."""
    again = ["measured"] if BY_NAME[vendor_name].shortens else []
    for record in records(run, vendor_name, "context overflow, retried"):
        assert [call["kind"] for call in record["calls"]] == ["failed", *again]


@every_vendor
def test_caps_are_exact(run: Results, vendor_name: str) -> None:
    """A cap of one token, or a billionth of a USD, above two calls admits a third one.

    Here, each vendor is called under the caps of one limit, at night under all.
    """
    assert run[CAPPED][vendor_name] == expected_under_caps(vendor_name, is_whole=False)


def expected_under_caps(vendor_name: str, *, is_whole: bool) -> dict[str, Any]:
    """Return the stop reason and the calls by cap."""
    return {
        f"{name} {offset}": [name, calls]
        for name in names_of(BY_NAME[vendor_name], is_whole=is_whole)
        for offset, calls in OFFSETS.items()
    }


def test_page_matches_the_counts(run: Results) -> None:
    """Run `python -m tests.generate tables` when this fails."""
    page = (ROOT / "otel_limits/docs/vendors.md").read_text(encoding="utf-8")
    assert with_tables(page, {"vendors": lambda: vendors(run)}) == page
    assert NONE in page
