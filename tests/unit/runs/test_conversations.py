"""Limits of conversations: over all invocations of a thread, a session or an agent object."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from agents import Agent as SdkAgent
from agents import RunConfig, Runner, SQLiteSession, function_tool
from langchain.agents import create_agent
from langchain_core.tools import tool as langchain_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from opentelemetry import baggage
from opentelemetry import context as otel_context
from strands import Agent, tool
from strands.session import FileSessionManager

import otel_limits
from otel_limits import LimitReachedError, Limits, LimitsPlugin, Started, Stop, enable, stop_of
from otel_limits.core.policy import Policy
from otel_limits.runs.conversations import Conversations, conversation_hash
from otel_limits.runs.current import CURRENT
from otel_limits.runs.registry import RunRegistry
from otel_limits.testing import (
    FakeTime,
    ScriptedAgentsModel,
    ScriptedChatModel,
    ScriptedModel,
    endless,
    says,
    tokens,
    uses,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from otel_limits import Event
    from otel_limits.testing import Answer

IDS = itertools.count()
"""Of threads and sessions: each test has its own."""


QUIET = RunConfig(tracing_disabled=True)


def delegating() -> Iterator[Answer]:
    """Script an agent that calls its helper once per message."""
    for _ in range(9):
        yield uses("helper", arguments={"input": "x"})
        yield says("done")


class Chat(NamedTuple):
    """A conversation with an agent."""

    send: Callable[[], Any]
    """Sends a message, and returns the result."""
    model: Any


@tool
def search() -> str:
    """Search."""
    return "nothing"


def strands_chat(script: Iterable[Answer], thread: str = "") -> Chat:
    """Chat with an agent object, which is the conversation."""
    del thread
    model = ScriptedModel(script)
    agent = Agent(model=model, name="boss", tools=[search], callback_handler=None)
    return Chat(lambda: agent("hi"), model)


@langchain_tool
def look() -> str:
    """Look."""
    return "nothing"


def langchain_chat(script: Iterable[Answer], thread: str = "") -> Chat:
    """Chat in a thread of a graph."""
    model = ScriptedChatModel(script)
    graph: Any = create_agent(model, [look], name="boss", checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": thread or f"thread-{next(IDS)}"}}
    return Chat(lambda: graph.invoke({"messages": "hi"}, config), model)


@function_tool(name_override="search")
def lookup() -> str:
    """Search."""
    return "nothing"


SESSIONS = ExitStack()


@pytest.fixture(autouse=True)
def close_sessions() -> Iterator[None]:
    """Close the databases of the SDK's sessions, as Python 3.13 warns of others."""
    yield
    SESSIONS.close()


def sdk_session(name: str = "") -> SQLiteSession:
    """Begin a session of the SDK, which ends with the test."""
    session = SQLiteSession(name or f"session-{next(IDS)}")
    SESSIONS.callback(session.close)
    return session


def sdk_chat(script: Iterable[Answer], thread: str = "") -> Chat:
    """Chat in a session of the SDK."""
    model = ScriptedAgentsModel(script)
    agent = SdkAgent("boss", model=model, tools=[lookup])
    session = sdk_session(thread)
    return Chat(
        lambda: asyncio.run(Runner.run(agent, "hi", session=session, run_config=QUIET)), model
    )


CHATS = {"strands": strands_chat, "langchain": langchain_chat, "openai-agents": sdk_chat}

each_framework = pytest.mark.parametrize("chat_of", CHATS.values(), ids=CHATS)


def outcome(chat: Chat) -> tuple[str | None, str | None]:
    """Send a message; return reason and limit of its halt, if any."""
    try:
        stop = stop_of(chat.send())
    except LimitReachedError as error:
        stop = error.stop
    if stop is None or stop.breach is None:
        return None, None
    return stop.reason, stop.breach.limit


HALTED = ("max_turns", "conversation_max_turns")
GOES_ON = (None, None)


@each_framework
@pytest.mark.parametrize("action", ["halt", "raise"])
def test_a_chat_stops_at_its_turns(chat_of: Any, action: Any) -> None:
    """N turns over any number of messages; later messages make no call."""
    enable(conversation=Limits(max_turns=3), action=action)
    chat = chat_of(endless(says("a")))
    assert [outcome(chat) for _ in range(5)] == [GOES_ON] * 3 + [HALTED] * 2
    assert chat.model.calls == 3


