"""Reads LangChain's requests and messages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessage, AIMessageChunk

from otel_limits.bindings.langchain.chat_terms import terms_of
from otel_limits.bindings.langchain.model_classes import model_id, provider_of
from otel_limits.bindings.langchain.private_chat_names import usage_in_part
from otel_limits.bindings.vendor_usage import reads_usage
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.usage import NOTHING_REPORTED
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.fields import token_count
from otel_limits.usage.normaliser import completed_by, record_of_usage
from otel_limits.usage.text import MESSAGE, as_json, tokens_of_text
from otel_limits.vendors.records import BLOCKED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.core.usage import UsageRecord

OUTPUT_CAPS: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens_to_sample",
    "num_predict",
)
"""Attributes and arguments with the cap on output tokens."""

USAGE: Final = "langchain"
"""LangChain's clients write all usage alike: cached tokens are part of the input
(langchain-core, messages/ai.py, `UsageMetadata`)."""

WRITTEN: Final = ("reasoning_content", "refusal", "function_call")
"""Texts of a model outside of the content of its response."""
STOP_REASONS: Final = ("finish_reason", "stopReason", "stop_reason")
"""Where a response has the reason for its end."""

OF_VENDOR: Final = ("token_usage", "usage")
"""Where a response has the vendor's own usage."""
NOT_IN_USAGE: Final = ("service_tier", "serviceTier", "server_tool_use")
"""The tier that was served, and the number of searches."""


track_converted_part = reads_usage(usage_in_part)
"""Wraps one of `CONVERTERS`."""


def call_to(
    model: Any,
    messages: Sequence[Any],
    options: Mapping[str, Any],
    known: dict[int, tuple[Any, int]],
) -> InFlightCall:
    """Describe a model call before it is sent.

    Args:
        model: The model.
        messages: The conversation.
        options: Arguments of the call, with the tools.
        known: Estimates of messages seen before.
    """
    try:
        call = InFlightCall(
            model_id(model),
            _projected_input(messages, options, known),
            provider_of(type(model)),
            _output_cap(model, options),
        )
        call.terms = terms_of(model, messages, options)
    except Exception as error:  # noqa: BLE001  the graph must not feel it
        report_suppressed("binding", error)
        return InFlightCall("unknown")
    return call


def _output_cap(model: Any, options: Mapping[str, Any]) -> int | None:
    # Pydantic's models are slow to raise AttributeError.
    own = vars(model)
    held = [token_count(each.get(name)) for each in (options, own) for name in OUTPUT_CAPS]
    cap = max((cap for cap in held if cap), default=None)
    return None if cap is None else cap * (token_count(options.get("n", own.get("n"))) or 1)


def _projected_input(
    messages: Sequence[Any], options: Mapping[str, Any], known: dict[int, tuple[Any, int]]
) -> int:
    """Estimate the input tokens of a request: at least 1.

    Usage that the vendor reported for an earlier response covers everything before it, so only
    what came later is estimated.
    """
    tokens = 0
    for message in reversed(messages):
        # Only these have the field; Pydantic's models are slow to raise AttributeError.
        usage = message.usage_metadata if isinstance(message, AIMessage) else None
        if usage and (reported := token_count(usage.get("total_tokens"))):
            return tokens + reported
        tokens += _tokens_of(message, known)
    tools = options.get("tools")
    return max(1, tokens + (tokens_of_text(as_json(tools)) if tools else 0))


def _tokens_of(message: Any, known: dict[int, tuple[Any, int]]) -> int:
    entry = known.get(id(message))
    if entry is None or entry[0] is not message:  # Python reuses the ID of a deleted object
        calls = getattr(message, "tool_calls", None)
        text = text_of(message) + (as_json(calls) if calls else "")
        entry = known[id(message)] = message, MESSAGE + tokens_of_text(text)
    return entry[1]


def text_of(message: Any) -> str:
    """Return the content of a message as text."""
    content = getattr(message, "content", message)
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    return as_json(content)


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text")


def usage_of(
    message: Any,
    output: Mapping[str, Any] | None,
    call: InFlightCall,
    chunks: Sequence[Any] = (),
) -> UsageRecord:
    """Return the usage that a response reports.

    Args:
        message: The response.
        output: `LLMResult.llm_output`, where models without `usage_metadata` put it.
        call: The call.
        chunks: Its parts, if it was streamed.
    """
    metadata = getattr(message, "response_metadata", None) or {}
    record = _tokens_in(message, metadata, output, call, chunks)
    for raw in (metadata.get("headers"), *map(metadata.get, OF_VENDOR), call.raw):
        record = completed_by(record, raw)
    return record


