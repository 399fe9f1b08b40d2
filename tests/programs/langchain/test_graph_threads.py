"""Threads that a tool starts belong to its tree, in programs without Strands."""

from __future__ import annotations

import sys

import pytest

from tests.launching import Ended, execute

PROGRAM = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import otel_limits
from langchain.agents import create_agent
from otel_limits.testing import ScriptedChatModel, endless, uses

old = ThreadPoolExecutor(2)
old.submit(int).result()
otel_limits.enable(tree=otel_limits.Limits(max_turns=5))
STEPS = {"recursion_limit": 60}

def search() -> str:
    "Search."
    return "nothing"

def call_helpers() -> None:
    helper.invoke({"messages": "go"}, STEPS)

def threads() -> None:
    each = [threading.Thread(target=call_helpers) for _ in range(3)]
    [one.start() for one in each]
    [one.join() for one in each]

def pool() -> None:
    with ThreadPoolExecutor(3) as some:
        [one.result() for one in [some.submit(call_helpers) for _ in range(3)]]

def old_pool() -> None:
    [one.result() for one in [old.submit(call_helpers) for _ in range(3)]]

def ask() -> str:
    "Ask."
    way()
    return "asked"

for way in (threads, pool, old_pool):
    models = [ScriptedChatModel(endless(uses(name))) for name in ("search", "ask")]
    helper = create_agent(models[0], [search], name="helper")
    boss = create_agent(models[1], [ask], name="boss")
    boss.invoke({"messages": "go"}, STEPS)
    print(sum(model.calls for model in models))
assert "strands" not in sys.modules
import strands
from otel_limits.testing import ScriptedModel, says
strands.Agent(model=ScriptedModel([says("done")]), callback_handler=None)("go")
"""


@pytest.fixture(scope="module")
def ended() -> Ended:
    """The program, which uses Strands only at its end."""
    return execute(sys.executable, "-c", PROGRAM)


def test_tree_cap_holds_in_plain_threads(ended: Ended) -> None:
    """Strands is not there to let threads inherit the context of the tool."""
    assert (ended.status, ended.output) == (0, "5\n5\n5\n"), ended.log


def test_strands_instruments_threads_afterwards_without_a_warning(ended: Ended) -> None:
    """Strands never checks whether that is done, and OpenTelemetry would log it."""
    assert "already instrumented" not in ended.log
