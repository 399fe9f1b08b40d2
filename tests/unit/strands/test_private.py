"""Private names of Strands: each is listed and exists, and `import strands` works without it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent
from strands.bidi import BidiAgent
from strands.event_loop import event_loop
from strands.hooks import registry as hooks
from strands.interrupt import InterruptException, PendingToolExecution
from strands.middleware import _agent_stream
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from strands.multiagent import GraphBuilder, Swarm
from strands.telemetry import metrics, tracer
from strands.types import _events

from otel_limits.bindings import strands as binding
from otel_limits.bindings.strands.private import PRIVATE_NAMES, PrivateName
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.testing import ScriptedModel
from otel_limits.usage.normaliser import record_of_usage
from tests.realtime import RealtimeModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands.models import Model
    from strands.multiagent.graph import Graph

ROOM = Path(binding.__file__).parent

NAMES = [pytest.param(each, id=each.name) for each in PRIVATE_NAMES]


def make_graph() -> Graph:
    """Create a graph of one agent."""
    builder = GraphBuilder()
    builder.add_node(Agent(model=ScriptedModel([]), name="boss"), "boss")
    builder.set_execution_timeout(60)
    return builder.build()


def make_gemini_model() -> Model:
    """Create a model of a client that only the full set of packages has."""
    from strands.models.gemini import GeminiModel

    return GeminiModel(client_args={"api_key": "x"}, model_id="m")


MADE: dict[str, Callable[[], object]] = {
    "Agent": lambda: Agent(model=ScriptedModel([]), callback_handler=None),
    "OpenAIModel": lambda: OpenAIModel(model_id="m"),
    "OpenAIResponsesModel": lambda: OpenAIResponsesModel(model_id="m"),
    "GeminiModel": make_gemini_model,
    "BidiAgent": lambda: BidiAgent(model=RealtimeModel()),
    "_AgentLoop": lambda: BidiAgent(model=RealtimeModel())._loop,
    "Graph": make_graph,
    "Swarm": lambda: Swarm([Agent(model=ScriptedModel([]), name="boss")]),
}
"""Makes an object of each class with a private attribute that we use."""


@pytest.mark.parametrize("private", NAMES)
def test_private_name_exists(private: PrivateName) -> None:
    """If this fails after an update of Strands, its entry describes the behavior without it."""
    # Probing skips modules that were not imported. tests/servers/wire has each client.
    pytest.importorskip(private.module, exc_type=ImportError)
    assert private.exists
    kind, made, attribute = private.name.partition("().")
    if made:
        assert hasattr(MADE[kind](), attribute)


def test_invisible_address_of_a_client_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a release renames its attributes, the guard names the loss; limits are enforced."""
    from strands.models import openai

    class OpenAIModel:
        def __init__(self) -> None:
            self.own_client = None

    monkeypatch.setattr(openai, "OpenAIModel", OpenAIModel)
    names = ("_custom_client", "_bedrock_mantle_config")
    for gap, name in zip(STRANDS.gaps_of("strands.models.openai"), names, strict=True):
        assert gap.name == f"strands.models.openai.OpenAIModel().{name}"
        assert (gap.without, gap.still_limited) == (
            "Such calls are priced as calls to OpenAI.",
            "all",
        )


def private_names_in(path: Path) -> set[str]:
    """Private attributes of other objects, and private modules, that a module uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found |= set() if owner in ("self", "cls") else {node.attr}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("strands."):
            found |= {part for part in (node.module or "").split(".") if part.startswith("_")}
    return found


def test_private_names_are_used_in_one_module() -> None:
    """All are used in one module; names for type checkers only are no exception."""
    others = [path for path in ROOM.glob("*.py") if path.name != "private.py"]
    assert {path.name: names for path in others if (names := private_names_in(path))} == {}


# --- assumptions without a private name -------------------------------------------------------


def parameters(function: Any) -> list[str]:
    """Names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def test_invocation_starts_and_ends_in_two_methods() -> None:
    """The first returns the span, and the second gets the outcome, in every case."""
    assert parameters(Agent._start_agent_trace_span) == ["self", "messages"]
    assert parameters(Agent._end_agent_trace_span) == ["self", "response", "error", "cancellation"]
    assert inspect.getsource(Agent.stream_async).count("self._end_agent_trace_span(") == 3


