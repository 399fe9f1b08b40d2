"""The vendor of a model call, and its name for the model, from model ID and provider."""

from __future__ import annotations

import functools
import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from otel_limits.vendors.records import LOCAL, canonical_names, gateways, unlisted, vendors

BEDROCK: Final = re.compile(
    r"([a-z-]+\.)?(ai21|amazon|anthropic|cohere|deepseek|google|luma|meta|minimax|mistral"
    r"|moonshotai?|nvidia|openai|qwen|stability|twelvelabs|writer|xai|zai)\.[a-z]"
)
"""Model IDs of Amazon Bedrock, including inference profiles such as `us.` and `global.`."""

BEDROCK_ARN: Final = re.compile(
    r"arn:aws[a-z-]*:bedrock:[^:]*:[^:]*:(?:inference-profile|foundation-model)/(.+)"
)
"""An application's own profile (`application-inference-profile/…`) does not contain its model."""
ARN: Final = "arn:"

RESOURCE: Final = re.compile(r"(?:projects|publishers|models|tunedModels)/(?:.*/)?([^/]+)")
"""Google's resource names: `models/gemini-…`, `publishers/google/models/…`, `projects/…`:
https://ai.google.dev/api/models, https://google.aip.dev/122."""

OFFLOADED: Final = "cloud"
"""End of the tags of Ollama's cloud models, such as `:120b-cloud`: https://docs.ollama.com/cloud."""

ADDRESSES: Final = 64
"""Cached addresses."""


class ModelListing(NamedTuple):
    """A model on the price list; without a vendor, any that has this name."""

    vendor: str | None
    reference: str


@functools.lru_cache(ADDRESSES)
def vendor_at(address: str) -> str | None:
    """Return the vendor at an address, if it identifies one."""
    # Without slashes, `urlsplit` parses a host as a path, and Ollama's clients accept a bare one.
    host = urlsplit(address if "//" in address else f"//{address}").hostname or ""
    every = vendors().values()
    return next((each.name for each in every if each.hosts and each.hosts.fullmatch(host)), None)


def canonical(provider: str) -> str:
    """Return a vendor's name on the price list, from any of its names."""
    # In its own case first: model classes, such as MLXModel, contain capitals.
    names = canonical_names()
    return names.get(provider, names.get(provider.lower(), provider))


def vendor_of(model: str, provider: str) -> str:
    """Return the vendor; for a gateway, from the prefix of the model ID.

    Args:
        model: The ID as sent.
        provider: The provider, by its canonical name.
    """
    prefix, slash, _ = model.partition("/")
    # Only for a gateway: elsewhere a slash is part of the name, as in `meta-llama/Llama-3`.
    return canonical(prefix) if slash and provider in gateways() else provider


def vendor_by_id(model: str) -> str | None:
    """Return the only vendor with such model IDs; `None` if there may be several.

    A framework's spans may contain the framework's name instead of the vendor's.
    """
    if BEDROCK.match(model) or (model.startswith(ARN) and ":bedrock:" in model):
        return "aws"
    return "google" if RESOURCE.fullmatch(model) else None


def is_local(model: str, provider: str) -> bool:
    """Return whether a model runs locally, so that its tokens are free.

    Args:
        model: The ID as sent.
        provider: The provider, by its canonical name.
    """
    is_offloaded = model.rpartition(":")[2].endswith(OFFLOADED)
    return LOCAL in (provider, vendor_of(model, provider)) and not is_offloaded


def listing_of(model: str, provider: str, *, known: bool) -> ModelListing | None:
    """Return where to look up the price of a model.

    Args:
        model: The ID as sent.
        provider: The provider, by its canonical name.
        known: `provider` is on the price list.

    Returns:
        Vendor and name of the model; `None` if no list can contain it.
    """
    # Names that belong to one vendor take precedence, because gateways pass them on unchanged.
    if found := BEDROCK_ARN.fullmatch(model):
        listing = ModelListing("aws", found[1])
    elif found := RESOURCE.fullmatch(model):
        listing = ModelListing("google", found[1])
    # The name of a gateway does not identify the vendor.
    elif known and provider not in gateways():
        prefix, slash, rest = model.partition("/")
        own = rest if slash and canonical(prefix) == provider else model
        listing = ModelListing(provider, _bare_id(own, provider))
    else:
        listing = _by_name(model, provider if known and provider != "litellm" else None)
    # An operator's alias or private endpoint is on no list.
    is_listed = unlisted().isdisjoint((provider, listing.vendor))
    return listing if is_listed and not listing.reference.startswith(ARN) else None


def _by_name(model: str, vendor: str | None) -> ModelListing:
    """Return the vendor of a model by its name; `vendor` is that of a bare name."""
    prefix, slash, rest = model.partition("/")
    # Before the slash: IDs such as `us.anthropic.claude…` are Bedrock's, through any gateway.
    if BEDROCK.match(model):
        return ModelListing("aws", model)
    # OpenAI's fine-tuned models, before the rule for colons below treats it as a tag.
    if model.startswith("ft:"):
        return ModelListing("openai", model)
    if slash:
        named = canonical(prefix)
        return ModelListing(named, _bare_id(rest, named))
    # A tag, as in `deepseek-r1:8b`, means a local server.
    return ModelListing(LOCAL if ":" in model and not model.startswith(ARN) else vendor, model)


def _bare_id(reference: str, vendor: str) -> str:
    """Remove LiteLLM's infix between vendor and model, such as `converse/` or a region."""
    if vendor == "aws":
        return reference.rpartition("/")[2]
    found = RESOURCE.fullmatch(reference)
    return found[1] if found and vendor == "google" else reference
