"""Realtime agents (`BidiAgent`): a session is one invocation, and limits end it."""

from __future__ import annotations

import asyncio
import importlib.util
import sqlite3
from contextlib import closing, nullcontext
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.bidi import BidiAgent
from strands.bidi.types import (
    BidiConnectionRestartEvent,
    BidiConnectionStopEvent,
    BidiResponseStopEvent,
    InputStream,
    OutputStream,
)

import otel_limits
from otel_limits import Limits, LimitsPlugin
from otel_limits.core.events import Event, Halt, ModelCall, QuotaDecision, Stop, ToolCall
from otel_limits.testing import FakeTime, ScriptedModel, endless, uses
from tests.realtime import RealtimeModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.conftest import Metric

NO_RESPONSES = (
    "sends no responses, only their parts. In this invocation quotas are checked at its start and "
    "charged at its end."
)


async def read(agent: BidiAgent) -> list[Any]:
    """Read a session to its end, or until the model falls silent."""
    async with agent:
        return [event async for event in agent.receive()]


def session(model: RealtimeModel, **arguments: Any) -> list[Any]:
    """Run a session to its end."""
    agent = BidiAgent(model=model, name="voice", **arguments)
    return asyncio.run(asyncio.wait_for(read(agent), 20))


@tool
def search() -> str:
    """Search for nothing."""
    return "nothing found"


def stops_in(events: list[Event]) -> list[Stop]:
    """Return the ends of all invocations."""
    return [each for each in events if isinstance(each, Stop)]


def test_session_ends_after_max_turns(events: list[Event]) -> None:
    """A realtime agent used to run without limits, although the log promised some."""
    otel_limits.enable(Limits(max_turns=3), observers=[events.append])
    model = RealtimeModel()
    received = session(model)
    (stop,) = stops_in(events)
    assert (stop.reason, stop.action, stop.turns, stop.agent) == ("max_turns", "halted", 3, "voice")
    assert sum(isinstance(each, BidiResponseStopEvent) for each in received) == 3
    assert model.stops == 1


