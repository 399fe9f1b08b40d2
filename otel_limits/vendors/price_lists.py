"""Prices that two lists agree on: by `python -m tests.price_lists.compare`."""

from collections.abc import Mapping
from typing import Final

COMPARED: Final = ("genai-prices 0.2.3", "litellm 1.106.12")
COMPARED_ON: Final = "2026-11-25"

STAND_INS: Final[Mapping[str, frozenset[str]]] = {
    "azure": frozenset(
        [
            "claude-fable-5",
            "claude-fable-5-1",
            "claude-haiku-4-5",
            "claude-haiku-5-5",
            "claude-opus-4-5",
            "claude-opus-4-6",
            "claude-opus-4-7",
            "claude-opus-4-8",
            "claude-opus-5",
            "claude-opus-5-5",
            "claude-sonnet-4-6",
            "claude-sonnet-5",
            "codex-mini",
            "computer-use",
            "gpt-3.5-turbo",
            "gpt-3.5-turbo-16k",
            "gpt-4",
            "gpt-4-32k",
            "gpt-4.1",
            "gpt-4.1-mini",
            "gpt-4.1-nano",
            "gpt-4.5-preview",
            "gpt-4o",
            "gpt-4o-2024-05-13",
            "gpt-4o-audio-preview",
            "gpt-4o-mini",
            "gpt-4o-mini-audio-preview",
            "gpt-5",
            "gpt-5-mini",
            "gpt-5-nano",
            "gpt-5-pro",
            "gpt-5.1",
            "gpt-5.1-codex-mini",
            "gpt-5.2",
            "gpt-5.2-pro",
            "gpt-5.3",
            "gpt-5.3-codex",
            "gpt-5.4",
            "gpt-5.4-mini",
            "gpt-5.4-nano",
            "gpt-5.5",
            "gpt-5.6-luna",
            "gpt-5.6-sol",
            "gpt-5.6-terra",
            "gpt-6-astra",
            "gpt-6-luna",
            "gpt-6-sol",
            "gpt-6.1-sol",
            "gpt-audio",
            "gpt-audio-mini",
            "gpt-chat-latest",
            "grok-3",
            "grok-4-0709",
            "grok-4-1-fast-non-reasoning",
            "grok-4-1-fast-reasoning",
            "grok-4-fast-non-reasoning",
            "grok-4-fast-reasoning",
            "grok-4.3",
            "grok-4.6",
            "grok-4.7",
            "grok-code-fast-1",
            "kimi-k2-thinking",
            "kimi-k2.5",
            "kimi-k2.6",
            "kimi-k2.7-code",
            "o3-deep-research",
            "o3-pro",
        ]
    ),
    "google": frozenset(["claude-3-sonnet", "claude-sonnet-5"]),
}
"""Models that a vendor sells at their maker's price, by the maker's ID."""

LATEST: Final[Mapping[str, frozenset[str]]] = {
    "azure": frozenset(["chat-latest", "gpt-chat-latest"]),
    "google": frozenset(["gemini-flash-latest", "gemini-flash-lite-latest", "gemini-pro-latest"]),
    "mistral": frozenset(
        [
            "ministral-8b-latest",
            "mistral-medium-latest",
            "mistral-small-latest",
            "voxtral-small-latest",
        ]
    ),
    "openai": frozenset(
        [
            "chat-latest",
            "gpt-5-chat-latest",
            "gpt-5.1-chat-latest",
            "gpt-5.2-chat-latest",
            "gpt-5.3-chat-latest",
        ]
    ),
    "x-ai": frozenset(
        [
            "grok-4.20-multi-agent-beta-latest",
            "grok-4.20-multi-agent-latest",
            "grok-4.3-latest",
            "grok-4.5-latest",
        ]
    ),
}
"""Names of a vendor's current model that both lists price alike."""

DISPUTED: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "anthropic": {"claude-sonnet-4-5": frozenset(["long"])},
    "aws": {
        "global.anthropic.claude-sonnet-4-5-20250929-v1:0": frozenset(["long"]),
        "regional.anthropic.claude-3-opus-20240229-v1:0": frozenset(["cache_read", "cache_write"]),
        "regional.anthropic.claude-sonnet-4-5-20250929-v1:0": frozenset(["long"]),
    },
    "baseten": {"reflection/Beam-1.0": frozenset(["all", "cache_read", "long"])},
    "cloudflare": {
        "@cf/meta/llama-2-7b-chat-fp16": frozenset(["all", "long"]),
        "@cf/mistral/mistral-7b-instruct-v0.1": frozenset(["all", "long"]),
    },
    "deepseek": {"deepseek-v3.2": frozenset(["all", "cache_read", "long"])},
    "fireworks": {
        "gemma-3-27b-it": frozenset(["all", "long"]),
        "glm-4p7": frozenset(["cache_read"]),
        "llama-v3p1-8b-instruct": frozenset(["all", "long"]),
        "minimax-m2p1": frozenset(["cache_read"]),
    },
    "google": {"gemini-2.5-pro-tts": frozenset(["cache_read"])},
    "mistral": {
        "mistral-large-4": frozenset(["all", "cache_read", "long"]),
        "mistral-medium-3-1": frozenset(["all", "cache_read", "long"]),
        "mistral-nemo": frozenset(["all", "cache_read", "long"]),
        "mistral-tiny": frozenset(["cache_read"]),
    },
    "novita": {
        "deepseek/deepseek-v4-pro-0813": frozenset(["cache_read"]),
        "mindai/macaron-v1-tall": frozenset(["all", "cache_read", "long"]),
        "mindai/macaron-v1-venti": frozenset(["all", "cache_read", "long"]),
        "mistralai/mistral-nemo": frozenset(["all", "long"]),
    },
    "openai": {
        "ft:gpt-4o": frozenset(["cache_read", "cache_write"]),
        "ft:gpt-4o-mini": frozenset(["cache_read"]),
        "gpt-4o-search-preview": frozenset(["cache_read"]),
        "gpt-5.6-cyber": frozenset(["long"]),
    },
    "ovhcloud": {"gpt-oss-120b": frozenset(["all"]), "gpt-oss-20b": frozenset(["all", "long"])},
    "together": {
        "Qwen/Qwen3.7-Max": frozenset(["all", "cache_read", "long"]),
        "Qwen/Qwen3.8-2.4T-A95B": frozenset(["cache_read"]),
    },
    "x-ai": {"grok-code-fast-1": frozenset(["all", "cache_read", "long"])},
}
"""Models on which the lists disagree for no known reason, and at which usage."""