@each_framework
def test_a_raised_cap_lets_a_chat_go_on(chat_of: Any) -> None:
    """The messages of a halt leave a history that the model accepts."""
    enable(conversation=Limits(max_turns=2))
    chat = chat_of(endless(says("a")))
    assert [outcome(chat) for _ in range(4)] == [GOES_ON] * 2 + [HALTED] * 2
    enable(conversation=Limits(max_turns=4))
    assert [outcome(chat) for _ in range(3)] == [GOES_ON] * 2 + [HALTED]
    assert chat.model.calls == 4


@each_framework
def test_conversations_are_apart(chat_of: Any) -> None:
    """Each thread, session or agent object has its own count."""
    enable(conversation=Limits(max_turns=1))
    chats = [chat_of(endless(says("a"))) for _ in range(3)]
    assert [outcome(chat) for chat in chats] == [GOES_ON] * 3
    assert [outcome(chat) for chat in chats] == [HALTED] * 3


@each_framework
def test_observe_refuses_nothing(chat_of: Any) -> None:
    """Each message that would have been refused is published."""
    stops: list[Stop] = []
    enable(
        conversation=Limits(max_turns=1), action="observe", observers=[noting(Stop, stops.append)]
    )
    chat = chat_of(endless(says("a")))
    assert [outcome(chat) for _ in range(3)] == [GOES_ON] * 3
    assert [stop.action for stop in stops] == ["none", "observed", "observed"]


@each_framework
def test_one_last_answer_per_conversation(chat_of: Any) -> None:
    """Not one per message: after it, messages are refused."""
    enable(conversation=Limits(max_turns=2), action="wrap_up")
    chat = chat_of(endless(says("a")))
    assert [outcome(chat) for _ in range(5)] == [GOES_ON] * 2 + [HALTED] * 3
    assert chat.model.calls == 3


@each_framework
def test_a_refused_tool_halts(chat_of: Any) -> None:
    """Tool calls add up over messages; one more is refused, and the agent halted."""
    names = {langchain_chat: "look"}
    use = uses(names.get(chat_of, "search"))
    enable(conversation=Limits(max_tool_calls=2))
    chat = chat_of(answer for _ in range(9) for answer in (use, says("a")))
    expected = ("max_tool_calls", "conversation_max_tool_calls")
    assert [outcome(chat) for _ in range(3)] == [GOES_ON] * 2 + [expected]
    assert chat.model.calls == 5


@pytest.mark.parametrize(
    ("caps", "calls"),
    [
        (Limits(max_model_calls=4), 4),
        (Limits(max_token_budget=35), 4),
        (Limits(max_cost_usd=Decimal("0.35")), 4),
    ],
)
def test_each_limit_adds_up(caps: Limits, calls: int, tmp_path: Any, monkeypatch: Any) -> None:
    """As in an invocation, tokens and cost are checked after each call."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {'*': {price: {input: 10000, output: 10000}}}\n")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(conversation=caps)
    chat = strands_chat(endless(says("a", usage=tokens(10))))
    for _ in range(6):
        outcome(chat)
    assert chat.model.calls == calls


# --- identity -------------------------------------------------------------------------------------


def noting(kind: type, note: Callable[[Any], None]) -> Callable[[Event], None]:
    """An observer of one kind of event."""

    def observe(event: Event) -> None:
        if isinstance(event, kind):
            note(event)

    return observe


def test_a_graph_without_threads_has_no_conversation(caplog: pytest.LogCaptureFixture) -> None:
    """Two users of one graph never share a count, and the log has it once."""
    enable(conversation=Limits(max_turns=1))
    model = ScriptedChatModel(endless(says("a")))
    graph: Any = create_agent(model, [], name="served")
    for _ in range(3):
        assert stop_of(graph.invoke({"messages": "hi"})) is None
    said = [each.getMessage() for each in caplog.records if "per conversation" in each.getMessage()]
    assert len(said) == 1
    assert "'served'" in said[0]


def test_threads_of_one_graph_are_apart() -> None:
    """The same graph object, with one budget for each thread of any length."""
    enable(conversation=Limits(max_turns=1))
    graph: Any = create_agent(ScriptedChatModel(endless(says("a"))), [], name="threads")
    ids = [f"{'x' * 10_000}{n}-{next(IDS)}" for n in (1, 2)]
    sent = [
        stop_of(graph.invoke({"messages": "hi"}, {"configurable": {"thread_id": each}}))
        for each in (*ids, *ids)
    ]
    assert [stop is None for stop in sent] == [True, True, False, False]


def test_an_agent_with_cleared_messages_begins_a_conversation() -> None:
    """The messages are the conversation: an object that is cleared serves the next user."""
    enable(conversation=Limits(max_turns=1))
    agent = Agent(model=ScriptedModel(endless(says("a"))), name="pooled", callback_handler=None)
    for _ in range(3):
        assert stop_of(agent("hi")) is None
        agent.messages.clear()


@pytest.mark.parametrize("key", ["attribute.chat", "baggage.chat"])
def test_a_key_identifies_the_conversation(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that builds an agent for each message has the ID elsewhere."""
    monkeypatch.setenv("OTEL_LIMITS_CONVERSATION_KEY", key)
    enable(conversation=Limits(max_turns=2))
    model, chats = ScriptedModel(endless(says("a"))), [f"chat-{next(IDS)}" for _ in range(2)]
    for chat in (*chats, *chats, *chats):
        agent = Agent(
            model=model, name="keyed", callback_handler=None, trace_attributes={"chat": chat}
        )
        token = otel_context.attach(baggage.set_baggage("chat", chat))
        try:
            agent("hi")
        finally:
            otel_context.detach(token)
    assert model.calls == 4


