"""Exports traces, metrics and events over OTLP, unless the process already does."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from opentelemetry import metrics
from opentelemetry._logs import get_logger_provider
from opentelemetry.metrics import get_meter_provider
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from otel_limits.core.installing import install_command
from otel_limits.core.secrets import redact_error, redact_url
from otel_limits.otel.provider import (
    FallbackProvider,
    current_provider,
    detected_resource,
    resource,
)

logger = logging.getLogger("otel_limits")

# The logs API of OpenTelemetry has a private name until it is declared stable; there is no other.
EXPORTERS: Final = {
    "traces": ("trace_exporter", "OTLPSpanExporter", "spans"),
    "metrics": ("metric_exporter", "OTLPMetricExporter", "metrics"),
    "logs": ("_log_exporter", "OTLPLogExporter", "events"),
}
"""Module, class and subject of each signal's exporter."""


class OwnReader(PeriodicExportingMetricReader):
    """A periodic reader that stops exporting once it is replaced."""

    is_replaced = False

    def _receive_metrics(self, metrics_data: MetricsData, *args: Any, **options: Any) -> None:
        # The method that every reader defines. A reader cannot be stopped otherwise: its
        # `shutdown()` exports once more, and shuts down the exporter.
        if not self.is_replaced:
            super()._receive_metrics(metrics_data, *args, **options)


class OwnMeters(metrics.MeterProvider):
    """The meter provider of a process that has none; it starts from zero in a forked child.

    The SDK gives a child a new ID (`service.instance.id`) but keeps the parent's counts, so they
    would be exported twice.
    """

    def __init__(self, exporter: Any) -> None:
        """Export through `exporter`."""
        self._exporter = exporter
        self._begin(resource())

    def _begin(self, described: Resource) -> None:
        self._reader = OwnReader(self._exporter)
        self._provider = MeterProvider([self._reader], described, shutdown_on_exit=False)

    def reset_after_fork(self) -> None:
        """Reset counts inherited after a fork. Meters must be requested again."""
        self._reader.is_replaced = True
        self._begin(resource().merge(Resource({SERVICE_INSTANCE_ID: str(uuid.uuid4())})))

    def get_meter(self, name: str, *args: Any, **options: Any) -> metrics.Meter:
        """Return a meter, as every meter provider does."""
        return self._provider.get_meter(name, *args, **options)

    def force_flush(self) -> bool:
        """Export the current metrics."""
        return self._provider.force_flush()

    def shutdown(self) -> None:
        """Export once more and shut down."""
        self._provider.shutdown()


Provider: TypeAlias = TracerProvider | OwnMeters | LoggerProvider


class ExitFlusher:
    """Shuts providers down at exit, concurrently and within one timeout.

    Each has a thread that exists from the start, as Python 3.12 starts none during shutdown. In
    sequence, three signals and an endpoint that hangs would take three timeouts.
    """

    def __init__(self) -> None:
        """Create a flusher without providers."""
        self.timeout_seconds = 0.0
        self.providers: list[Provider] = []
        self._start_threads()
        atexit.register(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_threads)

    def add(self, provider: Provider, timeout_seconds: float) -> None:
        """Shut `provider` down at exit. The longest timeout given applies to all."""
        self.timeout_seconds = max(self.timeout_seconds, timeout_seconds)
        self.providers.append(provider)
        self._start(provider.shutdown)

    def __call__(self) -> None:
        """Shut all providers down, and give up after the timeout."""
        deadline = time.monotonic() + self.timeout_seconds
        self._now.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_threads(self) -> None:
        """Start one thread per provider that waits for the end of the process."""
        # Also after a fork, as a child has none of its parent's threads.
        self._now = threading.Event()
        self._threads: list[threading.Thread] = []
        for provider in self.providers:
            self._start(provider.shutdown)

    def _start(self, shutdown: Callable[[], object]) -> None:
        now = self._now

        def wait() -> None:
            now.wait()
            shutdown()

        thread = threading.Thread(target=wait, name="otel-limits-at-exit", daemon=True)
        self._threads.append(thread)
        thread.start()


AT_EXIT: Final = ExitFlusher()


