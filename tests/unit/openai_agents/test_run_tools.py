"""Tools of a run: those that fail, end it, come from MCP servers, or wait for a human."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from agents import (
    AgentsException,
    MaxTurnsExceeded,
    SQLiteSession,
    ToolsToFinalOutputResult,
    UserError,
    function_tool,
)

from otel_limits import (
    Event,
    LimitReachedError,
    Limits,
    Stop,
    ToolCall,
    enable,
    is_synthetic,
    kill,
    stop_of,
)
from otel_limits.testing import ScriptedAgentsModel, endless, says, uses
from tests.openai_agents.runs import (
    CALLS,
    STEPS,
    agent,
    halt_of,
    looping,
    unanswered,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


each_way = pytest.mark.parametrize("how", CALLS)


def used(events: Sequence[Event]) -> list[tuple[str, str]]:
    """The tool calls that were published."""
    return [(each.tool, each.status) for each in events if isinstance(each, ToolCall)]


# --- failures -------------------------------------------------------------------------------------


@function_tool
def fail() -> str:
    """Fail."""
    raise OSError("no disk")


@function_tool(failure_error_function=None)
def crash() -> str:
    """Fail, and end the run."""
    raise OSError("no disk")


@function_tool(timeout=0.05)
async def hang() -> str:
    """Take too long."""
    await asyncio.sleep(60)
    return "late"


@each_way
def test_failing_tools_are_errors_and_the_run_goes_on(how: str, events: list[Event]) -> None:
    """The model reads the error, and loop limits compare it."""
    enable(max_identical_tool_calls=3, observers=[events.append])
    result = CALLS[how](agent(ScriptedAgentsModel(endless(uses("fail"))), fail))
    assert halt_of(result).reason == "loop_detected"
    assert used(events) == [("fail", "error")] * 3


@each_way
def test_tool_that_takes_too_long_is_an_error(how: str, events: list[Event]) -> None:
    """The SDK stops waiting for it, and the model reads that."""
    enable(max_turns=9, observers=[events.append])
    result = CALLS[how](agent(ScriptedAgentsModel([uses("hang"), says("done")]), hang))
    assert result.final_output == "done"
    assert used(events) == [("hang", "error")]


@each_way
def test_exception_of_a_tool_ends_the_run_once(how: str, events: list[Event]) -> None:
    """Every tool that has run is recorded, and its parallel sibling is not lost."""
    enable(max_turns=9, observers=[events.append])
    model = ScriptedAgentsModel([uses("search", "crash")])
    with pytest.raises(UserError) as caught:
        CALLS[how](agent(model, crash))
    assert stop_of(caught.value) is None
    assert used(events) == [("search", "success"), ("crash", "error")]
    (stop,) = [each for each in events if isinstance(each, Stop)]
    assert (stop.reason, stop.turns, stop.tool_calls) == ("error", 1, 2)


@each_way
def test_halt_that_a_tool_raises_reaches_the_model(how: str, events: list[Event]) -> None:
    """The text of the SDK for an exception suggests another attempt."""
    enable(max_turns=2, action="raise", observers=[events.append])
    helper = agent(looping(), name="helper").as_tool("ask", "Ask.", max_turns=STEPS)
    model = ScriptedAgentsModel([uses("ask", arguments={"input": "?"}), says("done")])
    result = CALLS[how](agent(model, helper))
    assert (result.final_output, stop_of(result)) == ("done", None)
    told = model.requests[-1][-1]["output"]
    assert "Do not call" in told
    assert "try again" not in told
    assert ("ask", "error") in used(events)


@each_way
def test_halt_that_leaves_a_tool_keeps_its_stop(how: str, events: list[Event]) -> None:
    """Without `failure_error_function` the exception ends the outer run, too."""
    enable(max_turns=2, action="raise", observers=[events.append])
    helper = agent(looping(), name="helper").as_tool(
        "ask", "Ask.", max_turns=STEPS, failure_error_function=None
    )
    model = ScriptedAgentsModel([uses("ask", arguments={"input": "?"})])
    with pytest.raises(AgentsException) as caught:
        CALLS[how](agent(model, helper))
    assert isinstance(caught.value, LimitReachedError)
    assert halt_of(caught.value).agent == "helper"
    stops = [(each.agent, each.reason) for each in events if isinstance(each, Stop)]
    assert stops == [("helper", "max_turns"), ("boss", "error")]


# --- the end of a run -----------------------------------------------------------------------------


def custom(_: Any, results: list[Any]) -> ToolsToFinalOutputResult:
    """Let the second tool's output be the final one."""
    return ToolsToFinalOutputResult(
        is_final_output=len(results) == 2, final_output=results[-1].output
    )


