"""The built wheel with its required dependencies alone: no agent framework is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import distribution
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from tests import third_party
from tests.launching import Ended, execute
from tests.paths import ROOT
from tests.programs.runtime.test_autoload import Environment

pytestmark = pytest.mark.timeout(400)

FIX = f"pip install '{ROOT}[strands]' (or another extra: langchain, openai-agents)"
"""The wheel was built from the checkout."""
MISSING = f"otel-limits: No supported agent framework is installed. Run: {FIX}\n"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the wheel and what its metadata requires, without any extra."""
    made = Environment(tmp_path_factory.mktemp("bare"))
    pip = (sys.executable, "-m", "pip", "--python", made.python, "install", "--quiet", "--no-deps")
    subprocess.run([*pip, str(ROOT)], check=True, timeout=300, capture_output=True)
    (built,) = made.site.glob("otel_limits-*.dist-info/METADATA")
    packages = tmp_path_factory.mktemp("packages")
    for name in closure(re.findall(r"^Requires-Dist: (.*)$", built.read_text(), re.MULTILINE)):
        for file in distribution(name).files or ():
            if ".." not in file.parts:
                link(Path(str(distribution(name).locate_file(file))), packages / file)
    made.leave(packages)
    return made


def link(file: Path, place: Path) -> None:
    """Make a link to a file, and to its bytecode: each program would compile it again."""
    if file.exists() and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(file)
        if file.suffix == ".py":
            link(Path(cache_from_source(str(file))), Path(cache_from_source(str(place))))


def closure(requirements: list[str]) -> set[str]:
    """Return the distributions that these need here, directly or not."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        each = waiting.pop()
        is_needed = each.marker is None or each.marker.evaluate({"extra": ""})
        if is_needed and each.name not in found:
            found.add(each.name)
            waiting += map(Requirement, distribution(each.name).requires or ())
    return found


@pytest.fixture(scope="module")
def ledger(bare: Environment, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the example ledger, which the demo writes without any framework."""
    directory = tmp_path_factory.mktemp("example")
    ended = command(bare, "demo", "--record", str(directory))
    assert ended.status == 0, ended.log
    return str(directory / "ledger.db")


def command(bare: Environment, *words: str, **variables: str) -> Ended:
    """Run a command of otel-limits there."""
    return execute(str(Path(bare.python).with_name("otel-limits")), *words, **variables)


def program(bare: Environment, text: str, **variables: str) -> Ended:
    """Run a Python program there."""
    return execute(bare.python, "-c", text, **variables)


def test_wheel_requires_no_framework(bare: Environment) -> None:
    """Its users install one of several, which brings many packages."""
    ended = program(bare, "import importlib.util as u; print(u.find_spec('strands'))")
    assert ended.output == "None\n"


def test_check_reports_missing_framework(bare: Environment) -> None:
    """A warning only: programs may have their own environment."""
    ended = command(bare, "check", OTEL_LIMITS_MAX_TURNS="3")
    assert (ended.status, ended.log) == (0, MISSING)


def test_doctor_reports_missing_framework(bare: Environment) -> None:
    """Nothing was proven, so it fails, and checks everything else."""
    ended = command(bare, "doctor", "--json", "--", "otel-limits", "run", "--", bare.python)
    (failed,) = [each for each in json.loads(ended.output)["findings"] if each["status"] == "FAIL"]
    assert (ended.status, ended.log, failed["name"]) == (1, "", "runaway")
    assert failed["text"] == f"No supported agent framework is installed for {bare.python}."
    assert failed["advice"] == FIX


def test_demo_reports_missing_framework(bare: Environment) -> None:
    """It has no agent to run."""
    ended = command(bare, "demo")
    assert (ended.status, ended.output) == (1, "")
    sentence = "No supported agent framework is installed."
    assert ended.log == f"otel-limits: {sentence} Run: {FIX}\n"


def test_run_reports_missing_framework_at_exit(bare: Environment) -> None:
    """The program itself runs as without otel-limits."""
    words = ("run", "--max-turns", "3", "--", bare.python, "-c", "print('ran')")
    ended = command(bare, *words, OTEL_LIMITS_QUIET="")
    assert (ended.status, ended.output) == (0, "ran\n")
    assert ended.log == (
        "otel-limits: no agent ran in this process or in a child process, so no limits were "
        f"applied. No supported agent framework is installed for {bare.python}. "
        "Install otel-limits there with the extra strands, langchain or openai-agents.\n"
    )


