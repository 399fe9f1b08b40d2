"""Publishes metrics and halts through OpenTelemetry, e.g. for export over OTLP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from opentelemetry._logs import Logger, LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from otel_limits.core.events import Halt, Invocation
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.labels import MAX_AGENTS, NO_NAMES, Names
from otel_limits.observers.conventions import CONVENTIONAL
from otel_limits.observers.counting import CountingObserver
from otel_limits.observers.metrics import METRICS, Exemplar, MetricSpec, Series
from otel_limits.observers.protocol import BaseObserver
from otel_limits.otel import semconv

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.util.types import AnyValue

    from otel_limits.core.usage import Number


# --- metrics --------------------------------------------------------------------------------------

FLUSH_INTERVAL_SECONDS: Final = 1.0
"""Minimum interval between exports triggered by new agents."""


class OtlpObserver(CountingObserver):
    """Counts events in the instruments of an OpenTelemetry meter.

    Args:
        meter: Creates the instruments; without an SDK, they cost almost nothing.
        max_agents: As in `CountingObserver`.
        named: As in `CountingObserver`.
        conventions: As in `CountingObserver`.
        flush: Exports the current values.
        meter_of_child: Returns a new meter for a forked child; `None` if a child must continue
            with the counts of its parent.
    """

    component = "otlp"

    def __init__(
        self,
        meter: Meter,
        max_agents: int = MAX_AGENTS,
        named: Callable[[], Names] = lambda: NO_NAMES,
        *,
        conventions: bool = False,
        flush: Callable[[], object] | None = None,
        meter_of_child: Callable[[], Meter] | None = None,
    ) -> None:
        """Create the instruments."""
        super().__init__(max_agents, named, conventions=conventions)
        self._specs = (*METRICS, *(CONVENTIONAL if conventions else ()))
        self._instruments = {spec.name: make_instrument(meter, spec) for spec in self._specs}
        self._gauges: dict[tuple[MetricSpec, tuple[str, ...]], float] = {}
        """Current values of the gauges."""
        self._meter_of_child = meter_of_child
        self._flush = flush
        self._flushed_at = -FLUSH_INTERVAL_SECONDS
        self._is_due = threading.Lock()
        """Held while an export is due and has not started."""

    def announce(self) -> None:
        """Export the new series at 0, at most once a second.

        A series whose first point is already 1 has no increase, and an invocation may end before
        the next regular export.
        """
        if self._flush is None or not self._is_due.acquire(blocking=False):
            return
        # Not in the agent's thread, which must not wait for the network.
        thread = threading.Thread(target=self._export, name="otel-limits-zeros", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down, and exports then
            self._is_due.release()

    @suppress_errors("otlp")
    def _export(self) -> None:
        time.sleep(max(0.0, self._flushed_at + FLUSH_INTERVAL_SECONDS - time.monotonic()))
        self._flushed_at = time.monotonic()
        # Before the export, which does not include agents that start during it.
        self._is_due.release()
        if self._flush is not None:
            self._flush()

    def after_fork(self) -> None:
        """Count from 0, and renew the lock, which a thread of the parent may have held."""
        super().after_fork()
        self._is_due = threading.Lock()
        self._flushed_at = -FLUSH_INTERVAL_SECONDS
        if self._meter_of_child is not None:
            self._restart_counts(self._meter_of_child)

    @suppress_errors("otlp")
    def _restart_counts(self, meter_of_child: Callable[[], Meter]) -> None:
        meter = meter_of_child()
        self._instruments = {spec.name: make_instrument(meter, spec) for spec in self._specs}
        self._forget_series()
        # Gauges of the parent, e.g. whether limits are enforced, also apply to the child.
        for (spec, labels), value in list(self._gauges.items()):
            self.series(spec, *labels)(value)

    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0 unless it is a gauge."""
        instrument = self._instruments[spec.name]
        method = {"gauge": "set", "minimum": "set", "histogram": "record"}.get(spec.kind, "add")
        update: Any = getattr(instrument, method)
        is_gauge = spec.kind in ("gauge", "minimum")
        attributes = {name: text for name, text in zip(spec.labels, labels, strict=True) if text}

        def series(value: float, exemplar: Exemplar | None = None, /) -> None:
            # `+` turns a bool into a number, because one bool makes the exporter drop all metrics.
            update(+value, attributes, context=context_of(exemplar) if exemplar else None)
            if is_gauge:
                self._gauges[spec, labels] = value

        # A gauge has no initial 0, which would be a value that was never set.
        if spec.kind in ("counter", "updown"):
            series(0)
        return series


