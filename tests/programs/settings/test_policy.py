"""A bad policy file ends a strict process, and write access to one is reported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context
from otel_limits.settings.policy.file import is_changeable
from tests.programs.agents.test_first_calls import AGENT, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write the policy file that the environment names."""
    path = tmp_path / "limits.yaml"
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))

    def write(text: str) -> Path:
        path.write_text(text)
        return path

    return write


def test_strict_ends_the_process(write: Callable[[str], Path]) -> None:
    """With OTEL_LIMITS_STRICT a bad file ends the process with status 2 and its sentences."""
    path = write("defaults: {action: stop}")
    program = "from otel_limits.runtime.enable import enable_leniently as e; e('run'); print('on')"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OTEL_LIMITS_STRICT": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"otel-limits: {path}:1: defaults.action must be one of" in ended.stderr


# --- write access ---------------------------------------------------------------------------------

CAN_CHANGE = "Agents that run as this user can change policy file"
OTHER_USER = 65534
FOREIGN = Path("/etc/passwd")
"""A file that only root can change."""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy file of this user."""
    path = tmp_path / "limits.yaml"
    path.write_text("defaults: {limits: {max_turns: 30}}")
    path.chmod(0o644)
    return path


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """Run `otel-limits check`."""
    return subprocess.run(
        [sys.executable, "-m", "otel_limits.cli", "check"],
        env={**os.environ, "OTEL_LIMITS_POLICY": str(path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def is_changeable_by_user(path: Path) -> bool:
    """Return whether this user, or another one if it is root, can change a file."""
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
        os._exit(int(is_changeable(str(path))))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory of the user that `is_changeable_by_user` asks for."""
    path = Path(tempfile.mkdtemp())
    if os.getuid() == 0:
        os.chown(path, OTHER_USER, OTHER_USER)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o444])
def test_check_warns_of_file_that_its_user_can_change(policy: Path, mode: int) -> None:
    """A shell tool can lift the limits of its agent, also after a `chmod`."""
    policy.chmod(mode)
    done = check(policy)
    assert done.returncode == 0
    assert done.stderr.count(CAN_CHANGE) == 1
    assert str(policy) in done.stderr


def test_link_that_the_user_can_replace_is_changeable(home: Path) -> None:
    """The file itself is out of reach, but not the link."""
    (home / "limits.yaml").symlink_to(FOREIGN)
    assert is_changeable_by_user(home / "limits.yaml")


def test_file_out_of_reach_is_not_changeable() -> None:
    """A secure set-up needs no warning."""
    assert not is_changeable_by_user(FOREIGN)


def test_doctor_warns_without_failing(policy: Path) -> None:
    """It is a weakness of the set-up, and no reason to fail a deployment."""
    findings = findings_of("doctor", Context({"OTEL_LIMITS_POLICY": str(policy)}))
    (finding,) = [each for each in findings if each.name == "policy file"]
    assert finding.status == "warn"
    assert CAN_CHANGE in finding.text


def test_own_file_is_reported_in_the_first_line(policy: Path) -> None:
    """Developers own their files, so they are not warned at each start."""
    done = run(sys.executable, "-W", "ignore", "-c", AGENT, OTEL_LIMITS_POLICY=str(policy))
    assert done.stderr == (
        "otel-limits: enforcing max_turns=30 on agent 'research' "
        "(action=halt, policy=changeable, source=spans)\n"
    )


def test_start_warns_once_of_file_that_all_users_can_write(policy: Path) -> None:
    """Such a mode is a mistake, on any machine."""
    policy.chmod(0o666)
    done = run(sys.executable, "-W", "ignore", "-c", AGENT, OTEL_LIMITS_POLICY=str(policy))
    assert done.stderr.count(CAN_CHANGE) == 1
