"""Processes with a ledger of an unknown user, and with a setting that a test adds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import otel_limits


def switched_on(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that OpenTelemetry's way of loading switches on."""
    start = "from otel_limits.runtime.enable import enable_leniently as e; e('instrumentor')\n"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


READ = """
from otel_limits.runtime.runtime import RUNTIME
print(RUNTIME.is_on, RUNTIME.policy("any").limits.max_turns)
"""


def test_a_ledger_of_an_unknown_user_leaves_limits_in_force() -> None:
    """It is one sentence, and everything else that is set holds."""
    done = switched_on(READ, OTEL_LIMITS_LEDGER="~nosuchuser/l.db", OTEL_LIMITS_MAX_TURNS="3")
    assert done.stdout == "True 3\n"
    assert "OTEL_LIMITS_LEDGER is '~nosuchuser/l.db'" in done.stderr
    assert "Traceback" not in done.stderr


def test_strict_ends_a_process_with_such_a_ledger() -> None:
    """Status 2 and the sentence, no traceback."""
    done = switched_on(READ, OTEL_LIMITS_LEDGER="~nosuchuser/l.db", OTEL_LIMITS_STRICT="true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


# --- one declaration ------------------------------------------------------------------------------

NEW_SETTING = """    {name}: int = setting(1, WHOLE_NUMBER, "A setting that a test adds.")
"""
SHOW_NEW_SETTINGS = """
from otel_limits.settings.settings_reader import read_settings
from otel_limits.settings.policy.file import PolicyFile
settings = read_settings().settings
policy = PolicyFile(settings.policy_path).document.effective("any", settings.policy)
print(settings.process_number, settings.policy.agent_number, policy.agent_number)
"""


@pytest.fixture
def extended_package(tmp_path: Path) -> Path:
    """A copy of the package with a new field of `Settings` and one of `Policy`."""
    root = Path(otel_limits.__file__).parent
    copied = shutil.ignore_patterns("__pycache__", "docs", "dashboards")
    package = Path(shutil.copytree(root, tmp_path / "otel_limits", ignore=copied))
    for file, before, name in (
        ("settings/table.py", "    quiet: bool = setting(", "process_number"),
        ("core/policy.py", "    watched_tools: frozenset", "agent_number"),
    ):
        text = (package / file).read_text()
        text = text.replace(before, NEW_SETTING.format(name=name) + before)
        text = text.replace("    BOOLEAN,\n", "    BOOLEAN,\n    WHOLE_NUMBER,\n", 1)
        (package / file).write_text(text)
    return tmp_path


def test_new_setting_is_declared_once(extended_package: Path) -> None:
    """One field is enough for variable, option, help, `check` and policy file: none is dropped."""
    policy = extended_package / "limits.yaml"
    policy.write_text("defaults: {agent_number: 4}")
    variables = {
        "PYTHONPATH": str(extended_package),
        "OTEL_LIMITS_PROCESS_NUMBER": "2",
        "OTEL_LIMITS_AGENT_NUMBER": "3",
        "OTEL_LIMITS_POLICY": str(policy),
    }

    def output(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **variables},
            cwd=extended_package,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    assert output("-c", SHOW_NEW_SETTINGS) == "2 3 4\n"
    check = [line.split() for line in output("-m", "otel_limits.cli", "check").splitlines()]
    assert ["OTEL_LIMITS_PROCESS_NUMBER", "2", "environment"] in check
    help_text = output("-m", "otel_limits.cli", "run", "--help")
    assert "--process-number" in help_text
    assert "--agent-number" in help_text
