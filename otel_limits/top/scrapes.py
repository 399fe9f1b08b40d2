"""Samples of metrics and the protocol of their sources."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from otel_limits.observers import instruments as table

PROCESS_START: Final = "process_start_time_seconds"
"""Start time of a process, exported by prometheus_client on Linux."""

NUMBERS: Final = frozenset(
    spec.name
    for spec in (
        *(table.TURNS, table.TOKENS, table.COST, table.UNPRICED_TOKENS, table.STOPS),
        table.TOOL_REFUSALS,
        *(table.IN_PROGRESS, table.LIMIT, table.INTERNAL_ERRORS, table.POLICY_VALID),
        *(table.QUOTA_USED, table.QUOTA_RESERVED, table.QUOTA_LIMIT, table.QUOTA_RESETS),
        *(table.ENFORCING, table.BUILD_INFO),
    )
)
"""Counters and gauges of which all series are read. Skipping the others saves time."""
FAILED: Final = {table.MODEL_CALLS.name: 'kind="failed"', table.TOOL_CALLS.name: 'status="error"'}
"""Counters of which only errors are read."""
SUMS: Final = frozenset(
    f"{spec.name}_sum" for spec in (table.INVOCATION_TURNS, table.INVOCATION_TOKENS)
)
"""Histograms of which only the sum is read."""

OWN_LABELS: Final = frozenset(
    {"__name__", "le", *(label for spec in table.METRICS for label in spec.label_names)}
)
"""Labels of otel-limits metrics. All others identify the process."""

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Sorted pairs, for comparison."""


class ScrapeError(Exception):
    """A feed is unavailable."""


@dataclass(frozen=True, slots=True)
class ScrapedSample:
    """One value of one series."""

    name: str
    labels: Mapping[str, str]
    value: float
    trace_id: str | None = None
    """Trace ID of an exemplar."""

    @property
    def agent(self) -> str:
        """Value of the label `agent`."""
        return self.labels.get("agent", "")

    def series(self) -> Labels:
        """Return the identity of its series."""
        return (("__name__", self.name), *sorted(self.labels.items()))

    def process(self) -> Labels:
        """Return the labels that identify its process, as one address may serve several."""
        return process_of(sorted(self.labels.items()))


def process_of(labels: Iterable[tuple[str, str]]) -> Labels:
    """Return the labels that identify a process."""
    return tuple(each for each in labels if each[0] not in OWN_LABELS)


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one feed at one time."""

    feed: str
    """Address of the feed, without credentials."""
    at: float
    """Seconds since the epoch."""
    samples: Sequence[ScrapedSample] = ()
    error: str = ""
    """Why there are no samples."""
    is_past: bool = False
    """Whether it is part of the history from before `top` was started."""


class Feed(Protocol):
    """A source of metrics of one or more processes."""

    @property
    def shown(self) -> str:
        """Address without credentials."""

    @property
    def rate_seconds(self) -> float:
        """Window of turn and token rates."""

    def history(self, now: float) -> Iterable[Scrape]:
        """Return the scrapes of the last hour, oldest first, if the feed stores any.

        Raises:
            ScrapeError: The feed is unavailable.
        """

    def samples(self, now: float) -> Sequence[ScrapedSample]:
        """Return the current samples.

        Raises:
            ScrapeError: The feed is unavailable.
        """


def first_scrapes(feed: Feed) -> Iterator[Scrape]:
    """Yield the history of a feed and its current scrape, which contains the error if it fails."""
    with contextlib.suppress(ScrapeError):
        yield from feed.history(time.time())
    yield scrape(feed, time.time())


def scrape(feed: Feed, now: float) -> Scrape:
    """Scrape a feed; the scrape contains the error if it fails."""
    try:
        return Scrape(feed.shown, now, feed.samples(now))
    except ScrapeError as error:
        return Scrape(feed.shown, now, error=str(error))
