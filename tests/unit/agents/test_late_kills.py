"""Kills and deadlines after the answer: the reported reason is the one that took effect."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent, MessageAddedEvent

import otel_limits
from otel_limits import Halt, KilledError, Limits, Stop, enable, kill
from otel_limits.testing import FakeTime, ScriptedModel, endless, fails, says

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from tests.conftest import Call, MakeAgent

pytestmark = pytest.mark.usefixtures("source")


def reported_reasons(events: list[Event]) -> list[str]:
    """Reasons of the published halts and stops."""
    return [event.reason for event in events if isinstance(event, (Halt, Stop))]


@pytest.mark.parametrize("moment", [AfterInvocationEvent, AfterModelCallEvent, MessageAddedEvent])
def test_effective_kill_is_reported(
    make_agent: MakeAgent, events: list[Event], call: Call, moment: type[Any]
) -> None:
    """`kill()` returned 1, so result, halt and stop have it as reason; the answer stays."""
    enable(Limits(max_turns=5), observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("answer"))))
    killed: list[int] = []

    def strike(event: Any) -> None:
        if getattr(event, "message", {"role": "assistant"})["role"] == "assistant" and not killed:
            killed.append(kill(all=True))

    agent.hooks.add_callback(moment, strike)
    result = call(agent)
    assert (killed, reported_reasons(events)) == ([1], ["killed", "killed"])
    assert (result.stop_reason, str(result).strip()) == ("killed", "answer")
    assert not otel_limits.is_synthetic(result.message)
    assert agent("next").stop_reason == "end_turn"


def test_kill_in_hooks_prevents_resume(make_agent: MakeAgent, events: list[Event]) -> None:
    """An agent that a hook resumes forever ends without another model call."""
    enable(Limits(max_turns=50), observers=[events.append])
    agent = make_agent(model := ScriptedModel(endless(says("answer"))))

    def resume(event: AfterInvocationEvent) -> None:
        if model.calls == 3:
            kill(all=True)
        event.resume = "go on"

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    assert (agent("go").stop_reason, model.calls) == ("killed", 3)
    assert reported_reasons(events) == ["killed", "killed"]


def test_late_kill_with_action_raise_raises(make_agent: MakeAgent, events: list[Event]) -> None:
    """As for any other kill."""
    enable(Limits(max_turns=5), action="raise", observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("answer"))))
    killed: list[int] = []
    agent.hooks.add_callback(AfterInvocationEvent, lambda _: killed.append(kill(all=True)))
    with pytest.raises(KilledError):
        agent("go")
    assert killed == [1]
    assert reported_reasons(events) == ["killed", "killed"]


async def read(agent: Any) -> list[int]:
    """Kill after the result was handed out."""
    return [kill(all=True) async for event in agent.stream_async("go") if "result" in event]


def test_kill_after_result_has_no_effect(make_agent: MakeAgent, events: list[Event]) -> None:
    """The reader already has the result, which can no longer be changed."""
    enable(Limits(max_turns=5), observers=[events.append])
    assert asyncio.run(read(make_agent(ScriptedModel([says("answer")])))) == [0]
    assert reported_reasons(events) == ["end_turn"]


def test_kill_during_error_has_no_effect(make_agent: MakeAgent, events: list[Event]) -> None:
    """The error ends the invocation and is its reason."""
    enable(Limits(max_turns=5), observers=[events.append])
    agent = make_agent(ScriptedModel([fails(OSError("gone"))]))
    killed: list[int] = []
    agent.hooks.add_callback(AfterInvocationEvent, lambda _: killed.append(kill(all=True)))
    with pytest.raises(OSError, match="gone"):
        agent("go")
    assert (killed, reported_reasons(events)) == ([0], ["error"])


def test_deadline_during_hooks_has_no_effect(
    make_agent: MakeAgent, events: list[Event], fake_time: FakeTime
) -> None:
    """The natural end came first; hooks that check the agent's cancel signal find it unset."""
    enable(Limits(max_duration_seconds=30), observers=[events.append])
    agent = make_agent(ScriptedModel([says("answer")]))
    signals: list[bool] = []

    def linger(event: AfterInvocationEvent) -> None:
        fake_time.advance(31)
        signals.append(event.agent.cancel_signal.is_set())

    agent.hooks.add_callback(AfterInvocationEvent, linger)
    assert (agent("go").stop_reason, signals, reported_reasons(events)) == (
        "end_turn",
        [False],
        ["end_turn"],
    )
