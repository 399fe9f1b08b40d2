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
from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager
from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph, add_messages
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel

import otel_limits
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


ASYNC_TASKS = pytest.param(
    True,
    marks=pytest.mark.skipif(
        sys.version_info < (3, 11), reason="LangGraph has no async tasks on Python 3.10"
    ),
)


@pytest.mark.parametrize("is_async", [False, ASYNC_TASKS])
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


# --- work that was paid for -----------------------------------------------------------------------


class Summaries(MessagesState):
    """A conversation, and what branches have found."""

    found: Annotated[list[str], operator.add]


def map_reduce(model: Any, *, is_async: bool = False, branches: int = 10, **options: Any) -> Any:
    """A graph that collects what its branches find, and then ends without a model call."""

    def work(state: Any) -> Any:
        return {"found": [model.invoke(f"find {state['number']}").text]}

    async def awork(state: Any) -> Any:
        answer = await model.ainvoke(f"find {state['number']}")
        await asyncio.sleep(0)  # such as a database
        return {"found": [answer.text]}

    def reduce(state: Any) -> Any:
        return {"messages": [AIMessage(f"report of {len(state['found'])}")]}

    return (
        StateGraph(Summaries)
        .add_node("work", awork if is_async else work)
        .add_node("reduce", reduce)
        .add_conditional_edges(
            START, lambda _: [Send("work", {"number": n}) for n in range(branches)], ["work"]
        )
        .add_edge("work", "reduce")
        .compile(name="map-reduce", **options)
    )


def finding() -> ScriptedChatModel:
    """A model that always finds something else."""
    return ScriptedChatModel(says(f"finding {n}") for n in range(40))


ONE_BY_ONE = {"max_concurrency": 1}
ASKED = {**ASK, "found": ["known"]}
KNOWN = ["known", *(f"finding {n}" for n in range(6))]


@pytest.mark.parametrize("how", sorted(CALLS))
@pytest.mark.parametrize("saver", [None, InMemorySaver], ids=["no saver", "saver"])
def test_cut_fan_out_returns_what_was_paid_for(how: str, saver: Any) -> None:
    """Its findings cost as much as those of a graph that was not cut."""
    enable(tree=Limits(max_model_calls=6))
    model = finding()
    graph = map_reduce(model, is_async=how.startswith("a"), checkpointer=saver and saver())
    state = CALLS[how](graph, ASKED, config("1", **ONE_BY_ONE))
    assert state["found"] == KNOWN
    assert halt_of(state).reason == "max_model_calls"
    assert [each.type for each in state["messages"]] == ["human", "ai"]
    assert model.calls == 6


@pytest.mark.parametrize("action", ["halt", "raise", "wrap_up"])
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_refused_branches_stay_pending(action: Any, how: str, durability: Any) -> None:
    """`invoke(None)` pays only for them, with a new budget."""
    enable(tree=Limits(max_model_calls=6), action=action)
    model = finding()
    graph = map_reduce(model, is_async=how == "ainvoke", checkpointer=InMemorySaver())
    options = config("1", **ONE_BY_ONE)

    def call(given: Any) -> Any:
        if how == "ainvoke":
            return asyncio.run(graph.ainvoke(given, options, durability=durability))
        return graph.invoke(given, options, durability=durability)

    with contextlib.suppress(LimitReachedError):
        state = call(ASKED)
        assert action != "raise"
        assert state["found"] == graph.get_state(options).values["found"]
    stored = graph.get_state(options)
    assert (stored.next, stored.values["found"]) == (("work",) * 4, KNOWN)
    state = call(None)
    assert (stop_of(state), model.calls) == (None, 10)
    assert [each.text for each in state["messages"]] == ["go", "report of 11"]
    assert graph.get_state(options).next == ()


def test_branches_that_are_cut_again_keep_what_was_paid_for() -> None:
    """Each further call pays for as much as its budget allows."""
    enable(tree=Limits(max_model_calls=4))
    model = finding()
    graph = map_reduce(model, checkpointer=InMemorySaver())
    options = config("1", **ONE_BY_ONE)
    found = [
        len(graph.invoke(given, options)["found"]) for given in ({**ASK, "found": []}, None, None)
    ]
    assert (found, model.calls) == ([4, 8, 10], 10)


def test_new_input_after_a_cut_fan_out_begins_anew() -> None:
    """LangGraph drops what is pending."""
    enable(tree=Limits(max_model_calls=6))
    model = finding()
    graph = map_reduce(model, checkpointer=InMemorySaver())
    options = config("1", **ONE_BY_ONE)
    graph.invoke(ASKED, options)
    otel_limits.disable()
    graph.invoke(ASK, options)
    assert model.calls == 16


