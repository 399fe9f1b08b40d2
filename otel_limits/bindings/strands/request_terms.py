"""Reads the pricing terms of a request from the settings of its model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from otel_limits.bindings.request_settings import (
    MAX_DEPTH,
    ModelSetting,
    PricedRequest,
    setting_names,
    settings_in,
)
from otel_limits.bindings.strands.private import bedrock_url, custom_client
from otel_limits.bindings.strands.readers import DICTIONARIES, known_provider, model_id, provider_of
from otel_limits.bindings.strands.request_regions import request_region, variable
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.terms import (
    DEFAULT_TERMS,
    FIVE_MINUTES,
    PricingTerms,
    canonical,
    vendor_at,
    vendor_of,
)

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