def test_last_event_carries_stop() -> None:
    """A session has no result: `stop_of` reads its last event."""
    otel_limits.enable(Limits(max_turns=2))
    last = session(RealtimeModel())[-1]
    assert isinstance(last, BidiConnectionStopEvent)
    stop = otel_limits.stop_of(last)
    assert stop is not None
    assert stop.reason == "max_turns"


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        (Limits(max_token_budget=40), "max_token_budget", 3),
        (Limits(max_output_tokens=12), "max_output_tokens", 2),
        (Limits(max_model_calls=4), "max_model_calls", 4),
        (Limits(max_iterations=2), "max_iterations", 2),
    ],
)
def test_cap_ends_session(events: list[Event], limits: Limits, reason: str, turns: int) -> None:
    """Every cap on responses and tokens holds, with the usage of usage events."""
    otel_limits.enable(limits, observers=[events.append])
    session(RealtimeModel())
    (stop,) = stops_in(events)
    assert (stop.reason, stop.turns, stop.usage.total) == (reason, turns, 15 * turns)


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Set the policy file."""
    path = tmp_path / "limits.yaml"
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    return path.write_text


def test_cost_cap_ends_session(policy: Callable[[str], object], events: list[Event]) -> None:
    """Usage events have a price like the usage of any call."""
    policy("models: {realtime-1: {price: {input: 1000, output: 1000}}}")
    otel_limits.enable(Limits(max_cost_usd=0.04), observers=[events.append])
    session(RealtimeModel())
    (stop,) = stops_in(events)
    assert (stop.reason, stop.turns, stop.cost) == ("max_cost_usd", 3, Decimal("0.045"))


def test_response_without_price_ends_session(
    policy: Callable[[str], object], events: list[Event]
) -> None:
    """A cost limit on its own halts a model without a price."""
    policy("models: {other: {price: {input: 1000, output: 1000}}}")
    otel_limits.enable(Limits(max_cost_usd=0.04), observers=[events.append])
    session(RealtimeModel())
    (stop,) = stops_in(events)
    assert (stop.action, stop.turns) == ("halted", 1)


def test_cap_of_one_tool_refuses_its_call(events: list[Event]) -> None:
    """The refused calls do not run, and three in a row end the session."""
    otel_limits.enable(Limits(max_calls_per_tool={"search": 1}), observers=[events.append])
    session(RealtimeModel("search"), tools=[search])
    assert [each.status for each in events if isinstance(each, ToolCall)] == [
        "success",
        *["refused"] * 3,
    ]
    assert stops_in(events)[0].action == "halted"


def test_quota_ends_session(policy: Callable[[str], object], events: list[Event]) -> None:
    """A quota counts each response, and a later session ends before its first one."""
    policy("quotas: {voice: {tokens: 5000, window: month, reserve: expected}}")
    otel_limits.enable(Limits(max_turns=1000), observers=[events.append])
    model = RealtimeModel(most=1000)
    session(model)
    session(RealtimeModel())
    first, second = stops_in(events)
    assert (first.reason, second.reason) == ("quota_exceeded", "quota_exceeded")
    assert 0 < first.usage.total <= 5000
    assert second.usage.total == 0


def test_spent_conversation_ends_session_before_its_quota_is_asked(
    policy: Callable[[str], object], events: list[Event]
) -> None:
    """A limit that is reached precedes quotas, and no response begins."""
    policy("quotas: {voice: {model_calls: 99, window: month}}")
    otel_limits.enable(conversation=Limits(max_turns=2), observers=[events.append])
    agent = BidiAgent(model=RealtimeModel(), name="voice", messages=[])

    async def call_twice() -> None:
        for _ in range(2):
            await asyncio.wait_for(read(agent), 20)

    asyncio.run(call_twice())
    first, second = stops_in(events)
    assert (first.reason, first.turns) == ("max_turns", 2)
    assert (second.reason, second.turns) == ("max_turns", 0)
    asked = {each.invocation.id for each in events if isinstance(each, QuotaDecision)}
    assert asked == {first.invocation_id}


def test_usage_is_counted_once(events: list[Event]) -> None:
    """Usage comes in parts, and each response is one model call with their sum."""
    otel_limits.enable(Limits(max_turns=2), observers=[events.append])
    session(RealtimeModel())
    calls = [each for each in events if isinstance(each, ModelCall)]
    assert [(each.usage.input, each.usage.output, each.kind) for each in calls] == [
        (9, 6, "measured")
    ] * 2
    assert [(each.model, each.turn, each.side) for each in calls] == [
        ("realtime-1", 1, False),
        ("realtime-1", 2, False),
    ]


def test_action_raise_raises_from_receive(events: list[Event]) -> None:
    """`raise` reaches the code that reads the session."""
    otel_limits.enable(Limits(max_turns=2), action="raise", observers=[events.append])
    with pytest.raises(otel_limits.MaxTurnsReachedException):
        session(RealtimeModel())
    assert [(each.reason, each.action) for each in stops_in(events)] == [("max_turns", "raised")]


@pytest.mark.parametrize("action", ["wrap_up", "ask"])
def test_actions_that_need_a_loop_halt(events: list[Event], action: Any) -> None:
    """A session can neither be asked for a last answer nor be interrupted."""
    otel_limits.enable(Limits(max_turns=2), action=action, observers=[events.append])
    session(RealtimeModel())
    assert [(each.reason, each.action) for each in stops_in(events)] == [("max_turns", "halted")]


def test_observe_lets_session_continue(events: list[Event]) -> None:
    """A would-be halt is reported, and the session continues."""
    otel_limits.enable(Limits(max_turns=2), action="observe", observers=[events.append])

    async def talk() -> None:
        agent = BidiAgent(model=RealtimeModel(), name="voice")
        async with agent:
            turns = 0
            async for event in agent.receive():
                turns += isinstance(event, BidiResponseStopEvent)
                if turns == 6:
                    break

    asyncio.run(talk())
    (stop,) = stops_in(events)
    assert (stop.reason, stop.action, stop.turns) == ("end_turn", "observed", 6)


def test_session_stopped_at_cap_is_not_halted(events: list[Event]) -> None:
    """A natural end on the last permitted turn wins."""
    otel_limits.enable(Limits(max_turns=2), observers=[events.append])

    async def talk() -> None:
        agent = BidiAgent(model=RealtimeModel(), name="voice")
        async with agent:
            turns = 0
            async for event in agent.receive():
                turns += isinstance(event, BidiResponseStopEvent)
                if turns == 2:
                    break

    asyncio.run(talk())
    (stop,) = stops_in(events)
    assert (stop.reason, stop.action) == ("end_turn", "none")


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("limited", ["time", "kill"])
def test_application_stops_session_once(
    events: list[Event],
    limited: str,
    is_read: bool,  # noqa: FBT001
    fake_time: FakeTime,
) -> None:
    """The outcome is final as soon as it begins to, even if it takes a while."""
    otel_limits.enable(Limits(max_duration_seconds=30), observers=[events.append])
    limit: dict[str, Callable[[], object]] = {
        "time": partial(fake_time.advance, 30),
        "kill": partial(otel_limits.kill, agent="voice"),
    }
    readers: list[Callable[[], object]] = []

    class Leaving(RealtimeModel):
        async def stop(self) -> None:
            await RealtimeModel.stop(self)
            limit[limited]()
            for read_next in readers:
                read_next()
            for _ in range(20):
                await asyncio.sleep(0)

    async def talk(model: RealtimeModel) -> None:
        agent = BidiAgent(model=model, name="voice")
        await agent.start()
        reading = agent.receive()
        await anext(reading)
        later: list[asyncio.Future[Any]] = []
        if is_read:
            readers.append(lambda: later.append(asyncio.ensure_future(anext(reading))))
        await agent.stop()
        for each in later:
            each.cancel()
        await asyncio.wait(later) if later else None
        await reading.aclose()

    model = Leaving()
    asyncio.run(asyncio.wait_for(talk(model), 20))
    (stop,) = stops_in(events)
    assert (stop.reason, stop.action, model.stops) == ("end_turn", "none", 1)
    assert not [each for each in events if isinstance(each, Halt)]


def test_session_stopped_right_after_its_deadline_is_stopped_once(
    events: list[Event], fake_time: FakeTime
) -> None:
    """The application's stop begins before the one that the deadline has requested."""
    otel_limits.enable(Limits(max_duration_seconds=30), observers=[events.append])

    class Leaving(RealtimeModel):
        async def stop(self) -> None:
            await RealtimeModel.stop(self)
            for _ in range(20):
                await asyncio.sleep(0)

    async def talk(model: RealtimeModel) -> None:
        agent = BidiAgent(model=model, name="voice")
        await agent.start()
        fake_time.advance(30)
        await agent.stop()

    model = Leaving()
    asyncio.run(asyncio.wait_for(talk(model), 20))
    (stop,) = stops_in(events)
    assert (stop.reason, stop.action, model.stops) == ("end_turn", "none", 1)


