"""Limits and quotas hold to the call in graphs whose branches call models concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from otel_limits import (
    Event,
    LimitReachedError,
    Limits,
    ModelCall,
    Stop,
    ToolCall,
    enable,
    is_synthetic,
    stop_of,
)
from otel_limits.testing import ScriptedChatModel, endless, only, says, uses
from tests.langchain.graphs import ASK, CALLS, STEPS, agent, config, halt_of, looping, unanswered
from tests.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path


class Together(ScriptedChatModel):
    """A model whose answers arrive once a number of requests are in flight.

    Unless `all_come`, they also arrive after a while: some may be canceled before.
    """

    def __init__(self, parties: int, *, all_come: bool = True, **fields: Any) -> None:
        """Wait for that many."""
        super().__init__(endless(says("text")), **fields)
        self._barrier = threading.Barrier(parties, timeout=PATIENCE_SECONDS if all_come else 0.3)
        self._faults = () if all_come else (threading.BrokenBarrierError,)

    def _generate(self, *args: Any, **options: Any) -> Any:
        result = super()._generate(*args, **options)
        with contextlib.suppress(*self._faults):
            self._barrier.wait()
        return result


def fan_out(model: Any, branches: int = 10, *, is_async: bool = False, **options: Any) -> Any:
    """A graph whose branches each call a model once."""

    def work(_: Any) -> dict[str, Any]:
        return {"messages": [AIMessage(model.invoke("go").text)]}

    async def awork(_: Any) -> dict[str, Any]:
        return {"messages": [AIMessage((await model.ainvoke("go")).text)]}

    return (
        StateGraph(MessagesState)
        .add_node("work", awork if is_async else work)
        .add_conditional_edges(START, lambda _: [Send("work", {}) for _ in range(branches)])
        .compile(name="fan-out", **options)
    )


@pytest.mark.parametrize("name", ["max_turns", "max_model_calls", "max_iterations"])
@pytest.mark.parametrize("how", ["invoke", "ainvoke", "async node"])
def test_cap_holds_over_branches_of_a_graph(how: str, name: str, events: list[Event]) -> None:
    """Ten concurrent calls of one invocation at a cap of five: five calls."""
    enable(only(name, 5), observers=[events.append])
    model = Together(5, all_come=how == "invoke")
    graph = fan_out(model, is_async=how == "async node")
    state = CALLS["ainvoke" if how == "async node" else how](graph)
    stop = halt_of(state)
    assert stop.reason == name
    if how == "invoke":
        assert (model.calls, stop.turns) == (5, 5)
    # LangGraph cancels the other tasks of a step that has failed, whose threads run to their end.
    assert model.calls <= len([each for each in events if isinstance(each, ModelCall)]) <= 5


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "async node"])
def test_quota_holds_over_branches_of_a_graph(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """Ten concurrent calls of one invocation at a quota of five: five calls, each settled."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {calls: {model_calls: 5, window: P1D}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(observers=[events.append])
    model = Together(5, all_come=False)
    graph = fan_out(model, is_async=how == "async node")
    state = CALLS["ainvoke" if how == "async node" else how](graph)
    stop = halt_of(state)
    assert stop.reason == "quota_exceeded"
    if how == "invoke":
        assert model.calls == stop.turns
    CALLS["invoke"](agent(looping()))  # what was refused with its branch is left for others
    assert model.calls <= len([each for each in events if isinstance(each, ModelCall)]) == 5


def test_quota_of_invocations_counts_a_fan_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its concurrent calls are those of one invocation."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {runs: {invocations: 2, window: P1D}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    reasons = []
    for _ in range(3):
        stop = stop_of(fan_out(Together(2)).invoke(ASK, STEPS))
        reasons.append(stop and stop.reason)
    assert reasons == [None, None, "quota_exceeded"]


def test_batch_of_a_model_is_several_turns() -> None:
    """`batch` sends its requests concurrently."""
    enable(max_turns=4)
    model = Together(4)

    def work(_: Any) -> dict[str, Any]:
        return {"messages": model.batch(["go"] * 9)}

    graph: Any = (
        StateGraph(MessagesState).add_node("work", work).add_edge(START, "work").compile(name="b")
    )
    state = graph.invoke(ASK, STEPS)
    assert (model.calls, halt_of(state).turns) == (4, 4)


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_runnable_parallel_in_a_node_is_halted(how: str) -> None:
    """Its branches run in threads, or tasks, of the node."""
    enable(max_turns=2)
    models = {name: looping() for name in "abc"}
    parallel = RunnableParallel(**models) | RunnableLambda(lambda _: AIMessage("done"))

    def work(state: MessagesState) -> dict[str, Any]:
        return {"messages": [parallel.invoke(state["messages"])]}

    graph: Any = (
        StateGraph(MessagesState).add_node("work", work).add_edge(START, "work").compile(name="p")
    )
    state = CALLS[how](graph)
    assert sum(each.calls for each in models.values()) == 2
    assert halt_of(state).reason == "max_turns"
    assert is_synthetic(state["messages"][-1])


class TwoTalks(TypedDict):
    """A state with two conversations."""

    messages: Annotated[list[Any], operator.add]
    left: Annotated[list[Any], operator.add]
    right: Annotated[list[Any], operator.add]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no task groups")
