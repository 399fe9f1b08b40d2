"""Reads the SDK's requests and responses, and adds notes to requests."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from agents import ModelResponse

from otel_limits.bindings.invocation import ToolAnswer
from otel_limits.bindings.openai_agents.openai_agents_probe import client_of
from otel_limits.bindings.request_settings import PricedRequest, settings_in
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.terms import DEFAULT_TERMS, PricingTerms, region_of, vendor_at
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.normaliser import completed_by, record_of_usage
from otel_limits.usage.text import MESSAGE, as_json, tokens_of_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_limits.bindings.openai_agents.agent_runs import AgentInvocation
    from otel_limits.core.usage import UsageRecord


# --- arguments of a call --------------------------------------------------------------------------

POSITIONS: Final = {
    "system_instructions": 0,
    "input": 1,
    "model_settings": 2,
    "tools": 3,
    "output_schema": 4,
    "handoffs": 5,
    "tracing": 6,
}
"""The arguments of `Model.get_response` and `stream_response` that may be positional."""


class RequestArguments:
    """The arguments of one request. Each stays where it was, as a subclass may name it otherwise.

    Args:
        positional: The positional arguments.
        named: The others.
    """

    def __init__(self, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep the arguments."""
        self.positional = list(positional)
        self.named = dict(named)

    def __getitem__(self, name: str) -> Any:
        """Return an argument; `None` if it is missing."""
        position = POSITIONS.get(name)
        if position is not None and position < len(self.positional):
            return self.positional[position]
        return self.named.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Replace an argument."""
        position = POSITIONS.get(name)
        if position is not None and position < len(self.positional):
            self.positional[position] = value
        else:
            self.named[name] = value


# --- the request ----------------------------------------------------------------------------------

OPENAI: Final = "openai"
PROVIDERS: Final[Mapping[str, str]] = {
    "agents.models": OPENAI,
    "agents.extensions.models.litellm_model": "litellm",
    "agents.extensions.models.any_llm_model": "any-llm",
}
"""The provider of the SDK's model classes, by the beginning of their modules."""

AZURE: Final = "AsyncAzure"
"""The beginning of the name of the client for Azure."""

MODEL_CLASSES: Final = 32
"""Number of model classes whose provider is cached."""


SCHEMAS: Final = ("response_format", "text", "metadata", "extra_headers")
"""Settings whose properties may have any name."""


def call_to(
    model: Any, request: RequestArguments, invocation: AgentInvocation | None
) -> InFlightCall:
    """Describe a model call before it is sent.

    Args:
        model: The model.
        request: The arguments of the call.
        invocation: The agent whose turn it is; `None` for a side call.
    """
    try:
        provider = provider_of(model)
        call = InFlightCall(
            model_id(model),
            _projected_input(request, invocation),
            provider,
            getattr(request["model_settings"], "max_tokens", None),
        )
        call.terms = _terms_of(model, provider, request)
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)
        return InFlightCall("unknown")
    return call


def provider_of(model: Any) -> str:
    """Return the provider of a model; for an application's own class, the name of the class."""
    return _known_provider(model) or type(model).__qualname__


def is_own_model(model: Any) -> bool:
    """Return whether a model's class is the application's own, and extends none of the SDK's."""
    kind: type = type(model)
    return _provider_of_class(kind) is None


def _known_provider(model: Any) -> str | None:
    kind: type = type(model)
    provider = _provider_of_class(kind)
    is_azure = provider == OPENAI and type(client_of(model)).__name__.startswith(AZURE)
    return "azure" if is_azure else provider


@functools.lru_cache(MODEL_CLASSES)
def _provider_of_class(model: type) -> str | None:
    for each in model.__mro__:
        for module, provider in PROVIDERS.items():
            if f"{each.__module__}.".startswith(f"{module}.") and each.__name__ != "Model":
                return provider
    return None


def model_id(model: Any) -> str:
    """Return a model's ID at the provider, or `unknown`."""
    value = getattr(model, "model", None)
    return value if isinstance(value, str) and value else "unknown"


def _projected_input(request: RequestArguments, invocation: AgentInvocation | None) -> int:
    """Estimate the input tokens of a request: at least 1.

    What is known of the last request and its response covers everything before, so only what came
    later is estimated.
    """
    items = items_in(request["input"])
    tokens = 0
    if invocation is not None and invocation.answered_tokens:
        is_stored = request["previous_response_id"] or request["conversation_id"]
        if is_stored:  # only new items are sent
            tokens = invocation.answered_tokens
        elif invocation.answered_items <= len(items) and items[:1] == [invocation.first_item]:
            tokens, items = invocation.answered_tokens, items[invocation.answered_items :]
    tokens += sum(MESSAGE + tokens_of_text(text_of_item(each)) for each in items)
    if not (invocation is not None and invocation.answered_tokens):
        tokens += tokens_of_text(request["system_instructions"] or "")
        tokens += sum(tokens_of_text(_declared(tool)) for tool in request["tools"] or ())
    return max(1, tokens)