def _tokens_in(
    message: Any,
    metadata: Mapping[str, Any],
    output: Mapping[str, Any] | None,
    call: InFlightCall,
    chunks: Sequence[Any],
) -> UsageRecord:
    provider, model = call.provider, call.model
    usage = getattr(message, "usage_metadata", None)
    if usage and (repeated := _repeated_in(chunks)):
        usage = repeated[-1]
        if not _are_sums(repeated):
            return NOTHING_REPORTED
    if usage:
        told = {**usage, **_others_in(metadata)}
        # Some clients write 0 for a missing count.
        if not usage.get("input_tokens") and any(map(usage.get, ("output_tokens", "total_tokens"))):
            del told["input_tokens"], told["total_tokens"]
        return record_of_usage(told, USAGE, model)
    for held in (metadata, output or {}):
        for name in OF_VENDOR:
            if held.get(name):
                return record_of_usage(held[name], provider, model)
    return record_of_usage(None)


def _repeated_in(chunks: Sequence[Any]) -> list[Mapping[str, int]]:
    """Return the usages of chunks that each have the whole input, which LangChain adds up.

    Some servers repeat the running usage in every chunk: vLLM with `continuous_usage_stats`.
    """
    told = [getattr(each, "usage_metadata", None) or {} for each in chunks]
    repeated = [each for each in told if each.get("input_tokens")]
    return repeated if len(repeated) > 1 else []


def _are_sums(usages: Sequence[Mapping[str, int]]) -> bool:
    """Return whether each usage contains the one before."""
    names = ("input_tokens", "output_tokens")
    pairs = itertools.pairwise(usages)
    return all(
        one.get(name, 0) <= next_one.get(name, 0) for one, next_one in pairs for name in names
    )


def has_usage(chunk: Any) -> bool:
    """Return whether a part of a response reports usage."""
    metadata = getattr(chunk, "response_metadata", None) or {}
    return bool(getattr(chunk, "usage_metadata", None)) or any(map(metadata.get, OF_VENDOR))


def _others_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vendor's fields that LangChain's usage does not have."""
    holders = [metadata, *(metadata.get(name) for name in OF_VENDOR)]
    return {
        name: each[name]
        for each in holders
        if isinstance(each, Mapping)
        for name in NOT_IN_USAGE
        if each.get(name) is not None
    }


def answer_in(message: Any) -> str:
    """Return all that a model wrote in a response, or in a part of one, as text."""
    others = getattr(message, "additional_kwargs", {})
    reasoning = "".join(str(others[name]) for name in WRITTEN if others.get(name))
    if chunks := getattr(message, "tool_call_chunks", ()):
        tools = "".join((each.get("name") or "") + (each.get("args") or "") for each in chunks)
    else:
        requested = (getattr(message, name, None) for name in ("tool_calls", "invalid_tool_calls"))
        tools = "".join(str(calls) for calls in requested if calls)
    return reasoning + text_of(message) + tools


def messages_in(answer: Any) -> list[list[Any]]:
    """Return the messages in an answer, for each conversation those that were requested.

    A model that completes text has none: its texts become messages.
    """
    if not hasattr(answer, "generations"):
        return [[_message_of(answer)]]
    generations = answer.generations
    if generations and not isinstance(generations[0], list):  # of one conversation
        generations = [generations]
    return [[_message_of(each) for each in several] for several in generations]


def _message_of(generation: Any) -> Any:
    if isinstance(generation, str):
        return AIMessage(generation)
    if hasattr(generation, "message"):
        return generation.message
    if not hasattr(generation, "generation_info"):  # a message itself
        return generation
    return AIMessage(generation.text, response_metadata=generation.generation_info or {})


def chunk_of(part: Any) -> Any:
    """Return a part of a stream as a part of a message."""
    message = _message_of(part)
    if isinstance(message, AIMessage) and not isinstance(message, AIMessageChunk):
        return AIMessageChunk(content=message.content, response_metadata=message.response_metadata)
    return message


def is_blocked(message: Any) -> bool:
    """Return whether a guardrail of the vendor or of a gateway wrote a response."""
    metadata = getattr(message, "response_metadata", None) or {}
    return any(str(metadata.get(name)) in BLOCKED for name in STOP_REASONS)


def is_cached(message: Any) -> bool:
    """Return whether a response comes from LangChain's own cache, so that nothing was sent.

    LangChain marks it by costs of zero: langchain-core, `_convert_cached_generations`.
    """
    usage = getattr(message, "usage_metadata", None)
    return bool(usage and usage.get("total_cost") == 0)
