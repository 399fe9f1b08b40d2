"""The README's claims about Strands' own limits: a failure means that they are outdated."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.multiagent import GraphBuilder, Swarm

from otel_limits.testing import ScriptedModel, says, uses

if TYPE_CHECKING:
    from strands.multiagent.graph import Graph

WORK = 10
NATIVE: Any = {"turns": 3}


@tool
def search(query: str = "") -> str:
    """Search for a query."""
    return "nothing found"


def worker() -> tuple[Agent, ScriptedModel]:
    """Make an agent that needs more turns than its limit."""
    model = ScriptedModel([*[uses("search")] * WORK, says("done")])
    return Agent(name="worker", model=model, tools=[search], callback_handler=None), model


def test_native_limits_ignore_sub_agents() -> None:
    """The parent has two turns, but its sub-agent has as many as it likes."""
    child, model = worker()
    parent = Agent(
        model=ScriptedModel([uses("worker"), says("done")]),
        tools=[child.as_tool(name="worker")],
        callback_handler=None,
    )
    assert parent("go", limits=NATIVE).stop_reason == "end_turn"
    assert model.calls == WORK + 1


def graph(node: Agent) -> Graph:
    """Make a graph of one node."""
    builder = GraphBuilder()
    builder.add_node(node, "node")
    builder.set_max_node_executions(5)
    return builder.build()


@pytest.mark.parametrize("make", [graph, lambda node: Swarm([node])], ids=["graph", "swarm"])
def test_group_ignores_native_limits(make: Callable[[Agent], Graph | Swarm]) -> None:
    """They are neither rejected nor applied."""
    node, model = worker()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Strands warns about unknown keywords
        make(node)("go", limits=NATIVE)
    assert model.calls == WORK + 1


def test_each_call_resets_native_limits() -> None:
    """The answer to an interrupt is a call too, so it also resets them."""
    agent, model = worker()
    assert [agent("go", limits=NATIVE).stop_reason for _ in range(3)] == ["limit_turns"] * 3
    assert model.calls == 9


def test_last_message_after_native_limit_is_not_an_answer() -> None:
    """It is a tool result, in the name of the user."""
    agent, _ = worker()
    result = agent("go", limits=NATIVE)
    assert (result.message["role"], str(result)) == ("user", "")
