"""Keeps the metrics in OpenTelemetry instruments, for those who export them over OTLP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.labels import MAX_AGENTS, NO_NAMES, Names
from otel_limits.observers.context import context_of
from otel_limits.observers.conventions import CONVENTIONAL
from otel_limits.observers.counting import CountingObserver
from otel_limits.observers.instruments import METRICS, Exemplar, MetricSpec, Series

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

FLUSH_INTERVAL_SECONDS: Final = 1.0
"""A flood of new agents must not become a flood of exports."""


class OtlpObserver(CountingObserver):
    """Counts events in the instruments of an OpenTelemetry meter.

    Args:
        meter: Makes the instruments; without an SDK behind it, they cost next to nothing.
        max_agents: As in `CountingObserver`.
        named: As in `CountingObserver`.
        conventions: As in `CountingObserver`.
        flush: Exports what there is now.
        meter_of_child: Returns the meter of a forked child, of which nothing is known yet;
            `None` where a child has to go on with the counts of its parent.
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
        """Make the instruments."""
        super().__init__(max_agents, named, conventions=conventions)
        self._specs = (*METRICS, *(CONVENTIONAL if conventions else ()))
        self._instruments = {spec.name: make_instrument(meter, spec) for spec in self._specs}
        self._gauges: dict[tuple[MetricSpec, tuple[str, ...]], float] = {}
        """What the gauges say."""
        self._meter_of_child = meter_of_child
        self._flush = flush
        self._flushed_at = -FLUSH_INTERVAL_SECONDS
        self._is_due = threading.Lock()
        """Held from when there is something to export until it is."""

    def announce(self) -> None:
        """Have the zeros exported, at most once a second.

        A series whose first point is 1 already has no increase. By the next export an invocation
        may be over.
        """
        if self._flush is None or not self._is_due.acquire(blocking=False):
            return
        # Not in the agent's own thread, which is not to wait for a network.
        thread = threading.Thread(target=self._export, name="otel-limits-zeros", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to end, and exports then
            self._is_due.release()

    @suppress_errors("otlp")
    def _export(self) -> None:
        time.sleep(max(0.0, self._flushed_at + FLUSH_INTERVAL_SECONDS - time.monotonic()))
        self._flushed_at = time.monotonic()
        # Before it is exported: what comes meanwhile is not part of it.
        self._is_due.release()
        if self._flush is not None:
            self._flush()

    def after_fork(self) -> None:
        """Count from 0, and renew the lock: the thread that would release it is not there."""
        super().after_fork()
        self._is_due = threading.Lock()
        self._flushed_at = -FLUSH_INTERVAL_SECONDS
        if self._meter_of_child is not None:
            self._count_anew(self._meter_of_child)

    @suppress_errors("otlp")
    def _count_anew(self, meter_of_child: Callable[[], Meter]) -> None:
        meter = meter_of_child()
        self._instruments = {spec.name: make_instrument(meter, spec) for spec in self._specs}
        self._forget_series()
        # What holds in the parent, such as that limits are in force, holds in the child.
        for (spec, labels), value in list(self._gauges.items()):
            self.series(spec, *labels)(value)

    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0 where its kind has a zero."""
        instrument = self._instruments[spec.name]
        take: Any = {"gauge": "set", "minimum": "set", "histogram": "record"}.get(spec.kind, "add")
        take = getattr(instrument, take)
        is_gauge = spec.kind in ("gauge", "minimum")
        attributes = {name: text for name, text in zip(spec.labels, labels, strict=True) if text}

        def series(value: float, exemplar: Exemplar | None = None, /) -> None:
            # A truth value becomes a number: one of them would make the exporter drop all metrics.
            take(+value, attributes, context=context_of(exemplar) if exemplar else None)
            if is_gauge:
                self._gauges[spec, labels] = value

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
