"""Reads LangChain's requests, models and messages, and adds notes to requests."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool

from otel_limits.bindings.langchain.langchain_probe import usage_in_part
from otel_limits.bindings.model_call import UNKNOWN_MODEL
from otel_limits.bindings.request_settings import (
    CACHE_CONTROL,
    PricedRequest,
    setting_names,
    settings_in,
)
from otel_limits.bindings.vendor_usage import reads_usage
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.terms import DEFAULT_TERMS, FIVE_MINUTES, PricingTerms, region_of, vendor_at
from otel_limits.core.usage import NOTHING_REPORTED
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.fields import token_count
from otel_limits.usage.normaliser import completed_by, record_of_usage
from otel_limits.usage.text import MESSAGE, as_json, tokens_of_text
from otel_limits.vendors.records import BLOCKED, HIDDEN_REGION

if TYPE_CHECKING:
    from otel_limits.bindings.request_settings import ModelSetting
    from otel_limits.core.usage import UsageRecord


# --- provider and ID of a model -------------------------------------------------------------------

PACKAGES: Final[Mapping[str, str]] = {
    "langchain_anthropic": "anthropic",
    "langchain_aws": "bedrock",
    "langchain_cohere": "cohere",
    "langchain_deepseek": "deepseek",
    "langchain_fireworks": "fireworks",
    "langchain_google_genai": "gemini",
    "langchain_google_vertexai": "gemini",
    "langchain_groq": "groq",
    "langchain_huggingface": "huggingface",
    "langchain_litellm": "litellm",
    "langchain_mistralai": "mistral",
    "langchain_ollama": "ollama",
    "langchain_openai": "openai",
    "langchain_openrouter": "openrouter",
    "langchain_perplexity": "perplexity",
    "langchain_together": "together",
    "langchain_xai": "xai",
}
"""The provider of each package of models: https://docs.langchain.com/oss/python/integrations/chat."""

AZURE: Final = "Azure"
"""The beginning of the names of classes for Azure's endpoints, which are in OpenAI's package."""

MODEL_IDS: Final = ("model", "model_name", "model_id", "deployment_name", "azure_deployment")
"""Attributes with the model's ID. There is no common one."""

ANSWERING_MODELS: Final = ("model_name", "model")
"""Keys of the model in `response_metadata`. The first is that of `UsageMetadataCallbackHandler`
(langchain-core 1.8.3, `callbacks/usage.py`), the second that of some vendors' clients."""

MODEL_CLASSES: Final = 32
"""Number of model classes whose provider is cached."""


def provider_of(model: type) -> str:
    """Return the provider of a model class; for an application's own, the name of the class."""
    return _known_provider(model) or model.__qualname__


def is_known(model: type) -> bool:
    """Return whether a model class is of a provider's package, or of a subclass of one."""
    return _known_provider(model) is not None


@functools.lru_cache(MODEL_CLASSES)
def _known_provider(model: type) -> str | None:
    for each in model.__mro__:
        if (provider := PACKAGES.get(each.__module__.partition(".")[0])) is not None:
            return "azure" if each.__name__.startswith(AZURE) else provider
    return None


def model_id(model: Any) -> str:
    """Return a model's ID at the provider, or `unknown`."""
    kind: type = type(model)
    held, properties = vars(model), _properties_of(kind)
    for name in MODEL_IDS:
        value = getattr(model, name, None) if name in properties else held.get(name)
        if isinstance(value, str) and value:
            # Google's client accepts both spellings of an ID.
            return value.removeprefix("models/")
    return UNKNOWN_MODEL


def model_in(messages: Sequence[Any], output: Mapping[str, Any] | None) -> str:
    """Return the model that a response names, or `unknown`.

    Args:
        messages: The response, or its parts: LangChain joins the names in parts.
        output: `LLMResult.llm_output`, where models without messages put it.
    """
    metadata = [getattr(each, "response_metadata", None) or {} for each in messages]
    for held in (*metadata, output or {}):
        for name in ANSWERING_MODELS:
            if isinstance(value := held.get(name), str) and value:
                return value.removeprefix("models/")
    return UNKNOWN_MODEL


# Pydantic's models are slow to raise AttributeError.
@functools.lru_cache(MODEL_CLASSES)
def _properties_of(model: type) -> frozenset[str]:
    """Return the names of an ID that a class defines itself."""
    return frozenset(name for name in MODEL_IDS for each in model.__mro__ if name in vars(each))


# --- pricing terms --------------------------------------------------------------------------------

CONTENT: Final = operator.attrgetter("content")

