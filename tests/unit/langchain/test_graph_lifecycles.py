"""Graphs that end early or late: by deadlines in tools, `disable()`, and readers in other tasks."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.tools import tool

import otel_limits
from otel_limits import (
    Event,
    KilledError,
    LimitReachedError,
    Limits,
    MaxDurationReachedError,
    ModelCall,
    Stop,
    enable,
    kill,
    stop_of,
)
from otel_limits.runs.registry import LIVE
from otel_limits.testing import FakeTime, ScriptedChatModel, endless, says, uses
from tests.langchain.graphs import (
    ASK,
    CALLS,
    STEPS,
    agent,
    halt_of,
    looping,
    search,
    unanswered,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_SECONDS = 30


class Stuck(ScriptedChatModel):
    """A model that never answers asynchronously."""

    on_call: Any = int  # a function without an effect

    async def _agenerate(self, *_: Any, **__: Any) -> Any:
        self.on_call()
        await asyncio.Event().wait()

    async def _astream(self, *_: Any, **__: Any) -> Any:
        await self._agenerate()
        yield None


STUCK: Any = Stuck


# --- deadlines and kills within tools -------------------------------------------------------------


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
def test_deadline_in_a_tool_refuses_the_next_call(
    how: str, events: list[Event], fake_time: FakeTime
) -> None:
    """The tool is waited for, and its result is kept."""
    enable(max_duration_seconds=DEADLINE_SECONDS, observers=[events.append])

    @tool
    def work() -> str:
        """Work until after the deadline."""
        fake_time.advance(DEADLINE_SECONDS)
        return "worked"

    model = ScriptedChatModel(endless(uses("work")))
    state = CALLS[how](agent(model, work))
    assert (model.calls, halt_of(state).reason) == (1, "max_duration")
    assert [each.text for each in state["messages"] if each.type == "tool"] == ["worked"]
    assert [each.reason for each in events if isinstance(each, Stop)] == ["max_duration"]


@pytest.mark.parametrize("how", ["ainvoke", "astream", "abatch"])
def test_deadline_of_a_tree_interrupts_an_agent_in_a_tool(how: str, fake_time: FakeTime) -> None:
    """The agent around it is then halted as well, with a valid conversation."""
    enable(tree=Limits(max_duration_seconds=DEADLINE_SECONDS))
    stuck = STUCK([], on_call=lambda: fake_time.advance(DEADLINE_SECONDS))
    helper = agent(stuck, name="helper")

    @tool
    async def ask() -> str:
        """Call a colleague whose vendor hangs."""
        return str(halt_of(await helper.ainvoke(ASK, STEPS)).reason)

    model = ScriptedChatModel(endless(uses("ask")))
    state = CALLS[how](agent(model, ask))
    assert (model.calls, halt_of(state).agent) == (1, "boss")
    assert unanswered(state["messages"]) == []
    assert [each.text for each in state["messages"] if each.type == "tool"] == ["max_duration"]


async def invoked(model: Any) -> None:
    """Call a model."""
    await model.ainvoke("go")


async def streamed(model: Any) -> None:
    """Read a model's stream."""
    async for _ in model.astream("go"):
        pass


@pytest.mark.parametrize("call", [invoked, streamed])
@pytest.mark.parametrize("is_handled", [True, False])
@pytest.mark.parametrize("why", ["max_duration", "killed"])
def test_side_call_past_its_end_raises_the_limit_error(
    why: str,
    call: Callable[..., Any],
    events: list[Event],
    fake_time: FakeTime,
    *,
    is_handled: bool,
) -> None:
    """A hanging vendor that a tool calls holds no invocation up."""
    limits = Limits(max_duration_seconds=DEADLINE_SECONDS) if why == "max_duration" else Limits()
    enable(limits, tree=Limits(max_turns=9), observers=[events.append])
    ends = {
        "max_duration": lambda: fake_time.advance(DEADLINE_SECONDS),
        "killed": lambda: kill(agent="boss"),
    }
    helper, raised = STUCK([], model="helper", on_call=ends[why]), []
    expected = MaxDurationReachedError if why == "max_duration" else KilledError

    @tool
    async def consult() -> str:
        """Call a model whose vendor hangs."""
        try:
            await call(helper)
        except LimitReachedError as error:
            raised.append(type(error))
            if not is_handled:
                raise
        return "no advice"

    model = ScriptedChatModel(endless(uses("consult")))
    state = CALLS["ainvoke"](agent(model, consult))
    assert (raised, model.calls, halt_of(state).reason) == ([expected], 1, why)
    assert unanswered(state["messages"]) == []
    called = [(e.model, e.kind, e.side) for e in events if isinstance(e, ModelCall)]
    assert called == [("scripted", "measured", False), ("helper", "failed", True)]


def test_kill_ends_a_synchronous_stream_of_a_tool() -> None:
    """At its next part."""
    enable(max_turns=9)
    read: list[str] = []

    @tool
    def consult() -> str:
        """Read a stream, and kill the agent meanwhile."""
        try:
            for part in ScriptedChatModel([uses("a", "b", "c", "d")]).stream("go"):
                read.append(str(part.text))
                kill(agent="boss")
        except KilledError:
            return "killed"
        return "not killed"

    state = agent(ScriptedChatModel(endless(uses("consult"))), consult).invoke(ASK, STEPS)
    assert [each.text for each in state["messages"] if each.type == "tool"] == ["killed"]
    assert (len(read), halt_of(state).reason) == (1, "killed")


