"""The demo's example ledger: the same on every day, and every question has an answer in it."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from otel_limits.core.events import ModelCall, Stop
from otel_limits.demo.record import QUESTIONS
from otel_limits.demo.sample_fleet import DAYS, FLEET, READER, history, midnight

if TYPE_CHECKING:
    from pathlib import Path

MONDAY = date(2026, 11, 23)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the example was recorded."""
    made = tmp_path_factory.mktemp("example")
    assert main(["demo", "--record", str(made / "new")]) == 0
    return made / "new"


def ask(directory: Path, question: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Ask the example ledger."""
    words = [*question.split(), "--format", "json", "--ledger", str(directory / "ledger.db")]
    assert main(["audit", *words]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(
    ("question", "tables"),
    [
        ("spend --by agent,tenant.id", ["spend", "outcomes"]),
        ("spend --by tool", ["spend"]),
        ("spend --compare 7d --since 7d", ["changes"]),
        ("stops", ["stops", "costliest_halted"]),
        ("loops", ["loops", "worst"]),
        ("anomalies", ["cost", "turns"]),
        ("backtest --max-turns 20", ["backtest", "cuts"]),
        ("grants", ["grants"]),
        ("verify", ["verify"]),
    ],
)
def test_every_question_has_something_to_show(
    directory: Path, question: str, tables: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """None of its tables is empty."""
    answer = ask(directory, question, capsys)
    assert {name: bool(answer[name]) for name in tables} == dict.fromkeys(tables, True)


def test_a_forecast_and_suggestions_can_be_made(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are days enough for the one, and invocations enough for the others."""
    assert ask(directory, "spend", capsys)["forecast"]["days"] == DAYS - 1
    assert main(["audit", "suggest", "--ledger", str(directory / "ledger.db")]) == 0
    suggested = capsys.readouterr().out
    assert suggested.count("limits: {max_turns: ") == len(FLEET)


def test_what_to_ask_next_can_be_asked(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command that the demo names."""
    for question, _ in QUESTIONS:
        words = ["audit", *question.split(), "--ledger", str(directory / "ledger.db")]
        assert main(words) == 0, capsys.readouterr()


def told(today: date) -> Counter[tuple[Any, ...]]:
    """What is told of the calls and the ends, without the time."""
    return Counter(
        (event.invocation.id, event.number, event.usage.total, event.price)
        if isinstance(event, ModelCall)
        else (event.reason, event.turns, event.cost)
        for event in history(today)
        if isinstance(event, (ModelCall, Stop))
    )


@pytest.mark.parametrize("later", [1, 5, 100])
def test_it_is_the_same_on_every_day(later: int) -> None:
    """Only the dates differ."""
    assert told(MONDAY) == told(MONDAY + timedelta(days=later))


def test_it_ends_before_the_day_of_its_recording() -> None:
    """Nothing lies in the future, and nothing is older than four weeks."""
    times = [event.at for event in history(MONDAY) if isinstance(event, ModelCall)]
    assert midnight(MONDAY - timedelta(days=DAYS)) < min(times)
    assert midnight(MONDAY - timedelta(days=1)) < max(times) < midnight(MONDAY)


def test_a_reader_belongs_to_the_tree_of_who_asked_it() -> None:
    """Which budget trees and `audit show` go by."""
    stops = [event.invocation for event in history(MONDAY) if isinstance(event, Stop)]
    assert {each.parent_id is None for each in stops if each and each.agent == READER.name} == {
        False
    }


def test_a_ledger_is_never_written_over(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said what to do."""
    before = (directory / "ledger.db").read_bytes()
    assert main(["demo", "--record", str(directory)]) == 2
    assert "is there already. Delete it, or name another directory." in capsys.readouterr().err
    assert (directory / "ledger.db").read_bytes() == before


def test_what_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a sentence."""
    (tmp_path / "file").touch()
    assert main(["demo", "--record", str(tmp_path / "file" / "new")]) == 2
    assert "ledger.db cannot be written: Not a directory." in capsys.readouterr().err


def test_it_goes_with_no_other_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is ignored silently."""
    assert main(["demo", "--record", str(tmp_path), "--json"]) == 2
    assert "--record cannot be combined" in capsys.readouterr().err
