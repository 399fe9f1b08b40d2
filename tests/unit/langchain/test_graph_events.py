"""Halts are part of every stream of a graph, and every stream of a model is limited."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.language_models.chat_models import BaseChatModel
from langgraph.config import get_config
from langgraph.graph import START, MessagesState, StateGraph

from otel_limits import Event, ModelCall, enable, is_synthetic, stop_of
from otel_limits.bindings.langchain.langchain_framework import LANGCHAIN
from otel_limits.bindings.langchain.langchain_probe import CONSTANT, CONSTANTS, TASK, WITHOUT_TASK
from otel_limits.testing import ScriptedChatModel, endless, says
from tests.langchain.graphs import ASK, STEPS, agent, halt_of, looping

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.filterwarnings("ignore")  # of previews and deprecations in LangChain

third_version = pytest.mark.skipif(
    not hasattr(BaseChatModel, "stream_events"), reason="This LangChain has no third version."
)


def one_node(work: Callable[..., Any]) -> Any:
    """A graph of one node."""
    return StateGraph(MessagesState).add_node("x", work).add_edge(START, "x").compile(name="x")


def read_events(graph: Any, version: Any) -> list[Any]:
    """All events of a graph."""

    async def read() -> list[Any]:
        return [each async for each in graph.astream_events(ASK, STEPS, version=version)]

    return asyncio.run(read())


def test_halt_is_the_last_event() -> None:
    """User interfaces take the answer from the end of the graph."""
    enable(max_turns=2)
    model = looping()
    events = read_events(agent(model), "v2")
    assert model.calls == 2
    first, last = events[0], events[-1]
    assert (last["event"], last["name"], last["run_id"]) == (
        "on_chain_end",
        "boss",
        first["run_id"],
    )
    assert is_synthetic(last["data"]["output"]["messages"][-1])
    ends = [each for each in events if each["event"] == "on_chain_end"]
    assert len([each for each in ends if each["run_id"] == first["run_id"]]) == 1


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_halt_is_a_chunk_in_the_events(version: str) -> None:
    """Other user interfaces collect chunks."""
    enable(max_turns=2)
    chunks = [
        each["data"]["chunk"]
        for each in read_events(agent(looping()), version)
        if each["event"] == "on_chain_stream" and each["name"] == "boss"
    ]
    assert "took too many steps" in str(chunks[-1])


def test_events_of_a_graph_that_is_not_halted_end_once() -> None:
    """Nothing is added to what LangChain reports itself."""
    enable(max_turns=2)
    events = read_events(agent(ScriptedChatModel([says("done")])), "v2")
    ends = [each for each in events if each["event"] == "on_chain_end" and each["name"] == "boss"]
    assert len(ends) == 1
    assert ends[0] is events[-1]


def test_events_that_their_reader_leaves_end_the_graph() -> None:
    """A user who closes the page must not pay for the rest."""
    enable(max_turns=9)
    ended: list[str] = []
    begun = asyncio.Event()

    async def first(_: MessagesState) -> Any:
        return {"messages": [("ai", "a part")]}

    async def second(_: MessagesState) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("second")

    builder = StateGraph(MessagesState).add_node("first", first).add_node("second", second)
    graph = builder.add_edge(START, "first").add_edge("first", "second").compile(name="x")

    async def leave() -> None:
        async with aclosing(graph.astream_events(ASK, STEPS, version="v2")) as events:
            async for event in events:
                if (event["event"], event["name"]) == ("on_chain_start", "second"):
                    await begun.wait()
                    break
        assert ended == ["second"]

    asyncio.run(leave())


def test_stream_outside_of_graphs_that_its_reader_leaves_is_closed() -> None:
    """Its connection would stay open until a garbage collection."""
    enable(max_turns=9)
    closed: list[str] = []

    class Slow(FakeListChatModel):
        async def _astream(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
            try:
                async for chunk in super()._astream(*args, **options):
                    yield chunk
            finally:
                closed.append("stream")

    async def leave() -> None:
        async with aclosing(cast("Any", Slow(responses=["a long answer"])).astream("go")) as chunks:
            await anext(chunks)
        assert closed == ["stream"]

    asyncio.run(leave())


@third_version
@pytest.mark.parametrize("is_async", [False, True])
def test_events_of_the_third_version_end_with_the_halt(*, is_async: bool) -> None:
    """A preview in LangGraph."""
    enable(max_turns=2)
    model = looping()
    graph = agent(model)

    async def read() -> Any:
        stream = await graph.astream_events(ASK, STEPS, version="v3")
        return await stream.output()

    state = (
        asyncio.run(read()) if is_async else graph.stream_events(ASK, STEPS, version="v3").output
    )
    assert model.calls == 2
    assert halt_of(state).reason == "max_turns"


@third_version
@pytest.mark.parametrize("is_async", [False, True])
def test_model_stream_of_the_third_version_is_limited(
    events: list[Event], *, is_async: bool
) -> None:
    """It calls none of the other public methods of a model."""
    enable(max_turns=2, observers=[events.append])
    model = ScriptedChatModel(endless(says("text")))

    def think(state: MessagesState) -> dict[str, Any]:
        return {
            "messages": [
                model.stream_events(state["messages"], version="v3").output for _ in range(9)
            ]
        }

    async def athink(state: MessagesState) -> dict[str, Any]:
        answers = []
        for _ in range(9):
            stream = await model.astream_events(state["messages"], version="v3")
            answers.append(await stream)
        return {"messages": answers}

    if is_async:
        state = asyncio.run(one_node(athink).ainvoke(ASK, STEPS))
    else:
        state = one_node(think).invoke(ASK, STEPS)
    stop = stop_of(state)
    assert stop is not None
    assert (model.calls, stop.turns, stop.usage.total) == (2, 2, 30)
    called = [each for each in events if isinstance(each, ModelCall)]
    assert [(each.kind, each.side) for each in called] == [("measured", False)] * 2


def test_new_method_of_chat_models_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later LangChain may have another way to a provider."""
    assert LANGCHAIN.gaps() == ()
    monkeypatch.setattr(BaseChatModel, "ask_provider", lambda _: None, raising=False)
    (gap,) = LANGCHAIN.gaps()
    assert gap.name == "known meaning of BaseChatModel.ask_provider"
    assert gap.still_limited == "all"


def test_graph_in_a_node_has_the_private_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe compares it with LangGraph's constant, and this test with what a node is given."""
    given: list[Any] = []
    one_node(lambda _: given.append(get_config())).invoke(ASK)
    assert TASK in given[0]["configurable"]
    monkeypatch.setattr(import_module(CONSTANTS), CONSTANT, "renamed")
    (gap,) = LANGCHAIN.gaps()
    assert (gap.without, gap.still_limited) == (WITHOUT_TASK, "all")
