"""Answers that are not read to the end: turns if they are used, and released otherwise."""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextlib import aclosing, closing, suppress
from typing import TYPE_CHECKING, Any, cast

import pytest
from agents import Agent as SdkAgent
from agents import Model as SdkModel
from agents import ModelResponse, ModelSettings, ModelTracing, Runner, Usage, function_tool
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import PrivateAttr
from strands import Agent as StrandsAgent
from strands import tool

from otel_limits import (
    Event,
    KilledError,
    LimitReachedError,
    Limits,
    ModelCall,
    Stop,
    Turn,
    disable,
    enable,
    kill,
    stop_of,
)
from otel_limits.runs.run import Run
from otel_limits.testing import (
    Answer,
    ScriptedAgentsModel,
    ScriptedChatModel,
    ScriptedModel,
    endless,
    says,
    tokens,
    uses,
)
from tests.features.page import SUBJECTS
from tests.langchain import graphs
from tests.openai_agents import runs
from tests.unit.strands.test_sent_requests import asking, calls, read

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator

    from langchain_core.outputs import ChatResult

    from tests.features.subject import Subject


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


# --- responses that are no longer read ------------------------------------------------------------

PROMPT: Any = [{"role": "user", "content": [{"text": "go"}]}]


def helper() -> ScriptedModel:
    """A model for direct calls by a tool."""
    return ScriptedModel(endless(says("hint", usage=tokens(100))), model_id="helper")