@pytest.mark.parametrize("chat_of", [langchain_chat, sdk_chat])
def test_a_conversation_has_the_hash_of_its_agent_and_thread(
    chat_of: Callable[..., Chat],
) -> None:
    """Imported spans have the ID of a thread or session, too, and `audit whois` looks for it."""
    seen: list[Started] = []
    enable(observers=[noting(Started, seen.append)], max_turns=9)
    thread = f"thread-{next(IDS)}"
    chat_of([says("a")], thread).send()
    expected = conversation_hash("boss", thread)
    assert [each.invocation.conversation for each in seen] == [expected]


def test_events_share_the_hash_of_their_conversation() -> None:
    """A sub-agent belongs to the conversation of the agent around it; no ID appears."""
    seen: list[Started] = []
    enable(observers=[noting(Started, seen.append)], max_turns=9)
    inner = Agent(model=ScriptedModel(endless(says("a"))), name="helper", callback_handler=None)
    outer = Agent(
        model=ScriptedModel([uses("helper", arguments={"input": "x"}), says("done")]),
        name="boss",
        tools=[inner.as_tool(name="helper", description="Help.")],
        callback_handler=None,
    )
    outer("hi")
    assert [each.invocation.agent for each in seen] == ["boss", "helper"]
    assert len({each.invocation.conversation for each in seen}) == 1
    assert seen[0].invocation.conversation


def test_calls_of_sub_agents_count() -> None:
    """All calls within a conversation count for it, as within a tree."""
    enable(conversation=Limits(max_model_calls=3))
    helper = ScriptedModel(endless(says("a")))
    inner = Agent(model=helper, name="helper", callback_handler=None)
    model = ScriptedModel(
        answer
        for _ in range(9)
        for answer in (uses("helper", arguments={"input": "x"}), says("done"))
    )
    outer = Agent(
        model=model,
        name="boss",
        tools=[inner.as_tool(name="helper", description="Help.")],
        callback_handler=None,
    )
    outer("hi")
    outer("hi")
    assert model.calls + helper.calls == 3


def test_a_sub_agent_has_its_own_tighter_cap() -> None:
    """Its own plugin limits it within the conversation of the agent around it."""
    enable(conversation=Limits(max_turns=100))
    helper = ScriptedModel(endless(says("a")))
    inner = Agent(
        model=helper,
        name="helper",
        callback_handler=None,
        plugins=[LimitsPlugin(conversation=Limits(max_turns=1))],
    )
    model = ScriptedModel(
        answer
        for _ in range(9)
        for answer in (uses("helper", arguments={"input": "x"}), says("done"))
    )
    outer = Agent(
        model=model,
        name="boss",
        tools=[inner.as_tool(name="helper", description="Help.")],
        callback_handler=None,
    )
    assert stop_of(outer("hi")) is None
    outer("hi")
    assert (model.calls, helper.calls) == (4, 1)


