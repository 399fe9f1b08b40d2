"""Tests of `otel-limits demo`: its output matches what happened, as text and as JSON."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from otel_limits.cli import main
from otel_limits.cli.parser import make_parser
from otel_limits.demo import agent
from otel_limits.demo.main import SCENARIOS
from otel_limits.demo.output import NEXT_STEPS, progress
from otel_limits.demo.play import AgentFailedError, DemoRun, ScenarioOutcome, Setup
from otel_limits.demo.server import DemoServers
from tests.pages import stable_text
from tests.picture import PICTURE, lines_of
from tests.processes import PATIENCE_SECONDS, bounded

COMMAND = str(Path(sys.executable).with_name("otel-limits"))
ESCAPE = "\x1b"


def fresh_environment() -> dict[str, str]:
    """Return an environment whose limits and telemetry must not affect the demo's agents."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
    return {
        **kept,
        "OTEL_LIMITS_MAX_TURNS": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "HTTP_PROXY": "http://127.0.0.1:1",
        "ALL_PROXY": "socks5://127.0.0.1:1",
    }


# --- JSON -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def events() -> dict[str, Any]:
    """Return the output of `otel-limits demo --json`."""
    done = subprocess.run(
        [COMMAND, "demo", "--json"],
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.fixture(scope="module")
def scenarios(events: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return its scenarios by name."""
    return {scenario["name"]: scenario for scenario in events["scenarios"]}


def test_scenarios_differ_only_in_environment(events: dict[str, Any]) -> None:
    """No limits, two kinds of limit, and observe mode."""
    assert [scenario["environment"] for scenario in events["scenarios"]] == [
        {},
        {"OTEL_LIMITS_MAX_TURNS": "6"},
        {"OTEL_LIMITS_MAX_TOKEN_BUDGET": "5000"},
        {"OTEL_LIMITS_MAX_TURNS": "6", "OTEL_LIMITS_ACTION": "observe"},
    ]


def test_agent_code_imports_nothing_of_otel_limits() -> None:
    """The demo proves that limits need no code changes."""
    tree = ast.parse(Path(str(agent.__file__)).read_text(encoding="utf-8"))
    modules = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
    ]
    assert not [name for name in modules if name and name.startswith("otel_limits")]


@pytest.mark.parametrize("name", [scenario.name for scenario in SCENARIOS])
def test_metrics_agree_with_the_model_server_and_the_framework(
    scenarios: dict[str, dict[str, Any]], name: str
) -> None:
    """The three count model calls and tokens independently."""
    scenario = scenarios[name]
    assert scenario["model_calls"] == scenario["server_counts"]["requests"] > 0
    assert scenario["tokens"] == scenario["server_counts"]["tokens"] > 0
    assert scenario["tokens"] == scenario["result"]["usage"]["totalTokens"]


def test_scenario_without_limits_ends_after_all_polls(
    events: dict[str, Any], scenarios: dict[str, dict[str, Any]]
) -> None:
    """The pending polls, the last poll, and the answer."""
    polls = events["bounds"]["pending_polls"]
    scenario = scenarios["no_limits"]
    assert scenario["model_calls"] == polls + 2
    assert scenario["ended_by_demo"] is True
    (warning,) = scenario["log"]
    assert "No limits set for agent 'report-watcher'." in warning
    assert (scenario["result"]["stop_reason"], scenario["result"]["halt"]) == ("end_turn", None)


def test_max_turns_halts_after_exactly_that_many_calls_and_tools(
    scenarios: dict[str, dict[str, Any]],
) -> None:
    """The tools of the last turn also ran."""
    scenario = scenarios["max_turns"]
    assert (scenario["model_calls"], scenario["server_counts"]["polls"]) == (6, 6)
    assert scenario["result"]["stop_reason"] == "max_turns"
    assert scenario["ended_by_demo"] is False


def test_token_budget_is_exceeded_by_at_most_one_call(
    scenarios: dict[str, dict[str, Any]],
) -> None:
    """The halt reports the actual usage."""
    scenario = scenarios["max_token_budget"]
    halt = scenario["result"]["halt"]
    assert scenario["result"]["stop_reason"] == "max_token_budget"
    assert halt["cap"] == 5000 <= halt["observed"] == scenario["tokens"]
    assert halt["observed"] - scenario["server_counts"]["last_tokens"] < halt["cap"]


def test_observe_changes_only_log_and_metrics(scenarios: dict[str, dict[str, Any]]) -> None:
    """The run equals the one without limits; the breach is counted and logged once."""
    observed, free = scenarios["observe"], scenarios["no_limits"]
    for event in ("model_calls", "tokens", "server_counts"):
        assert observed[event] == free[event]
    series = 'otel_limits_stops_total{action="observed",agent="report-watcher",reason="max_turns"}'
    assert observed["metrics"][series] == 1
    assert len(observed["log"]) == 1


def test_halt_message_is_tagged(scenarios: dict[str, dict[str, Any]]) -> None:
    """It carries limit, cap and usage, and is not counted as a model call."""
    scenario = scenarios["max_turns"]
    result, metrics = scenario["result"], scenario["metrics"]
    assert (result["synthetic"], result["message"]["role"]) == (True, "assistant")
    assert (result["halt"]["limit"], result["halt"]["cap"], result["halt"]["observed"]) == (
        "max_turns",
        6,
        6,
    )
    assert "usage" not in result["message"]["metadata"]
    counted = 'otel_limits_synthetic_messages_total{agent="report-watcher",reason="max_turns"}'
    assert metrics[counted] == 1


def test_zero_token_call_is_not_a_halt(scenarios: dict[str, dict[str, Any]]) -> None:
    """It is counted as a model call of kind zero_token, and its message is not tagged."""
    scenario = scenarios["max_turns"]
    call, metrics = scenario["zero_token_call"], scenario["metrics"]
    assert call["message"]["metadata"]["usage"]["totalTokens"] == 0
    assert (call["synthetic"], call["halt"], call["stop_reason"]) == (False, None, "end_turn")
    kinds = {
        kind: metrics[
            f'otel_limits_model_calls_total{{agent="faq-assistant",kind="{kind}",model="guarded"}}'
        ]
        for kind in ("measured", "zero_token", "unmeasured", "failed")
    }
    assert kinds == {"measured": 0, "zero_token": 1, "unmeasured": 0, "failed": 0}
    tagged = 'otel_limits_synthetic_messages_total{agent="faq-assistant",reason="max_turns"}'
    assert metrics[tagged] == 0


def test_each_process_serves_its_own_metrics(events: dict[str, Any]) -> None:
    """Four processes, four ports, no internal errors."""
    urls = {scenario["metrics_url"] for scenario in events["scenarios"]}
    assert len(urls) == 4
    for scenario in events["scenarios"]:
        assert not [name for name in scenario["metrics"] if "internal_errors" in name]


# --- text -----------------------------------------------------------------------------------------


def read_terminal(terminal: int) -> Iterator[bytes]:
    """Yield what is written to a terminal until it is closed."""
    try:
        while chunk := os.read(terminal, 65_536):
            yield chunk
    except OSError:  # on Linux, the other end is closed
        return


@pytest.fixture(scope="module")
def terminal_output() -> str:
    """Return the output on a terminal with 100 columns, with escape sequences."""
    main_end, terminal = pty.openpty()
    environment = fresh_environment() | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "60"}
    environment.pop("NO_COLOR", None)
    with (
        subprocess.Popen(
            [COMMAND, "demo"], env=environment, stdin=terminal, stdout=terminal, stderr=terminal
        ) as process,
        bounded(process),
    ):
        os.close(terminal)
        shown = b"".join(read_terminal(main_end))
    os.close(main_end)
    assert process.returncode == 0
    return shown.decode()


@pytest.fixture(scope="module")
def lines(terminal_output: str) -> list[str]:
    """Return the lines visible at the end, without colors."""
    plain = re.sub(ESCAPE + r"\[[0-9;?]*[A-Za-z]", "", terminal_output)
    return [line.split("\r")[-1].rstrip() for line in plain.replace("\r\n", "\n").split("\n")]


def test_progress_is_shown_while_it_runs(terminal_output: str) -> None:
    """The table is redrawn in place."""
    assert terminal_output.count("MAX_TOKEN_BUDGET=5000") > 2
    assert f"{ESCAPE}[?25l" in terminal_output
    assert terminal_output.rindex(f"{ESCAPE}[?25h") > terminal_output.rindex(f"{ESCAPE}[?25l")


def test_table_shows_each_scenario(lines: list[str], scenarios: dict[str, dict[str, Any]]) -> None:
    """Settings, model calls, tokens and stop reason match the JSON output."""
    for scenario in scenarios.values():
        settings = " ".join(
            f"{name.removeprefix('OTEL_LIMITS_')}={value}"
            for name, value in scenario["environment"].items()
        )
        row = [line for line in lines if line.startswith(f"{settings or 'no limits'}  ")][-1]
        words = row.removeprefix(settings or "no limits").replace("━", " ").split()
        assert str(scenario["model_calls"]) in words
        assert f"{scenario['tokens']:,}" in words
        assert scenario["result"]["stop_reason"] in words


def test_nonzero_counters_are_shown_in_full(
    lines: list[str], scenarios: dict[str, dict[str, Any]]
) -> None:
    """In the exposition format, without histograms."""
    metrics = scenarios["max_turns"]["metrics"]
    shown = {line for line in lines if line.startswith("otel_limits_")}
    assert shown == {
        f"{series} {value}" for series, value in metrics.items() if value and "_total{" in series
    }


def test_log_messages_are_shown(lines: list[str]) -> None:
    """One per reached limit."""
    text = "\n".join(lines)
    assert text.count("Agent 'report-watcher'") == 3
    assert text.count("6 of 6 turns") == 2


def test_halt_and_zero_token_call_are_compared(lines: list[str]) -> None:
    """The table shows how a program distinguishes them."""
    rows = {line[:25].strip(): line[25:].split() for line in lines}
    assert "empty: blocked by a guardrail" in "\n".join(lines)
    assert rows["is_synthetic(message)"] == ["True", "False"]
    assert rows["result.stop_reason"] == ["max_turns", "end_turn"]
    assert rows["reported usage"] == ["none", "0", "tokens"]


def marks(line: str) -> str:
    """Return a line without spaces and bars, which differ without color."""
    return re.sub(r"[\s━╸╺]", "", stable_text(line))


def test_readme_picture_matches_output(lines: list[str]) -> None:
    """If this fails, run `python -m tests.generate images`."""
    drawn = [marks(line) for line in lines_of(PICTURE.read_text(encoding="utf-8"))]
    title, prompt, *shown = [line for line in drawn if line]
    assert (title, prompt) == ("otel-limitsdemo", "$otel-limitsdemo")
    whole = "".join(map(marks, lines))  # the picture is narrower than a line of the log
    assert [line for line in shown if line not in whole] == []


def test_output_fits_the_terminal(lines: list[str]) -> None:
    """Except log messages, which the terminal wraps."""
    assert not [line for line in lines if len(line) > 100 and " max_" not in line]


@pytest.mark.parametrize("command", [command for command, _ in NEXT_STEPS])
def test_next_steps_are_valid_commands(command: str, lines: list[str]) -> None:
    """Readers copy them."""
    assert [line for line in lines if line.startswith(f"{command}  ")]
    name, *arguments = shlex.split(command)
    if name == "otel-limits":
        assert make_parser().parse_args(arguments).call is not None


# --- another model server -------------------------------------------------------------------------


def test_base_url_selects_another_model_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With or without /v1. Without a terminal the output is plain text despite FORCE_COLOR."""
    monkeypatch.setattr("otel_limits.demo.main.SCENARIOS", SCENARIOS[1:2])
    monkeypatch.setenv("FORCE_COLOR", "1")
    with DemoServers(pending_polls=0) as real:
        status = main(["demo", "--base-url", f"{real.url('real')}/v1/", "--model", "llama"])
        seen = real.counts("real")
    shown, errors = capsys.readouterr()
    assert (status, errors, seen.requests) == (0, "", 6)
    assert ESCAPE not in shown
    assert f"llama at {real.url('real')}" in shown
    counted = (
        'otel_limits_model_calls_total{agent="report-watcher",kind="measured",model="llama"} 6.0'
    )
    assert counted in shown


@pytest.mark.parametrize("url", ["localhost:11434", "ftp://localhost", "http://"])
def test_invalid_base_url_is_rejected(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message contains a valid example."""
    assert main(["demo", "--base-url", url]) == 2
    assert (
        "--base-url must be a URL such as http://localhost:11434/v1, got" in capsys.readouterr().err
    )


def test_unreachable_model_server_fails_immediately(capsys: pytest.CaptureFixture[str]) -> None:
    """No agent is started."""
    assert main(["demo", "--base-url", "http://127.0.0.1:1/v1"]) == 2
    assert "No model server at http://127.0.0.1:1 (" in capsys.readouterr().err


def test_failed_agent_reports_its_exception() -> None:
    """The user sees why the process ended."""
    with DemoServers(pending_polls=1) as servers:
        setup = Setup(
            base_url=f"{servers.url('real')}/nowhere",
            model="llama",
            pending_polls=1,
            scenarios=SCENARIOS[:1],
        )
        with DemoRun(setup, servers) as running, pytest.raises(AgentFailedError) as raised:
            running.futures[0].result()
    assert str(raised.value).startswith(
        "The agent 'report-watcher' failed: httpx.HTTPStatusError: "
    )


def test_interrupted_demo_kills_all_processes() -> None:
    """Status 130, no traceback, no orphaned agent."""
    with (
        subprocess.Popen(
            [COMMAND, "demo"],
            env=fresh_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process,
        bounded(process),
    ):
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (130, b"")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_narrow_terminal_omits_bars() -> None:
    """60 columns fit the numbers and the stop reasons without breaking words."""
    done: Future[ScenarioOutcome] = Future()
    counts = SimpleNamespace(requests=6, polls=6, tokens=1_539)
    running: Any = SimpleNamespace(
        setup=SimpleNamespace(scenarios=SCENARIOS, pending_polls=20),
        futures=[done] * len(SCENARIOS),
        servers=SimpleNamespace(counts=lambda _: counts),
    )
    outcome = SimpleNamespace(
        model_calls=6,
        tokens=1_539,
        result=SimpleNamespace(stop_reason="max_token_budget", halt="max_token_budget"),
    )
    done.set_result(cast("ScenarioOutcome", outcome))
    screen = Console(file=io.StringIO(), width=60, record=True)
    screen.print(progress(running, screen.width))
    lines = screen.export_text().splitlines()
    assert "━" not in "".join(lines)
    assert sum("max_token_budget" in line for line in lines) == len(SCENARIOS)
    assert any("MAX_TURNS=6 ACTION=observe" in line for line in lines)
