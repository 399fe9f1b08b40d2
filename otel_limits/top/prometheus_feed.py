"""Reads the metrics of a whole fleet from a Prometheus."""

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
    Sample,
    Scrape,
    ScrapeError,
)

TIMEOUT_SECONDS: Final = 10.0
"""Longer than of an endpoint: the history of a large fleet is megabytes."""

HISTORY_SECONDS: Final = 3600
STEP_SECONDS: Final = 60

NAMES: Final = "|".join(sorted({*NUMBERS, *SUMS, f"{table.BUDGET_USED.name}_bucket"}))
QUERIES: Final = (
    f'{{__name__=~"{NAMES}"}}',
    *(f"{name}{{{only}}}" for name, only in FAILED.items()),
    f"{PROCESS_START} and on (job, instance) {table.BUILD_INFO.name}",
)


class PrometheusFeed:
    """A Prometheus that scrapes the fleet.

    Args:
        url: Its address, such as http://localhost:9090.
        authorization: Value of the header `Authorization`, where it asks for one.
    """

    def __init__(self, url: str, authorization: str | None = None) -> None:
        """Keep the address."""
        self.shown = redact_url(url)
        self._prometheus = Prometheus(url, authorization, TIMEOUT_SECONDS)

    @property
    def rate_seconds(self) -> float:
        """Five minutes: it asks the fleet every 15 seconds, or every minute or two."""
        return 300.0

    def history(self, now: float) -> Iterator[Scrape]:
        """Ask for the last hour, a sample for each minute.

        Raises:
            ScrapeError: It does not answer.
        """
        by_time: dict[float, list[Sample]] = {}
        window = {"start": f"{now - HISTORY_SECONDS:.3f}", "end": f"{now:.3f}"}
        # Time by time: a follower compares scrapes in the order in which they happened.
        for at, sample in self._ask("query_range", **window, step=str(STEP_SECONDS)):
            by_time.setdefault(at, []).append(sample)
        for at, samples in sorted(by_time.items()):
            yield Scrape(self.shown, at, samples, is_past=True)

    def samples(self, now: float) -> Sequence[Sample]:
        """Ask for what was scraped last.

        Raises:
            ScrapeError: It does not answer.
        """
        samples = tuple(sample for _, sample in self._ask("query", time=f"{now:.3f}"))
        # An answer without any of our series is an answer all the same, and means that nobody is
        # scraped.
        if not samples:
            raise ScrapeError(f"{self.shown} has no metrics of otel-limits now.")
        return samples

    def _ask(self, path: str, **parameters: str) -> Sequence[tuple[float, Sample]]:
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
            raise ScrapeError(f"{self.shown} does not answer like a Prometheus.") from None


def _samples(series: Mapping[str, Any]) -> Iterator[tuple[float, Sample]]:
    """Yield every point of a series of an answer, with its time."""
    labels = dict(series["metric"])
    name = labels.pop("__name__", "")
    # A query for one time answers with a value, one for a window with values.
    for at, text in series.get("values") or [series["value"]]:
        # One "NaN" would make every sum that has it a NaN.
        if math.isfinite(value := float(text)):
            yield float(at), Sample(name, labels, value)
