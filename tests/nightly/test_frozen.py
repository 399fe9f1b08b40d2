"""A program that PyInstaller has frozen, with Strands and otel-limits inside."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launching import RUN, execute, fresh_environment
from tests.paths import SCRIPTS

PROGRAM = SCRIPTS / "frozen.py"
HALTED = {"model_calls": 3, "stop_reason": "max_turns"}

UNUSED = """
import pkgutil, sys
from importlib.metadata import packages_distributions
import frozen
frozen.main()
used = {name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names}
packages = [each for name in used if hasattr(each := sys.modules[name], "__path__")]
names = set(packages_distributions())
for each in packages:
    names |= {module.name for module in pkgutil.iter_modules(each.__path__, each.__name__ + ".")}
print(*sorted(names - used), sep="\\n")
"""
"""Prints all modules that the program could import, but does not."""


pytestmark = pytest.mark.timeout(600)  # the build takes half a minute of CPU


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the program without the metadata of genai-prices, as PyInstaller does by default.

    Modules that it does not import are left out, as they would take minutes.
    """
    directory = tmp_path_factory.mktemp("frozen")
    ended = execute(sys.executable, "-c", UNUSED, PYTHONPATH=str(PROGRAM.parent))
    unused = ended.output.splitlines()[1:]
    assert "sqlalchemy" in unused, ended
    assert "genai_prices" not in unused
    subprocess.run(
        [
            *(sys.executable, "-m", "PyInstaller", "--log-level", "ERROR", "--workpath", "build"),
            *(f"--exclude-module={name}" for name in unused),
            str(PROGRAM),
        ],
        cwd=directory,
        env=fresh_environment(PYINSTALLER_CONFIG_DIR=str(directory)),
        check=True,
    )
    return str(directory / "dist" / "frozen" / "frozen")


def test_frozen_program_limits_its_agents_and_those_of_children(frozen: str) -> None:
    """Also without a price list: genai-prices cannot be imported without its metadata."""
    ended = execute(frozen)
    calls = ended.events
    assert calls.pop("prices").startswith("max_cost_usd needs prices, and there are none.")
    assert calls == {"own": HALTED, "child": HALTED}
    assert "child processes are not limited unless forked: otel-limits is part of a" in ended.log
    assert "Traceback" not in ended.log
    assert "was skipped" not in ended.log  # our files with facts are in the program, too


def test_run_does_not_promise_limits_to_a_frozen_program(frozen: str) -> None:
    """Its own Python ignores PYTHONPATH."""
    ended = execute(*RUN, "--no-quiet", "--ledger", "none", "--", frozen)
    assert ended.events["own"] == HALTED
    assert ended.log.startswith("otel-limits: frozen is not a Python program.")
    assert execute(*RUN, "--strict", "--", frozen).status == 2
