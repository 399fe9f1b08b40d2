"""A program whose framework lacks a private name works as without otel-limits."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from otel_limits.bindings.strands.private import PrivateName
from tests.forking import NEEDED_BY_STRANDS, Forking, forking
from tests.unit.test_private_names import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator


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


@pytest.fixture(scope="module")
def python() -> Iterator[Forking]:
    """A Python without Strands and otel-limits."""
    with forking(NEEDED_BY_STRANDS) as python:
        yield python


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
