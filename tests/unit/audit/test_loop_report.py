"""`loops` and `show`: who repeats itself, what it cost, turn by turn, and what ended it."""

from __future__ import annotations

import json
import sqlite3
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from strands.types.exceptions import EventLoopException

from otel_limits import Limits, enable
from otel_limits.audit.loop_report import LOOPS, RepeatGroup
from otel_limits.audit.show import SHOW
from otel_limits.cli import main
from otel_limits.cli.show.data import schema_of
from otel_limits.core.halt_texts import WRAPPED_UP_REMARK
from otel_limits.core.limits import Breach
from otel_limits.testing import ScriptedModel, endless, fails, says, uses
from tests.ledger.book import Call, Entry, write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile

Output = pytest.CaptureFixture[str]

LOOPED: dict[str, Any] = {
    "reason": "loop_detected",
    "action": "halted",
    "breach": Breach("max_identical_tool_calls", 3, 3, "loop_detected", "calls"),
}


def asked(capsys: Output, name: str, *arguments: str) -> Any:
    """The answer as JSON, which fits its schema."""
    capsys.readouterr()
    assert main(["audit", name, "--format", "json", *arguments]) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    question = SHOW if name == "show" else LOOPS
    checks = jsonschema.Draft202012Validator(schema_of(question))
    assert list(checks.iter_errors(document)) == []
    return document


RUNAWAY = Entry(
    agent="runs",
    calls=[
        Call(input=10, output=0, price="1", tools=["search=a"]),
        Call(input=20, output=0, price="2", tools=["search=a", "fetch=x"]),
        Call(input=40, output=0, price="4", tools=["search=a"]),
        Call(input=80, output=0, price="8", side=True),
        Call(input=160, output=0, price="16", turn=4),
    ],
    **LOOPED,
)
"""Turns 2 and 3 repeat the call of turn 1: half of the third call, and all of the last, follow."""


def test_repeated_calls_are_grouped(ledger: LedgerFile, capsys: Output) -> None:
    """By agent and tool, with the cost of what got the results again."""
    quiet = Entry(calls=[Call(tools=["search=a", "search=b", "other"]), Call(tools=["other"])])
    write(ledger.address, RUNAWAY, quiet, RUNAWAY)
    answer = asked(capsys, "loops")
    (row,) = answer["loops"]
    assert (row["agent"], row["tool"], row["repeats"], row["repeated_share"]) == (
        "runs", "search", 4, pytest.approx(4 / 6),
    )  # fmt: skip
    assert (row["invocations"], row["halted"], row["most"], row["seconds"]) == (2, 2, 3, 2.0)
    assert (row["tokens"], Decimal(row["cost_usd"])) == (2 * (20 + 160), 2 * (2 + 16))
    assert answer["totals"]["loops"]["repeats"] == 4
    worst = answer["worst"][0]
    assert (worst["calls"], worst["turns"], worst["reason"]) == (3, "1-3", "loop_detected")
    assert worst["fingerprint"].startswith("a0")


def test_a_part_of_the_ledger_is_asked(ledger: LedgerFile, capsys: Output) -> None:
    """As with every other question; what tool calls do not have is a sentence."""
    write(ledger.address, RUNAWAY)

    def repeats(*options: str) -> list[int]:
        return [row["repeats"] for row in asked(capsys, "loops", *options)["loops"]]

    assert repeats("--where", "agent=other") == []
    assert repeats("--where", "reason=loop*", "--top", "1") == [2]
    assert repeats("--since", "2026-01-01") == []
    assert repeats("--where", "model=m") == [2]
    assert repeats("--where", "model=other") == []
    assert main(["audit", "loops", "--where", "state=zero"]) == 2
    assert "has no state" in capsys.readouterr().err


