"""An answer to an interrupt of a graph continues its task, and anything else begins a new one."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from otel_limits import Event, Limits, ModelCall, Started, Stop, enable, stop_of
from otel_limits.testing import ScriptedChatModel, endless, says, uses
from tests.langchain.event_loops import with_context
from tests.langchain.graphs import ASK, agent, config, halt_of, looping

APPROVE: Final[Any] = Command(resume={"decisions": [{"type": "approve"}]})


def careful(model: Any, **options: Any) -> Any:
    """An agent whose tool waits for a human before each call."""
    asking: Any = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    return agent(model, middleware=[asking], **options)


def reason_of(state: Any) -> str | None:
    """Return why a graph was halted, if it was."""
    return stop.reason if (stop := stop_of(state)) is not None else None


@with_context
def test_answer_in_an_event_loop_continues_the_task() -> None:
    """Asynchronous methods read the interrupts in another way."""
    enable(max_turns=2)
    graph = careful(looping(), checkpointer=InMemorySaver())

    async def run() -> Any:
        await graph.ainvoke(ASK, config("1"))
        await graph.ainvoke(APPROVE, config("1"))
        return [each async for each in graph.astream(APPROVE, config("1"), stream_mode="values")]

    assert reason_of(asyncio.run(run())[-1]) == "max_turns"


def test_edited_call_continues_the_task() -> None:
    """A human may change the arguments of a call; this is an answer, too."""
    enable(max_tool_calls=1)
    graph = careful(looping(), checkpointer=InMemorySaver())
    state = graph.invoke(ASK, config("1"))
    edit = {"type": "edit", "edited_action": {"name": "search", "args": {"query": "other"}}}
    for _ in range(2):
        state = graph.invoke(Command(resume={"decisions": [edit]}), config("1"))
    assert halt_of(state).reason == "max_tool_calls"


@pytest.mark.parametrize("given", [ASK, None])
def test_call_without_answer_begins_new_task(given: Any) -> None:
    """A new message of the user has a new budget, and so has pending work."""
    enable(max_turns=3)
    model = looping()
    graph = careful(model, checkpointer=InMemorySaver())
    graph.invoke(ASK, config("1"))
    graph.invoke(APPROVE, config("1"))
    graph.invoke(given, config("1"))
    state = graph.invoke(APPROVE, config("1"))
    assert "__interrupt__" in state
    assert model.calls == (4 if given else 3)


def test_threads_do_not_share_a_task() -> None:
    """Interrupts of users have different IDs."""
    enable(max_turns=2)
    model = looping()
    graph = careful(model, checkpointer=InMemorySaver())
    for thread in "ab":
        graph.invoke(ASK, config(thread))
    for thread in "ab":
        graph.invoke(APPROVE, config(thread))
    assert model.calls == 4
    assert [reason_of(graph.invoke(APPROVE, config(thread))) for thread in "ab"] == [
        "max_turns",
        "max_turns",
    ]


def test_fork_continues_from_its_interrupt(events: list[Event]) -> None:
    """A thread that continues from an older checkpoint has used as much as it had there."""
    enable(max_turns=9, observers=[events.append])
    graph = careful(looping(), checkpointer=InMemorySaver())
    graph.invoke(ASK, config("1"))
    first = graph.get_state(config("1")).config
    for _ in range(3):
        graph.invoke(APPROVE, config("1"))
    graph.invoke(APPROVE, {**config(), **first})
    stops = [each for each in events if isinstance(each, Stop)]
    used = [
        next(level.observed for level in each.levels if level.limit == "max_turns")
        for each in stops
    ]
    assert used == [1, 2, 3, 4, 2]
    assert len({each.invocation.task_id for each in stops if each.invocation is not None}) == 1


def test_two_interrupts_of_one_tool_belong_to_one_task(events: list[Event]) -> None:
    """LangGraph gives both the same ID."""
    enable(max_turns=2, observers=[events.append])

    @tool
    def confirm() -> str:
        """Ask twice."""
        return f"{interrupt('sure?')} {interrupt('really?')}"

    model = ScriptedChatModel(endless(uses("confirm")))
    graph = agent(model, confirm, checkpointer=InMemorySaver())
    state = graph.invoke(ASK, config("1"))
    approvals = 0
    while "__interrupt__" in state:
        approvals += 1
        state = graph.invoke(Command(resume="yes"), config("1"))
    assert (approvals, model.calls, reason_of(state)) == (4, 2, "max_turns")
    assert sum(each.turns for each in events if isinstance(each, Stop)) == 2


def asking_helpers(models: list[Any], **options: Any) -> Any:
    """A graph whose parallel nodes are such agents."""
    builder = StateGraph(MessagesState)
    names = [f"helper{number}" for number in range(len(models))]
    for name, model in zip(names, models, strict=True):
        builder.add_node(name, careful(model, name=name))
    builder.set_conditional_entry_point(lambda state: [Send(name, state) for name in names], names)
    return builder.compile(name="boss", checkpointer=InMemorySaver(), **options)


def test_interrupt_in_sub_agent_continues_its_task_and_its_tree(events: list[Event]) -> None:
    """The graph around it has no calls, and its tree has all of them."""
    enable(tree=Limits(max_model_calls=3), observers=[events.append])
    graph = asking_helpers([looping()])
    state = graph.invoke(ASK, config("1"))
    approvals = 0
    while "__interrupt__" in state and approvals < 9:
        approvals += 1
        state = graph.invoke(APPROVE, config("1"))
    assert (approvals, reason_of(state)) == (3, "max_model_calls")
    assert len([each for each in events if isinstance(each, ModelCall)]) == 3
    tasks = [each.invocation for each in events if isinstance(each, Started)]
    assert {(each.agent, each.task_id) for each in tasks} == {
        (each.agent, each.task_id) for each in tasks[:2]
    }


def test_sub_agents_with_own_limits_continue_their_own_tasks() -> None:
    """Parallel agents that ask have one task each."""
    enable(max_turns=2)
    models = [looping(), looping()]
    graph = asking_helpers(models)
    state = graph.invoke(ASK, config("1"))
    for _ in range(2):
        pending = graph.get_state(config("1")).interrupts
        answers = {each.id: APPROVE.resume for each in pending}
        state = graph.invoke(Command(resume=answers), config("1"))
    assert "__interrupt__" not in state
    assert [model.calls for model in models] == [2, 2]


def test_answered_question_about_a_limit_keeps_other_sums() -> None:
    """A human allows more of one limit, not a new budget."""
    enable(max_turns=2, max_tool_calls=3, action="ask")
    model = looping()
    graph = agent(model, checkpointer=InMemorySaver())
    graph.invoke(ASK, config("1"))
    state = graph.invoke(Command(resume=9), config("1"))
    assert (model.calls, state["__interrupt__"][0].value["limit"]) == (4, "max_tool_calls")


def test_extension_outlives_a_further_interrupt() -> None:
    """The next answer is about a tool, and the limit stays extended."""
    enable(max_turns=2, action="ask")
    graph = careful(
        ScriptedChatModel([*[uses("search")] * 3, says("done")]), checkpointer=InMemorySaver()
    )
    state = graph.invoke(ASK, config("1"))
    asked = []
    while "__interrupt__" in state:
        (question,) = state["__interrupt__"]
        asked.append(question.value.get("limit", "tool"))
        answer = APPROVE if asked[-1] == "tool" else Command(resume={"extend": 5})
        state = graph.invoke(answer, config("1"))
    assert asked == ["tool", "tool", "max_turns", "tool"]
    assert state["messages"][-1].content == "done"
