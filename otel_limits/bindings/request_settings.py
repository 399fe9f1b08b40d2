"""Reads the settings of a request that affect its price, in any framework."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.core.terms import (
    DEFAULT_TERMS,
    FIVE_MINUTES,
    STANDARD,
    PricingTerms,
    canonical,
    named_tier,
    vendor_of,
)
from otel_limits.vendors.facts import facts
from otel_limits.vendors.records import vendors

if TYPE_CHECKING:
    from otel_limits.vendors.records import Vendor

MAX_DEPTH: Final = 5
"""Maximum nesting of settings; a tool's settings are three levels deep."""

SAME_TIERS: Final = {("service_tier", "fast"): "priority"}
"""Aliases of OpenAI's tiers: "The response will show service_tier=priority regardless",
https://platform.openai.com/docs/api-reference/responses/create. Anthropic's `speed` is a separate
tier."""

PLUGINS: Final = "plugins"
WEB_PLUGIN: Final = {"id": "web"}
"""OpenRouter's search: https://openrouter.ai/docs/features/web-search."""
SYSTEM_TOOL: Final = "systemTool"
NOVA_SEARCH: Final = {"name": "nova_grounding"}
"""Bedrock's: https://docs.aws.amazon.com/nova/latest/userguide/grounding.html."""

CACHE_CONTROL: Final = "cache_control"
"""Anthropic's own."""
TYPE: Final = "type"
"""Key of a tool's type, among others."""
DATE: Final = re.compile(r"[_-](\d{8}|\d{4}[_-]\d\d[_-]\d\d)$")
"""End of a tool's type, as in `web_fetch_20250910`."""
EDITING: Final = "context_management"
"""Anthropic's changes of the context."""

RECORDS: Final = ("__dataclass_fields__", "model_fields")
"""Attributes of record classes, such as CacheConfig and the tools of google-genai."""

LEAVES: Final = (str, int, float, type(None))
"""Types of most settings, which contain no others."""


class SettingNames(NamedTuple):
    """The contents of `request_settings.yaml`."""

    tiers: frozenset[str]
    regions: frozenset[str]
    modalities: frozenset[str]
    searches: frozenset[str]
    """Settings that enable a vendor's search."""
    google_searches: frozenset[str]
    """Those of them that are tools without a type."""
    search_types: frozenset[str]
    """Parts of the type of a search tool."""
    tool_lists: frozenset[str]
    """Settings with tools."""
    client_tools: frozenset[str]
    """Tools that the application runs, by type without date, or by key if they have no type."""
    free_edits: frozenset[str]
    """Edits of the context that call no model."""
    read: frozenset[str]
    """Settings that affect the price. Few models have any, but each call checks them all."""


@functools.cache
def setting_names() -> SettingNames:
    """Return the names of settings that affect the price."""
    told = facts("bindings/request_settings.yaml")
    known = {part: frozenset(names) for part, names in told.items()}
    google = known["google_searches"]
    in_camel_case = {re.sub("_(.)", lambda found: found[1].upper(), name) for name in google}
    known["searches"] |= google | in_camel_case
    settings = ("tiers", "regions", "modalities", "searches", "tool_lists")
    own = frozenset({PLUGINS, SYSTEM_TOOL, CACHE_CONTROL, TYPE, EDITING})
    return SettingNames(**known, read=own.union(*(known[part] for part in settings)))


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
    held: Any, names: frozenset[str] | None = None, depth: int = MAX_DEPTH + 1
) -> Iterator[ModelSetting]:
    """Yield every setting with one of some names, or one that affects the price, at any depth."""
    if depth == 0:
        return
    names = setting_names().read if names is None else names
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
        if name in setting_names().tiers and isinstance(held, str):
            tier = SAME_TIERS.get((name, held), named_tier(held))
            if tier != STANDARD:
                return tier
    return STANDARD


def _has_audio(setting: ModelSetting) -> bool:
    if setting.name not in setting_names().modalities:
        return False
    listed = setting.value if isinstance(setting.value, (list, tuple)) else ()
    return any("audio" in str(each).lower() for each in listed)


def _is_search(setting: ModelSetting) -> bool:
    name, value = setting
    names = setting_names()
    if name == TYPE:
        return isinstance(value, str) and any(each in value for each in names.search_types)
    if name == PLUGINS:
        return isinstance(value, (list, tuple)) and any(_has(each, WEB_PLUGIN) for each in value)
    if name == SYSTEM_TOOL:
        return _has(value, NOVA_SEARCH)
    return name in names.searches and value is not None and value is not False


def _server_tools(settings: Iterable[ModelSetting], vendor: Vendor | None) -> Iterator[str]:
    """Yield the tools that a vendor runs at an unreported cost; searches have their own count."""
    names = setting_names()
    free = names.client_tools if vendor is None else names.client_tools | vendor.token_tools
    for name, value in settings:
        listed = value if isinstance(value, (list, tuple)) else ()
        if name in names.tool_lists:
            kinds = [_kinds_of(each) for each in listed]
            # A tool without a type is known by its keys: one that is free is enough, as in
            # Anthropic's tools with a name, a description and an `input_schema`.
            yield from (tool for tools in kinds if free.isdisjoint(tools) for tool in tools)
        elif name == EDITING and isinstance(value, Mapping):
            edits = value.get("edits")
            kinds = [_kinds_of(each) for each in edits] if isinstance(edits, (list, tuple)) else []
            yield from (edit for edit in chain(*kinds) if edit not in names.free_edits)
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
    names = setting_names()
    is_named = kind in names.google_searches or kind == NOVA_SEARCH["name"]
    return is_named or any(each in kind for each in names.search_types)


def _has(value: object, wanted: Mapping[str, str]) -> bool:
    """Return whether a setting contains the wanted items."""
    return isinstance(value, Mapping) and wanted.items() <= value.items()
