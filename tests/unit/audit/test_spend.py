"""`spend` besides sums: tools, changes, forecasts, caches, waste, name collisions."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import sys
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.audit.forecast import ENOUGH_DAYS, build_forecast, predicted, student
from otel_limits.audit.spend import SPEND, shares
from otel_limits.cli import main
from otel_limits.cli.show.data import schema_of
from otel_limits.core import catalogue
from otel_limits.core.limits import Breach
from tests.ledger.book import DAY, NINE, Call, Entry, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.ledger.fixtures import LedgerFile


Output = pytest.CaptureFixture[str]

HALT: dict[str, Any] = {
    "reason": "max_turns",
    "action": "halted",
    "breach": Breach("max_turns", 2, 2, "max_turns", "turns"),
}
NOW = datetime(2026, 11, 18, 12, tzinfo=timezone.utc).timestamp()
"""A Wednesday at noon."""


@pytest.fixture
def at_noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The query runs on that day."""
    monkeypatch.setattr("otel_limits.audit.forecast.time.time", lambda: NOW)


def asked(capsys: Output, *arguments: str) -> Any:
    """The answer as JSON, which fits its schema."""
    capsys.readouterr()
    assert main(["audit", "spend", "--format", "json", *arguments]) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    checks = jsonschema.Draft202012Validator(schema_of(SPEND))
    assert list(checks.iter_errors(document)) == []
    assert set(document) <= set(schema_of(SPEND)["properties"])
    return document


def refused(capsys: Output, *arguments: str) -> str:
    """The sentence with which it is refused."""
    assert main(["audit", "spend", *arguments]) == 2
    return capsys.readouterr().err


def test_stated_costs_that_differ_are_named_by_model(ledger: LedgerFile, capsys: Output) -> None:
    """Above 1%, in either direction; a model without any is left out."""
    costs = [("a", "1.01", "1"), ("a", "1.0100001", "1"), ("a", "0", "1"), ("b", "1.01", "1")]
    costs += [("c", "0.000000000001", "0")]
    calls = [Call(model=model, stated=stated, listed=listed) for model, stated, listed in costs]
    calls += [Call(model="b", stated="9"), Call(model="b", listed="9")]
    write(ledger.address, Entry(calls=calls))
    rows = {each["model"]: each for each in asked(capsys)["differences"]}
    assert {name: each["different_calls"] for name, each in rows.items()} == {"a": 2, "c": 1}
    assert rows["a"]["calls"] == 3
    assert [rows["a"][name] for name in ("stated_usd", "listed_usd")] == [
        "2.020000100000",
        "3.000000000000",
    ]
    assert "differences" not in asked(capsys, "--where", "model=b")


# --- tools ----------------------------------------------------------------------------------------

TOOLS = Entry(
    calls=[
        Call(input=10, output=0, price="1", tools=["search", "search", "fetch"]),
        Call(input=100, output=0, price="3", tools=["fetch!"]),
        Call(input=7, output=0, price="9", side=True),
        Call(input=1000, output=1, price="5", tools=["last"]),
    ]
)


def test_errors_and_refusals_of_a_tool_are_counted(ledger: LedgerFile, capsys: Output) -> None:
    """Apart, and both among its calls."""
    write(ledger.address, Entry(tools=["search", "search?", "search?", "search!", "fetch"]))
    answer = asked(capsys, "--by", "tool")
    names = ("tool_calls", "tool_errors", "tool_refusals")
    used = {row["tool"]: tuple(row[name] for name in names) for row in answer["spend"]}
    assert used == {"search": (4, 1, 2), "fetch": (1, 0, 0), "(no tool)": (0, 0, 0)}
    assert tuple(answer["totals"]["spend"][name] for name in names) == (5, 1, 2)


def test_cost_of_a_tool_is_the_next_calls(ledger: LedgerFile, capsys: Output) -> None:
    """A call after several tools is shared by how often each was called; all add up."""
    write(ledger.address, TOOLS)
    answer = asked(capsys, "--by", "tool")
    rows = {row["tool"]: row for row in answer["spend"]}
    assert {name: (row["tokens"], Decimal(row["cost_usd"] or 0)) for name, row in rows.items()} == {
        "search": (67, 2),
        "fetch": (1034, 6),
        "(no tool)": (17, 10),
        "last": (0, 0),
    }
    assert sum(row["tokens"] for row in rows.values()) == answer["totals"]["spend"]["tokens"]
    used = {name: (row["tool_calls"], row["tool_errors"]) for name, row in rows.items()}
    assert used == {"search": (2, 0), "fetch": (2, 1), "last": (1, 0), "(no tool)": (0, 0)}
    assert rows["search"]["tool_seconds"] == 1.0
    assert answer["totals"]["spend"]["tool_calls"] == 5


