"""An answer that its reader uses is a turn, whether or not it was read to the end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing, suppress
from typing import TYPE_CHECKING, Any, cast

import pytest
from agents import Agent as SdkAgent
from agents import Model as SdkModel
from agents import ModelResponse, ModelSettings, ModelTracing, Runner, Usage, function_tool
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.graph import START, StateGraph
from pydantic import PrivateAttr
from strands import Agent as StrandsAgent
from strands import tool

from otel_limits import Event, KilledError, LimitReachedError, ModelCall, Stop, enable, kill
from otel_limits.testing import (
    Answer,
    ScriptedAgentsModel,
    ScriptedChatModel,
    ScriptedModel,
    endless,
    says,
    uses,
)
from tests.langchain import graphs
from tests.openai_agents import runs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from langchain_core.outputs import ChatResult

TURNS = 3

TRIES = 20
"""How often a node asks if nothing stops it."""

TEXT = says("a story in two parts")


# --- streams of a model in a node of LangGraph ----------------------------------------------------


def closed(model: Any, _: list[Any]) -> str:
    """`close()`."""
    stream = model.stream("q")
    first = next(stream)
    stream.close()
    return str(first.text)


def dropped(model: Any, _: list[Any]) -> str:
    """No reference is left."""
    return str(next(model.stream("q")).text)


def left(model: Any, _: list[Any]) -> str:
    """`break` out of the loop."""
    for part in model.stream("q"):
        return str(part.text)
    return ""


def thrown(model: Any, _: list[Any]) -> str:
    """An error of the reader, thrown into the stream."""
    stream = model.stream("q")
    first = next(stream)
    with suppress(ValueError):
        stream.throw(ValueError("enough"))
    return str(first.text)


def kept(model: Any, streams: list[Any]) -> str:
    """The reader may still continue, so the answer is in flight."""
    streams.append(model.stream("q"))
    return str(next(streams[-1]).text)


def typed(model: Any, _: list[Any]) -> str:
    """A chain that is left leaves the model's stream."""
    chain = model | (lambda message: message.text)
    return str(next(chain.stream("q")))


def with_events(model: Any, _: list[Any]) -> str:
    """`stream_events` in version 3 settles with its graph."""
    return str(next(iter(model.stream_events("q", version="v3"))))


async def aclosed(model: Any, _: list[Any]) -> str:
    """`aclose()`."""
    async with aclosing(model.astream("q")) as parts:
        return str((await anext(parts)).text)


async def adropped(model: Any, _: list[Any]) -> str:
    """No reference is left, and the event loop closes it."""
    return str((await anext(model.astream("q"))).text)


async def aleft(model: Any, _: list[Any]) -> str:
    """`break` out of the loop."""
    async for part in model.astream("q"):
        return str(part.text)
    return ""


async def akept(model: Any, streams: list[Any]) -> str:
    """The reader may still continue."""
    streams.append(model.astream("q"))
    return str((await anext(streams[-1])).text)


async def cancelled(model: Any, _: list[Any]) -> str:
    """A time limit of the node's own."""
    parts: list[str] = []

    async def read() -> None:
        async for part in model.astream("q"):
            parts.append(part.text)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    with suppress(asyncio.CancelledError):
        await asyncio.create_task(read())
    return parts[0]


SYNC: list[Callable[..., str]] = [closed, dropped, left, thrown, kept, typed]
if hasattr(ScriptedChatModel, "stream_events"):
    SYNC.append(with_events)
ASYNC: list[Callable[..., Any]] = [aclosed, adropped, aleft, akept, cancelled]


def graph_of(node: Any) -> Any:
    """Make a graph of one node, without messages."""
    builder: Any = StateGraph(cast("Any", dict))
    return builder.add_node("node", node).add_edge(START, "node").compile()


def called(node: Any) -> Any:
    """Call a graph of one node, and return the error of the limit."""
    graph = graph_of(node)
    with pytest.raises(LimitReachedError) as raised:
        asyncio.run(graph.ainvoke({"n": 0}))
    return raised.value


