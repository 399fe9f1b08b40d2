"""What the entry points of OpenTelemetry load."""

from otel_limits.runtime.instrumentor import OtelLimitsInstrumentor, environment_provider

__all__ = ["OtelLimitsInstrumentor", "environment_provider"]
