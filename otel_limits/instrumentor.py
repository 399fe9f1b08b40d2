"""What OpenTelemetry loads: an instrumentor, and a tracer provider by its environment."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from opentelemetry import trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_limits.runtime.enable import disable, enable_leniently
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.runtime.wiring import make_tracer_provider

logger = logging.getLogger("otel_limits")


class OtelLimitsInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """What `opentelemetry-instrument` loads."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return what has to be installed for this to make sense."""
        return ("strands-agents >= 1.62",)

    def _instrument(self, **kwargs: Any) -> None:  # noqa: ARG002  set by the base class
        enable_leniently()

    def _uninstrument(self, **kwargs: Any) -> None:  # noqa: ARG002  set by the base class
        disable()


def environment_provider() -> trace.TracerProvider:
    """Make the provider for `OTEL_PYTHON_TRACER_PROVIDER=otel_limits python app.py`.

    What the program enabled in code before it asked for a tracer stays in force.
    """
    if not RUNTIME.is_on:
        enable_leniently()
    RUNTIME.export_over_otlp()
    try:
        return make_tracer_provider()
    except Exception:
        logger.exception("otel-limits cannot make a tracer provider; limits stay in force.")
        return trace.NoOpTracerProvider()
