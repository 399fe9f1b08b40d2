"""Audit answers: every number, checked against known invocations."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.audit.answer import column_texts
from otel_limits.bindings.known import OURS, own_limits
from otel_limits.cli import main
from otel_limits.core.limits import Breach, Limits
from tests.ledger.book import DAY, NINE, Book, Call, Entry, write

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

Ask = Callable[..., Any]

TURNS_CAP = Breach("max_turns", 3, 3, "max_turns", "turns")


@pytest.fixture
def ask(ledger: LedgerFile, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Query the ledger and return the answer as JSON."""

    def question(*arguments: str) -> Any:
        assert ledger.path.exists()
        capsys.readouterr()
        assert main(["audit", *arguments, "--format", "json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return question


# --- spend ----------------------------------------------------------------------------------------


def test_spend_by_agent_and_model(week: LedgerFile, ask: Ask) -> None:
    """All figures, the costliest first."""
    rows, money = ask("spend")["spend"], ("0.030000000000", "0.009000000000")
    assert [tuple(row.values()) for row in rows] == [
        ("research", "big", 2, 3000, 500, 3500, pytest.approx(2 / 3), 0, *money, 0, 0, 0),
        ("writer", "small", 3, 80, 12, 92, 0.0, 5, "0.000000000001", "-0.001000000000", 77, 1, 0),
        ("research", "small", 1, 500, 50, 550, 0.0, 0, None, None, 550, 0, 0),
    ]


def test_the_total_is_exact_to_a_picodollar(week: LedgerFile, ask: Ask) -> None:
    """Money is never a float."""
    total = ask("spend", "--by", "agent")["totals"]["spend"]
    assert Decimal(total["cost_usd"]) == Decimal("0.030000000001")


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("day", ["2025-10-09", "2025-10-10", "2025-10-11"]),
        ("hour", ["2025-10-09 09:00", "2025-10-10 09:00", "2025-10-11 09:00"]),
        ("week", ["2025-W41"]),
        ("month", ["2025-10"]),
        ("tenant.id", ["acme", "other"]),
        ("session", ["s1", None]),
        ("conversation", ["c1", None]),
        ("state", ["measured", "estimated", "zero"]),
        ("agent", ["research", "writer"]),
        ("reason", ["end_turn"]),
    ],
)
def test_any_property_groups(week: LedgerFile, ask: Ask, by: str, groups: list[str | None]) -> None:
    """Dates, sessions, conversations, states, audit keys: each is a way to group."""
    answer = ask("spend", "--by", by)
    assert [row[by] for row in answer["spend"]] == groups
    assert sum(row["tokens"] for row in answer["spend"]) == 4142


def test_conditions_narrow(week: LedgerFile, ask: Ask) -> None:
    """`--where` takes audit keys and patterns, several for different names together."""
    found = ask("spend", "--by", "agent", "--where", "tenant.id=acme", "--where", "agent=res*")
    assert [(row["agent"], row["tokens"]) for row in found["spend"]] == [("research", 3500)]


def test_one_name_twice_is_either(week: LedgerFile, ask: Ask) -> None:
    """The same name given twice means any of its values."""
    found = ask("spend", "--where", "tenant.id=acme", "--where", "tenant.id=other")
    assert found["totals"]["spend"]["tokens"] == 4142


TENANTS = (("a", "acme"), ("b", "other"), ("c", None), ("d", ""))
"""Agents and the tenant that they work for."""


@pytest.mark.parametrize(
    ("condition", "agents"),
    [
        ("tenant.id=", "cd"),
        ("tenant.id!=", "ab"),
        ("tenant.id!=acme", "bcd"),
        ("tenant.id!=a*", "bcd"),
        ("tenant.id!=acme,tenant.id!=other", "cd"),
        ("tenant.id!=acme,tenant.id!=", "b"),
        ("agent!=a,tenant.id=acme,tenant.id=other", "b"),
        ("model!=model-of-b", "acd"),
        ("reason!=end_turn", ""),
    ],
)
def test_conditions_exclude(ledger: LedgerFile, ask: Ask, condition: str, agents: str) -> None:
    """Rows with another value or none are selected; several values are all excluded."""
    write(
        ledger.address,
        *(
            Entry(
                agent=agent,
                calls=[Call(model=f"model-of-{agent}")],
                attributes={} if tenant is None else {"tenant.id": tenant},
            )
            for agent, tenant in TENANTS
        ),
    )
    found = ask("spend", "--by", "agent", "--where", condition)["spend"]
    assert "".join(sorted(row["agent"] for row in found)) == agents
    assert ask("stops", "--where", condition)["totals"]["stops"]["invocations"] == len(agents)


