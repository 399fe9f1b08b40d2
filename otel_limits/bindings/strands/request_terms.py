"""Reads the pricing terms of a request from the settings of its model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.strands.private import bedrock_url, custom_client
from otel_limits.bindings.strands.readers import DICTIONARIES, known_provider, model_id, provider_of
from otel_limits.bindings.strands.request_regions import REGIONS, ModelSetting, region_of, variable
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.listings import canonical, vendor_at, vendor_of
from otel_limits.core.terms import (
    DEFAULT_TERMS,
    FIVE_MINUTES,
    STANDARD,
    PricingTerms,
    named_tier,
)
from otel_limits.vendors.records import BY_NAME

if TYPE_CHECKING:
    from otel_limits.vendors.vendor import Vendor

MAX_DEPTH: Final = 5
"""Maximum nesting of settings; a tool's settings are three levels deep."""

TIERS: Final = (
    "service_tier",  # OpenAI, Anthropic, Mistral, Groq
    "serviceTier",  # Bedrock: {"type": "priority"}
    "latency",  # Bedrock: performanceConfig {"latency": "optimized"}
    "speed",  # Anthropic: "fast"
)
SAME_TIERS: Final = {("service_tier", "fast"): "priority"}
"""Aliases of OpenAI's tiers: "The response will show service_tier=priority regardless",
https://platform.openai.com/docs/api-reference/responses/create. Anthropic's `speed` is a separate
tier."""

GOOGLE_SEARCHES: Final = (
    "google_search",
    "google_search_retrieval",
    "google_maps",
    "enterprise_web_search",
    "exa_ai_search",
    "parallel_ai_search",
    "retrieval",  # of Vertex AI Search
)
"""Fields of google-genai's `Tool` that are billed per prompt or per search:
https://ai.google.dev/gemini-api/docs/pricing, https://cloud.google.com/vertex-ai/generative-ai/pricing."""
SEARCHES: Final = (
    "web_search_options",  # OpenAI Chat, Perplexity
    "search_parameters",  # xAI
    "enable_search",  # https://www.alibabacloud.com/help/en/model-studio/web-search
    *GOOGLE_SEARCHES,
    *(re.sub("_(.)", lambda found: found[1].upper(), name) for name in GOOGLE_SEARCHES),
)
"""Settings that enable a vendor's search; LiteLLM writes Google's in camel case."""
SEARCH_TYPES: Final = (
    "web_search",  # OpenAI's Responses API; Anthropic, with a date; OpenRouter, after its name
    "x_search",  # https://docs.x.ai/developers/pricing
    "builtin_function",  # Kimi's `$web_search`: https://platform.kimi.com/docs/pricing/tools
)
"""Substrings of the type of a search tool."""
PLUGINS: Final = "plugins"
WEB_PLUGIN: Final = {"id": "web"}
"""OpenRouter's search: https://openrouter.ai/docs/features/web-search."""
SYSTEM_TOOL: Final = "systemTool"
NOVA_SEARCH: Final = {"name": "nova_grounding"}
"""Bedrock's: https://docs.aws.amazon.com/nova/latest/userguide/grounding.html."""

MODALITIES: Final = ("modalities", "response_modalities", "responseModalities")

CACHED: Final = ("cache_config", "cache_tools")
CACHE_TTLS: Final = ("tools_ttl", "system_prompt_ttl")
CACHE_CONTROL: Final = "cache_control"
"""Anthropic's own."""
WITHOUT_POINTS: Final = ("openai", "openai_responses", "azure", "gemini", "mistral")
"""Providers to which Strands and LiteLLM send no cache points and no TTL: `_openai_cache.py` of
Strands."""
TYPE: Final = "type"
"""Key of a tool's type, among others."""
TOOL_LISTS: Final = ("tools", "gemini_tools")
"""Settings with tools."""
DATE: Final = re.compile(r"[_-](\d{8}|\d{4}[_-]\d\d[_-]\d\d)$")
"""End of a tool's type, as in `web_fetch_20250910`."""
CLIENT_TOOLS: Final = frozenset(
    {"function", "custom", "bash", "memory", "text_editor", "computer", "computer_use"}
    | {"computer_use_preview", "local_shell", "apply_patch", "input_schema", "tool_spec"}
    | {"cache_point", "function_declarations"}
)
"""Tools that the application runs, by type without date, or by key if they have no type."""
EDITING: Final = "context_management"
FREE_EDITS: Final = frozenset({"clear_thinking", "clear_tool_uses"})
"""Anthropic's edits that call no model. The tokens of a summary (`compact`) are only in
`usage.iterations`: https://platform.claude.com/docs/en/build-with-claude/compaction-threshold."""

READ: Final = frozenset(
    {*TIERS, *REGIONS, *SEARCHES, PLUGINS, SYSTEM_TOOL, *MODALITIES}
    | {*CACHED, *CACHE_TTLS, CACHE_CONTROL, TYPE, *TOOL_LISTS, EDITING}
)
"""Settings that affect the price. Few models have any, but each call checks them all."""

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

RECORDS: Final = ("__dataclass_fields__", "model_fields")
"""Attributes of record classes, such as CacheConfig and the tools of google-genai."""

LEAVES: Final = (str, int, float, type(None))
"""Types of most settings, which contain no others."""


