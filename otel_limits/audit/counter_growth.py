"""The growth of counters in a Prometheus, between two times.

`increase()` would extrapolate to the edges of the window. Here the growth between consecutive
samples is added up instead, with the time between them, as the exact time of an increment is
unknown.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from otel_limits.core.errors import LedgerError
from otel_limits.dashboards.api import Prometheus, PrometheusError

STEP_SECONDS: Final = 6 * 60 * 60
"""Length of the portions in which the window is fetched, with every sample of every counter."""
STALE_SECONDS: Final = 5 * 60
"""Prometheus' own threshold for a gap (`query.lookback-delta`): how far beyond both ends of the
window adjacent samples are searched."""
LONG_AGO_SECONDS: Final = 7 * 24 * 60 * 60
"""How far back the last sample is searched if there is none just before the window."""

BEGINNINGS: Final = "process_start_time_seconds"
"""Start time of each process, exported by every Prometheus client library on Linux."""
SIGN_OF_LIFE: Final = "otel_limits_build_info"
"""Exported from the first scrape of a process."""

SeriesLabels: TypeAlias = tuple[str, ...]
Ask: TypeAlias = Callable[[str, float], list[dict[str, Any]]]


@dataclass(slots=True)
class Growth:
    """Increase of a counter in a window."""

    least: float = 0.0
    most: float = 0.0
    restarts: int = 0
    """Restarted processes: what they counted after their last scrape is lost."""

    def merge(self, other: Growth) -> None:
        """Add the growth of another series."""
        self.least += other.least
        self.most += other.most
        self.restarts += other.restarts


@dataclass(slots=True)
class ScrapeTarget:
    """One process, or several that share metrics files."""

    starts: list[float] = field(default_factory=list)
    """Start times of its processes, if known."""
    scrapes: array[float] = field(default_factory=lambda: array("d"))

    def start_within(self, after: float, until: float) -> float | None:
        """Return when a process last started in an interval, if one did."""
        place = bisect.bisect_right(self.starts, until)
        found = self.starts[place - 1] if place else -math.inf
        return found if found > after else None

    def absent_at(self, before: float) -> float:
        """Return when a series did not exist yet that has its first sample at `before`."""
        place = bisect.bisect_left(self.scrapes, before)
        scraped = self.scrapes[place - 1] if place else -math.inf
        return max(scraped, self.start_within(-math.inf, before) or -math.inf)

    def last_scrape(self, until: float) -> float | None:
        """Return its last scrape if it is still alive and will be scraped after `until`."""
        if not self.scrapes or self.scrapes[-1] >= until:
            return None
        last = self.scrapes[-1]
        # A process that missed two scrapes is considered dead.
        interval = last - self.scrapes[-2] if len(self.scrapes) > 1 else STALE_SECONDS
        return last if until - last <= min(2 * interval, STALE_SECONDS) else None


class Counters:
    """Reads counters of a Prometheus server between two times.

    Args:
        ask: Evaluates an expression at a time, and returns its series.
        since: Start of the window, in seconds since the epoch.
        until: Its end.
        jobs: The jobs to read; all if empty.
    """

    def __init__(self, ask: Ask, since: float, until: float, jobs: Sequence[str]) -> None:
        """Read the scrapes and start times of all processes."""
        self._ask = ask
        self._chosen = jobs
        self.since = since
        self.until = until
        self._targets: dict[str, ScrapeTarget] = {}
        for labels, samples in self._samples(self._of_chosen(SIGN_OF_LIFE)):
            self._target(labels).scrapes.extend(at for at, _ in samples)
        self.jobs: Final = {json.loads(target).get("job", "") for target in self._targets}
        """All jobs that were found."""
        for labels, samples in self._samples(_of_jobs(BEGINNINGS, self.jobs)):
            target = self._targets.get(_target_key(labels))
            if target is not None:
                # Several processes behind one address, e.g. workers, have one start each.
                target.starts = sorted({*target.starts, *(value for _, value in samples)})

    @property
    def last_scrape(self) -> float:
        """Return until when counts of live processes are complete: the end, if long past."""
        seen = (target.last_scrape(self.until) for target in self._targets.values())
        return min((at for at in seen if at is not None), default=self.until)

    def growth(self, metric: str, *names: str) -> dict[SeriesLabels, Growth]:
        """Return the growth of a counter, by some of its labels.

        A counter that falls was restarted, and a new one started at 0.
        """
        metric = self._of_chosen(metric)
        last: dict[str, tuple[float, float]] = {}
        every: dict[str, tuple[Mapping[str, str], Growth]] = {}
        missing: dict[str, tuple[float, float]] = {}
        for labels, samples in self._samples(metric):
            key = _identity(labels)
            _, grown = every.setdefault(key, (labels, Growth()))
            for sample in samples:
                before = last.get(key)
                if before is not None:
                    self._add(grown, self._target(labels), before, sample)
                elif sample[1]:
                    missing[key] = sample  # it is new, or was last seen long ago
                last[key] = sample
        # Only if needed, as it reads a week of samples.
        known = self._long_ago(metric) if missing else {}
        for key, sample in missing.items():
            labels, grown = every[key]
            target = self._target(labels)
            before = known.get(key, (target.absent_at(sample[0]), 0.0))
            self._add(grown, target, before, sample)
        total: dict[SeriesLabels, Growth] = {}
        for labels, grown in every.values():
            chosen = tuple(labels.get(name, "") for name in names)
            total.setdefault(chosen, Growth()).merge(grown)
        return total

    def _add(
        self,
        grown: Growth,
        target: ScrapeTarget,
        before: tuple[float, float],
        after: tuple[float, float],
    ) -> None:
        """Add the growth between consecutive samples."""
        (earlier, low), (later, high) = before, after
        if later <= self.since or earlier >= self.until:
            return
        started = target.start_within(earlier, later)
        least = most = high - low
        if high < low or started is not None:
            # Restarted from 0, when the process started.
            least = most = high
            earlier = earlier if started is None else started
            grown.restarts += low > 0
        elif later - earlier > STALE_SECONDS and not target.starts:
            most = high  # it may have restarted during the gap
        if earlier >= self.since and later <= self.until:
            grown.least += least
        grown.most += most

    def _long_ago(self, metric: str) -> dict[str, tuple[float, float]]:
        """Return time and value of each series' last sample before the window."""
        # Two queries, as no function of PromQL returns both a value and its time.
        at, window = self.since - STALE_SECONDS, f"{LONG_AGO_SECONDS}s"
        # Steps shorter than Prometheus' gap meet every last sample.
        times = self._ask(f"max_over_time(timestamp({metric})[{window}:{STALE_SECONDS}s])", at)
        values = self._ask(f"last_over_time({metric}[{window}])", at)
        found = {_identity(each["metric"]): float(each["value"][1]) for each in times}
        return {
            key: (found[key], float(each["value"][1]))
            for each in values
            if (key := _identity(each["metric"])) in found
        }

    def _samples(
        self, selector: str
    ) -> Iterator[tuple[Mapping[str, str], list[tuple[float, float]]]]:
        """Iterate over each series' samples in and around the window, in portions."""
        seen: dict[str, float] = {}
        begin, end = self.since - STALE_SECONDS, self.until + STALE_SECONDS
        while begin < end:
            upto = min(begin + STEP_SECONDS, end)
            span = f"[{round((upto - begin) * 1000)}ms]"
            for series in self._ask(f"{selector}{span}", upto):
                labels, key = series["metric"], _identity(series["metric"])
                # Before Prometheus 3, portions included both of their ends.
                samples = [
                    (float(at), float(value))
                    for at, value in series["values"]
                    if at > seen.get(key, -math.inf)
                ]
                if samples:
                    seen[key] = samples[-1][0]
                    yield labels, samples
            begin = upto

    def _of_chosen(self, selector: str) -> str:
        return _of_jobs(selector, self._chosen) if self._chosen else selector

    def _target(self, labels: Mapping[str, str]) -> ScrapeTarget:
        return self._targets.setdefault(_target_key(labels), ScrapeTarget())


