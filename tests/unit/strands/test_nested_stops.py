"""Halts of agents within graphs, swarms, delegations and A2A: their results do not hide them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, ToolContext, tool
from strands.multiagent import GraphBuilder, Swarm
from strands.multiagent.base import Status
from strands.session import FileSessionManager

from otel_limits import (
    LimitReachedError,
    Limits,
    MaxTurnsReachedException,
    enable,
    is_synthetic,
    stop_of,
    stops_of,
)
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from strands.multiagent.graph import Graph, GraphState

pytestmark = pytest.mark.usefixtures("source")


@tool
async def look() -> str:
    """Look."""
    await asyncio.sleep(0)
    return "nothing"


def runaway(name: str, **arguments: Any) -> Agent:
    """Make an agent that looks forever."""
    model = ScriptedModel(endless(uses("look")))
    return Agent(model=model, tools=[look], name=name, callback_handler=None, **arguments)


def answering(name: str, *answers: Any) -> Agent:
    """Make an agent that answers."""
    model = ScriptedModel(answers or endless(says(f"{name} done")))
    return Agent(model=model, tools=[look], name=name, callback_handler=None)


def is_approved(state: GraphState) -> bool:
    """Publish what was not rejected: wrong, as a halted reviewer has rejected nothing."""
    return "REJECT" not in str(state.results["reviewer"].result)


def is_approved_by_review(state: GraphState) -> bool:
    """Publish what a reviewer that was not halted has approved."""
    review = state.results["reviewer"].result
    return stop_of(review) is None and "APPROVED" in str(review)


def reviewed(reviewer: Any, condition: Any = is_approved) -> Graph:
    """Make a graph of a writer, a reviewer and a publisher."""
    builder = GraphBuilder()
    builder.add_node(answering("writer"), "writer")
    builder.add_node(reviewer, "reviewer")
    builder.add_node(answering("publisher"), "publisher")
    builder.add_edge("writer", "reviewer")
    builder.add_edge("reviewer", "publisher", condition=condition)
    builder.set_entry_point("writer")
    builder.set_max_node_executions(9)
    return builder.build()


def names_of(result: Any) -> list[tuple[str, str]]:
    """Return the agent and the action of each stop."""
    return [(stop.agent, stop.action) for stop in stops_of(result)]


def test_result_of_graph_has_the_stop_of_its_node() -> None:
    """By default the node completes, as with Strands' own limits, and the result shows it."""
    enable(Limits(max_turns=2))
    result = reviewed(runaway("reviewer"))("go")
    assert (result.status, result.failed_nodes) == (Status.COMPLETED, 0)
    stop = stop_of(result)
    assert stop is not None
    assert (stop.reason, stop.agent, stop.turns) == ("max_turns", "reviewer", 2)
    assert names_of(result) == [("reviewer", "halted")]


def swarmed() -> Swarm:
    """A swarm of an agent that never ends."""
    return Swarm([runaway("swarms"), answering("other")])


GROUPS = {
    "first": lambda: line(runaway("first"), answering("second")),
    "last": lambda: line(answering("first"), runaway("second")),
    "nested": lambda: line(answering("first"), reviewed(runaway("reviewer"))),
    "nested-swarm": lambda: line(answering("first"), swarmed()),
    "swarm": swarmed,
}


@pytest.mark.parametrize("action", ["halt", "wrap_up", "raise"])
@pytest.mark.parametrize("scope", ["limits", "tree"])
@pytest.mark.parametrize("build", GROUPS.values(), ids=GROUPS)
def test_group_ended_by_a_limit_shows_it_or_raises(
    build: Callable[[], Any], scope: str, action: Any
) -> None:
    """A cut result must not pass for a finished one, in any shape."""
    caps: dict[str, Any] = {scope: Limits(max_turns=3)}
    enable(**caps, action=action)
    try:
        stop = stop_of(build()("go"))
    except LimitReachedError as error:
        stop = error.stop
    assert stop is not None
    assert stop.reason == "max_turns"


def test_result_without_a_halt_has_no_stop() -> None:
    """Neither that of a graph nor that of its agents."""
    enable(Limits(max_turns=2))
    result = reviewed(answering("reviewer"))("go")
    assert (stop_of(result), stops_of(result)) == (None, ())


def test_result_of_graph_has_the_stops_of_all_visits_and_nested_graphs() -> None:
    """In the order in which the nodes ended; a node's result is only that of its last visit."""
    enable(Limits(max_turns=1))
    builder = GraphBuilder()
    builder.add_node(runaway("loops"), "loops")
    builder.add_node(Swarm([runaway("swarms")]), "nested")
    builder.add_edge("loops", "loops", condition=lambda state: len(state.execution_order) < 3)
    builder.add_edge("loops", "nested", condition=lambda state: len(state.execution_order) == 3)
    builder.set_entry_point("loops")
    builder.set_max_node_executions(9)
    result = builder.build()("go")
    assert names_of(result) == [("loops", "halted")] * 3 + [("swarms", "halted")]


