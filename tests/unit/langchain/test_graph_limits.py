"""Limits of LangChain and LangGraph agents hold exactly, however a graph is called."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import RetryPolicy
from opentelemetry.trace import StatusCode

import otel_limits
from otel_limits import (
    Event,
    Halt,
    LimitReachedError,
    Limits,
    ModelCall,
    Stop,
    ToolCall,
    enable,
    is_synthetic,
    kill,
    stop_of,
    stops_of,
)
from otel_limits.testing import (
    Answer,
    FakeTime,
    ScriptedChatModel,
    endless,
    fails,
    only,
    says,
    tokens,
    uses,
)
from tests.langchain.graphs import ASK, CALLS, STEPS, agent, config, halt_of, looping, unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_max_turns_halts_a_graph(call: Callable[..., Any]) -> None:
    """Exactly as many model calls as allowed, whatever method of the graph is called."""
    enable(max_turns=3)
    model = looping()
    state = call(agent(model))
    stop = stop_of(state)
    assert model.calls == 3
    assert stop is not None
    assert (stop.reason, stop.turns, stop.tool_calls, stop.agent) == ("max_turns", 3, 3, "boss")
    assert is_synthetic(state["messages"][-1])
    assert unanswered(state["messages"]) == []


@pytest.mark.parametrize(
    ("name", "cap", "calls", "reason"),
    [
        ("max_turns", 2, 2, "max_turns"),
        ("max_iterations", 2, 2, "max_iterations"),
        ("max_model_calls", 2, 2, "max_model_calls"),
        ("max_token_budget", 45, 3, "max_token_budget"),
        ("max_input_tokens", 30, 3, "max_input_tokens"),
        ("max_output_tokens", 15, 3, "max_output_tokens"),
        ("max_tool_calls", 2, 3, "max_tool_calls"),
        ("max_calls_per_tool", {"search": 2}, 3, "max_tool_calls"),
        ("max_consecutive_same_tool", 3, 3, "loop_detected"),
        ("max_identical_tool_calls", 3, 3, "loop_detected"),
        ("max_repeated_tool_cycles", 3, 6, "loop_detected"),
        ("max_no_progress_turns", 2, 3, "loop_detected"),
    ],
)
@pytest.mark.parametrize("how", ["invoke", "ainvoke", "astream"])
def test_every_limit_halts_a_graph(how: str, name: str, cap: Any, calls: int, reason: str) -> None:
    """Each limit of the settings page counts the same as for other frameworks."""
    if name == "max_repeated_tool_cycles":
        pair = [uses("search", arguments={"query": each}) for each in "xy"]
        model = ScriptedChatModel(pair * 9)
    else:
        model = looping()
    enable(only(name, cap))
    state = CALLS[how](agent(model))
    assert halt_of(state).reason == reason
    assert model.calls == calls
    assert unanswered(state["messages"]) == []


def test_natural_end_on_the_last_turn_is_not_halted(events: list[Event]) -> None:
    """An agent that is done with its last permitted turn is a success."""
    enable(max_turns=2, observers=[events.append])
    state = agent(ScriptedChatModel([uses("search"), says("done")])).invoke(ASK, STEPS)
    assert stop_of(state) is None
    (stop,) = [each for each in events if isinstance(each, Stop)]
    assert (stop.reason, stop.turns, stop.usage.total) == ("end_turn", 2, 30)


def test_events_of_a_graph(events: list[Event]) -> None:
    """The ledger, the metrics and the dashboards see every call, tool and stop once."""
    enable(max_turns=2, observers=[events.append])
    agent(looping()).invoke(ASK, STEPS)
    kinds = [type(each).__name__ for each in events]
    expected = {"Started": 1, "ModelCall": 2, "Turn": 2, "ToolCall": 2, "Halt": 1, "Stop": 1}
    assert {kind: kinds.count(kind) for kind in expected} == expected
    called = [each for each in events if isinstance(each, ModelCall)]
    assert [(each.model, each.usage.input, each.usage.output, each.side) for each in called] == [
        ("scripted", 10, 5, False)
    ] * 2
    used = [each for each in events if isinstance(each, ToolCall)]
    assert [(each.tool, each.status, each.turn) for each in used] == [
        ("search", "success", 1),
        ("search", "success", 2),
    ]


def test_spans_of_a_graph(spans: Any, events: list[Event]) -> None:
    """LangGraph makes no spans, so that ours show the invocation and its calls."""
    enable(max_turns=2, observers=[events.append])
    agent(looping()).invoke(ASK, STEPS)
    made = {each.name: dict(each.attributes) for each in spans.get_finished_spans()}
    assert made["invoke_agent boss"]["otel_limits.stop.reason"] == "max_turns"
    assert made["chat scripted"]["gen_ai.usage.input_tokens"] == 10
    assert [each.name for each in spans.get_finished_spans()].count("chat scripted") == 2
    chats = [each for each in spans.get_finished_spans() if each.name == "chat scripted"]
    shown = [f"{each.context.span_id:016x}" for each in chats]
    assert [each.span_id for each in events if isinstance(each, ModelCall)] == shown


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


def test_side_call_has_a_span(spans: Any) -> None:
    """A trace shows every request that costs money."""
    enable(max_turns=1)
    inner = ScriptedChatModel(endless(says("a summary")), model="inner")

    @tool
    def summarize() -> str:
        """Summarize."""
        return inner.invoke("text").text

    agent(ScriptedChatModel(endless(uses("summarize"))), summarize).invoke(ASK, STEPS)
    names = [each.name for each in spans.get_finished_spans()]
    assert (names.count("chat scripted"), names.count("chat inner")) == (1, 1)


def test_unnamed_graph_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Limits by agent and metrics cannot separate graphs without a name."""
    caplog.set_level("INFO", "otel_limits")
    enable(max_turns=1)
    agent(looping(), name=None).invoke(ASK, STEPS)
    assert "All graphs without a name share 'LangGraph'" in caplog.text


