"""Reads the settings of a request that affect its price, in any framework."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.core.listings import canonical, vendor_of
from otel_limits.core.terms import (
    DEFAULT_TERMS,
    FIVE_MINUTES,
    STANDARD,
    PricingTerms,
    named_tier,
)
from otel_limits.vendors.records import vendors

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

CACHE_CONTROL: Final = "cache_control"
"""Anthropic's own."""
TYPE: Final = "type"
"""Key of a tool's type, among others."""
TOOL_LISTS: Final = ("tools", "anthropic_tools", "gemini_tools")
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

REGIONS: Final = (
    "inference_geo",  # Anthropic
    "vertex_location",  # LiteLLM
    "vertex_ai_location",
    "aws_region_name",
    "location",  # google-genai
)

READ: Final = frozenset(
    {*TIERS, *REGIONS, *SEARCHES, PLUGINS, SYSTEM_TOOL, *MODALITIES}
    | {CACHE_CONTROL, TYPE, *TOOL_LISTS, EDITING}
)
"""Settings that affect the price. Few models have any, but each call checks them all."""

RECORDS: Final = ("__dataclass_fields__", "model_fields")
"""Attributes of record classes, such as CacheConfig and the tools of google-genai."""

LEAVES: Final = (str, int, float, type(None))
"""Types of most settings, which contain no others."""


class ModelSetting(NamedTuple):
    """A setting of a model, at any depth."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRequest:
    """A request, as the reader of a framework describes it."""

    model: str
    """The model's ID."""
    provider: str
    own_class: str | None = None
    """The application's own model class, whose provider is unknown."""
    vendor: str | None = None
    """The vendor, if the address identifies it."""
    region: str | None = None
    settings: tuple[ModelSetting, ...] = ()
    cache_ttls: frozenset[str] = frozenset()
    """Lifetimes of cache writes that the content requests; settings may request others."""
    audio_in: bool = False

    @property
    def terms(self) -> PricingTerms:
        """The pricing terms; missing settings mean the vendor's default."""
        settings = self.settings
        vendor = self.vendor or vendor_of(self.model, canonical(self.provider))
        ttls = self.cache_ttls | frozenset(_controlled(settings))
        return PricingTerms(
            vendor=self.vendor,
            own_class=self.own_class if self.vendor is None else None,
            tier=_tier(settings),
            region=self.region,
            cache_ttls=ttls or DEFAULT_TERMS.cache_ttls,
            audio_in=self.audio_in,
            audio_out=any(_has_audio(setting) for setting in settings),
            searches=any(_is_search(setting) for setting in settings),
            server_tools=frozenset(_server_tools(settings, vendors().get(vendor))),
        )


def settings_in(
    held: Any, names: frozenset[str] = READ, depth: int = MAX_DEPTH + 1
) -> Iterator[ModelSetting]:
    """Yield every setting with one of some names, at any depth."""
    if depth == 0:
        return
    if isinstance(held, Mapping):
        for name, value in held.items():
            if name in names:
                yield ModelSetting(name, value)
            if not isinstance(value, LEAVES):
                yield from settings_in(value, names, depth - 1)
    elif isinstance(held, (list, tuple)):
        for each in held:
            yield from settings_in(each, names, depth - 1)
    elif any(hasattr(type(held), mark) for mark in RECORDS):
        yield from settings_in(vars(held), names, depth - 1)


def _controlled(settings: Iterable[ModelSetting]) -> Iterator[str]:
    """Yield the lifetimes in Anthropic's cache controls."""
    for name, value in settings:
        if name == CACHE_CONTROL and isinstance(value, Mapping):
            yield str(value.get("ttl") or FIVE_MINUTES)


def _tier(settings: Iterable[ModelSetting]) -> str:
    """Return the first tier that is not the standard tier."""
    for name, value in settings:
        held = value.get("type") if isinstance(value, Mapping) else value
        if name in TIERS and isinstance(held, str):
            tier = SAME_TIERS.get((name, held), named_tier(held))
            if tier != STANDARD:
                return tier
    return STANDARD


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
