"""With the action `ask`, a human may let a run go on, through the SDK's approval of tools."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from agents import RunState, SQLiteSession, function_tool

from otel_limits import Event, Halt, Stop, enable, is_synthetic, stop_of
from otel_limits.testing import ScriptedAgentsModel, says, uses
from tests.openai_agents.runs import CALLS, STEPS, UNTRACED, agent, halt_of, looping, unanswered

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "otel_limits_continue"

each_way = pytest.mark.parametrize("how", CALLS)


def resumed(boss: Any, result: Any, answer: Callable[[Any, Any], None]) -> Any:
    """The state of an interrupted run, read from its text and answered."""

    async def read() -> Any:
        return await RunState.from_string(boss, result.to_state().to_string())

    state = asyncio.run(read())
    for item in state.get_interruptions():
        answer(state, item)
    return state


def approve(state: Any, item: Any) -> None:
    """Approve."""
    state.approve(item)


def reject(state: Any, item: Any) -> None:
    """Reject."""
    state.reject(item)


@each_way
def test_approved_question_lets_a_run_go_on(how: str, events: list[Event]) -> None:
    """The rest is a new invocation with as many turns again, up to the next question."""
    enable(max_turns=3, action="ask", observers=[events.append])
    model = looping()
    boss = agent(model)
    result = CALLS[how](boss)
    (asked,) = result.interruptions
    told = json.loads(asked.arguments)
    assert (asked.name, model.calls) == (NAME, 3)
    assert (told["limit"], told["cap"], told["agent"]) == ("max_turns", 3, "boss")
    assert "reached max_turns: 3 of 3 turns used" in told["sentence"]
    for text in (told["sentence"], told["question"]):
        assert " Approve to allow 3 turns more, or reject to stop." in text
    again = CALLS[how](boss, resumed(boss, result, approve))
    assert model.calls == 6
    assert len(again.interruptions) == 1
    stops = [each for each in events if isinstance(each, Stop)]
    assert [(each.reason, each.turns, each.tool_calls) for each in stops] == [
        ("interrupt", 3, 3),
        ("interrupt", 3, 3),
    ]
    assert not [each for each in events if isinstance(each, Halt)]


@each_way
def test_rejected_question_halts_a_run(how: str) -> None:
    """It ends as it would have without a question."""
    enable(max_turns=2, action="ask")
    model = looping()
    boss = agent(model)
    result = CALLS[how](boss, resumed(boss, CALLS[how](boss), reject))
    stop = halt_of(result)
    assert (model.calls, stop.reason, stop.action) == (2, "max_turns", "halted")
    assert is_synthetic(result)


def test_models_never_see_a_question() -> None:
    """Neither our tool, nor its calls, nor their results."""
    enable(max_turns=1, action="ask")
    model = ScriptedAgentsModel([uses("search"), uses("search"), says("done")])
    boss = agent(model)
    session = SQLiteSession("1")
    result = CALLS["run"](boss, session=session)
    for _ in range(2):
        result = CALLS["run"](boss, resumed(boss, result, approve), session=session)
    assert (result.final_output, stop_of(result)) == ("done", None)
    assert "otel_limits" not in json.dumps([model.requests, model.tool_specs])
    items: list[Any] = asyncio.run(session.get_items())
    assert unanswered(items) == []
    session.close()


def test_question_of_an_agent_in_a_tool_interrupts_the_outer_run() -> None:
    """The SDK shows it with the outer run, and resumes both."""
    enable(max_turns=2, action="ask")
    helper = ScriptedAgentsModel([uses("search"), uses("search"), says("found")])
    boss_model = ScriptedAgentsModel([uses("ask", arguments={"input": "?"}), says("done")])
    tool = agent(helper, name="helper").as_tool("ask", "Ask.", run_config=UNTRACED, max_turns=STEPS)
    boss = agent(boss_model, tool)
    result = CALLS["run"](boss)
    (asked,) = result.interruptions
    assert json.loads(asked.arguments)["agent"] == "helper"
    result = CALLS["run"](boss, resumed(boss, result, approve))
    assert (helper.calls, result.final_output) == (3, "done")


def test_agent_that_stops_on_a_tool_is_halted_instead(caplog: pytest.LogCaptureFixture) -> None:
    """The result of our tool would become its output."""
    enable(max_turns=1, action="ask")
    boss = agent(looping(), tool_use_behavior={"stop_at_tool_names": ["other"]})
    assert is_synthetic(CALLS["run"](boss))
    assert "agent 'boss' is halted instead of asking" in caplog.text


def test_tool_of_the_application_is_approved_as_before() -> None:
    """Its interruption and ours do not mix."""
    enable(max_turns=3, action="ask")

    @function_tool(needs_approval=True)
    def delete() -> str:
        """Delete."""
        return "deleted"

    model = ScriptedAgentsModel([uses("delete"), uses("search"), says("done")])
    boss = agent(model, delete)
    first = CALLS["run"](boss)
    assert [each.name for each in first.interruptions] == ["delete"]
    result = CALLS["run"](boss, resumed(boss, first, approve))
    assert result.final_output == "done"
