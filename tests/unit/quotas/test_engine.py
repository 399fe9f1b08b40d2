"""A quota is only used by calls that it has admitted, however their wait for it ends."""

from __future__ import annotations

import asyncio
import gc
import operator
import threading
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest
from agents import Agent as AgentOfOpenAI
from agents import Runner
from langchain_core.messages import HumanMessage
from langgraph.graph import START, StateGraph
from strands import Agent, tool

import otel_limits
from otel_limits import Event, ModelCall, stop_of
from otel_limits.bindings.waits import wait_for
from otel_limits.quotas.engine import NEED_RENEWALS, InvocationState
from otel_limits.quotas.store import NEED_SECONDS
from otel_limits.quotas.wait_queues import LOOK_SECONDS
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.registry import MAX_AGE_SECONDS
from otel_limits.testing import (
    ScriptedAgentsModel,
    ScriptedChatModel,
    ScriptedModel,
    endless,
    says,
    uses,
)
from tests.openai_agents.runs import UNTRACED
from tests.quotas.gates import MAX_WAIT, TIMEOUT, quota
from tests.quotas.waiters import DecisionRecorder, Held, run_others, start, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from otel_limits.testing import FakeTime
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold
    from tests.quotas.gates import OpenGate

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


# --- calls that wait for the first one of their invocation ----------------------------------------

RUNS = quota("runs", "invocations", amount=9)
SLOT = quota("slot")


@pytest.mark.parametrize("invocation", ["", "parallel"], ids=["another", "the same"])
def test_synchronous_call_does_not_wait_for_calls_that_it_blocks(
    invocation: str, fake_time: FakeTime, open_gate: OpenGate
) -> None:
    """They are in its own thread, and could only be admitted after it."""
    gate = open_gate(RUNS, SLOT)

    async def run() -> None:
        holder, waiting = gate.request(), gate.request("parallel", "1")
        blocking = gate.request(invocation, "2")
        assert await gate.admit(holder)
        task = asyncio.create_task(gate.admit(waiting))
        await until(lambda: gate.recorder.waiting == 1)
        decided, begun = threading.Event(), CLOCK.now()

        def release() -> None:
            is_released = False
            # The store leaves room for the call that has waited longer, until that seems dead.
            while not decided.wait(0.005):
                if gate.recorder.waiting == 2 and not is_released:
                    is_released = True
                    asyncio.run(gate.settle(holder))
                fake_time.advance(NEED_SECONDS / NEED_RENEWALS)

        releasing = threading.Thread(target=release)
        releasing.start()
        try:
            assert wait_for(gate.admit(blocking))
        finally:
            decided.set()
            releasing.join()
        assert not task.done()
        assert CLOCK.now() - begun < MAX_WAIT
        await gate.settle(blocking)
        assert await task
        await gate.settle(waiting)
        assert (gate.used("runs"), gate.used("slot")) == ((2 if invocation else 3, 0), (0, 0))

    asyncio.run(run())


def test_call_waits_for_the_first_one_no_longer_than_that_waits_for_quota(
    fake_time: FakeTime, open_gate: OpenGate
) -> None:
    """The thread of the first one may be blocked for longer."""
    gate = open_gate(RUNS, SLOT)

    async def run() -> None:
        assert await gate.admit(gate.request())
        blocked = gate.engine.admit_by_quotas(gate.request("parallel", "1"))
        blocked.send(None)  # nothing continues it, as if its event loop was blocked
        task = asyncio.create_task(gate.admit(gate.request("parallel", "2")))
        await until(lambda: gate.recorder.waits == 1)
        for _ in range(int(MAX_WAIT / TIMEOUT)):
            assert gate.recorder.waits == 1
            fake_time.advance(TIMEOUT)
            await asyncio.sleep(0.002)
        await until(lambda: gate.recorder.waits == 2)
        task.cancel()
        blocked.close()

    asyncio.run(run())


def test_call_waits_for_the_store_reply_to_the_first_one_for_one_timeout(
    fake_time: FakeTime, open_gate: OpenGate
) -> None:
    """However long it may wait for quota."""
    gate = open_gate(RUNS, quota("slot", amount=2))

    async def run() -> None:
        gate.executor.is_silent = True
        blocked = gate.engine.admit_by_quotas(gate.request("parallel", "1"))
        blocked.send(None)
        gate.executor.is_silent = False
        task = asyncio.create_task(gate.admit(gate.request("parallel", "2")))
        await run_others()
        assert not task.done()
        fake_time.advance(TIMEOUT)
        assert await task
        blocked.close()

    asyncio.run(run())


@pytest.mark.parametrize("end", ["disabled", "cancelled", "stopped"])
def test_wait_for_the_first_call_ends_with(
    end: str, fake_time: FakeTime, open_gate: OpenGate
) -> None:
    """Without an end of the first one, whose thread may be blocked."""
    gate = open_gate(RUNS, SLOT)
    cancelled: list[bool] = []

    async def run() -> None:
        assert await gate.admit(gate.request())
        blocked = gate.engine.admit_by_quotas(gate.request("parallel", "1"))
        blocked.send(None)
        request = gate.request("parallel", "2", is_cancelled=lambda: bool(cancelled))
        tasks = [asyncio.create_task(gate.admit(request)) for _ in range(2)]
        await run_others()
        assert not any(task.done() for task in tasks)
        if end == "disabled":
            gate.close()
        elif end == "cancelled":
            cancelled.append(True)
            fake_time.advance(LOOK_SECONDS)
        else:
            gate.stop(request)
        assert await asyncio.gather(*tasks) == [True, True]
        assert gate.recorder.waits == 1
        blocked.close()

    asyncio.run(run())


