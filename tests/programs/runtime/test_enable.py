"""`enable()` limits the agents of child processes, however they are started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from otel_limits.settings.children import MARKER, ON_PATH
from tests.launching import ENDLESS, Ended, execute, fresh_environment
from tests.paths import SCRIPTS

PARENT = str(SCRIPTS / "enabling_parent.py")
HALTED = {"model_calls": 3, "stop_reason": "max_turns"}


def parent(arguments: dict[str, object], *words: str, **variables: str) -> Ended:
    """Run a program that calls `enable()` with these arguments in its main block."""
    return execute(sys.executable, PARENT, json.dumps(arguments), *words, **variables)


@pytest.mark.parametrize(
    ("way", "agents"),
    [
        *((way, "strands") for way in ("spawn", "forkserver", "executor", "subprocess")),
        ("spawn", "openai-agents"),
    ],
)
def test_enable_limits_agents_of_child_processes(way: str, agents: str) -> None:
    """Children import the program, but not its main block; forkserver is Python 3.14's default."""
    ended = parent({"max_turns": 3}, way, AGENTS_BY=agents)
    assert json.loads(ended.output) == {way: HALTED}
    assert ended.log.count("The limit is set in enabling_parent.py:") == 1


def test_variable_of_child_overrides_enable_of_parent() -> None:
    """A variable that the parent has as well does not: there, arguments override it."""
    ended = parent({"max_turns": 3}, "subprocess", "other", OTEL_LIMITS_MAX_TURNS="7")
    assert json.loads(ended.output) == {
        "subprocess": HALTED,
        "other": {"model_calls": 5, "stop_reason": "max_turns"},
    }


def test_child_in_other_directory_uses_policy_of_parent(tmp_path: Path) -> None:
    """The parent's policy file has a relative path, and overrides the arguments there as well."""
    (tmp_path / "limits.yaml").write_text("defaults:\n  limits: {max_turns: 2}\n")
    ended = execute(
        *("env", "--chdir", str(tmp_path), sys.executable, PARENT, '{"max_turns": 3}'),
        "subprocess",
        OTEL_LIMITS_POLICY="limits.yaml",
    )
    assert json.loads(ended.output)["subprocess"]["model_calls"] == 2


def test_disable_restores_the_environment() -> None:
    """The application's path is kept, and a second call does not add the directory again."""
    ended = parent({"max_turns": 3}, "--path", PYTHONPATH="/theirs")
    before, during, after = map(json.loads, ended.output.splitlines())
    assert before == after == {"PYTHONPATH": "/theirs"}
    ours, theirs = during["PYTHONPATH"].split(":")
    assert (Path(ours).parts[-3:], theirs) == (("otel_limits", "startup", "on_path"), "/theirs")
    assert json.loads(during[MARKER])["limits"] == {"max_turns": 3}


def test_enable_without_children_leaves_the_environment_unchanged() -> None:
    """An application may pass its environment to other programs."""
    ended = parent({"max_turns": 3, "children": False}, "--path")
    assert ended.output == "{}\n" * 3


def test_passwords_are_not_copied_for_children() -> None:
    """Children have the variable itself; a copy could be logged by those who don't expect it."""
    store = {"OTEL_LIMITS_QUOTA_STORE": "redis://:hunter2@localhost/0"}
    ended = parent({"max_turns": 3}, "--path", **store)
    assert MARKER in ended.output
    assert "hunter2" not in ended.output


def test_child_reports_observers_that_it_does_not_have() -> None:
    """They are functions of the parent, so its statistics would miss these agents silently."""
    ended = parent({"max_turns": 3}, "subprocess", "--observers")
    assert json.loads(ended.output)["subprocess"] == HALTED
    assert ended.log.count("its observers are not called here. Call enable() with them") == 1


def test_unreadable_limits_of_parent_are_an_error() -> None:
    """Another release wrote them: silence would be an agent without limits."""
    environ = {"PYTHONPATH": str(ON_PATH), MARKER: '{"limits": {"max_miracles": 3}}'}
    ended = execute(sys.executable, ENDLESS, **environ)
    assert ended.events["model_calls"] > 3
    assert "The limits of the parent process cannot be read" in ended.log
    strict = execute(sys.executable, ENDLESS, OTEL_LIMITS_STRICT="true", **environ)
    assert (strict.status, strict.output) == (2, "")


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_isolated_python_warns_that_children_are_not_limited(option: str) -> None:
    """They inherit the option, and would ignore the environment."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); import otel_limits; "
        "otel_limits.enable(max_turns=3); otel_limits.enable(children=False)"
    )
    path = ":".join(entry for entry in sys.path if entry)
    ended = execute(sys.executable, option, "-c", program, path)
    assert ended.log.count("child processes are not limited unless forked: Python runs") == 1
    assert "pass children=False" in ended.log


@pytest.mark.parametrize("enabled_before", [True, False])
def test_fork_server_that_runs_already_is_reported(*, enabled_before: bool) -> None:
    """Its children have its environment, so they miss the limits silently."""
    program = (
        "import multiprocessing, otel_limits, sys\n"
        "if sys.argv[1] == 'True': otel_limits.enable(max_turns=3)\n"
        "process = multiprocessing.get_context('forkserver').Process(target=print)\n"
        "process.start(), process.join()\n"
        "for cap in (3, 4): otel_limits.enable(max_turns=cap)\n"
    )
    ended = execute(sys.executable, "-c", program, str(enabled_before))
    said = ended.log.count("it was started before enable(). Call enable() before the first")
    assert said == (0 if enabled_before else 1), ended.log


def test_child_without_agents_imports_nothing_of_the_package() -> None:
    """The environment also reaches Python programs that have nothing to do with agents."""
    environ = fresh_environment(PYTHONPATH=str(ON_PATH))
    environ[MARKER] = "{}"
    ended = execute(
        sys.executable, "-c", "import sys; print('otel_limits' in sys.modules)", **environ
    )
    assert (ended.output, ended.log) == ("False\n", "")
