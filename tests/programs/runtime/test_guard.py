"""Programs whose framework lacks a name, public or private: none loses a limit in silence."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from otel_limits.bindings.strands.private import PRIVATE_NAMES, PrivateName
from tests.forking import NEEDED_BY_STRANDS, Forking, forking
from tests.launching import RUN, Ended, execute, fresh_environment
from tests.paths import ROOT
from tests.programs.runtime.test_autoload import Environment
from tests.unit.strands.test_private import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Checked: TypeAlias = "Callable[..., subprocess.CompletedProcess[str]]"
RunAway: TypeAlias = "Callable[..., Ended]"

RUNAWAY = """
import importlib, json, sys
import otel_limits
otel_limits.enable(otel_limits.Limits(max_turns=3))
import strands
importlib.import_module(sys.argv[1])
from prometheus_client import REGISTRY
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.testing import ScriptedModel, says, uses

@strands.tool
def search() -> str:
    "Search for nothing."
    return "nothing found"

model = ScriptedModel([uses("search")] * 12 + [says("done")])
agent = strands.Agent(model=model, tools=[search], callback_handler=None)
agent("go")
first = model.calls
if first == 3:
    agent("go on")
json.dump({
    "calls": [first, model.calls - first],
    "metric": REGISTRY.get_sample_value(
        "otel_limits_enforcing", {"source": "code", "framework": "strands"}
    ),
    "in_force": RUNTIME.enforcement().is_enforcing,
}, sys.stdout)
"""

HAVE_FALLBACKS = {each.name.rpartition(".")[2]: each.module for each in PRIVATE_NAMES}
HAVE_FALLBACKS |= dict.fromkeys(("_agent_stream.py", "_events.py"), "strands")
"""Names, and the modules in which a program meets them: a vendor's is imported after Strands."""

VITAL = (
    "InvokeModelStage",
    "AfterToolsEvent",
    "ModelStopReason",
    "add_middleware",
    "InterruptException",
    "get_callbacks_for",
)
"""Public names without which no agent can be followed."""

OTHERS = ("aux_model", "end_turn")
"""Public names that are looked up on agents and events only."""


