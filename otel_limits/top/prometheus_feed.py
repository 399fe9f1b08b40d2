"""Reads the metrics of a fleet from a Prometheus server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from otel_limits.core.secrets import redact_url
from otel_limits.dashboards.api import Prometheus, PrometheusError
from otel_limits.observers import instruments as table
from otel_limits.top.scrapes import (
    FAILED,
    NUMBERS,
    PROCESS_START,
    SUMS,
    Scrape,
    ScrapedSample,
    ScrapeError,
)

TIMEOUT_SECONDS: Final = 10.0
"""Longer than for endpoints, as the history of a large fleet takes megabytes."""

HISTORY_SECONDS: Final = 3600
STEP_SECONDS: Final = 60

NAMES: Final = "|".join(sorted({*NUMBERS, *SUMS, f"{table.BUDGET_USED.name}_bucket"}))
QUERIES: Final = (
    f'{{__name__=~"{NAMES}"}}',
    *(f"{name}{{{only}}}" for name, only in FAILED.items()),
    f"{PROCESS_START} and on (job, instance) {table.BUILD_INFO.name}",
)


class PrometheusFeed:
    """A Prometheus server that scrapes the fleet.

    Args:
        url: E.g. http://localhost:9090.
        authorization: Value of the `Authorization` header.
    """

    rate_seconds: Final = 300.0
    """Scrape intervals are up to two minutes."""

    def __init__(self, url: str, authorization: str | None = None) -> None:
        """Create a client for the server."""
        self.shown = redact_url(url)
        self._prometheus = Prometheus(url, authorization, TIMEOUT_SECONDS)

    def history(self, now: float) -> Iterator[Scrape]:
        """Query the last hour, one sample per minute.

        Raises:
            ScrapeError: The query failed.
        """
        by_time: dict[float, list[ScrapedSample]] = {}
        window = {"start": f"{now - HISTORY_SECONDS:.3f}", "end": f"{now:.3f}"}
        # Grouped by time, as the follower compares consecutive scrapes.
        for at, sample in self._query("query_range", **window, step=str(STEP_SECONDS)):
            by_time.setdefault(at, []).append(sample)
        for at, samples in sorted(by_time.items()):
            yield Scrape(self.shown, at, samples, is_past=True)

    def samples(self, now: float) -> Sequence[ScrapedSample]:
        """Query the latest samples.

        Raises:
            ScrapeError: The query failed or returned no metrics.
        """
        samples = tuple(sample for _, sample in self._query("query", time=f"{now:.3f}"))
        if not samples:
            raise ScrapeError(f"{self.shown} has no current otel-limits metrics.")
        return samples

    def _query(self, path: str, **parameters: str) -> Sequence[tuple[float, ScrapedSample]]:
        try:
            return [
                pair
                for query in QUERIES
                for series in self._prometheus.series(path, query=query, **parameters)
                for pair in _samples(series)
            ]
        except PrometheusError as error:
            raise ScrapeError(str(error)) from None
        except (KeyError, TypeError, ValueError):
            raise ScrapeError(f"{self.shown} did not return a Prometheus response.") from None


def _samples(series: Mapping[str, Any]) -> Iterator[tuple[float, ScrapedSample]]:
    """Yield all points of a series with their times."""
    labels = dict(series["metric"])
    name = labels.pop("__name__", "")
    # An instant query returns one value, a range query several.
    for at, text in series.get("values") or [series["value"]]:
        # NaN would make every sum NaN.
        if math.isfinite(value := float(text)):
            yield float(at), ScrapedSample(name, labels, value)
