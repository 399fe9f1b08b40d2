"""Every audit command has help, options, a place in the documentation, and an answer."""

from __future__ import annotations

import csv
import importlib
import io
import json
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest

import otel_limits
from otel_limits import audit
from otel_limits.audit.question import Question
from otel_limits.audit.questions import QUESTIONS
from otel_limits.cli import main
from otel_limits.cli.audit import FORMATS
from otel_limits.core.limits import Breach
from tests.ledger.book import Call, Entry, write
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
