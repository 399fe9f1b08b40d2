"""Client for the queries of a dashboard."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from otel_limits.dashboards import api

if TYPE_CHECKING:
    from tests.dashboards.panels import Target, TimeRange


@dataclass(frozen=True, slots=True)
class Line:
    """One series of an answer."""

    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        """Its newest value."""
        return self.values[-1]

    def named(self, legend: str) -> str:
        """Name it as a panel's legend would."""
        if legend == "__auto":
            # As Grafana names what has no legend: by all labels.
            return ", ".join(f"{name}={value}" for name, value in sorted(self.labels.items()))
        return re.sub(r"{{(\w+)}}", lambda found: self.labels.get(found[1], ""), legend)


class Prometheus(api.Prometheus):
    """The package's client, which also answers the queries of panels."""

    def answer(self, target: Target, window: TimeRange) -> tuple[Line, ...]:
        """Ask one query of a panel, as Grafana would.

        Raises:
            PrometheusError: It did not answer.
        """
        expr = window.fill(target.expr)
        if target.instant:
            return self.query(expr, window.end)
        # With milliseconds: a step of less than a second would otherwise never move on.
        found = self.series(
            "query_range",
            query=expr,
            start=f"{window.start:.3f}",
            end=f"{window.end:.3f}",
            step=f"{window.step:.3f}",
        )
        return _lines((each["metric"], each["values"]) for each in found)

    def query(self, expr: str, time: float) -> tuple[Line, ...]:
        """Evaluate a query at one time.

        Raises:
            PrometheusError: It did not answer.
        """
        found = self.series("query", query=expr, time=f"{time:.3f}")
        return _lines((each["metric"], [each["value"]]) for each in found)


def _lines(series: Any) -> tuple[Line, ...]:
    """Turn answers into series, without NaN and infinities: they cannot be drawn."""
    lines = []
    for labels, points in series:
        known = [(float(time), float(value)) for time, value in points if _is_number(value)]
        # A series without a single number is left out, as a panel would show an empty legend for
        # it.
        if known:
            times, values = zip(*known, strict=True)
            lines.append(Line(labels, times, values))
    return tuple(lines)


def _is_number(text: str) -> bool:
    return math.isfinite(float(text))
