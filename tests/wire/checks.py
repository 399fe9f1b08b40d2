"""Checks of a vendor's bills against our counts."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pytest

from tests.wire.caps import OFFSETS, names_of
from tests.wire.cases import CASES, MAX_TURNS, STATUSES
from tests.wire.providers import BY_NAME, PROVIDERS
from tests.wire.run import CAPPED, MODES, PICO, Results
from tests.wire.table import BY_CLIENT, ESTIMATED, EXACT, cells, counted
from tests.wire.usages import Bill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.wire.cases import Ask

Check: TypeAlias = Callable[[Results, str], None]

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


def billed_by(vendor_name: str) -> dict[str, Ask]:
    """Return what a vendor bills, by case."""
    asks = {name: case(BY_NAME[vendor_name]) for name, case in CASES.items()}
    return {name: ask for name, ask in asks.items() if ask is not None}


def records(run: Results, vendor_name: str, case: str) -> Iterator[dict[str, Any]]:
    """Yield the counts of one case in each mode."""
    return (run[mode][vendor_name][case] for mode in MODES)


def counts_equal_the_bill(run: Results, vendor_name: str) -> None:
    """Exact where the vendor reports usage and Strands' class passes it on, otherwise estimated."""
    words = {name: said for each, name, said in cells(run) if each.name == vendor_name}
    expected = {}
    for case, ask in billed_by(vendor_name).items():
        usual = EXACT if ask.is_known and ask.bill.input else "0" if ask.is_known else ESTIMATED
        expected[case] = {OTHERWISE.get((vendor_name, case), usual)}
    assert {case: words[case] for case in expected} == expected


def all_modes_count_alike(run: Results, vendor_name: str) -> None:
    """With spans, and with hooks alone or with `OTEL_SDK_DISABLED=true`."""
    first, *others = (
        {name: each["calls"] for name, each in run[mode][vendor_name].items()} for mode in MODES
    )
    assert all(first.values())
    assert others == [first, first]


def estimates_are_near_the_bill(run: Results, vendor_name: str) -> None:
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


def sums_metrics_ledger_and_money_agree(run: Results, vendor_name: str) -> None:
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


def halt_reports_the_billed_usage(run: Results, vendor_name: str) -> None:
    """`stop_of(result).usage` is the sum of its calls."""
    for record in records(run, vendor_name, "halted"):
        (said,) = record["said"]
        assert counted(record) == Bill(input=120 * MAX_TURNS, output=24 * MAX_TURNS)
        assert (said["usage"]["input"], said["usage"]["output"]) == (360, 72)


def each_refusal_is_one_failed_call(run: Results, vendor_name: str) -> None:
    """Errors must not count, regardless of status and of when the class starts streaming."""
    for record in records(run, vendor_name, "refused"):
        assert [call["kind"] for call in record["calls"]] == ["failed"] * len(STATUSES)


def overflow_retry_counts_once(run: Results, vendor_name: str) -> None:
    """The rejected request costs nothing; the shortened one counts."""
    again = ["measured"] if BY_NAME[vendor_name].shortens else []
    for record in records(run, vendor_name, "context overflow, retried"):
        assert [call["kind"] for call in record["calls"]] == ["failed", *again]


def caps_are_exact(run: Results, vendor_name: str) -> None:
    """A cap of one token, or a billionth of a USD, above two calls admits a third one."""
    assert run[CAPPED][vendor_name] == {
        f"{name} {offset}": [name, calls]
        for name in names_of(BY_NAME[vendor_name])
        for offset, calls in OFFSETS.items()
    }


CHECKS: Final[tuple[Check, ...]] = (
    counts_equal_the_bill,
    all_modes_count_alike,
    estimates_are_near_the_bill,
    sums_metrics_ledger_and_money_agree,
    halt_reports_the_billed_usage,
    each_refusal_is_one_failed_call,
    overflow_retry_counts_once,
    caps_are_exact,
)
"""Each is given all counts and the name of a vendor."""
