"""Follows scrapes, and says how much was counted between them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, TypeAlias

from otel_limits.core.events import HALTED
from otel_limits.observers import instruments as table
from otel_limits.top.fleet import RecentHalt
from otel_limits.top.scrapes import PROCESS_START, Labels, Sample, Scrape, process_of

Key: TypeAlias = tuple[str, ...]
"""What went up, such as `("turns", "researcher")`."""


class Increases:
    """Increases, kept by the time in which they were seen.

    Args:
        seconds: For how long they are kept.
        step: Seconds of one bucket: as much longer or shorter may the time be.
    """

    def __init__(self, seconds: float, step: float) -> None:
        """Begin with none."""
        self.seconds: Final = seconds
        self._step = step
        self._buckets: dict[int, Counter[Key]] = {}

    def add(self, key: Key, amount: float, at: float, since: float | None = None) -> None:
        """Count an increase that was seen at a time.

        Args:
            key: What went up.
            amount: How much.
            at: When it was seen, in seconds since the epoch.
            since: When one looked before that: it came at some time between the two, and is
                taken for equally much at each. Otherwise it is taken for as late as it was seen.
        """
        last = int(at // self._step)
        # The bucket after the last look, or an increase would begin before it could have happened.
        first = last if since is None else min(last, int(since // self._step) + 1)
        for place in range(first, last + 1):
            # Money is not a whole number, which a Counter does not mind.
            self._buckets.setdefault(place, Counter())[key] += amount / (last + 1 - first)  # type: ignore[assignment]

    def over(self, now: float, seconds: float) -> dict[Key, float]:
        """Return what came in over the last `seconds`."""
        # When somebody asks, and not by a timer: the window moves only where it is looked at.
        forgotten = int((now - self.seconds) // self._step)
        for place in [place for place in self._buckets if place <= forgotten]:
            del self._buckets[place]
        summed: dict[Key, float] = {}
        for place, bucket in self._buckets.items():
            if place > (now - seconds) // self._step:
                for key, amount in bucket.items():
                    summed[key] = summed.get(key, 0) + amount
        return summed


HOUR_SECONDS: Final = 3600.0
USD_SECONDS: Final = 300.0
"""Over how long money is counted: a call takes many seconds, so that a minute has only a few."""
LEAST_SECONDS: Final = 5.0
"""Over less than that, a rate says more about the moment than about the agent."""
GAP_SECONDS: Final = 120.0
"""What was counted while somebody did not answer for longer than that says nothing of now."""
HALTS_KEPT: Final = 100
UNKNOWN: Final = 0.0
"""Stands for a time that is not told."""

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
"""By which label an error is known, and as what it counts."""

ProcessKey: TypeAlias = tuple[str, Labels]
"""Who told it, and the labels that say which process it is of."""
SeriesKey: TypeAlias = tuple[str, Labels]


class Follower:
    """Compares each scrape with the one before, series by series, as counters begin again at 0.

    Args:
        began: Since when somebody looks: the halts seen since then are kept.
    """

    def __init__(self, began: float) -> None:
        """Begin without any scrape."""
        self._began = began
        self._values: dict[SeriesKey, tuple[float, float]] = {}
        """What each series said last, and when."""
        self._swept = began
        self._known_since: dict[ProcessKey, float] = {}
        """Since when everything that the process counted is known."""
        self._scraped: dict[str, float] = {}
        self.present: dict[str, Scrape] = {}
        """The newest answer of each feed that answers."""
        self.errors: dict[str, str] = {}
        """Of every feed that was asked, what is wrong with it."""
        self.rates: Final = Increases(USD_SECONDS, step=1)
        self.hour: Final = Increases(HOUR_SECONDS, step=60)
        self.halts: Final[deque[RecentHalt]] = deque(maxlen=HALTS_KEPT)
        self.first: float | None = None
        """When the first scrape was that had anything to say."""

    def add(self, scrape: Scrape) -> None:
        """Count what a scrape has beyond the one before it."""
        self.errors[scrape.feed] = scrape.error
        if scrape.error:
            # What it said before is not the present any more.
            self.present.pop(scrape.feed, None)
            return
        self.first = scrape.at if self.first is None else self.first
        before = self._scraped.get(scrape.feed)
        is_continuous = before is not None and scrape.at - before <= GAP_SECONDS
        strangers = self._new_processes(scrape, is_first=before is None)
        for sample in scrape.samples:
            rated, hour = RATED.get(sample.name), hourly_key(sample)
            if rated is None and hour is None:
                continue
            amount = self._growth(scrape, sample)
            began = strangers.get((scrape.feed, sample.process()))
            if amount <= 0 or began == UNKNOWN:
                continue
            if hour is not None:
                self.hour.add(hour, amount, scrape.at)
                # What was there before somebody looked is in the sum of the hour, but is not news.
                is_seen = not scrape.is_past and (began is None or began >= self._began)
                if is_seen and hour[0] == "halt":
                    self._record_halt(scrape, sample, round(amount))
            # What a process counted before it was met is of a time that nobody knows.
            elif rated is not None and is_continuous and began is None:
                self.rates.add((rated, sample.agent), amount, scrape.at, before)
        self.present[scrape.feed] = scrape
        self._scraped[scrape.feed] = scrape.at
        self._sweep(scrape.at)

    def halts_since(self, now: float) -> float:
        """Since when the halts of every process that is there are known, at most an hour ago."""
        # The process that is known for the shortest time decides: before that, not all was seen.
        return max(
            [now - HOUR_SECONDS, *(self._known_since[each] for each in self._present_processes())]
        )

    def _present_processes(self) -> set[ProcessKey]:
        """Return the processes that tell something now."""
        return {
            (scrape.feed, sample.process())
            for scrape in self.present.values()
            for sample in scrape.samples
        }

    def _new_processes(self, scrape: Scrape, *, is_first: bool) -> Mapping[ProcessKey, float]:
        """Return the processes of which nothing was heard before, and since when they count.

        That is `UNKNOWN` where they may have counted for longer than an hour.
        """
        new: dict[ProcessKey, float] = {}
        for sample in scrape.samples:
            process = (scrape.feed, sample.process())
            if process not in self._known_since:
                began = sample.value if sample.name == PROCESS_START else UNKNOWN
                new[process] = max(began, new.get(process, UNKNOWN))
        for process, began in new.items():
            if began == UNKNOWN and not is_first:
                # It was not there when this feed was asked last.
                new[process] = scrape.at
            elif began <= scrape.at - HOUR_SECONDS:
                # Some of what it has counted is older than the hour, and nobody can tell how much.
                new[process] = UNKNOWN
            self._known_since[process] = scrape.at if new[process] == UNKNOWN else 0.0
        return new

    def _growth(self, scrape: Scrape, sample: Sample) -> float:
        """Return how much a series went up, from 0 if it was not there before or began again."""
        key = (scrape.feed, sample.series())
        before, _ = self._values.get(key, (0.0, 0.0))
        self._values[key] = (sample.value, scrape.at)
        return sample.value - before if sample.value >= before else sample.value

    def _sweep(self, now: float) -> None:
        """Forget what was not told for an hour: pods come and go for days."""
        if now - self._swept <= HOUR_SECONDS:
            return
        self._swept, since = now, now - HOUR_SECONDS
        self._values = {key: each for key, each in self._values.items() if each[1] > since}
        self._scraped = {feed: at for feed, at in self._scraped.items() if at > since}
        # One that comes back is a stranger again: what it has counted may be of any time.
        there = self._present_processes() | {
            (feed, process_of(labels)) for feed, labels in self._values
        }
        self._known_since = {key: at for key, at in self._known_since.items() if key in there}

    def _record_halt(self, scrape: Scrape, sample: Sample, count: int) -> None:
        """Keep a halt to be shown."""
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


def hourly_key(sample: Sample) -> Key | None:
    """Return as what a sample counts among the things of the last hour, if it is one of them."""
    labels, agent = sample.labels, sample.agent
    if sample.name == table.STOPS.name and labels.get("action") in HALTED:
        return ("halt", agent, labels.get("reason", ""))
    if sample.name in ERRORS:
        label, value, what = ERRORS[sample.name]
        return ("error", agent, what) if labels.get(label) == value else None
    if sample.name == f"{table.BUDGET_USED.name}_bucket":
        return ("used", agent, labels.get("limit", ""), labels.get("le", ""))
    return ("fault",) if sample.name == table.INTERNAL_ERRORS.name else None
