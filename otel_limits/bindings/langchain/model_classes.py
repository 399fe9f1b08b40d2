"""Reads the provider and the ID of LangChain's models."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

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

MODEL_CLASSES: Final = 32
"""Number of model classes whose provider is cached."""


def provider_of(model: type) -> str:
    """Return the provider of a model class; for an application's own, the name of the class."""
    return _known_provider(model) or model.__qualname__


def is_known(model: type) -> bool:
    """Return whether a model class is of a provider's package, or of a subclass of one."""
    return _known_provider(model) is not None


@functools.lru_cache(MODEL_CLASSES)
def _known_provider(model: type) -> str | None:
    for each in model.__mro__:
        if (provider := PACKAGES.get(each.__module__.partition(".")[0])) is not None:
            return "azure" if each.__name__.startswith(AZURE) else provider
    return None


def model_id(model: Any) -> str:
    """Return a model's ID at the provider, or `unknown`."""
    kind: type = type(model)
    held, properties = vars(model), _properties_of(kind)
    for name in MODEL_IDS:
        value = getattr(model, name, None) if name in properties else held.get(name)
        if isinstance(value, str) and value:
            # Google's client accepts both spellings of an ID.
            return value.removeprefix("models/")
    return "unknown"


# Pydantic's models are slow to raise AttributeError.
@functools.lru_cache(MODEL_CLASSES)
def _properties_of(model: type) -> frozenset[str]:
    """Return the names of an ID that a class defines itself."""
    return frozenset(name for name in MODEL_IDS for each in model.__mro__ if name in vars(each))
