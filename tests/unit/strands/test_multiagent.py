"""Several concurrent agents: budgets stay separate, and every agent returns or asks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, ToolContext, tool
from strands.multiagent import GraphBuilder, Swarm
from strands.multiagent.base import Status
from strands.session import FileSessionManager

import otel_limits
from otel_limits import (
    Event,
    LimitReachedError,
    Limits,
    LimitsPlugin,
    ModelCall,
    Started,
    Stop,
    enable,
)
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Mapping
    from pathlib import Path

    from strands.agent import AgentResult
    from strands.types.streaming import StreamEvent

    from tests.conftest import Call, MakeAgent


pytestmark = pytest.mark.usefixtures("source")


class Pausing(ScriptedModel):
    """Yields to other agents of the same event loop before every chunk."""

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer of the script."""
        async for event in super().stream(*arguments, **named):
            await asyncio.sleep(0)
            yield event


class InStep(ScriptedModel):
    """Waits before every answer until the other models were called as often."""

    gate: threading.Barrier

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer of the script."""
        self.gate.wait(timeout=30)
        async for event in super().stream(*arguments, **named):
            yield event


@tool
async def search(query: str = "") -> str:
    """Search for a query."""
    await asyncio.sleep(0)
    return "nothing found"


def runaway(name: str, **arguments: Any) -> Agent:
    """Make an agent that requests one more search forever."""
    arguments.setdefault("model", Pausing(endless(uses("search"))))
    return Agent(**{"tools": [search], "name": name, "callback_handler": None, **arguments})


def calls_of(agent: Agent) -> int:
    """Number of model calls that `agent` has made."""
    assert isinstance(agent.model, ScriptedModel)
    return agent.model.calls


def spent(events: list[Event]) -> dict[str, tuple[int, int]]:
    """Model calls and tokens of each agent's finished invocations."""
    return {f.agent: (f.model_calls, f.usage.total) for f in events if isinstance(f, Stop)}


def test_agents_in_threads_have_separate_budgets() -> None:
    """Four agents whose models are called in lockstep are each halted at their own third call."""
    events: list[Event] = []
    enable(Limits(max_turns=3, max_token_budget=45), observers=[events.append])
    gate = threading.Barrier(4)
    agents = []
    for number in range(4):
        model = InStep(endless(uses("search")))
        model.gate = gate
        agents.append(runaway(f"agent-{number}", model=model))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda agent: agent("go"), agents))
    assert [result.stop_reason for result in results] == ["max_turns"] * 4
    assert [calls_of(agent) for agent in agents] == [3] * 4
    assert spent(events) == {agent.name: (3, 45) for agent in agents}


def test_agents_in_one_event_loop_have_separate_budgets(events: list[Event]) -> None:
    """Agents that alternate in one event loop each have their own budget."""
    enable(Limits(max_turns=3), observers=[events.append])
    agents = [runaway(name) for name in "abc"]

    async def run() -> list[AgentResult]:
        return await asyncio.gather(*(agent.invoke_async("go") for agent in agents))

    assert [result.stop_reason for result in asyncio.run(run())] == ["max_turns"] * 3
    assert spent(events) == dict.fromkeys("abc", (3, 45))


def test_interleaved_streams_have_separate_budgets(events: list[Event]) -> None:
    """Two streams interleaved in a single task don't count each other's calls."""
    enable(Limits(max_turns=3), observers=[events.append])
    agents = [runaway(name) for name in "ab"]

    async def run() -> None:
        streams: list[AsyncGenerator[Any, None]] = [
            agent.stream_async("go")  # type: ignore[misc]  # typed as an iterator
            for agent in agents
        ]
        while streams:
            for stream in list(streams):
                if await anext(stream, None) is None:
                    streams.remove(stream)

    asyncio.run(run())
    assert [calls_of(agent) for agent in agents] == [3, 3]
    assert spent(events) == dict.fromkeys("ab", (3, 45))
    assert len([fact for fact in events if isinstance(fact, ModelCall)]) == 6


def test_agent_started_by_tool_belongs_to_caller_with_interleaved_streams(
    events: list[Event],
) -> None:
    """The task that reads both streams last ran the other agent, in the middle of a turn."""
    enable(Limits(max_turns=2), observers=[events.append])
    helper = Agent(model=ScriptedModel([says("done")]), name="helper", callback_handler=None)

    @tool
    async def ask() -> str:
        """Call the helper."""
        return str(await helper.invoke_async("go"))

    asks = Agent(
        model=ScriptedModel([uses("ask"), says("done")]),
        tools=[ask],
        name="asks",
        callback_handler=None,
    )

    async def run() -> None:
        streams: list[AsyncGenerator[Any, None]] = [
            agent.stream_async("go")  # type: ignore[misc]  # typed as an iterator
            for agent in (asks, runaway("other"))
        ]
        async for event in streams[0]:
            if "message" in event:  # the response with its tool use is the first
                await anext(streams[1])
        await streams[1].aclose()

    asyncio.run(run())
    began = {fact.invocation.agent: fact.invocation for fact in events if isinstance(fact, Started)}
    assert began["helper"].parent_id == began["asks"].id


