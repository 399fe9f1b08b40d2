"""A framework with a binding in another distribution, in programs that import no otel-limits."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests import third_party
from tests.launching import BIN, ENDLESS, INSTRUMENT, NO_EXPORT, RUN, execute
from tests.paths import ROOT
from tests.programs.runtime.test_autoload import Environment

if TYPE_CHECKING:
    from tests.launching import Ended

PROGRAM: Final = """
import asyncio, json, sys
import bots

class Endless(bots.Model):
    calls = 0
    async def ask(self, messages, tools):
        self.calls += 1
        more = [("1", "look", None)] if self.calls < 9 else []
        return bots.Reply(tools=more, tokens=(10, 5))

async def look(_):
    return "nothing"

bot = bots.Bot("bob", Endless(), {"look": look})
ending = asyncio.run(bot.run("go"))
ended = {"reason": ending.reason, "calls": bot.model.calls}
if "prometheus_client" in sys.modules:
    found = sys.modules["prometheus_client"].REGISTRY.get_sample_value
    name = "otel_limits_enforcing"
    ways = ("run", "autoload", "code", "parent", "instrumentor")
    values = (found(name, {"framework": "bots", "source": way}) for way in ways)
    ended["enforcing"] = [value for value in values if value is not None]
print(json.dumps(ended))
"""

BEGIN: Final = "from __future__ import annotations\n"

HALTED: Final = {"reason": "max_turns", "calls": 3, "enforcing": [1.0]}

CHECK: Final = (sys.executable, "-m", "otel_limits.cli", "check")
CAPS: Final = {"OTEL_LIMITS_MAX_TURNS": "3", "OTEL_LIMITS_METRICS": "prometheus"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which pip has installed the binding as its authors would build it."""
    place = tmp_path_factory.mktemp("site")
    project = third_party.write_project(tmp_path_factory.mktemp("source") / "bots-limits")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = (sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(place))
    subprocess.run((*command, str(project)), check=True, timeout=120)
    third_party.install_framework(place)
    return place


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program with an agent of that framework."""
    path = tmp_path / "app.py"
    path.write_text(f"import prometheus_client\n{PROGRAM}")
    return str(path)


def result(ended: Ended) -> Any:
    """Return what a program printed of its agent."""
    assert ended.status == 0, ended.log
    assert "internal error" not in ended.log, ended.log
    assert sum(" halted" in line for line in ended.log.splitlines()) == 1, ended.log
    return json.loads(ended.output.splitlines()[-1])


# --- ways of enabling -----------------------------------------------------------------------------


def test_run_limits_a_framework_of_another_distribution(
    site: Path, program: str, tmp_path: Path
) -> None:
    """Its halt is in the metrics and in the ledger."""
    ledger = tmp_path / "ledger.db"
    ended = execute(
        *(*RUN, "--ledger", str(ledger), "--", sys.executable, program),
        PYTHONPATH=str(site),
        **CAPS,
    )
    assert result(ended) == HALTED
    with closing(sqlite3.connect(ledger)) as rows:
        found = rows.execute("SELECT agent, reason, action FROM otel_limits_invocations").fetchall()
        calls = rows.execute("SELECT provider, input_tokens FROM otel_limits_model_calls")
        assert calls.fetchall() == [("bots", 10)] * 3
    assert found == [("bob", "max_turns", "halted")]


def test_autoload_limits_a_framework_of_another_distribution(
    site: Path, program: str, tmp_path: Path
) -> None:
    """The list of them is written when autoload is installed."""
    made = Environment(tmp_path / "environment")
    with (made.site / "_packages.pth").open("a") as file:
        file.write(f"{site}\n")
    assert made.autoload("install").log == ""
    assert "bots=bots_limits:BOTS" in (made.site / "otel_limits_startup.py").read_text()
    assert made.autoload("status").status == 0
    ended = execute(made.python, program, OTEL_LIMITS_LEDGER="none", **CAPS)
    assert result(ended) == HALTED


def doctor(made: Environment, *program: str) -> dict[str, tuple[str, str]]:
    """Return what the doctor of an environment finds: status, and text with advice, by name."""
    words = ("-m", "otel_limits.cli", "doctor", "--json", "--", made.python, *program)
    return found(execute(made.python, *words, **CAPS))


def found(ended: Ended) -> dict[str, tuple[str, str]]:
    """Return the findings of the doctor by name."""
    assert ended.log == ""
    return {
        each["name"]: (each["status"], f"{each['text']} {each['advice']}".strip())
        for each in json.loads(ended.output)["findings"]
    }


RENEW: Final = "Run: otel-limits autoload install"


def test_autoload_is_outdated_once_a_framework_was_installed(
    site: Path, program: str, tmp_path: Path
) -> None:
    """Its agents run without limits, as `autoload status`, `check` and `doctor` all report."""
    made = Environment(tmp_path / "environment")
    made.autoload("install")
    with (made.site / "_packages.pth").open("a") as file:
        file.write(f"{site}\n")
    sentence = f"{made.line} is outdated: bots-limits was installed since. {RENEW}"
    status = made.autoload("status")
    assert (status.status, status.output) == (
        1,
        f"Outdated: {made.line}: bots-limits was installed since. {RENEW}\n",
    )
    assert sentence in execute(made.python, "-m", "otel_limits.cli", "check", **CAPS).log
    examined = doctor(made, program)
    assert examined["autoload"] == ("warn", sentence)
    assert examined["runaway"][0] == "FAIL"
    assert examined["enabled by"] == ("FAIL", f"Not enabled. {RENEW}")


def test_autoload_is_outdated_once_a_binding_was_uninstalled(
    site: Path, program: str, tmp_path: Path, only_strands: Path
) -> None:
    """Its agents run without limits, and nothing is there to be corrected or upgraded."""
    made = Environment(tmp_path / "environment")
    made.leave(ROOT, only_strands, site)
    made.autoload("install")
    (tmp_path / "framework").mkdir()
    third_party.install_framework(tmp_path / "framework")
    made.leave(ROOT, only_strands, tmp_path / "framework")
    sentence = f"{made.line} is outdated: bots-limits was uninstalled since. {RENEW}"
    assert sentence in execute(made.python, "-m", "otel_limits.cli", "check", **CAPS).log
    examined = doctor(made, program)
    assert examined["autoload"] == ("warn", sentence)
    status, text = examined["runaway (bots)"]
    assert status == "FAIL"
    assert "it is not installed here, so agents of bots are not limited" in text


def test_enable_limits_a_framework_of_another_distribution(
    site: Path, program: str, tmp_path: Path
) -> None:
    """In this process and in a child of it."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import runpy, subprocess, sys\nimport otel_limits\notel_limits.enable(max_turns=3)\n"
        "subprocess.run([sys.executable, sys.argv[1]], check=True)\n"
        "runpy.run_path(sys.argv[1])\n"
    )
    ended = execute(
        *(sys.executable, str(parent), program),
        PYTHONPATH=str(site),
        OTEL_LIMITS_LEDGER="none",
        OTEL_LIMITS_METRICS="prometheus",
    )
    assert ended.status == 0, ended.log
    assert [json.loads(line) for line in ended.output.splitlines()] == [HALTED, HALTED]