class AfterAll(ScriptedChatModel):
    """A model whose asynchronous answers arrive once a number of requests are in flight."""

    def __init__(self, parties: int) -> None:
        """Wait for that many."""
        super().__init__(says(f"finding {n}") for n in range(40))
        self._parties, self._event = parties, asyncio.Event()

    async def _agenerate(self, *args: Any, **options: Any) -> Any:
        result = await super()._agenerate(*args, **options)
        if self.calls >= self._parties:
            self._event.set()
        await self._event.wait()
        await asyncio.sleep(0)  # the refusals of the others come first
        return result


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_calls_in_flight_at_a_cut_keep_their_results(how: str) -> None:
    """Their requests were sent, and are billed: LangGraph would cancel their branches."""
    enable(tree=Limits(max_model_calls=6))
    is_async = how == "ainvoke"
    model = AfterAll(6) if is_async else Together(6)
    graph = map_reduce(model, is_async=is_async, checkpointer=InMemorySaver())
    state = CALLS[how](graph, ASKED, config("1"))
    assert (len(state["found"]), model.calls) == (7, 6)
    assert graph.get_state(config("1")).next == ("work",) * 4
    otel_limits.disable()
    if not is_async:
        model = Together(4)
        graph = map_reduce(model, checkpointer=graph.checkpointer)
    state = CALLS[how](graph, None, config("1"))
    assert len(state["found"]) == 11
    assert model.calls == (10 if is_async else 4)


def test_cut_step_of_different_nodes_keeps_what_was_paid_for() -> None:
    """Edges lead to parallel nodes as well as `Send` does."""
    enable(tree=Limits(max_model_calls=2))
    model = finding()
    builder: Any = StateGraph(Summaries)
    for name in "abc":
        builder.add_node(name, lambda _: {"found": [model.invoke("go").text]})
        builder.add_edge(START, name)
    builder.add_node("last", lambda state: {"messages": [AIMessage(str(len(state["found"])))]})
    builder.add_edge(["a", "b", "c"], "last")
    graph = builder.compile(name="edges", checkpointer=InMemorySaver())
    options = config("1", **ONE_BY_ONE)
    assert graph.invoke({**ASK, "found": []}, options)["found"] == ["finding 0", "finding 1"]
    assert graph.get_state(options).next == ("c",)
    state = graph.invoke(None, options)
    assert (state["messages"][-1].text, model.calls) == ("3", 3)


@pytest.mark.parametrize("saver", [None, InMemorySaver], ids=["no saver", "saver"])
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("way", ["node", "call"])
def test_graph_around_a_cut_fan_out_has_what_was_paid_for(saver: Any, how: str, way: str) -> None:
    """The graph within has ended there, so nothing of it is pending."""
    enable(tree=Limits(max_model_calls=6))
    model = finding()
    inner = map_reduce(model, is_async=how == "ainvoke")

    async def acall(state: Any) -> Any:
        return {"found": (await inner.ainvoke(state, ONE_BY_ONE))["found"]}

    call = {"node": inner, "invoke": lambda state: inner.invoke(state, ONE_BY_ONE)}
    node = inner if way == "node" else acall if how == "ainvoke" else call["invoke"]
    graph: Any = (
        StateGraph(Summaries)
        .add_node("inner", node)
        .add_node("last", lambda _: {"messages": [AIMessage("done")]})
        .add_edge(START, "inner")
        .add_edge("inner", "last")
        .compile(name="outer", checkpointer=saver and saver())
    )
    options = config("1", **ONE_BY_ONE)
    state = CALLS[how](graph, {**ASK, "found": []}, options)
    assert state["found"] == KNOWN[1:]
    assert model.calls == 6
    if saver:
        stored = graph.get_state(options)
        assert (stored.next, stored.values["found"]) == ((), KNOWN[1:])


def test_agents_in_branches_of_a_cut_graph_are_paid_for_once() -> None:
    """An agent that was halted has ended: its branch is not pending."""
    enable(tree=Limits(max_model_calls=3))
    model = ScriptedChatModel(says(f"finding {n}") for n in range(40))
    helper = agent(model, name="helper")

    def ask(state: Any) -> Any:
        return {"found": [helper.invoke(state)["messages"][-1].text]}

    graph: Any = (
        StateGraph(Summaries)
        .add_node("ask", ask)
        .add_conditional_edges(START, lambda _: [Send("ask", ASK) for _ in range(4)], ["ask"])
        .compile(name="outer", checkpointer=InMemorySaver())
    )
    options = config("1", **ONE_BY_ONE)
    state = graph.invoke({**ASK, "found": []}, options)
    assert state["found"][:3] == [f"finding {n}" for n in range(3)]
    assert (graph.get_state(options).next, model.calls) == ((), 3)