@tool(context=True)
def approve(tool_context: ToolContext) -> str:
    """Interrupt for a human."""
    return str(tool_context.interrupt("approve", reason="May it continue?"))


def asking(name: str) -> Agent:
    """Make an agent that interrupts for a human, and then looks forever."""
    model = ScriptedModel([uses("approve"), *[uses("look")] * 9])
    return Agent(model=model, tools=[look, approve], name=name, callback_handler=None)


def line(*nodes: Any, **arguments: Any) -> Graph:
    """Make a graph whose nodes run one after the other; the first one runs twice."""
    builder = GraphBuilder()
    names = [getattr(node, "name", "nested") for node in nodes]
    for name, node in zip(names, nodes, strict=True):
        builder.add_node(node, name)
    builder.set_entry_point(names[0])
    if len(nodes) > 1:
        builder.add_edge(names[0], names[0], condition=lambda state: len(state.execution_order) < 2)
        builder.add_edge(names[0], names[1], condition=lambda state: len(state.execution_order) > 1)
    builder.set_max_node_executions(9)
    if arguments:
        builder.set_session_manager(**arguments)
    return builder.build()


def in_graph() -> Any:
    """The node that asks follows the halted one."""
    return line(runaway("first"), asking("second"))


def in_nested_graph() -> Any:
    """Both are in a graph that is a node itself."""
    return line(line(runaway("first"), asking("second")))


def in_swarm() -> Any:
    """The halted agent has handed over to the one that asks."""
    message = {"agent_name": "second", "message": "go", "context": {}}
    return Swarm(
        [
            answering("first", uses("handoff_to_agent", arguments=message), says("never")),
            asking("second"),
        ]
    )


def answers_to(result: Any) -> Any:
    """Answer the questions of a result."""
    return [
        {"interruptResponse": {"interruptId": each.id, "response": "yes"}}
        for each in result.interrupts
    ]


@pytest.mark.parametrize(("make", "times"), [(in_graph, 2), (in_nested_graph, 2), (in_swarm, 1)])
def test_resumed_group_has_the_stops_before_its_interrupt(
    make: Callable[[], Any], times: int
) -> None:
    """A human answers a later node: the halt before that is still within the result, once."""
    enable(Limits(max_turns=1))
    group = make()
    first = group("go")
    assert first.status is Status.INTERRUPTED
    assert names_of(first) == [("first", "halted")] * times
    result = group(answers_to(first))
    assert result.status is Status.COMPLETED
    assert names_of(result) == [*names_of(first), ("second", "halted")]


def test_group_resumed_after_a_restart_has_the_stops_before_its_interrupt(tmp_path: Path) -> None:
    """Its session has the last result of each node."""
    enable(Limits(max_turns=1))

    def restarted(second: Agent) -> Graph:
        sessions = FileSessionManager("one", storage_dir=str(tmp_path))
        return line(runaway("first"), second, session_manager=sessions)

    first = restarted(asking("second"))("go")
    result = restarted(runaway("second"))(answers_to(first))
    assert names_of(result) == [("first", "halted"), ("second", "halted")]


def test_result_of_swarm_has_the_stops_of_its_agents() -> None:
    """Also of one that wrote a last answer."""
    enable(Limits(max_turns=1), action="wrap_up")
    message = {"agent_name": "second", "message": "go", "context": {}}
    handoff = uses("handoff_to_agent", arguments=message)
    first = answering("first", handoff, says("handed over"))
    second = answering("second", uses("look"), says("summary"))
    result = Swarm([first, second])("go")
    assert names_of(result)[-1] == ("second", "wrapped_up")


def test_result_of_delegation_has_the_stop_of_the_delegate() -> None:
    """Its caller ended naturally, with the delegate's text as its own answer."""
    enable(Limits(max_turns=2))
    delegate = runaway("delegate").as_tool(name="delegate", description="Ask.", delegate=True)
    caller = Agent(
        model=ScriptedModel([uses("delegate", arguments={"input": "go"}), says("more")]),
        tools=[delegate],
        name="caller",
        callback_handler=None,
    )
    result = caller("go")
    assert result.stop_reason == "end_turn"
    assert names_of(result) == [("delegate", "halted")]
    assert is_synthetic(result.message)
    assert stop_of(caller("go")) is None


