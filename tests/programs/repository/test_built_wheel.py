"""The built wheel, in its own environment and next to one that has only the agents.

`pipx install otel-limits` and `uv tool install otel-limits` make such an environment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ENDLESS, PACKAGES, Ended, execute
from tests.paths import ROOT, SCRIPTS
from tests.programs.runtime.test_autoload import Environment, halted

CAP = {"OTEL_LIMITS_MAX_TURNS": "3"}
UNAWARE = str(SCRIPTS / "unaware.py")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with everything but otel-limits."""
    directory = tmp_path_factory.mktemp("packages")
    for path in PACKAGES.iterdir():
        if "otel_limits" not in path.name:
            (directory / path.name).symlink_to(path)
    return directory


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory, packages: Path) -> Environment:
    """Return an environment with the wheel."""
    made = Environment(tmp_path_factory.mktemp("tool"))
    pip = (sys.executable, "-m", "pip", "--python", made.python, "install", "--quiet", "--no-deps")
    subprocess.run([*pip, str(ROOT)], check=True, timeout=300, capture_output=True)
    made.leave(packages)
    return made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, packages: Path) -> Environment:
    """Return an environment that has agents, but not otel-limits."""
    made = Environment(tmp_path_factory.mktemp("other"))
    made.leave(packages)
    return made


def run(tool: Environment, *command: str, **variables: str) -> Ended:
    """Run a program under the tool."""
    otel_limits = str(Path(tool.python).with_name("otel-limits"))
    return execute(otel_limits, "run", "--max-turns", "3", "--", *command, **variables)


pytestmark = pytest.mark.timeout(400)


def test_wheel_limits_programs_of_its_environment(tool: Environment) -> None:
    """By `run`, and by autoload in an isolated Python."""
    assert halted(run(tool, tool.python, ENDLESS))
    installed = execute(str(Path(tool.python).with_name("otel-limits")), "autoload", "install")
    assert (installed.status, installed.log) == (0, "")
    assert str(tool.site) in installed.output
    assert halted(execute(tool.python, "-I", ENDLESS, **CAP))


def test_python_of_an_environment_without_otel_limits_is_refused(
    tool: Environment, other: Environment
) -> None:
    """Before the program starts, with the environment to install it into."""
    ended = run(tool, other.python, UNAWARE)
    assert (ended.status, ended.output) == (2, "")
    assert ended.log == (
        f"otel-limits: {other.python} has strands-agents but not otel-limits, so it would ignore "
        f"all limits. Install it there: {other.python} -m pip install '{ROOT}'\n"
    )


SHELL = ("sh", "-c", 'exec "$@"', "sh")
"""A program whose Python `run` cannot see."""


@pytest.mark.parametrize("front", [SHELL, ("env", "nice")])
def test_program_that_run_became_ends_where_it_cannot_be_limited(
    tool: Environment, other: Environment, front: tuple[str, ...]
) -> None:
    """The process ends before it has an agent."""
    ended = run(tool, *front, other.python, UNAWARE)
    assert (ended.status, ended.output) == (2, "")
    assert ended.log.startswith(
        f"otel-limits: limits are not enforced: otel-limits cannot be imported in {other.python} "
    )


@pytest.mark.parametrize(("strict", "output"), [("", "23 0\n"), ("true", "2\n")])
def test_child_in_an_environment_without_otel_limits_is_reported(
    tool: Environment, other: Environment, strict: str, output: str
) -> None:
    """It ends under strict; otherwise it may be a part of the program that needs no limits."""
    parent = "import subprocess, sys; print(subprocess.run(sys.argv[1:], check=False).returncode)"
    command = (tool.python, "-uc", parent, other.python, UNAWARE)
    ended = run(tool, *command, OTEL_LIMITS_STRICT=strict)
    assert ended.output.replace("\n", " ").strip() == output.strip()
    assert ended.log.count("otel-limits cannot be imported in") == 1


def test_programs_without_agents_run_as_before(
    tool: Environment, other: Environment, tmp_path: Path
) -> None:
    """Also their own `sitecustomize`, which ours hides."""
    # On this path, as Debian's Python has one that hides those of its environments.
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    shell = ("sh", "-c", f'PYTHONPATH="$PYTHONPATH:{tmp_path}" exec "$@"', "sh")
    ended = run(tool, *shell, other.python, "-c", "print('ran')")
    assert (ended.output, ended.log) == ("theirs\nran\n", "")
