"""Describes a model call before it is sent: its input, pricing terms, and output cap."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from otel_limits.bindings.request_settings import (
    MAX_DEPTH,
    ModelSetting,
    PricedRequest,
    setting_names,
    settings_in,
)
from otel_limits.bindings.strands.private import bedrock_url, custom_client
from otel_limits.bindings.strands.readers import DICTIONARIES, known_provider, model_id, provider_of
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.core.internal_errors import report_suppressed, suppress_errors
from otel_limits.core.terms import (
    DEFAULT_TERMS,
    FIVE_MINUTES,
    PricingTerms,
    area_of,
    canonical,
    region_of,
    vendor_at,
    vendor_of,
)
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.fields import token_count
from otel_limits.usage.media import (
    Recipient,
    recipient,
    tokens_of_audio,
    tokens_of_document,
    tokens_of_image,
    tokens_of_video,
)
from otel_limits.usage.normaliser import record_of_usage
from otel_limits.usage.text import MESSAGE, as_json, tokens_of_text
from otel_limits.vendors.records import HIDDEN_REGION

# --- the model call -------------------------------------------------------------------------------

OUTPUT_CAPS: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "num_predict",
    "n_predict",
    "maxTokens",
    "maxOutputTokens",
)
"""Providers' names for the cap on output tokens: the last two are Bedrock's and Gemini's,
`num_predict` is Ollama's, `n_predict` llama.cpp's, and `max_new_tokens` that of containers on
SageMaker."""

NOT_SENT: Final = {"llamacpp": frozenset({"n_predict"})}
"""Settings that a class does not send: llama.cpp's server supports this one, but Strands' class
sends only listed settings (strands/models/llamacpp.py, `_format_request`)."""

CONFIGS: Final = ("config", "payload_config", "client_args")
"""Attributes of a model that hold its settings: the second is SageMaker's; LiteLLM's class sends
the third with every request."""

SETTINGS: Final = (
    "params",
    "options",
    "additional_args",
    "additional_request_fields",
    "extra_body",
    "generation_config",
    "inferenceConfig",
)
"""Nested settings that are sent to the provider unchanged."""

WRAPPED_DEPTH: Final = 3


def call_to(model: Any, content: object) -> InFlightCall:
    """Describe a model call by its content."""
    return _described(model, projected_input(model, content), content)


@suppress_errors("binding")
def call_by_context(context: Any, cache: ConversationTokens) -> InFlightCall:
    """Describe a call of the agent loop by the context of its stage.

    Unlike the request, the context contains the usage of earlier responses.
    """
    model, beside = context.model, (context.tool_specs, context.system_prompt)
    tokens = projected_input(model, context.messages, beside, cache)
    return _described(model, tokens, (context.messages, beside))


def _described(model: Any, tokens: int, content: object) -> InFlightCall:
    call = InFlightCall(model_id(model), tokens, provider_of(model.__class__), output_cap(model))
    call.terms = terms_of(model, content)
    return call


def redescribe(call: InFlightCall, model: Any, content: object) -> None:
    """Describe a call by the model that sends it; its ID only if the call has none."""
    if call.model == "unknown":
        call.model = model_id(model)
    call.provider = provider_of(model.__class__)
    call.terms = terms_of(model, content)


def output_cap(model: object) -> int | None:
    """Return the cap on output tokens in a model's settings, if any.

    If there are several, it is unknown which one the provider uses: the highest is safe.
    """
    dropped = NOT_SENT.get(provider_of(cast("type", type(model))), frozenset())
    names = [name for name in OUTPUT_CAPS if name not in dropped]
    highest = 0
    level: list[Any] = [getattr(model, name, None) for name in CONFIGS]
    for _ in range(WRAPPED_DEPTH):
        below: list[Any] = []
        for settings in level:
            if settings is None or not isinstance(settings, DICTIONARIES):
                continue
            for name in names:
                # 0, or Ollama's -1 and -2, is not a cap.
                if name in settings:
                    highest = max(highest, token_count(settings[name]) or 0)
            below += map(settings.get, SETTINGS)
        level = below
    return highest or None


# --- projected input ------------------------------------------------------------------------------

COPIED_DEPTH: Final = 10
"""Maximum nesting of contents; a tool result in a message is seven levels deep."""

CHUNK_MESSAGES: Final = 32
MAX_SEARCHES: Final = 8

IMMUTABLE: Final = (str, int, float, bytes, type(None))

Chunk: TypeAlias = "tuple[list[Any], int]"
"""Copies of consecutive messages, and their tokens."""


class ConversationTokens:
    """Estimated tokens of an agent's messages, each counted only once until it changes.

    Messages are compared with copies by value, so edits in place, replacements and trims are
    noticed. Comparing takes a thirtieth of the time of counting: copies share their texts.

    Args:
        chunk_messages: Most messages whose tokens are remembered together.
        max_searches: How many chunks are searched for further back before the rest counts as new.
    """

    def __init__(
        self, chunk_messages: int = CHUNK_MESSAGES, max_searches: int = MAX_SEARCHES
    ) -> None:
        """Create an empty cache."""
        self._chunk_messages = chunk_messages
        self._max_searches = max_searches
        self._cached: tuple[Recipient | None, list[Chunk]] = None, []

    def count(self, messages: list[Any], to: Recipient) -> int:
        """Return the tokens of `messages` for a model, and remember them."""
        found: list[Chunk] = []
        position, searches, total = 0, self._max_searches, 0
        # Read and assigned as a whole, as several threads may use an agent.
        counted_for, chunks = self._cached
        for chunk in chunks if to == counted_for else ():
            copies, tokens = chunk
            start = position
            if not _is_equal(messages, copies, start):
                if not searches:
                    break
                searches -= 1
                start = _index(messages, copies, position)
                if start < 0:
                    continue
            total += self._add(found, messages[position:start], to) + tokens
            found.append(chunk)
            position = start + len(copies)
        total += self._add(found, messages[position:], to)
        self._cached = to, found
        return total

    def _add(self, chunks: list[Chunk], messages: list[Any], to: Recipient) -> int:
        """Count new messages and append them to `chunks`; return their tokens."""
        total, most = 0, self._chunk_messages
        for start in range(0, len(messages), most):
            new = messages[start : start + most]
            total += (tokens := tokens_of_content(new, to))
            try:
                copies = _copy(new, COPIED_DEPTH)
            # Cannot be compared later, or too few frames are left: counted for each call.
            except (TypeError, RecursionError):
                continue
            if chunks and len(chunks[-1][0]) + len(copies) <= most:
                before, tokens_before = chunks[-1]
                chunks[-1] = ([*before, *copies], tokens_before + tokens)
            else:
                chunks.append((copies, tokens))
        return total


def _index(messages: list[Any], copies: list[Any], position: int) -> int:
    """Return where `copies` are found from `position` on, or -1."""
    try:
        start = messages.index(copies[0], position)
    except Exception:  # noqa: BLE001  not found, or messages hold what cannot be compared
        return -1
    return start if _is_equal(messages, copies, start) else -1


def _is_equal(messages: list[Any], copies: list[Any], start: int) -> bool:
    try:
        return messages[start : start + len(copies)] == copies
    except Exception:  # noqa: BLE001  such as an array of an application
        return False


def _copy(value: Any, depth: int) -> Any:
    """Copy containers but not what is in them.

    Raises:
        TypeError: It contains something else that may change, or is nested too deeply.
    """
    if isinstance(value, IMMUTABLE):
        return value
    if depth and type(value) is dict:
        return {key: _copy(each, depth - 1) for key, each in value.items()}
    if depth and type(value) is list:
        return [_copy(each, depth - 1) for each in value]
    raise TypeError(type(value))


def projected_input(
    model: object,
    messages: object,
    extra: Sequence[object] = (),
    cache: ConversationTokens | None = None,
) -> int:
    """Estimate the input tokens of a request: at least 1.

    Usage that the vendor reported for an earlier response covers everything before it, so only
    what came later is estimated.

    Args:
        model: The model that is called; images and documents count by its vendor's rules.
        messages: The conversation, or other content.
        extra: Other content of every request: tools, the system prompt.
        cache: Tokens of earlier messages of the same agent.
    """
    try:
        named = model_id(model)
        to = recipient(provider_of(cast("type", type(model))), named)
        known, later = _baseline(messages, to.provider, named)
        if known:
            return known + tokens_of_content(later, to)
        if cache is not None and isinstance(messages, list):
            tokens = cache.count(messages, to)
        else:
            tokens = tokens_of_content(messages, to)
        return max(1, tokens + tokens_of_content(extra, to))
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)
        return 1


def _baseline(messages: object, provider: str, model: str) -> tuple[int, object]:
    """Return the tokens up to the last response with known usage, and what came after it."""
    if not isinstance(messages, list):
        return 0, messages
    for number in range(len(messages) - 1, -1, -1):
        message = messages[number]
        metadata = message.get("metadata") if isinstance(message, dict) else None
        if metadata and message.get("role") == "assistant" and (usage := metadata.get("usage")):
            # Strands writes zeros for calls without usage; with them, all before would vanish.
            if isinstance(usage, dict) and not any(usage.values()):
                continue
            record = record_of_usage(usage, provider, model)
            if record.sure == "measured" and record.usage.input:
                return record.usage.total, messages[number + 1 :]
    return 0, messages


def tokens_of_content(content: object, to: Recipient) -> int:
    """Estimate the tokens of text, a content block, a message or a list of them."""
    tokens, texts = 0, []
    # No recursion: a runaway agent may be close to the recursion limit.
    left = [(content, COPIED_DEPTH)]
    while left:
        part, depth = left.pop()
        if depth == 0 or part is None:  # such as one that contains itself
            continue
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            tokens += MESSAGE if "role" in part else 0
            for kind, each in part.items():
                if (medium := MEDIA.get(kind)) is not None and isinstance(each, dict):
                    tokens += medium(each, to)
                elif kind in CONTAINERS:
                    left.append((each, depth - 1))
                elif kind not in PASSED_OVER:
                    texts.append(as_json(each))
        elif isinstance(part, (list, tuple)):
            left.extend((each, depth - 1) for each in part)
        else:
            texts.append(as_json(part))
    return tokens + tokens_of_text("\n".join(texts))


def _bytes_of(part: Mapping[str, Any]) -> bytes | None:
    source = part.get("source")
    data = source.get("bytes") if isinstance(source, dict) else None
    return bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else None


def _document(part: Mapping[str, Any], to: Recipient) -> int:
    citations = part.get("citations")
    is_cited = isinstance(citations, dict) and citations.get("enabled") is True
    kind = str(part.get("format", ""))
    return tokens_of_document(_bytes_of(part), kind, to, cited=is_cited)


MEDIA: Final[Mapping[str, Callable[[Mapping[str, Any], Recipient], int]]] = {
    "audio": lambda part, to: tokens_of_audio(_bytes_of(part), to),
    "document": _document,
    "image": lambda part, to: tokens_of_image(_bytes_of(part), to),
    "video": lambda part, to: tokens_of_video(_bytes_of(part), to),
}
"""Counts tokens of binary content, by block type."""

CONTAINERS: Final = frozenset(
    {
        "content",
        "messages",
        "prompt",
        "system_prompt",
        "system_prompt_content",
        "tool_specs",
        "citationsContent",
        "guardContent",
        "reasoningContent",
        "reasoningText",
        "text",
        "toolResult",
    }
)
PASSED_OVER: Final = frozenset(
    {
        "cachePoint",
        "metadata",
        "redactedContent",
        "role",
        "signature",
        "status",
        "toolUseId",
        "tracking_id",  # Strands' own, of each message
    }
)
"""Fields that are not sent to models, or are free."""


# --- pricing terms --------------------------------------------------------------------------------

CACHED: Final = ("cache_config", "cache_tools")
CACHE_TTLS: Final = ("tools_ttl", "system_prompt_ttl")
WITHOUT_POINTS: Final = ("openai", "openai_responses", "azure", "gemini", "mistral")
"""Providers to which Strands and LiteLLM send no cache points and no TTL: `_openai_cache.py` of
Strands."""
ADDRESSES: Final = ("base_url", "api_base", "azure_endpoint", "server_url", "host")
"""Arguments of clients with the address."""
MOVABLE: Final = frozenset(
    {"anthropic", "litellm", "mistral", "ollama", "openai", "openai_responses"}
)
"""Model classes that are also used with other vendors than their namesake."""

BY_VARIABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "openai": ("OPENAI_BASE_URL",),
    "openai_responses": ("OPENAI_BASE_URL",),
    "litellm": ("OPENAI_BASE_URL", "OPENAI_API_BASE"),
}
"""Variables with OpenAI's address, read by clients by default: openai, _client.py; litellm,
main.py."""


def terms_of(model: Any, content: object = ()) -> PricingTerms:
    """Return the pricing terms of a request, from its model's settings and its content."""
    try:
        # LiteLLM's class sends its client's arguments with every request.
        held = [getattr(model, name, None) for name in ("config", "client_args")]
        settings = tuple(settings_in(held, _names()))
        blocks = _blocks(content)
        kinds = set[str]().union(*blocks)
        points = blocks if "cachePoint" in kinds else ()
        addresses = _addresses(model)
        is_known = known_provider(model.__class__) is not None
        return PricedRequest(
            model=model_id(model),
            provider=provider_of(model.__class__),
            own_class=None if is_known else model.__class__.__qualname__,
            vendor=next(filter(None, map(vendor_at, addresses)), None),
            region=request_region(model, settings, addresses),
            settings=settings,
            cache_ttls=frozenset(_ttls(model, settings, points)),
            audio_in="audio" in kinds,
        ).terms
    except Exception as error:  # noqa: BLE001  a model may be anything
        report_suppressed("binding", error)
        return DEFAULT_TERMS


