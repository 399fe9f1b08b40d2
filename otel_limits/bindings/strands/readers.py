"""Reads Strands' messages, models and tool calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from opentelemetry import trace
from strands.tools.structured_output.structured_output_tool import StructuredOutputTool

from otel_limits.bindings.strands.private import interrupt_state
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.price import SPEED
from otel_limits.usage.normaliser import completed_by, record_of_response, record_of_usage
from otel_limits.usage.text import as_json
from otel_limits.vendors.records import BLOCKED

if TYPE_CHECKING:
    from collections.abc import Collection

    from strands.agent.agent import Agent
    from strands.hooks import AfterToolsEvent
    from strands.types.content import Message

    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.run import Run

DICTIONARIES: Final = (dict, Mapping)
"""Nearly always the first applies: checking for the second takes ten times as long."""

MODEL_CLASSES: Final = 32
"""Number of model classes whose provider is cached."""

MODELS: Final = "strands.models"
ABSTRACT: Final = ("model",)
"""Modules that belong to no provider."""

REALTIME: Final = {
    "strands.bidi.models.bedrock": "bedrock",
    "strands.bidi.models.google": "gemini",
    "strands.bidi.models.openai.live": "openai",
    "strands.bidi.models.openai.realtime": "openai",
}
"""The providers of realtime models, by module."""

BEFORE_REQUEST: Final[Mapping[str, tuple[str, ...]]] = {
    "gemini": ("messageStart",),
    "ollama": ("messageStart", "contentBlockStart"),
}
"""Chunks that these providers send before the request: no sign of an answer."""


def model_id(model: object) -> str:
    """Return a model's ID at the provider, or `unknown`.

    For SageMaker it is the name of the endpoint.
    """
    try:
        config = getattr(model, "config", None)
        known = config.get("model_id") if isinstance(config, DICTIONARIES) else None
        if known is None:
            endpoint = getattr(model, "endpoint_config", None)
            known = endpoint.get("endpoint_name") if isinstance(endpoint, DICTIONARIES) else None
        if known is None:  # a realtime model
            known = getattr(model, "model_id", None)
        # Strands' own abstract method, which a class may have instead of the attribute.
        if known is None and config is None and (read := getattr(model, "get_config", None)):
            own = read()
            known = own.get("model_id") if isinstance(own, DICTIONARIES) else None
    except Exception as error:  # noqa: BLE001  a model may be anything
        report_suppressed("binding", error)
        return "unknown"
    return known if isinstance(known, str) else "unknown"


def provider_of(model: type) -> str:
    """Return the provider of a model class; for an application's own, the name of the class."""
    return known_provider(model) or model.__qualname__


@functools.lru_cache(MODEL_CLASSES)
def known_provider(model: type) -> str | None:
    """Return the provider of a model class, after which Strands names the module.

    Subclasses have the same provider. `None` for an application's own class.
    """
    for each in model.__mro__:
        if each.__module__ in REALTIME:
            return REALTIME[each.__module__]
        package, _, module = each.__module__.rpartition(".")
        if package == MODELS and module not in ABSTRACT:
            return module
    return None


def note_chunk(call: InFlightCall, chunk: Mapping[str, Any]) -> None:
    """Add the text and the usage in a chunk of a response to its call."""
    try:
        if "contentBlockDelta" in chunk:
            call.answered = call.has_content = True
            call.parts.append(_text_in(chunk["contentBlockDelta"]["delta"]))
        elif "toolUse" in (start := chunk.get("contentBlockStart", {}).get("start") or {}):
            call.answered = call.has_content = True
            call.parts.append(str(start["toolUse"].get("name") or ""))
        elif "metadata" in chunk:
            call.answered = call.has_content = True
            if (usage := chunk["metadata"].get("usage")) is not None:
                record = record_of_usage(usage, call.provider, call.model)
                record = completed_by(record, call.raw)
                call.record = completed_by(record, _tiers_in(chunk["metadata"]))
        elif "messageStop" in chunk:
            call.answered = True
            call.is_unbilled = chunk["messageStop"].get("stopReason") in BLOCKED
        elif not any(name in chunk for name in BEFORE_REQUEST.get(call.provider, ())):
            call.answered = True
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)