def test_a_sub_agent_remembers_its_conversation_longer(tmp_path: Any, monkeypatch: Any) -> None:
    """The agent around it has the same cap, but soon forgets what was used."""
    policy = tmp_path / "limits.yaml"
    policy.write_text(
        "defaults: {conversation: {max_turns: 4}, conversation_idle: 1h}\n"
        "agents: {helper: {conversation_idle: 1d}}\n"
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    helper = ScriptedModel(endless(says("a")))
    inner = Agent(model=helper, name="helper", callback_handler=None)
    outer = Agent(
        model=ScriptedModel(delegating()),
        name="boss",
        tools=[inner.as_tool(name="helper", description="Help.")],
        callback_handler=None,
    )
    with FakeTime() as clock:
        for _ in range(6):
            assert stop_of(outer("hi")) is None
            clock.advance(2 * 60 * 60)
    assert helper.calls == 4


@pytest.mark.parametrize(("around", "within"), [("allow", "deny"), ("deny", "allow")])
def test_a_sub_agent_keeps_its_stricter_rule_for_outages(around: Any, within: Any) -> None:
    """Its own conversation is then read before its first call; else that around it suffices."""
    runs = RunRegistry()
    policy = Policy(conversation=Limits(max_turns=4), conversation_on_store_error=around)
    outer = runs.start("boss", policy, conversation="1")
    token = CURRENT.set(outer)
    inner = runs.start("helper", replace(policy, conversation_on_store_error=within))
    CURRENT.reset(token)
    assert (len(outer.trees), len(inner.trees)) == (1, 2 if within == "deny" else 1)


# --- memory ---------------------------------------------------------------------------------------


def test_an_idle_conversation_is_forgotten(
    fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `conversation_idle` without a call, and not before."""
    monkeypatch.setenv("OTEL_LIMITS_CONVERSATION_IDLE", "1h")
    enable(conversation=Limits(max_turns=1))
    chat = langchain_chat(endless(says("a")))
    assert outcome(chat) == GOES_ON
    fake_time.advance(3599)
    assert outcome(chat) == HALTED
    fake_time.advance(3600)
    assert outcome(chat) == GOES_ON


def test_memory_is_bounded() -> None:
    """The longest idle of too many is forgotten, and counted; never one with a running call."""
    now = itertools.count()
    kept = Conversations(lambda: float(next(now)), most=3)
    policy = Policy(conversation=Limits(max_turns=5))
    kept.of("running", "boss", policy).members += 1
    for number in range(1_000):
        for _ in range(50):
            kept.of(conversation_hash("boss", str(number)), "boss", policy)
    assert len(kept) == 3
    assert kept.forgotten == 998
    assert kept.of("running", "boss", policy).members == 1


# --- settings and texts ---------------------------------------------------------------------------


def test_limits_by_agent(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy file has them for each agent, as other limits."""
    policy = tmp_path / "limits.yaml"
    policy.write_text(
        "defaults: {conversation: {max_turns: 9}, conversation_idle: 2h}\n"
        "agents: {boss: {conversation: {max_turns: 1}}}\n"
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    chat = strands_chat(endless(says("a")))
    stop = [stop_of(chat.send()) for _ in range(2)][1]
    assert stop is not None
    assert "limits.yaml:2. The whole conversation shares this limit: start a new" in stop.sentence


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("OTEL_LIMITS_CONVERSATION_IDLE", "0s", "must be a duration above 0"),
        ("OTEL_LIMITS_CONVERSATION_KEY", "chat", "must be attribute.NAME or baggage.NAME"),
        ("OTEL_LIMITS_CONVERSATION_MAX_TURNS", "0", "must be a whole number of 1 or more"),
    ],
)
def test_bad_values_are_refused(
    variable: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them quietly means that there is no limit."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(otel_limits.ConfigurationError, match=problem):
        enable()


def test_other_limits_are_none_of_a_conversation() -> None:
    """A conversation has no duration, for example."""
    with pytest.raises(otel_limits.ConfigurationError, match="not a limit of a conversation"):
        enable(conversation=Limits(max_duration_seconds=5))


def test_the_end_user_reads_to_start_a_new_conversation() -> None:
    """Every further message would be refused."""
    enable(conversation=Limits(max_turns=1))
    chat = strands_chat(endless(says("a")))
    chat.send()
    assert str(chat.send()).strip().endswith("Please start a new conversation.")


# --- questions ------------------------------------------------------------------------------------


def test_a_person_is_asked_once_per_strands_agent() -> None:
    """An answer raises the cap of the conversation; a second question is not asked."""
    enable(conversation=Limits(max_turns=1), action="ask")
    model = ScriptedModel(endless(says("a")))
    agent: Any = Agent(model=model, name="asking", callback_handler=None)
    agent("hi")
    asked = agent("hi")
    answer = {"interruptId": asked.interrupts[0].id, "response": 2}
    assert asked.stop_reason == "interrupt"
    assert stop_of(agent([{"interruptResponse": answer}])) is None
    assert stop_of(agent("hi")) is None
    stop = stop_of(agent("hi"))
    assert stop is not None
    assert stop.reason == "max_turns"
    assert model.calls == 3


def test_a_person_is_asked_once_per_thread() -> None:
    """A refusal holds for the conversation: later messages are refused without a question."""
    enable(conversation=Limits(max_turns=1), action="ask")
    model = ScriptedChatModel(endless(says("a")))
    graph: Any = create_agent(model, [look], name="asking", checkpointer=InMemorySaver())
    yes, no = ({"configurable": {"thread_id": f"asked-{next(IDS)}"}} for _ in range(2))
    for config in (yes, no):
        graph.invoke({"messages": "hi"}, config)
        assert "__interrupt__" in graph.invoke({"messages": "hi"}, config)
    assert stop_of(graph.invoke(Command(resume="yes"), yes)) is None
    assert stop_of(graph.invoke(Command(resume="no"), no)) is not None
    for config in (yes, no):
        result = graph.invoke({"messages": "hi"}, config)
        assert "__interrupt__" not in result
        assert stop_of(result) is not None
    assert model.calls == 3


def test_a_person_is_asked_once_per_session() -> None:
    """An approval raises the cap by as much again."""
    enable(conversation=Limits(max_turns=1), action="ask")
    model = ScriptedAgentsModel(endless(says("a")))
    agent, session = SdkAgent("asking", model=model), sdk_session()

    def send(given: Any) -> Any:
        return asyncio.run(Runner.run(agent, given, session=session, run_config=QUIET))

    send("hi")
    asked = send("hi")
    state = asked.to_state()
    state.approve(asked.interruptions[0])
    assert stop_of(send(state)) is None
    refused = send("hi")
    assert not refused.interruptions
    assert stop_of(refused) is not None
    assert model.calls == 2


# --- concurrency ----------------------------------------------------------------------------------


def test_concurrent_messages_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in flight are reserved, so that together they make exactly N."""
    monkeypatch.setenv("OTEL_LIMITS_CONVERSATION_KEY", "attribute.chat")
    enable(conversation=Limits(max_model_calls=5))
    model, chat = ScriptedModel(endless(says("a"))), f"chat-{next(IDS)}"

    async def send() -> Any:
        agent = Agent(
            model=model, name="keyed", callback_handler=None, trace_attributes={"chat": chat}
        )
        return stop_of(await agent.invoke_async("hi"))

    async def send_all() -> list[Any]:
        return await asyncio.gather(*(send() for _ in range(12)))

    stops = asyncio.run(send_all())
    assert model.calls == 5
    assert sum(stop is not None for stop in stops) == 7


def test_a_session_of_strands_is_on_the_span(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """Another agent object continues the conversation of its session."""
    enable(conversation=Limits(max_turns=1))
    identity = f"session-{next(IDS)}"
    stops = []
    for _ in range(2):
        agent = Agent(
            model=ScriptedModel([says("a")]),
            name="stored",
            callback_handler=None,
            session_manager=FileSessionManager(identity, storage_dir=str(tmp_path)),
        )
        stops.append(stop_of(agent("hi")))
    assert [stop is None for stop in stops] == [True, False]
    found = [
        (each.attributes or {}).get("gen_ai.conversation.id")
        for each in spans.get_finished_spans()
        if each.name == "invoke_agent stored"
    ]
    assert found == [identity, identity]


def test_an_extended_conversation_does_not_replace_a_tree() -> None:
    """Its cap was lower than that of the tree, until a person has raised it."""
    enable(tree=Limits(max_turns=3), conversation=Limits(max_turns=2), action="ask")
    model = ScriptedModel(endless(uses("search")))
    agent: Any = Agent(model=model, name="asking", tools=[search], callback_handler=None)
    asked = agent("hi")
    answer = {"interruptId": asked.interrupts[0].id, "response": 10}
    stop = stop_of(agent([{"interruptResponse": answer}]))
    assert stop is not None
    assert stop.breach is not None
    assert stop.breach.limit == "tree_max_turns"
    assert model.calls == 3


def test_an_extension_holds_for_sub_agents() -> None:
    """In later messages, too, they share the extended cap of the agent around them."""
    enable(conversation=Limits(max_turns=2), action="ask")
    helper_model = ScriptedModel([*[uses("search")] * 2, says("done")] * 9)
    helper = Agent(model=helper_model, name="helper", tools=[search], callback_handler=None)
    agent: Any = Agent(
        model=ScriptedModel(delegating()),
        name="boss",
        tools=[helper.as_tool(name="helper")],
        callback_handler=None,
    )
    asked = agent("hi")
    answer = {"interruptId": asked.interrupts[0].id, "response": 20}
    assert stop_of(agent([{"interruptResponse": answer}])) is None
    result = agent("hi")
    assert not result.interrupts
    assert helper_model.calls == 6
