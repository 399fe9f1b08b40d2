"""Entry points for OpenTelemetry: an instrumentor, and a tracer provider."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from opentelemetry import trace
from opentelemetry.instrumentation.dependencies import get_dependency_conflicts
from opentelemetry.instrumentation.environment_variables import (
    OTEL_PYTHON_DISABLED_INSTRUMENTATIONS,
)
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_limits.bindings.known import OURS
from otel_limits.core.secrets import redact_value
from otel_limits.otel.provider import keep_replaceable
from otel_limits.runtime.enable import disable, enable_leniently
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.runtime.wiring import make_tracer_provider
from otel_limits.settings.variables import environment

logger = logging.getLogger("otel_limits")


class OtelLimitsInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """The instrumentor that `opentelemetry-instrument` loads."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return the frameworks that are installed, as each is required; else all of them."""
        known = tuple(framework.requirement for framework in OURS)
        return [each for each in known if get_dependency_conflicts([each]) is None] or known

    def _instrument(self, **kwargs: Any) -> None:  # noqa: ARG002  set by the base class
        if not RUNTIME.is_on:
            enable_leniently("instrumentor")

    def _uninstrument(self, **kwargs: Any) -> None:  # noqa: ARG002  set by the base class
        disable()


def before_instrumentors() -> None:
    """Enable before any instrumentor is loaded: one that raises prevents all later ones.

    `opentelemetry-instrument` calls this. Disabling our instrumentor disables this as well.
    """
    disabled = environment().get(OTEL_PYTHON_DISABLED_INSTRUMENTATIONS, "").split(",")
    if not {"otel_limits", "*"} & {name.strip() for name in disabled} and not RUNTIME.is_on:
        enable_leniently("instrumentor")


def environment_provider() -> trace.TracerProvider:
    """Create the provider for `OTEL_PYTHON_TRACER_PROVIDER=otel_limits python app.py`.

    Limits that the program enabled in code before stay in effect.
    """
    if not RUNTIME.is_on:
        enable_leniently("provider")
    RUNTIME.export_over_otlp()
    try:
        provider = make_tracer_provider()
    except Exception as error:
        logger.error(  # noqa: TRY400  the traceback is logged at DEBUG only
            "otel-limits: cannot create a tracer provider (%s); limits are still enforced.",
            redact_value(repr(error)),
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
        return trace.NoOpTracerProvider()
    keep_replaceable(provider)
    return provider