def test_kill_ends_a_side_call_that_is_streamed_within_invoke(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """LangChain streams for a reader of messages, and only logs errors of its callbacks."""
    enable(max_turns=9)
    given: list[int] = []

    class Killing(ScriptedChatModel):
        def _stream(self, *args: Any, **options: Any) -> Any:
            for part in super()._stream(*args, **options):
                kill(agent="boss")
                given.append(1)
                yield part

    made: Any = Killing

    @tool
    def consult() -> str:
        """Call a model that streams."""
        try:
            made([uses("a", "b", "c", "d")]).invoke("go")
        except KilledError:
            return "killed"
        return "not killed"

    graph = agent(ScriptedChatModel(endless(uses("consult"))), consult)
    *_, (_, state) = graph.stream(ASK, STEPS, stream_mode=["messages", "values"])
    assert [each.text for each in state["messages"] if each.type == "tool"] == ["killed"]
    assert (len(given), halt_of(state).reason) == (1, "killed")
    assert "AnswerReader" not in caplog.text


# --- disable() ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["tool", "side call", "agent in a tool"])
@pytest.mark.parametrize("how", CALLS)
def test_disable_in_a_graph_lets_it_finish(how: str, where: str, events: list[Event]) -> None:
    """It runs to its natural end without limits, and its invocation is reported as aborted."""
    enable(max_turns=2, observers=[events.append])
    helper = agent(ScriptedChatModel([*[uses("search")] * 4, says("found")]), name="helper")

    @tool
    def work() -> str:
        """Disable otel-limits."""
        otel_limits.disable()
        if where == "side call":
            return str(ScriptedChatModel([says("advice")]).invoke("go").text)
        if where == "agent in a tool":
            return str(helper.invoke(ASK, STEPS)["messages"][-1].text)
        return "off"

    model = ScriptedChatModel([uses("work"), *[uses("search")] * 4, says("done")])
    state = CALLS[how](agent(model, work, search))
    assert (state["messages"][-1].text, model.calls) == ("done", 6)
    assert stop_of(state) is None
    assert unanswered(state["messages"]) == []
    assert [each.reason for each in events if isinstance(each, Stop)] == ["aborted"]


def test_disable_during_a_model_call_counts_it(events: list[Event]) -> None:
    """Its vendor bills it, and the ledger has the row."""
    enable(max_turns=2, observers=[events.append])

    class Disabling(ScriptedChatModel):
        def _generate(self, *args: Any, **options: Any) -> Any:
            otel_limits.disable()
            return super()._generate(*args, **options)

    made: Any = Disabling
    state = agent(made([says("done")])).invoke(ASK, STEPS)
    assert state["messages"][-1].text == "done"
    assert len([each for each in events if isinstance(each, ModelCall)]) == 1


# --- streams closed elsewhere ---------------------------------------------------------------------


def check_whole_budget(events: list[Event], model: ScriptedChatModel, graph: Any) -> None:
    """Check that a stream that was left has ended, and that the next call has a whole budget."""
    assert len(LIVE) == 0
    assert [each.reason for each in events if isinstance(each, Stop)] == ["aborted"]
    before = model.calls
    state = graph.invoke(ASK, STEPS)
    assert (model.calls - before, halt_of(state).reason) == (3, "max_turns")


@pytest.mark.parametrize("mode", ["values", "updates", "messages", "events"])
def test_stream_that_another_task_closes(
    mode: Any, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """Servers close it in the task that sees the client go; events run in one of LangChain's."""
    enable(tree=Limits(max_turns=3), observers=[events.append])
    model = looping()
    graph = agent(model)

    async def main() -> None:
        if mode == "events":
            stream, read = graph.astream_events(ASK, STEPS, version="v2"), 12
        else:
            stream, read = graph.astream(ASK, STEPS, stream_mode=mode), 2
        for _ in range(read):
            await anext(stream)
        await asyncio.create_task(stream.aclose())

    asyncio.run(main())
    check_whole_budget(events, model, graph)
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("how", ["context", "thread", "garbage"])
def test_synchronous_stream_that_is_closed_elsewhere(
    how: str, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """WSGI servers close a response in any thread, and others forget it."""
    enable(tree=Limits(max_turns=3), observers=[events.append])
    model = looping()
    graph = agent(model)
    stream = contextvars.copy_context().run(graph.stream, ASK, STEPS, stream_mode="updates")
    contextvars.copy_context().run(next, stream)
    if how == "context":
        contextvars.copy_context().run(stream.close)
    elif how == "thread":
        closing = threading.Thread(target=stream.close)
        closing.start()
        closing.join()
    del stream
    gc.collect()
    check_whole_budget(events, model, graph)
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_stream_is_read_in_another_task_each_time(events: list[Event]) -> None:
    """A turn that is read in one task and the next in another are of one invocation."""
    enable(max_turns=3, observers=[events.append])
    model = looping()
    graph = agent(model)

    async def main() -> list[Any]:
        stream = graph.astream(ASK, STEPS, stream_mode="values")
        states = []
        while (state := await asyncio.create_task(next_of(stream))) is not None:
            states.append(state)
        return states

    async def next_of(stream: Any) -> Any:
        return await anext(stream, None)

    assert halt_of(asyncio.run(main())[-1]).reason == "max_turns"
    assert model.calls == 3
    assert [each.reason for each in events if isinstance(each, Stop)] == ["max_turns"]
