"""Models whose classes answer by other methods than LangChain's own: each call counts once."""

from __future__ import annotations

import asyncio
import functools
import operator
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import pytest
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.llms import LLM
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langgraph.graph import START, MessagesState, StateGraph

from otel_limits import LimitReachedError, ModelCall, enable
from otel_limits.testing import ScriptedChatModel, endless, fails, says, uses
from tests.langchain import graphs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from otel_limits import Event


class Completing(LLM):
    """A model that completes text."""

    calls: list[str] = []  # noqa: RUF012  a field

    @property
    def _llm_type(self) -> str:
        return "completing"

    def _call(self, prompt: str, *_: Any, **__: Any) -> str:
        self.calls.append(prompt)
        return "a completed text"


class Overriding(BaseChatModel):
    """A model whose `invoke` does not call that of its parent, nor any other method."""

    calls: list[str] = []  # noqa: RUF012  a field

    @property
    def _llm_type(self) -> str:
        return "overriding"

    def invoke(self, *_: Any, **__: Any) -> AIMessage:
        """Answer."""
        self.calls.append("invoke")
        return AIMessage("an answer")

    async def ainvoke(self, *_: Any, **__: Any) -> AIMessage:
        """Answer."""
        return self.invoke()

    def stream(self, *_: Any, **__: Any) -> Iterator[Any]:
        """Answer."""
        yield self.invoke()

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        self.calls.append("_generate")
        return ChatResult(generations=[ChatGeneration(message=AIMessage("an answer"))])


class Calling(Overriding):
    """A model whose `invoke` calls that of its parent."""

    def invoke(self, *args: Any, **options: Any) -> AIMessage:
        """Answer."""
        return super().invoke(*args, **options)


WAYS: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
    "LLM.invoke": (Completing, lambda model: model.invoke("go")),
    "LLM.ainvoke": (Completing, lambda model: asyncio.run(model.ainvoke("go"))),
    "LLM.stream": (Completing, lambda model: list(model.stream("go"))),
    "LLM.generate": (Completing, lambda model: model.generate(["go"])),
    "LLM._call": (Completing, lambda model: model._call("go")),
    "invoke": (Overriding, lambda model: model.invoke("go")),
    "ainvoke": (Overriding, lambda model: asyncio.run(model.ainvoke("go"))),
    "stream": (Overriding, lambda model: list(model.stream("go"))),
    "generate": (Overriding, lambda model: model.generate([[AIMessage("go")]])),
    "_generate": (Overriding, lambda model: model._generate([])),
    "invoke of a parent": (Calling, lambda model: model.invoke("go")),
}


@pytest.mark.parametrize("way", WAYS)
def test_node_that_calls_a_model_is_halted(way: str, events: list[Event]) -> None:
    """At the cap, and each call is published once."""
    kind, call = WAYS[way]
    enable(max_model_calls=3, observers=[events.append])
    model = kind(calls=[])

    def node(_: Any) -> dict[str, Any]:
        call(model)
        return {"messages": [AIMessage("more")]}

    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.add_edge("node", "node")
    state = graph.compile(name="boss").invoke({"messages": []}, graphs.STEPS)
    assert graphs.halt_of(state).reason == "max_model_calls"
    assert len(model.calls) == 3
    assert [each.kind for each in events if isinstance(each, ModelCall)] == ["estimated"] * 3


USED: Final = UsageMetadata(input_tokens=10, output_tokens=20, total_tokens=30)


