"""Derives the state of a fleet from scrapes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from otel_limits.core.events import CUT_SHORT
from otel_limits.core.wording import pluralize
from otel_limits.observers import metrics as table
from otel_limits.top.fleet import (
    NEAR_END,
    AgentRow,
    CapShare,
    Fleet,
    QuotaRow,
    Rates,
    RecentHalt,
    Totals,
)
from otel_limits.top.scrapes import PROCESS_START, Labels, Scrape, ScrapedSample, process_of

if TYPE_CHECKING:
    from otel_limits.top.scrapes import Feed


# --- the state ------------------------------------------------------------------------------------

COUNTED: Final = {table.TURNS.name: "turns", table.TOKENS.name: "tokens"}
FINISHED: Final = {
    f"{table.INVOCATION_TURNS.name}_sum": "turns",
    f"{table.INVOCATION_TOKENS.name}_sum": "tokens",
}
PROGRESS: Final = frozenset({table.IN_PROGRESS.name, *COUNTED, *FINISHED})
MEASURED: Final = {"max_turns": "turns", "max_iterations": "turns", "max_token_budget": "tokens"}
"""The counter that each limit caps. Legs count as invocations, as most have only one."""


StartedProcess: TypeAlias = tuple[Labels, float | None]
"""The labels that identify a process, and its start time if known."""


class InProgress:
    """Usage by invocations in progress, for one feed.

    A turn is counted when it happens, and again in the histogram of finished invocations. The
    difference belongs to invocations in progress. The same holds for tokens; there is no such pair
    of metrics for cost, time and calls.
    """

    def __init__(self) -> None:
        """Create it without scrapes."""
        self.counts: dict[str, float] = {}
        """Invocations in progress, by agent."""
        self.used: dict[tuple[str, str], float] = {}
        """Their turns and tokens, by agent and counter."""
        self._idle: dict[tuple[StartedProcess, str, str], float] = {}
        """Remaining difference of agents without invocations, at the previous scrape."""
        self._abandoned: dict[tuple[StartedProcess, str, str], float] = {}
        """Usage by invocations that will never finish."""

    def update(self, scrape: Scrape) -> None:
        """Process a scrape."""
        counts: dict[tuple[StartedProcess, str], float] = defaultdict(float)
        over: dict[tuple[StartedProcess, str, str], float] = defaultdict(float)
        starts = scrape.starts()
        for sample in scrape.samples:
            if sample.name not in PROGRESS:
                continue
            process = (labels := sample.process(), starts.get(labels))
            if sample.name == table.IN_PROGRESS.name:
                counts[process, sample.agent] += sample.value
            elif (what := COUNTED.get(sample.name)) is not None:
                over[process, sample.agent, what] += sample.value
            elif (what := FINISHED.get(sample.name)) is not None:
                over[process, sample.agent, what] -= sample.value
        # Replaced, as the process of an agent may be gone.
        self.counts, self.used = defaultdict(float), defaultdict(float)
        for (_, agent), count in counts.items():
            self.counts[agent] += count
        for key, left in over.items():
            process, agent, what = key
            if counts.get((process, agent), 0.0) > 0:
                # Negative if the scrape happened between the two counts.
                self.used[agent, what] += max(0.0, left - self._abandoned.get(key, 0.0))
            else:
                # Only if unchanged: a scrape may happen between the last turn and the end of an
                # invocation.
                if self._idle.get(key) == left:
                    self._abandoned[key] = left
                self._idle[key] = left


PERCENTILE: Final = 0.95


def track(feeds: Sequence[Feed], began: float) -> FleetTracker:
    """Create a tracker for feeds, with the longest of their rate windows."""
    return FleetTracker(
        began,
        max(feed.rate_seconds for feed in feeds),
        max(feed.least_seconds for feed in feeds),
    )


class FleetTracker:
    """Derives the state of the fleet from scrapes.

    Args:
        began: When `top` was started, in seconds since the epoch.
        rate_seconds: Window of turn and token rates.
        least_seconds: Minimum window of a rate.
    """

    def __init__(self, began: float, rate_seconds: float, least_seconds: float) -> None:
        """Create a tracker without scrapes."""
        self._rate_seconds, self._least_seconds = rate_seconds, least_seconds
        self._follower = Follower(began)
        self._progress: dict[str, InProgress] = {}
        self._quotas = QuotaReadings()
        self._now = began

    def add(self, scrape: Scrape) -> None:
        """Process a scrape."""
        self._now = max(self._now, scrape.at)
        self._follower.add(scrape)
        self._quotas.update(scrape)
        if scrape.error:
            self._progress.pop(scrape.feed, None)
        else:
            self._progress.setdefault(scrape.feed, InProgress()).update(scrape)

    def fleet(self) -> Fleet:
        """Return the state as of the latest scrape."""
        follower, now = self._follower, self._now
        hour = follower.hour.over(now, HOUR_SECONDS)
        rates = UsageRates(follower, now, self._rate_seconds, self._least_seconds)
        present = [sample for each in follower.present.values() for sample in each.samples]
        caps = caps_of(present)
        total = rates.total()
        rows = [
            self._row(agent, rates.of(agent), total, hour, caps.get(agent, {}))
            for agent in sorted(
                {*rates.agents, *self._counts(), *(key[1] for key in hour if len(key) > 1)}
            )
        ]
        return Fleet(
            at=now,
            feeds=dict(follower.errors),
            rate_seconds=rates.turn_seconds,
            usd_seconds=rates.usd_seconds,
            halts_since=follower.halts_since(now),
            totals=Totals(
                agents=len(rows),
                in_progress=sum(row.in_progress or 0 for row in rows),
                rates=total,
                halts=sum(row.halt_count for row in rows),
                refusals=sum(row.refusal_count for row in rows),
                errors=sum(row.error_count for row in rows),
            ),
            agents=rows,
            quotas=self._quotas.near_limit(now),
            last_halts=tuple(follower.halts),
            warnings=tuple(warnings_of(present, hour)),
        )

    def _counts(self) -> dict[str, float]:
        """Return the number of invocations in progress of each agent."""
        counts: dict[str, float] = {}
        for progress in self._progress.values():
            for agent, count in progress.counts.items():
                counts[agent] = counts.get(agent, 0) + count
        return counts

    def _row(
        self,
        agent: str,
        rates: Rates,
        total: Rates,
        hour: Mapping[Key, float],
        caps: Mapping[str, float],
    ) -> AgentRow:
        count = self._counts().get(agent)
        used = {
            what: sum(each.used.get((agent, what), 0) for each in self._progress.values())
            for what in set(MEASURED.values())
        }
        halts = {key[2]: round(n) for key, n in hour.items() if key[:2] == ("halt", agent)}
        refusals = {key[2]: round(n) for key, n in hour.items() if key[:2] == ("refusal", agent)}
        errors = {key[2]: round(n) for key, n in hour.items() if key[:2] == ("error", agent)}
        return AgentRow(
            agent=agent,
            in_progress=None if count is None else round(count),
            rates=rates,
            usd_share=share_of(rates.usd_per_hour, total.usd_per_hour),
            now=nearest(
                CapShare(limit=limit, cap=caps[limit], share=used[what] / count / caps[limit])
                for limit, what in MEASURED.items()
                if count and caps.get(limit)
            ),
            hour=nearest(hour_shares(agent, hour, caps)),
            halts=dict(sorted(halts.items(), key=lambda each: -each[1])),
            refusals=dict(sorted(refusals.items(), key=lambda each: -each[1])),
            errors=errors,
        )


class UsageRates:
    """Current usage rates.

    Args:
        follower: Source of the counts.
        now: The end of the windows, in seconds since the epoch.
        rate_seconds: Window of turn and token rates.
        least_seconds: Minimum window of a rate.
    """

    def __init__(
        self, follower: Follower, now: float, rate_seconds: float, least_seconds: float
    ) -> None:
        """Begin with the windows, which are shorter at first."""
        self._follower, self._now = follower, now
        self._least = least_seconds
        passed = now - (now if follower.first is None else follower.first)
        self._is_enough = passed >= least_seconds
        self.turn_seconds = min(passed, rate_seconds) if self._is_enough else None
        self.usd_seconds = min(passed, USD_SECONDS) if self._is_enough else None
        self.agents: Final = {agent for _, agent in follower.rates.over(now, USD_SECONDS)}
        """All agents with usage."""
        self._windows: dict[float, dict[Key, float]] = {}

    def of(self, agent: str) -> Rates:
        """Return the rates of an agent, unknown if it was first seen a moment ago."""
        age = self._now - self._follower.seen.get(agent, (0.0, 0.0))[0]
        if self.turn_seconds is None or self.usd_seconds is None or age < self._least:
            return Rates()
        turn_seconds, usd_seconds = min(age, self.turn_seconds), min(age, self.usd_seconds)
        turns, paid = self._over(turn_seconds), self._over(usd_seconds)
        usd, unpriced = paid.get(("usd", agent), 0.0), paid.get(("unpriced", agent), 0.0)
        return Rates(
            turns_per_minute=turns.get(("turns", agent), 0.0) * 60 / turn_seconds,
            tokens_per_minute=turns.get(("tokens", agent), 0.0) * 60 / turn_seconds,
            # Unknown, not 0, if no call has a price.
            usd_per_hour=None if unpriced and not usd else usd * 3600 / usd_seconds,
            unpriced_tokens_per_minute=unpriced * 60 / usd_seconds,
        )

    def total(self) -> Rates:
        """Return the rates of all agents together; unknown, not 0, if only new ones are busy."""
        rates = [self.of(agent) for agent in self.agents | set(self._follower.seen)]
        known = [each for each in rates if each.turns_per_minute is not None]
        is_busy = any(each.turns_per_minute or each.tokens_per_minute for each in known)
        if not self._is_enough or (len(known) < len(rates) and not is_busy):
            return Rates()
        usd = sum(each.usd_per_hour or 0.0 for each in known)
        unpriced = sum(each.unpriced_tokens_per_minute or 0.0 for each in known)
        return Rates(
            turns_per_minute=sum(each.turns_per_minute or 0.0 for each in known),
            tokens_per_minute=sum(each.tokens_per_minute or 0.0 for each in known),
            usd_per_hour=None if unpriced and not usd else usd,
            unpriced_tokens_per_minute=unpriced,
        )

    def _over(self, seconds: float) -> Mapping[Key, float]:
        """Return the increases of a window; most agents have the same."""
        if seconds not in self._windows:
            self._windows[seconds] = self._follower.rates.over(self._now, seconds)
        return self._windows[seconds]


def share_of(part: float | None, whole: float | None) -> float | None:
    """Return a share, if both numbers are known and the whole is not 0."""
    return part / whole if part is not None and whole else None


def nearest(shares: Iterable[CapShare]) -> tuple[CapShare, ...]:
    """Sort caps by utilization, highest first."""
    return tuple(sorted(shares, key=lambda each: -each.share))


def caps_of(present: Iterable[ScrapedSample]) -> dict[str, dict[str, float]]:
    """Return the caps of each agent, the lowest if processes differ."""
    caps: dict[str, dict[str, float]] = {}
    for sample in present:
        if sample.name == table.LIMIT.name and sample.value > 0:  # 0: removed
            limits = caps.setdefault(sample.agent, {})
            limit = sample.labels.get("limit", "")
            limits[limit] = min(sample.value, limits.get(limit, math.inf))
    return caps


def hour_shares(
    agent: str, hour: Mapping[Key, float], caps: Mapping[str, float]
) -> Iterator[CapShare]:
    """Yield the p95 utilization of each cap by finished invocations.

    It is the upper bound of a histogram bucket, without interpolation.
    """
    by_limit: dict[str, list[tuple[float, float]]] = {}
    for key, count in hour.items():
        if key[:2] == ("used", agent):
            by_limit.setdefault(key[2], []).append((bound_of(key[3]), count))
    for limit, buckets in by_limit.items():
        total = max(count for _, count in buckets)
        bound = min(bound for bound, count in buckets if count >= PERCENTILE * total)
        # Values above the highest bound are not distinguished.
        highest = max(table.BUDGET_USED.buckets)
        yield CapShare(limit=limit, cap=caps.get(limit), share=min(bound, highest))


def bound_of(text: str) -> float:
    """Parse the upper bound of a bucket."""
    try:
        return float(text)
    except ValueError:
        return math.inf


QUOTA_GAUGES: Final = {
    table.QUOTA_USED.name: "used",
    table.QUOTA_RESERVED.name: "reserved",
    table.QUOTA_LIMIT.name: "limit",
    table.QUOTA_RESETS.name: "resets",
}


ProcessQuotaKey: TypeAlias = tuple[Labels, str, str]
"""The labels of a process, a quota and a key."""
QuotaReading: TypeAlias = tuple[dict[str, float], float]
"""The values of the gauges, and when they were first seen."""


class QuotaReadings:
    """The quota keys as each process has read them last, and since when that is known."""

    def __init__(self) -> None:
        """Create it without scrapes."""
        self._of_feeds: dict[str, dict[ProcessQuotaKey, QuotaReading]] = {}

    def update(self, scrape: Scrape) -> None:
        """Note which keys a process has read since the previous scrape."""
        before = self._of_feeds.pop(scrape.feed, None)
        if scrape.error:
            return
        seen: dict[ProcessQuotaKey, dict[str, float]] = {}
        for sample in scrape.samples:
            if sample.name in QUOTA_GAUGES:
                names = (sample.labels.get("quota", ""), sample.labels.get("key", ""))
                values = seen.setdefault((sample.process(), *names), {})
                values[QUOTA_GAUGES[sample.name]] = sample.value
        # Nothing shows when a process read what the first scrape has.
        since = 0.0 if before is None else scrape.at
        known = before or {}
        self._of_feeds[scrape.feed] = {
            key: known[key] if key in known and known[key][0] == values else (values, since)
            for key, values in seen.items()
        }

    def near_limit(self, now: float) -> tuple[QuotaRow, ...]:
        """Return the keys close to their limit, as last read by any process."""
        newest: dict[tuple[str, str], tuple[float, QuotaRow]] = {}
        every = (item for each in self._of_feeds.values() for item in each.items())
        for (_, quota, key), (values, since) in every:
            if len(values) < len(QUOTA_GAUGES) or values["resets"] <= now:
                continue  # incomplete, or the window has ended
            row = QuotaRow(quota=quota, key=key, **values)
            before, other = newest.setdefault((quota, key), (since, row))
            # An operator may have changed the limit. Otherwise, usage only increases within a
            # window, so the higher value is newer.
            if (row.resets, since, row.used) > (other.resets, before, other.used):
                newest[quota, key] = (since, row)
        near = [row for _, row in newest.values() if row.share >= NEAR_END]
        return tuple(sorted(near, key=lambda row: -row.share))


def warnings_of(present: Iterable[ScrapedSample], hour: Mapping[Key, float]) -> Iterator[str]:
    """Yield messages about problems of otel-limits itself."""
    zeros: dict[str, set[Labels]] = {}
    for sample in present:
        if sample.value == 0:
            zeros.setdefault(sample.name, set()).add(sample.process())
    if off := zeros.get(table.ENFORCING.name):
        yield f"Limits are not enforced in {processes(len(off))}: run otel-limits doctor there."
    if rejected := zeros.get(table.POLICY_VALID.name):
        yield f"Policy file rejected in {processes(len(rejected))}: see the log."
    if errors := round(hour.get(("internal_error",), 0)):
        yield f"{pluralize(errors, 'internal error')} in otel-limits: see the log."


def processes(count: int) -> str:
    """Format a number of processes."""
    return pluralize(count, "process", "processes")


# --- increases of counters between scrapes --------------------------------------------------------

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
        self._starts: dict[ProcessKey, float] = {}
        """When each process started, if it exports that."""
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
        self.seen: dict[str, tuple[float, float]] = {}
        """Since when the usage of each agent is known without a gap, and when it was last seen."""

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
        restarted = self._restarted_processes(scrape)
        for sample in scrape.samples:
            process = sample.process()
            is_followed = is_continuous and (scrape.feed, process) not in new
            self._see(sample, scrape.at, before if is_followed else None)
            rated, hour = RATED.get(sample.name), hourly_key(sample)
            if rated is None and hour is None:
                continue
            amount = self._growth(scrape, sample, is_new=process in restarted)
            began = new.get((scrape.feed, process))
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

    def _restarted_processes(self, scrape: Scrape) -> set[Labels]:
        """Return the processes that have started again since they were scraped before."""
        restarted: set[Labels] = set()
        for process, start in scrape.starts().items():
            last = self._starts.setdefault((scrape.feed, process), start)
            if start > last:  # an earlier one is of another process behind the same address
                self._starts[scrape.feed, process] = start
                restarted.add(process)
        return restarted

    def _growth(self, scrape: Scrape, sample: ScrapedSample, *, is_new: bool) -> float:
        """Return the increase of a series, from 0 if it is new or was reset."""
        key = (scrape.feed, sample.series())
        before, _ = self._values.get(key, (0.0, 0.0))
        self._values[key] = (sample.value, scrape.at)
        # Without a start time, only a lower value shows a restart.
        return sample.value if is_new or sample.value < before else sample.value - before

    def _see(self, sample: ScrapedSample, now: float, before: float | None) -> None:
        """Note that an agent is there.

        Args:
            sample: A sample, of an agent or not.
            now: The time of its scrape.
            before: The previous scrape of its process, if there was one. An agent that was not in
                it began later.
        """
        if "agent" not in sample.labels:
            return
        since, last = self.seen.get(sample.agent, (math.inf, -math.inf))
        if now - last > GAP_SECONDS:
            since = now if before is None else before
        # The history of one feed is read after the present of another.
        self.seen[sample.agent] = min(since, now), max(last, now)

    def _sweep(self, now: float) -> None:
        """Drop series and feeds not seen for an hour, as pods come and go."""
        if now - self._swept <= HOUR_SECONDS:
            return
        self._swept, since = now, now - HOUR_SECONDS
        self._values = {key: each for key, each in self._values.items() if each[1] > since}
        self.seen = {agent: each for agent, each in self.seen.items() if each[1] > since}
        self._scraped = {feed: at for feed, at in self._scraped.items() if at > since}
        # A process that returns later counts as new.
        present = self._present_processes() | {
            (feed, process_of(labels)) for feed, labels in self._values
        }
        self._starts = {key: at for key, at in self._starts.items() if key in present}
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
