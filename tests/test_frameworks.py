"""Several frameworks in one process: each is recognized, and fails, on its own."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import json
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from otel_limits import Enforcing, Event, Limits
from otel_limits.bindings.framework import Gap
from otel_limits.core.policy import Policy
from otel_limits.runs.registry import LIVE
from otel_limits.runtime.runtime import Runtime
from otel_limits.settings.table import Settings
from tests.launching import ENDLESS, RUN, execute
from tests.second_framework import BotFramework
from tests.test_second_framework import install

SETTINGS = Settings(policy=Policy(limits=Limits(max_turns=3)))

MISSING = Gap(name="robots.engine.Robot.run", version="robots 1.0", without="", is_vital=True)

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
        request.addfinalizer(lambda: sys.meta_path.remove(runtime._imports))
        runtime.start(SETTINGS, observers)
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
    install(path, "bots", editable=True)
    bots, robots = BotFramework(), RobotFramework(fault)
    import tests.second_framework as bot_module

    runtime = start(robots, bots, observers=[events.append])
    importlib.import_module("robots")
    bot = bot_module.Bot("bob", ask=lambda _: ("on and on", 10, 5))
    assert bot.run()["reason"] == "max_turns"
    last = {each.framework: each.in_force for each in events if isinstance(each, Enforcing)}
    assert last == {"": True, "bots": True, "robots": False}
    assert runtime.enforcement("bots").is_enforcing
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
    path: Path, start: Start, caplog: pytest.LogCaptureFixture, *, is_installed: bool
) -> None:
    """Names such as `agents` are common, and other packages may bring the framework along."""
    own = path / "own"
    write_robots(own)
    if is_installed:
        install(path, "robots")
    sys.path.insert(0, str(own))
    robots = RobotFramework("gaps")
    runtime = start(robots)
    importlib.import_module("robots.teams")
    assert robots.done == []
    assert runtime.enforcement().is_enforcing
    assert [each.framework for each in runtime._guard.states()] == [""]
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


def test_warning_at_the_import_of_a_framework_names_the_code_that_imports_it(
    path: Path, start: Start
) -> None:
    """Otherwise it seems to be ours, and filters of warnings by module miss it."""
    write_robots(path, teams="import warnings\nwarnings.warn('in beta', stacklevel=2)\n")
    install(path, "robots")
    start(RobotFramework())
    application = path / "application.py"
    application.write_text("import robots.teams\n")
    with pytest.warns(UserWarning, match="in beta") as warned:
        runpy.run_path(str(application))
    assert [each.filename for each in warned] == [str(application)]


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
    assert robots.done == ["gaps", "watch", "robots.teams"]


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


@pytest.mark.parametrize(
    "statement",
    [
        "from langchain.agents import create_agent",
        "import langgraph.graph",
        "from langgraph.pregel import Pregel",
        "import langgraph.prebuilt",
        "from langgraph.func import entrypoint",
    ],
)
def test_langgraph_is_met_when_none_of_its_modules_is_incomplete(statement: str) -> None:
    """Its modules and LangChain's import each other in circles, from wherever one begins."""
    ended = execute(sys.executable, "-W", "ignore", "-c", MEETING, statement)
    assert ended.output == "met []\n", ended.log


MEETING = """
import sys
import otel_limits
from otel_limits.bindings.langchain.langchain_framework import LANGCHAIN
watch = LANGCHAIN.watch
def watching():
    specs = [
        module.__spec__
        for name, module in sys.modules.items()
        if name.partition(".")[0] in LANGCHAIN.packages
    ]
    # Python marks the outermost one only later.
    executed = [each for each in specs if getattr(each, "_otel_limits_executed", False)]
    print("met", [each.name for each in specs if each._initializing and each not in executed])
    watch()
LANGCHAIN.watch = watching
otel_limits.enable(max_turns=3)
exec(sys.argv[1])
"""


CIRCULAR = """
import sys
from strands.agent import agent
import opentelemetry.sdk.trace
print("half", "otel_limits" in sys.modules)
"""


def test_run_enables_after_the_circular_import_of_a_framework(tmp_path: Path) -> None:
    """Neither its module of agents nor the SDK, which it imports, enables in the middle."""
    package = tmp_path / "strands" / "agent"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text(CIRCULAR)
    (package / "__init__.py").write_text("")
    (package / "agent.py").write_text("class Agent: pass\n")
    install(tmp_path, "strands-agents")
    program = "import strands, sys; print('whole', 'otel_limits' in sys.modules)"
    ended = execute(*RUN, "--", sys.executable, "-c", program, PYTHONPATH=str(tmp_path))
    assert ended.output == "half False\nwhole True\n"


def test_run_ignores_users_package_with_the_name_of_a_framework(tmp_path: Path) -> None:
    """Nothing of otel-limits is imported for it, and nothing is reported."""
    package = tmp_path / "strands" / "agent"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "agent.py").write_text("")
    program = "import strands.agent.agent, sys; print('otel_limits' in sys.modules)"
    words = ("--max-turns", "3", "--", sys.executable, "-c", program)
    ended = execute(*RUN, *words, PYTHONPATH=str(tmp_path))
    assert (ended.output, ended.log) == ("False\n", "")


def test_checkout_of_a_framework_on_the_path_is_limited(tmp_path: Path) -> None:
    """It comes before the installed distribution, and its agents would run without limits."""
    spec = importlib.util.find_spec("agents")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "agents").symlink_to(Path(spec.origin).parent)
    words = (
        "--max-turns",
        "3",
        "--",
        sys.executable,
        str(Path(ENDLESS).with_name("sdk_agents.py")),
    )
    ended = execute(*RUN, *words, PYTHONPATH=str(tmp_path))
    assert ended.events == {"model_calls": 3, "stop_reason": "max_turns"}, ended.log


def test_check_ignores_users_package_with_the_name_of_a_framework(tmp_path: Path) -> None:
    """It does not lack any API."""
    (tmp_path / "strands").mkdir()
    (tmp_path / "strands" / "__init__.py").write_text("raise SystemExit('imported')")
    words = (sys.executable, "-m", "otel_limits.cli", "check")
    ended = execute(*words, PYTHONPATH=str(tmp_path), OTEL_LIMITS_MAX_TURNS="3")
    assert (ended.status, ended.log) == (0, ""), json.dumps(ended.log)
