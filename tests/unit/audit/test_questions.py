"""Every audit command has help, options and an answer, also for the selection of a dashboard."""

from __future__ import annotations

import csv
import importlib
import io
import json
import pkgutil
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import jsonschema
import pytest

import otel_limits
from otel_limits import audit
from otel_limits.audit.question import Question
from otel_limits.audit.questions import QUESTIONS
from otel_limits.cli import main
from otel_limits.cli.audit import FORMATS
from otel_limits.core.labels import MAX_LENGTH
from otel_limits.core.limits import Breach
from otel_limits.dashboards.exported_files import directory
from tests.dashboards import panels
from tests.ledger.book import NINE, Call, Entry, write
from tests.paths import ROOT

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile


PACKAGE = Path(otel_limits.__file__).parent
DOCUMENTATION = "".join(
    path.read_text(encoding="utf-8")
    for path in (PACKAGE.parent / "README.md", *PACKAGE.glob("docs/**/*.md"))
)

SAID = {
    "show": ["00000001"],
    "backtest": ["--max-turns", "1"],
    "reconcile": ["--prometheus", "http://prometheus.test"],
    "whois": ["joe"],
    "budget": ["--policy", str(ROOT / "tests/ledger/quotas.yaml")],
}
"""Required options of some commands."""

HALTED = Entry(
    calls=[Call(price="0.25")] * 2,
    reason="max_turns",
    action="halted",
    breach=Breach("max_turns", 2, 2, "max_turns", "turns"),
    tools=["search!"],
)

every_question = pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: each.name)


def test_every_question_is_in_the_table() -> None:
    """A question without a line in `QUESTIONS` would be no command."""
    modules = [
        importlib.import_module(f"{audit.__name__}.{each.name}")
        for each in pkgutil.iter_modules(audit.__path__)
    ]
    missing = [
        f"{module.__name__}: its question {each.name!r} is not in QUESTIONS of audit/questions.py"
        for module in modules
        for each in vars(module).values()
        if isinstance(each, Question) and each not in QUESTIONS
    ]
    assert missing == []


