"""Questions to a human (`ask`) from several concurrent agents: each answer goes to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, ToolContext, tool
from strands.multiagent import GraphBuilder
from strands.session import FileSessionManager

from otel_limits import Limits, Started, Stop, enable
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent

pytestmark = pytest.mark.usefixtures("source")


@tool
def search() -> str:
    """Search."""
    return "nothing found"


def graph_of(models: dict[str, ScriptedModel]) -> Any:
    """Let agents work side by side."""
    builder = GraphBuilder()
    builder.set_execution_timeout(60)  # Strands warns without a bound
    for name, model in models.items():
        agent = Agent(model=model, name=name, tools=[search], callback_handler=None)
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
        Agent(model=model, name="tester", tools=[search], callback_handler=None).as_tool(
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
    agent = make_agent(model := ScriptedModel(script), tools=[search, pay])
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