def test_tools_and_other_names(ledger: LedgerFile, capsys: Output) -> None:
    """Columns that tool calls have too show their figures; models show none."""
    write(ledger.address, TOOLS, Entry(agent="other", calls=[Call(tools=["search"]), Call()]))
    rows = {
        (row["agent"], row["tool"]): row for row in asked(capsys, "--by", "agent,tool")["spend"]
    }
    assert rows["other", "search"]["tool_calls"] == 1
    assert rows["worker", "search"]["tool_calls"] == 2
    assert "tool_calls" not in asked(capsys, "--by", "tool,model")["spend"][0]
    day = asked(capsys, "--by", "day,tool", "--time-zone", "Asia/Kathmandu")["spend"]
    assert {row["tool_calls"] for row in day if row["tool"] == "search"} == {3}


def test_the_tools_that_cost_most(ledger: LedgerFile, capsys: Output) -> None:
    """The others are one row with their figures."""
    write(ledger.address, TOOLS)
    rows = asked(capsys, "--by", "tool", "--top", "2")["spend"]
    assert [row["tool"] for row in rows] == ["(no tool)", "fetch", "(2 others)"]
    assert (rows[-1]["tool_calls"], rows[-1]["cost_usd"]) == (3, "2.000000000000")


def test_a_ledger_of_before_does_not_know_tools(ledger: LedgerFile, capsys: Output) -> None:
    """It says so, instead of taking all for calls after no tool."""
    import sqlite3

    write(ledger.address, TOOLS)
    with sqlite3.connect(ledger.path) as connection:
        connection.execute("UPDATE otel_limits_model_calls SET after_tools = NULL")
    connection.close()
    rows = {row["tool"]: row["tokens"] for row in asked(capsys, "--by", "tool")["spend"]}
    assert rows["(not recorded)"] == 1118


@given(
    st.none() | st.integers(0, 10**20),
    st.lists(st.integers(1, 1_000), min_size=1, max_size=8),
)
def test_shares_add_up(amount: int | None, weights: list[int]) -> None:
    """To the last token and picodollar, and none is off by more than one."""
    parts = shares(amount, weights)
    if amount is None:
        assert parts == [None] * len(weights)
        return
    assert sum(part or 0 for part in parts) == amount
    for part, weight in zip(parts, weights, strict=True):
        assert abs((part or 0) * sum(weights) - amount * weight) <= sum(weights)


# --- names that collide ---------------------------------------------------------------------------

COLLIDING = ("tokens", "cost_usd", "calls", "level", "tool_calls", "cost", "schema", "total")


@pytest.mark.parametrize("key", COLLIDING)
def test_an_audit_key_with_the_name_of_a_column(
    ledger: LedgerFile, capsys: Output, key: str
) -> None:
    """It is grouped by, and hides no figure."""
    write(ledger.address, Entry(attributes={key: "acme"}), Entry(attributes={key: "other"}))
    for asked_by in (key, f"key:{key}"):
        for more in ((), ("--compare", "2025-09", "--where", "month=2025-10")):
            answer = asked(capsys, "--by", asked_by, *more)
            rows = answer["changes" if more else "spend"]
            assert {row.get(f"key:{key}", row.get(key)) for row in rows} >= {"acme", "other"}
            assert [row["tokens"] for row in rows] == [120, 120]
    only = asked(capsys, "--by", "agent", "--where", f"{key}=acme")
    assert only["totals"]["spend"]["tokens"] == 120


@pytest.mark.parametrize("key", ["agent", "model", "day", "reason", "tool"])
def test_an_audit_key_with_one_of_our_names(ledger: LedgerFile, capsys: Output, key: str) -> None:
    """A ledger can have it, from before we had the name: it is meant with its prefix alone."""
    write(ledger.address, Entry(attributes={key: "acme"}))
    assert [row[f"key:{key}"] for row in asked(capsys, "--by", f"key:{key}")["spend"]] == ["acme"]
    assert "acme" not in asked(capsys, "--by", key)["spend"][0].values()
    both = asked(capsys, "--by", f"{key},key:{key}", "--where", f"key:{key}=acme")
    assert both["spend"][0][f"key:{key}"] == "acme"


