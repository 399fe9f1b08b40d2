"""Reads what Strands says about messages, models and tool calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from opentelemetry import baggage, trace
from strands.tools.structured_output.structured_output_tool import StructuredOutputTool

from otel_limits.bindings.strands.private import interrupt_state
from otel_limits.core.faults import never_raises, note
from otel_limits.core.loops import Call, fingerprint
from otel_limits.core.usage import Usage
from otel_limits.otel.processor import token_count
from otel_limits.runs.calls import CHARACTERS_PER_TOKEN, OpenCall
from otel_limits.runs.gate import Request

if TYPE_CHECKING:
    from collections.abc import Collection

    from strands.agent.agent import Agent
    from strands.hooks import AfterToolsEvent, BeforeModelCallEvent
    from strands.types.content import Message

    from otel_limits.runs.run import Run

DICTIONARIES: Final = (dict, Mapping)
"""The first is as good as always what there is: asking for the second takes ten times as long."""

MODEL_CLASSES: Final = 32
"""Classes of models whose provider is remembered."""

OUTPUT_CAPS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""What providers call the most output tokens of an answer."""


def usage_of(usage: Mapping[str, Any]) -> Usage | None:
    """Return what the provider reported for a message, in the sense of `Usage`."""
    sent, output = token_count(usage["inputTokens"]), token_count(usage.get("outputTokens"))
    if sent is None or output is None:
        return None
    read = token_count(usage.get("cacheReadInputTokens", 0)) or 0
    written = token_count(usage.get("cacheWriteInputTokens", 0)) or 0
    # Providers fold cached tokens into the input, or report them beside it. As Strands does for
    # its spans (`strands.telemetry.metrics`), the total tells which.
    is_folded = sent + output == usage.get("totalTokens")
    return Usage(
        input=sent if is_folded else sent + read + written,
        output=output,
        cache_read=read,
        cache_write=written,
    )