def test_paused_call_of_ended_invocation_reserves_nothing(
    source: str, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree around the ended invocation has as much left as if the call had never been made."""
    enable(tree=Limits(max_model_calls=6), observers=[events.append])
    model, kept, seen = helper(), list[Any](), list[tuple[int, int]]()

    async def keep() -> str:
        stream = model.stream(PROMPT)
        kept.append(stream)
        await anext(stream)  # type: ignore[call-overload]
        return "kept"

    inner = asking(keep)

    async def ask() -> str:
        await inner.invoke_async("go")  # two calls, plus the paused one
        tree = outer_run[0].trees[0]
        seen.append((tree.reserved.model_calls, tree.reserved.tokens))
        for _ in range(2):
            await read(model)
        await kept[0].aclose()
        seen.append((tree.reserved.model_calls, tree.tally.model_calls))
        return "done"

    outer_run: list[Run] = []
    begin = Run.__init__

    def note(run: Run, *args: Any, **named: Any) -> None:
        begin(run, *args, **named)
        outer_run.append(run)

    monkeypatch.setattr(Run, "__init__", note)
    outer = asking(ask)
    outer.name = "outer"
    outer("go")
    assert seen == [(0, 0), (0, 6)]  # of the outer one 1, of the inner one 2, kept 1, others 2
    assert len([each for each in calls(events) if each.model == "helper"]) == 3


def test_paused_call_read_later_is_counted_once(source: str, events: list[Event]) -> None:
    """Its reader was busy when the invocation ended, and then reads it to its end."""
    enable(Limits(max_model_calls=9), observers=[events.append])
    model = helper()

    async def main() -> None:
        tasks, ended = list[asyncio.Task[None]](), asyncio.Event()

        async def later(stream: AsyncGenerator[Any, None]) -> None:
            async for _ in stream:
                await ended.wait()

        async def leave() -> str:
            tasks.append(asyncio.create_task(later(model.stream(PROMPT))))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            return "begun"

        await asking(leave).invoke_async("go")
        ended.set()
        await tasks[0]

    asyncio.run(main())
    late = [each for each in calls(events) if each.model == "helper"]
    assert [(each.kind, each.usage.total) for each in late] == [("measured", 100)]


# --- models that return the stream of another -----------------------------------------------------


class Delegating(ScriptedChatModel):
    """A model of LangChain whose methods are plain functions that call another one."""

    inner: Any

    def __init__(self, *, inner: Any) -> None:
        super().__init__(endless(says("more")), inner=inner)

    def stream(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Return the stream of the other model."""
        stream: Iterator[Any] = self.inner.stream(*args, **options)
        return stream

    def astream(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Return the stream of the other model."""
        stream: AsyncIterator[Any] = self.inner.astream(*args, **options)
        return stream


class DelegatingSdkModel(SdkModel):
    """The same with the OpenAI Agents SDK."""

    def __init__(self, inner: SdkModel) -> None:
        self.inner = inner

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        """Return the response of the other model."""
        return await self.inner.get_response(*args, **options)

    def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Return the stream of the other model."""
        return self.inner.stream_response(*args, **options)


def looping_node(ask: Callable[[], object], times: int = 9) -> Any:
    """Make a graph whose node calls a model repeatedly."""
    asked = itertools.count(1)

    def node(_: Any) -> Command[Any]:
        ask()
        return Command(goto=END if next(asked) == times else "node")

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node, destinations=("node", END))
    graph.add_edge(START, "node")
    return graph.compile(name="boss")


def stream_in_node() -> int:
    """Stream the model of LangChain in a node."""
    inner = ScriptedChatModel(endless(says("more")))
    model = Delegating(inner=inner)
    graph = looping_node(lambda: list(model.stream("go")))
    graphs.halt_of(graph.invoke(graphs.ASK, graphs.STEPS))
    return inner.calls


def astream_in_node() -> int:
    """Stream it in an event loop."""
    inner = ScriptedChatModel(endless(says("more")))
    model = Delegating(inner=inner)

    async def read() -> None:
        async for _ in model.astream("go"):
            pass

    graph = looping_node(lambda: asyncio.run(read()))
    graphs.halt_of(graph.invoke(graphs.ASK, graphs.STEPS))
    return inner.calls


def stream_of_run() -> int:
    """Stream a run of the SDK."""
    inner = ScriptedAgentsModel(endless(uses("search")))

    async def main() -> None:
        agent = runs.agent(DelegatingSdkModel(inner))
        result = Runner.run_streamed(agent, "go", **runs.options_of({}))
        async for _ in result.stream_events():
            pass

    asyncio.run(main())
    return inner.calls


@pytest.mark.parametrize(
    "run", [stream_in_node, astream_in_node, stream_of_run], ids=lambda each: each.__name__
)
def test_delegated_stream_is_one_call(run: Callable[[], int], events: list[Event]) -> None:
    """Of the model further in, and one turn."""
    enable(max_turns=3, observers=[events.append])
    assert run() == 3
    kinds = [type(each) for each in events]
    assert (kinds.count(ModelCall), kinds.count(Turn)) == (3, 3)


class Failing(Delegating):
    """A model that fails before it has a stream."""

    def stream(self, *_: Any, **__: Any) -> Iterator[Any]:
        """Fail."""
        raise ConnectionError("no stream")


class FailingSdkModel(DelegatingSdkModel):
    """The same with the OpenAI Agents SDK."""

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        """Fail."""
        raise ConnectionError("no stream")


def fail_in_node() -> None:
    """Fail three times in one invocation, whose node continues after each."""
    model = Failing(inner=None)

    def ask() -> None:
        with pytest.raises(ConnectionError):
            list(model.stream("go"))

    looping_node(ask, times=3).invoke(graphs.ASK, graphs.STEPS)


def fail_in_run() -> None:
    """Fail once: it ends the run."""

    async def main() -> None:
        agent = runs.agent(FailingSdkModel(ScriptedAgentsModel([])))
        async for _ in Runner.run_streamed(agent, "go", **runs.options_of({})).stream_events():
            pass

    with pytest.raises(ConnectionError):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("run", "calls"), [(fail_in_node, 3), (fail_in_run, 1)], ids=["langchain", "openai-agents"]
)
def test_stream_that_cannot_begin_is_a_failed_call(
    run: Callable[[], None], calls: int, events: list[Event]
) -> None:
    """Settled when it fails, so that it reserves nothing of what is left."""
    enable(max_turns=3, observers=[events.append])
    run()
    made = [each for each in events if isinstance(each, ModelCall)]
    assert [each.kind for each in made] == ["failed"] * calls
    assert [each.usage.total for each in made] == [0] * calls


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda each: each.name)
def test_disable_in_a_tool_ends_spans_once(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent continues without limits, and the SDK of OpenTelemetry logs no warning."""
    enable(max_turns=3)

    def work() -> str:
        disable()
        return "done"

    model = subject.model([uses("ask"), says("done")])
    assert subject.call(subject.agent(model, subject.doing(work))).text.strip() == "done"
    assert [each for each in caplog.messages if "ended span" in each] == []


# --- models that call others in a group of tasks --------------------------------------------------


class GroupedSdkModel(DelegatingSdkModel):
    """A model that calls another one twice at the same time."""

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        """Return the first of two responses."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.inner.get_response(*args, **options)) for _ in range(2)]
        return tasks[0].result()


def called_by_model() -> Any:
    """Call the model of an agent."""
    return runs.agent(GroupedSdkModel(runs.looping()))


def called_by_tool() -> Any:
    """Call agents in a tool whose exceptions end the run."""

    @function_tool(failure_error_function=None)
    async def ask() -> None:
        """Ask."""
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                helper = runs.agent(runs.looping(), name="helper")
                group.create_task(Runner.run(helper, "go", **runs.options_of({})))

    return runs.agent(ScriptedAgentsModel(endless(uses("ask"))), ask)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no task groups")
@pytest.mark.parametrize(
    "build", [called_by_model, called_by_tool], ids=["by a model", "by a tool"]
)
def test_halt_in_a_task_group_ends_the_run(build: Callable[[], Any], events: list[Event]) -> None:
    """It wraps the exception of the limit in another one."""
    enable(tree=Limits(max_model_calls=3), action="raise", observers=[events.append])
    with pytest.raises(Exception) as raised:  # noqa: PT011  the SDK wraps that of a tool
        runs.call_run(build())
    stop = stop_of(raised.value)
    assert stop is not None
    assert (stop.agent, stop.reason) == ("boss", "max_model_calls")
    ends = [(each.agent, each.reason) for each in events if isinstance(each, Stop)]
    assert ends[-1] == ("boss", "max_model_calls")