def test_unrecorded_key_is_rejected(ledger: LedgerFile, capsys: Output) -> None:
    """With its prefix as without."""
    write(ledger.address, Entry(attributes={"tokens": "acme"}))
    for name in ("cost", "key:agent", "key:", "key:key:tokens"):
        assert f"The ledger has no property {name}" in refused(capsys, "--by", name)


@pytest.mark.parametrize("value", ["=1+1", "+1", "-2", "@SUM(A1)", "\t=1", "\uff1d1"])
def test_a_cell_of_a_csv_is_no_formula(ledger: LedgerFile, capsys: Output, value: str) -> None:
    """A name that a spreadsheet would calculate is quoted; a number below 0 stays one."""
    write(ledger.address, Entry(attributes={"k": value}, calls=[Call(price="1", saved="-0.5")]))
    capsys.readouterr()
    assert main(["audit", "spend", "--by", "k", "--format", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["k"][0] in "'\ufffd"
    assert row["cache_saved_usd"] == "-0.500000000000"


# --- a bound that fails a build -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (["--fail-above", "9"], 1, "Above $9.00: total $10.00."),
        (["--fail-above", "10"], 0, "The total is not above $10.00."),
        (["--fail-above", "2", "--by", "agent"], 1, "Above $2.00: b $6.00; a $3.00."),
        (["--fail-above", "4", "--by", "agent", "--top", "1"], 1, "Above $4.00: b $6.00."),
        (["--fail-above", "6", "--by", "agent"], 0, "No group by agent is above $6.00."),
    ],
)
def test_fail_above_is_the_exit_status(
    ledger: LedgerFile, capsys: Output, options: list[str], status: int, sentence: str
) -> None:
    """A build fails on spend, and its log names each group and what is not included."""
    write(
        ledger.address,
        Entry(agent="a", calls=[Call(price="3"), Call()]),
        Entry(agent="b", calls=[Call(price="6")]),
        Entry(agent="c", calls=[Call(price="1")]),
    )
    capsys.readouterr()
    assert main(["audit", "spend", *options]) == status
    unpriced = "120 tokens of calls without a known price are not included."
    assert f"{sentence} {unpriced}" in " ".join(capsys.readouterr().out.split())


def test_groups_that_look_alike_are_judged_separately(ledger: LedgerFile, capsys: Output) -> None:
    """One that is cheap must not hide another whose agent and model are written the same."""
    write(
        ledger.address,
        Entry(agent="a, b", calls=[Call(model="c", price="9")]),
        Entry(agent="a", calls=[Call(model="b, c", price="1")]),
    )
    assert main(["audit", "spend", "--by", "agent,model", "--fail-above", "5"]) == 1
    assert "Above $5.00: a, b, c $9.00." in " ".join(capsys.readouterr().out.split())


def test_fail_above_is_never_ignored(ledger: LedgerFile, capsys: Output) -> None:
    """With a comparison it is refused, since it would judge neither period."""
    write(ledger.address, Entry(calls=[Call(price="3")]))
    assert main(["audit", "spend", "--fail-above", "1", "--compare", "7d"]) == 2
    assert "--fail-above judges one period" in capsys.readouterr().err


# --- caches and waste -----------------------------------------------------------------------------


def test_cache_savings_are_shown(ledger: LedgerFile, capsys: Output) -> None:
    """Tokens written and read, and the cost of both."""
    calls = [Call(cached=50, price="1", saved="0.75"), Call(written=60, price="1", saved="-0.25")]
    write(ledger.address, Entry(calls=calls), Entry(agent="without"))
    rows = {row["agent"]: row for row in asked(capsys, "--by", "agent")["spend"]}
    assert rows["worker"]["cache_write_tokens"] == 60
    assert Decimal(rows["worker"]["cache_saved_usd"]) == Decimal("0.5")
    assert rows["without"]["cache_saved_usd"] is None


