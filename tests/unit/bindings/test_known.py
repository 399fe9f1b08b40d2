"""Several frameworks in one process: each is recognized, and fails, on its own."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import importlib.util
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from otel_limits import Enforcing, Event, Limits
from otel_limits.bindings import recognition
from otel_limits.bindings.framework import Gap
from otel_limits.core.policy import Policy
from otel_limits.runs.registry import LIVE
from otel_limits.runtime.runtime import FrameworkImports, Runtime
from otel_limits.settings.table import Settings
from tests.bots import Bot
from tests.second_framework import BotFramework
from tests.unit.bindings.test_framework import Scripted, install, look, named

SETTINGS = Settings(policy=Policy(limits=Limits(max_turns=3)))

MISSING = Gap(
    name="robots.engine.Robot.run", version="robots 1.0", without="", still_limited="none"
)

pytestmark = pytest.mark.usefixtures("faulty")


class RobotFramework(BotFramework):
    """A framework whose package a test writes."""

    name = "robots"
    module = "robots.engine"
    distribution = "robots"
    packages = ("robots",)
    parts = ("robots.teams",)

    def __init__(self, fault: str = "") -> None:
        """Fail in the method `fault`."""
        self.fault = fault
        self.done: list[str] = []
        """Its methods that were called, with what could be imported then."""

    def _do(self, method: str) -> None:
        names = vars(sys.modules["robots"])
        self.done.append(method + ("" if "READY" in names else " early"))
        if self.fault == method:
            raise RuntimeError(f"no {method} for u:hush@host")

    def gaps(self) -> list[Gap]:
        """Return one gap if that is the fault."""
        self._do("gaps")
        return [MISSING] if self.fault == "vital gap" else []

    def gaps_of(self, part: str) -> list[Gap]:
        """Return no gap."""
        self._do(part)
        return []

    def watch(self) -> None:
        """Do nothing."""
        self._do("watch")

    def release(self) -> bool:
        """Do nothing."""
        self.done.append("release")
        if self.fault == "release":
            raise RuntimeError("no release")
        return False


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that modules are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    # Without classes, it is recognized by its distribution alone.
    monkeypatch.setitem(recognition.CLASSES, "robots.engine", ())
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "robots"]:
        del sys.modules[name]


ROBOTS = {
    "__init__": "from robots.engine import Robot\nREADY = True\n",
    "engine": "import robots.tools\nclass Robot: pass\n",
    "tools": "from robots import engine\n",
    "teams": "",
}
"""The modules of the package, which import each other in a circle."""


def write_robots(path: Path, **modules: str) -> None:
    """Write the package."""
    package = path / "robots"
    package.mkdir(parents=True)
    for name, text in (ROBOTS | modules).items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Callable[..., Runtime]:
    """Enable these frameworks in a separate runtime."""

    def enable(*frameworks: Any, observers: Any = ()) -> Runtime:
        runtime = Runtime(LIVE, frameworks)
        request.addfinalizer(runtime.stop)
        before = [*sys.meta_path]
        runtime.start(SETTINGS, observers)
        # Its own alone: that of wrapt is added once per process.
        added = [each for each in sys.meta_path if each not in before]
        (own,) = [each for each in added if isinstance(each, FrameworkImports)]
        request.addfinalizer(lambda: sys.meta_path.remove(own))
        return runtime

    return enable


Start = Callable[..., Runtime]


# --- each on its own ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["watch", "gaps", "vital gap"])
def test_fault_of_one_framework_leaves_the_other_in_force(
    path: Path, start: Start, events: list[Event], caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """A process with two frameworks must not lose the limits of both."""
    write_robots(path)
    install(path, "robots")
    robots = RobotFramework(fault)
    runtime = start(robots, named(), observers=[events.append])
    importlib.import_module("robots")
    assert asyncio.run(Bot("bob", Scripted(None), {"look": look}).run("go")).reason == "max_turns"
    last = {each.framework: each.in_force for each in events if isinstance(each, Enforcing)}
    assert last == {"": True, "tests.bots": True, "robots": False}
    assert runtime.enforcement("tests.bots").is_enforcing
    assert not runtime.enforcement("robots").is_enforcing
    assert robots.done[-1] == "release"
    assert caplog.text.count("limits are not enforced: robots") == 1
    assert "hush" not in caplog.text


def test_each_framework_has_a_series(path: Path, start: Start) -> None:
    """The one without a framework exists before any is imported, and stays."""
    write_robots(path)
    install(path, "robots")
    start(RobotFramework("vital gap"))

    def series() -> dict[str, float]:
        name = "otel_limits_enforcing"
        found = [each for metric in REGISTRY.collect() for each in metric.samples]
        return {
            each.labels["framework"]: each.value
            for each in found
            if each.name == name and each.labels["source"] == "code"
        }

    importlib.import_module("prometheus_client")
    before = series()
    assert (before[""], before.get("robots")) == (1, None)
    importlib.import_module("robots")
    after = series()
    assert (after[""], after["robots"]) == (1, 0)


def test_framework_that_cannot_be_released_leaves_the_other_released(
    path: Path, start: Start
) -> None:
    """`disable()` must not stop half-way."""
    write_robots(path)
    install(path, "robots")
    first, second = RobotFramework("release"), RobotFramework()
    runtime = start(first, second)
    importlib.import_module("robots")
    runtime.stop()
    assert first.done[-1] == second.done[-1] == "release"
    assert runtime.enforcement().source is None


# --- known by its distribution --------------------------------------------------------------------


@pytest.mark.parametrize("is_installed", [False, True], ids=["not installed", "shadowed"])
def test_users_package_with_the_name_of_a_framework_is_ignored(
    path: Path,
    start: Start,
    events: list[Event],
    caplog: pytest.LogCaptureFixture,
    *,
    is_installed: bool,
) -> None:
    """Names such as `agents` are common, and other packages may bring the framework along."""
    own = path / "own"
    write_robots(own)
    if is_installed:
        install(path, "robots")
    sys.path.insert(0, str(own))
    robots = RobotFramework("gaps")
    runtime = start(robots, observers=[events.append])
    importlib.import_module("robots.teams")
    assert robots.done == []
    assert runtime.enforcement().is_enforcing
    assert not any(isinstance(event, Enforcing) for event in events)
    assert "robots" not in caplog.text


def test_framework_in_an_editable_installation_is_recognized(path: Path, start: Start) -> None:
    """Its metadata is elsewhere, and names the directory of its source."""
    source = path / "source"
    write_robots(source / "src")
    install(path, "robots", editable=True, place=source)
    sys.path.insert(0, str(source / "src"))
    robots = RobotFramework()
    start(robots)
    importlib.import_module("robots")
    assert robots.done == ["gaps", "watch"]


def test_release_without_the_module_is_reported(path: Path, start: Start) -> None:
    """Its import would be awaited forever. No package around it is imported for that."""
    write_robots(path, __init__="READY = True")
    (path / "robots" / "engine.py").unlink()
    install(path, "robots")
    robots = RobotFramework("vital gap")
    runtime = start(robots)
    importlib.import_module("robots")
    assert robots.done == ["gaps"]
    assert runtime.enforcement("robots").obstacles


def test_framework_of_which_another_module_is_imported_is_not_probed(
    path: Path, start: Start
) -> None:
    """It has its module of agents, which this program does not use."""
    write_robots(path, __init__="READY = True")
    install(path, "robots")
    robots = RobotFramework("vital gap")
    start(robots)
    importlib.import_module("robots.teams")
    assert robots.done == []
    assert "robots.engine" not in sys.modules


# --- when the outermost import has ended ----------------------------------------------------------


@pytest.mark.parametrize("first", ["robots", "robots.engine", "robots.tools", "robots.teams"])
def test_framework_is_met_after_its_circular_import(path: Path, start: Start, first: str) -> None:
    """Its module of agents is complete before the package that imports it is."""
    write_robots(path)
    install(path, "robots")
    robots = RobotFramework()
    start(robots)
    importlib.import_module(first)
    importlib.import_module("robots.teams")
    assert robots.done == ["gaps", "watch", "watch", "robots.teams"]


def test_agents_at_the_top_of_a_users_module_are_limited(path: Path, start: Start) -> None:
    """That module is not a framework's, so its end is not awaited."""
    write_robots(path)
    install(path, "robots")
    robots = RobotFramework()
    start(robots)
    (path / "users_program.py").write_text("import robots\nDONE = list(METHODS())\n")
    builtins.METHODS = lambda: robots.done  # type: ignore[attr-defined]
    try:
        program = importlib.import_module("users_program")
    finally:
        del builtins.METHODS  # type: ignore[attr-defined]
        sys.modules.pop("users_program", None)
    assert program.DONE == ["gaps", "watch"]


