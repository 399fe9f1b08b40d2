"""Says how a fleet stands, from everything that was scraped."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from otel_limits.core.wording import pluralize
from otel_limits.observers import instruments as table
from otel_limits.top.fleet import NEAR_END, AgentRow, CapShare, Fleet, QuotaRow, Rates, Totals
from otel_limits.top.follower import (
    HOUR_SECONDS,
    LEAST_SECONDS,
    USD_SECONDS,
    Follower,
)

if TYPE_CHECKING:
    from otel_limits.top.follower import Key
    from otel_limits.top.scrapes import Feed, Labels, Sample, Scrape

COUNTED: Final = {table.TURNS.name: "turns", table.TOKENS.name: "tokens"}
FINISHED: Final = {
    f"{table.INVOCATION_TURNS.name}_sum": "turns",
    f"{table.INVOCATION_TOKENS.name}_sum": "tokens",
}
MEASURED: Final = {"max_turns": "turns", "max_iterations": "turns", "max_token_budget": "tokens"}
"""Which of them a limit caps. A leg is taken for an invocation: most have only one."""


class InProgress:
    """The invocations in progress of one feed."""

    def __init__(self) -> None:
        """Know of none."""
        self.counts: dict[str, float] = {}
        """Invocations in progress, by agent."""
        self.used: dict[tuple[str, str], float] = {}
        """Turns and tokens of all of them, by agent and what is counted."""
        self._idle: dict[tuple[Labels, str, str], float] = {}
        """What an agent without any invocation had left over when it was last looked at."""
        self._abandoned: dict[tuple[Labels, str, str], float] = {}
        """What belongs to invocations that will never end, as their process was killed."""

    def update(self, scrape: Scrape) -> None:
        """Look at what there is now."""
        counts: dict[tuple[Labels, str], float] = defaultdict(float)
        over: dict[tuple[Labels, str, str], float] = defaultdict(float)
        for sample in scrape.samples:
            if sample.name == table.IN_PROGRESS.name:
                counts[sample.process(), sample.agent] += sample.value
            elif (what := COUNTED.get(sample.name)) is not None:
                over[sample.process(), sample.agent, what] += sample.value
            elif (what := FINISHED.get(sample.name)) is not None:
                over[sample.process(), sample.agent, what] -= sample.value
        # Made anew with every scrape: an agent whose process is gone is in progress nowhere.
        self.counts, self.used = defaultdict(float), defaultdict(float)
        for (_, agent), count in counts.items():
            self.counts[agent] += count
        for key, left in over.items():
            process, agent, what = key
            if counts.get((process, agent), 0.0) > 0:
                # Below 0 where a scrape fell between the two counts.
                self.used[agent, what] += max(0.0, left - self._abandoned.get(key, 0.0))
            else:
                self._settle(key, left)

    def _settle(self, key: tuple[Labels, str, str], left: float) -> None:
        """Forget what is left over of an agent that has nothing in progress."""
        # Twice the same, as a scrape may fall between the last turn and the end of an invocation.
        if self._idle.get(key) == left:
            self._abandoned[key] = left
        self._idle[key] = left


PERCENTILE: Final = 0.95


def track(feeds: Sequence[Feed], began: float) -> FleetTracker:
    """Watch feeds; the one that knows least of single seconds says how rates are counted."""
    return FleetTracker(began, max(feed.rate_seconds for feed in feeds))


class FleetTracker:
    """Takes scrapes, and says how the fleet stands.

    Args:
        began: Since when somebody looks, in seconds since the epoch.
        rate_seconds: Over how long turns and tokens a minute are counted.
    """

    def __init__(self, began: float, rate_seconds: float) -> None:
        """Begin without any scrape."""
        self._rate_seconds = rate_seconds
        self._follower = Follower(began)
        self._progress: dict[str, InProgress] = {}
        self._now = began

    def add(self, scrape: Scrape) -> None:
        """Take what a feed said."""
        self._now = max(self._now, scrape.at)
        self._follower.add(scrape)
        if scrape.error:
            self._progress.pop(scrape.feed, None)
        else:
            self._progress.setdefault(scrape.feed, InProgress()).update(scrape)

    def fleet(self) -> Fleet:
        """Return how it stands as of the newest scrape."""
        follower, now = self._follower, self._now
        hour = follower.hour.over(now, HOUR_SECONDS)
        rates = UsageRates(follower, now, self._rate_seconds)
        present = [sample for each in follower.present.values() for sample in each.samples]
        caps = caps_of(present)
        total = rates.of(None)
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
                errors=sum(row.error_count for row in rows),
            ),
            agents=rows,
            quotas=quotas_near_limit(present, now),
            last_halts=tuple(follower.halts),
            warnings=tuple(warnings_of(present, hour)),
        )

    def _counts(self) -> dict[str, float]:
        """Return how many invocations of each agent are in progress."""
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
            errors=errors,
        )


class UsageRates:
    """How fast things are used."""

    def __init__(self, follower: Follower, now: float, rate_seconds: float) -> None:
        """Count what was used lately."""
        passed = now - (now if follower.first is None else follower.first)
        is_enough = passed >= LEAST_SECONDS
        self.turn_seconds = min(passed, rate_seconds) if is_enough else None
        self.usd_seconds = min(passed, USD_SECONDS) if is_enough else None
        self._turns = follower.rates.over(now, rate_seconds)
        self._usd = follower.rates.over(now, USD_SECONDS)

    @property
    def agents(self) -> set[str]:
        """Everybody who used anything."""
        return {agent for _, agent in self._usd}

    def of(self, agent: str | None) -> Rates:
        """Return how fast an agent uses things, or all agents together."""
        if self.turn_seconds is None or self.usd_seconds is None:
            return Rates()
        minutes, usd_minutes = self.turn_seconds / 60, self.usd_seconds / 60
        usd = amount_of("usd", agent, self._usd)
        unpriced = amount_of("unpriced", agent, self._usd)
        return Rates(
            turns_per_minute=amount_of("turns", agent, self._turns) / minutes,
            tokens_per_minute=amount_of("tokens", agent, self._turns) / minutes,
            # Nothing is not what calls cost whose price nobody knows.
            usd_per_hour=None if unpriced and not usd else usd * 60 / usd_minutes,
            unpriced_tokens_per_minute=unpriced / usd_minutes,
        )


def amount_of(what: str, agent: str | None, increases: Mapping[Key, float]) -> float:
    """Return how much of something an agent used, or all agents together."""
    if agent is not None:
        return increases.get((what, agent), 0.0)
    return sum(amount for key, amount in increases.items() if key[0] == what)


def share_of(part: float | None, whole: float | None) -> float | None:
    """Return which share a part is, where both are known and there is something to share."""
    return part / whole if part is not None and whole else None


def nearest(shares: Iterable[CapShare]) -> tuple[CapShare, ...]:
    """Order caps by how near they are."""
    return tuple(sorted(shares, key=lambda each: -each.share))


def caps_of(present: Iterable[Sample]) -> dict[str, dict[str, float]]:
    """Return every agent's caps, the least where processes differ."""
    caps: dict[str, dict[str, float]] = {}
    for sample in present:
        if sample.name == table.LIMIT.name and sample.value > 0:  # 0 is one that is gone
            limits = caps.setdefault(sample.agent, {})
            limit = sample.labels.get("limit", "")
            limits[limit] = min(sample.value, limits.get(limit, math.inf))
    return caps


