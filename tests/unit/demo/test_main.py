"""Tests of `otel-limits demo`: its output matches what happened, as text and as JSON."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from otel_limits.bindings.known import OURS
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.cli import main
from otel_limits.cli.parser import make_parser
from otel_limits.demo import main as demo
from otel_limits.demo.main import NEXT_STEPS, SCENARIOS, ScenarioOutcome, play
from otel_limits.runtime.runtime import RUNTIME
from tests.pages import stable_text
from tests.picture import PICTURE, lines_of, recorded

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework


def scenario(name: str) -> demo.Scenario:
    """Return a scenario by its name."""
    return next(each for each in SCENARIOS if each.name == name)


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `demo --json` prints."""
    assert main(["demo", "--json"]) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    document: dict[str, Any] = json.loads(shown)
    return document


@cache
def shown_lines(width: int, name: str = STRANDS.name) -> list[str]:
    """Return what the demo prints on a screen: always the same."""
    framework = next(each for each in OURS if each.name == name)
    screen = Console(file=io.StringIO(), width=width, record=True, highlight=False, markup=False)
    assert demo.main(framework, screen) == 0
    return [line.rstrip() for line in screen.export_text().splitlines()]


@pytest.mark.parametrize("framework", OURS, ids=lambda each: each.name)
def test_text_is_equal_in_each_framework(
    framework: Framework, capfd: pytest.CaptureFixture[str]
) -> None:
    """Users see it with the framework that they have, and only one of them may be installed."""
    lines = [re.sub(r"\s+|━", " ", line) for line in shown_lines(100, framework.name)]
    assert lines[1].startswith(f"{framework.distribution} ")
    words = [" ".join(line.split()) for line in lines[4:6]]
    assert words == [
        "no limits 22 22,275 end_turn (ran away)",
        "OTEL_LIMITS_MAX_TURNS=6 6 2,475 max_turns (halted by otel-limits)",
    ]
    assert any(line.startswith("Saved 16 of 22 model calls and 89% of ") for line in lines)
    assert len(lines) <= 20
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("each", SCENARIOS, ids=lambda each: each.name)
def test_metrics_agree_with_the_model(each: demo.Scenario) -> None:
    """The model and otel-limits count calls independently."""
    outcome = play(STRANDS, each)
    assert outcome.calls == outcome.stop.model_calls > 0


def test_log_has_one_line_per_reached_limit() -> None:
    """It names the limit and its variable."""
    logs = [play(STRANDS, each).log for each in SCENARIOS]
    without, limited = ([line for line in log if " max_" in line] for log in logs)
    assert (without, len(limited)) == ([], 1)
    assert "OTEL_LIMITS_MAX_TURNS" in limited[0]


def test_variables_of_the_user_change_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their limits, ledgers and exporters are those of real agents."""
    expected = printed_json(capsys)["scenarios"]
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "1")
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", "/nowhere/ledger.db")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    found = printed_json(capsys)["scenarios"]
    for each in (*expected, *found):
        del each["result"]["halt"]  # it has times and identifiers
        del each["log"]  # some of it is logged once per process
    assert found == expected


def test_nothing_stays_enabled() -> None:
    """The demo runs in the process of the command."""
    play(STRANDS, scenario("max_turns"))
    assert not RUNTIME.is_on


def test_json_has_what_the_text_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Settings, model calls, tokens and stop reason of each scenario."""
    document = printed_json(capsys)
    rows = shown_lines(100)
    for each in document["scenarios"]:
        settings = " ".join(f"{name}={value}" for name, value in each["environment"].items())
        (row,) = [line for line in rows if line.startswith(f"{settings or 'no limits'}  ")]
        words = row.removeprefix(settings or "no limits").replace("━", " ").split()
        assert str(each["model_calls"]) in words
        assert f"{each['tokens']:,}" in words
        assert each["result"]["stop_reason"] in words
        assert (each["result"]["halt"] is None) is ("(ran" in words)
        assert each["ended_by_demo"] is ("(ran" in words)


def test_unexpected_end_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1: limits do not work here."""
    monkeypatch.setattr(demo, "SCENARIOS", [replace(SCENARIOS[0], ends_with="max_turns")])
    assert main(["demo", "--json"]) == 1
    sentence = "otel-limits demo: no_limits ended with 'end_turn', expected 'max_turns'.\n"
    assert capsys.readouterr().err == sentence


def test_unfollowed_agent_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instead of results that otel-limits did not count."""
    monkeypatch.setattr(type(STRANDS), "run_script", lambda *_: (22, "end_turn"))
    assert main(["demo"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("otel-limits demo: strands-agents ")
    assert error.endswith(" cannot be limited here. Its agent was not followed.\n")


def test_interrupted_demo_ends_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell expects, and nothing stays enabled."""

    def interrupt(*_: object) -> ScenarioOutcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(STRANDS), "run_script", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == ""
    assert not RUNTIME.is_on


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 100])
def test_output_fits_the_terminal(width: int) -> None:
    """Names are never broken, and bars are omitted if there is little room."""
    lines = shown_lines(width)
    assert not [line for line in lines if len(line) > width]
    assert any("━" in line for line in lines) is (width >= 100)
    assert any(line.startswith("OTEL_LIMITS_MAX_TURNS=6  ") for line in lines)


def test_piped_output_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the environment forces colors."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["demo"]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [command for _, command in NEXT_STEPS])
def test_next_steps_are_valid_commands(command: str) -> None:
    """Readers copy them."""
    assert f"  {command}" in shown_lines(100)
    _, *arguments = shlex.split(command)
    assert make_parser().parse_args(arguments).call is not None


def marks(line: str) -> str:
    """Return a line without spaces and bars, which differ without color."""
    return re.sub(r"[\s━╸╺]", "", stable_text(line))


def test_readme_picture_matches_output() -> None:
    """If this fails, run `python -m tests.generate images`."""
    drawn = [marks(line) for line in lines_of(PICTURE.read_text(encoding="utf-8"))]
    title, prompt, *shown = [line for line in drawn if line]
    assert (title, prompt) == ("otel-limitsdemo", "$otel-limitsdemo")
    assert shown == [marks(line) for line in recorded().plain.splitlines() if line]


def test_picture_shows_underscores() -> None:
    """Cutting a line to its height hides them in some fonts."""
    assert "clip" not in PICTURE.read_text(encoding="utf-8").lower()


def test_port_is_optional_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """It has the default of other commands."""
    assert make_parser().parse_args(["demo", "--serve"]).serve == 9464
    with pytest.raises(SystemExit):
        main(["demo", "--serve", "70000"])
    assert "PORT must be a port from 1 to 65535, got '70000'." in capsys.readouterr().err
