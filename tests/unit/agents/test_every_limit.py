"""Every limit with every action, by one of the ways to invoke an agent."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from strands import Agent, tool

import otel_limits
from otel_limits import LimitReachedError, Limits, enable
from otel_limits.core.price import Quote
from otel_limits.core.price_lookup import Prices
from otel_limits.testing import Answer, FakeTime, ScriptedModel, says, uses
from tests.conftest import call_async, call_stream, call_sync

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from otel_limits.core.events import Event
    from tests.conftest import Call


@dataclass(frozen=True)
class Case:
    """A limit, and how far a runaway gets under it."""

    limits: Limits
    reason: str
    turns: int
    at_once: bool = False
    leaves_room: bool = True
    """There may be one more call, for a last answer."""
    alternates: bool = False
    """The agent uses two tools in turn instead of one."""
    fails: bool = False
    """Its tool fails."""


CASES = {
    "max_iterations": Case(Limits(max_iterations=3), "max_iterations", 3),
    "max_turns": Case(Limits(max_turns=3), "max_turns", 3),
    "max_model_calls": Case(Limits(max_model_calls=3), "max_model_calls", 3, leaves_room=False),
    "max_token_budget": Case(Limits(max_token_budget=45), "max_token_budget", 3),
    "max_input_tokens": Case(Limits(max_input_tokens=30), "max_input_tokens", 3),
    "max_output_tokens": Case(Limits(max_output_tokens=15), "max_output_tokens", 3),
    "max_tool_calls": Case(Limits(max_tool_calls=3), "max_tool_calls", 4),
    "max_calls_per_tool": Case(Limits(max_calls_per_tool={"search": 3}), "max_tool_calls", 4),
    "max_cost_usd": Case(Limits(max_cost_usd=Decimal("0.03")), "max_cost_usd", 3),
    "max_duration_seconds": Case(
        Limits(max_duration_seconds=250), "max_duration", 3, at_once=True, leaves_room=False
    ),
    "max_consecutive_same_tool": Case(Limits(max_consecutive_same_tool=3), "loop_detected", 3),
    "max_identical_tool_calls": Case(Limits(max_identical_tool_calls=3), "loop_detected", 3),
    "max_repeated_tool_cycles": Case(
        Limits(max_repeated_tool_cycles=3), "loop_detected", 6, alternates=True
    ),
    "max_no_progress_turns": Case(Limits(max_no_progress_turns=3), "loop_detected", 4),
    "max_consecutive_tool_failures": Case(
        Limits(max_consecutive_tool_failures=3), "loop_detected", 3, fails=True
    ),
    "max_consecutive_failures_per_tool": Case(
        Limits(max_consecutive_failures_per_tool={"search": 3}), "loop_detected", 3, fails=True
    ),
}


WAYS = itertools.cycle(
    itertools.product(("spans", "hooks"), (call_sync, call_async, call_stream)),
)
pytestmark = pytest.mark.parametrize(
    ("case", "source", "call"),
    # `runs/test_run.py` has all of them for one limit.
    [
        pytest.param(case, *way, id=name)
        for (name, case), way in zip(CASES.items(), WAYS, strict=False)
    ],
    indirect=("source", "call"),
)
"""Each limit with one way to follow an invocation and to call the agent."""


@pytest.fixture(autouse=True)
def priced_and_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cent per call, and 100 seconds per tool, by a clock that only tools move."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {'*': {price: {input: 1, output: 1}}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_TOOL_ACTION", "halt")  # like the others
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))  # or there are no prices on Python 3.10
    monkeypatch.setattr(Prices, "quote", lambda *_: Quote(price=Decimal("0.01"), source="policy"))
    with TIME:
        yield


TIME = FakeTime()


@tool
def search(*, fails: bool) -> str:
    """Search."""
    TIME.advance(100)
    return "error: no network" if fails else "nothing"


@tool
def fetch() -> str:
    """Fetch."""
    TIME.advance(100)
    return "nothing either"


def script(case: Case, turns: int, *then: Answer) -> Iterator[Answer]:
    """Use tools for `turns` turns, then go on with `then`."""
    search = uses("search", arguments={"fails": case.fails})
    tools = itertools.cycle([search, uses("fetch")] if case.alternates else [search])
    return itertools.chain(itertools.islice(tools, turns), then)


def make(model: ScriptedModel) -> Agent:
    """Make an agent with both tools."""
    return Agent(model=model, tools=[search, fetch], name="tester", callback_handler=None)


def test_halt(case: Case, source: str, call: Call) -> None:
    """The agent returns after exactly its turns, with the reason and a synthetic message."""
    enable(case.limits)
    model = ScriptedModel(script(case, 50))
    result = call(make(model))
    assert (result.stop_reason, model.calls) == (case.reason, case.turns)
    assert otel_limits.is_synthetic(result.message)


def test_raise(case: Case, source: str, call: Call) -> None:
    """The call raises the exception of the reason, with the stop."""
    enable(case.limits, action="raise")
    model = ScriptedModel(script(case, 50))
    with pytest.raises(LimitReachedError) as raised:
        call(make(model))
    assert raised.value.stop is not None
    assert (raised.value.stop.reason, model.calls) == (case.reason, case.turns)


def test_observe(case: Case, source: str, call: Call, events: list[Event]) -> None:
    """The agent ends by itself, and one event says what would have been halted."""
    enable(case.limits, action="observe", observers=[events.append])
    model = ScriptedModel(script(case, case.turns + 2, says("done")))
    result = call(make(model))
    halts = [event for event in events if isinstance(event, otel_limits.Halt)]
    assert (result.stop_reason, model.calls) == ("end_turn", case.turns + 3)
    assert [(halt.reason, halt.action) for halt in halts] == [(case.reason, "observed")]


def test_wrap_up(case: Case, source: str, call: Call, events: list[Event]) -> None:
    """One call without tools writes the answer, unless there is no room left for one."""
    enable(case.limits, action="wrap_up", observers=[events.append])
    model = ScriptedModel(script(case, case.turns, says("in short")))
    result = call(make(model))
    (stop,) = [event for event in events if isinstance(event, otel_limits.Stop)]
    assert (result.stop_reason, stop.reason) == (case.reason, case.reason)
    assert stop.action == ("wrapped_up" if case.leaves_room else "halted")
    assert otel_limits.is_synthetic(result.message) is not case.leaves_room
    assert model.calls == case.turns + case.leaves_room
    no_room = "No final answer was requested: max_model_calls leaves no room for it."
    assert (no_room in stop.sentence) is (case.reason == "max_model_calls")
    if case.leaves_room:
        answer, _, added = str(result).partition("\n")
        assert (answer, model.tool_specs[-1]) == ("in short", None)
        assert added.lstrip().startswith("This request could not be completed because ")
        assert otel_limits.stop_of(result) is not None


def test_ask(case: Case, source: str, call: Call) -> None:
    """A human is asked; anything but more budget halts the agent without another call."""
    enable(case.limits, action="ask")
    model = ScriptedModel(script(case, 50))
    agent = make(model)
    asked = call(agent)
    if case.at_once:
        assert asked.stop_reason == case.reason
        return
    assert (asked.stop_reason, model.calls) == ("interrupt", case.turns)
    (interrupt,) = asked.interrupts or ()
    assert interrupt.reason["reason"] == case.reason
    answer = {"interruptResponse": {"interruptId": interrupt.id, "response": "no"}}
    refused = call(agent, [answer])
    assert (refused.stop_reason, model.calls) == (case.reason, case.turns)
    assert otel_limits.is_synthetic(refused.message)


def test_the_agent_can_be_called_again(case: Case, source: str, call: Call) -> None:
    """After any halt the next invocation begins with a fresh budget and a valid history."""
    enable(case.limits)
    model = ScriptedModel(itertools.chain(script(case, case.turns), [says("hello")]))
    agent = make(model)
    call(agent)
    assert (call(agent).stop_reason, [m["role"] for m in agent.messages[-2:]]) == (
        "end_turn",
        ["user", "assistant"],
    )
