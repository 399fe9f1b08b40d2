"""What somebody who knows metrics said at one time, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from otel_limits.observers import instruments as table

PROCESS_START: Final = "process_start_time_seconds"
"""What prometheus_client tells of the process itself (on Linux): when it began."""

NUMBERS: Final = frozenset(
    spec.name
    for spec in (
        *(table.TURNS, table.TOKENS, table.COST, table.UNPRICED_TOKENS, table.STOPS),
        *(table.IN_PROGRESS, table.LIMIT, table.INTERNAL_ERRORS, table.POLICY_VALID),
        *(table.QUOTA_USED, table.QUOTA_RESERVED, table.QUOTA_LIMIT, table.QUOTA_RESETS),
        *(table.ENFORCING, table.BUILD_INFO),
    )
)
"""Counters and gauges that are read whole. What is not read costs nothing: a fleet has thousands of
series."""
FAILED: Final = {table.MODEL_CALLS.name: 'kind="failed"', table.TOOL_CALLS.name: 'status="error"'}
"""Counters of which only the errors are read."""
SUMS: Final = frozenset(
    f"{spec.name}_sum" for spec in (table.INVOCATION_TURNS, table.INVOCATION_TOKENS)
)
"""What is read of histograms of which only the sum is of interest."""

OWN_LABELS: Final = frozenset(
    {"__name__", "le", *(label for spec in table.METRICS for label in spec.label_names)}
)
"""Labels that our metrics have of their own; all others say which process it is of."""

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Sorted, so that the same labels are equal."""


class ScrapeError(Exception):
    """Somebody who was to tell metrics did not; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of one series."""

    name: str
    labels: Mapping[str, str]
    value: float
    trace_id: str | None = None
    """Of an example of what was counted last, where there is one."""

    @property
    def agent(self) -> str:
        """The agent that it is about."""
        return self.labels.get("agent", "")

    def series(self) -> Labels:
        """Everything that tells its series from others."""
        return (("__name__", self.name), *sorted(self.labels.items()))

    def process(self) -> Labels:
        """The labels that say which process it is of, where several stand behind one address."""
        return process_of(sorted(self.labels.items()))


def process_of(labels: Iterable[tuple[str, str]]) -> Labels:
    """Return those of some labels that say which process it is of."""
    return tuple(each for each in labels if each[0] not in OWN_LABELS)


@dataclass(frozen=True, slots=True)
class Scrape:
    """Everything that was told at one time."""

    feed: str
    """Who told it, as it may be shown."""
    at: float
    """Seconds since the epoch."""
    samples: Sequence[Sample] = ()
    error: str = ""
    """Why there are no samples, as a sentence."""
    is_past: bool = False
    """True for what a feed kept from before somebody looked."""


class Feed(Protocol):
    """Tells the metrics of one process, or of many."""

    @property
    def shown(self) -> str:
        """Its address, as it may be shown."""

    @property
    def rate_seconds(self) -> float:
        """Over how long turns and tokens a minute are to be counted."""

    def history(self, now: float) -> Iterable[Scrape]:
        """What it knows of the last hour, the oldest first; nothing where it keeps nothing.

        Raises:
            ScrapeError: It does not tell.
        """

    def samples(self, now: float) -> Sequence[Sample]:
        """What it says now.

        Raises:
            ScrapeError: It does not tell.
        """


def scrape(feed: Feed, now: float) -> Scrape:
    """Ask once: where there is no answer, the scrape says why."""
    try:
        return Scrape(feed.shown, now, feed.samples(now))
    except ScrapeError as error:
        return Scrape(feed.shown, now, error=str(error))