def test_tools_of_last_turn_run(events: list[Event]) -> None:
    """Its tools run to their end, and their results request no further response."""
    otel_limits.enable(Limits(max_turns=3), observers=[events.append])
    model = RealtimeModel("search")
    agent = BidiAgent(model=model, name="voice", tools=[search])
    asyncio.run(asyncio.wait_for(read(agent), 20))
    tools = [each for each in events if isinstance(each, ToolCall)]
    assert [each.status for each in tools] == ["success"] * 3
    assert model.responses == 3
    results = [
        block["toolResult"]["toolUseId"]
        for message in agent.messages
        for block in message["content"]
        if "toolResult" in block
    ]
    assert results.count("use-3") == 2  # dispatched, and answered


def test_tool_calls_are_refused_at_cap(events: list[Event]) -> None:
    """The call beyond the cap does not run, then the session ends."""
    otel_limits.enable(Limits(max_tool_calls=2), observers=[events.append])
    model = RealtimeModel("search")
    session(model, tools=[search])
    tools = [(each.status, each.seconds is None) for each in events if isinstance(each, ToolCall)]
    assert tools == [("success", False), ("success", False), ("refused", True)]
    assert stops_in(events)[0].reason == "max_tool_calls"


def test_repeated_calls_are_a_loop(events: list[Event]) -> None:
    """Loop limits see the tools of a session."""
    otel_limits.enable(Limits(max_identical_tool_calls=3), observers=[events.append])
    session(RealtimeModel("search"), tools=[search])
    assert stops_in(events)[0].reason == "loop_detected"