def test_concurrent_agents_with_plugins_have_separate_budgets(events: list[Event]) -> None:
    """Agents with their own plugins are limited separately from each other and from `enable()`."""
    enable(Limits(max_turns=4), observers=[events.append])
    agents = [runaway(f"cap-{n}", plugins=[LimitsPlugin(Limits(max_turns=n))]) for n in (1, 2, 3)]
    agents.append(runaway("cap-4"))

    async def run() -> None:
        await asyncio.gather(*(agent.invoke_async("go") for agent in agents))

    asyncio.run(run())
    assert spent(events) == {f"cap-{n}": (n, 15 * n) for n in (1, 2, 3, 4)}


def test_parallel_graph_nodes_are_halted_separately(events: list[Event]) -> None:
    """Two nodes that share `invocation_state` are each halted at 3, and the graph completes."""
    enable(Limits(max_turns=3), observers=[events.append])
    agents = [runaway(name) for name in ("left", "right")]
    builder = GraphBuilder()
    for agent in agents:
        builder.add_node(agent, agent.name)
        builder.set_entry_point(agent.name)
    builder.set_max_node_executions(10)
    state: dict[str, Any] = {"mine": 1}
    result = builder.build()("go", invocation_state=state)
    assert result.status is Status.COMPLETED
    assert spent(events) == {"left": (3, 45), "right": (3, 45)}
    assert not [key for key in state if "limit" in key]


def test_graph_continues_after_halted_node(events: list[Event]) -> None:
    """The node after a halted one runs with its own budget."""
    enable(Limits(max_turns=2), observers=[events.append])
    second = runaway("second", model=Pausing([uses("search"), says("done")]))
    builder = GraphBuilder()
    builder.add_node(runaway("first"), "first")
    builder.add_node(second, "second")
    builder.add_edge("first", "second")
    builder.set_entry_point("first")
    builder.set_max_node_executions(10)
    result = builder.build()("go")
    assert result.status is Status.COMPLETED
    assert spent(events) == {"first": (2, 30), "second": (2, 30)}
    assert [(f.agent, f.reason) for f in events if isinstance(f, Stop)] == [
        ("first", "max_turns"),
        ("second", "end_turn"),
    ]


def test_swarm_agents_have_separate_budgets(events: list[Event]) -> None:
    """Each agent of a swarm has its own budget across the handoff."""
    enable(Limits(max_turns=2), observers=[events.append])
    message = {"agent_name": "second", "message": "go", "context": {}}
    handoff = uses("handoff_to_agent", arguments=message)
    first = runaway("first", model=Pausing([uses("search"), handoff]))
    result = Swarm([first, runaway("second")])("go")
    assert result.status is Status.COMPLETED
    assert spent(events) == {"first": (2, 30), "second": (2, 30)}


ASK = uses("child", arguments={"input": "go"})


def family(parent: ScriptedModel, **child: Any) -> Agent:
    """Make a parent whose tool is a runaway child."""
    tools = [runaway("child", **child).as_tool(name="child", description="Call the child.")]
    return runaway("parent", model=parent, tools=tools)


def test_agent_as_tool_is_halted_and_parent_continues(call: Call, events: list[Event]) -> None:
    """A child is halted at its own cap, and its parent continues to its answer."""
    enable(Limits(max_turns=3), observers=[events.append])
    result = call(family(Pausing([ASK, ASK, says("done")])))
    assert (result.stop_reason, str(result)) == ("end_turn", "done\n")
    stops = [(fact.agent, fact.reason, fact.turns) for fact in events if isinstance(fact, Stop)]
    assert stops == [("child", "max_turns", 3)] * 2 + [("parent", "end_turn", 3)]


def test_parent_is_not_charged_for_child(events: list[Event]) -> None:
    """Without a tree budget, each is only charged for its own calls."""
    enable(Limits(max_turns=3), observers=[events.append])
    family(Pausing([ASK, says("done")]))("go")
    assert spent(events) == {"child": (3, 45), "parent": (2, 30)}


