"""Limits of LangChain and LangGraph agents hold exactly, however a graph is called."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.tools import BaseTool, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import RetryPolicy
from opentelemetry.trace import StatusCode

import otel_limits
from otel_limits import (
    Event,
    LimitReachedError,
    Limits,
    ModelCall,
    Stop,
    enable,
    kill,
    stop_of,
    stops_of,
)
from otel_limits.testing import (
    ScriptedChatModel,
    endless,
    fails,
    says,
    uses,
)
from tests.langchain.event_loops import with_context
from tests.langchain.graphs import ASK, STEPS, agent, halt_of, looping

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


def test_span_of_a_failed_graph_ends_once(spans: Any, caplog: pytest.LogCaptureFixture) -> None:
    """OpenTelemetry would log a warning, and what is written after the first end would be lost."""

    @tool
    def fail() -> str:
        """Fail."""
        raise ZeroDivisionError

    enable(max_turns=9)
    with pytest.raises(ZeroDivisionError):
        agent(ScriptedChatModel(endless(uses("fail"))), fail).invoke(ASK, STEPS)
    (span,) = [each for each in spans.get_finished_spans() if each.name == "invoke_agent boss"]
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes["error.type"], caplog.text) == ("ZeroDivisionError", "")


def test_unnamed_graph_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Limits by agent and metrics cannot separate graphs without a name."""
    caplog.set_level("INFO", "otel_limits")
    enable(max_turns=1)
    agent(looping(), name=None).invoke(ASK, STEPS)
    assert "All graphs without a name share 'LangGraph'" in caplog.text


# --- retries and fallbacks ------------------------------------------------------------------------


def one_node(model: Any, **options: Any) -> Any:
    """A graph of one node that calls a model until that requests no tool."""

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def further(state: MessagesState) -> str:
        last: Any = state["messages"][-1]
        return "think" if last.tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("think", think, **options)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", further)
    return graph.compile(name="hand-written")


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda model: model,
        lambda model: model.with_retry(stop_after_attempt=5),
        lambda model: model.with_fallbacks([looping(), looping()]),
    ],
    ids=["plain", "with_retry", "with_fallbacks"],
)
def test_nothing_retries_a_halt(wrapped: Callable[[Any], Any]) -> None:
    """A halt is not an error of the model: other models would be called forever."""
    enable(max_turns=3)
    model = looping()
    graph = one_node(wrapped(model), retry_policy=RetryPolicy(max_attempts=5))
    state = graph.invoke(ASK, STEPS)
    stop = halt_of(state)
    assert (model.calls, stop.reason, stop.model_calls) == (3, "max_turns", 3)


def test_failed_calls_and_their_fallbacks_count(events: list[Event]) -> None:
    """Every request is a model call; a failed one is no turn."""
    enable(max_turns=9, observers=[events.append])
    model = ScriptedChatModel([fails(RuntimeError("down"))]).with_fallbacks(
        [ScriptedChatModel([says("done")], model="other")]
    )
    one_node(model).invoke(ASK, STEPS)
    called = [each for each in events if isinstance(each, ModelCall)]
    assert [(each.model, each.kind) for each in called] == [
        ("scripted", "failed"),
        ("other", "measured"),
    ]


# --- trees ----------------------------------------------------------------------------------------


def test_subgraph_is_a_member_of_the_tree() -> None:
    """A graph as a node of another one, as supervisors and swarms have it."""
    enable(tree=Limits(max_turns=4))
    first, second = looping(), looping()
    graph = StateGraph(MessagesState)
    graph.add_node("one", agent(first, name="one"))
    graph.add_node("two", agent(second, name="two"))
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")
    flow: Any = graph.compile(name="flow")
    state = flow.invoke(ASK, STEPS)
    assert first.calls + second.calls == 4
    assert [each.agent for each in stops_of(state)] == ["one", "two"]


# --- kills and deadlines --------------------------------------------------------------------------