@pytest.mark.parametrize("leave", SYNC, ids=lambda leave: leave.__name__)
def test_left_stream_of_a_node_is_a_turn(leave: Callable[..., str], events: list[Event]) -> None:
    """The node has an answer, so a loop of it runs away like any other."""
    enable(max_turns=TURNS, observers=[events.append])
    model, streams = ScriptedChatModel(endless(TEXT)), []  # type: ignore[var-annotated]
    error = called(lambda _: {"n": [leave(model, streams) for _ in range(TRIES)]})
    assert model.calls == TURNS
    assert error.stop.reason == "max_turns"
    assert len([each for each in events if isinstance(each, ModelCall)]) == TURNS


@pytest.mark.parametrize("leave", ASYNC, ids=lambda leave: leave.__name__)
def test_left_async_stream_of_a_node_is_a_turn(leave: Callable[..., Any]) -> None:
    """As of a synchronous one."""
    enable(max_turns=TURNS)
    model, streams = ScriptedChatModel(endless(TEXT)), []  # type: ignore[var-annotated]

    async def node(_: Any) -> Any:
        return {"n": [await leave(model, streams) for _ in range(TRIES)]}

    assert called(node).stop.reason == "max_turns"
    assert model.calls == TURNS


@pytest.mark.parametrize("text", ["", "half of it"], ids=["before", "after"])
def test_stream_that_failed_is_no_turn(text: str) -> None:
    """Before its first part or after it: a call that failed gave no answer."""
    enable(max_turns=TURNS)
    failing = Answer(text=text, error=RuntimeError("overloaded"))
    script = [*[failing] * 5, *[TEXT] * TURNS]
    model = ScriptedChatModel(script)

    def node(_: Any) -> Any:
        for _ in range(TRIES):
            with suppress(RuntimeError):
                list(model.stream("q"))

    assert called(node).stop.turns == TURNS
    assert model.calls == 5 + TURNS


def test_stream_that_a_kill_has_cut_is_no_turn(events: list[Event]) -> None:
    """The graph ends, and nothing uses the answer."""
    enable(max_turns=TURNS, observers=[events.append])
    model = ScriptedChatModel(endless(TEXT))

    def node(_: Any) -> Any:
        for _ in model.stream("q"):
            kill(all=True)

    assert called(node).stop.reason == "killed"
    assert [each.turns for each in events if isinstance(each, Stop)] == [0]


