"""With the action `ask`, a human may extend the limit of a graph through an interrupt."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from otel_limits import Event, Halt, Limits, Stop, enable, is_synthetic, stop_of
from otel_limits.testing import ScriptedChatModel, endless, says, uses
from tests.langchain.graphs import (
    AINVOKE,
    ASK,
    CALLS,
    STEPS,
    agent,
    config,
    halt_of,
    looping,
    unanswered,
)


def asked_by(graph: Any, options: Any) -> list[Any]:
    """The values of the interrupts that a thread waits for."""
    return [each.value for each in graph.get_state(options).interrupts]


def extending(turns: int) -> Any:
    """A resume that allows more turns."""
    return Command(resume={"extend": {"max_turns": turns}})


@pytest.fixture
def saver() -> Any:
    """A checkpointer."""
    return InMemorySaver()


@pytest.mark.parametrize("how", ["invoke", "stream", "batch", "v2"])
def test_human_answer_extends_limit(how: str, saver: Any, events: list[Event]) -> None:
    """`{"extend": {"max_turns": 2}}` allows two more turns before the next question."""
    enable(max_turns=3, action="ask", observers=[events.append])
    model = looping()
    graph = agent(model, checkpointer=saver)
    CALLS[how](graph, ASK, config("1"))
    (asked,) = asked_by(graph, config("1"))
    assert (model.calls, asked["limit"], asked["cap"], asked["agent"]) == (
        3,
        "max_turns",
        3,
        "boss",
    )
    assert "reached max_turns: 3 of 3 turns used" in asked["sentence"]
    for text in (asked["sentence"], asked["question"]):
        assert " Answer yes to allow 3 turns more, " in text
    state = CALLS[how](graph, extending(2), config("1"))
    assert model.calls == 5
    assert unanswered(state["messages"]) == []
    assert len(asked_by(graph, config("1"))) == 1
    stops = [each for each in events if isinstance(each, Stop)]
    assert [(each.reason, each.turns, each.tool_calls) for each in stops] == [
        ("interrupt", 3, 3),
        ("interrupt", 2, 2),
    ]
    assert not [each for each in events if isinstance(each, Halt)]


@pytest.mark.parametrize("how", ["ainvoke", "astream", "abatch"])
def test_human_answer_extends_limit_async(how: str) -> None:
    """The same in asynchronous methods."""
    enable(max_turns=3, action="ask")
    model = looping()
    graph = agent(model, checkpointer=InMemorySaver())
    CALLS[how](graph, ASK, config("1"))
    CALLS[how](graph, extending(2), config("1"))
    assert model.calls == 5
    state = CALLS[how](graph, Command(resume="no"), config("1"))
    assert (model.calls, halt_of(state).reason) == (5, "max_turns")


@pytest.mark.parametrize("answer", ["no", False, {"extend": {"max_turn": 3}}, {"extend": {}}])
def test_any_other_answer_halts(answer: Any, saver: Any) -> None:
    """Without approval, no further call is sent, and the thread can go on."""
    enable(max_turns=3, action="ask")
    model = looping()
    graph = agent(model, checkpointer=saver)
    graph.invoke(ASK, config("1"))
    state = graph.invoke(Command(resume=answer), config("1"))
    if isinstance(answer, dict) and answer["extend"]:  # asked again, as it is not understood
        state = graph.invoke(Command(resume=answer), config("1"))
    stop = halt_of(state)
    assert (model.calls, stop.reason, stop.model_calls) == (3, "max_turns", 0)
    assert is_synthetic(state["messages"][-1])
    assert unanswered(state["messages"]) == []
    if isinstance(answer, dict) and answer["extend"]:
        assert "'max_turn' is unknown. Did you mean 'max_turns'?" in stop.sentence
    graph.invoke(ASK, config("1"))
    assert model.calls == 6


def test_run_without_an_answer_asks_again() -> None:
    """`invoke(None)` runs the interrupted node again, which must not be a way around the limit."""
    enable(max_turns=3, action="ask")
    model = looping()
    graph = agent(model, checkpointer=InMemorySaver())
    graph.invoke(ASK, config("1"))
    graph.invoke(None, config("1"))
    assert model.calls == 3
    assert len(asked_by(graph, config("1"))) == 1
    graph.invoke(extending(1), config("1"))
    assert model.calls == 4


def test_graph_without_a_checkpointer_is_halted(caplog: pytest.LogCaptureFixture) -> None:
    """It could not be resumed, as the log says once for each name of an agent."""
    enable(max_turns=3, action="ask")
    model = looping()
    graph = agent(model, name="unasked")
    assert halt_of(graph.invoke(ASK, STEPS)).reason == "max_turns"
    assert halt_of(graph.invoke(ASK, STEPS)).reason == "max_turns"
    assert model.calls == 6
    logged = [each for each in caplog.messages if "'unasked' is halted instead of asking" in each]
    assert len(logged) == 1


def test_tree_limit_halts_instead_of_asking() -> None:
    """It cannot be extended for one agent."""
    enable(tree=Limits(max_turns=3), action="ask")
    model = looping()
    state = agent(model, checkpointer=InMemorySaver()).invoke(ASK, config("1"))
    assert (model.calls, halt_of(state).reason) == (3, "max_turns")


def test_questions_of_the_application_keep_their_answers() -> None:
    """Interrupts before and after our own one in the same node."""
    enable(max_turns=2, action="ask")
    model = ScriptedChatModel(endless(says("text")))
    seen: list[Any] = []

    def work(state: MessagesState) -> dict[str, Any]:
        first = interrupt("first?")
        answers = [model.invoke(state["messages"]) for _ in range(3)]
        second = interrupt("second?")
        seen.append((first, second))
        return {"messages": answers[-1:]}

    graph: Any = (
        StateGraph(MessagesState)
        .add_node("work", work)
        .add_edge(START, "work")
        .compile(checkpointer=InMemorySaver(), name="hand-written")
    )
    graph.invoke(ASK, config("1"))
    assert asked_by(graph, config("1")) == ["first?"]
    graph.invoke(Command(resume="one"), config("1"))
    (asked,) = asked_by(graph, config("1"))
    assert (asked["limit"], model.calls) == ("max_turns", 2)
    graph.invoke(extending(5), config("1"))
    assert asked_by(graph, config("1")) == ["second?"]
    assert model.calls == 5
    enable(max_turns=9, action="ask")
    graph.invoke(Command(resume="two"), config("1"))
    assert seen == [("one", "two")]


def test_extension_is_for_the_agent_that_asked() -> None:
    """An agent in a tool asks through the agent around it, whose own limits stay."""
    enable(max_turns=3, action="ask")
    helper = ScriptedChatModel([*[uses("search")] * 5, says("found")])
    boss = ScriptedChatModel([uses("ask"), says("done")])

    @tool
    def ask() -> str:
        """Call a colleague."""
        answer: str = agent(helper, name="helper").invoke(ASK, STEPS)["messages"][-1].text
        return answer

    graph = agent(boss, ask, checkpointer=InMemorySaver())
    graph.invoke(ASK, config("1"))
    (asked,) = asked_by(graph, config("1"))
    assert (asked["agent"], helper.calls, boss.calls) == ("helper", 3, 1)
    state = graph.invoke(extending(4), config("1"))
    assert (helper.calls, boss.calls) == (6, 2)
    assert state["messages"][-1].text == "done"
    assert state["messages"][-2].content == "found"


@pytest.mark.parametrize("how", ["invoke", AINVOKE])
def test_parallel_branches_ask_once(how: str) -> None:
    """A human reads one question, and the answer continues every branch."""
    enable(max_turns=4, action="ask")
    model = ScriptedChatModel(endless(says("text")))

    def work(_: Any) -> dict[str, Any]:
        return {"messages": [AIMessage(model.invoke("go").text)]}

    graph: Any = (
        StateGraph(MessagesState)
        .add_node("work", work)
        .add_conditional_edges(START, lambda _: [Send("work", {}) for _ in range(10)])
        .compile(checkpointer=InMemorySaver(), name="fan-out")
    )
    CALLS[how](graph, ASK, config("1"))
    assert model.calls == 4
    assert len(asked_by(graph, config("1"))) == 1
    state = CALLS[how](graph, extending(20), config("1"))
    assert model.calls == 10
    assert len(state["messages"]) == 11


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda model: model.with_retry(stop_after_attempt=2, wait_exponential_jitter=False),
        lambda model: model.with_fallbacks([looping(), looping()]),
    ],
    ids=["with_retry", "with_fallbacks"],
)
def test_nothing_retries_a_question(wrapped: Any) -> None:
    """Other models must not be called instead of the one that asks."""
    enable(max_turns=2, action="ask")
    model = looping()

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [wrapped(model).invoke(state["messages"])]}

    graph: Any = (
        StateGraph(MessagesState)
        .add_node("think", think)
        .add_edge(START, "think")
        .add_conditional_edges("think", lambda state: "think" if state["messages"] else END)
        .compile(checkpointer=InMemorySaver(), name="hand-written")
    )
    graph.invoke(ASK, config("1"))
    assert len(asked_by(graph, config("1"))) == 1
    assert model.calls == 2
    graph.invoke(extending(3), config("1"))
    assert model.calls == 5


def wrapped(model: Any) -> Any:
    """Call a model, and wrap its errors."""
    try:
        return model.invoke("go")
    except Exception as error:
        raise RuntimeError("no answer") from error


async def grouped(model: Any) -> Any:
    """Call a model in a group of tasks, which wraps its errors."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(model.ainvoke("go"))
    return await task


