"""How each instrumentation counts: which parts its usage includes, with sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from otel_limits.vendors.records import USAGE_RULES
from otel_limits.vendors.vendor import UsageRule

UNKNOWN: Final = UsageRule("by total")

SCOPES: Final[Mapping[str, UsageRule]] = {
    # It passes on Bedrock's usage, including 0 for a blocked prompt.
    "opentelemetry.instrumentation.botocore": UsageRule("outside", total_omits_cache=True),
    # input_tokens are the "Sum of all input token types": UsageMetadata in
    # https://github.com/langchain-ai/langchain/blob/master/libs/core/langchain_core/messages/ai.py.
    "langsmith": UsageRule("inside", zeros_are_made_up=True),
}
"""By the instrumentation scope of a span, or its prefix."""

# A framework's own spans can contain zeros if the vendor sent no usage, as in Strands'
# event_loop/streaming.py.
BY_CONVENTION: Final = UsageRule("inside", zeros_are_made_up=True)
"""OpenTelemetry semantic conventions for generative AI: input_tokens "SHOULD include all types of
input tokens, including cached tokens"; OpenInference counts the same way."""

BY_NOTHING: Final = UsageRule("by total", zeros_are_made_up=True)
"""Spans without any sign of how they count."""

CONVENTIONAL: Final = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_write.input_tokens",
    "llm.token_count.prompt",
    # Vercel's AI SDK since version 6, whose input is the total; before that it was the vendor's
    # input, which may exclude cached tokens: https://ai-sdk.dev/docs/ai-sdk-core/telemetry,
    # https://github.com/getsentry/sentry-javascript, packages/core/src/tracing/vercel-ai.
    "ai.usage.inputTokenDetails.cacheReadTokens",
)
"""Attributes whose presence proves that the conventions are followed; older ones left it open."""


def rule_of_provider(provider: str) -> UsageRule:
    """Return the rule of a vendor, by the framework's module for it."""
    return USAGE_RULES.get(provider, UNKNOWN)


def rule_of_span(scope: str, attributes: Mapping[str, object]) -> UsageRule:
    """Return the rule of an instrumentation."""
    for name, rule in SCOPES.items():
        if scope == name or scope.startswith(f"{name}."):
            return rule
    return BY_CONVENTION if any(name in attributes for name in CONVENTIONAL) else BY_NOTHING
