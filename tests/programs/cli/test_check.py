"""A framework that lacks what limits need is reported, however it lies on the path."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from otel_limits.core.installing import install_command
from tests.forking import NEEDED, Forking, forking
from tests.launching import RUN, Ended, execute, fresh_environment
from tests.programs.runtime.test_autoload import Environment

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

KINDS = {row.kind for row in ROWS}
MODULES = [row for row in ROWS if row.kind == "module"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with everything but the packages and metadata of the frameworks."""
    made = Environment(tmp_path_factory.mktemp("bare"))
    left_out = ("strands", "langgraph-", "agents", "openai_agents")
    made.leave_out(tmp_path_factory.mktemp("packages"), *left_out)
    return made


class Incomplete(NamedTuple):
    """An environment in which every framework lacks something of one kind."""

    path: Path
    rows: Sequence[Row]


def copies(path: Path, kind: str, *, has_release: bool) -> Incomplete:
    """Copy all frameworks without some modules, and write programs that use them."""
    rows = [row for row in ROWS if row.kind == kind]
    for row in rows:
        program = copy(row, path, has_release=has_release)
        (path / f"{row.package}_program.py").write_text(program, encoding="utf-8")
    return Incomplete(path, rows)


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


@pytest.fixture(scope="module")
def python(bare: Environment) -> Iterator[Forking]:
    """A Python of that environment with the packages that the frameworks need."""
    with forking(NEEDED, bare.python) as python:
        yield python


Report = Callable[..., "tuple[Ended, Sequence[str]]"]


@pytest.fixture(scope="module")
def report(python: Forking, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Start each command once for all frameworks; return how it ended, and its sentences."""

    @cache
    def incomplete(kind: str, *, has_release: bool) -> Incomplete:
        return copies(tmp_path_factory.mktemp(kind), kind, has_release=has_release)

    @cache
    def report(command: str, kind: str, *, has_release: bool) -> tuple[Ended, Sequence[str]]:
        frameworks = incomplete(kind, has_release=has_release)
        ended = COMMANDS[command](python, frameworks)
        assert len(ended.ours) == len(frameworks.rows), ended.log
        return ended, ended.ours

    return report


def check(python: Forking, incomplete: Incomplete, *options: str) -> Ended:
    """Check the frameworks on a path."""
    code = "import sys; from otel_limits.cli import main; sys.exit(main(sys.argv[1:]))"
    variables = {"PYTHONPATH": str(incomplete.path), "OTEL_LIMITS_MAX_TURNS": "3"}
    return python.execute(code, "check", *options, environ=fresh_environment(**variables))


def probe(python: Forking, incomplete: Incomplete) -> Ended:
    """The same, with imports."""
    return check(python, incomplete, "--probe")


def run(python: Forking, incomplete: Incomplete) -> Ended:
    """Run all programs with a limit, one after the other in one process."""
    return limited(python, incomplete, imports(incomplete))


def run_in_child(python: Forking, incomplete: Incomplete) -> Ended:
    """Run them in a child process."""
    (incomplete.path / "child.py").write_text(imports(incomplete), encoding="utf-8")
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-W', 'ignore', {!r}])"
    return limited(python, incomplete, parent.format(str(incomplete.path / "child.py")))


def imports(incomplete: Incomplete) -> str:
    """Return a program that imports the programs."""
    return "\n".join(f"import {row.package}_program" for row in incomplete.rows)


def limited(python: Forking, incomplete: Incomplete, program: str) -> Ended:
    """Run a program with a limit."""
    variables = {"OTEL_LIMITS_QUIET": "", "OTEL_LIMITS_MAX_TURNS": "3"}
    return python.run(program, PYTHONPATH=str(incomplete.path), **variables)


COMMANDS: Mapping[str, Callable[[Forking, Incomplete], Ended]] = {
    "check": check,
    "check --probe": probe,
    "run": run,
    "run, child": run_in_child,
}
STARTS = {"check": "otel-limits: Limits cannot be enforced: "}
STARTS["check --probe"] = STARTS["check"]
START = "otel-limits: limits are not enforced: "


@pytest.mark.parametrize(
    ("command", "row", "has_release"),
    [
        *((command, row, True) for command in ("check", "check --probe", "run") for row in ROWS),
        *((command, row, False) for command in ("check", "run") for row in MODULES),
    ],
    ids=lambda each: each.name if isinstance(each, Row) else str(each),
)
def test_each_command_names_what_a_framework_lacks(
    report: Report, row: Row, command: str, *, has_release: bool
) -> None:
    """In one line, also if its import fails, and without a claim that no agent ran."""
    ended, lines = report(command, row.kind, has_release=has_release)
    expected = STARTS.get(command, START) + sentence(row, has_release=has_release)
    assert sum(re.match(expected, line) is not None for line in lines) == 1, lines
    if command == "run":
        assert ended.output == "13\n" * len(KINDS), ended.log
    else:
        assert (ended.status, ended.log.splitlines()) == (1, lines)


@pytest.mark.parametrize("row", MODULES, ids=lambda row: row.name)
def test_run_names_what_a_framework_lacks_in_a_child(report: Report, row: Row) -> None:
    """The parent does not know of the child's agent, which was not tracked."""
    ended, lines = report("run, child", row.kind, has_release=False)
    assert ended.output == "13\n" * len(KINDS), ended.log
    assert sum(re.search(sentence(row, has_release=False), line) is not None for line in lines) == 1


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
    later = (
        "Frameworks are probed when a program imports them; otel-limits check --probe probes now."
    )
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
    way = install_command("strands")
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