def test_runaway_parent_and_child_are_both_halted(events: list[Event]) -> None:
    """Both are halted, each at its own cap: the child never resets the parent's count."""
    enable(Limits(max_turns=2), observers=[events.append])
    parent = family(Pausing(endless(ASK)))
    result = parent("go")
    assert (str(result.stop_reason), calls_of(parent)) == ("max_turns", 2)
    assert [fact.agent for fact in events if isinstance(fact, Stop)] == ["child", "child", "parent"]


def test_raising_child_is_a_failed_tool(events: list[Event]) -> None:
    """With `raise`, the child's exception becomes a tool error, and its parent returns."""
    enable(Limits(max_turns=9), observers=[events.append])
    strict = LimitsPlugin(Limits(max_turns=2), action="raise")
    parent = family(Pausing([ASK, says("done")]), plugins=[strict])
    assert str(parent("go")) == "done\n"
    (result,) = [
        block["toolResult"]
        for message in parent.messages
        for block in message["content"]
        if "toolResult" in block
    ]
    assert result["status"] == "error"
    assert spent(events) == {"child": (2, 30), "parent": (2, 30)}


def test_parallel_children_have_separate_budgets(events: list[Event]) -> None:
    """Children called by one response never share a budget by accident."""
    enable(Limits(max_turns=2), observers=[events.append])
    children = [runaway(name).as_tool(name=name, description="Call it.") for name in "abc"]
    model = Pausing([uses(*"abc", arguments={"input": "go"}), says("done")])
    result = runaway("parent", model=model, tools=children)("go")
    assert str(result) == "done\n"
    assert spent(events) == {**dict.fromkeys("abc", (2, 30)), "parent": (2, 30)}


def test_agent_in_tool_function_is_its_own_invocation(events: list[Event]) -> None:
    """A child called by a plain tool in a thread is its own invocation."""

    @tool
    def ask() -> str:
        """Call the child."""
        return str(runaway("child")("go"))

    enable(Limits(max_turns=2), observers=[events.append])
    model = ScriptedModel([uses("ask"), says("done")])
    result = runaway("parent", model=model, tools=[ask])("go")
    assert str(result) == "done\n"
    assert spent(events) == {"child": (2, 30), "parent": (2, 30)}


def test_agents_with_same_name_are_counted_separately(events: list[Event]) -> None:
    """A budget belongs to an invocation, not to a name."""
    enable(Limits(max_turns=2), observers=[events.append])
    agents = [runaway("twin"), runaway("twin")]

    async def run() -> None:
        await asyncio.gather(*(agent.invoke_async("go") for agent in agents))

    asyncio.run(run())
    assert [calls_of(agent) for agent in agents] == [2, 2]


def test_action_raise_in_thread_raises_in_that_thread() -> None:
    """Each caller gets the exception of the agent it called."""
    enable(Limits(max_turns=2), action="raise")

    def reach(name: str) -> str:
        with pytest.raises(LimitReachedError) as caught:
            runaway(name)("go")
        assert caught.value.stop is not None
        return caught.value.stop.agent

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(reach, "abc")) == list("abc")


def test_disable_mid_run_lets_agents_finish(events: list[Event]) -> None:
    """`disable()` during an invocation lets it run to its natural end."""
    enable(Limits(max_turns=2), observers=[events.append])

    @tool
    def switch_off() -> str:
        """Switch otel-limits off."""
        otel_limits.disable()
        return "off"

    model = ScriptedModel([uses("switch_off")] * 4 + [says("done")])
    agent = runaway("tester", model=model, tools=[switch_off])
    assert str(agent("go")) == "done\n"


# --- questions from several agents ----------------------------------------------------------------


@tool(name="search")
def search_briefly() -> str:
    """Search."""
    return "nothing found"


def graph_of(models: dict[str, ScriptedModel]) -> Any:
    """Let agents work side by side."""
    builder = GraphBuilder()
    builder.set_execution_timeout(60)  # Strands warns without a bound
    for name, model in models.items():
        agent = Agent(model=model, name=name, tools=[search_briefly], callback_handler=None)
        builder.add_node(agent, name)
        builder.set_entry_point(name)
    return builder.build()


def answers(interrupts: Any, responses: Mapping[str, object]) -> Any:
    """Answer the question of each agent by its name."""
    return [
        {
            "interruptResponse": {
                "interruptId": each.id,
                "response": responses[each.reason["agent"]],
            }
        }
        for each in interrupts
    ]