FREE: Final = frozenset(BaseChatModel.model_fields) | {
    "response_format",
    "response_schema",
    "response_json_schema",
    "output_config",
    "ls_structured_output_format",
    "location",  # of Google, whose client may not use it
}
"""Fields of LangChain itself, and schemas, whose properties may have any name."""

OF_CLIENT_TOOLS: Final = frozenset(
    {"function", "input_schema", "parameters", "toolSpec", "function_declarations"}
    | {"functionDeclarations", "parameter_definitions", "properties"}
)
"""Keys of tools that the application runs, with a schema."""

CLIENT_TYPES: Final = frozenset({"function", "custom", "object"})
"""Types of such tools, the last of a bare schema. Any other type is that of a vendor's tool."""

DECLARATIONS: Final = frozenset({"function_declarations", "functionDeclarations"})

ADDRESSES: Final = (
    "openai_api_base",
    "base_url",
    "api_base",
    "azure_endpoint",
    "anthropic_api_url",
    "endpoint",
)
"""Attributes with the address."""
NEVER_MOVED: Final = frozenset({"bedrock", "gemini"})
"""Providers whose clients are used with no other vendor."""

POINT: Final = "cachePoint"
"""Bedrock's mark of the end of a cached part."""


def terms_of(
    model: Any, messages: Sequence[Any] = (), options: Mapping[str, Any] | None = None
) -> PricingTerms:
    """Return the pricing terms of a request.

    Args:
        model: The model.
        messages: The conversation.
        options: Arguments of the call, with the tools.
    """
    try:
        return _request(model, messages, options or {}).terms
    except Exception as error:  # noqa: BLE001  a model may be anything
        report_suppressed("binding", error)
        return DEFAULT_TERMS


def _request(model: Any, messages: Sequence[Any], options: Mapping[str, Any]) -> PricedRequest:
    kind = type(model)
    name, provider, addresses = model_id(model), provider_of(kind), _addresses(model)
    # Only what a vendor could receive, as other fields may hold whole conversations.
    read = setting_names().read
    own = {
        field: value
        for field, value in vars(model).items()
        if (field in read or type(value) is dict) and value and field not in FREE
    }
    asked = {field: value for field, value in options.items() if field not in FREE}
    settings = tuple(settings_in([_without_schemas(asked), _without_schemas(own)]))
    blocks = _blocks_in(messages)
    return PricedRequest(
        model=name,
        provider=provider,
        own_class=None if is_known(kind) else kind.__qualname__,
        vendor=next(filter(None, map(vendor_at, addresses)), None),
        region=region_of(
            name,
            addresses,
            set_as=[each.value for each in settings if _is_region(each)],
            of_client=_regions(model, provider),
        ),
        settings=settings,
        cache_ttls=frozenset(_ttls(blocks)),
        audio_in=any(map(_is_audio, blocks)),
    )


