"""Keeps the metrics in OpenTelemetry instruments, for those who export them over OTLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from otel_limits.core.labels import MAX_AGENTS, NO_NAMES, Names
from otel_limits.observers.context import context_of
from otel_limits.observers.counting import CountingObserver
from otel_limits.observers.instruments import METRICS, Exemplar, MetricSpec, Series

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter


class OtlpObserver(CountingObserver):
    """Counts facts in the instruments of an OpenTelemetry meter.

    Args:
        meter: Makes the instruments; without an SDK behind it, they cost next to nothing.
        max_agents: As in `CountingObserver`.
        named: As in `CountingObserver`.
    """

    component = "otlp"

    def __init__(
        self,
        meter: Meter,
        max_agents: int = MAX_AGENTS,
        named: Callable[[], Names] = lambda: NO_NAMES,
    ) -> None:
        """Make the instruments."""
        super().__init__(max_agents, named)
        self._instruments = {spec.name: make_instrument(meter, spec) for spec in METRICS}

    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0 where its kind has a zero."""
        instrument = self._instruments[spec.name]
        take: Any = {"gauge": "set", "minimum": "set", "histogram": "record"}.get(spec.kind, "add")
        take = getattr(instrument, take)
        attributes = dict(zip(spec.labels, labels, strict=True))

        def series(value: float, exemplar: Exemplar | None = None, /) -> None:
            # A truth value becomes a number: one of them would make the exporter drop all metrics.
            take(+value, attributes, context=context_of(exemplar) if exemplar else None)

        # A gauge has no 0 to begin with: it would claim a value that nobody has set.
        if spec.kind in ("counter", "updown"):
            series(0)
        return series


def make_instrument(meter: Meter, spec: MetricSpec) -> Any:
    """Make the instrument of `spec`, whose name Prometheus translates to that of `spec`."""
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
