"""A quota is only used by calls that it has admitted, however their wait for it ends."""

from __future__ import annotations

import asyncio
import operator
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest
from agents import Agent as AgentOfOpenAI
from agents import Runner
from langchain_core.messages import HumanMessage
from langgraph.graph import START, StateGraph
from strands import Agent

import otel_limits
from otel_limits import Event, ModelCall, stop_of
from otel_limits.quotas.wait_queues import LOOK_SECONDS
from otel_limits.testing import (
    ScriptedAgentsModel,
    ScriptedChatModel,
    ScriptedModel,
    endless,
    says,
)
from tests.openai_agents.runs import UNTRACED
from tests.quotas.waiters import DecisionRecorder, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.testing import FakeTime
    from tests.quotas.fixtures import Hold

ONE_CALL = {"model_calls": 1, "window": "P366D", "on_exceeded": "wait", "max_wait": "8784h"}
ONE_RUN = {"invocations": 1, "window": "P366D", "on_exceeded": "wait", "max_wait": "8784h"}
"""Their windows, and waits, outlast the test."""


class State(TypedDict):
    """The state of a graph: what its nodes return."""

    texts: Annotated[list[str], operator.add]


def graph_of(*nodes: Any) -> Any:
    """A graph of parallel nodes."""
    graph = StateGraph(State)
    for number, node in enumerate(nodes):
        graph.add_node(f"node-{number}", node)
        graph.add_edge(START, f"node-{number}")
    return graph.compile(name="graph")


def used(quota: str = "q") -> tuple[Any, Any]:
    """The used and reserved amounts of a quota."""
    state = otel_limits.remaining(quota)
    return state.used, state.reserved


@pytest.mark.parametrize("end", ["the caller leaves", "another node fails"])
def test_call_that_waits_is_not_sent_after_the_end(
    end: str, hold: Hold, fake_time: FakeTime
) -> None:
    """Its thread cannot be cancelled with the graph, and must not retry it."""
    recorder = DecisionRecorder()
    hold({"q": ONE_CALL}, observers=[recorder])
    model = ScriptedChatModel(endless(says("done")))
    ended: list[str] = []

    def work(_: Any) -> dict[str, Any]:
        try:
            return {"texts": [model.invoke("go").text]}
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    async def run() -> None:
        fails = asyncio.Event()

        async def fail(_: Any) -> dict[str, Any]:
            await fails.wait()
            raise ValueError(end)

        await graph_of(work).ainvoke({"texts": []})
        task = asyncio.create_task(graph_of(work, fail).ainvoke({"texts": []}))
        await until(lambda: recorder.waiting == 1)
        if end == "the caller leaves":
            task.cancel()
        fails.set()
        with pytest.raises((asyncio.CancelledError, ValueError)):
            await task
        fake_time.advance(LOOK_SECONDS)
        await until(lambda: bool(ended))

    asyncio.run(run())
    assert ended == ["CancelledError"]
    assert (model.calls, used(), recorder.waiting) == (1, (1, 0), 0)
    assert recorder.decisions() == ["admitted"]


def of_strands() -> tuple[Any, Callable[[], Any]]:
    """A model, and an agent of Strands."""
    model = ScriptedModel(endless(says("done")))
    return model, lambda: Agent(model=model, callback_handler=None).invoke_async("go")


def of_langchain() -> tuple[Any, Callable[[], Any]]:
    """A model, and a graph whose node is a coroutine."""
    model = ScriptedChatModel(endless(says("done")))

    async def work(_: Any) -> dict[str, Any]:
        return {"texts": [(await model.ainvoke("go")).text]}

    return model, lambda: graph_of(work).ainvoke({"texts": []})


def of_openai() -> tuple[Any, Callable[[], Any]]:
    """A model, and an agent of the OpenAI Agents SDK."""
    model = ScriptedAgentsModel(endless(says("done")))
    agent = AgentOfOpenAI(name="boss", model=model)
    return model, lambda: Runner.run(agent, "go", run_config=UNTRACED)


