"""Stops LLM agents that go over budget, and tells exactly what happened."""

from typing import TYPE_CHECKING, Any

from otel_limits.errors import (
    ConfigurationError,
    LimitReachedError,
    MaxIterationsReachedException,
    MaxTokenBudgetReachedException,
    MaxTurnsReachedException,
)
from otel_limits.facts import (
    Cycle,
    Dropped,
    Fact,
    Fault,
    Halt,
    Invocation,
    Lag,
    ModelCall,
    Observer,
    Started,
    Stop,
    Turn,
)
from otel_limits.instrumentor import disable, enable
from otel_limits.limits import (
    MAX_ITERATIONS_STOP_REASON,
    MAX_TOKEN_BUDGET_STOP_REASON,
    MAX_TURNS_STOP_REASON,
    Breach,
    Limits,
    Usage,
)
from otel_limits.messages import is_synthetic, stop_of

if TYPE_CHECKING:
    from otel_limits.plugin import LimitsPlugin

__all__ = [
    "MAX_ITERATIONS_STOP_REASON",
    "MAX_TOKEN_BUDGET_STOP_REASON",
    "MAX_TURNS_STOP_REASON",
    "Breach",
    "ConfigurationError",
    "Cycle",
    "Dropped",
    "Fact",
    "Fault",
    "Halt",
    "Invocation",
    "Lag",
    "LimitReachedError",
    "Limits",
    "LimitsPlugin",
    "MaxIterationsReachedException",
    "MaxTokenBudgetReachedException",
    "MaxTurnsReachedException",
    "ModelCall",
    "Observer",
    "Started",
    "Stop",
    "Turn",
    "Usage",
    "disable",
    "enable",
    "is_synthetic",
    "stop_of",
]


def __getattr__(name: str) -> Any:
    """Import the one name that needs Strands when it is asked for."""
    if name == "LimitsPlugin":
        from otel_limits.plugin import LimitsPlugin

        return LimitsPlugin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