def test_framework_that_is_a_package_is_limited(program: str, tmp_path: Path) -> None:
    """Its modules import each other in a circle, and a program imports the package."""
    package = tmp_path / "site" / "robots"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from robots.engine import *\nREADY = True\n")
    (package / "engine.py").write_text(
        f"import robots\n{third_party.framework().partition(BEGIN)[2]}"
    )
    binding = third_party.binding().replace("from bots import", "from robots.engine import")
    (package.parent / "robots_limits.py").write_text(f"{binding}\nimport robots\nrobots.READY\n")
    points = "[otel_limits.frameworks]\nrobots.engine = robots_limits:BOTS\n"
    third_party.write_metadata(package.parent, "robots", entry_points=points)
    path = Path(program)
    path.write_text(
        path.read_text()
        .replace("import bots", "import robots as bots")
        .replace('"framework": "bots"', '"framework": "robots.engine"')
    )
    words = (*RUN, "--", sys.executable, program)
    ended = execute(*words, PYTHONPATH=str(package.parent), OTEL_LIMITS_LEDGER="none", **CAPS)
    assert result(ended) == HALTED


def test_instrumentor_limits_a_framework_of_another_distribution(site: Path, program: str) -> None:
    """It reads the metadata of all instrumentors anyway."""
    ended = execute(
        *(*INSTRUMENT, sys.executable, program),
        PYTHONPATH=str(site),
        OTEL_LIMITS_LEDGER="none",
        **CAPS,
        **NO_EXPORT,
    )
    assert result(ended) == HALTED


def test_python_without_agents_reads_no_metadata(site: Path, tmp_path: Path) -> None:
    """Each start of Python would pay for it."""
    made = Environment(tmp_path / "environment")
    with (made.site / "_packages.pth").open("a") as file:
        file.write(f"{site}\n")
    made.autoload("install")
    looks = "import sys; print([each in sys.modules for each in sys.argv[1:]])"
    modules = ("otel_limits_startup", "otel_limits", "importlib.metadata", "json", "bots")
    ended = execute(made.python, "-c", looks, *modules, **CAPS)
    assert ended.output == "[True, False, False, False, False]\n", ended.log


BROKEN: Final = "raise RuntimeError('broken')\n"