class Naming(BaseChatModel):
    """A model that only its answers name, when streamed in each part."""

    @property
    def _llm_type(self) -> str:
        return "naming"

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        message = AIMessage("more", response_metadata={"model_name": "own-1"}, usage_metadata=USED)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(self, *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        for usage in (None, USED):
            message = AIMessageChunk(content="more", response_metadata={"model": "own-1"})
            message.usage_metadata = usage
            yield ChatGenerationChunk(message=message)


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_model_that_only_its_answer_names_has_a_price(
    way: str, events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of the answer is the one that was used."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {own-1: {price: {input: 1000, output: 1000}}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(max_cost_usd=1, observers=[events.append])
    model = Naming()

    def node(_: Any) -> dict[str, Any]:
        answered = model.invoke("go") if way == "invoke" else list(model.stream("go"))
        assert answered
        return {"messages": [AIMessage("done")]}

    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.compile(name="boss").invoke({"messages": []})
    (call,) = [each for each in events if isinstance(each, ModelCall)]
    assert (call.model, call.price) == ("own-1", Decimal("0.03"))


def test_two_prompts_are_two_calls(events: list[Event]) -> None:
    """A list of prompts is a call for each."""
    enable(max_model_calls=9, observers=[events.append])
    model = Completing(calls=[])
    graph = StateGraph(MessagesState)
    graph.add_node(
        "node",
        lambda _: {"messages": [model.generate(["a", "b"]).flatten()[0].generations[0][0].text]},
    )
    graph.add_edge(START, "node")
    graph.compile(name="boss").invoke({"messages": []})
    assert len([each for each in events if isinstance(each, ModelCall)]) == len(model.calls) == 2


def test_request_without_conversations_is_no_call(events: list[Event]) -> None:
    """Nothing is sent, and the model is not called."""
    enable(max_model_calls=9, observers=[events.append])
    model = ScriptedChatModel([says("never")])
    graph = StateGraph(MessagesState)
    graph.add_node("node", lambda _: {"messages": [AIMessage(str(model.generate([]).generations))]})
    graph.add_edge(START, "node")
    state = graph.compile(name="boss").invoke({"messages": []})
    assert state["messages"][-1].text == "[]"
    assert not [each for each in events if isinstance(each, ModelCall)]


@pytest.mark.filterwarnings("ignore:Field name")
def test_field_or_static_method_of_that_name_stays(events: list[Event]) -> None:
    """It is not a method of LangChain, and the model is limited without it."""
    enable(max_model_calls=3, observers=[events.append])

    class Odd(Overriding):
        stream: bool = False  # type: ignore[assignment]

        @staticmethod
        def _call(prompt: str) -> str:
            return f"static {prompt}"

    model = Odd(calls=[])
    assert model.stream is False
    assert model._call("text") == "static text"
    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", lambda _: {"messages": [model.invoke("go")]})
    graph.add_edge(START, "node")
    graph.add_edge("node", "node")
    state = graph.compile(name="boss").invoke({"messages": []}, graphs.STEPS)
    assert graphs.halt_of(state).reason == "max_model_calls"
    assert len(model.calls) == 3


# --- several calls for one answer -----------------------------------------------------------------


class Drafting(BaseChatModel):
    """A model that requests a draft of another one, and then for the answer."""

    inner: Any

    @property
    def _llm_type(self) -> str:
        return "drafting"

    def bind_tools(self, *_: Any, **__: Any) -> Any:
        """Keep the tools of the inner model's script."""
        return self

    def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        self.inner.invoke(messages)
        return ChatResult(generations=[ChatGeneration(message=self.inner.invoke(messages))])


def test_answer_that_takes_two_calls_is_one_turn(events: list[Event]) -> None:
    """Both calls count, and neither keeps a turn from later answers."""
    enable(max_turns=4, observers=[events.append])
    inner = graphs.looping()
    state = graphs.agent(Drafting(inner=inner)).invoke(graphs.ASK, graphs.STEPS)
    stop = graphs.halt_of(state)
    assert (stop.reason, stop.turns, inner.calls) == ("max_turns", 4, 8)
    measured = [each.usage.total for each in events if isinstance(each, ModelCall)]
    assert len(measured) == 8
    assert stop.usage.total == sum(measured)


def test_last_turn_admits_each_call_of_its_answer() -> None:
    """The turn of the first call is that of the second one, too."""
    enable(max_turns=1)
    inner = ScriptedChatModel([says("a draft"), says("done")])
    state = graphs.agent(Drafting(inner=inner)).invoke(graphs.ASK, graphs.STEPS)
    assert (state["messages"][-1].text, inner.calls) == ("done", 2)


class Relaying(Drafting):
    """A model that hands each conversation on to another one."""

    def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.inner.invoke(messages))])