def items_in(given: Any) -> list[Any]:
    """Return the items of an input."""
    return [given] if isinstance(given, str) else list(given)


def _declared(tool: Any) -> str:
    schema = getattr(tool, "params_json_schema", None)
    return f"{tool.name} {getattr(tool, 'description', '')} {as_json(schema) if schema else ''}"


def text_of_item(item: Any) -> str:
    """Return the text of an item of a conversation; of tool calls and others, as JSON."""
    content = item.get("content") if isinstance(item, Mapping) else item
    if isinstance(content, str):
        return content
    return as_json(content if content is not None else item)


def _terms_of(model: Any, provider: str, request: RequestArguments) -> PricingTerms:
    """Return the pricing terms of a request."""
    try:
        given = request["model_settings"]
        asked = {
            name: value
            for source in (vars(given), given.extra_args, given.extra_body)
            for name, value in (source.items() if isinstance(source, Mapping) else ())
            if value is not None and name not in SCHEMAS
        }
        asked["tools"] = [
            {"type": tool.name}
            for tool in request["tools"] or ()
            if not hasattr(tool, "on_invoke_tool")
        ]
        address = getattr(client_of(model), "base_url", None) or getattr(model, "base_url", None)
        addresses = [str(address)] if address else []
        name = model_id(model)
        return PricedRequest(
            model=name,
            provider=provider,
            own_class=None if _known_provider(model) else type(model).__qualname__,
            vendor=next(filter(None, map(vendor_at, addresses)), None),
            region=region_of(name, addresses, set_as=[], of_client=[]),
            settings=tuple(settings_in(asked)),
        ).terms
    except Exception as error:  # noqa: BLE001  a model may be anything
        report_suppressed("binding", error)
        return DEFAULT_TERMS


# --- the response ---------------------------------------------------------------------------------

USAGE: Final = OPENAI
"""The SDK writes all usage like OpenAI: cached tokens are part of the input
(openai-agents, usage.py)."""

SUMS: Final = ("input_tokens", "output_tokens", "total_tokens")

CALL: Final = "function_call"
RESULT: Final = "function_call_output"
"""Types of the items for a function tool."""


def with_raw_usage(settings: Any, model: Any) -> Any:
    """Return the settings of a request with which the SDK keeps the vendor's usage."""
    # Older releases do not have the field.
    can_keep = not getattr(settings, "preserve_raw_usage", True)
    if not can_keep or is_own_model(model):
        return settings
    return replace(settings, preserve_raw_usage=True)


def usage_of(response: Any, model: str, raw: object = None, *, is_own: bool = False) -> UsageRecord:
    """Return the usage that a response of a model reports.

    Args:
        response: A `ModelResponse`, or the last response of a stream.
        model: The model's ID.
        raw: The vendor's usage, if the SDK has kept it, or an application's own model states it.
        is_own: True for an application's own model.
    """
    usage = response.usage
    told = {} if usage is None else _as_sent(response, usage)
    if not any(map(told.get, SUMS)) and not _reports_zeros(response, raw, is_own=is_own):
        told = {name: told[name] for name in told if name not in SUMS}
    return completed_by(completed_by(record_of_usage(told, USAGE, model), usage), raw)


def _reports_zeros(response: Any, raw: object, *, is_own: bool) -> bool:
    """Return whether a vendor reported the zeros of a usage. Otherwise the usage is missing.

    Only the vendor's own usage shows it: for a missing usage, Chat Completions, LiteLLM and any-llm
    return `Usage(requests=1)`, which equals a usage of zeros, and Responses `Usage()` or, in newer
    releases, `Usage(requests=1)` (openai-agents 0.20 and 0.24, `get_response` in
    models/openai_chatcompletions.py, models/openai_responses.py and extensions/models/, read on
    2026-11-30). They keep the vendor's usage, except for LiteLLM, which also makes up zeros itself:
    `calculate_total_usage` in litellm 1.106, litellm_core_utils/streaming_handler.py.

    An application's own model has to return a `Usage`. The response of its stream does not have to
    contain one.
    """
    if raw is not None:
        return record_of_usage(raw, USAGE).is_zero
    return is_own and not isinstance(response, ModelResponse)