def flushes() -> list[Callable[[], object]]:
    """Return functions that flush our providers and those that the process has set."""
    in_use: tuple[Any, ...] = (get_meter_provider(), get_logger_provider(), current_provider())
    found = {id(each): each for each in (*AT_EXIT.providers, *in_use)}
    # The API's default providers have nothing to flush.
    return [each.force_flush for each in found.values() if hasattr(each, "force_flush")]


def tracer_provider(protocol: str | None, timeout_seconds: float) -> FallbackProvider:
    """Create a tracer provider, which exports if an OTLP protocol is given."""
    exporter = otlp_exporter("traces", protocol)
    if exporter is None:
        return FallbackProvider(resource=detected_resource())
    # Without its own handler at exit, which would wait before the others.
    provider = FallbackProvider(resource=resource(), shutdown_on_exit=False)
    # Unbound: the method of the provider is for processors of the program.
    TracerProvider.add_span_processor(provider, BatchSpanProcessor(exporter))
    AT_EXIT.add(provider, timeout_seconds)
    return provider


def meter_provider(protocol: str | None, timeout_seconds: float) -> OwnMeters | None:
    """Create an exporting meter provider, if OTLP is requested and the process has none."""
    if isinstance(get_meter_provider(), MeterProvider):
        return None
    exporter = otlp_exporter("metrics", protocol)
    if exporter is None:
        return None
    provider = OwnMeters(exporter)
    AT_EXIT.add(provider, timeout_seconds)
    return provider


def logger_provider(protocol: str | None, timeout_seconds: float) -> LoggerProvider | None:
    """Create an exporting logger provider, if OTLP is requested and the process has none."""
    if isinstance(get_logger_provider(), LoggerProvider):
        return None
    exporter = otlp_exporter("logs", protocol)
    if exporter is None:
        return None
    provider = LoggerProvider(resource(), shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    AT_EXIT.add(provider, timeout_seconds)
    return provider


def flush_metrics(own: Any) -> None:
    """Export the current metrics of our provider, or of the process's provider."""
    provider = own or get_meter_provider()
    # The API's default provider exports nothing.
    if hasattr(provider, "force_flush"):
        provider.force_flush()


def make_exporter(signal: str, protocol: str, **options: Any) -> Any:
    """Create the exporter for `grpc` or `http/protobuf`.

    Args:
        signal: `traces`, `metrics` or `logs`.
        protocol: Anything but `grpc` means `http/protobuf`.
        options: Overrides of OTEL_EXPORTER_OTLP_* variables.

    Raises:
        ImportError: It is not installed.
        Exception: A variable is invalid.
    """
    module, name, _ = EXPORTERS[signal]
    transport = "grpc" if protocol == "grpc" else "http"
    found = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{transport}.{module}")
    return getattr(found, name)(**options)


def probe_endpoint(signal: str, protocol: str, **options: Any) -> bool:
    """Send a request without telemetry. Return whether the endpoint accepted it.

    Raises:
        Exception: As for `make_exporter`.
    """
    exporter = make_exporter(signal, protocol, **options)
    try:
        result = exporter.export(MetricsData([]) if signal == "metrics" else [])
    finally:
        exporter.shutdown()
    return bool(result.name == "SUCCESS")


def otlp_exporter(signal: str, protocol: str | None) -> Any | None:
    """Create an exporter configured by OTEL_EXPORTER_OTLP_*, if a protocol is given.

    Without an exporter the process continues: a wrong endpoint must not disable limits.
    """
    if protocol is None:
        return None
    exported = EXPORTERS[signal][2]
    try:
        return make_exporter(signal, protocol)
    except ImportError:
        logger.error(  # noqa: TRY400  the traceback would not help
            "otel-limits: OTEL_EXPORTER_OTLP_* is set but no OTLP exporter is installed, so no "
            "%s are exported. Run: %s",
            exported,
            install_command("otlp"),
        )
    except Exception as error:
        redact_error(error, redact_url)  # it can quote the endpoint
        logger.exception(
            "otel-limits cannot create the OTLP exporter, so no %s are exported.", exported
        )
    return None
