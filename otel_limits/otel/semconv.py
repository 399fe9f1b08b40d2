"""Names of all attributes, spans and events that are read or written.

The GenAI conventions are at Development stability and their Python constants are deprecated, so
the strings are defined here. Source: OpenTelemetry semantic conventions for generative AI. The
names of a framework's own spans are in its binding.
"""

from typing import Final

MODEL_CALL_PREFIXES: Final = ("chat", "text_completion", "generate_content")
"""Prefixes of the names of model call spans, of any instrumentation."""

OPERATION: Final = "gen_ai.operation.name"
CHAT: Final = "chat"
AGENT_NAME: Final = "gen_ai.agent.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
PROVIDER: Final = "gen_ai.provider.name"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
REQUEST_MODEL: Final = "gen_ai.request.model"

INVOCATION_ID: Final = "otel_limits.invocation.id"
TASK_ID: Final = "otel_limits.task.id"
STOP_REASON: Final = "otel_limits.stop.reason"
STOP_ACTION: Final = "otel_limits.stop.action"
STOP_MESSAGE: Final = "otel_limits.stop.message"
STOP_WOULD_BE: Final = "otel_limits.stop.would_be"
COST: Final = "otel_limits.cost_usd"
UNPRICED_CALLS: Final = "otel_limits.unpriced_calls"
LIMIT_NAME: Final = "otel_limits.limit.name"
LIMIT_VALUE: Final = "otel_limits.limit.value"
LIMIT_CONSUMED: Final = "otel_limits.limit.consumed"
QUOTA_PREFIX: Final = "otel_limits.quota."
"""Followed by the fields of a `QuotaRefusal`."""
MESSAGE_SYNTHETIC: Final = "otel_limits.message.synthetic"
HALT_EVENT: Final = "otel_limits.halt"
WARNING_EVENT: Final = "otel_limits.warning"
WARNING_THRESHOLD: Final = "otel_limits.warning.threshold"

ERROR_TYPE: Final = "error.type"
