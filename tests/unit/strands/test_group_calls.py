"""Members of a graph that are not agents: their model calls count, and are limited."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.agent import AgentResult
from strands.multiagent import GraphBuilder
from strands.multiagent.base import MultiAgentBase, MultiAgentResult, NodeResult, Status
from strands.telemetry.metrics import EventLoopMetrics

from otel_limits import Event, Limits, LimitsPlugin, MaxModelCallsReachedError, Started, enable
from otel_limits.runs.current import CURRENT
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, says, tokens, uses
from tests.unit.strands.test_sent_requests import calls, read, stops

if TYPE_CHECKING:
    from strands.multiagent.graph import Graph


class Asking(MultiAgentBase):
    """A node that calls a model directly."""

    def __init__(self, model: ScriptedModel, number: int, name: str = "node") -> None:
        """Ask that often."""
        self.id, self.model, self.number = name, model, number
        self.error: Exception | None = None

    async def invoke_async(self, *_: Any, **__: Any) -> MultiAgentResult:
        """Ask, and note what the last one failed with."""
        try:
            for _each in range(self.number):
                await read(self.model)
        except MaxModelCallsReachedError as error:
            self.error = error
        message: Any = {"role": "assistant", "content": [{"text": "done"}]}
        result = AgentResult("end_turn", message, EventLoopMetrics(), {})
        node = NodeResult(result=result, status=Status.COMPLETED)
        return MultiAgentResult(status=Status.COMPLETED, results={self.id: node})

    def serialize_state(self) -> dict[str, Any]:
        """Keep nothing."""
        return {}

    def deserialize_state(self, payload: dict[str, Any]) -> None:
        """Know nothing."""


def graph_of(*nodes: Any) -> Graph:
    """Make the nodes siblings."""
    builder = GraphBuilder()
    for number, node in enumerate(nodes):
        builder.add_node(node, f"node{number}")
        builder.set_entry_point(f"node{number}")
    return builder.set_max_node_executions(9).set_graph_id("research").build()


@tool
def look_up() -> str:
    """Look something up."""
    return "found"


def helper() -> ScriptedModel:
    """A model that always answers."""
    return ScriptedModel(endless(says("hint", usage=tokens(100))), model_id="helper")


@pytest.mark.parametrize("number", [1, 3])
def test_nodes_that_ask_by_themselves_are_held(
    number: int, source: str, events: list[Event]
) -> None:
    """However many there are, the cap of their graph is theirs together."""
    enable(tree=Limits(max_model_calls=4), observers=[events.append])
    nodes = [Asking(helper(), 9) for _ in range(number)]
    graph_of(*nodes)("go")
    assert sum(node.model.calls for node in nodes) == 4
    assert all(isinstance(node.error, MaxModelCallsReachedError) for node in nodes)
    assert [(each.side, each.usage.total) for each in calls(events)] == [(True, 100)] * 4
    stop = stops(events)["research"]
    assert (stop.reason, stop.model_calls) == ("max_model_calls", 4)
    assert len(LIVE) == 0


def test_they_share_it_with_agents(source: str, events: list[Event]) -> None:
    """A sibling agent draws from the same cap."""
    enable(tree=Limits(max_model_calls=3), observers=[events.append])
    node, model = Asking(helper(), 9), ScriptedModel([says("done")])
    graph_of(Agent(model=model, callback_handler=None, name="beside"), node)("go")
    assert model.calls + node.model.calls == 3


def test_they_are_one_invocation_of_their_graph(source: str, events: list[Event]) -> None:
    """It is there once a model was asked, and ends with the graph."""
    enable(observers=[events.append])
    graph_of(Asking(helper(), 0))("go")
    assert not [event for event in events if isinstance(event, Started)]
    graph_of(Asking(helper(), 2), Asking(helper(), 1))("go")
    assert [event.invocation.agent for event in events if isinstance(event, Started)] == [
        "research"
    ]
    assert (stops(events)["research"].reason, len(calls(events))) == ("end_turn", 3)


def test_work_that_outlives_its_graph_is_recorded(events: list[Event]) -> None:
    """Nothing refuses it, and it counts for the graph."""
    enable(tree=Limits(max_model_calls=1), observers=[events.append])
    model, tasks = helper(), list[asyncio.Task[str]]()

    class Leaving(Asking):
        async def invoke_async(self, *args: Any, **named: Any) -> MultiAgentResult:
            tasks.append(asyncio.create_task(self.later()))
            return await super().invoke_async(*args, **named)

        async def later(self) -> str:
            await ended.wait()
            await read(self.model)
            return await read(self.model)

    async def main() -> None:
        await graph_of(Leaving(model, 0)).invoke_async("go")
        ended.set()
        await tasks[0]

    ended = asyncio.Event()
    asyncio.run(main())
    assert [(each.invocation.agent, each.side) for each in calls(events)] == [
        ("research", True)
    ] * 2
    assert len(LIVE) == 0


def test_a_plugin_alone_follows_no_graph(events: list[Event]) -> None:
    """Limits for one agent alone do not affect its siblings."""
    own = LimitsPlugin(Limits(max_turns=1))
    agent = Agent(model=ScriptedModel([says("done")]), callback_handler=None, plugins=[own])
    node = Asking(helper(), 3)
    graph_of(agent, node)("go")
    assert node.model.calls == 3
    assert len(LIVE) == 0


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize(
    "place", ["runs.registry.RunRegistry.group", "runs.registry.RunRegistry.end_group"]
)
def test_a_fault_in_following_a_graph_is_not_felt(
    place: str, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """It ends as it would have, each of its agents is limited by itself, and nothing is left."""

    def fail(*_: object) -> None:
        raise RuntimeError("an internal fault")

    monkeypatch.setattr(f"otel_limits.{place}", fail)
    enable(Limits(max_turns=2), observers=[events.append])
    model = ScriptedModel(endless(uses("look_up")))
    graph = graph_of(Agent(model=model, callback_handler=None, name="alone", tools=[look_up]))
    graph("go")
    assert (model.calls, stops(events)["alone"].reason) == (2, "max_turns")
    assert CURRENT.get() is None
    assert len(LIVE) == 0