@pytest.mark.parametrize("framework", [of_strands, of_langchain, of_openai])
@pytest.mark.parametrize("quota", [ONE_CALL, ONE_RUN], ids=["model_calls", "invocations"])
def test_call_whose_task_is_cancelled_in_the_queue_leaves_nothing(
    framework: Callable[[], tuple[Any, Callable[[], Any]]], quota: dict[str, Any], hold: Hold
) -> None:
    """The next one waits as before."""
    recorder = DecisionRecorder()
    hold({"q": quota}, observers=[recorder])
    model, call = framework()

    async def run() -> None:
        await call()
        for _ in range(3):
            task = asyncio.create_task(call())
            await until(lambda: recorder.waiting == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (model.calls, used(), recorder.waiting) == (1, (1, 0), 0)

    asyncio.run(run())


def test_retry_of_a_cancelled_first_call_waits_for_its_invocation(hold: Hold) -> None:
    """The cancelled call has not counted the invocation."""
    recorder = DecisionRecorder()
    hold({"q": ONE_RUN}, observers=[recorder])
    model = ScriptedChatModel(endless(says("done")))

    async def work(state: Any) -> dict[str, Any]:
        for attempt in range(1, 4):
            task = asyncio.ensure_future(model.ainvoke("go"))
            if not state["texts"]:
                return {"texts": [(await task).text]}
            await until(lambda: recorder.waits == attempt)  # noqa: B023
            assert (recorder.waiting, model.calls) == (1, 1)
            task.cancel()
            await asyncio.wait([task])
        return {"texts": ["gave up"]}

    async def run() -> Any:
        await graph_of(work).ainvoke({"texts": []})
        return await graph_of(work).ainvoke({"texts": ["again"]})

    assert asyncio.run(run())["texts"][-1] == "gave up"
    assert (model.calls, used()) == (1, (1, 0))


def test_parallel_calls_wait_with_the_first_of_their_invocation(hold: Hold) -> None:
    """It decides for all of them, and if it is cancelled, the next one does."""
    recorder = DecisionRecorder()
    hold({"q": ONE_RUN, "all": {"concurrency": 9}}, observers=[recorder])
    model = ScriptedChatModel(endless(says("done")))
    tasks: list[asyncio.Task[Any]] = []

    async def work(_: Any) -> dict[str, Any]:
        tasks.append(asyncio.create_task(model.ainvoke("go")))
        try:
            return {"texts": [(await tasks[-1]).text]}
        except asyncio.CancelledError:
            return {"texts": ["cancelled"]}

    async def run() -> None:
        await graph_of(work, work, work).ainvoke({"texts": []})
        assert (model.calls, used()) == (3, (1, 0))
        del tasks[:]
        graph = asyncio.create_task(graph_of(work, work, work).ainvoke({"texts": []}))
        for number in range(3):
            await until(lambda: (recorder.waits, recorder.waiting) == (number + 1, 1))  # noqa: B023
            assert [each.done() for each in tasks].count(False) == 3 - number
            tasks[number].cancel()
        assert (await graph)["texts"] == ["cancelled"] * 3

    asyncio.run(run())
    assert (model.calls, used(), used("all")) == (3, (1, 0), (0, 0))


SEVERAL = {
    "refused": ({"model_calls": 2, "window": "P366D"}, 3, 1, 0),
    "waits in vain": ({"concurrency": 2, "on_exceeded": "wait", "max_wait": "8784h"}, 3, 1, 0),
    "wait": ({"concurrency": 2, "on_exceeded": "wait", "max_wait": "8784h"}, 2, 3, 6),
    "wait for tokens": ({"tokens": 60, "window": "P366D", "on_exceeded": "wait"}, 2, 2, 4),
}
"""A quota, the prompts of a request, the number of parallel requests, and calls that are sent."""


@pytest.mark.parametrize("case", SEVERAL)
@pytest.mark.parametrize("method", ["generate", "agenerate"])
def test_calls_of_a_request_are_admitted_together(method: str, case: str, hold: Hold) -> None:
    """They never wait for each other, and if they are refused, none of them keeps its quota."""
    quota, prompts, requests, sent = SEVERAL[case]
    events: list[Event] = []
    hold({"q": quota, "runs": {"invocations": 9, "window": "P366D"}}, observers=[events.append])
    model = ScriptedChatModel(endless(says("done")), max_tokens=5)
    after_refusal = []

    async def work(_: Any) -> dict[str, Any]:
        given: Any = [[HumanMessage("go")]] * prompts
        try:
            if method == "generate":
                result = await asyncio.to_thread(model.generate, given)
            else:
                result = await model.agenerate(given)
        except BaseException:
            after_refusal.append(used())
            raise
        return {"texts": [each[0].text for each in result.generations]}

    async def run() -> list[Any]:
        graphs = (graph_of(work).ainvoke({"texts": []}) for _ in range(requests))
        return await asyncio.gather(*graphs, return_exceptions=True)

    results = asyncio.run(run())
    assert model.calls == sent
    calls = [each for each in events if isinstance(each, ModelCall)]
    charged = {"model_calls": len(calls), "tokens": sum(each.usage.total for each in calls)}
    assert len(calls) == sent
    unit = otel_limits.remaining("q").unit
    assert used() == (charged.get(unit, 0), 0)
    if sent:
        assert used("runs") == (requests, 0)
    else:
        assert after_refusal == [(0, 0)]
        stop = stop_of(results[0])
        assert stop is not None
        assert "needs 3" in stop.sentence