def test_spend_is_split_by_outcome(ledger: LedgerFile, capsys: Output) -> None:
    """What went into killed, failed and lost invocations is spent on neither success nor halts."""
    write(
        ledger.address,
        Entry(calls=[Call(price="1")]),
        Entry(calls=[Call(price="2")]),
        Entry(calls=[Call(price="5")] * 2, **HALT),
        Entry(calls=[Call(price="7")], reason="error"),
        Entry(calls=[Call(price="4")], reason="killed", action="killed"),
        Entry(calls=[Call(price="6")], reason="lost", action="lost"),  # type: ignore[arg-type]
        Entry(agent="silent", calls=[Call()], **HALT),
    )
    answer = asked(capsys, "--by", "agent,model")
    worker, silent = answer["outcomes"]
    kinds = ("successful", "halted", "killed", "failed", "lost")
    assert worker["invocations"] == 6
    assert [worker[kind] for kind in kinds] == [2, 1, 1, 1, 1]
    assert [Decimal(worker[f"spent_on_{kind}_usd"]) for kind in kinds] == [3, 10, 4, 7, 6]
    assert Decimal(worker["own_cost_per_success_usd"]) == Decimal("1.5")
    assert Decimal(worker["total_cost_per_success_usd"]) == 15
    assert worker["unsuccessful_share"] == 0.9
    assert silent["spent_on_halted_usd"] is None
    assert silent["total_cost_per_success_usd"] is None
    assert Decimal(answer["totals"]["outcomes"]["spent_on_halted_usd"]) == 10


def test_zero_token_calls_cost_nothing(ledger: LedgerFile, capsys: Output) -> None:
    """Their price is never looked up, which is not an unknown price."""
    zero = Call(input=0, output=0, kind="zero_token")
    write(ledger.address, Entry(calls=[zero, zero]), Entry(agent="b", calls=[Call(kind="failed")]))
    costs = {row["agent"]: row["cost_usd"] for row in asked(capsys, "--by", "agent")["spend"]}
    assert costs == {"worker": "0.000000000000", "b": None}


def test_figures_that_lack_a_price_are_unknown(ledger: LedgerFile, capsys: Output) -> None:
    """A sum is that of known prices, next to the calls without one; a ratio is not guessed."""
    write(
        ledger.address,
        Entry(agent="only halts", calls=[Call()]),
        Entry(agent="only halts", calls=[Call(price="2")], **HALT),
        Entry(agent="only ends", calls=[Call(price="3")]),
        Entry(agent="only ends", calls=[Call(price="5"), Call()], **HALT),
        Entry(agent="asks", calls=[Call(price="3")]),
        Entry(agent="asks", calls=[Call(price="1")], **HALT),
        Entry(agent="asks", calls=[Call()], reason="interrupt"),
    )
    answer = asked(capsys, "--by", "agent")
    total = answer["totals"]["outcomes"]
    names = (
        *("spent_on_successful_usd", "spent_on_halted_usd", "spent_on_interrupted_usd"),
        *("own_cost_per_success_usd", "total_cost_per_success_usd", "unsuccessful_share"),
    )
    seen = {
        row["agent"]: [row[name] and float(row[name]) for name in names] + [row["unpriced_calls"]]
        for row in [*answer["outcomes"], {**total, "agent": "total"}]
    }
    nothing = 0.0
    assert seen == {
        "only halts": [None, 2, nothing, None, None, None, 1],
        "only ends": [3, 5, nothing, 3, None, None, 1],
        "asks": [3, 1, None, 3, None, 0.25, 1],
        "total": [6, 8, None, None, None, None, 3],
    }


def test_interrupted_and_unknown_ends_are_not_failures(ledger: LedgerFile, capsys: Output) -> None:
    """An agent that asked a person has not failed, and an import may not show an end."""
    write(
        ledger.address,
        Entry(calls=[Call(price="3")]),
        Entry(calls=[Call(price="1")], reason="error"),
        Entry(calls=[Call(price="5")], reason="interrupt"),
        Entry(calls=[Call(price="7")], reason="unknown"),
        Entry(agent="asks", calls=[Call(price="2")], reason="interrupt"),
    )
    worker, asks = asked(capsys, "--by", "agent")["outcomes"]
    kinds = ("successful", "failed", "interrupted", "unknown")
    assert [worker[kind] for kind in kinds] == [1, 1, 1, 1]
    assert [Decimal(worker[f"spent_on_{kind}_usd"]) for kind in kinds] == [3, 1, 5, 7]
    assert Decimal(worker["total_cost_per_success_usd"]) == 16
    assert worker["unsuccessful_share"] == 0.25
    assert (asks["failed"], asks["interrupted"], asks["unsuccessful_share"]) == (0, 1, None)