def test_conversations_handed_on_one_by_one_are_a_call_each(events: list[Event]) -> None:
    """A request for several is several calls, and each of them is sent apart."""
    enable(max_model_calls=9, observers=[events.append])
    model = Relaying(inner=ScriptedChatModel([says("one"), says("two")]))

    def node(_: Any) -> dict[str, Any]:
        model.generate([[AIMessage("a")], [AIMessage("b")]])
        return {"messages": [AIMessage("done")]}

    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.compile(name="boss").invoke({"messages": []})
    called = [each for each in events if isinstance(each, ModelCall)]
    assert [(each.kind, each.model) for each in called] == [("measured", "scripted")] * 2


class Recovering(Drafting):
    """A model that calls the other one again after an error."""

    def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        try:
            message = self.inner.invoke(messages)
        except RuntimeError:
            message = self.inner.invoke(messages)
        return ChatResult(generations=[ChatGeneration(message=message)])


def test_last_turn_admits_a_second_attempt_of_its_model() -> None:
    """The failed call is no turn, and the answer is one."""
    enable(max_turns=2)
    failed = fails(RuntimeError("down"))
    inner = ScriptedChatModel([failed, uses("search"), failed, uses("search")])
    state = graphs.agent(Recovering(inner=inner)).invoke(graphs.ASK, graphs.STEPS)
    assert (graphs.halt_of(state).turns, inner.calls) == (2, 4)


def test_second_call_of_an_answer_is_refused_at_another_limit() -> None:
    """Only the turn is shared."""
    enable(max_model_calls=3)
    inner = graphs.looping()
    state = graphs.agent(Drafting(inner=inner)).invoke(graphs.ASK, graphs.STEPS)
    stop = graphs.halt_of(state)
    assert (stop.reason, stop.turns, inner.calls) == ("max_model_calls", 1, 3)


class Spreading(Drafting):
    """A model that requests two answers of another one in one call, and gives the first."""

    def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=self.inner.generate([messages] * 2).generations[0])

    async def _agenerate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        answers = await self.inner.agenerate([messages] * 2)
        return ChatResult(generations=answers.generations[0])


