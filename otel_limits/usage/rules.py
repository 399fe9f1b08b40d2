"""How each vendor counts: what is part of what in its usage, and where that is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Cached: TypeAlias = Literal["inside", "outside", "by total"]
"""Whether the input contains cached tokens; where only the total of a call tells, `by total`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one vendor, or one instrumentation, counts."""

    cached: Cached
    zeros_are_made_up: bool = False
    """True where a client says 0 for a usage that the vendor did not send."""
    total_is_final: bool = False
    """True where the total decides even if the parts are more: some of them overlap."""
    total_omits_cache: bool = False
    """True where nobody knows whether the total contains cached tokens that the input omits."""


# Cached tokens and reasoning are parts of prompt_tokens and completion_tokens: openai-python,
# types/completion_usage.py. xAI (Chat) and Gemini's OpenAI endpoint leave reasoning out of
# completion_tokens, and only the total has it:
# https://github.com/BerriAI/litellm/blob/main/litellm/llms/xai/chat/transformation.py,
# https://github.com/ogx-ai/ogx/issues/5122. So more in the total than in its parts is output.
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
    # Strands' WriterModel sends zeros unless stream_options ask for usage.
    "writer": Rule("inside", zeros_are_made_up=True),
    # "Total input tokens in a request is the summation of input_tokens,
    # cache_creation_input_tokens, and cache_read_input_tokens": anthropic, types/usage.py.
    "anthropic": Rule("outside"),
    # inputTokens are those that were not cached:
    # https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_TokenUsage.html.
    "bedrock": Rule("outside", total_omits_cache=True),
    # thoughts are beside candidates, but in some answers within: google-genai, types.py,
    # GenerateContentResponseUsageMetadata; litellm, vertex_and_google_ai_studio_gemini.py.
    "gemini": Rule("inside", zeros_are_made_up=True, total_is_final=True),
}
"""By the module of a framework that talks to the vendor."""

UNKNOWN: Final = Rule("by total")

SCOPES: Final[Mapping[str, Rule]] = {
    # It passes on what Bedrock says, also that a prompt was blocked and used nothing.
    "opentelemetry.instrumentation.botocore": Rule("outside", total_omits_cache=True),
    # input_tokens are the "Sum of all input token types": UsageMetadata in
    # https://github.com/langchain-ai/langchain/blob/master/libs/core/langchain_core/messages/ai.py.
    "langsmith": Rule("inside", zeros_are_made_up=True),
}
"""By the instrumentation scope of a span, or by what its name begins with."""

# Strands' own spans have zeros where the vendor sent no usage: event_loop/streaming.py.
BY_CONVENTION: Final = Rule("inside", zeros_are_made_up=True)
"""OpenTelemetry semantic conventions for generative AI: input_tokens "SHOULD include all types of
input tokens, including cached tokens"; the conventions of OpenInference count so, too."""

BY_NOTHING: Final = Rule("by total", zeros_are_made_up=True)
"""Spans that say nothing of how they count."""

CONVENTIONAL: Final = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_write.input_tokens",
    "llm.token_count.prompt",
)
"""Attributes whose presence says that the conventions are followed; older ones left it open."""


def rule_of_provider(provider: str) -> Rule:
    """How a vendor counts, by the module of the framework that talks to it."""
    return RULES.get(provider, UNKNOWN)


def rule_of_span(scope: str, attributes: Mapping[str, object]) -> Rule:
    """How an instrumentation counts."""
    for name, rule in SCOPES.items():
        if scope == name or scope.startswith(f"{name}."):
            return rule
    return BY_CONVENTION if any(name in attributes for name in CONVENTIONAL) else BY_NOTHING
