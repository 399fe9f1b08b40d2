"""Who sells a model call, and under which name: what a model id and its provider say together."""

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
"""Model ids of Amazon Bedrock, inference profiles such as `us.` and `global.` included."""

BEDROCK_ARN: Final = re.compile(
    r"arn:aws[a-z-]*:bedrock:[^:]*:[^:]*:(?:inference-profile|foundation-model)/(.+)"
)
"""An application's own profile (`application-inference-profile/…`) does not name its model."""
ARN: Final = "arn:"

RESOURCE: Final = re.compile(r"(?:projects|publishers|models|tunedModels)/(?:.*/)?([^/]+)")
"""Google's resource names: `models/gemini-…`, `publishers/google/models/…`, `projects/…`:
https://ai.google.dev/api/models, https://google.aip.dev/122."""

LOCAL: Final = "local"
"""The seller of what runs on a machine of one's own."""

OFFLOADED: Final = "cloud"
"""How the tags of the models end that Ollama asks its own service for, such as `:120b-cloud`:
https://docs.ollama.com/cloud."""

SELLERS: Final[Mapping[str, str]] = {
    # by the conventions, and the names before version 1.37
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
    # prefixes of LiteLLM, with a slash behind them
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
    # classes of models whose module has another name than the seller
    "openai_responses": "openai",
    # what runs on a machine of one's own
    "llamacpp": LOCAL,
    "llamafile": LOCAL,
    "llm_studio": LOCAL,
    "lm_studio": LOCAL,
    "mlx": LOCAL,
    "MLXModel": LOCAL,
    "ollama": LOCAL,
    "ollama_chat": LOCAL,
}
"""Sellers that are known under other names than those of the price list."""

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
"""Who sells at which hosts, and at those below them. At any other one, such as that of a gateway,
it is whoever the framework's class of models is made for."""

WITHOUT_LIST: Final = frozenset(
    {"sagemaker", "writer", "llamaapi", "ollama-cloud", "watsonx", "litellm_proxy"}
)
"""Who sells models, or passes on calls of models, that are on nobody's list under these names."""

GATEWAYS: Final = frozenset({"litellm", "openai"})
"""Who may be asked for the model of another seller, whose name is then before a slash."""


ADDRESSES: Final = 64
"""Addresses that are remembered."""


class ModelListing(NamedTuple):
    """Under which name which seller has a model; without a seller it is whoever has the name."""

    seller: str | None
    reference: str


@functools.lru_cache(ADDRESSES)
def vendor_at(address: str) -> str | None:
    """Return who sells at an address, where the address says so."""
    # Without slashes `urlsplit` takes a host for a path, and Ollama's clients accept a bare one.
    host = urlsplit(address if "//" in address else f"//{address}").hostname or ""
    while host:
        # From the whole name down to its end: regions and tenants are parts at its beginning.
        if host in HOSTS:
            return HOSTS[host]
        host = host.partition(".")[2]
    return None


def canonical(provider: str) -> str:
    """Return the name of a seller in the price list, for any name that it has elsewhere."""
    # As it is written first: the class of a model, such as MLXModel, has capitals in its name.
    return SELLERS.get(provider, SELLERS.get(provider.lower(), provider))


def vendor_of(model: str, provider: str) -> str:
    """Return who sells: a gateway is told by what is before the slash of the id.

    Args:
        model: The id as it was sent.
        provider: Who was asked, by its canonical name.
    """
    prefix, slash, _ = model.partition("/")
    # Only at a gateway: elsewhere a slash is part of the name, as in `meta-llama/Llama-3`.
    return canonical(prefix) if slash and provider in GATEWAYS else provider


def vendor_by_id(model: str) -> str | None:
    """Return who alone gives models such ids; `None` where several could.

    A framework's spans may name the framework where the seller should be.
    """
    if BEDROCK.match(model) or (model.startswith(ARN) and ":bedrock:" in model):
        return "aws"
    return "google" if RESOURCE.fullmatch(model) else None


def is_local(model: str, provider: str) -> bool:
    """Tell whether a model runs on a machine of one's own, so that nobody is paid for its tokens.

    Args:
        model: The id as it was sent.
        provider: Who was asked, by its canonical name.
    """
    is_offloaded = model.rpartition(":")[2].endswith(OFFLOADED)
    return LOCAL in (provider, vendor_of(model, provider)) and not is_offloaded


def listing_of(model: str, provider: str, *, known: bool) -> ModelListing | None:
    """Say where to look for the price of a model.

    Args:
        model: The id as it was sent.
        provider: Who was asked, by its canonical name.
        known: `provider` is on the price list.

    Returns:
        Seller and name of the model; `None` where no list can have it.
    """
    # Names that one seller alone gives come first: a gateway that was asked passes them on as they
    # are, so that they say more than its own name does.
    if found := BEDROCK_ARN.fullmatch(model):
        article = ModelListing("aws", found[1])
    elif found := RESOURCE.fullmatch(model):
        article = ModelListing("google", found[1])
    # The name of a gateway says nothing of who is paid.
    elif known and provider not in GATEWAYS:
        article = ModelListing(provider, _without_own_prefix(model, provider))
    else:
        article = _by_name(model, provider if known and provider != "litellm" else None)
    # An operator's alias for a model, or one's own endpoint: nobody's list has it.
    is_listed = provider not in WITHOUT_LIST and article.seller not in WITHOUT_LIST
    return article if is_listed and not article.reference.startswith(ARN) else None


def _by_name(model: str, seller: str | None) -> ModelListing:
    """Say whose model it is by its name; `seller` says so of a bare one."""
    prefix, slash, rest = model.partition("/")
    # Before the slash: ids such as `us.anthropic.claude…` are Bedrock's whoever passes them on.
    if BEDROCK.match(model):
        return ModelListing("aws", model)
    # OpenAI's fine-tuned models, before the rule for colons below takes it for a tag.
    if model.startswith("ft:"):
        return ModelListing("openai", model)
    if slash:
        named = canonical(prefix)
        return ModelListing(named, _bare_id(rest, named))
    # A tag, as `deepseek-r1:8b`, says that it is served by an engine of one's own.
    return ModelListing(LOCAL if ":" in model and not model.startswith(ARN) else seller, model)


def _without_own_prefix(model: str, seller: str) -> str:
    prefix, slash, rest = model.partition("/")
    return _bare_id(rest if slash and canonical(prefix) == seller else model, seller)


def _bare_id(reference: str, seller: str) -> str:
    """Cut what LiteLLM puts between seller and model, such as `converse/` or a region."""
    if seller == "aws":
        return reference.rpartition("/")[2]
    found = RESOURCE.fullmatch(reference)
    return found[1] if found and seller == "google" else reference