def test_conversation_that_waits_for_tools_is_not_left_pending() -> None:
    """No vendor accepts a tool call without a result, and the user may go on with a message."""
    enable(tree=Limits(max_model_calls=3))
    model = ScriptedChatModel([uses("search", "search", "search"), *[says("x") for _ in range(9)]])

    def plan(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def work(call: Any) -> Any:
        return {"messages": [ToolMessage(model.invoke("go").text, tool_call_id=call["id"])]}

    graph: Any = (
        StateGraph(MessagesState)
        .add_node("plan", plan)
        .add_node("work", work)
        .add_edge(START, "plan")
        .add_conditional_edges(
            "plan", lambda s: [Send("work", each) for each in s["messages"][-1].tool_calls]
        )
        .compile(name="outer", checkpointer=InMemorySaver())
    )
    options = config("1", **ONE_BY_ONE)
    state = graph.invoke(ASK, options)
    stored = graph.get_state(options)
    assert unanswered(stored.values["messages"]) == unanswered(state["messages"]) == []
    assert [each.text for each in state["messages"]] == [
        each.text for each in stored.values["messages"]
    ]
    assert (stored.next, model.calls) == ((), 3)
    assert halt_of(stored.values).reason == "max_model_calls"


@pytest.mark.parametrize("how", ["invoke", "v2"])
@pytest.mark.parametrize("saver", [None, InMemorySaver], ids=["no saver", "saver"])
def test_result_of_a_cut_graph_has_its_form(how: str, saver: Any) -> None:
    """The output schema hides what is the graph's own."""

    class Shown(TypedDict):
        messages: Annotated[list[AnyMessage], add_messages]
        found: list[str]

    class Hidden(BaseModel):
        messages: Annotated[list[AnyMessage], add_messages]
        found: Annotated[list[str], operator.add] = []
        notes: Annotated[list[str], operator.add] = []

    enable(max_model_calls=2)
    model = finding()
    graph: Any = (
        StateGraph(Hidden, output_schema=Shown)
        .add_node("work", lambda _: {"found": [model.invoke("go").text], "notes": ["n"]})
        .add_conditional_edges(START, lambda _: [Send("work", {})] * 3, ["work"])
        .compile(name="typed", checkpointer=saver and saver())
    )
    state = CALLS[how](graph, ASK, config("1", **ONE_BY_ONE))
    assert sorted(state) == ["found", "messages"]
    assert state["found"] == ["finding 0", "finding 1"]


class AwaitedSaver(InMemorySaver):
    """A saver whose writes can be awaited: LangGraph may return a result before it stores it."""

    def __init__(self) -> None:
        """Start with nothing stored."""
        super().__init__()
        self._changed = threading.Condition()
        self._stored: list[object] = []

    def put_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        """Store the writes of a task."""
        super().put_writes(config, writes, task_id, task_path)
        with self._changed:
            self._stored += [value for _, value in writes]
            self._changed.notify_all()

    def stored(self, result: str) -> str:
        """Return a result once it is stored."""
        with self._changed:
            assert self._changed.wait_for(lambda: result in self._stored, PATIENCE_SECONDS)
        return result


@pytest.mark.parametrize("is_async", [False, ASYNC_TASKS])
def test_finished_tasks_of_the_functional_api_are_not_paid_for_again(*, is_async: bool) -> None:
    """The results of a function's tasks are stored, as they are after any exception."""
    enable(max_model_calls=4)
    model, saver = finding(), AwaitedSaver()

    @task
    def work(_: int) -> str:
        return str(model.invoke("go").text)

    @task
    async def awork(_: int) -> str:
        return str((await model.ainvoke("go")).text)

    @entrypoint(checkpointer=saver)
    def flow(_: str) -> list[str]:
        return [saver.stored(work(n).result()) for n in range(6)]

    @entrypoint(checkpointer=saver)
    async def aflow(_: str) -> list[str]:
        return [await asyncio.to_thread(saver.stored, await awork(n)) for n in range(6)]

    run: Any = aflow if is_async else flow
    call = CALLS["ainvoke" if is_async else "invoke"]
    with pytest.raises(LimitReachedError):
        call(run, "go", config("1"))
    assert call(run, None, config("1")) == [f"finding {n}" for n in range(6)]
    assert model.calls == 6


def test_cut_branches_of_one_key_without_a_reducer_return_the_state_before() -> None:
    """LangGraph refuses such a step once it has ended."""

    class Last(MessagesState):
        found: str

    enable(max_model_calls=2)
    model = finding()
    graph: Any = (
        StateGraph(Last)
        .add_node("work", lambda _: {"found": model.invoke("go").text})
        .add_conditional_edges(START, lambda _: [Send("work", {})] * 4, ["work"])
        .compile(name="last")
    )
    state = graph.invoke({**ASK, "found": "known"}, config(**ONE_BY_ONE))
    assert (state["found"], halt_of(state).reason) == ("known", "max_model_calls")


@pytest.mark.parametrize("how", ["invoke", AINVOKE])
def test_question_of_a_branch_stays_pending_at_a_cut(how: str) -> None:
    """Its answer continues the task, which has no budget left; the rest is pending work."""
    enable(tree=Limits(max_model_calls=2))
    model = finding()

    def work(state: Any) -> Any:
        if state["number"] == 0:
            return {"found": [f"human: {interrupt('ok?')}"]}
        return {"found": [model.invoke("go").text]}

    graph: Any = (
        StateGraph(Summaries)
        .add_node("work", work)
        .add_conditional_edges(
            START, lambda _: [Send("work", {"number": n}) for n in range(4)], ["work"]
        )
        .compile(name="asking", checkpointer=InMemorySaver())
    )
    options = config("1", **ONE_BY_ONE)
    state = CALLS[how](graph, {**ASK, "found": []}, options)
    assert (state["found"], halt_of(state).reason) == (
        ["finding 0", "finding 1"],
        "max_model_calls",
    )
    state = CALLS[how](graph, Command(resume="yes"), options)
    assert state["found"] == ["human: yes", "finding 0", "finding 1"]
    assert (halt_of(state).reason, model.calls) == ("max_model_calls", 2)
    state = CALLS[how](graph, None, options)
    assert state["found"] == ["human: yes", "finding 0", "finding 1", "finding 2"]
    assert (stop_of(state), model.calls) == (None, 3)


@pytest.mark.parametrize("how", ["invoke", AINVOKE])
def test_answered_question_of_a_branch_is_not_asked_again(how: str) -> None:
    """After a no, the thread has what was paid for, and nothing is pending."""
    enable(max_turns=2, action="ask")
    model = finding()
    graph = map_reduce(model, branches=4, checkpointer=InMemorySaver())
    options = config("1", **ONE_BY_ONE)
    assert CALLS[how](graph, {**ASK, "found": []}, options)["__interrupt__"]
    state = CALLS[how](graph, Command(resume="no"), options)
    assert (state["found"], halt_of(state).reason) == (["finding 0", "finding 1"], "max_turns")
    stored = graph.get_state(options)
    assert (stored.next, stored.interrupts, stored.values) == ((), (), state)
    assert model.calls == 2


def test_kill_does_not_wait_for_parallel_nodes() -> None:
    """A node may wait for something that never comes."""
    enable(max_turns=9)
    model = finding()

    async def wait(_: Any) -> None:
        await asyncio.Event().wait()

    async def ask(_: Any) -> Any:
        otel_limits.kill(agent="killed")
        return {"found": [(await model.ainvoke("go")).text]}

    graph: Any = (
        StateGraph(Summaries)
        .add_node("wait", wait)
        .add_node("ask", ask)
        .add_edge(START, "wait")
        .add_edge(START, "ask")
        .compile(name="killed")
    )
    ending = asyncio.wait_for(graph.ainvoke({**ASK, "found": []}), PATIENCE_SECONDS)
    assert halt_of(asyncio.run(ending)).reason == "killed"


class Starts(BaseCallbackHandler):
    """The callbacks of an application."""

    def __init__(self) -> None:
        """Note the nodes that begin."""
        self.nodes: list[str] = []

    def on_chain_start(self, *_: Any, name: str = "", **__: Any) -> None:
        """Note one."""
        self.nodes += [name] if name in ("inner", "node") else []


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("way", ["config", "manager", "graph"])
def test_callbacks_of_the_application_see_each_node_once(way: str, how: str) -> None:
    """The ends of nodes are read by a callback as well."""
    enable(max_turns=9)
    inner = (
        StateGraph(MessagesState)
        .add_node("node", lambda _: {"messages": []})
        .add_edge(START, "node")
        .compile()
    )
    graph: Any = (
        StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile()
    )
    seen = Starts()
    manager = AsyncCallbackManager if how == "ainvoke" else CallbackManager
    callbacks = manager([seen], [seen]) if way == "manager" else [seen]
    if way == "graph":
        CALLS[how](graph.with_config(callbacks=callbacks))
    else:
        CALLS[how](graph, ASK, {"callbacks": callbacks})
    assert seen.nodes == ["inner", "node"]