WITH_GROUPS = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups")


@pytest.mark.parametrize("call", [wrapped, pytest.param(grouped, marks=WITH_GROUPS)])
def test_question_that_the_application_wraps_halts(
    call: Any, saver: Any, events: list[Event]
) -> None:
    """LangGraph only interrupts for the exception itself: a human would never see the question."""
    enable(max_turns=2, action="ask", observers=[events.append])
    model = ScriptedChatModel(endless(says("text")))

    async def node(_: Any) -> Command[Any]:
        answer = call(model)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        return Command(goto="node", update={"messages": [answer]})

    builder: Any = StateGraph(MessagesState)
    builder.add_node("node", node, destinations=("node",)).add_edge(START, "node")
    graph = builder.compile(name="boss", checkpointer=saver)
    state = asyncio.run(graph.ainvoke(ASK, config("1")))
    assert (model.calls, halt_of(state).reason) == (2, "max_turns")
    assert asked_by(graph, config("1")) == []
    assert [each.reason for each in events if isinstance(each, Stop)] == ["max_turns"]


def test_question_that_the_application_swallows_halts(events: list[Event]) -> None:
    """A node that handles every exception sends no further call."""
    enable(max_turns=2, action="ask", observers=[events.append])
    model = looping()

    def think(state: MessagesState) -> dict[str, Any]:
        for _ in range(9):
            with contextlib.suppress(Exception):
                model.invoke(state["messages"])
        return {"messages": [AIMessage("done")]}

    graph: Any = (
        StateGraph(MessagesState)
        .add_node("think", think)
        .add_edge(START, "think")
        .compile(checkpointer=InMemorySaver(), name="hand-written")
    )
    graph.invoke(ASK, config("1"))
    assert model.calls == 2
    assert [each.reason for each in events if isinstance(each, Stop)] == ["max_turns"]
    assert len([each for each in events if isinstance(each, Halt)]) == 1