@pytest.fixture
def renamed(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Make a copy of Strands that calls something otherwise, and the environment that loads it."""

    def rename(name: str) -> dict[str, str]:
        spec = importlib.util.find_spec("strands")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        installed, copy = Path(spec.submodule_search_locations[0]), tmp_path / "strands"
        shutil.copytree(installed, copy, copy_function=os.symlink)
        (metadata,) = installed.parent.glob("strands_agents-*.dist-info")
        (tmp_path / metadata.name).symlink_to(metadata)
        bare = name.removesuffix(".py")
        pattern = re.compile(rf"(?<!\w){re.escape(bare)}\b")
        for path in copy.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if bare in text:
                path.unlink()
                path.write_text(pattern.sub(f"{bare}_renamed", text), encoding="utf-8")
        for path in list(copy.rglob(f"{bare}.py")) if name != bare else ():
            path.rename(path.with_stem(f"{bare}_renamed"))
        return {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_DATA_HOME": str(tmp_path / "data"),
        }

    return rename


@pytest.fixture(scope="module")
def python() -> Iterator[Forking]:
    """A Python without Strands and otel-limits."""
    with forking(NEEDED_BY_STRANDS) as python:
        yield python


@pytest.fixture(scope="module")
def run_away(python: Forking) -> RunAway:
    """Let an agent run away twice at a cap of 3."""

    def run_away(environ: dict[str, str], module: str = "strands") -> Ended:
        return python.execute(RUNAWAY, module, environ=environ)

    return run_away


@pytest.mark.parametrize("name", sorted(HAVE_FALLBACKS))
def test_a_private_name_that_was_renamed_costs_no_limit(
    renamed: Callable[[str], dict[str, str]], run_away: RunAway, name: str
) -> None:
    """Every invocation is halted at its cap, and a warning says what is done otherwise."""
    ended = run_away(renamed(name), HAVE_FALLBACKS[name])
    assert ended.status == 0, ended.log
    assert json.loads(ended.output) == {"calls": [3, 3], "metric": 1, "in_force": True}
    assert "Limits are still enforced." in ended.log
    told = [line for line in ended.log.splitlines() if f".{name}. " in line]
    assert len(told) == len(set(told))
    assert "limits are not enforced" not in ended.log


@pytest.mark.parametrize("name", VITAL)
def test_renamed_required_api_is_reported(
    renamed: Callable[[str], dict[str, str]], run_away: RunAway, name: str
) -> None:
    """Nothing limits the agent, which does not feel it, and log and metric say so."""
    ended = run_away(renamed(name))
    assert ended.status == 0, ended.log
    assert json.loads(ended.output) == {"calls": [13, 0], "metric": 0, "in_force": False}
    assert "limits are not enforced: strands-agents 1.62.0 has no strands." in ended.log
    assert f".{name}. Without it no agent can be tracked or halted." in ended.log
    assert "Traceback" not in ended.log


@pytest.mark.parametrize("name", [*VITAL[:1], *VITAL[-2:]])
def test_strict_ends_a_process_that_cannot_enforce(
    renamed: Callable[[str], dict[str, str]], run_away: RunAway, name: str
) -> None:
    """It ends with status 2 and the sentence, before the first model call."""
    ended = run_away({**renamed(name), "OTEL_LIMITS_STRICT": "true"})
    assert (ended.status, ended.output) == (2, "")
    assert "otel-limits: limits are not enforced: " in ended.log


GROUP = """
import json, sys
import otel_limits
otel_limits.enable(tree=otel_limits.Limits(max_turns=3))
import strands
from strands.multiagent import GraphBuilder
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.testing import ScriptedModel, says, uses

@strands.tool
def search() -> str:
    "Search for nothing."
    return "nothing found"

def agent(name):
    model = ScriptedModel([uses("search")] * 12 + [says("done")])
    return strands.Agent(model=model, tools=[search], name=name, callback_handler=None)

first, second = agent("first"), agent("second")
builder = GraphBuilder()
for each in (first, second):
    builder.add_node(each, each.name)
builder.add_edge("first", "second")
builder.build()("go")
json.dump([first.model.calls, second.model.calls, RUNTIME.enforcement().is_enforcing], sys.stdout)
"""


def test_untracked_group_is_reported(
    renamed: Callable[[str], dict[str, str]], python: Forking
) -> None:
    """Each agent has the limits of a separate tree, and the log warns that they share none."""
    ended = python.execute(GROUP, environ=renamed("stream_async"))
    assert json.loads(ended.output) == [3, 3, False], ended.log
    assert "has no strands.multiagent.graph.Graph.stream_async. Without it the" in ended.log
    assert "has no strands.multiagent.swarm.Swarm.stream_async. Without it the" in ended.log


REIMPORT = """
import importlib, json, sys
import otel_limits
{early}
import strands
{again}
import strands.multiagent
{late}
from prometheus_client import REGISTRY
from otel_limits.runtime.runtime import RUNTIME
json.dump([
    REGISTRY.get_sample_value(
        "otel_limits_enforcing", {{"source": "code", "framework": "strands"}}
    ),
    RUNTIME.enforcement().is_enforcing,
], sys.stdout)
"""
ENABLE = "otel_limits.enable(max_turns=3)"
REMOVE = "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('strands')]"
AGAIN = {
    "removed": f"{REMOVE}; import strands",
    "disabled": f"otel_limits.disable(); {REMOVE}; import strands; {ENABLE}",
    "reloaded": "import strands.agent.agent as agents; importlib.reload(agents)",
    "graphs": "import strands.multiagent.graph as graphs; importlib.reload(graphs)",
}


def reimported(python: Forking, again: str, late: str = "", **variables: str) -> Ended:
    """Import Strands again in a process that is enabled before, and run `late` afterwards."""
    program = REIMPORT.format(early=ENABLE, again=again, late=late)
    return python.execute(program, environ=fresh_environment(**variables))


@pytest.mark.parametrize("way", AGAIN)
def test_framework_imported_again_is_reported(python: Forking, way: str) -> None:
    """Its new classes are not those that the binding recognizes."""
    ended = reimported(python, AGAIN[way])
    assert json.loads(ended.output) == [0, False]
    assert ended.log.count("limits are not enforced: ") == 1
    assert "strands was imported again, and its new classes are not limited" in ended.log


def test_looking_for_a_module_of_a_framework_is_not_an_import_of_it(python: Forking) -> None:
    """The packages around it are imported for that, and often the module with them."""
    look = "from importlib.util import find_spec\nassert find_spec('strands.agent.agent')"
    ended = python.execute(f"import otel_limits\n{ENABLE}\n{look}")
    assert (ended.status, "imported again" in ended.log) == (0, False)


def test_strict_ends_a_process_that_imports_a_framework_again(python: Forking) -> None:
    """Before the new agents exist; a disabled process is not ended."""
    ended = reimported(python, AGAIN["reloaded"], OTEL_LIMITS_STRICT="true")
    assert (ended.status, ended.output) == (2, "")
    assert "otel-limits: limits are not enforced: strands was imported again" in ended.log
    again = f"otel_limits.disable()\n{AGAIN['reloaded']}"
    assert reimported(python, again, OTEL_LIMITS_STRICT="true").status == 0


def test_framework_imported_once_is_not_reported(python: Forking) -> None:
    """Also if something looks for it."""
    ended = reimported(
        python, "import importlib.util; importlib.util.find_spec('strands.agent.agent')"
    )
    assert (json.loads(ended.output), ended.log) == ([1, True], "")


@pytest.fixture
def moved(renamed: Callable[[str], dict[str, str]], tmp_path: Path) -> dict[str, str]:
    """A copy of Strands whose agents are in another module; the environment that loads it."""
    environ = renamed("no_such_name")
    agents = tmp_path / "strands/agent"
    (agents / "agent.py").rename(agents / "core.py")
    for path in (tmp_path / "strands").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        changed = re.sub(r"\bagent\.agent\b", "agent.core", text)
        if path.parent == agents:
            changed = changed.replace("from .agent import", "from .core import")
        if changed != text:
            path.unlink()
            path.write_text(changed, encoding="utf-8")
    return environ


@pytest.fixture(scope="module")
def checked(only_strands: Path, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """Run `otel-limits check` with a limit, in an environment with Strands alone."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    made.leave(ROOT, only_strands)
    return lambda environ, *options: subprocess.run(
        [made.python, "-m", "otel_limits.cli", "check", *options],
        env={**environ, "OTEL_LIMITS_MAX_TURNS": "3"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["InvokeModelStage", "get_callbacks_for"])
def test_check_finds_missing_api(
    renamed: Callable[[str], dict[str, str]], checked: Checked, name: str
) -> None:
    """It ends with status 1 and the same sentence."""
    done = checked(renamed(name))
    assert done.returncode == 1
    assert "Limits cannot be enforced: strands-agents 1.62.0 has no" in done.stderr
    assert f"{name}. Without it no agent can be" in done.stderr


def test_check_finds_missing_module_of_agents(moved: dict[str, str], checked: Checked) -> None:
    """A framework without it is installed nevertheless."""
    done = checked(moved)
    assert done.returncode == 1
    assert "strands-agents 1.62.0 has no strands.agent.agent. Without it no" in done.stderr


def test_check_finds_framework_that_cannot_be_imported(
    renamed: Callable[[str], dict[str, str]], checked: Checked, tmp_path: Path
) -> None:
    """One of its dependencies is missing, so agents of this environment do not run at all."""
    environ = renamed("no_such_name")
    module = tmp_path / "strands/agent/agent.py"
    text = module.read_text(encoding="utf-8")
    module.unlink()
    text = text.replace("import asyncio\n", "import asyncio\nimport no_such_dependency\n", 1)
    module.write_text(text, encoding="utf-8")
    done = checked(environ, "--probe")
    assert done.returncode == 1
    assert "importable strands.agent.agent (No module named 'no_such_dependency')" in done.stderr


@pytest.mark.parametrize("ending", ["sys.exit()", "sys.exit(3)", "raise SystemExit('no GPU')"])
def test_check_finds_framework_that_exits_when_imported(
    renamed: Callable[[str], dict[str, str]], checked: Checked, tmp_path: Path, ending: str
) -> None:
    """As a failed import, rather than with the exit of the package."""
    environ = renamed("no_such_name")
    module = tmp_path / "strands/agent/agent.py"
    text = module.read_text(encoding="utf-8")
    module.unlink()
    text = text.replace("import asyncio\n", f"import asyncio\nimport sys\n{ending}\n", 1)
    module.write_text(text, encoding="utf-8")
    done = checked(environ, "--probe")
    assert done.returncode == 1
    assert "strands-agents: probing strands failed (SystemExit(" in done.stderr


def test_missing_module_of_agents_is_reported(moved: dict[str, str], run_away: RunAway) -> None:
    """Its import can never be seen, so the import of the package is enough to report it."""
    ended = run_away(moved)
    assert json.loads(ended.output) == {"calls": [13, 0], "metric": 0, "in_force": False}
    assert "limits are not enforced: strands-agents 1.62.0 has no strands.agent.agent. " in (
        ended.log
    )
    strict = run_away({**moved, "OTEL_LIMITS_STRICT": "true"})
    assert (strict.status, strict.output) == (2, "")


@pytest.mark.parametrize("name", OTHERS)
def test_no_name_is_lost_in_silence(
    renamed: Callable[[str], dict[str, str]], run_away: RunAway, name: str
) -> None:
    """For any renamed API, the agent is halted at its cap, or a warning says that it is not."""
    ended = run_away(renamed(name))
    assert ended.status == 0, ended.log
    told = json.loads(ended.output)
    if told["calls"] != [3, 3]:
        assert (told["metric"], told["in_force"]) == (0, False)
        assert "limits are not enforced: calls of agent 'Strands Agents' cannot be" in ended.log


WITHOUT_AGENTS = """
import json, sys
{lines}
state = prometheus_client.REGISTRY.get_sample_value(
    "otel_limits_enforcing", {{"source": "code", "framework": ""}}
)
json.dump([state, "strands" in sys.modules], sys.stdout)
"""
SWITCHED_ON = "import otel_limits; otel_limits.enable(max_turns=3)"


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ((SWITCHED_ON, "import prometheus_client"), 1),
        (("import prometheus_client", SWITCHED_ON), 1),
        ((SWITCHED_ON, "otel_limits.disable()", "import prometheus_client"), None),
    ],
    ids=["enabled first", "imported first", "disabled"],
)
def test_process_without_agents_exports_its_state(
    lines: tuple[str, ...], state: int | None
) -> None:
    """A rollout without traffic must not look like one without limits."""
    program = WITHOUT_AGENTS.format(lines="\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [state, False]


def test_program_under_run_exports_its_state_before_agents_are_imported() -> None:
    """It serves prometheus_client's metrics itself, and may import agents at the first request."""
    program = WITHOUT_AGENTS.format(lines="import prometheus_client").replace("code", "run")
    ended = execute(*RUN, "--max-turns", "3", "--", sys.executable, "-c", program)
    assert json.loads(ended.output) == [1, False], ended.log


CONCURRENT = """
import otel_limits, sys, threading
from otel_limits.runs.registry import LIVE
otel_limits.enable(max_turns=3)
publish = lambda: LIVE.observers.publish_internal_error("config")
threads = [threading.Thread(target=publish) for _ in range(4)]
for each in threads:
    each.start()
import prometheus_client
for each in threads:
    each.join(30)
sys.stdout.write(str(sum(each.is_alive() for each in threads)))
"""


def test_import_during_the_first_event_does_not_deadlock() -> None:
    """That event creates the metrics, and waits for the same import."""
    done = subprocess.run(
        [sys.executable, "-c", CONCURRENT], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "0"), done.stderr


# --- without a private name -----------------------------------------------------------------------

DEPRECATED = PrivateName(
    "strands.agent.agent", "Agent.structured_output_async", "public, but deprecated", "not followed"
)
"""A public name that we look for although it will be removed."""

WHOLE_MODULES = [
    PrivateName("strands.middleware._agent_stream", "", "", ""),
    PrivateName("strands.types._events", "", "", ""),
    PrivateName("strands.multiagent.graph", "Graph.stream_async", "", ""),
    PrivateName("strands.multiagent.swarm", "Swarm.stream_async", "", ""),
]

VANISH = '''
import sys, types, wrapt
module, name = sys.argv[1:]

def hide(found):
    """Hide the name from lookups by otel-limits."""
    kind, made, private = name.partition("().")
    if made:
        kind = getattr(found, kind)
        look_up = kind.__getattribute__

        def without(each, asked):
            if asked == private and "otel_limits" in sys._getframe(1).f_globals["__name__"]:
                raise AttributeError(asked)
            return look_up(each, asked)

        kind.__getattribute__ = without
    else:
        owner, _, attribute = name.rpartition(".")
        delattr(getattr(found, owner) if owner else found, attribute)

EARLY = name.startswith("Agent.") or "()." in name or "multiagent" in module
if EARLY:
    wrapt.register_post_import_hook(hide, module)

import otel_limits
otel_limits.enable(otel_limits.Limits(max_turns=3))
import strands  # must not fail
import strands.multiagent.graph, strands.multiagent.swarm
from otel_limits.testing import ScriptedModel, says, uses

@strands.tool
def search() -> str:
    "Search for nothing."
    return "nothing found"

model = ScriptedModel([uses("search")] * 5 + [says("done")])
agent = strands.Agent(model=model, tools=[search], callback_handler=None)

if not EARLY:
    found = sys.modules[module]
    stripped = types.ModuleType(module)
    vars(stripped).update({k: v for k, v in vars(found).items() if name and k != name})
    sys.modules[module] = stripped

try:
    print(agent("go").stop_reason, model.calls)
except AttributeError as error:
    print("Strands itself needs", error)
'''


OFTEN = NAMES[::4]
"""All others are missing at night. `test_guard.py` has each under another name."""


@pytest.mark.parametrize(
    "missing", [*OFTEN, DEPRECATED, *WHOLE_MODULES], ids=lambda each: each.name or each.module
)
def test_missing_private_name_breaks_no_agent(python: Forking, missing: PrivateName) -> None:
    """`import strands` succeeds, and an agent runs to a halt or to its natural end."""
    breaks_no_agent(python, missing)


def breaks_no_agent(python: Forking, missing: PrivateName) -> None:
    """Run an agent without a name of its framework."""
    ended = python.execute(VANISH, missing.module, missing.name)
    assert ended.status == 0, ended.log[-2000:]
    ends = ("max_turns 3", "end_turn 3", "end_turn 6", "Strands itself needs")
    assert ended.output.startswith(ends), ended.output + ended.log[-2000:]


def test_probing_imports_no_client() -> None:
    """Importing a client takes a second, and an unused client needs no warning."""
    program = (
        "import sys; from otel_limits.bindings.strands.probe import CLIENTS;"
        "from otel_limits.bindings.strands.strands_framework import STRANDS;"
        "print(STRANDS.gaps(), *map(STRANDS.gaps_of, CLIENTS));"
        "print('strands.models.openai' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split("\n")[:2] == ["() () () ()", "False"]