def test_delegation_resumed_after_a_restart_has_the_stop_of_the_delegate(tmp_path: Path) -> None:
    """A human answered the delegate, and a new process resumed both agents from the session."""
    enable(Limits(max_turns=2))

    def restarted(*answers: Any) -> Agent:
        model = ScriptedModel([*answers, *[uses("look")] * 9])
        delegate = Agent(
            model=model, tools=[look, approve], name="delegate", callback_handler=None
        ).as_tool(name="delegate", description="Ask.", delegate=True)
        return Agent(
            model=ScriptedModel([uses("delegate", arguments={"input": "go"})]),
            tools=[delegate],
            name="caller",
            agent_id="caller",
            callback_handler=None,
            session_manager=FileSessionManager("one", storage_dir=str(tmp_path)),
        )

    first = restarted(uses("approve"))("go")
    assert (first.stop_reason, stops_of(first)) == ("interrupt", ())
    (asked,) = first.interrupts or ()
    answer: Any = {"interruptResponse": {"interruptId": asked.id, "response": "yes"}}
    result = restarted()([answer])
    assert (result.stop_reason, names_of(result)) == ("end_turn", [("delegate", "halted")])
    assert names_of(restarted().messages[-1]) == [("delegate", "halted")]


def test_sub_agent_of_a_tool_leaves_no_stop_in_its_callers_result() -> None:
    """Its caller has read that it was halted, and has answered."""
    enable(Limits(max_turns=2))
    child = runaway("child").as_tool(name="child", description="Ask.")
    caller = Agent(
        model=ScriptedModel([uses("child", arguments={"input": "go"}), says("done")]),
        tools=[child],
        name="caller",
        callback_handler=None,
    )
    assert stops_of(caller("go")) == ()


# --- halted nodes that fail -----------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Enable limits under which a halted node fails."""
    monkeypatch.setenv("OTEL_LIMITS_HALTED_NODE", "fail")
    enable(Limits(**limits))


def test_halted_node_fails_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph raises the limit's exception, and nothing is published."""
    failing(monkeypatch, max_turns=2)
    graph = reviewed(runaway("reviewer"))
    with pytest.raises(MaxTurnsReachedException) as caught:
        graph("go")
    stop = caught.value.stop
    assert stop is not None
    assert (stop.agent, stop.action, stop.reason) == ("reviewer", "halted", "max_turns")
    assert stop_of(caught.value) == stop
    assert "publisher" not in graph.state.results
    assert isinstance(graph.state.results["reviewer"].result, LimitReachedError)


def test_halted_node_fails_its_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The swarm returns, and its result has the stop."""
    failing(monkeypatch, max_turns=2)
    result = Swarm([runaway("first")])("go")
    assert result.status is Status.FAILED
    assert names_of(result) == [("first", "halted")]


def test_halted_node_follows_the_policy_of_its_own_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy file sets it for the reviewer alone; other halted nodes complete."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("agents: {reviewer: {halted_node: fail}}\n", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(Limits(max_turns=2))
    with pytest.raises(MaxTurnsReachedException):
        reviewed(runaway("reviewer"))("go")
    assert reviewed(runaway("editor"))("go").status is Status.COMPLETED


def test_node_that_wrapped_up_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has answered."""
    monkeypatch.setenv("OTEL_LIMITS_HALTED_NODE", "fail")
    enable(Limits(max_turns=1), action="wrap_up")
    result = reviewed(answering("reviewer", uses("look"), says("APPROVE")))("go")
    assert result.status is Status.COMPLETED
    assert names_of(result) == [("reviewer", "wrapped_up")]


@pytest.mark.parametrize("delegate", [False, True])
def test_halted_agent_outside_of_a_group_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, *, delegate: bool
) -> None:
    """Called alone, or as a tool of a node, it returns as always."""
    failing(monkeypatch, max_turns=2)
    assert runaway("alone")("go").stop_reason == "max_turns"
    child = runaway("child").as_tool(name="child", description="Ask.", delegate=delegate)
    parent = Agent(
        model=ScriptedModel([uses("child", arguments={"input": "go"}), says("done")]),
        tools=[child],
        name="parent",
        callback_handler=None,
    )
    result = reviewed(parent)("go")
    assert result.status is Status.COMPLETED
    assert names_of(result) == ([("child", "halted")] if delegate else [])


@pytest.mark.parametrize("policy", ["complete", "fail"])
def test_gate_of_the_page_holds_under_both_policies(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reviewer that was halted has approved nothing."""
    monkeypatch.setenv("OTEL_LIMITS_HALTED_NODE", policy)
    enable(Limits(max_turns=2))
    graph = reviewed(runaway("reviewer"), is_approved_by_review)
    if policy == "fail":
        with pytest.raises(LimitReachedError):
            graph("go")
    else:
        graph("go")
    assert "publisher" not in graph.state.results
    approved = reviewed(answering("reviewer", says("APPROVED")), is_approved_by_review)
    assert "publisher" in approved("go").results