def test_each_answer_goes_to_one_node(events: list[Event]) -> None:
    """One answer halts, one continues, and the third allows one more turn only."""
    enable(Limits(max_turns=2), action="ask", observers=[events.append])
    models = {
        name: ScriptedModel([*[uses("search")] * turns, says("done")])
        for name, turns in {"stops": 9, "goes-on": 4, "asks-again": 9}.items()
    }
    graph = graph_of(models)
    asked = graph("go")
    assert sorted(each.reason["agent"] for each in asked.interrupts) == sorted(models)
    assert len({each.id for each in asked.interrupts}) == 3
    more = {"extend": {"max_turns": 5}}
    responses = {"stops": "stop", "goes-on": more, "asks-again": {"extend": {"max_turns": 1}}}
    again = graph(answers(asked.interrupts, responses))
    calls = {name: model.calls for name, model in models.items()}
    assert calls == {"stops": 2, "goes-on": 5, "asks-again": 3}
    (question,) = again.interrupts
    assert question.reason["agent"] == "asks-again"
    assert question.id not in [each.id for each in asked.interrupts]
    ends = {event.agent: event.reason for event in events if isinstance(event, Stop)}
    assert ends == {"stops": "max_turns", "goes-on": "end_turn", "asks-again": "interrupt"}


def test_the_question_names_agent_and_invocation(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """A user can look both up."""
    enable(Limits(max_turns=1), action="ask", observers=[events.append])
    asked = make_agent(ScriptedModel(endless(uses("search"))))("go")
    (started,) = [event for event in events if isinstance(event, Started)]
    (question,) = asked.interrupts or ()
    identity = started.invocation.id
    assert question.id == f"otel_limits:tester:{identity}"
    assert (question.reason["agent"], question.reason["invocation_id"]) == ("tester", identity)
    assert f"Invocation ID: {identity}." in question.reason["sentence"]


def test_agents_of_one_name_that_are_tools_are_answered_one_by_one(make_agent: MakeAgent) -> None:
    """Names may repeat, and an agent may ask that has the name of the one that it works for."""
    enable(Limits(max_turns=2), action="ask")
    models = [ScriptedModel([*[uses("search")] * 4, says("done")]) for _ in range(2)]
    helpers = [
        Agent(model=model, name="tester", tools=[search_briefly], callback_handler=None).as_tool(
            name=f"helper{number}"
        )
        for number, model in enumerate(models)
    ]
    outer = ScriptedModel([uses("helper0", "helper1"), says("all done")])
    agent = make_agent(outer, tools=helpers)
    asked = agent("go")
    responses: Any = [
        {"interruptResponse": {"interruptId": each.id, "response": response}}
        for each, response in zip(
            asked.interrupts or (), ["stop", {"extend": {"max_turns": 9}}], strict=True
        )
    ]
    result = agent(responses)
    assert (result.stop_reason, outer.calls) == ("end_turn", 2)
    assert sorted(model.calls for model in models) == [2, 5]


@tool(context=True)
def pay(tool_context: ToolContext) -> str:
    """Ask before paying."""
    return str(tool_context.interrupt("approve"))


def respond(agent: Agent, asked: Any, response: object) -> Any:
    """Answer the one question of an agent."""
    (question,) = asked.interrupts
    answer: Any = {"interruptResponse": {"interruptId": question.id, "response": response}}
    return agent([answer])


def test_an_extension_is_not_given_again_with_the_answer_to_a_tool(make_agent: MakeAgent) -> None:
    """A human extends to 6 turns, then approves what a tool asks: that extends nothing."""
    enable(Limits(max_turns=1), action="ask")
    script = [uses("search"), uses("pay"), *[uses("search")] * 9]
    agent = make_agent(model := ScriptedModel(script), tools=[search_briefly, pay])
    approval = respond(agent, agent("go"), {"extend": {"max_turns": 5}})
    assert approval.interrupts[0].name == "approve"
    again = respond(agent, approval, "yes")
    assert again.interrupts[0].name == "otel_limits"
    assert model.calls == 6


def test_a_question_survives_the_process(make_agent: MakeAgent, tmp_path: Path) -> None:
    """It is answered in another one, from the session that the agent keeps."""
    enable(Limits(max_turns=1), action="ask")

    def agent(model: ScriptedModel) -> Agent:
        session = FileSessionManager(session_id="s", storage_dir=str(tmp_path))
        return make_agent(model, agent_id="a", session_manager=session)

    asked = agent(ScriptedModel([uses("search")]))("go")
    model = ScriptedModel([uses("search"), says("done")])
    result = respond(agent(model), asked, {"extend": {"max_turns": 2}})
    assert (result.stop_reason, model.calls) == ("end_turn", 2)