def test_answers_by_id_and_to_others(events: list[Event]) -> None:
    """A resume that answers another interrupt of the thread leaves ours open."""
    enable(max_turns=1, action="ask", observers=[events.append])
    model = ScriptedChatModel(endless(says("text")))

    def work(_: MessagesState) -> dict[str, Any]:
        model.invoke("go")
        return {"messages": [model.invoke("go")]}

    def wait(_: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(interrupt("sure?"))]}

    graph: Any = (
        StateGraph(MessagesState)
        .add_node("work", work)
        .add_node("wait", wait)
        .add_edge(START, "work")
        .add_edge(START, "wait")
        .compile(checkpointer=InMemorySaver(), name="parallel")
    )
    graph.invoke(ASK, config("1"))
    ids = {
        "ours" if isinstance(each.value, dict) else "other": each.id
        for each in graph.get_state(config("1")).interrupts
    }
    assert set(ids) == {"ours", "other"}
    # The thread itself lists what was answered, too, in LangGraph 1.0.
    (asked,) = graph.invoke(Command(resume={ids["other"]: "yes"}), config("1"))["__interrupt__"]
    assert model.calls == 1
    assert asked.value["limit"] == "max_turns"
    state = graph.invoke(Command(resume={ids["ours"]: {"extend": {"max_turns": 2}}}), config("1"))
    assert stop_of(state) is None
    assert model.calls == 3
    assert sorted(each.text for each in state["messages"][1:]) == ["text", "yes"]


def test_async_node_asks() -> None:
    """A node that is a coroutine function."""
    enable(max_turns=2, action="ask")
    model = looping()

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph: Any = (
        StateGraph(MessagesState)
        .add_node("think", think)
        .add_edge(START, "think")
        .add_conditional_edges("think", lambda state: "think" if state["messages"] else END)
        .compile(checkpointer=InMemorySaver(), name="hand-written")
    )
    asyncio.run(graph.ainvoke(ASK, config("1")))
    assert len(asked_by(graph, config("1"))) == 1
    asyncio.run(graph.ainvoke(extending(3), config("1")))
    assert model.calls == 5
