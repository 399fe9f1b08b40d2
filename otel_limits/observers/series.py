"""Creates and caches the series of metrics, independent of the exporter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from otel_limits.observers.protocol import BaseObserver

if TYPE_CHECKING:
    from otel_limits.observers.instruments import MetricSpec, Series


class SeriesKeeper(BaseObserver, ABC):
    """Base class of observers that count, with one cached series per set of labels."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._series: dict[tuple[str, ...], Series] = {}

    @property
    def can_drop(self) -> bool:
        """True if a series can be removed."""
        return False

    @abstractmethod
    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0 unless it is a gauge."""

    def drop_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """Remove one series of a gauge, if possible."""

    def series(self, spec: MetricSpec, *labels: str) -> Series:
        """Return one series, creating it if it is new."""
        return self._series.get((spec.name, *labels)) or self._create(spec, labels)

    def drop(self, spec: MetricSpec, *labels: str) -> None:
        """Set the series of a gauge to 0 and remove it, if possible."""
        series = self._series.pop((spec.name, *labels), None)
        if series is None:
            return
        series(0)  # for exporters that cannot remove it
        self.drop_series(spec, labels)

    def _create(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create a series at 0, with one for each other value of its last label."""
        # Prometheus sees no increase in a series whose first sample is already 1.
        for each in (labels, *((*labels[:-1], value) for value in spec.values)):
            if (spec.name, *each) not in self._series:
                self._series[(spec.name, *each)] = self.make_series(spec, each)
        return self._series[(spec.name, *labels)]