@every_question
def test_a_question_and_its_options_have_help(
    question: Question, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` shows a sentence, and what each option is for."""
    assert question.help.endswith(".")
    options = [*question.selection, *question.options]
    assert [option.flag for option in options if not option.help] == []
    with pytest.raises(SystemExit):
        main(["audit", question.name, "--help"])
    shown = capsys.readouterr().out
    assert [
        o.flag for o in options if (o.flag if o.flag[0] == "-" else o.metavar) not in shown
    ] == []


@every_question
def test_a_question_is_documented(question: Question) -> None:
    """A reader of the documentation finds the command."""
    command = f"otel-limits audit {question.name}"
    assert command in DOCUMENTATION, f"add {command} to otel_limits/docs/audit.md"


@every_question
@pytest.mark.parametrize("form", FORMATS)
def test_a_question_is_answered_in_every_format(
    question: Question,
    form: str,
    ledger: LedgerFile,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer is one that programs and browsers can read, or has text for a person."""
    monkeypatch.setattr("otel_limits.audit.reconcile.counters_of", lambda *_: lambda *_: [])
    write(ledger.address, Entry(), HALTED)
    assert main(["audit", question.name, *SAID.get(question.name, []), "--format", form]) == 0
    answer = capsys.readouterr().out
    if form == "json":
        document = json.loads(answer)
        assert document["question"] == question.name
        assert main(["audit", "schema", question.name]) == 0
        schema = json.loads(capsys.readouterr().out)
        jsonschema.Draft202012Validator.check_schema(schema)
        checks = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        assert list(checks.iter_errors(document)) == []
        # Fields that the schema does not have would be new ones for its reader.
        assert set(document) <= set(schema["properties"])
        assert document["schema"] == schema["$id"]
    elif form == "html":
        assert answer.startswith("<!doctype html>")
        assert answer.count("<html") == answer.count("</html>") == 1
    elif form == "csv" and question.name != "suggest":
        assert list(csv.reader(io.StringIO(answer)))
    assert answer.strip()


# --- the command of a dashboard -------------------------------------------------------------------

Output = pytest.CaptureFixture[str]

(NOTE,) = (
    panel
    for board in panels.read_all(directory())
    for panel in board.panels
    if panel.kind == "text"
)

SHELL, MARKDOWN, LISTED = 'Bob\'s $(agent) "b" & 100%+*', "`a` </code> é", "a,agent=coder"
"""Names of agents that a shell, Markdown or a condition could take for something else."""

MAX_TURNS: dict[str, Any] = {"reason": "max_turns", "action": "halted"}
ENDED: dict[str, Any] = {"reason": "end_turn", "action": "none"}

OBSERVED: dict[str, Any] = {
    "reason": "end_turn",
    "action": "observed",
    "breach": Breach("max_turns", 3, 3, "max_turns"),
}

ENTRIES = (
    Entry(agent="coder", calls=[Call(model="small")], **MAX_TURNS),
    Entry(agent="coder", calls=[Call(model="large")], **ENDED),
    Entry(agent=SHELL, calls=[Call(model="small"), Call(model="large")], **MAX_TURNS),
    Entry(agent=MARKDOWN, calls=[Call(model="large")], **ENDED),
    Entry(agent=LISTED, calls=[Call(model="small")], **ENDED),
    Entry(agent="watched", calls=[Call(model="small")], **OBSERVED),
)

ALL = ("$__all",)


def queryparam(name: str, values: Sequence[str]) -> str:
    """Write a variable as Grafana does in that format (`toUrlParams` of @grafana/data)."""
    return "&".join(f"var-{name}={quote(value, safe='@:$,;')}" for value in values)


def commands(selected: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The copied lines, split as a shell does."""
    begin = datetime.fromtimestamp(NINE, timezone.utc)
    times = {"__from": begin, "__to": begin + timedelta(days=1)}

    def fill(found: re.Match[str]) -> str:
        name, form = found[1], found[2]
        if form == "date:iso":
            return times[name].strftime("%Y-%m-%dT%H:%M:%S.000Z")
        assert form == "queryparam", found
        return queryparam(name, selected.get(name, ALL))

    content = NOTE.content.replace("\\\n", "")
    lines = re.sub(r"\$\{(\w+):([\w:]+)\}", fill, content).splitlines()
    split = [shlex.split(line) for line in lines if not line.startswith("```")]
    assert [words[:3] for words in split] == [
        ["otel-limits", "audit", question] for question in ("stops", "spend")
    ]
    return [words[1:] for words in split]


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ({}, {"coder": 2, SHELL: 1, MARKDOWN: 1, LISTED: 1, "watched": 1}),
        ({"agent": ["coder"]}, {"coder": 2}),
        ({"agent": [SHELL, MARKDOWN, LISTED]}, {SHELL: 1, MARKDOWN: 1, LISTED: 1}),
        ({"reason": ["max_turns"]}, {"coder": 1, SHELL: 1, "watched": 1}),
        ({"reason": ["end_turn"]}, {"coder": 1, MARKDOWN: 1, LISTED: 1, "watched": 1}),
        ({"model": ["large"]}, {"coder": 1, SHELL: 1, MARKDOWN: 1}),
        ({"agent": ["coder", SHELL], "model": ["small"], "reason": ["max_turns", "killed"]},
         {"coder": 1, SHELL: 1}),
        ({"agent": ["unknown"]}, {}),
    ],
)  # fmt: skip
def test_it_asks_for_what_is_selected(
    ledger: LedgerFile, capsys: Output, selected: dict[str, list[str]], expected: dict[str, int]
) -> None:
    """One agent, several, all; also of models and reasons, whatever characters a name has."""
    write(ledger.address, *ENTRIES)
    stops, spend = (asked(capsys, command) for command in commands(selected))

    found: dict[str, int] = {}
    for row in stops["stops"]:
        found[row["agent"]] = found.get(row["agent"], 0) + row["invocations"]
    assert found == expected
    models = selected.get("model", ["small", "large"])
    calls = [
        call
        for entry in ENTRIES
        for call in entry.calls
        if entry.agent in expected
        and reasons_of(entry) & set(selected.get("reason", reasons_of(entry)))
        and call.model in models
    ]
    assert sum(row["calls"] for row in spend["spend"]) == len(calls)


def reasons_of(entry: Entry) -> set[str]:
    """How it ended, and what would have halted it."""
    return {entry.reason} | ({entry.breach.reason} if entry.breach else set())


def asked(capsys: Output, command: Sequence[str]) -> Any:
    """The answer as JSON."""
    assert main([*command, "--format", "json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("address", ["var-agent=All", "agent=$__all", "var-reason=$__all"])
def test_all_is_not_a_condition(ledger: LedgerFile, capsys: Output, address: str) -> None:
    """As addresses of Grafana say it, up to version 10 and since."""
    write(ledger.address, *ENTRIES)
    answer = asked(capsys, ["audit", "stops", "--dashboard-vars", address])
    assert sum(row["invocations"] for row in answer["stops"]) == len(ENTRIES)


def test_a_name_that_metrics_cut_is_found(ledger: LedgerFile, capsys: Output) -> None:
    """A ledger has more of it, and a dashboard shows what metrics have."""
    write(ledger.address, *ENTRIES, Entry(agent="a" * (MAX_LENGTH + 1), **ENDED))
    answer = asked(capsys, ["audit", "stops", "--dashboard-vars", f"var-agent={'a' * MAX_LENGTH}"])
    assert [row["invocations"] for row in answer["stops"]] == [1]


@pytest.mark.parametrize("text", ["var-job=nightly&var-agent=a", "research", "var-agent=_other"])
def test_unknown_dashboard_variable_is_rejected(
    ledger: LedgerFile, capsys: Output, text: str
) -> None:
    """An answer about every job would look like one about the job that is selected."""
    write(ledger.address, *ENTRIES)
    with pytest.raises(SystemExit):
        main(["audit", "stops", "--dashboard-vars", text])
    assert "must be dashboard variables" in " ".join(capsys.readouterr().err.split())
