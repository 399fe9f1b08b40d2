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


@each_subject
def test_invocations_of_a_task_share_its_id(
    subject: Subject, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first invocation gives the task its ID, and each row has its own part."""
    enable(Limits(max_turns=3))
    run_allowed(subject)
    run_allowed(subject, 0)
    disable()
    *task, other = ledger.invocations()
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
