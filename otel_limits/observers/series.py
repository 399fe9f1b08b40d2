"""Keeps the series of metrics, each made once, for whichever way they leave the process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from otel_limits.observers.protocol import BaseObserver

if TYPE_CHECKING:
    from otel_limits.observers.instruments import MetricSpec, Series


class SeriesKeeper(BaseObserver, ABC):
    """Has the series of an observer that counts."""

    def __init__(self) -> None:
        """Begin with no series."""
        self._series: dict[tuple[str, ...], Series] = {}

    @property
    def can_drop(self) -> bool:
        """True where a series can be taken back."""
        return False

    @abstractmethod
    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0 where its kind has a zero."""

    def drop_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """Take one series of a gauge back, where that can be done."""

    def series(self, spec: MetricSpec, *labels: str) -> Series:
        """Return one series, created when it is new."""
        return self._series.get((spec.name, *labels)) or self._create(spec, labels)

    def drop(self, spec: MetricSpec, *labels: str) -> None:
        """Forget the series of a gauge that is not shown any more."""
        series = self._series.pop((spec.name, *labels), None)
        if series is None:
            return
        series(0)  # where it stays, it says that its window is over
        self.drop_series(spec, labels)

    def _create(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create a series, and those of the same list, at 0: a first failure must have a rate."""
        # Prometheus sees no increase in a series whose first sample is 1 already.
        for each in (labels, *((*labels[:-1], value) for value in spec.values)):
            if (spec.name, *each) not in self._series:
                self._series[(spec.name, *each)] = self.make_series(spec, each)
        return self._series[(spec.name, *labels)]