def test_kill_ends_a_synchronous_stream_at_the_next_part(events: list[Event]) -> None:
    """LangChain streams an answer inside of `invoke` if a reader asks for messages."""
    enable(max_turns=9, observers=[events.append])
    model = ScriptedChatModel([uses("search", "search", "search", "search")])
    heard: list[str] = []

    class Killer(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **_: Any) -> None:
            heard.append(token)
            kill(agent="boss")

    stream = agent(model).stream(ASK, {**STEPS, "callbacks": [Killer()]}, stream_mode="messages")
    list(stream)
    assert [each.reason for each in events if isinstance(each, Stop)] == ["killed"]
    assert len(heard) == 1


# --- the rest of a program ------------------------------------------------------------------------


class Chunks(ScriptedChatModel):
    """Streams chunks: texts and counts of tokens, then an error or nothing more."""

    async def _astream(self, *_: Any, **__: Any) -> AsyncIterator[ChatGenerationChunk]:
        given: Any = next(self._script)
        chunks, error = given
        for each in chunks:
            text, usage = (each, None) if isinstance(each, str) else ("", each)
            yield ChatGenerationChunk(message=AIMessageChunk(content=text, usage_metadata=usage))
        if error is not None:
            raise error
        await asyncio.Event().wait()


def counts(sent: int, output: int) -> dict[str, int]:
    """Usage in a chunk."""
    return {"input_tokens": sent, "output_tokens": output, "total_tokens": sent + output}


@with_context
@pytest.mark.parametrize("error", [OSError("gone"), None], ids=["broken off", "left"])
@pytest.mark.parametrize(
    ("chunks", "estimated", "read"),
    [
        ([counts(70, 0), "once ", "upon "], True, (70, 2)),
        (["once ", "upon ", counts(70, 9)], False, (70, 9)),
    ],
    ids=["text at the end", "usage at the end"],
)
def test_usage_in_a_stream_that_ends_early_is_measured_unless_text_follows(
    events: list[Event],
    chunks: list[Any],
    estimated: bool,  # noqa: FBT001  of the table
    read: tuple[int, int],
    error: Exception | None,
) -> None:
    """Anthropic reports the input first, and the output at the end."""
    enable(observers=[events.append])
    make: Any = Chunks
    graph = create_agent(make([(chunks, error)]), [], name="boss")

    async def leave() -> None:
        parts = graph.astream(ASK, stream_mode="messages")
        with contextlib.suppress(OSError):
            async for chunk, _ in parts:
                if error is None and chunk.usage_metadata == chunks[-1]:
                    break
                if error is None and chunk.content == chunks[-1]:
                    break
        await parts.aclose()

    asyncio.run(leave())
    (call,) = [each for each in events if isinstance(each, ModelCall)]
    assert (call.kind, call.estimated) == ("failed", estimated)
    assert (call.usage.input, call.usage.output) == read


