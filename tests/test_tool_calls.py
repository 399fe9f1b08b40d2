"""Which tool calls are counted, told and looked at by loop limits, whatever became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from strands import tool
from strands.hooks import AfterInvocationEvent, BeforeToolCallEvent, BeforeToolsEvent

from otel_limits import Fact, Limits, Stop, ToolCall, enable
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from strands import Agent

    from tests.conftest import MakeAgent

pytestmark = pytest.mark.usefixtures("source")


def told(facts: list[Fact]) -> list[tuple[str, str]]:
    """Name and status of each tool call that was told."""
    return [(fact.tool, fact.status) for fact in facts if isinstance(fact, ToolCall)]


def counted(facts: list[Fact]) -> list[int]:
    """Tool calls that each finished invocation counted."""
    return [fact.tool_calls for fact in facts if isinstance(fact, Stop)]


# --- interrupts -----------------------------------------------------------------------------------


@tool
def delete() -> str:
    """Delete everything."""
    return "deleted"


def careful(make_agent: MakeAgent, *names: str) -> Agent:
    """Make an agent that uses these tools at once, of which `delete` has to be approved."""
    agent = make_agent(ScriptedModel([uses(*names), says("done")]))
    agent.tool_registry.register_tool(delete)

    def ask(event: BeforeToolCallEvent) -> None:
        if event.tool_use["name"] == "delete":
            event.interrupt("approval", reason="may I?")

    agent.hooks.add_callback(BeforeToolCallEvent, ask)
    return agent


def approval(result: Any) -> list[Any]:
    """Approve of everything that a human is asked."""
    return [
        {"interruptResponse": {"interruptId": each.id, "response": "yes"}}
        for each in result.interrupts
    ]


def approve(agent: Agent) -> None:
    """Let a hook answer in the place of a human, within the same invocation."""

    def resume(event: AfterInvocationEvent) -> None:
        if event.result is not None and event.result.stop_reason == "interrupt":
            event.resume = approval(event.result)

    agent.hooks.add_callback(AfterInvocationEvent, resume)


def test_a_hook_that_resumes_has_finished_tools_counted_once(
    make_agent: MakeAgent, facts: list[Fact]
) -> None:
    """Two searches and an approved deletion are three calls, which a cap of three permits."""
    enable(Limits(max_tool_calls=3), observers=[facts.append])
    agent = careful(make_agent, "search", "search", "delete")
    approve(agent)
    assert agent("go").stop_reason == "end_turn"
    assert told(facts) == [("search", "success"), ("search", "success"), ("delete", "success")]
    assert counted(facts) == [3]


def test_a_hook_that_resumes_has_a_refusal_told_once(
    make_agent: MakeAgent, facts: list[Fact]
) -> None:
    """The approved call runs, and then the agent is halted because of the one that was refused."""
    enable(Limits(max_tool_calls=2), observers=[facts.append])
    agent = careful(make_agent, "search", "delete", "search")
    approve(agent)
    assert agent("go").stop_reason == "max_tool_calls"
    assert told(facts) == [("search", "success"), ("search", "refused"), ("delete", "success")]
    assert counted(facts) == [2]


def test_a_caller_that_resumes_has_finished_tools_told_once(
    make_agent: MakeAgent, facts: list[Fact]
) -> None:
    """The invocation that brings the approval has the approved call, and nothing else."""
    enable(Limits(max_tool_calls=2), observers=[facts.append])
    agent = careful(make_agent, "search", "delete", "search")
    asked = agent("go")
    assert told(facts) == [("search", "success"), ("search", "refused")]
    facts.clear()
    assert agent(approval(asked)).stop_reason == "end_turn"
    assert (told(facts), counted(facts)) == ([("delete", "success")], [1])


def test_a_batch_that_has_to_be_approved_is_counted_once(
    make_agent: MakeAgent, facts: list[Fact]
) -> None:
    """A human who is asked before any tool of a turn runs does not use up its calls."""
    enable(Limits(max_tool_calls=1), observers=[facts.append])
    agent = make_agent(ScriptedModel([uses("search"), says("done")]))
    agent.hooks.add_callback(BeforeToolsEvent, lambda event: event.interrupt("ok", reason="may I?"))
    approve(agent)
    assert agent("go").stop_reason == "end_turn"
    assert (told(facts), counted(facts)) == ([("search", "success")], [1])


def test_an_interrupt_before_any_result_is_no_turn_without_progress(
    make_agent: MakeAgent,
) -> None:
    """The turn that waits for a human is judged once, when its tools have run."""
    enable(Limits(max_no_progress_turns=3))
    model = ScriptedModel(endless(uses("delete")))
    agent = careful(make_agent)
    agent.model = model
    approve(agent)
    assert (agent("go").stop_reason, model.calls) == ("loop_detected", 4)
