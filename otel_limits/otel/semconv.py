"""Every attribute, span and event name that is read or written, owned here.

The GenAI conventions are at Development stability and their Python constants are deprecated, so
the strings are ours. Source: OpenTelemetry semantic conventions for generative AI. How a framework
names its own spans, its binding says.
"""

from typing import Final

MODEL_CALL_PREFIXES: Final = ("chat", "text_completion", "generate_content")
"""Begin of the name of every span of a model call, whoever emits it."""

AGENT_NAME: Final = "gen_ai.agent.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
INPUT_TOKENS: Final = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.prompt_tokens",
    "llm.token_count.prompt",
)
OUTPUT_TOKENS: Final = (
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.completion_tokens",
    "llm.token_count.completion",
)
"""Names of one number each, the current one first: aliases, never to be added."""
CACHE_READ_TOKENS: Final = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
)
CACHE_WRITE_TOKENS: Final = (
    "gen_ai.usage.cache_write.input_tokens",
    "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_write_input_tokens",
)

INVOCATION_ID: Final = "otel_limits.invocation.id"
STOP_REASON: Final = "otel_limits.stop.reason"
STOP_ACTION: Final = "otel_limits.stop.action"
LIMIT_NAME: Final = "otel_limits.limit.name"
LIMIT_VALUE: Final = "otel_limits.limit.value"
LIMIT_CONSUMED: Final = "otel_limits.limit.consumed"
MESSAGE_SYNTHETIC: Final = "otel_limits.message.synthetic"
HALT_EVENT: Final = "otel_limits.halt"
WARNING_EVENT: Final = "otel_limits.warning"
WARNING_THRESHOLD: Final = "otel_limits.warning.threshold"

ERROR_TYPE: Final = "error.type"
