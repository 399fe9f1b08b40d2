"""The vendor of a model call, and its name for the model, from model ID and provider."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

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

LOCAL: Final = "local"
"""The vendor of models that run on the user's own machines."""

OFFLOADED: Final = "cloud"
"""End of the tags of Ollama's cloud models, such as `:120b-cloud`: https://docs.ollama.com/cloud."""

VENDORS: Final[Mapping[str, str]] = {
    # in the conventions, and before version 1.37
    "aws.bedrock": "aws",
    "aws_bedrock": "aws",
    "az.ai.inference": "azure",
    "az.ai.openai": "azure",
    "azure.ai.inference": "azure",
    "azure.ai.openai": "azure",
    "gcp.gemini": "google",
    "gcp.gen_ai": "google",
    "gcp.vertex_ai": "google",
    "gcp.vertex.agent": "google",
    "ibm.watsonx.ai": "watsonx",
    "mistral_ai": "mistral",
    "moonshot_ai": "moonshotai",
    "x_ai": "x-ai",
    # LiteLLM's prefixes, before a slash
    "azure_ai": "azure",
    "azure_openai": "azure",
    "azure_text": "azure",
    "bedrock": "aws",
    "bedrock_converse": "aws",
    "cohere_chat": "cohere",
    "fireworks_ai": "fireworks",
    "gemini": "google",
    "moonshot": "moonshotai",
    "text-completion-openai": "openai",
    "together_ai": "together",
    "vertex_ai": "google",
    "xai": "x-ai",
    # model classes whose module is not named after the vendor
    "openai_responses": "openai",
    # servers that run locally
    "llamacpp": LOCAL,
    "llamafile": LOCAL,
    "llm_studio": LOCAL,
    "lm_studio": LOCAL,
    "mlx": LOCAL,
    "MLXModel": LOCAL,
    "ollama": LOCAL,
    "ollama_chat": LOCAL,
}
"""Vendors by other names than those on the price list."""

HOSTS: Final[Mapping[str, str]] = {
    "api.ai21.com": "ai21",
    "api.anthropic.com": "anthropic",
    "api.aws": "aws",
    "amazonaws.com": "aws",
    "azure-api.net": "azure",
    "cognitiveservices.azure.com": "azure",
    "openai.azure.com": "azure",
    "services.ai.azure.com": "azure",
    "api.cerebras.ai": "cerebras",
    "api.cohere.ai": "cohere",
    "api.cohere.com": "cohere",
    "api.deepseek.com": "deepseek",
    "api.fireworks.ai": "fireworks",
    "googleapis.com": "google",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral",
    "api.moonshot.ai": "moonshotai",
    "api.moonshot.cn": "moonshotai",
    "api.novita.ai": "novita",
    "ollama.com": "ollama-cloud",
    "api.openai.com": "openai",
    "openrouter.ai": "openrouter",
    "api.perplexity.ai": "perplexity",
    "api.together.ai": "together",
    "api.together.xyz": "together",
    "api.writer.com": "writer",
    "api.x.ai": "x-ai",
    "api.z.ai": "zai",
}
"""Vendors by host, including subdomains. At any other host, such as a gateway, the vendor is the
one that the framework's model class is made for."""

WITHOUT_LIST: Final = frozenset(
    {"sagemaker", "writer", "llamaapi", "ollama-cloud", "watsonx", "litellm_proxy"}
)
"""Vendors and gateways whose models are on no price list under these names."""

GATEWAYS: Final = frozenset({"litellm", "openai"})
"""Gateways to other vendors, whose name precedes a slash."""


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
    while host:
        # From the whole name to its end: regions and tenants come first.
        if host in HOSTS:
            return HOSTS[host]
        host = host.partition(".")[2]
    return None


def canonical(provider: str) -> str:
    """Return a vendor's name on the price list, from any of its names."""
    # In its own case first: model classes, such as MLXModel, contain capitals.
    return VENDORS.get(provider, VENDORS.get(provider.lower(), provider))


def vendor_of(model: str, provider: str) -> str:
    """Return the vendor; for a gateway, from the prefix of the model ID.

    Args:
        model: The ID as sent.
        provider: The provider, by its canonical name.
    """
    prefix, slash, _ = model.partition("/")
    # Only for a gateway: elsewhere a slash is part of the name, as in `meta-llama/Llama-3`.
    return canonical(prefix) if slash and provider in GATEWAYS else provider


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
    elif known and provider not in GATEWAYS:
        listing = ModelListing(provider, _without_own_prefix(model, provider))
    else:
        listing = _by_name(model, provider if known and provider != "litellm" else None)
    # An operator's alias or private endpoint is on no list.
    is_listed = provider not in WITHOUT_LIST and listing.vendor not in WITHOUT_LIST
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


def _without_own_prefix(model: str, vendor: str) -> str:
    prefix, slash, rest = model.partition("/")
    return _bare_id(rest if slash and canonical(prefix) == vendor else model, vendor)


def _bare_id(reference: str, vendor: str) -> str:
    """Remove LiteLLM's infix between vendor and model, such as `converse/` or a region."""
    if vendor == "aws":
        return reference.rpartition("/")[2]
    found = RESOURCE.fullmatch(reference)
    return found[1] if found and vendor == "google" else reference
