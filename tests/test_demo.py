"""The demonstration: what it tells machines and readers is true, wherever it is pointed."""

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
from otel_limits.demo.play import AgentFailedError, Play, ScenarioOutcome, Setup
from otel_limits.demo.server import Servers
from otel_limits.demo.show import NEXT_STEPS, progress
from tests.pages import stable_text
from tests.picture import PICTURE, lines_of
from tests.processes import PATIENCE_SECONDS, bounded

COMMAND = str(Path(sys.executable).with_name("otel-limits"))
ESCAPE = "\x1b"


def fresh_environment() -> dict[str, str]:
    """Make an environment whose limits and telemetry must not reach the demo's agents."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
    return {
        **kept,
        "OTEL_LIMITS_MAX_TURNS": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "HTTP_PROXY": "http://127.0.0.1:1",
        "ALL_PROXY": "socks5://127.0.0.1:1",
    }


# --- for machines ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def events() -> dict[str, Any]:
    """What `otel-limits demo --json` prints."""
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
    """Its scenarios by name."""
    return {scenario["name"]: scenario for scenario in events["scenarios"]}


def test_four_scenarios_differ_in_their_environment_alone(events: dict[str, Any]) -> None:
    """No limits, one kind of limit each, and one that only observes."""
    assert [scenario["environment"] for scenario in events["scenarios"]] == [
        {},
        {"OTEL_LIMITS_MAX_TURNS": "6"},
        {"OTEL_LIMITS_MAX_TOKEN_BUDGET": "5000"},
        {"OTEL_LIMITS_MAX_TURNS": "6", "OTEL_LIMITS_ACTION": "observe"},
    ]


def test_the_agents_code_knows_nothing_of_limits() -> None:
    """It imports nothing of ours."""
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
    """Three parties count model calls and tokens, and come to the same."""
    scenario = scenarios[name]
    assert scenario["model_calls"] == scenario["server_saw"]["requests"] > 0
    assert scenario["tokens"] == scenario["server_saw"]["tokens"] > 0
    assert scenario["tokens"] == scenario["result"]["usage"]["totalTokens"]


def test_without_limits_only_the_demo_ends_the_run(
    events: dict[str, Any], scenarios: dict[str, dict[str, Any]]
) -> None:
    """Pending looks, the one that finds the job done, and the answer."""
    looks = events["bound"]["pending_looks"]
    scenario = scenarios["no_limits"]
    assert scenario["model_calls"] == looks + 2
    assert scenario["bounded_by_demo"] is True
    (warning,) = scenario["log"]
    assert "No limit is set: nothing stops agent 'no_limits'." in warning
    assert (scenario["result"]["stop_reason"], scenario["result"]["halt"]) == ("end_turn", None)


def test_max_turns_halts_after_exactly_that_many_calls_and_tools(
    scenarios: dict[str, dict[str, Any]],
) -> None:
    """The tools of the last turn ran."""
    scenario = scenarios["max_turns"]
    assert (scenario["model_calls"], scenario["server_saw"]["looks"]) == (6, 6)
    assert scenario["result"]["stop_reason"] == "max_turns"
    assert scenario["bounded_by_demo"] is False


def test_the_token_budget_is_overrun_by_one_call_at_most(
    scenarios: dict[str, dict[str, Any]],
) -> None:
    """What was used is told as it is."""
    scenario = scenarios["max_token_budget"]
    halt = scenario["result"]["halt"]
    assert scenario["result"]["stop_reason"] == "max_token_budget"
    assert halt["cap"] == 5000 <= halt["observed"] == scenario["tokens"]
    assert halt["observed"] - scenario["server_saw"]["last_tokens"] < halt["cap"]


def test_observe_changes_nothing_but_what_is_known(scenarios: dict[str, dict[str, Any]]) -> None:
    """The run is that without limits; the breach is counted and logged once."""
    observed, free = scenarios["observe"], scenarios["no_limits"]
    for event in ("model_calls", "tokens", "server_saw"):
        assert observed[event] == free[event]
    series = 'otel_limits_stops_total{action="observed",agent="observe",reason="max_turns"}'
    assert observed["metrics"][series] == 1
    assert len(observed["log"]) == 1


def test_a_halt_message_is_tagged(scenarios: dict[str, dict[str, Any]]) -> None:
    """With the limit, the cap and what was used; no model call is counted for it."""
    scenario = scenarios["max_turns"]
    result, metrics = scenario["result"], scenario["metrics"]
    assert (result["synthetic"], result["message"]["role"]) == (True, "assistant")
    assert (result["halt"]["limit"], result["halt"]["cap"], result["halt"]["observed"]) == (
        "max_turns",
        6,
        6,
    )
    assert "usage" not in result["message"]["metadata"]
    counted = 'otel_limits_synthetic_messages_total{agent="max_turns",reason="max_turns"}'
    assert metrics[counted] == 1


def test_a_real_zero_token_call_is_no_halt(scenarios: dict[str, dict[str, Any]]) -> None:
    """The server reports zero: that is counted as a model call of its own kind, and not tagged."""
    scenario = scenarios["max_turns"]
    call, metrics = scenario["zero_token_call"], scenario["metrics"]
    assert call["message"]["metadata"]["usage"]["totalTokens"] == 0
    assert (call["synthetic"], call["halt"], call["stop_reason"]) == (False, None, "end_turn")
    kinds = {
        kind: metrics[f'otel_limits_model_calls_total{{agent="cache",kind="{kind}",model="cache"}}']
        for kind in ("measured", "zero_token", "unmeasured", "failed")
    }
    assert kinds == {"measured": 0, "zero_token": 1, "unmeasured": 0, "failed": 0}
    tagged = 'otel_limits_synthetic_messages_total{agent="cache",reason="max_turns"}'
    assert metrics[tagged] == 0


def test_metrics_come_from_the_endpoint_of_each_program(events: dict[str, Any]) -> None:
    """Four programs, four ports, and no fault of ours in any of them."""
    urls = {scenario["metrics_url"] for scenario in events["scenarios"]}
    assert len(urls) == 4
    for scenario in events["scenarios"]:
        assert not [name for name in scenario["metrics"] if "internal_errors" in name]


# --- for readers ----------------------------------------------------------------------------------


def read_terminal(terminal: int) -> Iterator[bytes]:
    """Everything that is written to a terminal until it is closed."""
    try:
        while chunk := os.read(terminal, 65_536):
            yield chunk
    except OSError:  # how Linux says that the other end is closed
        return


@pytest.fixture(scope="module")
def terminal_output() -> str:
    """What a reader with a terminal of 100 columns gets, escape sequences and all."""
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
    """The lines that are left at the end, without colours."""
    plain = re.sub(ESCAPE + r"\[[0-9;?]*[A-Za-z]", "", terminal_output)
    return [line.split("\r")[-1].rstrip() for line in plain.replace("\r\n", "\n").split("\n")]


def test_progress_is_shown_while_it_runs(terminal_output: str) -> None:
    """The table is drawn again and again in place."""
    assert terminal_output.count("MAX_TOKEN_BUDGET=5000") > 2
    assert f"{ESCAPE}[?25l" in terminal_output
    assert terminal_output.rindex(f"{ESCAPE}[?25h") > terminal_output.rindex(f"{ESCAPE}[?25l")


def test_the_table_shows_the_facts(lines: list[str], scenarios: dict[str, dict[str, Any]]) -> None:
    """Each scenario with its settings, model calls, tokens and stop reason."""
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


def test_scraped_lines_are_shown_whole(
    lines: list[str], scenarios: dict[str, dict[str, Any]]
) -> None:
    """Every counter that is not zero, as Prometheus gets it, and no page of histograms."""
    metrics = scenarios["max_turns"]["metrics"]
    shown = {line for line in lines if line.startswith("otel_limits_")}
    assert shown == {
        f"{series} {value}" for series, value in metrics.items() if value and "_total{" in series
    }


def test_the_warnings_of_the_log_are_shown(lines: list[str]) -> None:
    """One for each limit that was reached."""
    text = "\n".join(lines)
    assert "Agent 'max_turns' was halted by max_turns: 6 of 6 turns used." in text
    assert text.count("The limit is set in OTEL_LIMITS_") == 3


def test_a_halt_and_a_zero_token_call_stand_side_by_side(lines: list[str]) -> None:
    """What tells them apart can be read off."""
    rows = {line[:25].strip(): line[25:].split() for line in lines}
    assert rows["is_synthetic(message)"] == ["True", "False"]
    assert rows["result.stop_reason"] == ["max_turns", "end_turn"]
    assert rows["reported usage"] == ["none", "0", "tokens"]


def marks(line: str) -> str:
    """Return a line without spaces and bars, which are drawn otherwise where there is no colour."""
    return re.sub(r"[\s━╸╺]", "", stable_text(line))


def test_the_picture_of_the_readme_is_what_is_shown(lines: list[str]) -> None:
    """Run `python -m tests.generate images` when this fails."""
    drawn = [marks(line) for line in lines_of(PICTURE.read_text(encoding="utf-8"))]
    title, prompt, *shown = [line for line in drawn if line]
    assert (title, prompt) == ("otel-limitsdemo", "$otel-limitsdemo")
    whole = "".join(map(marks, lines))  # the picture is narrower than a line of the log
    assert [line for line in shown if line not in whole] == []


def test_nothing_is_wider_than_the_terminal(lines: list[str]) -> None:
    """100 columns are enough, but for a log line, which the terminal wraps."""
    assert not [line for line in lines if len(line) > 100 and " halted by " not in line]


@pytest.mark.parametrize("command", [command for command, _ in NEXT_STEPS])
def test_what_to_do_next_can_be_done(command: str, lines: list[str]) -> None:
    """Every command is shown, and is one that exists."""
    assert [line for line in lines if line.startswith(f"{command}  ")]
    name, *arguments = shlex.split(command)
    if name == "otel-limits":
        assert make_parser().parse_args(arguments).call is not None


# --- another model server -------------------------------------------------------------------------


def test_it_can_be_pointed_at_another_model_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With or without /v1; plain text where there is no terminal, even if colour is wished for."""
    monkeypatch.setattr("otel_limits.demo.main.SCENARIOS", SCENARIOS[1:2])
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Servers(pending_looks=0) as real:
        status = main(["demo", "--base-url", f"{real.url('real')}/v1/", "--model", "llama"])
        seen = real.seen("real")
    shown, errors = capsys.readouterr()
    assert (status, errors, seen.requests) == (0, "", 6)
    assert ESCAPE not in shown
    assert f"llama at {real.url('real')}" in shown
    counted = 'otel_limits_model_calls_total{agent="max_turns",kind="measured",model="llama"} 6.0'
    assert counted in shown