class Streaming(Spreading):
    """The same in parts."""

    def _stream(self, messages: Any, *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        message = self._generate(messages).generations[0].message
        yield ChatGenerationChunk(message=AIMessageChunk(**message.model_dump(exclude={"type"})))

    async def _astream(self, messages: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        message = (await self._agenerate(messages)).generations[0].message
        yield ChatGenerationChunk(message=AIMessageChunk(**message.model_dump(exclude={"type"})))


def answer_in_parts(model: Any, given: Any) -> Any:
    """`stream`."""
    return functools.reduce(operator.add, model.stream(given))


async def answer_in_async_parts(model: Any, given: Any) -> Any:
    """`astream`."""
    return functools.reduce(operator.add, [each async for each in model.astream(given)])


ANSWERS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda model, given: model.invoke(given),
    "ainvoke": lambda model, given: asyncio.run(model.ainvoke(given)),
    "stream": answer_in_parts,
    "astream": lambda model, given: asyncio.run(answer_in_async_parts(model, given)),
}


def endless_graph(model: Any, way: str) -> Any:
    """A graph that calls a model in each step."""
    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", lambda state: {"messages": [ANSWERS[way](model, state["messages"])]})
    graph.add_edge(START, "node")
    graph.add_edge("node", "node")
    return graph.compile(name="boss")


@pytest.mark.parametrize("way", ANSWERS)
def test_conversations_of_one_call_count_each(way: str, events: list[Event]) -> None:
    """A model may hand one conversation on as two, whose answers are one turn."""
    enable(max_turns=3, observers=[events.append])
    inner = ScriptedChatModel(endless(says("more")))
    state = endless_graph(Streaming(inner=inner), way).invoke(graphs.ASK, graphs.STEPS)
    stop = graphs.halt_of(state)
    assert (stop.reason, stop.turns, stop.model_calls, inner.calls) == ("max_turns", 3, 6, 6)
    measured = [each.usage.total for each in events if isinstance(each, ModelCall)]
    assert len(measured) == 6
    assert stop.usage.total == sum(measured)


@pytest.mark.parametrize("way", ANSWERS)
def test_call_for_too_many_conversations_is_not_sent(way: str, events: list[Event]) -> None:
    """The limit refuses all of them if it has no room for the second one."""
    enable(max_model_calls=3, observers=[events.append])
    inner = ScriptedChatModel(endless(says("more")))
    state = endless_graph(Streaming(inner=inner), way).invoke(graphs.ASK, graphs.STEPS)
    stop = graphs.halt_of(state)
    assert (stop.reason, stop.turns, inner.calls) == ("max_model_calls", 1, 2)
    assert len([each for each in events if isinstance(each, ModelCall)]) == stop.model_calls == 2


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_quota_takes_nothing_for_conversations_that_it_refuses(
    way: str, events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of it is left for other agents."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {calls: {model_calls: 3, window: P1D}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(observers=[events.append])
    inner, other = ScriptedChatModel(endless(says("more"))), graphs.looping()
    state = endless_graph(Spreading(inner=inner), way).invoke(graphs.ASK, graphs.STEPS)
    assert (graphs.halt_of(state).reason, inner.calls) == ("quota_exceeded", 2)
    graphs.agent(other).invoke(graphs.ASK, graphs.STEPS)
    assert other.calls == 1
    assert len([each for each in events if isinstance(each, ModelCall)]) == 3


def test_conversations_that_are_handed_on_again_count_once(events: list[Event]) -> None:
    """However many models are between the one that answers and that of the graph."""
    enable(max_turns=2, observers=[events.append])
    inner = ScriptedChatModel(endless(says("more")))
    model = Relaying(inner=Spreading(inner=Relaying(inner=inner)))
    stop = graphs.halt_of(endless_graph(model, "invoke").invoke(graphs.ASK, graphs.STEPS))
    assert (stop.turns, stop.model_calls, inner.calls) == (2, 4, 4)
    called = [each.kind for each in events if isinstance(each, ModelCall)]
    assert called == ["measured"] * 4


def hand_on_both(inner: Any) -> None:
    """Request one answer, for which a model requests two."""
    Spreading(inner=inner).invoke("both")


def request_both(inner: Any) -> None:
    """Request two answers."""
    inner.generate([[AIMessage("a")], [AIMessage("b")]])


@pytest.mark.parametrize("both", [hand_on_both, request_both])
def test_tool_can_call_again_after_too_many_conversations(
    both: Callable[[Any], None], events: list[Event]
) -> None:
    """A refused side call leaves its share, also of a conversation that the limit had room for."""
    inner = ScriptedChatModel(endless(says("more")))

    def summarize() -> str:
        """Summarize."""
        with pytest.raises(LimitReachedError):
            both(inner)
        assert inner.calls == 0
        return str(inner.invoke("one").text)

    enable(max_model_calls=2, observers=[events.append])
    model = ScriptedChatModel(endless(uses("summarize")))
    state = graphs.agent(model, summarize).invoke(graphs.ASK, graphs.STEPS)
    stop = graphs.halt_of(state)
    assert (stop.reason, stop.model_calls, inner.calls) == ("max_model_calls", 2, 1)
    assert len([each for each in events if isinstance(each, ModelCall)]) == 2