# --- actions --------------------------------------------------------------------------------------


def test_observe_changes_nothing(events: list[Event]) -> None:
    """A trial in production halts no agent."""
    enable(max_turns=1, action="observe", observers=[events.append])
    state = agent(ScriptedChatModel([uses("search"), says("done")])).invoke(ASK, STEPS)
    assert state["messages"][-1].text == "done"
    assert [each.action for each in events if isinstance(each, Halt)] == ["observed"]


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
def test_raise_raises_the_error_of_the_limit(how: str) -> None:
    """The application handles it, and the thread's history is valid."""
    enable(max_turns=2, action="raise")
    saver = InMemorySaver()
    graph = agent(looping(), checkpointer=saver)
    with pytest.raises(otel_limits.MaxTurnsReachedException) as raised:
        CALLS[how](graph, ASK, config("1"))
    assert halt_of(raised.value).turns == 2
    assert unanswered(graph.get_state(config("1")).values["messages"]) == []


@pytest.mark.parametrize("how", CALLS)
def test_wrap_up_lets_the_model_answer_without_tools(how: str) -> None:
    """The last answer is the model's own, and the graph ends by itself."""
    enable(max_turns=2, action="wrap_up")
    model = ScriptedChatModel([uses("search"), uses("search"), says("what I know")])
    state = CALLS[how](agent(model))
    last = state["messages"][-1]
    assert (last.text, model.calls) == ("what I know", 3)
    stop = halt_of(state)
    assert (stop.reason, stop.action) == ("max_turns", "wrapped_up")
    assert not is_synthetic(last)
    assert model.tool_specs[-1] is None
    assert not any(getattr(each, "tool_calls", None) for each in model.requests[-1])


def test_last_answer_that_fails_ends_the_graph() -> None:
    """There is no further call, and the operator reads why."""
    enable(max_turns=1, action="wrap_up")
    model = ScriptedChatModel([uses("search"), fails(RuntimeError("overloaded"))])
    state = agent(model).invoke(ASK, STEPS)
    stop = halt_of(state)
    assert "Its final answer failed (RuntimeError: overloaded)" in stop.sentence


def test_last_answer_without_text_is_replaced() -> None:
    """An empty message is refused by several vendors in the next request."""
    enable(max_turns=1, action="wrap_up")
    state = agent(ScriptedChatModel([uses("search"), says("")])).invoke(ASK, STEPS)
    assert is_synthetic(state["messages"][-1])
    assert state["messages"][-1].text


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
def test_halted_thread_goes_on(how: str) -> None:
    """The halt is stored, nothing is left to do, and the next call is a new invocation."""
    enable(max_turns=2)
    model = looping()
    graph = agent(model, checkpointer=InMemorySaver())
    CALLS[how](graph, ASK, config("1"))
    stored = graph.get_state(config("1"))
    assert stored.next == ()
    assert is_synthetic(stored.values["messages"][-1])
    state = CALLS[how](graph, {"messages": [("user", "more")]}, config("1"))
    assert model.calls == 4
    assert len(stops_of(state)) == 1
    assert unanswered(state["messages"]) == []


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


def team(
    inner: Any, *, calls: int, then: Sequence[Answer] = (), return_direct: bool = False
) -> tuple[Any, ScriptedChatModel]:
    """A boss whose tool calls another agent."""

    @tool(return_direct=return_direct)
    def ask(question: str = "") -> str:
        """Call a colleague."""
        answer: str = agent(inner, name="helper").invoke(ASK, STEPS)["messages"][-1].text
        return answer

    asks = uses(*["ask"] * calls)
    boss = ScriptedChatModel([asks, *then] if then else endless(asks))
    return agent(boss, ask), boss