def test_tables_by_day_are_in_the_order_of_days(ledger: LedgerFile, capsys: Output) -> None:
    """Readers compare a day in one with the same day in the other."""
    costs = ("1", "5", "3")
    write(
        ledger.address,
        *(
            Entry(calls=[Call(price=cost)], at=NOW - (3 - at) * DAY)
            for at, cost in enumerate(costs)
        ),
    )
    answer = asked(capsys, "--by", "day")
    spent = [[Decimal(row["cost_usd"]) for row in answer["spend"]]]
    spent += [[Decimal(row["spent_on_successful_usd"]) for row in answer["outcomes"]]]
    assert spent == [[1, 5, 3]] * 2


def test_without_a_way_to_select_invocations_there_are_no_outcomes(
    ledger: LedgerFile, capsys: Output
) -> None:
    """The waste per model is unknown."""
    write(ledger.address, Entry())
    assert "outcomes" not in asked(capsys, "--where", "model=m")
    assert "outcomes" not in asked(capsys, "--prices", "recorded")


# --- changes --------------------------------------------------------------------------------------


def days(*costs: str, agent: str = "worker", first: float = NOW - 7 * DAY) -> list[Entry]:
    """One invocation a day, each at its price."""
    return [
        Entry(agent=agent, calls=[Call(price=cost)], at=first + n * DAY)
        for n, cost in enumerate(costs)
    ]


def changed(capsys: Output, *arguments: str) -> dict[str, tuple[Any, ...]]:
    """Cost before, now and its change, by agent, in their order."""
    rows = asked(capsys, "--by", "agent", *arguments)["changes"]
    names = ("cost_before_usd", "cost_usd", "cost_change_usd")
    return {row["agent"]: tuple(float(row[name] or 0) for name in names) for row in rows}


@pytest.fixture
def movers(ledger: LedgerFile, at_noon: None) -> None:
    """Three agents, of which one falls, one rises, and one is new."""
    write(ledger.address, *days("1", "1", "1", "1", "5", "5", "5"))
    write(ledger.address, *days("9", "9", "9", "9", "1", "1", "1", agent="falls"), first=100)
    write(ledger.address, *days("3", agent="new", first=NOW - DAY), first=200)


@pytest.mark.parametrize("other", ["previous", "3d"])
def test_the_biggest_movers_come_first(movers: None, capsys: Output, other: str) -> None:
    """Down as well as up, with what was not there before."""
    found = changed(capsys, "--since", "2026-11-15T12:00", "--compare", other)
    assert list(found.items()) == [
        ("falls", (27, 3, -24)),
        ("worker", (3, 15, 12)),
        ("new", (0, 3, 3)),
    ]


def test_without_a_period_the_last_days_are_compared(movers: None, capsys: Output) -> None:
    """`--compare 3d`: the last three days with the three before."""
    assert changed(capsys, "--compare", "3d")["worker"] == (3, 15, 12)


def test_a_period_is_compared_with_another_by_name(movers: None, capsys: Output) -> None:
    """This month so far against a whole one, a day against a day."""
    assert changed(capsys, "--compare", "2026-10")["worker"] == (0, 19, 19)
    day = ("--where", "day=2026-11-16", "--compare")
    assert changed(capsys, *day, "2026-11-11")["worker"] == (1, 5, 4)
    assert changed(capsys, *day, "previous")["worker"] == (5, 5, 0)
    assert changed(capsys, *day, "1w") == {"falls": (0, 1, 1), "worker": (0, 5, 5)}
    week = changed(capsys, "--where", "week=2026-W47", "--compare", "previous")
    # As much of the week before as has passed of this one: until Wednesday at noon.
    assert week == {"falls": (0, 2, 2), "worker": (0, 10, 10), "new": (0, 3, 3)}