# --- reservations ---------------------------------------------------------------------------------


def test_calls_of_a_request_are_renewed_together(open_gate: OpenGate) -> None:
    """They share a reservation."""
    gate = open_gate(quota(amount=2))
    request = gate.request("i", "1", others=(gate.request("i", "2"),))
    assert asyncio.run(gate.admit(request))
    assert len(gate.engine.client.in_flight()) == 1


def test_next_request_settles_every_call_whose_end_was_not_observed(open_gate: OpenGate) -> None:
    """A request may be several calls."""
    gate = open_gate(quota(amount=2))
    request = gate.request("i", "1", others=(gate.request("i", "2"),))
    for _ in range(2):
        assert asyncio.run(gate.admit(request))
    assert gate.used() == (0, 2)


def states() -> list[Any]:
    """The states that are kept of invocations."""
    return [each for each in gc.get_objects() if isinstance(each, InvocationState)]


@pytest.mark.parametrize("late", ["side call", "admitted", "refused", "unsent", "uncounted"])
def test_late_calls_leave_nothing_behind(late: str, open_gate: OpenGate) -> None:
    """Their invocation has ended before, and does not end again."""
    gate = open_gate(RUNS, quota(amount=1, on_exceeded="refuse"))
    request = gate.request()
    other = gate.request()
    known = len(states())

    async def run() -> None:
        assert await gate.admit(request)
        await gate.settle(request)
        assert len(states()) == known + 1
        gate.stop(request)
        assert len(states()) == known
        if late == "side call":
            gate.record(request)
        elif late == "refused":
            assert await gate.admit(other)
            assert not await gate.admit(request)
            gate.stop(other)
        else:
            assert await gate.admit(request)
            await gate.settle(request, is_sent=late == "admitted")

    asyncio.run(run())
    assert len(states()) == known


def test_side_call_before_the_first_call_counts_the_invocation(open_gate: OpenGate) -> None:
    """Once."""
    gate = open_gate(RUNS)
    request = gate.request()
    gate.record(request)
    assert asyncio.run(gate.admit(request))
    assert gate.used("runs") == (1, 0)


# --- calls that bounded memory, or `disable()`, leave without limits ------------------------------


def holding(
    make_agent: MakeAgent, before: Callable[[], object] = lambda: None
) -> tuple[Any, Callable[[], Awaitable[None]]]:
    """A tool that lets another agent hold the slot, and a function that ends its call."""
    model = Held()
    tasks: list[asyncio.Task[Any]] = []

    @tool
    async def look() -> str:
        """Let another agent hold the slot."""
        before()
        tasks.append(start(make_agent(model, name="holds"), "holds"))
        await until(lambda: bool(model.asked))
        return "nothing"

    async def release() -> None:
        model.may_answer.set()
        assert (await tasks[0]).stop_reason == "end_turn"

    return look, release


def test_waiting_call_of_an_evicted_invocation_is_sent(
    hold: Hold, make_agent: MakeAgent, fake_time: FakeTime
) -> None:
    """It has not ended: bounded memory has forgotten it."""
    recorder = DecisionRecorder()
    hold({"q": {"concurrency": 1, "on_exceeded": "wait"}}, observers=[recorder])
    look, release = holding(make_agent, lambda: fake_time.advance(MAX_AGE_SECONDS - 1))
    model = ScriptedModel([uses("look"), says("done"), says("done")])

    async def run() -> None:
        oldest = start(make_agent(model, tools=[look]))
        await until(lambda: recorder.waiting == 1)
        fake_time.advance(2)
        newest = start(make_agent(model, name="newest"))
        await until(lambda: recorder.waiting == 2)
        fake_time.advance(LOOK_SECONDS)
        await run_others()
        assert (model.calls, recorder.waiting) == (1, 2)
        await release()
        results = await asyncio.gather(oldest, newest)
        assert [each.stop_reason for each in results] == ["end_turn"] * 2

    asyncio.run(run())
    assert (model.calls, used(), recorder.waiting) == (3, (0, 0), 0)


def test_last_answer_that_waits_when_quotas_are_disabled_is_sent_as_usual(
    hold: Hold, make_agent: MakeAgent
) -> None:
    """Nothing limits its agent any longer."""
    recorder = DecisionRecorder()
    slot = {"concurrency": 1, "on_exceeded": "wait"}
    q = {"model_calls": 1, "window": "P366D", "where": {"agent": "wraps"}}
    hold({"slot": slot, "q": q}, observers=[recorder], defaults={"action": "wrap_up"})
    look, release = holding(make_agent)
    model = ScriptedModel([uses("look"), says("done")])

    async def run() -> None:
        task = start(make_agent(model, tools=[look], name="wraps"))
        await until(lambda: recorder.waiting == 1)
        otel_limits.disable()
        assert (await task).stop_reason == "end_turn"
        await release()

    asyncio.run(run())
    assert model.calls == 2