def estimate_tokens(content: object) -> int:
    """Tokens that `content` has, about: never 0."""
    return max(1, (_characters(content) or 0) // CHARACTERS_PER_TOKEN)


@never_raises("binding")
def _characters(content: object) -> int:
    return len(json.dumps(content, default=str, ensure_ascii=False))


def model_id(model: object) -> str:
    """Return the id under which the provider knows a model, or `unknown`."""
    try:
        config = getattr(model, "config", None)
        known = config.get("model_id") if isinstance(config, DICTIONARIES) else None
    except Exception as error:  # noqa: BLE001  a model may be anything
        note("binding", error)
        return "unknown"
    return known if isinstance(known, str) else "unknown"


@functools.lru_cache(MODEL_CLASSES)
def provider_of(model: type[object]) -> str:
    """Who serves models of a class: Strands names its module after their provider."""
    package, _, module = model.__module__.rpartition(".")
    return module if package == "strands.models" else model.__qualname__


def note_chunk(call: OpenCall, chunk: Mapping[str, Any]) -> None:
    """Note what a chunk of a response says: how long it is, and the usage that was reported.

    That is kept as it was sent, too, so that a wrong rule of counting can be undone later.
    """
    try:
        call.streamed = True
        if "contentBlockDelta" in chunk:
            call.characters += _length(chunk["contentBlockDelta"]["delta"])
        usage = chunk["metadata"].get("usage") if "metadata" in chunk else None
        if usage is not None:
            call.counted = usage_of(usage)
            call.usage = _as_sent(usage)
            call.usage_total = token_count(usage.get("totalTokens"))
            call.reported = True  # from here on nobody has to look again
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        note("binding", error)


def _length(delta: Mapping[str, Any]) -> int:
    """Characters of text, reasoning or arguments in a part of a response."""
    if "text" in delta:
        return len(delta["text"])
    part = delta.get("toolUse") or delta.get("reasoningContent") or {}
    return len(part.get("input") or part.get("text") or "")


def _as_sent(usage: Mapping[str, Any]) -> Usage:
    return Usage(
        input=token_count(usage.get("inputTokens")) or 0,
        output=token_count(usage.get("outputTokens")) or 0,
        cache_read=token_count(usage.get("cacheReadInputTokens", 0)) or 0,
        cache_write=token_count(usage.get("cacheWriteInputTokens", 0)) or 0,
    )


def span_of_call(run: Run) -> str | None:
    """Return the id of the `chat` span of the loop's call that is going out, if it has one.

    It is current while the provider is asked. Where no tracer makes spans, what is current is the
    span around the agent, not the call's own.
    """
    context = trace.get_current_span().get_span_context()
    span_id = trace.format_span_id(context.span_id)
    is_own = context.is_valid and run.invocation.span_id not in (None, span_id)
    return span_id if is_own else None


def audit_attributes(agent: Agent, keys: tuple[str, ...]) -> dict[str, str]:
    """What `keys` are set to on the agent, or in the baggage of whoever called it."""
    if not keys:
        return {}
    found = {**baggage.get_all(), **agent.trace_attributes}
    return {key: str(found[key]) for key in keys if key in found}


def tool_uses(agent: Agent, message: Message) -> list[Mapping[str, Any]]:
    """Return the tool calls that a message asks for, but for those that an earlier leg finished."""
    asked: list[Mapping[str, Any]] = [
        block["toolUse"] for block in message["content"] if "toolUse" in block
    ]
    finished = _finished(agent)
    if finished:
        asked = [use for use in asked if use["toolUseId"] not in finished]
    if agent.tool_registry.dynamic_tools:
        asked = [use for use in asked if not is_output_tool(agent, use["name"])]
    return asked


def _finished(agent: Agent) -> Collection[str]:
    """Ids of the calls that ended before an interrupt that is being resumed: none runs again."""
    pending = getattr(interrupt_state(agent), "pending_tool_execution", None)
    if pending is None:
        return ()
    return {result["toolUseId"] for result in pending.completed_tool_results}


def is_output_tool(agent: Agent, name: str) -> bool:
    """Tell whether a tool is the framework's own way to structured output."""
    tool = agent.tool_registry.dynamic_tools.get(name)
    return tool is not None and isinstance(tool, StructuredOutputTool)


def denial_of(request: Mapping[str, Any], event: AfterToolsEvent) -> Mapping[str, Any] | None:
    """Return the error that a call was answered with that came to no tool.

    A hook denied the whole turn, or no tool can have such a name. `None` when there is no such
    error, or when it only says that the agent is cancelled.
    """
    if event.agent.cancel_signal.is_set():
        return None
    result = _result_of(request, event)
    return result if result is not None and status_of(result) == "error" else None


def acceptance_of(request: Mapping[str, Any], event: AfterToolsEvent) -> Mapping[str, Any] | None:
    """Return what a call was answered with that goes on in the background, if it does."""
    result = _result_of(request, event)
    return result if result is not None and status_of(result) == "success" else None


def _result_of(request: Mapping[str, Any], event: AfterToolsEvent) -> Mapping[str, Any] | None:
    results = (block["toolResult"] for block in event.message["content"])
    return next((each for each in results if each["toolUseId"] == request["toolUseId"]), None)


def status_of(result: Mapping[str, Any]) -> Literal["success", "error"]:
    """Return how a tool call ended."""
    return "error" if result.get("status") == "error" else "success"


def identity_of(call: Call) -> str:
    """Return what is equal for equal calls with equal results."""
    return fingerprint(call.request, call.result)


def call_of(run: Run, use: Mapping[str, Any], result: Mapping[str, Any]) -> Call:
    """Make what loop detection sees of a call: hashes."""
    name = use["name"]
    return Call(
        tool=name,
        request=fingerprint(name, use["input"]),
        result=fingerprint(result.get("status"), result.get("content")),
        exempt=run.policy.exempts(name),
    )


def text_of(result: Mapping[str, Any]) -> str:
    """Return what a tool answered, as text."""
    return "\n".join(
        str(part["text"]) if "text" in part else json.dumps(part, default=str, ensure_ascii=False)
        for part in result.get("content", ())
    )


@never_raises("binding")
def request_of(run: Run, event: BeforeModelCallEvent) -> Request:
    """Say what is known of a model call before it goes out."""
    agent, projected = event.agent, event.projected_input_tokens
    return Request(
        invocation=run.invocation,
        model=model_id(agent.model),
        input=estimate_tokens(agent.messages) if projected is None else projected,
        output_cap=output_cap(agent.model),
        action=run.policy.action,
        unpriced=run.policy.unpriced,
        attributes=agent.trace_attributes,
    )


def output_cap(model: object) -> int | None:
    """Return the most output tokens that a model may answer with, where its settings say so."""
    config = getattr(model, "config", None)
    if not isinstance(config, Mapping):
        return None
    params = config.get("params")
    caps = (
        token_count(settings.get(name))
        for settings in (config, params if isinstance(params, Mapping) else {})
        for name in OUTPUT_CAPS
    )
    return next((cap for cap in caps if cap), None)