@pytest.mark.parametrize("url", ["localhost:11434", "ftp://localhost", "http://"])
def test_a_base_url_that_is_not_an_address_is_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an example of one."""
    assert main(["demo", "--base-url", url]) == 2
    assert "--base-url must be like http://localhost:11434/v1, got" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Before any agent is started."""
    assert main(["demo", "--base-url", "http://127.0.0.1:1/v1"]) == 2
    assert "No model server answers at http://127.0.0.1:1 (" in capsys.readouterr().err


def test_an_agent_that_fails_says_why() -> None:
    """The exception that ended its program."""
    with Servers(pending_looks=1) as servers:
        setup = Setup(
            base_url=f"{servers.url('real')}/nowhere",
            model="llama",
            pending_looks=1,
            scenarios=SCENARIOS[:1],
        )
        with Play(setup, servers) as running, pytest.raises(AgentFailedError) as raised:
            running.futures[0].result()
    assert str(raised.value).startswith("The agent 'no_limits' failed: httpx.HTTPStatusError: ")


def test_an_interruption_leaves_no_program_behind() -> None:
    """Status 130, no traceback, and every agent is gone."""
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


def test_a_narrow_terminal_has_no_bars_and_no_letters_one_below_the_other() -> None:
    """60 columns have room for the numbers and for how each scenario ended."""
    done: Future[ScenarioOutcome] = Future()
    seen = SimpleNamespace(requests=6, looks=6, tokens=1_539)
    running: Any = SimpleNamespace(
        setup=SimpleNamespace(scenarios=SCENARIOS, pending_looks=20),
        futures=[done] * len(SCENARIOS),
        servers=SimpleNamespace(seen=lambda _: seen),
    )
    outcome = SimpleNamespace(
        model_calls=6,
        tokens=1_539,
        errand=SimpleNamespace(stop_reason="max_token_budget", halt="max_token_budget"),
    )
    done.set_result(cast("ScenarioOutcome", outcome))
    screen = Console(file=io.StringIO(), width=60, record=True)
    screen.print(progress(running, screen.width))
    lines = screen.export_text().splitlines()
    assert "━" not in "".join(lines)
    assert sum("max_token_budget" in line for line in lines) == len(SCENARIOS)
    assert any("MAX_TURNS=6 ACTION=observe" in line for line in lines)