@pytest.mark.parametrize("strict", ["false", "true"])
def test_broken_binding_ends_a_strict_program_only(
    site: Path, program: str, tmp_path: Path, strict: str
) -> None:
    """As other frameworks do that cannot be limited."""
    (tmp_path / "bots_limits.py").write_text(BROKEN)
    ended = execute(
        *(*RUN, "--", sys.executable, program),
        PYTHONPATH=f"{tmp_path}:{site}",
        OTEL_LIMITS_STRICT=strict,
        OTEL_LIMITS_LEDGER="none",
        **CAPS,
    )
    sentence = "bots-limits: its entry point 'bots = bots_limits:BOTS' failed in import"
    if strict == "true":
        assert (ended.status, ended.output) == (2, "")
        assert sentence in ended.log
    else:
        assert ended.log.count(sentence) == 1
        assert json.loads(ended.output) == {"reason": "done", "calls": 9, "enforcing": [0.0]}


def test_broken_binding_leaves_a_framework_of_ours_limited(site: Path, tmp_path: Path) -> None:
    """It disables itself alone."""
    (tmp_path / "bots_limits.py").write_text(BROKEN)
    program = tmp_path / "both.py"
    program.write_text(f"import runpy, bots\nrunpy.run_path({ENDLESS!r}, run_name='__main__')\n")
    ended = execute(
        *(*RUN, "--", sys.executable, str(program)),
        PYTHONPATH=f"{tmp_path}:{site}",
        OTEL_LIMITS_LEDGER="none",
        **CAPS,
    )
    assert (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 3), ended.log
    assert "bots-limits: its entry point" in ended.log


def test_test_of_the_page_passes(site: Path, tmp_path: Path) -> None:
    """With the binding of the page, as pip has installed it."""
    (tmp_path / "test_bots.py").write_text(third_party.TEST)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    ended = execute(sys.executable, *words, str(tmp_path), PYTHONPATH=str(site))
    assert "1 passed" in ended.output, ended.output + ended.log


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--probe",)], ids=["on disk", "probed"])
def test_check_names_the_framework_with_its_release(site: Path, options: tuple[str, ...]) -> None:
    """That of the framework, not that of its binding."""
    ended = execute(*CHECK, *options, PYTHONPATH=str(site), **CAPS)
    assert (ended.status, ended.log) == (0, "")
    assert [each.split() for each in ended.output.splitlines() if each.startswith("bots")] == [
        ["bots", "bots", "1.5", *(["probed"] if options else ["not", "probed"])]
    ]


def test_doctor_halts_an_agent_of_the_framework(site: Path, tmp_path: Path) -> None:
    """Here, in a thread pool and in a child process."""
    program = tmp_path / "app.py"
    program.write_text("import bots\n")
    words = (str(BIN / "otel-limits"), "doctor", "--json", "--")
    ended = execute(
        *(*words, *RUN, "--", sys.executable, str(program)), PYTHONPATH=str(site), **CAPS
    )
    findings = json.loads(ended.output)["findings"]
    texts = {each["name"]: each["text"] for each in findings if each["status"] == "ok"}
    assert texts["bots"] == "bots 1.5: all required APIs exist.", findings
    for name in ("runaway", "thread pool", "child"):
        assert texts[name].startswith("Halted after 3 of 3 turns"), findings


def test_doctor_names_the_framework_that_a_binding_waits_for(tmp_path: Path) -> None:
    """With the entry point, its distribution and what to do, and without a traceback."""
    third_party.write_metadata(tmp_path, "bots-limits", entry_points=third_party.ENTRY_POINTS)
    (tmp_path / "bots_limits.py").write_text(third_party.binding())
    (tmp_path / "app.py").write_text("import bots, strands\n")
    words = (str(BIN / "otel-limits"), "doctor", "--json", "--", *RUN, "--", sys.executable)
    ended = execute(*words, str(tmp_path / "app.py"), PYTHONPATH=str(tmp_path), **CAPS)
    examined = found(ended)
    assert examined["frameworks"] == (
        "-",
        (
            "bots-limits: its entry point 'bots = bots_limits:BOTS' waits for bots, which is not "
            "installed. Install it, correct the entry point, or uninstall bots-limits."
        ),
    )
    assert (examined["runaway"][0], ended.status) == ("ok", 0)


def test_doctor_names_a_binding_that_raises(site: Path, tmp_path: Path) -> None:
    """With the sentence that the program would log, and without a traceback."""
    (tmp_path / "bots_limits.py").write_text(BROKEN)
    (tmp_path / "app.py").write_text("import bots\n")
    words = (str(BIN / "otel-limits"), "doctor", "--json", "--", *RUN, "--", sys.executable)
    path = f"{tmp_path}:{site}"
    ended = execute(*words, str(tmp_path / "app.py"), PYTHONPATH=path, **CAPS)
    status, text = found(ended)["runaway"]
    assert (ended.status, status) == (1, "FAIL")
    assert text == (
        "The test agent did not run under otel-limits: bots-limits: its entry point "
        "'bots = bots_limits:BOTS' failed in import (RuntimeError('broken')), so agents of bots "
        "are not limited. Correct, upgrade or uninstall bots-limits."
    )