@pytest.mark.parametrize(
    ("since", "until", "against", "lengths"),
    [
        ("2026-11-17", "2026-11-18", "previous", "(1.0 days) (1.0 days)"),
        ("2026-11-17T06:00", "2026-11-17T12:00", "previous", "(6.0 hours) (6.0 hours)"),
        ("2026-11-17T06:00", "2026-11-17T06:30", "2026-11", "(30.0 minutes) (17.5 days)"),
    ],
)
def test_how_long_periods_are_is_said_in_their_own_unit(
    movers: None, capsys: Output, since: str, until: str, against: str, lengths: str
) -> None:
    """Hours are not 0.0 days; of a month that is not over it is what has passed of it."""
    main(["audit", "spend", "--since", since, "--until", until, "--compare", against])
    told = capsys.readouterr().out
    assert " ".join(re.findall(r"\([\d.]+ (?:days|hours|minutes)\)", told)) == lengths


def test_the_month_before_is_one_of_the_calendar(ledger: LedgerFile, capsys: Output) -> None:
    """March against February, and not against the 31 days before it."""
    zone = ZoneInfo("Europe/Berlin")
    times = [datetime(2026, month, 1, tzinfo=zone).timestamp() for month in (1, 2, 3)]
    costs = ("100", "10", "1")
    write(
        ledger.address,
        *(Entry(calls=[Call(price=c)], at=t) for c, t in zip(costs, times, strict=True)),
    )
    month = ("--where", "month=2026-03", "--compare", "previous", "--time-zone", "Europe/Berlin")
    assert changed(capsys, *month)["worker"] == (10, 1, -9)


def test_few_movers_and_all_others(movers: None, capsys: Output) -> None:
    """The rows still add up to the total."""
    found = changed(capsys, "--since", "2026-11-15T12:00", "--compare", "previous", "--top", "1")
    assert found == {"falls": (27, 3, -24), "(2 others)": (3, 18, 15)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--compare", "previous"), "needs a period"),
        (("--compare", "7d", "--by", "day"), "no day in common"),
        (("--compare", "800000d"), "two periods after 1970"),
        (("--compare", "previous", "--since", "0001-01-01"), "two periods after 1970"),
        (("--compare", "previous", "--where", "day=0001-01-01"), "two periods after 1970"),
        (("--compare", "previous", "--where", "month=1970-01"), "two periods after 1970"),
        (("--compare", "7d", "--since", "2030-01-01"), "has not started"),
        (("--compare", "2030-01"), "--compare 2030-01 is a period that has not started"),
        (("--compare", "7d", "--where", "day=2026-11-11", "--where", "day=2026-11-12"), "got 2"),
    ],
)
def test_incomparable_periods_are_rejected(
    movers: None, capsys: Output, arguments: tuple[str, ...], sentence: str
) -> None:
    """With a sentence that says why."""
    assert sentence in refused(capsys, *arguments)


@pytest.mark.parametrize("text", ["yesterday", "2026-13", "2026-1", "7", "-7d", "2026-W60", ""])
def test_invalid_period_is_rejected(capsys: Output, text: str) -> None:
    """With examples of what is one."""
    with pytest.raises(SystemExit):
        main(["audit", "spend", f"--compare={text}"])
    assert "previous, a duration, e.g. 7d, or a period, e.g. 2026-10" in capsys.readouterr().err


def test_tokens_move_where_nothing_has_a_price(ledger: LedgerFile, capsys: Output) -> None:
    """And money is not known, not 0."""
    write(ledger.address, Entry(at=NINE), Entry(at=NINE + DAY, calls=[Call(input=1000)]))
    day = ("--where", "day=2025-10-10", "--compare", "previous", "--by", "agent")
    (row,) = asked(capsys, *day)["changes"]
    assert (row["tokens_change"], row["cost_usd"], row["cost_change_usd"]) == (900, None, None)


# --- forecasts ------------------------------------------------------------------------------------


def test_a_steady_spend_is_foretold(ledger: LedgerFile, capsys: Output, at_noon: None) -> None:
    """$2 a day, half of it in the afternoon: $1 more today, $9 this week, $25 this month."""
    halves = [NOW - n * DAY / 2 - 3600 for n in range(40)]
    write(ledger.address, *(Entry(calls=[Call(price="1")], at=at) for at in halves))
    forecast = asked(capsys)["forecast"]
    assert (forecast["unit"], forecast["days"]) == ("usd", 19)
    found = {each["period"]: each for each in forecast["periods"]}
    assert {name: float(each["so_far"]) for name, each in found.items()} == {
        "day": 1,
        "week": 5,
        "month": 35,
    }
    assert {name: float(each["expected"]) for name, each in found.items()} == {
        "day": 2,
        "week": 14,
        "month": 60,
    }
    assert float(found["month"]["low"]) == float(found["month"]["high"]) == 60
    assert found["week"]["until"] == "2026-11-23T00:00:00+00:00"