def test_messages_are_appended_one_by_one() -> None:
    """It adds the synthetic message to the history."""
    assert inspect.iscoroutinefunction(Agent._append_messages)
    assert parameters(Agent._append_messages) == ["self", "messages"]


def test_stop_event_starts_with_reason_and_message() -> None:
    """`put_stop` replaces the reason, and a refused leg makes such an event."""
    names = parameters(_events.EventLoopStopEvent.__init__)
    assert names[1:5] == ["stop_reason", "message", "metrics", "request_state"]
    event = _events.EventLoopStopEvent("end_turn", {"role": "assistant", "content": []}, None, {})  # type: ignore[arg-type]
    assert event["stop"][:2] == ("end_turn", {"role": "assistant", "content": []})


def test_agent_stream_has_a_stage() -> None:
    """We wrap it, and it gets the agent and its state."""
    assert {"agent", "invocation_state"} <= set(parameters(_agent_stream.AgentStreamContext))


def test_loop_passes_interrupts_through() -> None:
    """A refusal is an interrupt: no `AfterModelCallEvent`, no wrapping, no log."""
    source = inspect.getsource(event_loop._handle_model_execution)
    assert re.search(r"except InterruptException:\s+raise", source)
    assert issubclass(InterruptException, Exception)


def test_end_turn_after_tools_ends_loop() -> None:
    """A string in `AfterToolsEvent.end_turn` becomes the last message, before any cancel."""
    source = inspect.getsource(event_loop._handle_tool_execution)
    end_turn = source.index("if after_tools_event.end_turn")
    assert end_turn < source.index("agent._deferred_cancel or agent._observe_cancellation()")


def test_hooks_with_infinite_order_run_first_and_last() -> None:
    """Any finite order of an application lies between them."""
    registry, seen = hooks.HookRegistry(), []
    for order in (0, float("inf"), -float("inf"), 10**9):
        registry.add_callback(
            hooks.HookEvent, lambda _, order=order: seen.append(order), order=order
        )
    agent = Agent(model=ScriptedModel([]), callback_handler=None)
    asyncio.run(registry.invoke_callbacks_async(hooks.HookEvent(agent=agent)))
    assert seen == [-float("inf"), 0, 10**9, float("inf")]


@pytest.mark.parametrize(("total", "cached"), [(15, 0), (15, 5), (20, 5), (115, 100)])
def test_cached_tokens_match_strands_count(total: int, cached: int) -> None:
    """Its spans and our events agree on a call."""
    usage: Any = {
        "inputTokens": 10,
        "outputTokens": 5,
        "totalTokens": total,
        "cacheReadInputTokens": cached,
    }
    assert record_of_usage(usage).usage.input == metrics._total_prompt_tokens(usage)


def test_spans_have_the_tracked_scope() -> None:
    """The processor recognizes Strands' spans by the module that emits them."""
    assert tracer.__name__ == "strands.telemetry.tracer"


def test_tools_finished_before_interrupt_are_in_its_state() -> None:
    """A resume does not run those tools again, so we don't count them again."""
    state = Agent(model=ScriptedModel([]), callback_handler=None)._interrupt_state
    assert (state.interrupts, state.activated, state.pending_tool_execution) == ({}, False, None)
    assert "completed_tool_results" in parameters(PendingToolExecution)
    source = inspect.getsource(event_loop._handle_tool_execution)
    assert "tool_results.extend(pending_tool_execution.completed_tool_results)" in source