@pytest.mark.parametrize("depth", [1, 2])
def test_task_group_in_a_node_is_halted(depth: int, events: list[Event]) -> None:
    """It wraps the halts of its tasks, which no graph must raise as they are."""
    enable(max_model_calls=3, observers=[events.append])
    model = ScriptedChatModel(endless(says("text")))

    async def grouped(depth: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(grouped(depth - 1) if depth > 1 else model.ainvoke("go"))

    async def node(_: Any) -> None:
        await grouped(depth)

    builder: Any = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node")
    state = asyncio.run(builder.compile(name="boss").ainvoke(ASK))
    assert halt_of(state).reason == "max_model_calls"
    assert [each.action for each in events if isinstance(each, Stop)] == ["halted"]


def test_tools_of_parallel_agents_in_one_graph_count_once(events: list[Event]) -> None:
    """Two loops of models and tools side by side in the supersteps of one graph."""
    from langchain_core.tools import tool
    from langgraph.graph import END
    from langgraph.prebuilt import ToolNode

    @tool
    def look(query: str = "") -> str:
        """Search."""
        return query

    enable(max_turns=40, max_tool_calls=40, observers=[events.append])
    builder = StateGraph(TwoTalks)

    def add(side: str) -> None:
        script = [uses("look", arguments={"query": f"{side}{n}"}) for n in range(5)]
        model = ScriptedChatModel([*script, says("done")])
        ids = iter(f"{side}-{n}" for n in range(9))

        def think(state: Any) -> dict[str, Any]:
            answer = model.invoke([("user", "go"), *state[side]])
            for call in answer.tool_calls:
                call["id"] = next(ids)
            return {side: [answer]}

        builder.add_node(f"think-{side}", think)
        builder.add_node(f"tools-{side}", ToolNode([look], messages_key=side))
        builder.add_edge(START, f"think-{side}")
        builder.add_edge(f"tools-{side}", f"think-{side}")
        builder.add_conditional_edges(
            f"think-{side}",
            lambda state: f"tools-{side}" if state[side][-1].tool_calls else END,
            [f"tools-{side}", END],
        )

    add("left")
    add("right")
    state = builder.compile(name="two").invoke({"messages": [], "left": [], "right": []}, STEPS)
    assert stop_of(state) is None
    assert unanswered(state["left"]) == unanswered(state["right"]) == []
    used = [each for each in events if isinstance(each, ToolCall)]
    assert [each.status for each in used] == ["success"] * 10
    (stop,) = [each for each in events if isinstance(each, Stop)]
    assert (stop.turns, stop.tool_calls, stop.model_calls) == (12, 10, 12)


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_one_graph_object_serves_many_callers(how: str) -> None:
    """A server has one graph for all its users, whose budgets are apart."""
    enable(max_turns=3)
    model = looping()
    graph = agent(model, checkpointer=InMemorySaver())
    threads = [config(str(number)) for number in range(20)]
    if how == "threads":
        with ThreadPoolExecutor(20) as pool:
            states = list(pool.map(lambda each: graph.invoke(ASK, each), threads))
    else:

        async def main() -> list[Any]:
            return await asyncio.gather(*(graph.ainvoke(ASK, each) for each in threads))

        states = asyncio.run(main())
    assert model.calls == 60
    assert {halt_of(state).turns for state in states} == {3}
    assert all(graph.get_state(each).next == () for each in threads)


@pytest.mark.parametrize(
    "is_async",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11), reason="LangGraph has no async tasks on Python 3.10"
            ),
        ),
    ],
)
def test_tasks_of_the_functional_api_are_halted(*, is_async: bool) -> None:
    """Futures of `@task` run concurrently; the error of the limit reaches the caller."""
    enable(max_turns=4)
    model = Together(4, all_come=not is_async)

    @task
    def work(_: int) -> str:
        return str(model.invoke("go").text)

    @task
    async def awork(_: int) -> str:
        return str((await model.ainvoke("go")).text)

    @entrypoint()
    def flow(_: str) -> list[str]:
        return [each.result() for each in [work(n) for n in range(9)]]

    @entrypoint()
    async def aflow(_: str) -> list[str]:
        return list(await asyncio.gather(*[awork(n) for n in range(9)]))

    run: Any = flow
    arun: Any = aflow
    calling = run.invoke if not is_async else lambda *asked: asyncio.run(arun.ainvoke(*asked))
    with pytest.raises(LimitReachedError):
        calling("go", STEPS)
    assert model.calls == 4


def test_tree_cap_holds_over_agents_in_branches(events: list[Event]) -> None:
    """`Send` to agents as nodes: each is an invocation of the tree."""
    enable(tree=Limits(max_turns=7), observers=[events.append])
    helper = looping()
    graph: Any = (
        StateGraph(MessagesState)
        .add_node("helper", agent(helper, name="helper"))
        .add_conditional_edges(
            START, lambda state: [Send("helper", {"messages": state["messages"]}) for _ in range(5)]
        )
        .compile(name="fan-out", checkpointer=InMemorySaver())
    )
    state = graph.invoke(ASK, config("1"))
    assert helper.calls == 7
    assert unanswered(state["messages"]) == []
    assert len([each for each in events if isinstance(each, ModelCall)]) == 7
