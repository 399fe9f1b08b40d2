"""Makes the OpenTelemetry providers that a process lacks, by OTEL_EXPORTER_OTLP_*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_limits.settings import otlp

if TYPE_CHECKING:
    from opentelemetry._logs import LoggerProvider
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


@dataclass(frozen=True, slots=True)
class OtlpProviders:
    """Through which metrics and events leave; `None` stands for those that the process has set.

    They are ours alone: a global one would stand in the way of one that the program sets later.
    """

    meter: MeterProvider | None = None
    logger: LoggerProvider | None = None


def make_otlp_providers() -> OtlpProviders:
    """Make those that export where it is asked for and nobody else does it."""
    from otel_limits.otel import export

    timeout = otlp.otlp_timeout_seconds()
    return OtlpProviders(
        meter=export.meter_provider(otlp.otlp_protocol(signal="metrics"), timeout),
        logger=export.logger_provider(otlp.otlp_protocol(signal="logs"), timeout),
    )


def make_tracer_provider() -> TracerProvider:
    """Make a provider, one that exports where it is asked for."""
    from otel_limits.otel import export

    return export.tracer_provider(otlp.otlp_protocol(), otlp.otlp_timeout_seconds())