def test_few_days_foretell_nothing(ledger: LedgerFile, capsys: Output, at_noon: None) -> None:
    """Six whole days are not enough, and it says so; seven are."""
    write(ledger.address, *days(*["1"] * 8, first=NOW - 7 * DAY))
    forecast = asked(capsys)["forecast"]
    assert (forecast["unit"], forecast["periods"]) == (None, [])
    assert forecast["sentence"].startswith("No forecast: 6 whole days")
    write(ledger.address, *days("1", first=NOW - 8 * DAY), first=100)
    assert asked(capsys)["forecast"]["days"] == ENOUGH_DAYS


def test_an_empty_ledger_foretells_nothing(ledger: LedgerFile, capsys: Output) -> None:
    """And calls of long ago are not history enough."""
    write(ledger.address, Entry())
    assert asked(capsys)["forecast"]["sentence"].startswith("No forecast: 0 whole days")


def test_the_past_has_no_forecast(ledger: LedgerFile, capsys: Output) -> None:
    """Nor has a question about some day."""
    write(ledger.address, Entry())
    for past in (
        ("--until", "2026-01-01"),
        ("--where", "day=2025-10-09"),
        ("--prices", "recorded"),
    ):
        assert "forecast" not in asked(capsys, *past)


def test_a_forecast_is_of_what_is_selected(
    ledger: LedgerFile, capsys: Output, at_noon: None
) -> None:
    """One agent's, in its tokens where nothing has a price; since when is asked does not matter."""
    tokens = [
        Entry(agent="free", calls=[Call(input=900, output=100)], at=NOW - n * DAY)
        for n in range(12)
    ]
    write(ledger.address, *days(*["3"] * 12, first=NOW - 11 * DAY), *tokens)
    free = asked(capsys, "--where", "agent=free", "--since", "2026-11-18")["forecast"]
    assert free["unit"] == "tokens"
    assert free["periods"][1]["expected"] == 2_000 + 1_000 + 4_000
    both = asked(capsys)["forecast"]
    assert "Excludes calls without a known price." in both["sentence"]


def test_a_day_of_the_zone_ends_when_it_ends_there(
    ledger: LedgerFile, capsys: Output, at_noon: None
) -> None:
    """In Tokyo it is 21:00 already."""
    write(ledger.address, *days(*["1"] * 12, first=NOW - 11 * DAY))
    forecast = asked(capsys, "--time-zone", "Asia/Tokyo")["forecast"]
    assert forecast["periods"][0]["until"] == "2026-11-18T15:00:00+00:00"