def test_halted_helper_is_worded_for_the_model_around_it() -> None:
    """The model reads that the answer is unfinished and that asking again is useless."""
    enable(max_turns=2)
    helper = looping()
    graph, boss = team(helper, calls=1)
    state = graph.invoke(ASK, STEPS)
    told = [each.content for each in boss.requests[-1] if each.type == "tool"]
    assert "Do not call" in told[0]
    assert [each.agent for each in stops_of(state)] == ["boss"]


def test_answer_after_a_halted_helper_is_not_halted() -> None:
    """The boss has answered with what there was, as in other frameworks."""
    enable(max_turns=2)
    graph, _ = team(looping(), calls=1, then=[says("done")])
    state = graph.invoke(ASK, STEPS)
    assert (stop_of(state), stops_of(state)) == (None, ())


def test_answer_of_a_halted_helper_is_halted() -> None:
    """A tool with `return_direct` makes its result the answer of the boss."""
    enable(max_turns=2)
    graph, boss = team(looping(), calls=1, return_direct=True)
    state = graph.invoke(ASK, STEPS)
    assert boss.calls == 1
    assert (halt_of(state).agent, halt_of(state).turns) == ("helper", 2)
    assert state["messages"][-1].text.startswith("This request could not be completed")


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


# --- quotas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
def test_quota_halts_a_graph(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotas hold in synchronous and asynchronous methods, with and without an event loop."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {calls: {model_calls: 4, window: P1D}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    model = looping()
    graph = agent(model)
    state = CALLS[how](graph)
    assert halt_of(state).reason == "quota_exceeded"
    assert model.calls == 4
    CALLS[how](graph)
    assert model.calls == 4


# --- kills and deadlines --------------------------------------------------------------------------


class SlowModel(ScriptedChatModel):
    """A model that never answers."""

    on_call: Any = int  # a function without an effect

    async def _agenerate(self, *_: Any, **__: Any) -> Any:
        self.on_call()
        await asyncio.Event().wait()

    async def _astream(self, *_: Any, **__: Any) -> Any:
        await self._agenerate()
        yield None


SLOW: Any = SlowModel


@pytest.mark.parametrize("how", ["ainvoke", "astream"])
def test_deadline_interrupts_an_async_call(how: str, fake_time: FakeTime) -> None:
    """Also before the first byte of the answer."""
    enable(max_duration_seconds=30)
    called: list[bool] = []

    def pass_deadline() -> None:
        called.append(True)
        fake_time.advance(30)

    state = CALLS[how](agent(SLOW([], on_call=pass_deadline)))
    assert (halt_of(state).reason, called) == ("max_duration", [True])


def test_kill_interrupts_an_async_call() -> None:
    """An operator need not wait for the vendor."""
    enable(max_turns=9)

    async def main() -> Any:
        running = asyncio.create_task(agent(SLOW([])).ainvoke(ASK, STEPS))
        while kill(agent="boss") == 0:  # noqa: ASYNC110  nothing tells that it has begun
            await asyncio.sleep(0.01)
        return await running

    assert halt_of(asyncio.run(main())).reason == "killed"


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


def test_kill_in_a_tool_refuses_the_next_call() -> None:
    """Running tools are waited for, and have their result."""
    enable(max_turns=9)

    @tool
    def end() -> str:
        """End everything."""
        kill(agent="boss")
        return "ended"

    model = ScriptedChatModel(endless(uses("end")))
    state = agent(model, end).invoke(ASK, STEPS)
    assert model.calls == 1
    assert halt_of(state).reason == "killed"
    assert state["messages"][-2].content == "ended"


# --- the rest of a program ------------------------------------------------------------------------


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


def test_unmeasured_stream_is_estimated(events: list[Event]) -> None:
    """A stream without usage is never counted as zero tokens."""
    enable(max_turns=2, observers=[events.append])
    model = ScriptedChatModel([says("word " * 50, usage=None)])
    list(agent(model).stream(ASK, STEPS, stream_mode="messages"))
    (call,) = [each for each in events if isinstance(each, ModelCall)]
    assert call.kind == "unmeasured"
    assert call.usage.output > 20


def test_tokens_of_a_stream_count_once(events: list[Event]) -> None:
    """`stream` of a model calls other methods of it, and its usage comes in several chunks."""
    enable(max_turns=9, observers=[events.append])
    model = ScriptedChatModel([uses("search", usage=tokens(40)), says("done", usage=tokens(50))])
    list(agent(model).stream(ASK, STEPS, stream_mode="messages"))
    assert [each.usage.total for each in events if isinstance(each, ModelCall)] == [40, 50]


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


def test_message_of_a_halt_is_an_ordinary_message() -> None:
    """Code that reads the last message of a state needs no change."""
    enable(max_turns=1, halt_message="Sorry, {agent} stopped.")
    state = agent(looping()).invoke({"messages": [HumanMessage("go")]}, STEPS)
    last = state["messages"][-1]
    assert isinstance(last, AIMessage)
    assert (last.text, last.tool_calls) == ("Sorry, boss stopped.", [])


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