@pytest.mark.parametrize("way", ["run", "enable", "doctor"])
def test_missing_framework_of_a_binding_is_named(
    bare: Environment, tmp_path: Path, way: str
) -> None:
    """With its entry point and its distribution, which is installed."""
    third_party.write_metadata(tmp_path, "bots-limits", entry_points=third_party.ENTRY_POINTS)
    path = {"PYTHONPATH": str(tmp_path), "OTEL_LIMITS_QUIET": ""}
    if way == "enable":
        text = "import otel_limits; otel_limits.enable(max_turns=3)"
        ended = execute(bare.python, "-c", text, **path)
    elif way == "run":
        words = ("run", "--max-turns", "3", "--", bare.python, "-c", "import bots")
        ended = command(bare, *words, **path)
    else:
        ended = command(bare, "doctor", "--", "otel-limits", "run", "--", bare.python, **path)
    said = ended.log + ended.output
    assert "No supported agent framework is installed" in said
    assert (
        "bots-limits: its entry point 'bots = bots_limits:BOTS' waits for bots, which is not "
        "installed. Install it, correct the entry point, or uninstall bots-limits."
    ) in said


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "spend"),
        ("audit", "backtest", "--max-turns", "20"),
        ("ledger", "export", "--format", "csv"),
        ("autoload", "status"),
        ("docs",),
    ],
    ids=" ".join,
)
def test_command_works_without_framework(
    bare: Environment, ledger: str, words: tuple[str, ...]
) -> None:
    """The ledger and the settings of a fleet are read where no agent runs."""
    ended = command(bare, *words, OTEL_LIMITS_LEDGER=ledger)
    assert "Traceback" not in ended.log
    assert ended.status == (1 if words[0] == "autoload" else 0), ended.log  # it is not installed


def test_top_works_without_framework(bare: Environment) -> None:
    """It scrapes the fleet, which cannot be reached here."""
    ended = command(bare, "top", "--once", "--scrape", "http://127.0.0.1:9/metrics")
    assert "127.0.0.1:9/metrics is unavailable" in ended.output
    assert (ended.status, ended.log) == (1, "")


def test_quotas_work_without_framework(bare: Environment, tmp_path: Path) -> None:
    """They are shown and set from anywhere."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas:\n  all:\n    tokens: 5\n    window: day\n")
    ended = command(bare, "quotas", OTEL_LIMITS_POLICY=str(policy))
    assert ended.status == 2
    assert ended.log.startswith("otel-limits: Quotas are kept in process memory")


def test_enable_reports_missing_framework_once(bare: Environment) -> None:
    """It takes effect as soon as a framework is installed, so it is no error."""
    text = (
        "import otel_limits; otel_limits.enable(max_turns=3); otel_limits.enable(max_turns=4);"
        "print(otel_limits.stop_of({}), otel_limits.stop_of(ValueError()),"
        " otel_limits.is_synthetic({})); otel_limits.disable()"
    )
    ended = program(bare, text)
    assert (ended.status, ended.output) == (0, "None None False\n")
    assert ended.log == MISSING


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from otel_limits import LimitsPlugin", "LimitsPlugin"),
        ("from otel_limits.testing import ScriptedModel", "otel_limits.testing.ScriptedModel"),
    ],
)
def test_import_of_what_needs_a_framework_names_the_fix(
    bare: Environment, statement: str, name: str
) -> None:
    """An error about `strands` or `pydantic` would not say what to install."""
    ended = program(bare, statement)
    assert ended.status == 1
    assert ended.log.endswith(
        f"ModuleNotFoundError: {name} needs strands-agents, which is not installed. "
        f"Run: pip install '{ROOT}[strands]'\n"
    )


def test_instrument_runs_programs_without_framework(bare: Environment) -> None:
    """Other instrumentors are loaded, and nothing is reported about agents."""
    tool = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
    words = (bare.python, "-c", tool, bare.python, "-c", "print('ran')")
    ended = execute(*words, OTEL_LIMITS_MAX_TURNS="3")
    assert (ended.status, ended.output) == (0, "ran\n")
    assert "Traceback" not in ended.log
