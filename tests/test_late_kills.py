"""Kills and deadlines that come when the answer is there: what acted is what is told."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent, MessageAddedEvent

import otel_limits
from otel_limits import Halt, KilledError, Limits, Stop, enable, kill
from otel_limits.testing import ScriptedModel, endless, fails, says

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from tests.conftest import Call, MakeAgent

pytestmark = pytest.mark.usefixtures("source")


def told(events: list[Event]) -> list[str]:
    """Reasons of what was told of halts and of the stop."""
    return [event.reason for event in events if isinstance(event, (Halt, Stop))]


@pytest.mark.parametrize("moment", [AfterInvocationEvent, AfterModelCallEvent, MessageAddedEvent])
def test_a_kill_that_counts_is_told(
    make_agent: MakeAgent, events: list[Event], call: Call, moment: type[Any]
) -> None:
    """`kill()` says that it ended one: result, halt and stop say so too, and the answer stays."""
    enable(Limits(max_turns=5), observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("answer"))))
    killed: list[int] = []

    def strike(event: Any) -> None:
        if getattr(event, "message", {"role": "assistant"})["role"] == "assistant" and not killed:
            killed.append(kill(all=True))

    agent.hooks.add_callback(moment, strike)
    result = call(agent)
    assert (killed, told(events)) == ([1], ["killed", "killed"])
    assert (result.stop_reason, str(result).strip()) == ("killed", "answer")
    assert not otel_limits.is_synthetic(result.message)
    assert agent("next").stop_reason == "end_turn"


def test_a_kill_in_the_hooks_keeps_them_from_resuming(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """An agent that a hook resumes forever ends: no model is called again."""
    enable(Limits(max_turns=50), observers=[events.append])
    agent = make_agent(model := ScriptedModel(endless(says("answer"))))

    def resume(event: AfterInvocationEvent) -> None:
        if model.calls == 3:
            kill(all=True)
        event.resume = "go on"

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    assert (agent("go").stop_reason, model.calls) == ("killed", 3)
    assert told(events) == ["killed", "killed"]


def test_a_late_kill_raises_where_that_is_the_action(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """As any other kill does."""
    enable(Limits(max_turns=5), action="raise", observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("answer"))))
    killed: list[int] = []
    agent.hooks.add_callback(AfterInvocationEvent, lambda _: killed.append(kill(all=True)))
    with pytest.raises(KilledError):
        agent("go")
    assert killed == [1]
    assert told(events) == ["killed", "killed"]


async def read(agent: Any) -> list[int]:
    """Kill when the result has been handed out."""
    return [kill(all=True) async for event in agent.stream_async("go") if "result" in event]


def test_a_kill_when_the_result_is_out_counts_nothing(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """The reader has the result in its hands, and nothing can be changed any more."""
    enable(Limits(max_turns=5), observers=[events.append])
    assert asyncio.run(read(make_agent(ScriptedModel([says("answer")])))) == [0]
    assert told(events) == ["end_turn"]


def test_a_kill_while_an_error_is_on_its_way_counts_nothing(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """The error ends the invocation, and is told."""
    enable(Limits(max_turns=5), observers=[events.append])
    agent = make_agent(ScriptedModel([fails(OSError("gone"))]))
    killed: list[int] = []
    agent.hooks.add_callback(AfterInvocationEvent, lambda _: killed.append(kill(all=True)))
    with pytest.raises(OSError, match="gone"):
        agent("go")
    assert (killed, told(events)) == ([0], ["error"])


def test_a_deadline_during_the_hooks_does_not_act(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """The natural end came first; hooks that look at the agent's signal see nothing of it."""
    # A second, in which also a machine that is busy has answered.
    enable(Limits(max_duration_seconds=1), observers=[events.append])
    agent = make_agent(ScriptedModel([says("answer")]))
    signals: list[bool] = []

    def linger(event: AfterInvocationEvent) -> None:
        time.sleep(1.1)
        signals.append(event.agent.cancel_signal.is_set())

    agent.hooks.add_callback(AfterInvocationEvent, linger)
    assert (agent("go").stop_reason, signals, told(events)) == ("end_turn", [False], ["end_turn"])