def terms_of(model: Any, content: object = ()) -> PricingTerms:
    """Return the pricing terms of a request, from its model's settings and its content.

    Missing settings mean the vendor's default.
    """
    try:
        # LiteLLM's class sends its client's arguments with every request.
        held = [getattr(model, name, None) for name in ("config", "client_args")]
        settings = tuple(_settings(held, MAX_DEPTH + 1))
        blocks = _blocks(content)
        kinds = set[str]().union(*blocks)
        points = blocks if "cachePoint" in kinds else ()
        addresses = _addresses(model)
        at_address = next(filter(None, map(vendor_at, addresses)), None)
        provider = canonical(provider_of(model.__class__))
        is_known = at_address is not None or known_provider(model.__class__) is not None
        vendor = BY_NAME.get(at_address or vendor_of(model_id(model), provider))
        return PricingTerms(
            vendor=at_address,
            own_class=None if is_known else model.__class__.__qualname__,
            tier=_tier(settings),
            region=region_of(model, settings, addresses),
            cache_ttls=frozenset(_ttls(model, settings, points)) or DEFAULT_TERMS.cache_ttls,
            audio_in="audio" in kinds,
            audio_out=any(_has_audio(setting) for setting in settings),
            searches=any(_is_search(setting) for setting in settings),
            server_tools=frozenset(_server_tools(settings, vendor)),
        )
    except Exception as error:  # noqa: BLE001  a model may be anything
        report_suppressed("binding", error)
        return DEFAULT_TERMS


def _settings(held: Any, depth: int) -> Iterator[ModelSetting]:
    """Yield every setting in `READ`, at any depth."""
    if depth == 0:
        return
    if isinstance(held, Mapping):
        for name, value in held.items():
            if name in READ:
                yield ModelSetting(name, value)
            if not isinstance(value, LEAVES):
                yield from _settings(value, depth - 1)
    elif isinstance(held, (list, tuple)):
        for each in held:
            yield from _settings(each, depth - 1)
    elif any(hasattr(type(held), mark) for mark in RECORDS):
        yield from _settings(vars(held), depth - 1)


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


def _tier(settings: Iterable[ModelSetting]) -> str:
    """Return the first tier that is not the standard tier."""
    for name, value in settings:
        held = value.get("type") if isinstance(value, Mapping) else value
        if name in TIERS and isinstance(held, str):
            tier = SAME_TIERS.get((name, held), named_tier(held))
            if tier != STANDARD:
                return tier
    return STANDARD


def _ttls(
    model: Any, settings: Iterable[ModelSetting], blocks: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the TTL of each cached part."""
    for name, value in settings:
        if name == CACHE_CONTROL and isinstance(value, Mapping):
            yield str(value.get("ttl") or FIVE_MINUTES)
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


def _has_audio(setting: ModelSetting) -> bool:
    listed = setting.value if isinstance(setting.value, (list, tuple)) else ()
    return setting.name in MODALITIES and any("audio" in str(each).lower() for each in listed)


def _is_search(setting: ModelSetting) -> bool:
    name, value = setting
    if name == TYPE:
        return isinstance(value, str) and any(each in value for each in SEARCH_TYPES)
    if name == PLUGINS:
        return isinstance(value, (list, tuple)) and any(_has(each, WEB_PLUGIN) for each in value)
    if name == SYSTEM_TOOL:
        return _has(value, NOVA_SEARCH)
    return name in SEARCHES and value is not None and value is not False


def _server_tools(settings: Iterable[ModelSetting], vendor: Vendor | None) -> Iterator[str]:
    """Yield the tools that a vendor runs at an unreported cost; searches have their own count."""
    free = CLIENT_TOOLS if vendor is None else CLIENT_TOOLS | vendor.token_tools
    for name, value in settings:
        listed = value if isinstance(value, (list, tuple)) else ()
        if name in TOOL_LISTS:
            kinds = [_kinds_of(each) for each in listed]
            # A tool without a type is known by its keys: one that is free is enough, as in
            # Anthropic's tools with a name, a description and an `input_schema`.
            yield from (tool for tools in kinds if free.isdisjoint(tools) for tool in tools)
        elif name == EDITING and isinstance(value, Mapping):
            edits = value.get("edits")
            kinds = [_kinds_of(each) for each in edits] if isinstance(edits, (list, tuple)) else []
            yield from (edit for edit in chain(*kinds) if edit not in FREE_EDITS)
        elif name == PLUGINS:
            ids = (each.get("id") for each in listed if isinstance(each, Mapping))
            yield from (str(each) for each in ids if each not in (None, "web", *free))


def _kinds_of(tool: object) -> list[str]:
    """Return the type of a tool, or its keys if it has no type; nothing for a search."""
    held = vars(tool) if any(hasattr(type(tool), mark) for mark in RECORDS) else tool
    if not isinstance(held, Mapping):
        return []  # a Python function
    said, system, environment = (held.get(name) for name in (TYPE, SYSTEM_TOOL, "environment"))
    if said == "shell" and isinstance(environment, Mapping) and environment.get(TYPE) == "local":
        return []
    if isinstance(system, Mapping):
        said = system.get("name")
    keys = [str(key) for key, each in held.items() if each is not None]
    kinds = [said] if isinstance(said, str) else keys
    named = (DATE.sub("", re.sub("(?<=[a-z])([A-Z])", r"_\1", each).lower()) for each in kinds)
    return [each for each in named if not _is_search_tool(each)]


def _is_search_tool(kind: str) -> bool:
    is_named = kind in (*GOOGLE_SEARCHES, NOVA_SEARCH["name"])
    return is_named or any(each in kind for each in SEARCH_TYPES)


def _has(value: object, wanted: Mapping[str, str]) -> bool:
    """Return whether a setting contains the wanted items."""
    return isinstance(value, Mapping) and wanted.items() <= value.items()


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
