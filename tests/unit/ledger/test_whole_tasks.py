"""A task in a ledger: its invocations share an ID, and no total changes by an interrupt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import Limits, disable, enable
from otel_limits.cli import main
from otel_limits.testing import says, uses
from tests.ledger.otlp import line
from tests.resumed import NAMES, SUBJECTS, run_allowed

if TYPE_CHECKING:
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.features.subject import Subject
    from tests.ledger.fixtures import LedgerFile

SUMS = ("turns", "tool_calls", "model_calls", "input_tokens", "output_tokens", "unpriced_calls")

each_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=NAMES)


def answer_of(capsys: pytest.CaptureFixture[str], question: str, *options: str) -> Any:
    """The answer to a question as JSON."""
    capsys.readouterr()
    assert main(["audit", question, *options, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def in_order(ledger: LedgerFile) -> list[dict[str, Any]]:
    """The invocations as they began."""
    return sorted(ledger.invocations(), key=lambda row: row["started_us"])


@each_subject
def test_invocations_of_a_task_share_its_id(
    subject: Subject, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first invocation gives the task its ID, and each row has its own part."""
    enable(Limits(max_turns=3))
    run_allowed(subject)
    run_allowed(subject, 0)
    disable()
    *task, other = in_order(ledger)
    spend = answer_of(capsys, "spend", "--by", "task")["spend"]
    assert [(row["task"], row["calls"]) for row in spend] == [(task[0]["id"], 3), (other["id"], 1)]
    assert [row["task_id"] for row in task] == [task[0]["id"]] * 4
    assert [row["turns"] for row in task] == [1, 1, 1, 0]
    assert other["task_id"] == other["id"]


@each_subject
def test_imported_spans_have_the_task(
    subject: Subject, ledger: LedgerFile, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """As they have it live, also the first span, which ended before the task was continued."""
    spans.clear()
    enable(Limits(max_turns=3))
    run_allowed(subject)
    disable()
    imported = type(ledger)(tmp_path / "imported.db")
    file = tmp_path / "spans.jsonl"
    file.write_text(line(spans.get_finished_spans()))
    assert main(["ledger", "import", "--ledger", str(imported.path), str(file)]) == 0
    columns = ("task_id", "trace_id", "span_id", "action", "breach_observed")
    rows = [[row[name] for name in columns] for row in imported.invocations()]
    assert sorted(rows) == sorted([row[name] for name in columns] for row in ledger.invocations())


@each_subject
def test_interrupts_change_no_total(
    subject: Subject, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same calls of the same model, with and without a human who allows the tools."""
    totals = []
    for build in (subject.asking_first, subject.agent):
        ledger.path.unlink(missing_ok=True)
        enable()
        agent = build(subject.model([*[uses("search")] * 5, says("done")]))
        ending = subject.call(agent)
        while ending.question is not None:
            ending = subject.accept(agent, ending)
        disable()
        rows = ledger.invocations()
        sums = {name: sum(row[name] for row in rows) for name in SUMS}
        totals.append((sums, answer_of(capsys, "spend")["totals"]["spend"]))
    asked, whole = totals
    assert asked == whole
    sums, spend = asked
    assert spend["calls"] == sums["model_calls"] == sums["turns"] == 6
    assert spend["tokens"] == sums["input_tokens"] + sums["output_tokens"] == ledger.tokens()


@each_subject
def test_suggested_limits_are_those_of_tasks(
    subject: Subject, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task of six invocations with a turn each needs six turns."""
    enable()
    for _ in range(3):
        run_allowed(subject, 5)
    disable()
    assert len(ledger.invocations()) == 3 * 6
    assert main(["audit", "suggest", "--min-invocations", "3", "--headroom", "0"]) == 0
    text = capsys.readouterr().out
    assert '"boss":  # from 3 invocations' in text
    assert "limits: {max_turns: 6, max_token_budget: 90}" in text


@each_subject
@pytest.mark.parametrize(
    ("limit", "cap", "turn"),
    [
        ("--max-turns", "4", 4),
        ("--max-model-calls", "2", 2),
        ("--max-token-budget", "45", 3),
        ("--max-iterations", "2", None),
    ],
)
def test_backtest_replays_tasks(
    subject: Subject,
    limit: str,
    cap: str,
    turn: int | None,
    ledger: LedgerFile,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Limits would have counted the turns before each answer; iterations are those of a leg."""
    enable()
    run_allowed(subject, 5)
    run_allowed(subject, 1)
    disable()
    answer = answer_of(capsys, "backtest", limit, cap)
    (outcome,) = answer["backtest"]
    halted = 0 if turn is None else 1
    assert (outcome["invocations"], outcome["halted"], outcome["cut_successes"]) == (
        2,
        halted,
        halted,
    )
    assert [(row["turn"], row["turns"], row["saved_tokens"]) for row in answer["cuts"]] == [
        (turn, 6, (6 - turn) * 15) for turn in [turn] if turn is not None
    ]


def test_backtest_of_a_halted_task(ledger: LedgerFile, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last invocation has made no turn, and the task has used its limit."""
    enable(Limits(max_turns=3))
    run_allowed(SUBJECTS[0])
    disable()
    (row,) = answer_of(capsys, "backtest", "--max-turns", "3")["backtest"]
    assert (row["invocations"], row["halted"], row["unknown"]) == (1, 1, 0)
    (row,) = answer_of(capsys, "backtest", "--max-turns", "4")["backtest"]
    assert (row["invocations"], row["halted"], row["unknown"]) == (1, 0, 1)


def test_a_task_belongs_to_a_selection_if_one_of_its_invocations_does(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last invocation alone would look like a task that needs nothing."""
    enable(Limits(max_turns=3))
    run_allowed(SUBJECTS[0])
    run_allowed(SUBJECTS[0], 2)
    disable()
    where = ("--where", "reason=max_turns")
    (row,) = answer_of(capsys, "backtest", "--max-turns", "2", *where)["backtest"]
    assert (row["invocations"], row["halted"], row["saved_tokens"]) == (1, 1, 15)


@each_subject
def test_show_names_the_other_invocations_of_the_task(
    subject: Subject, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The halted one has made no turn: the turns are in those before it."""
    enable(Limits(max_turns=3))
    run_allowed(subject)
    run_allowed(subject, 0)
    disable()
    *task, other = [row["id"] for row in in_order(ledger)]
    answer = answer_of(capsys, "show", task[-1])
    assert [row["invocation_id"] for row in answer["tree"]] == [task[-1]]
    assert [(row["invocation_id"], row["turns"]) for row in answer["tasks"]] == [
        *zip(task, [1, 1, 1, 0], strict=True)
    ]
    assert answer["summary"].endswith(" Its task has 4 invocations, with 3 turns.")
    assert {row["task_id"] for row in answer["tasks"]} == {task[0]}
    assert "tasks" not in answer_of(capsys, "show", other)