def test_sub_agents_belong_to_session_tree(events: list[Event]) -> None:
    """A session whose tools call agents used to make 120 calls at a tree cap of 10."""
    otel_limits.enable(tree=Limits(max_model_calls=10), observers=[events.append])
    helper = ScriptedModel(endless(uses("search")))

    @tool
    def delegate() -> str:
        """Ask another agent."""
        return str(Agent(model=helper, tools=[search], name="helper", callback_handler=None)("go"))

    session(RealtimeModel("delegate"), tools=[delegate])
    calls = [each for each in events if isinstance(each, ModelCall)]
    assert len(calls) == 10
    assert len({each.invocation.root_id for each in calls}) == 1
    assert [each.reason for each in stops_in(events)] == ["max_model_calls"] * 2
    assert stops_in(events)[-1].agent == "voice"


@pytest.mark.parametrize("action", ["halt", "raise"])
def test_model_of_session_reads_not_to_repeat_a_halted_agent(action: Any) -> None:
    """The result of the tool has neither the end user's text nor the operator's."""
    otel_limits.enable(Limits(max_turns=2))
    model = ScriptedModel(endless(uses("search")))
    helper = Agent(
        model=model,
        tools=[search],
        name="helper",
        plugins=[LimitsPlugin(action=action)],
        callback_handler=None,
    )
    voice = RealtimeModel("helper")
    session(voice, tools=[helper.as_tool()])
    told = str(voice.sent)
    assert "Agent 'helper' stopped before it finished" in told
    assert "Do not call it again for this task." in told
    assert "could not be completed" not in told
    assert "Run the agent again" not in told


@pytest.mark.parametrize("limited", ["time", "kill"])
def test_silent_session_is_ended(events: list[Event], limited: str, fake_time: FakeTime) -> None:
    """A time limit or a kill ends a session also while nothing happens."""
    limits = Limits(max_duration_seconds=30) if limited == "time" else Limits(max_turns=9)
    otel_limits.enable(limits, observers=[events.append])
    ends: dict[str, Callable[[], object]] = {
        "time": partial(fake_time.advance, 30),
        "kill": partial(otel_limits.kill, agent="voice"),
    }
    model = RealtimeModel(most=1, on_silence=ends[limited])
    received = session(model)
    (stop,) = stops_in(events)
    assert stop.reason == ("max_duration" if limited == "time" else "killed")
    assert model.stops == 1
    assert isinstance(received[-1], BidiConnectionStopEvent)


@pytest.mark.parametrize("action", ["observe", "raise"])
def test_kill_ends_session_with_any_action(events: list[Event], action: Any) -> None:
    """Alerts about limits do not count kills."""
    otel_limits.enable(Limits(max_turns=9), action=action, observers=[events.append])

    async def talk() -> None:
        async with BidiAgent(model=RealtimeModel(), name="voice") as agent:
            async for event in agent.receive():
                if isinstance(event, BidiResponseStopEvent):
                    otel_limits.kill(agent="voice")

    raised = pytest.raises(otel_limits.KilledError) if action == "raise" else nullcontext()
    with raised:
        asyncio.run(asyncio.wait_for(talk(), 20))
    (stop,), (halt,) = stops_in(events), [each for each in events if isinstance(each, Halt)]
    assert (stop.reason, stop.action, stop.turns) == ("killed", "killed", 1)
    assert halt.action == "killed"


def test_session_without_reader_is_ended(events: list[Event], fake_time: FakeTime) -> None:
    """The model of a session without a reader is connected, and costs."""
    otel_limits.enable(Limits(max_duration_seconds=30), observers=[events.append])

    async def leave() -> int:
        model = RealtimeModel()
        agent = BidiAgent(model=model, name="voice")
        await agent.start()
        fake_time.advance(30)
        await model.stopped.wait()
        await agent.stop()
        return model.stops

    assert asyncio.run(asyncio.wait_for(leave(), 20)) == 1
    assert stops_in(events)[0].reason == "max_duration"


class Texts(InputStream):
    """Sends a text again and again."""

    async def __call__(self) -> str:
        """Return the next text."""
        await asyncio.sleep(0.001)
        return "go on"


class Display(OutputStream):
    """Takes every event."""

    async def __call__(self, event: Any) -> None:
        """Take an event."""
        del event
        await asyncio.sleep(0)


