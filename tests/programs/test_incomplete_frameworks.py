"""A framework that lacks what limits need is reported, however it lies on the path."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.launching import RUN, execute
from tests.programs.test_autoload import Environment

if TYPE_CHECKING:
    from tests.launching import Ended

STRANDS = """
import strands
from otel_limits.testing import ScriptedModel, says, uses

@strands.tool
def search() -> str:
    "Search."
    return "nothing found"

model = ScriptedModel([uses("search")] * 12 + [says("done")])
strands.Agent(model=model, tools=[search], callback_handler=None)("go")
print(model.calls)
"""

LANGGRAPH = """
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from otel_limits.testing import ScriptedChatModel, says, uses

def search() -> str:
    "Search."
    return "nothing found"

model = ScriptedChatModel([uses("search")] * 12 + [says("done")])
graph = StateGraph(MessagesState)
graph.add_node("agent", lambda state: {"messages": model.invoke(state["messages"])})
graph.add_node("tools", ToolNode([search]))
graph.add_edge(START, "agent")
graph.add_conditional_edges("agent", tools_condition)
graph.add_edge("tools", "agent")
graph.compile().invoke({"messages": [("user", "go")]}, {"recursion_limit": 100})
print(model.calls)
"""

SDK = """
from agents import Agent, RunConfig, Runner, function_tool
from otel_limits.testing import ScriptedAgentsModel, says, uses

@function_tool
def search() -> str:
    "Search."
    return "nothing found"

model = ScriptedAgentsModel([uses("search")] * 12 + [says("done")])
config = RunConfig(tracing_disabled=True)
Runner.run_sync(Agent(name="a", model=model, tools=[search]), "go", max_turns=20, run_config=config)
print(model.calls)
"""


class Row(NamedTuple):
    """A framework, and what it lacks."""

    package: str
    distribution: str
    kind: str
    """How it is removed: a `module` is moved, other names are renamed."""
    name: str
    program: str


ROWS = (
    Row("strands", "strands-agents", "module", "strands.agent.agent", STRANDS),
    Row("strands", "strands-agents", "class", "strands.agent.agent.Agent", STRANDS),
    Row("strands", "strands-agents", "method", "strands.agent.agent.Agent.add_middleware", STRANDS),
    Row("langgraph", "langgraph", "module", "langgraph.pregel.main", LANGGRAPH),
    Row("langgraph", "langgraph", "class", "langgraph.pregel.main.Pregel", LANGGRAPH),
    Row(
        *("langgraph", "langgraph", "method"),
        *("langgraph.pregel.main.Pregel.bulk_update_state", LANGGRAPH),
    ),
    Row("agents", "openai-agents", "module", "agents.run", SDK),
    Row("agents", "openai-agents", "class", "agents.run.Runner", SDK),
    Row("agents", "openai-agents", "method", "agents.run.AgentRunner.run_streamed", SDK),
)

TABLE = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
WITH_RELEASE = pytest.mark.parametrize(
    "has_release", [True, False], ids=["installed release", "checkout on the path"]
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with everything but the packages and metadata of the frameworks."""
    made = Environment(tmp_path_factory.mktemp("bare"))
    left_out = ("strands", "langgraph-", "agents", "openai_agents")
    made.leave_out(tmp_path_factory.mktemp("packages"), *left_out)
    return made


