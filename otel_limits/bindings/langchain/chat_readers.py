"""Reads LangChain's models and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessage

from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.listings import vendor_at
from otel_limits.core.terms import STANDARD, PricingTerms
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.normaliser import record_of_usage
from otel_limits.usage.numbers import token_count
from otel_limits.usage.text import MESSAGE, as_json, tokens_of_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.core.usage import UsageRecord

PACKAGES: Final[Mapping[str, str]] = {
    "langchain_anthropic": "anthropic",
    "langchain_aws": "bedrock",
    "langchain_cohere": "cohere",
    "langchain_deepseek": "deepseek",
    "langchain_fireworks": "fireworks",
    "langchain_google_genai": "gemini",
    "langchain_google_vertexai": "gemini",
    "langchain_groq": "groq",
    "langchain_huggingface": "huggingface",
    "langchain_litellm": "litellm",
    "langchain_mistralai": "mistral",
    "langchain_ollama": "ollama",
    "langchain_openai": "openai",
    "langchain_openrouter": "openrouter",
    "langchain_perplexity": "perplexity",
    "langchain_together": "together",
    "langchain_xai": "xai",
}
"""The provider of each package of models: https://docs.langchain.com/oss/python/integrations/chat."""

AZURE: Final = "Azure"
"""The beginning of the names of classes for Azure's endpoints, which are in OpenAI's package."""

MODEL_IDS: Final = ("model", "model_name", "model_id", "deployment_name", "azure_deployment")
"""Attributes with the model's ID. There is no common one."""

OUTPUT_CAPS: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens_to_sample",
    "num_predict",
)
"""Attributes and arguments with the cap on output tokens."""

ADDRESSES: Final = (
    "openai_api_base",
    "base_url",
    "azure_endpoint",
    "anthropic_api_url",
    "endpoint_url",
    "endpoint",
)
"""Attributes with the address."""

USAGE: Final = "langchain"
"""LangChain's clients write all usage alike: cached tokens are part of the input
(langchain-core, messages/ai.py, `UsageMetadata`)."""


def provider_of(model: type) -> str:
    """Return the provider of a model class; for an application's own, the name of the class."""
    for each in model.__mro__:
        if (provider := PACKAGES.get(each.__module__.partition(".")[0])) is not None:
            return "azure" if each.__name__.startswith(AZURE) else provider
    return model.__qualname__


def model_id(model: Any) -> str:
    """Return a model's ID at the provider, or `unknown`."""
    for name in MODEL_IDS:
        value = getattr(model, name, None)
        if isinstance(value, str) and value:
            # Google's client accepts both spellings of an ID.
            return value.removeprefix("models/")
    return "unknown"


def call_to(
    model: Any,
    messages: Sequence[Any],
    options: Mapping[str, Any],
    known: dict[int, tuple[Any, int]],
) -> InFlightCall:
    """Describe a model call before it is sent.

    Args:
        model: The model.
        messages: The conversation.
        options: Arguments of the call, with the tools.
        known: Estimates of messages seen before.
    """
    try:
        call = InFlightCall(
            model_id(model),
            _projected_input(messages, options, known),
            provider_of(type(model)),
            _output_cap(model, options),
        )
        call.terms = _terms_of(model, options)
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)
        return InFlightCall("unknown")
    return call


def _output_cap(model: Any, options: Mapping[str, Any]) -> int | None:
    held = [token_count(options.get(name)) for name in OUTPUT_CAPS]
    held += [token_count(getattr(model, name, None)) for name in OUTPUT_CAPS]
    return max((cap for cap in held if cap), default=None)


def _terms_of(model: Any, options: Mapping[str, Any]) -> PricingTerms:
    addresses = [str(value) for name in ADDRESSES if (value := getattr(model, name, None))]
    vendor = next(filter(None, map(vendor_at, addresses)), None)
    tier = options.get("service_tier") or getattr(model, "service_tier", None)
    region = getattr(model, "region_name", None) or getattr(model, "location", None)
    is_own = provider_of(type(model)) == type(model).__qualname__
    return PricingTerms(
        vendor=vendor,
        own_class=type(model).__qualname__ if is_own and vendor is None else None,
        tier=tier if isinstance(tier, str) else STANDARD,
        region=region if isinstance(region, str) else None,
    )


def _projected_input(
    messages: Sequence[Any], options: Mapping[str, Any], known: dict[int, tuple[Any, int]]
) -> int:
    """Estimate the input tokens of a request: at least 1.

    Usage that the vendor reported for an earlier response covers everything before it, so only
    what came later is estimated.
    """
    tokens = 0
    for message in reversed(messages):
        usage = getattr(message, "usage_metadata", None)
        if isinstance(message, AIMessage) and usage and usage.get("total_tokens"):
            return int(tokens + usage["total_tokens"])
        tokens += _tokens_of(message, known)
    tools = options.get("tools")
    return max(1, tokens + (tokens_of_text(as_json(tools)) if tools else 0))


def _tokens_of(message: Any, known: dict[int, tuple[Any, int]]) -> int:
    entry = known.get(id(message))
    if entry is None or entry[0] is not message:  # Python reuses the ID of a deleted object
        calls = getattr(message, "tool_calls", None)
        text = text_of(message) + (as_json(calls) if calls else "")
        entry = known[id(message)] = message, MESSAGE + tokens_of_text(text)
    return entry[1]


def text_of(message: Any) -> str:
    """Return the content of a message as text."""
    content = getattr(message, "content", message)
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    return as_json(content)


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text")


def usage_of(message: Any, output: Mapping[str, Any] | None, provider: str) -> UsageRecord:
    """Return the usage that a response reports.

    Args:
        message: The response.
        output: `LLMResult.llm_output`, where models without `usage_metadata` put it.
        provider: The provider.
    """
    usage = getattr(message, "usage_metadata", None)
    if usage:
        return record_of_usage(dict(usage), USAGE)
    metadata = getattr(message, "response_metadata", None) or {}
    for held in (metadata, output or {}):
        for name in ("token_usage", "usage"):
            if held.get(name):
                return record_of_usage(held[name], provider)
    return record_of_usage(None, provider)


def is_cached(message: Any) -> bool:
    """Return whether a response comes from LangChain's own cache, so that nothing was sent.

    LangChain marks it by costs of zero: langchain-core, `_convert_cached_generations`.
    """
    usage = getattr(message, "usage_metadata", None)
    return bool(usage and usage.get("total_cost") == 0)