def _blocks_in(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return the parts of messages that are not plain texts."""
    # In one step, as every call looks at the whole conversation. Most have only plain texts.
    if list not in map(type, map(CONTENT, messages)):
        return []
    contents = [message.content for message in messages if isinstance(message.content, list)]
    return [part for content in contents for part in content if isinstance(part, Mapping)]


def _addresses(model: Any) -> list[str]:
    """Return the addresses of a model's client, if its class may be used with any vendor."""
    if provider_of(type(model)) in NEVER_MOVED:
        return []
    held = vars(model)
    # The client of OpenAI knows the address that its variable set.
    told = [getattr(held.get("root_client"), "base_url", None), *map(held.get, ADDRESSES)]
    return [str(each) for each in told if each]


def _is_region(setting: ModelSetting) -> bool:
    is_text = isinstance(setting.value, str) and setting.value != ""
    return is_text and setting.name in setting_names().regions


def _regions(model: Any, provider: str) -> Iterator[str]:
    """Yield the regions that a client uses unless a request says otherwise."""
    if provider == "bedrock":
        client = getattr(getattr(model, "client", None), "meta", None)
        yield getattr(client, "region_name", None) or HIDDEN_REGION
    # Google's own API has no regions; Vertex AI is global unless a location is set.
    elif provider == "gemini" and getattr(getattr(model, "client", None), "vertexai", False):
        location = getattr(model, "location", None)
        if location:
            yield location


def _without_schemas(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose tools have no schemas, also in arguments such as `model_kwargs`."""
    found: dict[str, Any] = {}
    tool_lists = setting_names().tool_lists
    for name, value in fields.items():
        if name in tool_lists and isinstance(value, (list, tuple)):
            found[name] = [_without_schema(tool) for tool in value]
        elif name in tool_lists and isinstance(value, Mapping):  # by name
            found[name] = [_without_schema(tool) for tool in value.values()]
        elif type(value) is dict:
            found[name] = _without_schemas(value)
        elif not isinstance(value, BaseTool):
            found[name] = value
    return found


def _without_schema(tool: Any) -> Any:
    """Return a tool without its schema, whose properties may have any name.

    LangChain's tools, functions and classes become tools of the client, whatever they contain.
    """
    if isinstance(tool, BaseTool):
        return _of_client((tool.extras or {}).get(CACHE_CONTROL))
    if not isinstance(tool, Mapping):
        return _of_client() if callable(tool) else tool
    # Tools that a vendor runs have a type, or their own name as the only key.
    kind = tool.get("type", "function" if "name" in tool else None)
    if kind not in CLIENT_TYPES and (kind is not None or OF_CLIENT_TOOLS.isdisjoint(tool)):
        return tool
    if not DECLARATIONS.isdisjoint(tool):  # with Google's own tools in the same object
        return {name: tool[name] for name in tool if name not in OF_CLIENT_TOOLS}
    return _of_client(tool.get(CACHE_CONTROL))


def _of_client(cache_control: Any = None) -> dict[str, Any]:
    return {"type": "function", CACHE_CONTROL: cache_control}


def _ttls(blocks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lifetime of each part that is to be cached."""
    for block in blocks:
        for name in (CACHE_CONTROL, POINT):
            if isinstance(point := block.get(name), Mapping):
                yield str(point.get("ttl") or FIVE_MINUTES)


def _is_audio(block: Mapping[str, Any]) -> bool:
    mime = block.get("mime_type") or ""
    return block.get("type") in ("audio", "input_audio") or str(mime).startswith("audio/")


# --- requests and messages ------------------------------------------------------------------------

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
        return InFlightCall(UNKNOWN_MODEL)
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


# --- notes for the model --------------------------------------------------------------------------
# They change a request, never the messages of the graph.

NO_RESULT: Final = "[The tool returned nothing.]"


def with_note(messages: Any, note: str) -> Any:
    """Return the messages of a request with a sentence for the model."""
    # At the end, so that everything before it stays identical and the vendor's prompt cache still
    # applies. In the last message, as several vendors refuse two of one role in a row.
    if isinstance(messages, str):
        return f"{messages}\n\n{note}"
    if hasattr(messages, "to_messages"):
        messages = messages.to_messages()
    if (
        messages
        and isinstance(messages[-1], HumanMessage)
        and isinstance(messages[-1].content, str)
    ):
        last = messages[-1].model_copy(update={"content": f"{messages[-1].content}\n\n{note}"})
        return [*messages[:-1], last]
    return [*messages, HumanMessage(note)]


def nudged(messages: Any, repeated: str, note: str) -> Any:
    """Return the messages with a sentence in the result of a tool call, by its ID."""
    return (
        [_with_nudge(each, repeated, note) for each in messages]
        if isinstance(messages, list)
        else messages
    )


def _with_nudge(message: Any, repeated: str, note: str) -> Any:
    if not isinstance(message, ToolMessage) or message.tool_call_id != repeated:
        return message
    return message.model_copy(update={"content": f"{text_of(message)}\n\n{note}"})


def as_texts(messages: Any) -> Any:
    """Return the messages without tool calls, which are texts then.

    Several vendors refuse tool calls in a conversation for which no tools are declared. All results
    of a turn become one message.
    """
    if hasattr(messages, "to_messages"):
        messages = messages.to_messages()
    return list(_texts_of(messages)) if isinstance(messages, list) else messages


def _texts_of(messages: Sequence[Any]) -> Iterator[Any]:
    results: list[str] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            text = text_of(message)
            has_text = bool(text.strip())
            results.append(f"[Result of the tool:]\n{text}" if has_text else NO_RESULT)
            continue
        if results:
            yield HumanMessage("\n\n".join(results))
            results = []
        is_answer = isinstance(message, AIMessage)
        calls = [*message.tool_calls, *message.invalid_tool_calls] if is_answer else []
        if calls:
            told = [f"[I called the tool {each['name']} with {_arguments(each)}]" for each in calls]
            text = "\n".join(filter(None, [str(message.text), *told]))
            yield AIMessage(text, name=message.name)
        else:
            yield message
    if results:
        yield HumanMessage("\n\n".join(results))


def _arguments(call: Mapping[str, Any]) -> str:
    arguments = call["args"]  # an invalid call has them as the model wrote them
    return arguments if isinstance(arguments, str) else as_json(arguments)