def counters_of(url: str, authorization: str | None) -> Ask:
    """Create a function that queries a Prometheus server.

    Raises:
        LedgerError: From the function, if the server fails.
    """
    prometheus = Prometheus(url, authorization)

    def ask(expression: str, at: float) -> list[dict[str, Any]]:
        try:
            # In milliseconds, the resolution of Prometheus.
            return prometheus.series("query", query=expression, time=f"{at:.3f}")
        except PrometheusError as error:
            raise LedgerError(str(error)) from None

    return ask


@functools.cache
def _own_labels() -> frozenset[str]:
    """Return the labels of the metrics themselves; the others identify the process."""
    from otel_limits.observers.metrics import METRICS

    return frozenset({"__name__", "version"}.union(*(metric.labels for metric in METRICS)))


def _target_key(labels: Mapping[str, str]) -> str:
    chosen = {name: value for name, value in labels.items() if name not in _own_labels()}
    return json.dumps(chosen, sort_keys=True)


def _identity(labels: Mapping[str, str]) -> str:
    chosen = {name: value for name, value in labels.items() if name != "__name__"}
    return json.dumps(chosen, sort_keys=True)


def _of_jobs(selector: str, jobs: Iterable[str]) -> str:
    """Restrict a selector to some jobs, as others may have thousands of processes."""
    metric, _, labels = selector.partition("{")
    pattern = "|".join(map(re.escape, sorted(set(jobs))))
    rest = f",{labels}" if labels else "}"
    return f"{metric}{{job=~{json.dumps(pattern)}{rest}"