def make_instrument(meter: Meter, spec: MetricSpec) -> Any:
    """Create the instrument of `spec`, whose name Prometheus translates to `spec.name`."""
    if spec.kind == "histogram":
        return meter.create_histogram(
            spec.otel_name,
            spec.unit,
            spec.help,
            explicit_bucket_boundaries_advisory=spec.buckets,
        )
    make = {
        "counter": meter.create_counter,
        "updown": meter.create_up_down_counter,
        "gauge": meter.create_gauge,
        "minimum": meter.create_gauge,
    }[spec.kind]
    return make(spec.otel_name, spec.unit, spec.help)


# --- halts, as log events that trace sampling does not affect -------------------------------------


class EventObserver(BaseObserver):
    """Emits the event `otel_limits.halt`.

    Args:
        logger: Emits the event; without an SDK, it does nothing.
    """

    component = "events"

    def __init__(self, logger: Logger) -> None:
        """Subscribe to halts, including would-be halts."""
        self._logger = logger
        self.subscribes_to = {Halt: self._emit}

    def _emit(self, halt: Halt) -> None:
        self._logger.emit(
            LogRecord(
                # Because the SDK sets only the observed timestamp.
                timestamp=time.time_ns(),
                context=context_of_invocation(halt.invocation),
                severity_number=SeverityNumber.WARN,
                severity_text="WARN",
                event_name=semconv.HALT_EVENT,
                body=halt.sentence,
                attributes=attributes_of(halt),
            )
        )


def attributes_of(halt: Halt) -> dict[str, AnyValue]:
    """Return the attributes of the halted span, with agent and invocation ID."""
    attributes: dict[str, AnyValue] = {
        semconv.AGENT_NAME: halt.invocation.agent,
        semconv.INVOCATION_ID: halt.invocation.id,
        semconv.TASK_ID: halt.invocation.task_id,
        semconv.STOP_REASON: halt.reason,
        semconv.STOP_ACTION: halt.action,
    }
    # A kill has no limit.
    if halt.breach is not None:
        attributes |= {
            semconv.LIMIT_NAME: halt.breach.limit,
            semconv.LIMIT_VALUE: as_number(halt.breach.cap),
            semconv.LIMIT_CONSUMED: as_number(halt.breach.observed),
        }
    return attributes


def context_of_invocation(invocation: Invocation) -> Context:
    """Return a context with the agent's span, sampled or not."""
    if invocation.trace_id is None or invocation.span_id is None:
        return Context()
    ids = {"trace_id": invocation.trace_id, "span_id": invocation.span_id}
    return context_of(ids, sampled=invocation.sampled)


def as_number(number: Number) -> int | float:
    """Convert an exact amount to a float, because attributes cannot hold a `Decimal`."""
    # The ledger has the exact amount.
    return float(number) if isinstance(number, Decimal) else number


# --- contexts, from span IDs ----------------------------------------------------------------------


def context_of(ids: Mapping[str, str], *, sampled: bool = True) -> Context:
    """Return a context whose current span has this `trace_id` and `span_id`."""
    span = SpanContext(
        trace_id=int(ids["trace_id"], 16),
        span_id=int(ids["span_id"], 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT),
    )
    return set_span_in_context(NonRecordingSpan(span), Context())
