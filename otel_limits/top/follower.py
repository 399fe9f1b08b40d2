"""Computes the increases of counters between scrapes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, TypeAlias

from otel_limits.core.events import CUT_SHORT
from otel_limits.observers import instruments as table
from otel_limits.top.fleet import RecentHalt
from otel_limits.top.scrapes import PROCESS_START, Labels, Scrape, ScrapedSample, process_of

Key: TypeAlias = tuple[str, ...]
"""A counter, e.g. `("turns", "researcher")`."""


class Increases:
    """Increases of counters in a sliding window.

    Args:
        seconds: Length of the window.
        step: Seconds per bucket, the precision of the window.
    """

    def __init__(self, seconds: float, step: float) -> None:
        """Create an empty window."""
        self.seconds: Final = seconds
        self._step = step
        self._buckets: dict[int, Counter[Key]] = {}

    def add(self, key: Key, amount: float, at: float, since: float | None = None) -> None:
        """Add an increase.

        Args:
            key: The counter.
            amount: Its increase.
            at: When it was observed, in seconds since the epoch.
            since: The previous observation. The increase is spread evenly between the two; without
                it, all of it counts at `at`.
        """
        last = int(at // self._step)
        # The bucket after the previous observation, which already included that one.
        first = last if since is None else min(last, int(since // self._step) + 1)
        for index in range(first, last + 1):
            self._buckets.setdefault(index, Counter())[key] += amount / (last + 1 - first)  # type: ignore[assignment]

    def over(self, now: float, seconds: float) -> dict[Key, float]:
        """Return the increases of the last `seconds`."""
        expired = int((now - self.seconds) // self._step)
        for index in [index for index in self._buckets if index <= expired]:
            del self._buckets[index]
        summed: dict[Key, float] = {}
        for index, bucket in self._buckets.items():
            if index > (now - seconds) // self._step:
                for key, amount in bucket.items():
                    summed[key] = summed.get(key, 0) + amount
        return summed


HOUR_SECONDS: Final = 3600.0
USD_SECONDS: Final = 300.0
"""Window of the cost rate. Calls take many seconds, so one minute contains too few of them."""
LEAST_SECONDS: Final = 5.0
"""Minimum window of a rate."""
GAP_SECONDS: Final = 120.0
"""After a longer gap between scrapes, an increase is not a current rate."""
HALTS_KEPT: Final = 100
UNKNOWN: Final = 0.0
"""An unknown time."""

RATED: Final = {
    table.TURNS.name: "turns",
    table.TOKENS.name: "tokens",
    table.COST.name: "usd",
    table.UNPRICED_TOKENS.name: "unpriced",
}
ERRORS: Final = {
    table.MODEL_CALLS.name: ("kind", "failed", "model_calls"),
    table.TOOL_CALLS.name: ("status", "error", "tool_calls"),
    table.STOPS.name: ("reason", "error", "invocations"),
}
"""The label and value that mark an error, and what it counts as."""

ProcessKey: TypeAlias = tuple[str, Labels]
"""A feed, and the labels that identify a process."""
SeriesKey: TypeAlias = tuple[str, Labels]


class Follower:
    """Compares each scrape with the previous one, series by series, allowing for counter resets.

    Args:
        began: When `top` was started. Halts since then are listed.
    """

    def __init__(self, began: float) -> None:
        """Create a follower without scrapes."""
        self._began = began
        self._values: dict[SeriesKey, tuple[float, float]] = {}
        """Last value of each series and its time."""
        self._swept = began
        self._known_since: dict[ProcessKey, float] = {}
        """Start of the time for which a process's counts are known completely."""
        self._scraped: dict[str, float] = {}
        self.present: dict[str, Scrape] = {}
        """Latest scrape of each available feed."""
        self.errors: dict[str, str] = {}
        """Error message of each feed, empty if there is none."""
        self.rates: Final = Increases(USD_SECONDS, step=1)
        self.hour: Final = Increases(HOUR_SECONDS, step=60)
        self.halts: Final[deque[RecentHalt]] = deque(maxlen=HALTS_KEPT)
        self.first: float | None = None
        """Time of the first successful scrape."""

    def add(self, scrape: Scrape) -> None:
        """Count the increases since the previous scrape."""
        self.errors[scrape.feed] = scrape.error
        if scrape.error:
            self.present.pop(scrape.feed, None)
            return
        self.first = scrape.at if self.first is None else self.first
        before = self._scraped.get(scrape.feed)
        is_continuous = before is not None and scrape.at - before <= GAP_SECONDS
        new = self._new_processes(scrape, is_first=before is None)
        for sample in scrape.samples:
            rated, hour = RATED.get(sample.name), hourly_key(sample)
            if rated is None and hour is None:
                continue
            amount = self._growth(scrape, sample)
            began = new.get((scrape.feed, sample.process()))
            if amount <= 0 or began == UNKNOWN:
                continue
            if hour is not None:
                self.hour.add(hour, amount, scrape.at)
                # Halts before the start of `top` count, but are not listed.
                is_recent = not scrape.is_past and (began is None or began >= self._began)
                if is_recent and hour[0] == "halt":
                    self._record_halt(scrape, sample, round(amount))
            # The time of counts from before the first scrape of a process is unknown.
            elif rated is not None and is_continuous and began is None:
                self.rates.add((rated, sample.agent), amount, scrape.at, before)
        self.present[scrape.feed] = scrape
        self._scraped[scrape.feed] = scrape.at
        self._sweep(scrape.at)

    def halts_since(self, now: float) -> float:
        """Return since when the halts of all present processes are known, at most an hour ago."""
        return max(
            [now - HOUR_SECONDS, *(self._known_since[each] for each in self._present_processes())]
        )

    def _present_processes(self) -> set[ProcessKey]:
        """Return the processes in the latest scrapes."""
        return {
            (scrape.feed, sample.process())
            for scrape in self.present.values()
            for sample in scrape.samples
        }

    def _new_processes(self, scrape: Scrape, *, is_first: bool) -> Mapping[ProcessKey, float]:
        """Return the processes that were not scraped before, with their start times.

        The time is `UNKNOWN` if they may have been running for more than an hour.
        """
        new: dict[ProcessKey, float] = {}
        for sample in scrape.samples:
            process = (scrape.feed, sample.process())
            if process not in self._known_since:
                began = sample.value if sample.name == PROCESS_START else UNKNOWN
                new[process] = max(began, new.get(process, UNKNOWN))
        for process, began in new.items():
            if began == UNKNOWN and not is_first:
                # It was not in the previous scrape of this feed.
                new[process] = scrape.at
            elif began <= scrape.at - HOUR_SECONDS:
                # An unknown part of its counts is older than an hour.
                new[process] = UNKNOWN
            self._known_since[process] = scrape.at if new[process] == UNKNOWN else 0.0
        return new

    def _growth(self, scrape: Scrape, sample: ScrapedSample) -> float:
        """Return the increase of a series, from 0 if it is new or was reset."""
        key = (scrape.feed, sample.series())
        before, _ = self._values.get(key, (0.0, 0.0))
        self._values[key] = (sample.value, scrape.at)
        return sample.value - before if sample.value >= before else sample.value

    def _sweep(self, now: float) -> None:
        """Drop series and feeds not seen for an hour, as pods come and go."""
        if now - self._swept <= HOUR_SECONDS:
            return
        self._swept, since = now, now - HOUR_SECONDS
        self._values = {key: each for key, each in self._values.items() if each[1] > since}
        self._scraped = {feed: at for feed, at in self._scraped.items() if at > since}
        # A process that returns later counts as new.
        present = self._present_processes() | {
            (feed, process_of(labels)) for feed, labels in self._values
        }
        self._known_since = {key: at for key, at in self._known_since.items() if key in present}

    def _record_halt(self, scrape: Scrape, sample: ScrapedSample, count: int) -> None:
        """Add a halt to the list of recent ones."""
        self.halts.appendleft(
            RecentHalt(
                at=scrape.at,
                agent=sample.agent,
                reason=sample.labels.get("reason", ""),
                action=sample.labels.get("action", ""),
                count=count,
                trace_id=sample.trace_id,
            )
        )


def hourly_key(sample: ScrapedSample) -> Key | None:
    """Return the key of a sample in the counts of the last hour, if it is counted there."""
    labels, agent = sample.labels, sample.agent
    if sample.name == table.STOPS.name and labels.get("action") in CUT_SHORT:
        return ("halt", agent, labels.get("reason", ""))
    if sample.name == table.TOOL_REFUSALS.name and labels.get("action") == "refused":
        return ("refusal", agent, labels.get("tool", ""))
    if sample.name in ERRORS:
        label, value, what = ERRORS[sample.name]
        return ("error", agent, what) if labels.get(label) == value else None
    if sample.name == f"{table.BUDGET_USED.name}_bucket":
        return ("used", agent, labels.get("limit", ""), labels.get("le", ""))
    return ("internal_error",) if sample.name == table.INTERNAL_ERRORS.name else None