@functools.cache
def _names() -> frozenset[str]:
    """Return the settings to look for."""
    return setting_names().read | {*CACHED, *CACHE_TTLS}


def _blocks(content: object) -> list[Mapping[str, Any]]:
    """Return the content blocks of a request."""
    blocks: list[Mapping[str, Any]] = []
    # Level by level, and without a function call per part, for speed: the whole conversation is
    # scanned for each model call, as cache points and audio in old messages are sent again.
    level = [content]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for part in level:
            if type(part) is dict or isinstance(part, DICTIONARIES):
                if "content" in part and isinstance(held := part["content"], list):
                    below += held
                else:
                    blocks.append(part)
            elif isinstance(part, (list, tuple)):
                below += part
        level = below
    return blocks


def _ttls(
    model: Any, settings: Iterable[ModelSetting], blocks: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the TTL of each part that Strands caches."""
    provider = provider_of(model.__class__)
    if provider in WITHOUT_POINTS or vendor_of(model_id(model), provider) in WITHOUT_POINTS:
        return
    config = getattr(model, "config", None)
    cache = config.get("cache_config") if isinstance(config, Mapping) else None
    usual = getattr(cache, "ttl", None) or FIVE_MINUTES
    for block in blocks:
        if isinstance(point := block.get("cachePoint"), Mapping):
            yield str(point.get("ttl") or usual)
    for name, value in settings:
        if name in CACHED and value:
            yield str(getattr(value, "ttl", None) or usual)
        elif name in CACHE_TTLS and isinstance(value, str):
            yield value


def _addresses(model: Any) -> list[str]:
    """Return a client's addresses, if its class may be used with any vendor."""
    provider = known_provider(model.__class__)
    if provider is not None and provider not in MOVABLE:
        return []
    client = getattr(model, "client", None) or custom_client(model)
    held = (getattr(model, "client_args", None), getattr(model, "config", None))
    told = [each.get(name) for each in held if isinstance(each, Mapping) for name in ADDRESSES]
    told += [getattr(model, "host", None), getattr(client, "base_url", None), bedrock_url(model)]
    if provider is not None and provider in BY_VARIABLE and client is None and not any(told):
        is_openai = vendor_of(model_id(model), canonical(provider)) == "openai"
        told += [variable(*BY_VARIABLE[provider])] if is_openai else []
    return [str(each) for each in told if each]


# --- region ---------------------------------------------------------------------------------------

LITELLM_VERTEX: Final = "us-central1"
"""LiteLLM's default for Google: litellm, llms/vertex_ai/vertex_llm_base.py,
`get_vertex_region`. https://docs.litellm.ai/docs/providers/vertex."""
YES: Final = ("true", "1")


def request_region(
    model: Any, settings: Iterable[ModelSetting], addresses: Sequence[str]
) -> str | None:
    """Return the region of a request, or `None` if it is global.

    Args:
        model: The model that is called.
        settings: Its settings.
        addresses: The addresses that its client is configured with.
    """
    regions = setting_names().regions
    return region_of(
        model_id(model),
        addresses,
        set_as=_texts(*(value for name, value in settings if name in regions)),
        of_client=_texts(*_defaults(model, addresses)),
    )


def _defaults(model: Any, addresses: Sequence[str]) -> Iterator[object]:
    """Yield the regions that a client uses unless a request says otherwise."""
    provider = provider_of(model.__class__)
    if provider == "bedrock":
        meta = getattr(getattr(model, "client", None), "meta", None)
        yield getattr(meta, "region_name", None)
    elif provider == "gemini":
        yield _google(model)
    elif provider == "litellm" and not addresses:
        yield from _litellm(model_id(model))


def _google(model: Any) -> str | None:
    """Return the region of google-genai: its `_api_client.py`, BaseApiClient.

    Google's own API has no regions. Vertex AI is global by default.
    """
    if (client := custom_client(model)) is not None:
        return HIDDEN_REGION if getattr(client, "vertexai", False) else None
    held = getattr(model, "client_args", None)
    told = held if isinstance(held, Mapping) else {}
    is_vertex = told.get("enterprise", told.get("vertexai"))
    if is_vertex is None:
        by_variable = variable("GOOGLE_GENAI_USE_ENTERPRISE", "GOOGLE_GENAI_USE_VERTEXAI")
        is_vertex = (by_variable or "").lower() in YES
    # An explicit key takes precedence over a location from a variable.
    is_by_key = told.get("api_key") and not told.get("project")
    return variable("GOOGLE_CLOUD_LOCATION") if is_vertex and not is_by_key else None


def _litellm(name: str) -> Iterator[str | None]:
    """Yield LiteLLM's regions for Google and Amazon, by model ID.

    litellm, main.py, `vertex_ai_location`; llms/bedrock/base_aws_llm.py, `_get_aws_region_name`.
    """
    seller = canonical(name.partition("/")[0])
    if seller == "google" and name.startswith("vertex_ai"):
        yield getattr(sys.modules.get("litellm"), "vertex_location", None)
        yield variable("VERTEXAI_LOCATION")
        yield LITELLM_VERTEX
    elif seller == "aws":
        yield variable("AWS_REGION_NAME", "AWS_REGION", "AWS_DEFAULT_REGION")
        # Otherwise it is from a profile in a file, which we do not read.
        yield area_of(name) or HIDDEN_REGION


def variable(*names: str) -> str | None:
    """Return the first of some environment variables that is set, as vendors' clients do."""
    host = STRANDS.host
    return None if host is None else next(filter(None, map(host.variable, names)), None)


def _texts(*found: object) -> Iterator[str]:
    return (each for each in found if isinstance(each, str) and each)