def _tiers_in(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the tiers in Bedrock's metadata, in addition to its usage.

    https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ConverseStreamMetadataEvent.html
    """
    tier, performance = metadata.get("serviceTier"), metadata.get("performanceConfig")
    if tier is None and performance is None:
        return None
    return {"service_tier": tier, SPEED: (performance or {}).get("latency")}


def note_output(call: InFlightCall, event: Mapping[str, Any]) -> None:
    """Add an event of a structured output to its call: most providers return only the output."""
    try:
        if "metadata" in event or "contentBlockDelta" in event:
            note_chunk(call, event)
            return
        call.answered = call.has_content = True
        if "output" in event:
            output = event["output"]
            dump = getattr(output, "model_dump_json", None)
            call.parts.append(dump() if dump is not None else as_json(output))
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)


def note_failed_output(call: InFlightCall, error: Exception) -> None:
    """Note that a structured output failed, possibly with an answer that is billed."""
    completion = getattr(error, "completion", None)  # openai, LengthFinishReasonError
    if completion is not None:
        call.record = record_of_response(completion, call.provider, call.model)
    # An answer that does not match the output model is a ValueError, of Strands or pydantic.
    if completion is not None or isinstance(error, ValueError):
        call.answered = True


def schema_of(output_model: object) -> object:
    """Return the schema in a request for structured output."""
    try:
        return output_model.model_json_schema()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  other objects have none, which is not an error
        return None


def _text_in(delta: Mapping[str, Any]) -> str:
    """Return text, reasoning or arguments in a part of a response."""
    if "text" in delta:
        return str(delta["text"])
    part = delta.get("toolUse") or delta.get("reasoningContent") or {}
    return str(part.get("input") or part.get("text") or "")


def note_answer(call: InFlightCall, usage: Mapping[str, Any], message: Message) -> None:
    """Add an answer whose chunks were not tracked to its call."""
    record = completed_by(record_of_usage(usage, call.provider, call.model), call.raw)
    if record.usage.total:  # the loop writes zeros if there was no usage
        call.record = record
    call.parts.append(as_json(message["content"]))


def span_of_call(run: Run) -> str | None:
    """Return the ID of the `chat` span of the loop's current call, if it has one.

    It is current during the request. Without a tracer, the current span is one around the agent,
    not the call's.
    """
    context = trace.get_current_span().get_span_context()
    span_id = trace.format_span_id(context.span_id)
    is_own = context.is_valid and run.invocation.span_id not in (None, span_id)
    return span_id if is_own else None


def tool_uses(agent: Agent, message: Message) -> list[Mapping[str, Any]]:
    """Return the tool calls that a message requests, except those finished in an earlier leg."""
    uses: list[Mapping[str, Any]] = [
        block["toolUse"] for block in message["content"] if "toolUse" in block
    ]
    finished = _finished(agent)
    if finished:
        uses = [use for use in uses if use["toolUseId"] not in finished]
    # Only requests for structured output register any.
    if agent.tool_registry.dynamic_tools:
        uses = [use for use in uses if not is_output_tool(agent, use["name"])]
    return uses


def _finished(agent: Agent) -> Collection[str]:
    """Return the IDs of calls that ended before the interrupt being resumed."""
    pending = getattr(interrupt_state(agent), "pending_tool_execution", None)
    if pending is None:
        return ()
    return {result["toolUseId"] for result in pending.completed_tool_results}


def is_output_tool(agent: Agent, name: str) -> bool:
    """Return whether a tool is the framework's own tool for structured output."""
    tool = agent.tool_registry.dynamic_tools.get(name)
    return tool is not None and isinstance(tool, StructuredOutputTool)


def denial_of(result: Mapping[str, Any] | None, event: AfterToolsEvent) -> Mapping[str, Any] | None:
    """Return the error result of a call that reached no tool.

    A hook denied the whole turn, or the name is invalid. `None` if there is no such error, or if it
    only reports that the agent is cancelled.
    """
    # Strands 1.62 answers every call of a cancelled turn with its own error.
    if event.agent.cancel_signal.is_set():
        return None
    return result if result is not None and status_of(result) == "error" else None


def acceptance_of(result: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the result of a call that continues in the background, if it does."""
    return result if result is not None and status_of(result) == "success" else None


def status_of(result: Mapping[str, Any]) -> Literal["success", "error"]:
    """Return the status of a tool call."""
    return "error" if result.get("status") == "error" else "success"


def text_of(result: Mapping[str, Any]) -> str:
    """Return the result of a tool as text."""
    return "\n".join(
        str(part["text"]) if "text" in part else json.dumps(part, default=str, ensure_ascii=False)
        for part in result.get("content", ())
    )
