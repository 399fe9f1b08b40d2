"""How each vendor counts: which parts its usage includes, with sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Cached: TypeAlias = Literal["inside", "outside", "by total"]
"""Whether the input contains cached tokens; `by total` if only the total reveals it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one vendor, or one instrumentation, counts."""

    cached: Cached
    zeros_are_made_up: bool = False
    """True if the client reports 0 for usage that the vendor did not send."""
    total_is_final: bool = False
    """True if the total is right even if the parts are more, because some overlap."""
    total_omits_cache: bool = False
    """True if it is unknown whether the total contains cached tokens that the input omits."""


# Cached tokens and reasoning are parts of prompt_tokens and completion_tokens: openai-python,
# types/completion_usage.py. xAI (Chat) and Gemini's OpenAI endpoint exclude reasoning from
# completion_tokens; only the total includes it:
# https://github.com/BerriAI/litellm/blob/main/litellm/llms/xai/chat/transformation.py,
# https://github.com/ogx-ai/ogx/issues/5122. So a total above the sum of its parts is output.
OPENAI: Final = Rule("inside")

RULES: Final[Mapping[str, Rule]] = {
    "openai": OPENAI,
    "openai_responses": OPENAI,
    "litellm": OPENAI,  # it adds Anthropic's cached tokens to the input itself
    # usage_json_oaicompat: https://github.com/ggml-org/llama.cpp/tree/master/tools/server.
    "llamacpp": OPENAI,
    "llamaapi": OPENAI,
    "mistral": OPENAI,  # https://docs.mistral.ai/api/; mistralai, models/usageinfo.py
    # prompt_eval_count: https://github.com/ollama/ollama/blob/main/docs/api.md.
    "ollama": OPENAI,
    "sagemaker": Rule("inside", zeros_are_made_up=True),
    # Strands' WriterModel sends zeros unless stream_options request usage.
    "writer": Rule("inside", zeros_are_made_up=True),
    # "Total input tokens in a request is the summation of input_tokens,
    # cache_creation_input_tokens, and cache_read_input_tokens": anthropic, types/usage.py.
    "anthropic": Rule("outside"),
    # inputTokens exclude cached ones:
    # https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_TokenUsage.html.
    "bedrock": Rule("outside", total_omits_cache=True),
    # thoughts are not part of candidates, except in some answers: google-genai, types.py,
    # GenerateContentResponseUsageMetadata; litellm, vertex_and_google_ai_studio_gemini.py.
    "gemini": Rule("inside", zeros_are_made_up=True, total_is_final=True),
}
"""By the framework's module for the provider."""

UNKNOWN: Final = Rule("by total")

SCOPES: Final[Mapping[str, Rule]] = {
    # It passes on Bedrock's usage, including 0 for a blocked prompt.
    "opentelemetry.instrumentation.botocore": Rule("outside", total_omits_cache=True),
    # input_tokens are the "Sum of all input token types": UsageMetadata in
    # https://github.com/langchain-ai/langchain/blob/master/libs/core/langchain_core/messages/ai.py.
    "langsmith": Rule("inside", zeros_are_made_up=True),
}
"""By the instrumentation scope of a span, or its prefix."""

# Strands' own spans contain zeros if the vendor sent no usage: event_loop/streaming.py.
BY_CONVENTION: Final = Rule("inside", zeros_are_made_up=True)
"""OpenTelemetry semantic conventions for generative AI: input_tokens "SHOULD include all types of
input tokens, including cached tokens"; OpenInference counts the same way."""

BY_NOTHING: Final = Rule("by total", zeros_are_made_up=True)
"""Spans without any sign of how they count."""

CONVENTIONAL: Final = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_write.input_tokens",
    "llm.token_count.prompt",
)
"""Attributes whose presence proves that the conventions are followed; older ones left it open."""


def rule_of_provider(provider: str) -> Rule:
    """Return the rule of a vendor, by the framework's module for it."""
    return RULES.get(provider, UNKNOWN)


def rule_of_span(scope: str, attributes: Mapping[str, object]) -> Rule:
    """Return the rule of an instrumentation."""
    for name, rule in SCOPES.items():
        if scope == name or scope.startswith(f"{name}."):
            return rule
    return BY_CONVENTION if any(name in attributes for name in CONVENTIONAL) else BY_NOTHING