def test_conditions_can_be_one_argument(ledger: LedgerFile, ask: Ask) -> None:
    """With commas, as a dashboard writes several agents; a comma within a value is left alone."""
    write(ledger.address, *(Entry(agent=name) for name in ("a", "b", "c", "a, or b=2")))
    found = ask("spend", "--by", "agent", "--where", "agent=a,agent=b")
    assert {row["agent"] for row in found["spend"]} == {"a", "b"}

    found = ask("spend", "--by", "agent", "--where", "agent=a, or b=2")
    assert {row["agent"] for row in found["spend"]} == {"a, or b=2"}


@pytest.mark.parametrize("key", ["app.kubernetes.io/name", "key:tokens", "9-a_b"])
def test_conditions_can_name_any_audit_key(ledger: LedgerFile, ask: Ask, key: str) -> None:
    """Otherwise a condition after a comma is part of the value before it, and excludes nothing."""
    name = key.removeprefix("key:")
    write(ledger.address, *(Entry(agent=agent, attributes={name: agent}) for agent in "abc"))
    found = ask("spend", "--by", "agent", "--where", f"agent!=a,{key}!=b")
    assert [row["agent"] for row in found["spend"]] == ["c"]


def test_a_pattern_is_no_pattern_of_the_database(ledger: LedgerFile, ask: Ask) -> None:
    """`%` and `_` are literal, and case counts."""
    write(ledger.address, *(Entry(agent=name) for name in ("a%b_c", "aXbYc", "A%B_C")))
    found = ask("spend", "--by", "agent", "--where", "agent=a%b_*")
    assert [row["agent"] for row in found["spend"]] == ["a%b_c"]


def test_a_window(week: LedgerFile, ask: Ask) -> None:
    """`--since` is included, `--until` is not."""
    window = ("--since", "2025-10-10", "--until", "2025-10-11T09:00:01")
    assert ask("spend", *window)["totals"]["spend"]["tokens"] == 550


@pytest.mark.parametrize("days", [1, 4])
def test_a_call_is_summed_once_however_its_days_are_split(
    ledger: LedgerFile, ask: Ask, days: int
) -> None:
    """At any start or end of a window, within a day or at midnight."""
    calls = [Call(input=1 << day, output=0) for day in range(days)]
    write(ledger.address, *(Entry(calls=[c], at=NINE + n * DAY) for n, c in enumerate(calls)))
    for first in range(days):
        for last in range(first, days):
            for since, until in (("", "T23:59:59"), ("T09:00:01", "T09:00:02")):
                begin, end = f"2025-10-{9 + first:02}{since}", f"2025-10-{9 + last:02}{until}"
                found = ask("spend", "--since", begin, "--until", end)["totals"]["spend"]
                assert found["tokens"] == (2 << last) - (1 << first)


def test_a_sub_agent_spends_for_the_tenant_of_its_root(ledger: LedgerFile, ask: Ask) -> None:
    """An attribute of the outermost invocation is that of everything below it."""
    book = Book(ledger.address)
    root = book.write(Entry(agent="boss", attributes={"tenant.id": "acme"}))
    book.write(Entry(agent="helper", parent=root))
    book.close()
    found = ask("spend", "--by", "tenant.id,agent")
    assert {(row["tenant.id"], row["agent"]) for row in found["spend"]} == {
        ("acme", "boss"),
        ("acme", "helper"),
    }


