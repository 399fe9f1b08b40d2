"""What is private in Strands and used by the binding still has the shape that it relies on.

When one of these fails after an update of strands-agents, look at the named part of
`otel_limits/bindings/strands/` and at what Strands puts in its place; the tests of turns, halts and
streams say whether the replacement does what the old one did.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
from typing import Any

import pytest
from strands import Agent
from strands.event_loop import event_loop
from strands.hooks import BeforeInvocationEvent
from strands.hooks import registry as hooks
from strands.interrupt import InterruptException, PendingToolExecution
from strands.middleware import _agent_stream
from strands.middleware import _registry as middleware
from strands.telemetry import metrics, tracer
from strands.tools.structured_output import structured_output_tool
from strands.types import _events

from otel_limits.bindings import strands as binding
from otel_limits.testing import ScriptedModel

LISTED = re.findall(r"`([\w.]+)`", binding.__doc__ or "")


def parameters(function: Any) -> list[str]:
    """Names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def fresh() -> Agent:
    """Make an agent."""
    return Agent(model=ScriptedModel([]), callback_handler=None)


@pytest.mark.parametrize("name", [name for name in LISTED if name.startswith("Agent._")])
def test_what_is_listed_of_an_agent_exists(name: str) -> None:
    """Each private name of the package's docstring is there."""
    assert hasattr(fresh(), name.removeprefix("Agent."))


def test_an_invocation_begins_and_ends_in_two_methods() -> None:
    """`classes.Watch` wraps both: the first returns the span, the second is told the outcome."""
    assert parameters(Agent._start_agent_trace_span) == ["self", "messages"]
    assert parameters(Agent._end_agent_trace_span) == ["self", "response", "error", "cancellation"]
    assert not inspect.iscoroutinefunction(Agent._end_agent_trace_span)


def test_a_stream_always_ends_its_invocation() -> None:
    """`stream_async` tells the end on success, on an exception and when nobody waits."""
    source = inspect.getsource(Agent.stream_async)
    assert source.count("self._end_agent_trace_span(") == 3


def test_messages_are_appended_one_by_one() -> None:
    """`Binding._answer` puts the synthetic message into the history by it."""
    assert inspect.iscoroutinefunction(Agent._append_messages)
    assert parameters(Agent._append_messages) == ["self", "messages"]


def test_hooks_can_be_taken_away() -> None:
    """`Binding.detach` filters them by the callback."""
    fields = {field.name for field in dataclasses.fields(hooks._CallbackEntry)}
    assert fields == {"callback", "order"}


def test_a_registry_of_hooks_is_its_callbacks() -> None:
    """`registries.Hooks` shares them with the registry that it stands in for, and nothing else."""
    agent = fresh()
    assert type(agent.hooks) is hooks.HookRegistry
    assert list(vars(agent.hooks)) == ["_registered_callbacks"]
    assert isinstance(agent.hooks._registered_callbacks, dict)


def test_an_event_that_nobody_waits_for_goes_back_as_it_is() -> None:
    """`registries.Hooks` answers for Strands there; a callback is looked up by the exact type."""

    class Unheard(BeforeInvocationEvent):
        pass

    agent = fresh()
    agent.hooks.add_callback(BeforeInvocationEvent, lambda _: pytest.fail("called"))
    event = Unheard(agent=agent)
    assert asyncio.run(agent.hooks.invoke_callbacks_async(event)) == (event, [])


@pytest.mark.parametrize("owner", [Agent._run_loop, event_loop._handle_model_execution])
def test_a_stage_is_run_by_the_registry_of_the_agent(owner: Any) -> None:
    """`registries.Stages` stands in for it."""
    assert "_middleware_registry.invoke(" in inspect.getsource(owner)
    assert parameters(middleware.MiddlewareRegistry.invoke)[1:] == ["stage", "context", "terminal"]


def test_a_registry_of_middleware_is_its_handlers() -> None:
    """`registries.Stages` shares them with the registry that it stands in for, and nothing else."""
    agent = fresh()
    assert type(agent._middleware_registry) is middleware.MiddlewareRegistry
    assert list(vars(agent._middleware_registry)) == ["_handlers"]


def test_the_agent_stream_has_a_stage() -> None:
    """`Binding.agent_stage` follows it, and gets the agent and its state."""
    fields = {field.name for field in dataclasses.fields(_agent_stream.AgentStreamContext)}
    assert {"agent", "invocation_state"} <= fields


def test_a_stop_event_carries_reason_and_message_first() -> None:
    """`Binding._stop` puts another reason in its place, and `_answer` makes one."""
    names = parameters(_events.EventLoopStopEvent.__init__)
    assert names[1:5] == ["stop_reason", "message", "metrics", "request_state"]
    event = _events.EventLoopStopEvent("end_turn", {"role": "assistant", "content": []}, None, {})  # type: ignore[arg-type]
    assert event["stop"][:2] == ("end_turn", {"role": "assistant", "content": []})


def test_a_chunk_event_has_its_chunk() -> None:
    """`_follow` reads there whether the provider reported usage."""
    chunk: Any = {"metadata": {"usage": {}}}
    assert _events.ModelStreamChunkEvent(chunk).chunk == chunk


def test_the_loop_lets_interrupts_pass() -> None:
    """A refusal is an interrupt: no `AfterModelCallEvent`, no wrapping, no log."""
    source = inspect.getsource(event_loop._handle_model_execution)
    assert re.search(r"except InterruptException:\s+raise", source)
    assert issubclass(InterruptException, Exception)


def test_end_turn_ends_the_loop_after_tools() -> None:
    """A string in `AfterToolsEvent.end_turn` becomes the last message, before any cancel."""
    source = inspect.getsource(event_loop._handle_tool_execution)
    end_turn = source.index("if after_tools_event.end_turn")
    assert end_turn < source.index("agent._deferred_cancel or agent._observe_cancellation()")


def test_cached_tokens_are_counted_as_input() -> None:
    """`reading.usage_of` counts as Strands' spans do."""
    usage: Any = {
        "inputTokens": 10,
        "outputTokens": 5,
        "totalTokens": 115,
        "cacheReadInputTokens": 100,
    }
    assert metrics._total_prompt_tokens(usage) == 110


def test_structured_output_has_a_tool_of_its_own() -> None:
    """`reading.is_output_tool` recognises it among the dynamic tools."""
    assert isinstance(fresh().tool_registry.dynamic_tools, dict)
    assert inspect.isclass(structured_output_tool.StructuredOutputTool)


def test_spans_have_the_scope_that_is_followed() -> None:
    """The processor recognises Strands' spans by the module that emits them."""
    assert tracer.__name__ == "strands.telemetry.tracer"


def test_a_human_answer_stands_in_the_interrupt_state() -> None:
    """`asking.answer_of` looks there for the answer to its question."""
    state = fresh()._interrupt_state
    assert (state.interrupts, state.activated) == ({}, False)


def test_what_an_interrupt_let_finish_stands_in_the_interrupt_state() -> None:
    """`reading.tool_uses` looks there for the calls that a resume does not run again."""
    state = fresh()._interrupt_state
    assert (state.activated, state.pending_tool_execution) == (False, None)
    fields = {field.name for field in dataclasses.fields(PendingToolExecution)}
    assert "completed_tool_results" in fields
    source = inspect.getsource(event_loop._handle_tool_execution)
    assert "tool_results.extend(pending_tool_execution.completed_tool_results)" in source