TWO_LOOPS = Entry(
    calls=[
        Call(input=10, output=0, price="1", model="a", tools=["search=a", "fetch=x"]),
        Call(input=20, output=0, price="2", model="b", tools=["search=a", "fetch=x"]),
        Call(input=40, output=0, price="4", model="a", tools=["search=a", "fetch=x"]),
        Call(input=80, output=0, price="8", model="b"),
    ],
)
"""A call and its tools each second, from 2025-10-09 09:00:01 UTC on."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"fetch": (2, 2 / 3, 60, 6), "search": (2, 2 / 3, 60, 6)}),
        (["--where", "tool=search"], {"search": (2, 2 / 3, 60, 6)}),
        (
            ["--since", "2025-10-09T09:00:02Z"],
            {"fetch": (1, 1 / 2, 40, 4), "search": (1, 1 / 2, 40, 4)},
        ),
        (
            ["--until", "2025-10-09T09:00:04Z"],
            {"fetch": (2, 2 / 3, 20, 2), "search": (2, 2 / 3, 20, 2)},
        ),
        (["--where", "model=a"], {"fetch": (2, 2 / 3, 20, 2), "search": (2, 2 / 3, 20, 2)}),
    ],
    ids=["all", "tool", "since", "until", "model"],
)
def test_selection_applies_to_repeats_and_their_cost(
    ledger: LedgerFile,
    capsys: Output,
    options: list[str],
    expected: Mapping[str, tuple[int, float, int, int]],
) -> None:
    """No share is above 100%, and no cost above that of `spend` with the same options."""
    write(ledger.address, TWO_LOOPS)
    connection = sqlite3.connect(ledger.path)
    with connection:
        connection.execute("UPDATE otel_limits_tool_calls SET at_us = at_us + 1000000 * turn")
    connection.close()
    answer = asked(capsys, "loops", *options)
    found = {
        row["tool"]: (
            row["repeats"], row["repeated_share"], row["tokens"], Decimal(row["cost_usd"]),
        )
        for row in answer["loops"]
    }  # fmt: skip
    assert found == expected
    assert {row["tool"] for row in answer["worst"]} == set(expected)


def test_calls_without_a_hash_repeat_nothing(ledger: LedgerFile, capsys: Output) -> None:
    """Imported and refused calls have no hash."""
    write(ledger.address, Entry(calls=[Call(tools=["search"] * 5), Call()]))
    answer = asked(capsys, "loops")
    assert (answer["loops"], answer["worst"]) == ([], [])


def test_loops_of_calls_without_turns_have_no_cost(ledger: LedgerFile, capsys: Output) -> None:
    """Without turns the repeats can be counted, but not what they cost."""
    write(ledger.address, RUNAWAY)
    connection = sqlite3.connect(ledger.path)
    with connection:
        connection.execute("UPDATE otel_limits_tool_calls SET turn = NULL")
    connection.close()
    (row,) = asked(capsys, "loops")["loops"]
    assert (row["repeats"], row["cost_usd"]) == (2, None)
    assert asked(capsys, "show", "00000001")["tools"][0]["turns"] is None


def test_real_loop_is_found_without_a_loop_limit(
    ledger: LedgerFile, make_agent: MakeAgent, capsys: Output
) -> None:
    """Seven turns of the same call, which only a cap on turns has ended."""
    enable(Limits(max_turns=7))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    assert len(ledger.calls()) == 7
    (row,) = asked(capsys, "loops")["loops"]
    assert (row["tool"], row["repeats"], row["halted"]) == ("search", 6, 0)


def test_repeated_failures_are_found(
    ledger: LedgerFile, make_agent: MakeAgent, capsys: Output
) -> None:
    """An application that calls its agent again after each failure; the first one repeats none."""
    enable(Limits(max_turns=7))
    script = [*[uses("search"), fails(OSError("down"))] * 4, says("done")]
    agent = make_agent(ScriptedModel(script))
    for prompt in ["go"] * 3 + ["stay"]:
        with pytest.raises(EventLoopException, match="down"):
            agent(prompt)
    agent("go")
    assert [row["repeated_failures"] for row in ledger.invocations()] == [1, 2, 3, 1, 0]
    (row,) = asked(capsys, "loops")["repeated_failures"]
    assert (row["agent"], row["reason"]) == ("tester", "error")
    assert (row["repeats"], row["most"], row["tokens"]) == (2, 3, 30)
    assert asked(capsys, "loops", "--where", "reason=max_turns")["repeated_failures"] == []


def test_show_opens_with_what_halted_it(
    ledger: LedgerFile,
    make_agent: MakeAgent,
    capsys: Output,
    warnings_logged: Callable[[], list[str]],
) -> None:
    """The sentence that the log says, then what it repeated, and what it had used."""
    enable(Limits(max_identical_tool_calls=3))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    (said,) = warnings_logged()
    assert said.startswith(
        "Agent 'tester' was halted by max_identical_tool_calls for tool 'search': 3 of 3 identical "
        "calls. The limit is set in test_loop_report.py:"
    )
    identity = ledger.invocations()[0]["id"]
    capsys.readouterr()
    assert main(["audit", "show", identity]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"{said} It called search 3 times with identical arguments and results. "
        "It had used 45 tokens in 3 turns."
    )
    answer = asked(capsys, "show", identity)
    assert [row["tools"] for row in answer["turns"]] == ["search"] * 3
    (tool,) = answer["tools"]
    assert (tool["calls"], tool["turns"]) == (3, "1-3")


CAP = "by max_turns: 1 of 1 turns used."
OPERATOR = "Agent 'worker' was killed."
GOES_ON = "Continuing because the action is observe."
ENDED = "The invocation ended with"
WROTE = WRAPPED_UP_REMARK
AGAIN = "Run the agent again to continue, or raise the limit."
OBSERVED = Breach("max_turns", 1, 1, "max_turns", "turns")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Entry(), "worker ended with end_turn after 1 turn without a halt. It used"),
        (
            Entry(reason="killed", action="killed"),
            f"{OPERATOR} Run the agent again when it is safe to continue. It had used",
        ),
        (
            Entry(action="observed", breach=OBSERVED),
            f"Agent 'worker' would have been halted {CAP} {GOES_ON} {ENDED} end_turn. It had used",
        ),
        (
            Entry(reason="max_turns", action="wrapped_up", breach=OBSERVED),
            f"Agent 'worker' was halted {CAP} {WROTE} {AGAIN} It had used",
        ),
        (
            Entry(reason="error", action="wrapped_up", breach=OBSERVED),
            f"Agent 'worker' was halted {CAP} {WROTE} {AGAIN} {ENDED} error. It had used",
        ),
        (
            Entry(reason="lost", action="lost"),  # type: ignore[arg-type]  # of `end-lost`
            "worker has no recorded end, so a halt is unknown. Recorded usage:",
        ),
    ],
    ids=["ended", "killed", "observed", "wrapped up", "failed after its answer", "lost"],
)
def test_the_sentence_of_other_ends(
    ledger: LedgerFile, capsys: Output, entry: Entry, said: str
) -> None:
    """Natural ends, kills, and what is only observed."""
    write(ledger.address, entry)
    assert asked(capsys, "show", "00000001")["summary"].startswith(f"{said} 120 tokens")


def test_a_tree_names_its_first_halt_and_counts_the_others(
    ledger: LedgerFile, capsys: Output
) -> None:
    """From the root down, with what the whole branch used."""
    parent, *_ = write(ledger.address, Entry(agent="top"))
    write(
        ledger.address, Entry(agent="low", parent=parent, **LOOPED),
        Entry(agent="lower", parent=parent, **LOOPED), first=10,
    )  # fmt: skip
    observed = Entry(agent="observed", parent=parent, action="observed", breach=OBSERVED)
    write(ledger.address, observed, first=20)
    said = asked(capsys, "show", "00000001")["summary"]
    assert said.startswith("Agent 'low' was halted by max_identical_tool_calls: 3 of 3 calls.")
    assert said.endswith(
        "It had used 120 tokens in 1 turn; 1 more invocation of the tree was halted."
    )


def test_tokens_and_turns_are_those_of_the_same_branch(ledger: LedgerFile, capsys: Output) -> None:
    """A parent that was halted is shown with the turns of what it started, whose tokens it has."""
    parent, *_ = write(ledger.address, Entry(agent="top", **LOOPED))
    write(ledger.address, Entry(agent="low", calls=[Call()] * 3, parent=parent), first=10)
    said = asked(capsys, "show", "00000001")["summary"]
    assert said.endswith("It and its sub-agents had used 480 tokens in 4 turns.")


def test_the_turns_and_tools_of_a_tree(ledger: LedgerFile, capsys: Output) -> None:
    """Each turn with its calls, its cost and the tools that it asked for."""
    write(ledger.address, RUNAWAY)
    answer = asked(capsys, "show", "00000001")
    assert [(row["turn"], row["tokens"], row["tools"]) for row in answer["turns"]] == [
        (1, 10, "search"),
        (2, 20, "search, fetch"),
        (3, 40, "search"),
        (4, 160, ""),
    ]
    assert [(row["tool"], row["calls"]) for row in answer["tools"]] == [("search", 3), ("fetch", 1)]


def test_an_open_tree_has_a_sentence_too(
    ledger: LedgerFile, make_agent: MakeAgent, capsys: Output
) -> None:
    """Its end is not recorded, and what it used by now is."""
    write(ledger.address, Entry())
    connection = sqlite3.connect(ledger.path)
    with connection:
        connection.execute("UPDATE otel_limits_invocations SET ended_us = NULL, reason = NULL")
    connection.close()
    said = asked(capsys, "show", "00000001")["summary"]
    assert said == "worker has no recorded end, so a halt is unknown. Recorded usage: 120 tokens."


@pytest.mark.parametrize(
    ("turns", "written"),
    [([1], "1"), ([1, 2, 3], "1-3"), ([1, 3, 4, 9], "1, 3-4, 9"), ([2, 2], "2"), ([None], None)],
)
def test_turns_in_words(turns: list[int | None], written: str | None) -> None:
    """Ranges, each turn once."""
    assert RepeatGroup("t", "f", turns=turns).in_turns == written
