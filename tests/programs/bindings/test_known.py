"""Frameworks that a program imports in unusual ways, and packages with the name of one."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.launching import ENDLESS, RUN, execute
from tests.unit.bindings.test_framework import install

pytestmark = pytest.mark.usefixtures("faulty")


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
def test_langgraph_is_probed_when_none_of_its_modules_is_incomplete(statement: str) -> None:
    """Its modules and LangChain's import each other in circles, from wherever one begins."""
    ended = execute(sys.executable, "-W", "ignore", "-c", MEETING, statement)
    assert ended.output == "probed []\n", ended.log


MEETING = """
import sys
import otel_limits
from otel_limits.bindings.langchain.langchain_framework import LANGCHAIN
gaps = LANGCHAIN.gaps
def probe():
    incomplete = [
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] in LANGCHAIN.packages and module.__spec__._initializing
    ]
    # Python marks the outermost one only later.
    print("probed", [name for name in incomplete if name != "langgraph.pregel"])
    return gaps()
LANGCHAIN.gaps = probe
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