@pytest.mark.parametrize("action", ["halt", "raise"])
def test_run_ends_with_the_session(events: list[Event], action: Any) -> None:
    """`run()` returns, or raises the limit's exception, although its inputs continue."""
    otel_limits.enable(Limits(max_turns=3), action=action, observers=[events.append])
    agent = BidiAgent(model=RealtimeModel(), name="voice")
    running = asyncio.wait_for(agent.run([Texts()], [Display()]), 20)

    async def run() -> None:
        await running

    if action == "raise":
        with pytest.raises(otel_limits.MaxTurnsReachedException):
            asyncio.run(run())
    else:
        asyncio.run(run())
    assert [each.turns for each in stops_in(events)] == [3]


def test_restart_continues_invocation(events: list[Event]) -> None:
    """A new connection is no new budget."""
    otel_limits.enable(Limits(max_turns=4), observers=[events.append])
    model = RealtimeModel()
    model.timeouts = {3}
    received = session(model)
    assert any(isinstance(each, BidiConnectionRestartEvent) for each in received)
    assert [(each.reason, each.turns) for each in stops_in(events)] == [("max_turns", 4)]


def test_session_has_its_span(events: list[Event], spans: InMemorySpanExporter) -> None:
    """Rows of the ledger lead to the trace, and the span shows the halt."""
    otel_limits.enable(Limits(max_turns=2), observers=[events.append])
    session(RealtimeModel())
    (span,) = [each for each in spans.get_finished_spans() if each.name == "bidi_session voice"]
    (halt,) = [each for each in events if isinstance(each, Halt)]
    assert halt.invocation.span_id == f"{span.context.span_id:016x}"
    assert (span.attributes or {})["otel_limits.stop.reason"] == "max_turns"


def test_agent_can_be_started_again(events: list[Event]) -> None:
    """After a halt the history is valid, and each session has its own budget."""
    otel_limits.enable(Limits(max_turns=2), observers=[events.append])
    agent = BidiAgent(model=RealtimeModel(), name="voice")

    async def twice() -> None:
        await read(agent)
        await read(agent)

    asyncio.run(asyncio.wait_for(twice(), 20))
    assert [each.turns for each in stops_in(events)] == [2, 2]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (RealtimeModel, ["max_token_budget"]),
        (
            partial(RealtimeModel, bounded=False),
            ["max_turns", "max_token_budget"],
        ),
    ],
)
def test_cap_that_cannot_hold_is_named(
    model: Callable[..., RealtimeModel],
    named: list[str],
    warnings_logged: Callable[[], list[str]],
    fake_time: FakeTime,
) -> None:
    """A model without usage, or without responses, leaves its caps without effect."""
    otel_limits.enable(Limits(max_turns=9, max_token_budget=10**6, max_duration_seconds=30))
    session(model(usage=False, most=3, on_silence=partial(fake_time.advance, 30)))
    (warning,) = [each for each in warnings_logged() if "realtime" in each]
    assert ", ".join(named) in warning
    assert ("max_turns" in warning) == ("max_turns" in named)


@pytest.mark.parametrize(
    ("model", "effect"),
    [
        (RealtimeModel(bounded=False, most=3), NO_RESPONSES),
        (RealtimeModel(usage=False, bounded=False, most=3), NO_RESPONSES),
        (
            RealtimeModel(usage=False, most=3),
            "reports no usage. In this invocation quotas count estimates of texts, without audio.",
        ),
        (RealtimeModel(most=3), ""),
    ],
    ids=["no responses", "nothing", "no usage", "both"],
)
def test_quota_that_cannot_hold_is_named(
    policy: Callable[[str], object],
    model: RealtimeModel,
    effect: str,
    warnings_logged: Callable[[], list[str]],
) -> None:
    """A session passes a quota that is not checked during it, which is said once."""
    policy("quotas: {voice: {tokens: 50000, window: month, reserve: expected}}")
    otel_limits.enable(max_duration_seconds=1)
    session(model)
    said = [each for each in warnings_logged() if "realtime" in each]
    assert len(said) == bool(effect)
    assert effect in "".join(said)


def test_quota_refuses_session_after_one_without_responses(
    policy: Callable[[str], object], events: list[Event]
) -> None:
    """The usage of a session that was not checked is charged at its end."""
    policy("quotas: {voice: {tokens: 100, window: month, reserve: expected}}")
    otel_limits.enable(max_duration_seconds=1, observers=[events.append])
    session(RealtimeModel(bounded=False, most=30))
    session(RealtimeModel())
    first, second = stops_in(events)
    assert (first.reason, first.usage.total) == ("max_duration", 30 * 15)
    assert (second.reason, second.usage.total) == ("quota_exceeded", 0)


