"""One-time messages on the standard error of programs and their children."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


AGENT = """
import strands
from otel_limits.testing import ScriptedModel, says
for _ in range(2):
    strands.Agent(model=ScriptedModel([says("done")]), name="research", callback_handler=None)("go")
"""

UNUSED = "no agent ran in this process"


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program under `otel-limits run`."""
    return subprocess.run(
        [sys.executable, "-m", "otel_limits.cli", "run", "--", *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"OTEL_LIMITS_MAX_TURNS": "30"},
            "enforcing max_turns=30 on agent 'research' (action=halt, source=spans)",
        ),
        (
            {"OTEL_LIMITS_PRESET": "recommended", "OTEL_LIMITS_ACTION": "observe"},
            (
                "observing max_iterations=25, max_model_calls=100, max_identical_tool_calls=5, "
                "max_consecutive_tool_failures=5, max_consecutive_handoffs=20, "
                "tree_max_model_calls=100 on agent 'research' (action=observe, preset=recommended, "
                "source=spans)"
            ),
        ),
        ({}, "No limits set for agent 'research'. Set one, e.g. OTEL_LIMITS_MAX_TURNS=30."),
    ],
    ids=["limit", "preset", "none"],
)
def test_run_prints_limits_on_standard_error(variables: dict[str, str], line: str) -> None:
    """One line, regardless of the program's logging; standard output belongs to the program."""
    done = run(sys.executable, "-W", "ignore", "-c", AGENT, **variables)
    assert (done.stdout, done.stderr) == ("", f"otel-limits: {line}\n")


@pytest.mark.parametrize("program", ["pass", "import strands"])
def test_run_reports_that_no_agent_ran(program: str) -> None:
    """One line at the exit of the program."""
    done = run(sys.executable, "-W", "ignore", "-c", program, OTEL_LIMITS_MAX_TURNS="3")
    assert done.stderr.count("\n") == 1
    assert UNUSED in done.stderr


def test_run_can_be_quiet() -> None:
    """Of a program with agents, and of one without."""
    for program in (AGENT, "pass"):
        done = run(
            *(sys.executable, "-W", "ignore", "-c", program),
            OTEL_LIMITS_MAX_TURNS="3",
            OTEL_LIMITS_QUIET="true",
        )
        assert (done.returncode, done.stderr) == (0, "")


STARTS = (
    "import subprocess, sys; subprocess.run([sys.executable, '-W', 'ignore', '-c', sys.argv[1]])"
)
FORKS = "import os, sys; exec(sys.argv[1]) if os.fork() == 0 else os.wait()"


@pytest.mark.parametrize("start", [STARTS, FORKS])
def test_notice_at_exit_covers_child_processes(start: str, tmp_path: Path) -> None:
    """The supervisor of uvicorn's workers has no agents, but they have."""
    program = (sys.executable, "-W", "ignore", "-c", start)
    environ = {"TMPDIR": str(tmp_path), "OTEL_LIMITS_MAX_TURNS": "3"}
    assert run(*program, "pass", **environ).stderr.count(UNUSED) == 1
    assert UNUSED not in run(*program, AGENT, **environ).stderr
    assert list(tmp_path.iterdir()) == []


THREADS = """
import threading
from strands import Agent
from otel_limits.testing import ScriptedModel, says

def call():
    agent = Agent(model=ScriptedModel([says("done")]), callback_handler=None)
    together.wait()
    agent("go")
    if not agent.trace_span.get_span_context().is_valid:
        print("no span")

together = threading.Barrier(20)
threads = [threading.Thread(target=call) for _ in range(20)]
for thread in threads:
    thread.start()
for thread in threads:  # executors and exporters end with the main thread
    thread.join()
"""


def test_first_agents_that_start_at_the_same_time_all_have_spans() -> None:
    """They wait for the provider, otherwise their traces are missing in every backend."""
    done = run(sys.executable, "-W", "ignore", "-c", THREADS, OTEL_LIMITS_QUIET="true")
    assert (done.returncode, done.stdout) == (0, "")