def hour_shares(
    agent: str, hour: Mapping[Key, float], caps: Mapping[str, float]
) -> Iterator[CapShare]:
    """Yield which share of each cap 95 % of the finished invocations used at most.

    It is the upper bound of a bucket of the histogram, so that it is true and never a guess.
    """
    by_limit: dict[str, list[tuple[float, float]]] = {}
    for key, count in hour.items():
        if key[:2] == ("used", agent):
            by_limit.setdefault(key[2], []).append((bound_of(key[3]), count))
    for limit, buckets in by_limit.items():
        total = max(count for _, count in buckets)
        bound = min(bound for bound, count in buckets if count >= PERCENTILE * total)
        # Above the highest bound there is only "more than that".
        highest = max(table.BUDGET_USED.buckets)
        yield CapShare(limit=limit, cap=caps.get(limit), share=min(bound, highest))


def bound_of(text: str) -> float:
    """Read the upper bound of a bucket."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def quotas_near_limit(present: Iterable[Sample], now: float) -> tuple[QuotaRow, ...]:
    """Return the keys of quotas that are nearly used up, as whoever asked last saw them."""
    gauges = {
        table.QUOTA_USED.name: "used",
        table.QUOTA_RESERVED.name: "reserved",
        table.QUOTA_LIMIT.name: "limit",
        table.QUOTA_RESETS.name: "resets",
    }
    seen: dict[tuple[Labels, str, str], dict[str, float]] = {}
    for sample in present:
        if sample.name in gauges:
            names = (sample.labels.get("quota", ""), sample.labels.get("key", ""))
            seen.setdefault((sample.process(), *names), {})[gauges[sample.name]] = sample.value
    newest: dict[tuple[str, str], QuotaRow] = {}
    for (_, quota, key), values in seen.items():
        if len(values) < len(gauges) or values["resets"] <= now:
            continue  # of a window that has ended, nothing counts any more
        row = QuotaRow(quota=quota, key=key, **values)
        other = newest.setdefault((quota, key), row)
        # Within a window the use rises: whoever saw more saw it later.
        if (row.resets, row.used) > (other.resets, other.used):
            newest[quota, key] = row
    near = [row for row in newest.values() if row.share >= NEAR_END]
    return tuple(sorted(near, key=lambda row: -row.share))


def warnings_of(present: Iterable[Sample], hour: Mapping[Key, float]) -> Iterator[str]:
    """Say in sentences what is wrong with otel-limits itself."""
    zeros: dict[str, int] = {}
    for sample in present:
        if sample.value == 0:
            zeros[sample.name] = zeros.get(sample.name, 0) + 1
    if off := zeros.get(table.ENFORCING.name):
        yield f"Limits are not in force in {processes(off)}: run otel-limits doctor there."
    if refused := zeros.get(table.POLICY_VALID.name):
        yield f"The newest policy file was refused in {processes(refused)}: see its log."
    if faults := round(hour.get(("fault",), 0)):
        kept = pluralize(faults, "failure")
        yield f"otel-limits kept {kept} of its own away from agents: see the logs."


def processes(count: int) -> str:
    """Write a number of processes."""
    return pluralize(count, "process", "processes")
