"""Reads the pricing terms of a request from the settings of its model."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool

from otel_limits.bindings.langchain.model_classes import is_known, model_id, provider_of
from otel_limits.bindings.request_settings import (
    CACHE_CONTROL,
    PricedRequest,
    setting_names,
    settings_in,
)
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.terms import DEFAULT_TERMS, FIVE_MINUTES, PricingTerms, region_of, vendor_at
from otel_limits.vendors.records import HIDDEN_REGION

if TYPE_CHECKING:
    from otel_limits.bindings.request_settings import ModelSetting

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