def copy(row: Row, to: Path, *, has_release: bool) -> str:
    """Copy a framework without what it shall lack; return the program that uses it."""
    spec = importlib.util.find_spec(row.package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    installed = Path(next(iter(spec.submodule_search_locations)))
    shutil.copytree(installed, to / row.package, copy_function=os.symlink)
    if has_release:
        (metadata,) = installed.parent.glob(f"{row.distribution.replace('-', '_')}-*.dist-info")
        (to / metadata.name).symlink_to(metadata)
    for path in (to / row.package).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        changed = without(row, text, path.relative_to(to))
        if changed != text:
            path.unlink()
            path.write_text(changed, encoding="utf-8")
    if row.kind == "module":
        module = (to / row.name.replace(".", "/")).with_suffix(".py")
        module.rename(module.with_stem(f"{module.stem}_moved"))
    return without(row, row.program, Path("program.py"))


def without(row: Row, text: str, path: Path) -> str:
    """Return a source with another name for what a framework shall lack."""
    if row.kind != "module":
        bare = row.name.rpartition(".")[2]
        return re.sub(rf"(?<!\w){bare}\b", f"{bare}_renamed", text)

    def moved(found: re.Match[str]) -> str:
        depth = len(found[1])
        package = path.parts[: len(path.parts) - depth] if depth else ()
        module = ".".join((*package, *filter(None, [found[2]])))
        return f"from {module}_moved import" if module == row.name else found[0]

    return re.sub(r"from (\.*)([\w.]*) import", moved, text)


def sentence(row: Row, *, has_release: bool) -> str:
    """Return the beginning of the report."""
    release = rf"{row.distribution} [\d.]+" if has_release else row.distribution
    return rf"{release} has no {re.escape(row.name)}\. Without it no (agent|graph) can be "


@TABLE
@WITH_RELEASE
def test_check_names_what_a_framework_lacks(
    bare: Environment, tmp_path: Path, row: Row, *, has_release: bool
) -> None:
    """Its exit status is 1."""
    copy(row, tmp_path, has_release=has_release)
    check(bare, tmp_path, row, has_release=has_release)


@TABLE
def test_check_probes_what_a_framework_lacks(bare: Environment, tmp_path: Path, row: Row) -> None:
    """An import that fails is no reason for another sentence."""
    copy(row, tmp_path, has_release=True)
    check(bare, tmp_path, row, "--probe", has_release=True)


def check(bare: Environment, path: Path, row: Row, *options: str, has_release: bool) -> None:
    """Check a framework on the path."""
    words = (bare.python, "-m", "otel_limits.cli", "check", *options)
    ended = execute(*words, PYTHONPATH=str(path), OTEL_LIMITS_MAX_TURNS="3")
    (line,) = ended.log.splitlines()
    start = "otel-limits: Limits cannot be enforced: "
    assert re.match(start + sentence(row, has_release=has_release), line), line
    assert ended.status == 1


def run(bare: Environment, path: Path, program: str, **variables: str) -> Ended:
    """Run a program with a limit."""
    (path / "program.py").write_text(program, encoding="utf-8")
    words = (bare.python, "-m", "otel_limits.cli", "run", "--max-turns", "3", "--", bare.python)
    variables = {"PYTHONPATH": str(path), "OTEL_LIMITS_QUIET": ""} | variables
    return execute(*words, "-W", "ignore", str(path / "program.py"), **variables)


@TABLE
@WITH_RELEASE
def test_run_names_what_a_framework_lacks(
    bare: Environment, tmp_path: Path, row: Row, *, has_release: bool
) -> None:
    """One error, and no claim that no agent ran after one has."""
    program = copy(row, tmp_path, has_release=has_release)
    ended = run(bare, tmp_path, program)
    assert ended.output == "13\n", ended.log
    (line,) = ended.ours
    start = "otel-limits: limits are not enforced: "
    assert re.match(start + sentence(row, has_release=has_release), line), line


@pytest.mark.parametrize("row", ROWS[::3], ids=lambda row: row.name)
def test_run_names_what_a_framework_lacks_in_a_child(
    bare: Environment, tmp_path: Path, row: Row
) -> None:
    """The parent does not know of the child's agent, which was not tracked."""
    program = copy(row, tmp_path, has_release=False)
    (tmp_path / "child.py").write_text(program, encoding="utf-8")
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-W', 'ignore', {!r}])"
    ended = run(bare, tmp_path, parent.format(str(tmp_path / "child.py")))
    assert ended.output == "13\n", ended.log
    (line,) = ended.ours
    assert re.search(sentence(row, has_release=False), line), line


def test_check_imports_no_framework(tmp_path: Path) -> None:
    """It takes seconds, and `check` runs before each deployment."""
    program = (
        "import sys\nfrom otel_limits.cli import main\nstatus = main(['check'])\n"
        "packages = {name.partition('.')[0] for name in sys.modules}\n"
        "print(packages & {'strands', 'langgraph', 'langchain_core', 'agents', 'openai'})\n"
        "sys.exit(status)"
    )
    ended = execute(sys.executable, "-c", program, OTEL_LIMITS_MAX_TURNS="3", HOME=str(tmp_path))
    *_, strands, langchain, sdk, _, told, packages = ended.output.splitlines()
    assert (ended.status, ended.log, packages) == (0, "", "set()")
    assert re.fullmatch(r"strands +strands-agents [\d.]+ +not probed", strands)
    assert re.fullmatch(r"langchain +langgraph [\d.]+ +not probed", langchain)
    assert re.fullmatch(r"openai-agents +openai-agents [\d.]+ +not probed", sdk)
    later = "Frameworks are probed when a program imports them; otel-limits doctor probes now."
    assert told == later


def test_check_warns_of_a_release_that_is_not_supported(bare: Environment, tmp_path: Path) -> None:
    """It may lack nothing that is looked for, and yet behave differently."""
    spec = importlib.util.find_spec("strands")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "strands").symlink_to(Path(spec.origin).parent)
    metadata = tmp_path / "strands_agents-1.50.0.dist-info"
    metadata.mkdir()
    text = "Metadata-Version: 2.1\nName: strands-agents\nVersion: 1.50.0\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    words = (bare.python, "-m", "otel_limits.cli", "check")
    ended = execute(*words, PYTHONPATH=str(tmp_path), OTEL_LIMITS_MAX_TURNS="3")
    sentence = "strands-agents 1.50.0 is not a supported release (<2,>=1.62)."
    way = "pip install 'otel-limits[strands]'"
    assert (ended.status, ended.log) == (0, f"otel-limits: {sentence} Run: {way}\n")


def test_agent_of_a_child_without_otel_limits_is_no_reason_to_say_that_none_ran() -> None:
    """The child has reported that its agents are not limited."""
    child = "import sys; sys.modules['otel_limits'] = None; import strands.agent.agent"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    words = (*RUN, "--max-turns", "3", "--", sys.executable, "-c", program)
    (line,) = execute(*words, OTEL_LIMITS_QUIET="").ours
    assert "limits are not enforced: otel-limits cannot be imported in" in line


def test_program_without_agents_imports_no_database() -> None:
    """It takes longer than the rest of otel-limits, and many programs never call an agent."""
    program = (
        "import sys, strands; names = ('otel_limits.runtime.enable', 'sqlalchemy');"
        "print([name in sys.modules for name in names])"
    )
    ended = execute(*RUN, "--max-turns", "3", "--", sys.executable, "-c", program)
    assert ended.output == "[True, False]\n", ended.log