class Stuck(ScriptedChatModel):
    """Sends one part, and never the next."""

    def __init__(self, begun: asyncio.Event) -> None:
        super().__init__(endless(TEXT))
        self._begun = begun

    _begun: asyncio.Event = PrivateAttr()

    async def _astream(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        for part in super()._stream(*args, **options):
            yield part
            self._begun.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize("is_beside", [True, False])
def test_async_stream_that_a_kill_has_cut_is_no_turn(
    events: list[Event], *, is_beside: bool
) -> None:
    """If one branch is ended, LangGraph cancels the others."""
    enable(max_turns=TURNS, observers=[events.append])

    async def main() -> None:
        begun = asyncio.Event()
        model, other = Stuck(begun), Stuck(asyncio.Event())

        async def node(_: Any) -> Any:
            async for _ in model.astream("q"):
                pass

        async def killing(_: Any) -> Any:
            await begun.wait()
            kill(all=True)
            if is_beside:
                await other.ainvoke("q")

        builder: Any = StateGraph(cast("Any", dict))
        for name, each in (("node", node), ("killing", killing)):
            builder.add_node(name, each).add_edge(START, name)
        await builder.compile().ainvoke({"n": 0})

    with pytest.raises(KilledError):
        asyncio.run(main())
    assert [each.turns for each in events if isinstance(each, Stop)] == [0]


def test_stream_that_is_left_after_its_graph_counts_nothing(events: list[Event]) -> None:
    """The invocation has been published."""
    enable(max_turns=TURNS, observers=[events.append])
    model, streams = ScriptedChatModel(endless(TEXT)), []  # type: ignore[var-annotated]
    node: Any = lambda _: {"n": kept(model, streams)}  # noqa: E731
    graph_of(node).invoke({"n": 0})
    (stop,) = (each for each in events if isinstance(each, Stop))
    count = len(events)
    streams.clear()
    assert stop.model_calls == 1
    assert len(events) == count


# --- models that leave the stream of another one --------------------------------------------------


@tool
def search() -> str:
    """Search."""
    return "nothing"


class Impatient(ScriptedModel):
    """Leaves the stream of another model after its first part, and then answers itself."""

    inner: ScriptedModel

    async def stream(self, messages: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Stream its own answer."""
        async for _ in self.inner.stream(messages):
            break
        async for event in super().stream(messages, *args, **options):
            yield event


def strands_calls() -> int:
    """Count the calls of a model that a Strands agent's model leaves."""
    model = Impatient(endless(uses("search")))
    model.inner = ScriptedModel(endless(TEXT))
    agent = StrandsAgent(model=model, tools=[search], callback_handler=None)
    assert str(agent("go").stop_reason) == "max_turns"
    return model.inner.calls


class ImpatientChatModel(ScriptedChatModel):
    """The same with LangChain."""

    inner: Any

    def __init__(self, script: Iterable[Answer], **fields: Any) -> None:
        super().__init__(script, **fields)

    def _generate(self, messages: Any, *args: Any, **options: Any) -> ChatResult:
        next(self.inner.stream(messages))
        return super()._generate(messages, *args, **options)


def langchain_calls() -> int:
    """Count the calls of a model that an agent's model of LangChain leaves."""
    inner = ScriptedChatModel(endless(TEXT))
    agent = graphs.agent(ImpatientChatModel(endless(uses("search")), inner=inner))
    assert graphs.halt_of(agent.invoke(graphs.ASK, graphs.STEPS)).reason == "max_turns"
    return inner.calls


class ImpatientSdkModel(SdkModel):
    """The same with the OpenAI Agents SDK."""

    def __init__(self) -> None:
        self.inner = ScriptedAgentsModel(endless(TEXT))
        self.own = ScriptedAgentsModel(endless(uses("search")))

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        """Answer itself."""
        async for _ in self.inner.stream_response(*args, **options):
            break
        response = await self.own.get_response(*args, **options)
        return ModelResponse(output=response.output, usage=Usage(), response_id=None)

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Stream its own answer."""
        async for _ in self.inner.stream_response(*args, **options):
            break
        async for event in self.own.stream_response(*args, **options):
            yield event


def sdk_calls() -> int:
    """Count the calls of a model that an SDK agent's model leaves."""
    model = ImpatientSdkModel()
    agent: SdkAgent[Any] = runs.agent(model)
    assert runs.halt_of(runs.call_run(agent)).reason == "max_turns"
    return model.inner.calls


def sdk_streamed_calls() -> int:
    """Count them in a streamed run."""
    model = ImpatientSdkModel()

    async def main() -> Any:
        result = Runner.run_streamed(runs.agent(model), "go", **runs.options_of({}))
        async for _ in result.stream_events():
            pass
        return result

    assert runs.halt_of(asyncio.run(main())).reason == "max_turns"
    return model.inner.calls


@pytest.mark.parametrize(
    "count",
    [strands_calls, langchain_calls, sdk_calls, sdk_streamed_calls],
    ids=lambda f: f.__name__,
)
def test_model_that_leaves_the_stream_of_another_one_is_limited(count: Callable[[], int]) -> None:
    """The agent gets an answer of each, so each is a turn."""
    enable(max_turns=TURNS)
    assert count() == TURNS


# --- streams that cannot be closed ----------------------------------------------------------------


class Unforgiving(BaseCallbackHandler):
    """Raises another error when one is reported, such as that of a stream that is left."""

    raise_error = True

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        """Raise for a model."""
        raise ConnectionError("the tracing server is gone") from error

    def on_chain_error(self, error: BaseException, **_: Any) -> None:
        """Raise for a graph."""
        raise ConnectionError("the tracing server is gone") from error


def leave(streamed: Any, given: Any, *, is_async: bool) -> None:
    """Read the first part of a stream, and close it."""
    config = {"callbacks": [Unforgiving()]}

    async def read() -> None:
        async with aclosing(streamed.astream(given, config)) as parts:
            await anext(parts)

    if is_async:
        asyncio.run(read())
        return
    with closing(streamed.stream(given, config)) as parts:
        next(parts)


@pytest.mark.parametrize("is_async", [False, True])
def test_stream_whose_close_fails_is_a_turn(*, is_async: bool) -> None:
    """Otherwise its call would stay in flight."""
    enable(max_turns=TURNS)
    model = ScriptedChatModel(endless(TEXT))

    def node(_: Any) -> Any:
        for _ in range(TRIES):
            with pytest.raises(ConnectionError):
                leave(model, "q", is_async=is_async)

    stop = called(node).stop
    assert (stop.reason, stop.turns, stop.breach.reserved) == ("max_turns", TURNS, 0)
    assert model.calls == TURNS


def test_stream_that_ends_with_its_event_loop_is_a_turn() -> None:
    """The loop closes our stream and that of the model concurrently, in any order."""
    enable(max_turns=TRIES)
    model, streams = ScriptedChatModel(endless(TEXT)), []

    async def read() -> None:
        streams.append(model.astream("q"))
        await anext(streams[-1])

    def node(_: Any) -> Any:
        for _ in range(2 * TRIES):
            asyncio.run(read())

    stop = called(node).stop
    assert (stop.reason, stop.turns, stop.breach.reserved) == ("max_turns", TRIES, 0)


class Careful(ScriptedChatModel):
    """Awaits something before its stream is closed, as a vendor's client closes a connection."""

    def __init__(self, script: Iterable[Answer]) -> None:
        super().__init__(script)

    async def _astream(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        try:
            for part in super()._stream(*args, **options):
                yield part
        finally:
            await asyncio.sleep(0)


class CarefulSdkModel(ScriptedAgentsModel):
    """The same with the OpenAI Agents SDK."""

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Stream an answer."""
        try:
            async for event in super().stream_response(*args, **options):
                yield event
        finally:
            await asyncio.sleep(0)


async def open_agent(streams: list[Any]) -> None:
    """Open the stream of an agent of LangChain."""
    graph = graphs.agent(Careful(endless(TEXT)))
    streams.append(graph.astream(graphs.ASK, stream_mode="messages"))
    await anext(streams[-1])


async def open_events(streams: list[Any]) -> None:
    """Open the events of an agent of LangChain."""
    graph = graphs.agent(Careful(endless(TEXT)))
    streams.append(graph.astream_events(graphs.ASK, version="v2"))
    await anext(streams[-1])


async def open_model(streams: list[Any]) -> None:
    """Open the stream of a model in a node of LangGraph."""

    async def node(_: Any) -> Any:
        return {"n": await akept(Careful(endless(TEXT)), streams)}

    await graph_of(node).ainvoke({"n": 0})


async def open_run(streams: list[Any]) -> None:
    """Open the stream of a run of the SDK."""
    result = Runner.run_streamed(runs.agent(CarefulSdkModel([TEXT])), "go", **runs.options_of({}))
    streams.append(result.stream_events())
    await anext(streams[-1])


async def open_sdk_model(streams: list[Any]) -> None:
    """Open the stream of a model in a tool of the SDK."""

    @function_tool
    async def ask() -> str:
        settings: Any = (None, "q", ModelSettings(), [], None, [], ModelTracing.DISABLED)
        told: Any = {"previous_response_id": None, "conversation_id": None, "prompt": None}
        streams.append(CarefulSdkModel([TEXT]).stream_response(*settings, **told))
        await anext(streams[-1])
        return "asked"

    model = ScriptedAgentsModel([uses("ask"), says("done")])
    await Runner.run(runs.agent(model, ask), "go", **runs.options_of({}))


OPEN: list[Callable[..., Any]] = [open_agent, open_events, open_model, open_run, open_sdk_model]


@pytest.mark.parametrize("start", OPEN, ids=lambda start: start.__name__)
def test_open_streams_end_quietly_with_their_event_loop(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The loop closes all generators that it knows concurrently, and logs each that fails."""
    enable(max_turns=TURNS)
    streams: list[Any] = []

    async def main() -> None:
        for _ in range(TRIES):
            await start(streams)

    asyncio.run(main())
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []


@pytest.mark.parametrize("is_async", [False, True])
def test_graph_whose_stream_fails_to_close_ends(events: list[Event], *, is_async: bool) -> None:
    """Its invocation is published, and holds nothing."""
    enable(max_turns=TURNS, observers=[events.append])
    model = ScriptedChatModel(endless(uses("search", arguments={"query": "x"})))
    graph = graphs.agent(model)

    with pytest.raises(ConnectionError):
        leave(graph, graphs.ASK, is_async=is_async)
    assert [each.turns for each in events if isinstance(each, Stop)] == [1]