def test_cap_that_cannot_hold_is_named_before_a_response(
    warnings_logged: Callable[[], list[str]],
) -> None:
    """OpenAI Live reports no usage of its voice, so the warning precedes the first response."""
    name = "strands.bidi.models.openai.live"
    assert importlib.util.find_spec(name) is not None
    live = type("Live", (RealtimeModel,), {"__module__": name})
    otel_limits.enable(max_turns=9, tree=Limits(max_token_budget=10**6))

    async def start() -> list[str]:
        agent = BidiAgent(model=live(), name="voice")
        await agent.start()
        at_start = warnings_logged()
        await agent.stop()
        return at_start

    usage, turns = [each for each in asyncio.run(start()) if "realtime" in each]
    assert "In this invocation tree_max_token_budget" in usage
    assert "In this invocation max_turns" in turns


def test_caps_that_hold_are_not_warned_of(warnings_logged: Callable[[], list[str]]) -> None:
    """A model with responses and usage needs no warning."""
    otel_limits.enable(Limits(max_turns=2, max_token_budget=10**6))
    session(RealtimeModel())
    assert [each for each in warnings_logged() if "realtime" in each] == []


@pytest.mark.parametrize(
    ("tree", "reason", "turns"),
    [
        (Limits(max_turns=3), "max_turns", 3),
        (Limits(max_token_budget=40), "max_token_budget", 3),
        (Limits(max_duration_seconds=30), "max_duration", 1),
    ],
)
def test_tree_cap_ends_session(
    events: list[Event], tree: Limits, reason: str, turns: int, fake_time: FakeTime
) -> None:
    """A session is the root of its tree."""
    otel_limits.enable(tree=tree, observers=[events.append])
    most = 1 if reason == "max_duration" else 40
    session(RealtimeModel(most=most, on_silence=partial(fake_time.advance, 30)))
    (stop,) = stops_in(events)
    assert (stop.reason, stop.action, stop.turns) == (reason, "halted", turns)
    (halt,) = [each for each in events if isinstance(each, Halt)]
    assert halt.breaches[0].limit.startswith("tree_")


def test_session_has_metrics(metric: Metric) -> None:
    """Dashboards and alerts see it like any invocation."""
    otel_limits.enable(Limits(max_turns=3))
    agent = BidiAgent(model=RealtimeModel("search"), name="metered voice", tools=[search])
    asyncio.run(asyncio.wait_for(read(agent), 20))
    counts = {"agent": "metered voice"}
    assert metric("otel_limits_turns_total", **counts) == 3
    assert metric("otel_limits_stops_total", **counts, reason="max_turns", action="halted") == 1


def test_session_has_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger records its calls, tools and outcome like those of any invocation."""
    path = tmp_path / "ledger.db"
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(path))
    otel_limits.enable(Limits(max_turns=3))
    session(RealtimeModel("search"), tools=[search])
    otel_limits.disable()  # closes the ledger
    with closing(sqlite3.connect(path)) as ledger:
        (invocation,) = ledger.execute(
            "SELECT agent, reason, action, turns FROM otel_limits_invocations"
        )
        calls = list(ledger.execute("SELECT model, input_tokens FROM otel_limits_model_calls"))
        tools = list(ledger.execute("SELECT tool FROM otel_limits_tool_calls"))
    assert invocation == ("voice", "max_turns", "halted", 3)
    assert calls == [("realtime-1", 9)] * 3
    assert tools == [("search",)] * 3


def test_disable_leaves_session_alone(events: list[Event]) -> None:
    """A session that is no longer tracked runs to its own end."""
    otel_limits.enable(Limits(max_turns=2), observers=[events.append])

    async def talk() -> int:
        turns = 0
        async with BidiAgent(model=RealtimeModel(), name="voice") as agent:
            async for event in agent.receive():
                turns += isinstance(event, BidiResponseStopEvent)
                if turns == 1:
                    otel_limits.disable()
                if turns == 5:
                    break
        return turns

    assert asyncio.run(talk()) == 5