def test_csv_has_the_rows_and_no_total(
    week: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that adds up a column must not count everything twice."""
    assert main(["audit", "spend", "--by", "agent", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(int(row["tokens"]) for row in rows) == 4142


def test_the_table_on_a_terminal(week: LedgerFile, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers are grouped, money has cents, what is not known is a dash."""
    assert main(["audit", "spend"]) == 0
    text = capsys.readouterr().out
    line = next(each for each in text.splitlines() if "big" in each)
    assert line.split() == [
        "research",
        "big",
        "2",
        "3,000",
        "500",
        "3,500",
        "66.7%",
        "0",
        "$0.030000",
        "$0.009",
        "0",
        "0",
        "0",
    ]
    assert "–" in next(each for each in text.splitlines() if "550" in each)  # noqa: RUF001


def test_amounts_of_a_column_have_the_same_precision() -> None:
    """Two digits of the smallest one, and at most four decimal places next to dollars."""
    for amounts, texts in (
        (("18.794", "0.5", None, "0"), "$18.79 $0.50 – $0.00"),  # noqa: RUF001
        (("18.794", "0.058392", "0.126"), "$18.794 $0.058 $0.126"),
        (("1234.5", "0.000753", "0.00000753"), "$1,234.5000 $0.0008 <_$0.0001"),
        (("0.03", "0.009"), "$0.030 $0.009"),
        (("0.5", "-0.0000012", "0.0000001"), "$0.500000 -$0.000001 <_$0.000001"),
        ((), ""),
    ):
        written = column_texts(amounts, "money")
        assert " ".join(each.replace(" ", "_") for each in written) == texts


def test_a_long_table_is_aligned_too(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """With hundreds of rows it has the same columns, aligned, and its total."""
    write(ledger.address, *(Entry(agent=f"a{n}") for n in range(250)))
    assert main(["audit", "spend", "--by", "agent"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines[1:255]}) == 1
    assert lines[254].split()[:4] == ["total", "250", "25,000", "5,000"]


def test_markup_in_a_name_is_text(ledger: LedgerFile, capsys: pytest.CaptureFixture[str]) -> None:
    """An agent called `[red]` is shown as it is called."""
    write(ledger.address, Entry(agent="[red]x[/red]"))
    assert main(["audit", "spend"]) == 0
    assert "[red]x[/red]" in capsys.readouterr().out


# --- stops ----------------------------------------------------------------------------------------


@pytest.fixture
def halts(ledger: LedgerFile) -> LedgerFile:
    """Natural ends and halts."""
    halted = {"reason": "max_turns", "action": "halted", "breach": TURNS_CAP}
    write(
        ledger.address,
        Entry(calls=[Call(), Call(input=0, output=0, kind="zero_token")]),
        Entry(
            calls=[
                Call(kind="estimated", estimated=True),
                Call(kind="unmeasured", input=0, output=0),
            ]
        ),
        Entry(calls=[Call(price="1")] * 3, **halted),  # type: ignore[arg-type]
        Entry(calls=[Call(price="2")] * 3, **halted),  # type: ignore[arg-type]
        Entry(agent="other", calls=[Call(input=9000)], reason="max_turns", action="wrapped_up"),
    )
    return ledger


def test_own_limits_of_frameworks_are_explained_if_there_are_any(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Next to max_turns, max_turns_exceeded reads like a limit of otel-limits."""
    assert set(own_limits()) <= {reason for each in OURS for reason in each.stop_reasons}
    note = "max_turns_exceeded is the framework's own limit: max_turns of Runner.run() in the"
    write(ledger.address, Entry(), Entry(reason="max_turns_exceeded"))
    for reason in ("end_turn", "max_turns_exceeded"):
        assert main(["audit", "stops", "--where", f"reason={reason}"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert (note in shown) == (reason == "max_turns_exceeded")
        assert "recursion_limit" not in shown


def test_refused_tool_calls_are_beside_the_stops(ledger: LedgerFile, ask: Ask) -> None:
    """By agent, tool and limit; a call that was only observed at its cap is none."""
    write(
        ledger.address,
        Entry(tools=["search", "search?", "search?", "fetch?", "fetch!"]),
        Entry(agent="trial", tools=["search??", "search", "pay"]),
        Entry(tools=["search?"]),
    )
    assert ask("stops")["refused_tool_calls"] == [
        {
            "agent": agent,
            "tool": tool,
            "limit": "max_calls_per_tool",
            "refused_calls": refused,
            "would_be_refusals": would_be,
        }
        for agent, tool, refused, would_be in (
            ("worker", "search", 3, 0),
            ("trial", "search", 0, 1),
            ("worker", "fetch", 1, 0),
        )
    ]
    found = ask("stops", "--where", "agent=trial")["refused_tool_calls"]
    assert [row["tool"] for row in found] == ["search"]


def test_stops_by_reason(halts: LedgerFile, ask: Ask) -> None:
    """Synthetic halts, zero-token calls, estimated and unmeasured calls are four columns."""
    rows = {(row["reason"], row["agent"]): row for row in ask("stops")["stops"]}
    columns = (
        *("invocations", "synthetic_halts", "zero_token_calls"),
        *("estimated_calls", "unmeasured_calls"),
    )
    assert {key: tuple(row[name] for name in columns) for key, row in rows.items()} == {
        ("end_turn", "worker"): (2, 0, 1, 1, 1),
        ("max_turns", "worker"): (2, 2, 0, 0, 0),
        ("max_turns", "other"): (1, 0, 0, 0, 0),
    }


def test_would_be_halts_have_the_reason_of_the_metrics(ledger: LedgerFile, ask: Ask) -> None:
    """Of limits, of those of trees and of loops, and of quotas; not where nothing was observed."""
    breaches = {
        "max_turns": Breach("max_turns", 3, 3, "max_turns"),
        "max_token_budget": Breach("tree_max_token_budget", 9, 9, "max_token_budget"),
        "loop_detected": Breach("max_repeated_tool_cycles", 5, 5, "loop_detected"),
        "quota_exceeded": Breach("team", 10, 11, "quota_exceeded"),
    }
    observed = [Entry(action="observed", breach=breach) for breach in breaches.values()]
    halted = Entry(reason="max_turns", action="halted", breach=breaches["max_turns"])
    write(ledger.address, *observed, halted, Entry())

    rows = ask("stops", "--where", "action=observed")["stops"]
    assert {(row["reason"], row["would_be"]) for row in rows} == {
        ("end_turn", reason) for reason in breaches
    }
    rows = ask("stops", "--where", "reason=max_turns")["stops"]
    assert {(row["reason"], row["action"], row["would_be"]) for row in rows} == {
        ("max_turns", "halted", ""),
        ("end_turn", "observed", "max_turns"),
    }


def test_the_most_expensive_halts_have_their_traces(halts: LedgerFile, ask: Ask) -> None:
    """The price decides, then the tokens; natural ends are not among them."""
    found = ask("stops", "--top", "2")["costliest_halted"]
    assert [(row["trace_id"][:8], row["cost_usd"], row["limit"], row["cap"]) for row in found] == [
        ("00000004", "6.000000000000", "max_turns", "3"),
        ("00000003", "3.000000000000", "max_turns", "3"),
    ]


def test_cap_of_a_quota_has_its_unit(ledger: LedgerFile, ask: Ask) -> None:
    """Only the policy file knows it otherwise, and may have changed since."""
    breach = Breach("team", 10, 11, "quota_exceeded", "model calls")
    write(ledger.address, Entry(reason="quota_exceeded", action="halted", breach=breach))
    (row,) = ask("stops")["costliest_halted"]
    assert (row["cap"], row["observed"], row["unit"]) == ("10", "11", "model calls")
    (branch,) = ask("show", row["trace_id"])["tree"]
    assert branch["halt"] == "halted at team (11 with this call, of 10 model calls)"


def test_amounts_of_a_halt_are_those_of_the_log(ledger: LedgerFile, ask: Ask) -> None:
    """A sum of prices has zeros at its end, which the log line does not show either."""
    cap, observed = Decimal("0.001"), Decimal("0.00105000")
    breach = Breach("max_cost_usd", cap, observed, "max_cost_usd", "USD")
    write(ledger.address, Entry(reason="max_cost_usd", action="halted", breach=breach))
    (row,) = ask("stops")["costliest_halted"]
    assert (row["cap"], row["observed"]) == ("0.001", "0.00105")
    (branch,) = ask("show", row["trace_id"])["tree"]
    assert breach.amount.startswith("0.00105 of 0.001 USD ")
    assert branch["halt"] == "halted at max_cost_usd (0.00105 of 0.001 USD)"


def test_refused_tool_call_is_not_overspent(ledger: LedgerFile, ask: Ask) -> None:
    """The limit held: the call beyond it did not run."""
    breach = Breach("max_tool_calls", 4, 5, "max_tool_calls", "tool calls")
    write(ledger.address, Entry(reason="max_tool_calls", action="halted", breach=breach))
    (branch,) = ask("show", "00000001")["tree"]
    assert branch["halt"] == "halted at max_tool_calls (5 with this call, of 4 tool calls)"


def test_unpriced_calls_do_not_cost_zero(halts: LedgerFile, ask: Ask) -> None:
    """An unknown price is never $0."""
    answer = ask("stops")
    costs = {row["reason"] + row["agent"]: row["cost_usd"] for row in answer["stops"]}
    assert costs["end_turnworker"] is None
    assert answer["costliest_halted"][-1]["cost_usd"] is None


def test_unpriced_calls_do_not_save_zero(ledger: LedgerFile, ask: Ask) -> None:
    """The same of what a limit would have saved."""
    write(ledger.address, Entry(calls=[Call()] * 3))
    answer = ask("backtest", "--max-turns", "1")
    assert answer["backtest"][0]["saved_usd"] is None
    assert [cut["saved_usd"] for cut in answer["cuts"]] == [None]


# --- show -----------------------------------------------------------------------------------------


@pytest.fixture
def family(ledger: LedgerFile) -> LedgerFile:
    """A boss with two helpers, one of which was halted."""
    book = Book(ledger.address)
    root = book.write(Entry(agent="boss", calls=[Call(price="1")] * 2, tools=["ask", "ask!"]))
    book.write(Entry(agent="good", calls=[Call(price="2")], parent=root, at=NINE + 1))
    bad = book.write(
        Entry(agent="bad", calls=[Call()] * 3, reason="max_turns", action="halted",
              breach=TURNS_CAP, parent=root, at=NINE + 2)
    )  # fmt: skip
    book.write(Entry(agent="deep", parent=bad, at=NINE + 3))
    book.close()
    return ledger


def test_a_tree_sums_its_branches(family: LedgerFile, ask: Ask) -> None:
    """Each row has its own tokens and those of everything below it, in the tree's order."""
    rows = ask("show", "00000001" + 24 * "a")["tree"]
    assert [(r["level"], r["agent"], r["tokens"], r["branch_tokens"]) for r in rows] == [
        (0, "boss", 240, 840),
        (1, "good", 120, 120),
        (1, "bad", 360, 480),
        (2, "deep", 120, 120),
    ]
    assert rows[0]["branch_cost_usd"] == "4.000000000000"
    assert rows[0]["tools"] == "ask, ask (error)"
    assert rows[2]["halt"] == "halted at max_turns (3 of 3 turns)"


@pytest.mark.parametrize("identity", ["00000001", f"{3:032x}"])
def test_a_tree_is_found_by_less(family: LedgerFile, ask: Ask, identity: str) -> None:
    """The first eight digits of a trace, or an invocation anywhere in the tree, are enough."""
    found = ask("show", identity)["tree"]
    assert [row["agent"] for row in found] == ["boss", "good", "bad", "deep"]


def test_a_tree_on_a_terminal(family: LedgerFile, capsys: pytest.CaptureFixture[str]) -> None:
    """It is drawn as a tree, below the sentence that says what halted it."""
    assert main(["audit", "show", "00000001"]) == 0
    summary, _, title, *tree = capsys.readouterr().out.splitlines()
    assert summary.startswith("Agent 'bad' was halted by max_turns: 3 of 3 turns used.")
    assert title == "Budget tree"
    assert [line[:9] for line in tree[:4]] == ["boss  sto", "├── good ", "└── bad  ", "    └── d"]
    assert "  stop reason max_turns  halted at max_turns (3 of 3 turns)  turns 3" in tree[2]


# --- backtest -------------------------------------------------------------------------------------


def test_imported_calls_are_replayed_by_their_times(ledger: LedgerFile, ask: Ask) -> None:
    """They have no number and come in any order: the earlier of them stay, the later are saved."""
    write(ledger.address, Entry(calls=[Call(input=1), Call(input=10), Call(input=100)]))
    with closing(sqlite3.connect(ledger.path)) as connection:
        connection.execute(
            "UPDATE otel_limits_model_calls SET number = NULL, turn = NULL, iteration = NULL,"
            " at_us = 2000000000000000 - at_us"
        )
        connection.commit()
    (cut,) = ask("backtest", "--max-turns", "1")["cuts"]
    assert cut["saved_tokens"] == (1 + 10) + 2 * 20


def test_backtest_reports_the_savings_of_a_cap(ledger: LedgerFile, ask: Ask) -> None:
    """The calls beyond the cap are saved; a natural end on the last permitted turn is no halt."""
    write(
        ledger.address,
        Entry(agent="short", calls=[Call(price="1")] * 2),
        Entry(agent="long", calls=[Call(price="1")] * 5),
        Entry(agent="long", calls=[Call(price="1")] * 4, reason="error"),
    )
    answer = ask("backtest", "--max-turns", "2")
    rows = {row["agent"]: row for row in answer["backtest"]}
    assert (rows["short"]["halted"], rows["short"]["saved_tokens"]) == (0, 0)
    assert {name: rows["long"][name] for name in ("halted", "cut_successes", "saved_tokens")} == {
        "halted": 2,
        "cut_successes": 1,
        "saved_tokens": 5 * 120,
    }
    assert rows["long"]["saved_usd"] == "5.000000000000"
    assert [(row["turn"], row["turns"], row["successful"]) for row in answer["cuts"]] == [
        (2, 5, "yes"),
        (2, 4, "no"),
    ]


def test_the_earliest_of_several_limits_halts(ledger: LedgerFile, ask: Ask) -> None:
    """Each invocation shows the limit and the turn."""
    write(ledger.address, Entry(calls=[Call(input=1000, output=0)] * 10))
    caps = ("--max-turns", "8", "--max-token-budget", "3500")
    (cut,) = ask("backtest", *caps)["cuts"]
    assert (cut["limit"], cut["turn"], cut["saved_tokens"]) == ("max_token_budget", 4, 6000)


def test_retries_are_no_turns(ledger: LedgerFile, ask: Ask) -> None:
    """Three calls for one turn are one turn."""
    calls = [Call(turn=1), Call(turn=1), Call(turn=1), Call(turn=2)]
    write(ledger.address, Entry(calls=calls))
    assert ask("backtest", "--max-turns", "2")["cuts"] == []
    assert ask("backtest", "--max-turns", "1")["cuts"][0]["saved_tokens"] == 120


def test_a_backtest_of_some_agents(ledger: LedgerFile, ask: Ask) -> None:
    """`--agent` is a pattern."""
    write(
        ledger.address,
        *(Entry(agent=a, calls=[Call()] * 3) for a in ("research-1", "w", "research-2")),
    )
    rows = ask("backtest", "--max-cost-usd", "1", "--max-turns", "1", "--agent", "research-*")[
        "backtest"
    ]
    assert [(row["agent"], row["halted"]) for row in rows] == [("research-1", 1), ("research-2", 1)]


# --- suggest --------------------------------------------------------------------------------------


def test_suggested_limits_are_a_policy_file(
    ledger: LedgerFile,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The 99th percentile of successful invocations plus headroom, and `check` accepts it."""
    odd_name = 'a "quoted": [agent]*'
    runs = [Entry(agent=odd_name, calls=[Call(input=100, output=0)] * n) for n in range(1, 101)]
    failed = [Entry(agent=odd_name, calls=[Call()] * 300, reason="error")]
    few = [Entry(agent="few")] * 3
    write(ledger.address, *runs, *failed, *few)
    assert main(["audit", "suggest"]) == 0
    text, beside = capsys.readouterr()
    assert beside.startswith("Totals of the whole ledger match: ")
    assert "limits: {max_turns: 119, max_token_budget: 12000}" in text
    assert '# "few": 3 successful invocations, but 20 are needed.' in text
    policy = tmp_path / "policy.yaml"
    policy.write_text(text, encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    assert main(["check", "--agent", odd_name]) == 0
    assert "119" in capsys.readouterr().out


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["spend", "--by", "bananas"],
            "The ledger has no property bananas. Available: agent, model,",
        ),
        (["spend", "--where", "bananas=2"], "The ledger has no property bananas."),
        (["show", "99999999"], "has no trace or invocation 99999999"),
        (
            ["spend", "--since", "2025-11-20", "--until", "2025-11-20"],
            "--until must be later than --since, which is 2025-11-20 00:00:00+00:00, got 2025",
        ),
        (["backtest"], "No limit given. Pass at least one, e.g. --max-turns 20, or --policy"),
        (["spend", "--ledger", "mysql://x/y"], "must be a path, sqlite:///PATH or postgresql://"),
    ],
)
def test_a_question_without_an_answer(
    week: LedgerFile, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """A sentence says what is wrong and what there is; the exit status is 2."""
    assert main(["audit", *arguments]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_misspelled_agent_is_no_quiet_month(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line says that the ledger has none of that name."""
    write(ledger.address, Entry(agent="researcher"))
    for agent, line in (
        ("reseacher", "The ledger has no agent 'reseacher'; the closest is 'researcher'."),
        ("gardener", "The ledger has no agent 'gardener'."),
        ("g*", "The ledger has no agent 'g*'."),
        ("researcher", ""),
        ("re*", ""),
    ):
        assert main(["audit", "stops", "--agent", agent, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out).get("summary", "") == line


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("model=gpt-5", ""),
        ("model=gpt5", "The ledger has no model 'gpt5'; the closest is 'gpt-5'."),
        ("tenant=acme", ""),
        ("tenant=amce", "The ledger has no tenant 'amce'; the closest is 'acme'."),
        ("tenant!=amce", "The ledger has no tenant 'amce'; the closest is 'acme'."),
        ("tenant=", ""),
        ("reason=end_trun", "The ledger has no reason 'end_trun'; the closest is 'end_turn'."),
        ("state=mesured", "The ledger has no state 'mesured'; the closest is 'measured'."),
        ("day=2020-01-01", "The ledger has no day '2020-01-01'."),
    ],
)
def test_any_selected_value_that_is_missing_is_named(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], given: str, line: str
) -> None:
    """Of every property and audit key that a question can select."""
    write(ledger.address, Entry(calls=[Call(model="gpt-5")], attributes={"tenant": "acme"}))
    assert main(["audit", "spend", "--where", given, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out).get("summary", "") == line


def test_period_outside_the_ledger_is_answered_with_that_of_the_ledger(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped year would look like a quiet one."""
    write(ledger.address, Entry(), Entry())
    line = "The ledger's invocations are of 2025-10-09 09:00:00 to 2025-10-09 0"
    periods = (("--since", "2099-01-01"), line), (("--until", "2025-01-01"), line), ((), "")
    for period, expected in (*periods, (("--since", "2025-10-01"), "")):
        assert main(["audit", "stops", *period, "--format", "json"]) == 0
        summary = json.loads(capsys.readouterr().out).get("summary", "")
        assert summary[: len(line)] == expected


def test_no_ledger_is_made_by_asking(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question to a ledger that does not exist says so."""
    assert main(["audit", "spend"]) == 2
    assert f"No ledger found at {ledger.path}." in capsys.readouterr().err
    assert not ledger.path.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["spend", "--since", "yesterday"],
        ["spend", "--where", "tenant"],
        ["spend", "--by", ","],
        ["show", "xyz"],
        ["backtest", "--max-turns", "0"],
        ["backtest", "--max-cost-usd", "nan"],
        ["suggest", "--percentile", "-1"],
    ],
)
def test_an_argument_that_makes_no_sense(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before any ledger is opened."""
    with pytest.raises(SystemExit) as stop:
        main(["audit", *arguments])
    assert stop.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_rows_that_wait_beside_the_ledger_are_in_the_answer(
    faulty: None, ledger: LedgerFile, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question first takes back what an outage left in spill files."""
    from otel_limits.ledger.database import Database

    def refuse(_database: Database, _rows: object) -> dict[str, int]:
        raise OSError(5, "no")

    write(ledger.address, Entry())
    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", refuse)
        write(ledger.address, Entry(agent="later"), first=2)
    assert ledger.spills()
    assert {row["agent"] for row in ask("spend")["spend"]} == {"worker", "later"}


def test_limits_are_drawn_from_the_record(ledger: LedgerFile) -> None:
    """The caps in force are stored with an invocation."""
    write(ledger.address, Entry(limits=Limits(max_turns=7)))
    assert json.loads(ledger.invocations()[0]["limits"]) == {"max_turns": 7}