def test_beside_csv_the_forecast_is_on_standard_error(
    ledger: LedgerFile, capsys: Output, at_noon: None
) -> None:
    """And in a table a line behind it."""
    write(ledger.address, *days(*["1"] * 12, first=NOW - 11 * DAY))
    capsys.readouterr()
    assert main(["audit", "spend", "--format", "csv"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("Forecast: $")
    assert "Forecast" not in captured.out
    assert main(["audit", "spend"]) == 0
    assert "95% intervals, from 10 whole days" in capsys.readouterr().out


def test_amounts_of_a_projection_have_the_same_precision(
    ledger: LedgerFile, capsys: Output, at_noon: None
) -> None:
    """An interval from below to above one dollar included."""
    prices = (f"{0.4 + n % 3 * 0.456789:f}" for n in range(12))
    write(ledger.address, *days(*prices, first=NOW - 11 * DAY))
    sentence = asked(capsys)["forecast"]["sentence"]
    projections = re.findall(
        r"\$([\d.]+) by the end of the \w+ \(\$([\d.]+) to \$([\d.]+)\)", sentence
    )
    assert len(projections) == 3, sentence
    assert {len(each.partition(".")[2]) for part in projections for each in part} == {2}, sentence


def test_days_of_the_week_differ() -> None:
    """With three weeks seen, a Saturday is foretold from Saturdays."""
    first = date(2026, 10, 28)
    seen = {
        first + timedelta(days=n): 10.0 if (first + timedelta(days=n)).weekday() < 5 else 0.0
        for n in range(21)
    }
    ahead = [date(2026, 11, 20), date(2026, 11, 21), date(2026, 11, 22)]
    assert predicted(seen, ahead).mean == 10
    assert predicted(dict(list(seen.items())[:14]), ahead).mean == pytest.approx(300 / 14)


@pytest.mark.parametrize(
    ("freedom", "value"), [(6, 2.4469), (9, 2.2622), (14, 2.1448), (20, 2.0860), (26, 2.0555)]
)
def test_students_t(freedom: int, value: float) -> None:
    """As tables have it."""
    assert student(freedom) == pytest.approx(value, abs=0.002)


@pytest.mark.parametrize("shape", ["even", "office", "skewed"])
def test_the_range_holds_what_came(shape: str) -> None:
    """Of 100 months that were made up, at least 17 in 20 end within the range of 95 %."""
    rolled = random.Random(shape)  # noqa: S311
    held = 0
    for _ in range(100):
        amounts = {day: _rolled(rolled, shape, day) for day in range(60)}
        now = datetime(2026, 11, 18, 15, tzinfo=timezone.utc)
        origin = datetime(2026, 10, 15, tzinfo=timezone.utc)
        spent = {
            int((origin.timestamp() + day * DAY + hour * 3600) // 900): amount
            for day, hours in amounts.items()
            for hour, amount in hours.items()
        }
        past = {q: amount for q, amount in spent.items() if q * 900 < now.timestamp()}
        month = build_forecast(past, now, is_money=False).periods[-1]
        begin = datetime(2026, 11, 1, tzinfo=timezone.utc).timestamp()
        truth = sum(a for q, a in spent.items() if begin <= q * 900 < month.until_us / 1e6)
        held += month.low <= truth <= month.high
    assert held >= 85


def _rolled(rolled: random.Random, shape: str, day: int) -> dict[int, int]:
    """Hourly spend of a day; the first day is a Thursday."""
    scale = 1_000.0
    if shape == "office" and (day + 3) % 7 >= 5:
        scale = 50.0
    if shape == "skewed":
        scale *= rolled.lognormvariate(0, 0.8)
    hours: Sequence[int] = range(24) if shape == "even" else range(8, 19)
    return {hour: round(scale * rolled.uniform(0.5, 1.5)) for hour in hours}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there is no list for Python 3.10")
def test_price_list_is_shown_with_its_date(
    movers: None, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of costs sees how old the prices may be; from 60 days on, a warning says so."""
    assert main(["audit", "spend"]) == 0
    assert f"Installed price list: {catalogue.list_in_use()}." in plain(capsys.readouterr().out)
    monkeypatch.setattr(catalogue, "today", lambda: date(2100, 1, 1))
    assert main(["audit", "spend"]) == 0
    assert "Run: pip install --upgrade genai-prices" in plain(capsys.readouterr().out)


def plain(text: str) -> str:
    """Join wrapped lines."""
    return " ".join(text.split())


# --- the groups that cost most --------------------------------------------------------------------

PRICES = ("0.1", "0.4", "0.2", "0.3")


@pytest.fixture
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


@pytest.mark.usefixtures("four")
def test_the_most_expensive_stand_alone(capsys: Output) -> None:
    """The others are one row, and all rows add up to the total."""
    rows = rows_of(capsys, "--by", "agent,model", "--top", "2")
    assert [row["agent"] for row in rows] == ["a1", "a3", "(2 others)"]
    assert sum(Decimal(row["cost_usd"]) for row in rows) == Decimal("1.0")
    assert [row["tokens"] for row in rows] == [120, 120, 240]


@pytest.mark.usefixtures("four")
def test_days_stay_in_their_order(capsys: Output) -> None:
    """The most expensive days are chosen, and then stand as days do."""
    rows = rows_of(capsys, "--by", "day,agent", "--top", "3")
    assert [row["agent"] for row in rows] == ["a1", "a2", "a3", ""]


@pytest.mark.parametrize("arguments", [("--by", "agent", "--top", "4"), ("--by", "agent")])
@pytest.mark.usefixtures("four")
def test_without_others_there_is_no_such_row(capsys: Output, arguments: tuple[str, ...]) -> None:
    """Items that fit are listed."""
    assert len(rows_of(capsys, *arguments)) == len(PRICES)
