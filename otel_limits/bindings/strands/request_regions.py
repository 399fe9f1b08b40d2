"""Determines the region of a request from settings, client, address or variables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from otel_limits.bindings.request_settings import ModelSetting, setting_names
from otel_limits.bindings.strands.private import custom_client
from otel_limits.bindings.strands.readers import model_id, provider_of
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.core.terms import area_of, canonical, region_of
from otel_limits.vendors.records import HIDDEN_REGION

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