def _as_sent(response: Any, usage: Any) -> dict[str, Any]:
    told = {name: getattr(usage, name) for name in SUMS if getattr(usage, name, None) is not None}
    for name in ("input_tokens_details", "output_tokens_details"):
        if (details := getattr(usage, name, None)) is not None:
            told[name] = dict(details)
    if (tier := getattr(response, "service_tier", None)) is not None:
        told["service_tier"] = tier
    return told


def text_of(output: Sequence[Any]) -> str:
    """Return the text of the messages in a response."""
    return "".join(
        str(_field(part, "text") or "")
        for item in output
        if _field(item, "type") == "message"
        for part in _field(item, "content") or ()
    )


def tools_in(output: Sequence[Any], handoffs: Sequence[Any]) -> Iterator[tuple[str, str, object]]:
    """Yield the ID, the name and the arguments of each function tool that a response requests.

    Args:
        output: The items of the response.
        handoffs: Hand-offs, which a model requests like tools.
    """
    others = {handoff.tool_name for handoff in handoffs}
    for item in output:
        if _field(item, "type") == CALL and _field(item, "name") not in others:
            name = str(_field(item, "name"))
            identity = _field(item, "call_id") or name
            yield str(identity), name, arguments_of(_field(item, "arguments"))


def answers_in(given: Any) -> dict[str, ToolAnswer]:
    """Return the results of function tools in the input of a request, by the ID of the call."""
    results = {
        str(item["call_id"]): item.get("output")
        for item in (given if isinstance(given, list) else ())
        if isinstance(item, Mapping) and item.get("type") == RESULT
    }
    # The SDK marks no result as an error. One that no tool gave says why it was rejected.
    return {
        identity: ToolAnswer(output if isinstance(output, str) else as_json(output), is_error=True)
        for identity, output in results.items()
    }


def requests_in(output: Sequence[Any]) -> str:
    """Return names and arguments of the function tools that a response requests, as written."""
    return "".join(
        str(_field(item, name) or "")
        for item in output
        if _field(item, "type") == CALL
        for name in ("name", "arguments")
    )


def arguments_of(text: Any) -> object:
    """Return the arguments of a tool call, independent of their order and spaces in JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):  # a model can write anything
        return text


def _field(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


# --- notes for the model --------------------------------------------------------------------------
# They change a request, never the items of the run.

NO_RESULT: Final = "[The tool returned nothing.]"


def with_note(given: Any, note: str) -> Any:
    """Return the input of a request with a sentence for the model."""
    # At the end, so that everything before it stays identical and the vendor's prompt cache still
    # applies.
    if isinstance(given, str):
        return f"{given}\n\n{note}"
    return [*given, {"role": "user", "content": note}]


def nudged(given: Any, repeated: str, note: str) -> Any:
    """Return the input with a sentence in the output of a function call, by its ID."""
    return (
        [_with_nudge(item, repeated, note) for item in given] if isinstance(given, list) else given
    )


def _with_nudge(item: Any, repeated: str, note: str) -> Any:
    is_result = isinstance(item, Mapping) and item.get("type") == RESULT
    if not is_result or item.get("call_id") != repeated or not isinstance(item["output"], str):
        return item
    return {**item, "output": f"{item['output']}\n\n{note}"}


def as_texts(given: Any) -> Any:
    """Return the input without tool calls: as texts, and without items of the vendor's own tools.

    Several vendors refuse tool calls in a conversation for which no tools are declared.
    """
    return list(_texts_of(given)) if isinstance(given, list) else given


def _texts_of(items: Sequence[Any]) -> Iterator[Any]:
    for item in items:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == CALL:
            text = f"[I called the tool {item['name']} with {item['arguments']}]"
            yield {"role": "assistant", "content": text}
        elif kind == RESULT:
            output = item["output"]
            text = output if isinstance(output, str) else as_json(output)
            told = f"[Result of the tool:]\n{text}" if text.strip() else NO_RESULT
            yield {"role": "user", "content": told}
        elif kind in (None, "message"):
            yield item
        elif text := _result_of_other(item):
            yield {"role": "user", "content": f"[Result of the tool:]\n{text}"}


def _result_of_other(item: Mapping[str, Any]) -> str:
    """Return the result of a tool of another kind, such as a shell."""
    is_result = str(item["type"]).endswith("_output")
    return text_of_item({"content": item.get("output")}) if is_result else ""