@pytest.fixture
def enabling(start: Start, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RobotFramework]:
    """Let modules enable in the middle of their import, in a thread if requested."""

    def prepare(*, in_thread: bool = False) -> RobotFramework:
        robots = RobotFramework()

        def enable() -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(start, robots).result() if in_thread else start(robots)

        monkeypatch.setattr(builtins, "ENABLE", enable, raising=False)
        return robots

    return prepare


@pytest.mark.parametrize("module", ["__init__", "engine", "tools"])
@pytest.mark.parametrize("in_thread", [False, True], ids=["same thread", "other thread"])
def test_framework_is_met_at_the_end_of_an_import_that_enables(
    path: Path, enabling: Callable[..., RobotFramework], module: str, *, in_thread: bool
) -> None:
    """E.g. by requesting a tracer. An agent right after the import would not be limited."""
    text = f"ENABLE()\nimport robots.teams\n{ROBOTS[module]}"
    write_robots(path, **{module: text})
    install(path, "robots")
    robots = enabling(in_thread=in_thread)
    importlib.import_module("robots")
    assert list(dict.fromkeys(robots.done)) == ["gaps", "watch", "robots.teams"]


def test_framework_is_tracked_while_another_thread_imports_more_of_it(
    path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents of this thread would otherwise not be limited until then. Only the probe waits."""
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        entered.set()
        leave.wait(30)

    monkeypatch.setattr(builtins, "PAUSE", pause, raising=False)
    write_robots(path, teams="PAUSE()\n")
    install(path, "robots")
    importlib.import_module("robots")
    robots = RobotFramework()
    with ThreadPoolExecutor(1) as pool:
        imported = pool.submit(importlib.import_module, "robots.teams")
        assert entered.wait(30)
        start(robots)
        assert set(robots.done) == {"watch"}
        leave.set()
        imported.result()
    assert list(dict.fromkeys(robots.done)) == ["watch", "gaps", "robots.teams"]


def test_framework_is_not_met_at_the_end_of_a_failed_import(
    path: Path, enabling: Callable[..., RobotFramework], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next import of it is looked up."""
    write_robots(path, __init__=f"{ROBOTS['__init__']}ENABLE()\nFAIL()\n")
    install(path, "robots")
    robots = enabling()
    monkeypatch.setattr(builtins, "FAIL", lambda: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("robots")
    assert robots.done == []
    for name in ("ENABLE", "FAIL"):
        monkeypatch.setattr(builtins, name, lambda: None)
    importlib.import_module("robots")
    assert robots.done == ["gaps", "watch"]
