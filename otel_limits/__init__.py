"""Enforce turn, token, cost and time limits on LLM agents."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_limits.core.errors import (
    ConfigurationError,
    KilledError,
    LimitReachedError,
    LoopDetectedError,
    MaxCostReachedError,
    MaxDurationReachedError,
    MaxInputTokensReachedError,
    MaxIterationsReachedException,
    MaxModelCallsReachedError,
    MaxOutputTokensReachedError,
    MaxTokenBudgetReachedException,
    MaxToolCallsReachedError,
    MaxTurnsReachedException,
    QuotaExceededError,
    QuotaUnavailableError,
)
from otel_limits.core.limits import (
    KILLED_STOP_REASON,
    LOOP_DETECTED_STOP_REASON,
    MAX_COST_STOP_REASON,
    MAX_DURATION_STOP_REASON,
    MAX_INPUT_TOKENS_STOP_REASON,
    MAX_ITERATIONS_STOP_REASON,
    MAX_MODEL_CALLS_STOP_REASON,
    MAX_OUTPUT_TOKENS_STOP_REASON,
    MAX_TOKEN_BUDGET_STOP_REASON,
    MAX_TOOL_CALLS_STOP_REASON,
    MAX_TURNS_STOP_REASON,
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    Breach,
    Level,
    Limits,
)

if TYPE_CHECKING:
    from otel_limits.bindings.known import is_synthetic, stop_of, stops_of
    from otel_limits.core.events import (
        Cycle,
        Enforcing,
        Event,
        Halt,
        InternalError,
        Invocation,
        LimitWarning,
        ModelCall,
        Observer,
        ObserverDropped,
        ObserverLag,
        PolicyRead,
        QuotaDecision,
        QuotaGrant,
        QuotaUse,
        QuotaWait,
        RepeatedFailures,
        Started,
        Stop,
        TaskLost,
        TaskUsage,
        ToolCall,
        Turn,
    )
    from otel_limits.core.usage import QuotaRefusal, Remaining, Usage
    from otel_limits.plugin import LimitsPlugin
    from otel_limits.quotas.remaining import remaining, remaining_async
    from otel_limits.runs.registry import kill
    from otel_limits.runtime.enable import disable, enable
    from otel_limits.runtime.flush import flush

__all__ = [
    "KILLED_STOP_REASON",
    "LOOP_DETECTED_STOP_REASON",
    "MAX_COST_STOP_REASON",
    "MAX_DURATION_STOP_REASON",
    "MAX_INPUT_TOKENS_STOP_REASON",
    "MAX_ITERATIONS_STOP_REASON",
    "MAX_MODEL_CALLS_STOP_REASON",
    "MAX_OUTPUT_TOKENS_STOP_REASON",
    "MAX_TOKEN_BUDGET_STOP_REASON",
    "MAX_TOOL_CALLS_STOP_REASON",
    "MAX_TURNS_STOP_REASON",
    "QUOTA_EXCEEDED_STOP_REASON",
    "QUOTA_UNAVAILABLE_STOP_REASON",
    "Breach",
    "ConfigurationError",
    "Cycle",
    "Enforcing",
    "Event",
    "Halt",
    "InternalError",
    "Invocation",
    "KilledError",
    "Level",
    "LimitReachedError",
    "LimitWarning",
    "Limits",
    "LimitsPlugin",
    "LoopDetectedError",
    "MaxCostReachedError",
    "MaxDurationReachedError",
    "MaxInputTokensReachedError",
    "MaxIterationsReachedException",
    "MaxModelCallsReachedError",
    "MaxOutputTokensReachedError",
    "MaxTokenBudgetReachedException",
    "MaxToolCallsReachedError",
    "MaxTurnsReachedException",
    "ModelCall",
    "Observer",
    "ObserverDropped",
    "ObserverLag",
    "PolicyRead",
    "QuotaDecision",
    "QuotaExceededError",
    "QuotaGrant",
    "QuotaRefusal",
    "QuotaUnavailableError",
    "QuotaUse",
    "QuotaWait",
    "Remaining",
    "RepeatedFailures",
    "Started",
    "Stop",
    "TaskLost",
    "TaskUsage",
    "ToolCall",
    "Turn",
    "Usage",
    "disable",
    "enable",
    "flush",
    "is_synthetic",
    "kill",
    "remaining",
    "remaining_async",
    "stop_of",
    "stops_of",
]


EVENTS, USAGE = "otel_limits.core.events", "otel_limits.core.usage"

LAZY_NAMES = {
    "Cycle": EVENTS,
    "Enforcing": EVENTS,
    "Event": EVENTS,
    "Halt": EVENTS,
    "InternalError": EVENTS,
    "Invocation": EVENTS,
    "LimitWarning": EVENTS,
    "ModelCall": EVENTS,
    "Observer": EVENTS,
    "ObserverDropped": EVENTS,
    "ObserverLag": EVENTS,
    "PolicyRead": EVENTS,
    "QuotaDecision": EVENTS,
    "QuotaGrant": EVENTS,
    "QuotaUse": EVENTS,
    "QuotaWait": EVENTS,
    "RepeatedFailures": EVENTS,
    "Started": EVENTS,
    "Stop": EVENTS,
    "TaskLost": EVENTS,
    "TaskUsage": EVENTS,
    "ToolCall": EVENTS,
    "Turn": EVENTS,
    "QuotaRefusal": USAGE,
    "Remaining": USAGE,
    "Usage": USAGE,
    "LimitsPlugin": "otel_limits.plugin",
    "disable": "otel_limits.runtime.enable",
    "enable": "otel_limits.runtime.enable",
    "flush": "otel_limits.runtime.flush",
    "is_synthetic": "otel_limits.bindings.known",
    "kill": "otel_limits.runs.registry",
    "remaining": "otel_limits.quotas.remaining",
    "remaining_async": "otel_limits.quotas.remaining",
    "stop_of": "otel_limits.bindings.known",
    "stops_of": "otel_limits.bindings.known",
}
"""Names whose import takes long, and which most commands do not need: of a framework, of the
OpenTelemetry SDK, or of classes with many fields."""


def __getattr__(name: str) -> Any:
    """Import a name of `LAZY_NAMES` on first use."""
    if name not in LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(LAZY_NAMES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return all names, also those not used yet, for completion in a notebook."""
    return sorted({*globals(), *__all__})
