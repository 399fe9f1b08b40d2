"""An answer to an interrupt of a Strands agent continues its task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.hooks import AfterInvocationEvent, BeforeToolCallEvent, HookProvider
from strands.multiagent import GraphBuilder, Swarm
from strands.session import FileSessionManager

from otel_limits import Event, Limits, ModelCall, Started, Stop, enable, stop_of
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from pathlib import Path

    from strands.hooks import HookRegistry

pytestmark = pytest.mark.usefixtures("source")


@tool
def send() -> str:
    """Send."""
    return "sent"


class Approval(HookProvider):
    """Waits for a person before each tool."""

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        """Register."""
        registry.add_callback(BeforeToolCallEvent, self.wait)

    def wait(self, event: BeforeToolCallEvent) -> None:
        """Wait."""
        if event.interrupt("approval", reason="May it run?") != "yes":
            event.cancel_tool = "rejected"


def sending(times: int = 20) -> ScriptedModel:
    """A model that requests the tool with other words each time."""
    return ScriptedModel([*[uses("send")] * times, says("done")])


def careful(model: Any, **options: Any) -> Agent:
    """An agent whose tool waits for a person."""
    options = {"tools": [send], "name": "boss", "hooks": [Approval()], **options}
    return Agent(model=model, callback_handler=None, **options)


def approve(agent: Any, result: Any) -> Any:
    """Answer all interrupts with yes."""
    return agent(
        [
            {"interruptResponse": {"interruptId": each.id, "response": "yes"}}
            for each in result.interrupts
        ]
    )


def approve_all(agent: Any, result: Any, most: int = 9) -> tuple[int, Any]:
    """Answer until there are no more interrupts; return the number of answers."""
    approvals = 0
    while result.interrupts and approvals < most:
        approvals, result = approvals + 1, approve(agent, result)
    return approvals, result


def test_new_message_begins_new_task() -> None:
    """A conversation has as many tasks as messages of the user."""
    enable(Limits(max_turns=2))
    agent = careful(ScriptedModel([uses("send"), says("done"), uses("send"), says("done")]))
    for _ in range(2):
        approvals, result = approve_all(agent, agent("go"))
        assert (approvals, result.stop_reason) == (1, "end_turn")


def test_agents_do_not_share_a_task() -> None:
    """Two users, whose models give their tool calls the same IDs."""
    enable(Limits(max_turns=2))
    agents = [careful(ScriptedModel([uses("send"), says("done")])) for _ in range(2)]
    results = [agent("go") for agent in agents]
    for agent, result in zip(agents, results, strict=True):
        assert approve(agent, result).stop_reason == "end_turn"


def test_restored_session_continues_its_task(tmp_path: Path) -> None:
    """A web server creates the agent again for each request."""
    enable(Limits(max_turns=2))
    model = sending()
    result: Any = None
    for _ in range(3):
        manager = FileSessionManager(session_id="1", storage_dir=str(tmp_path))
        agent = careful(model, session_manager=manager)
        result = agent("go") if result is None else approve(agent, result)
    assert (result.stop_reason, model.calls) == ("max_turns", 2)


def test_hook_that_resumes_continues_consecutive_calls() -> None:
    """The legs of one invocation and the answers of persons are different things."""
    enable(Limits(max_consecutive_same_tool=3))
    model = ScriptedModel([uses("send"), says("and"), uses("send"), uses("send"), says("done")])
    agent = careful(model)
    resumes: list[AfterInvocationEvent] = []

    def resume(event: AfterInvocationEvent) -> None:
        if event.result is not None and str(event.result).strip() == "and" and not resumes:
            resumes.append(event)
            event.resume = "go on"

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    approvals, result = approve_all(agent, agent("go"))
    assert (approvals, result.stop_reason) == (3, "end_turn")


def test_interrupt_in_sub_agent_continues_its_task_and_its_tree(events: list[Event]) -> None:
    """An agent that is a tool waits for a person through the agent around it."""
    enable(Limits(max_turns=4), tree=Limits(max_model_calls=4), observers=[events.append])
    helper = careful(sending(), name="helper")
    boss = Agent(
        model=ScriptedModel([uses("ask", arguments={"input": "go"}), says("done")]),
        name="boss",
        tools=[helper.as_tool(name="ask", description="Ask.")],
        callback_handler=None,
    )
    approvals, result = approve_all(boss, boss("go"))
    assert len([each for each in events if isinstance(each, ModelCall)]) == 4
    assert (approvals, result.stop_reason) == (3, "max_model_calls")
    started = [each.invocation for each in events if isinstance(each, Started)]
    assert {(each.agent, each.task_id) for each in started} == {
        (each.agent, each.task_id) for each in started[:2]
    }


@pytest.mark.parametrize("kind", ["graph", "swarm"])
def test_interrupt_in_group_continues_its_tree(kind: str, events: list[Event]) -> None:
    """A graph and a swarm have no model calls themselves, but a tree."""
    enable(tree=Limits(max_model_calls=3), observers=[events.append])
    model = sending()
    agent = careful(model)
    group: Any
    if kind == "graph":
        builder = GraphBuilder()
        builder.set_execution_timeout(60)
        builder.add_node(agent, "boss")
        builder.set_entry_point("boss")
        group = builder.build()
    else:
        group = Swarm([agent])
    approvals, result = approve_all(group, group("go"))
    assert (approvals, model.calls) == (3, 3)
    assert (stop := stop_of(result)) is not None
    assert stop.reason == "max_model_calls"
    assert sum(each.turns for each in events if isinstance(each, Stop)) == 3


def test_extension_outlives_a_further_interrupt() -> None:
    """The next answer is about a tool, and the limit stays extended."""
    enable(Limits(max_turns=2), action="ask")
    agent = careful(sending(3))
    result, asked = agent("go"), []
    while result.interrupts:
        (question,) = result.interrupts
        is_ours = question.name == "otel_limits"
        asked.append(question.reason["limit"] if is_ours else "tool")
        answer: Any = {"extend": 5} if is_ours else "yes"
        response: Any = {"interruptId": question.id, "response": answer}
        given: Any = [{"interruptResponse": response}]
        result = agent(given)
    assert (asked, result.stop_reason) == (["tool", "tool", "max_turns", "tool"], "end_turn")


def test_loop_over_answers_is_a_loop() -> None:
    """A person who always says yes does not see the other answers."""
    enable(Limits(max_identical_tool_calls=3))
    model = ScriptedModel(endless(uses("send")))
    agent = careful(model)
    approvals, result = approve_all(agent, agent("go"))
    assert (approvals, result.stop_reason, model.calls) == (3, "loop_detected", 3)