@pytest.mark.parametrize(
    "behavior",
    ["stop_on_first_tool", {"stop_at_tool_names": ["search"]}, custom],
    ids=["first", "named", "custom"],
)
@each_way
def test_tool_that_ends_a_run_is_recorded(how: str, behavior: Any, events: list[Event]) -> None:
    """No model call follows, after which tools are recorded otherwise."""
    enable(max_turns=1, observers=[events.append])
    model = ScriptedAgentsModel([uses("search", "search")])
    result = CALLS[how](agent(model, tool_use_behavior=behavior))
    assert (result.final_output, stop_of(result)) == ("nothing about ", None)
    assert used(events) == [("search", "success")] * 2
    assert [each.reason for each in events if isinstance(each, Stop)] == ["end_turn"]


def stop_at_crash(_: Any, results: list[Any]) -> ToolsToFinalOutputResult:
    """Make the result of one tool the final output."""
    found = next((each.output for each in results if each.tool.name == "crash"), None)
    return ToolsToFinalOutputResult(is_final_output=found is not None, final_output=found)


@each_way
@pytest.mark.parametrize("behavior", [{"stop_at_tool_names": ["crash"]}, stop_at_crash])
def test_refused_tool_is_no_final_output(how: str, behavior: Any) -> None:
    """The end user reads the text of the halt, and not what is for the model."""
    enable(max_tool_calls=1)
    model = ScriptedAgentsModel([uses("search"), uses("crash")])
    result = CALLS[how](agent(model, crash, tool_use_behavior=behavior))
    assert (model.calls, halt_of(result).reason) == (2, "max_tool_calls")
    assert result.final_output.startswith("This request could not be completed")
    assert is_synthetic(result)


@each_way
def test_nested_agent_keeps_its_own_max_turns(how: str, events: list[Event]) -> None:
    """The SDK raises in the tool, and the model around it reads that."""
    enable(max_turns=9, observers=[events.append])
    helper = looping()
    tool = agent(helper, name="helper").as_tool("ask", "Ask.", max_turns=3)
    model = ScriptedAgentsModel([uses("ask", arguments={"input": "?"}), says("done")])
    result = CALLS[how](agent(model, tool))
    assert (helper.calls, result.final_output, stop_of(result)) == (3, "done", None)
    stops = [(each.agent, each.reason) for each in events if isinstance(each, Stop)]
    assert stops == [("helper", "max_turns_exceeded"), ("boss", "end_turn")]


@each_way
def test_limit_within_max_turns_of_the_sdk_comes_first(how: str) -> None:
    """At the same number, the SDK's comes first: it checks before the model is asked."""
    enable(max_turns=3)
    assert is_synthetic(CALLS[how](agent(looping()), max_turns=4))
    with pytest.raises(MaxTurnsExceeded):
        CALLS[how](agent(looping()), max_turns=3)


# --- parallel tools -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "names", "run"),
    [
        (Limits(max_tool_calls=2), ("search", "search", "search", "slow"), 2),
        (Limits(max_turns=1), ("search", "slow", "fail"), 3),
        (Limits(max_turns=9), ("slow", "killing", "slow"), 2),
    ],
    ids=["refused", "halted", "killed"],
)
@each_way
def test_session_goes_on_after_a_halt_amid_parallel_tools(
    how: str, limits: Limits, names: tuple[str, ...], run: int, tmp_path: Path
) -> None:
    """Tools that run are waited for, others are not begun, and each call has its output."""
    enable(limits)
    ran: list[str] = []

    @function_tool
    async def slow() -> str:
        """Work while others end."""
        await asyncio.sleep(0.05)
        ran.append("slow")
        return "slow"

    @function_tool
    async def killing() -> str:
        """Kill the agent that calls it."""
        kill(agent="boss")
        return "killed"

    model = ScriptedAgentsModel([uses(*names), says("go on")])
    boss = agent(model, slow, killing, fail)
    session = SQLiteSession("1", tmp_path / "session.db")
    first = CALLS[how](boss, session=session)
    assert halt_of(first).tool_calls == run
    items: list[Any] = asyncio.run(session.get_items())
    assert unanswered(items) == []
    assert items[-1]["role"] == "assistant"
    assert ran == ["slow"] * (halt_of(first).reason != "max_tool_calls")
    enable()
    assert CALLS[how](boss, "again", session=session).final_output == "go on"
    session.close()