class Repeats(ScriptedChatModel):
    """Streams an answer with these usages in its chunks."""

    def _stream(self, *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        usages: Any = next(self._script)
        for each in usages:
            yield ChatGenerationChunk(message=AIMessageChunk(content="w ", usage_metadata=each))


@pytest.mark.parametrize(
    ("usages", "kind", "expected"),
    [
        ([(713, 1), (713, 2), (713, 3), (713, 3)], "measured", (713, 3)),
        ([(713, 0), (0, 3)], "measured", (713, 3)),
        ([(713, 3), (0, 0)], "measured", (713, 3)),
        ([(713, 3), (600, 1)], "estimated", None),
    ],
    ids=["repeated", "in parts", "once", "contradictory"],
)
def test_usage_that_every_chunk_repeats_counts_once(
    events: list[Event],
    usages: list[tuple[int, int]],
    kind: str,
    expected: tuple[int, int] | None,
) -> None:
    """LangChain adds up the chunks, also of servers that report the running usage in each."""
    enable(observers=[events.append])
    make: Any = Repeats
    graph = create_agent(make([[counts(*each) for each in usages]]), [], name="boss")
    list(graph.stream(ASK, stream_mode="messages"))
    (call,) = [each for each in events if isinstance(each, ModelCall)]
    assert call.kind == kind
    assert expected in (None, (call.usage.input, call.usage.output))


def test_model_in_a_tool_is_a_side_call(events: list[Event]) -> None:
    """It counts, but is no turn; its refusal reaches the tool."""
    enable(max_model_calls=3, observers=[events.append])
    inner = ScriptedChatModel(endless(says("a summary")))
    refused: list[str] = []

    @tool
    def summarize() -> str:
        """Summarize."""
        try:
            text: str = inner.invoke("text").text
        except LimitReachedError as error:
            refused.append(str(error))
            return "no summary"
        return text

    model = ScriptedChatModel(endless(uses("summarize")))
    state = agent(model, summarize).invoke(ASK, STEPS)
    assert (model.calls, inner.calls) == (2, 1)
    assert len(refused) == 1
    assert "max_model_calls" in refused[0]
    assert halt_of(state).turns == 2


def test_graph_without_messages_raises() -> None:
    """Its state has no place for our message."""
    from langgraph.func import entrypoint

    enable(max_turns=2)
    model = looping()

    @entrypoint()
    def flow(question: str) -> str:
        while True:
            model.invoke(question)

    graph: Any = flow
    with pytest.raises(otel_limits.MaxTurnsReachedException):
        graph.invoke("go", STEPS)
    assert model.calls == 2


def test_structured_output_is_not_halted() -> None:
    """The tool for the output is none of the model's tools."""
    from pydantic import BaseModel

    class Verdict(BaseModel):
        good: bool

    enable(max_turns=1, max_tool_calls=1)
    model = ScriptedChatModel([uses("Verdict", arguments={"good": True})])
    state = agent(model, response_format=Verdict).invoke(ASK, STEPS)
    assert state["structured_response"] == Verdict(good=True)
    assert stop_of(state) is None


def test_enable_keeps_coroutine_functions() -> None:
    """Mocks and wrappers of the application call a method as what it is."""
    enable(max_turns=1)
    assert isinstance(Mock(spec=BaseChatModel).agenerate, AsyncMock)
    assert isinstance(Mock(spec=BaseTool).arun, AsyncMock)


def test_disable_leaves_langchain_as_it_was() -> None:
    """No method of it remains wrapped."""
    from langgraph.pregel import Pregel

    enable(max_turns=1)
    assert hasattr(Pregel.stream, "__wrapped__")
    otel_limits.disable()
    methods = (Pregel.stream, Pregel.astream, BaseChatModel.generate, BaseChatModel.astream)
    assert not any(hasattr(each, "__wrapped__") for each in methods)


def test_reader_that_leaves_a_stream_aborts_the_invocation(events: list[Event]) -> None:
    """A chat page that is closed is not a success."""
    enable(max_turns=9, observers=[events.append])
    stream = agent(looping()).stream(ASK, STEPS, stream_mode="updates")
    next(stream)
    stream.close()
    assert [each.reason for each in events if isinstance(each, Stop)] == ["aborted"]


def test_reader_of_a_stream_is_not_within_it() -> None:
    """Agents that the reader of a stream calls have their own budget."""
    enable(tree=Limits(max_turns=3))
    outer, inner = looping(), looping()
    for _ in agent(outer).stream(ASK, STEPS, stream_mode="updates"):
        if inner.calls == 0:
            agent(inner, name="other").invoke(ASK, STEPS)
    assert (outer.calls, inner.calls) == (3, 3)


def test_graph_takes_no_identifiers_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of applications replace `uuid.uuid4` to get known IDs."""
    taken: list[int] = []

    def count(original: Any = uuid.uuid4) -> uuid.UUID:
        taken.append(1)
        return original()

    monkeypatch.setattr(uuid, "uuid4", count)
    counts = []
    for limits in (None, Limits(max_turns=9)):
        if limits is not None:
            enable(limits)
        taken.clear()
        agent(ScriptedChatModel([uses("search"), says("done")])).invoke(ASK, STEPS)
        counts.append(len(taken))
    assert counts[0] == counts[1]
