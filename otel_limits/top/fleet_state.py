"""Derives the state of a fleet from scrapes."""

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
    from otel_limits.top.scrapes import Feed, Labels, Scrape, ScrapedSample

COUNTED: Final = {table.TURNS.name: "turns", table.TOKENS.name: "tokens"}
FINISHED: Final = {
    f"{table.INVOCATION_TURNS.name}_sum": "turns",
    f"{table.INVOCATION_TOKENS.name}_sum": "tokens",
}
MEASURED: Final = {"max_turns": "turns", "max_iterations": "turns", "max_token_budget": "tokens"}
"""The counter that each limit caps. Legs count as invocations, as most have only one."""


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
        self._idle: dict[tuple[Labels, str, str], float] = {}
        """Remaining difference of agents without invocations, at the previous scrape."""
        self._abandoned: dict[tuple[Labels, str, str], float] = {}
        """Usage by invocations that will never finish."""

    def update(self, scrape: Scrape) -> None:
        """Process a scrape."""
        counts: dict[tuple[Labels, str], float] = defaultdict(float)
        over: dict[tuple[Labels, str, str], float] = defaultdict(float)
        for sample in scrape.samples:
            if sample.name == table.IN_PROGRESS.name:
                counts[sample.process(), sample.agent] += sample.value
            elif (what := COUNTED.get(sample.name)) is not None:
                over[sample.process(), sample.agent, what] += sample.value
            elif (what := FINISHED.get(sample.name)) is not None:
                over[sample.process(), sample.agent, what] -= sample.value
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
    return FleetTracker(began, max(feed.rate_seconds for feed in feeds))


class FleetTracker:
    """Derives the state of the fleet from scrapes.

    Args:
        began: When `top` was started, in seconds since the epoch.
        rate_seconds: Window of turn and token rates.
    """

    def __init__(self, began: float, rate_seconds: float) -> None:
        """Create a tracker without scrapes."""
        self._rate_seconds = rate_seconds
        self._follower = Follower(began)
        self._progress: dict[str, InProgress] = {}
        self._now = began

    def add(self, scrape: Scrape) -> None:
        """Process a scrape."""
        self._now = max(self._now, scrape.at)
        self._follower.add(scrape)
        if scrape.error:
            self._progress.pop(scrape.feed, None)
        else:
            self._progress.setdefault(scrape.feed, InProgress()).update(scrape)

    def fleet(self) -> Fleet:
        """Return the state as of the latest scrape."""
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
                refusals=sum(row.refusal_count for row in rows),
                errors=sum(row.error_count for row in rows),
            ),
            agents=rows,
            quotas=quotas_near_limit(present, now),
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
    """Current usage rates."""

    def __init__(self, follower: Follower, now: float, rate_seconds: float) -> None:
        """Sum up the usage in the windows."""
        passed = now - (now if follower.first is None else follower.first)
        is_enough = passed >= LEAST_SECONDS
        self.turn_seconds = min(passed, rate_seconds) if is_enough else None
        self.usd_seconds = min(passed, USD_SECONDS) if is_enough else None
        self._turns = follower.rates.over(now, rate_seconds)
        self._usd = follower.rates.over(now, USD_SECONDS)

    @property
    def agents(self) -> set[str]:
        """All agents with usage."""
        return {agent for _, agent in self._usd}

    def of(self, agent: str | None) -> Rates:
        """Return the rates of an agent, or of all agents."""
        if self.turn_seconds is None or self.usd_seconds is None:
            return Rates()
        minutes, usd_minutes = self.turn_seconds / 60, self.usd_seconds / 60
        usd = amount_of("usd", agent, self._usd)
        unpriced = amount_of("unpriced", agent, self._usd)
        return Rates(
            turns_per_minute=amount_of("turns", agent, self._turns) / minutes,
            tokens_per_minute=amount_of("tokens", agent, self._turns) / minutes,
            # Unknown, not 0, if no call has a price.
            usd_per_hour=None if unpriced and not usd else usd * 60 / usd_minutes,
            unpriced_tokens_per_minute=unpriced / usd_minutes,
        )


def amount_of(what: str, agent: str | None, increases: Mapping[Key, float]) -> float:
    """Return the usage by an agent, or by all agents."""
    if agent is not None:
        return increases.get((what, agent), 0.0)
    return sum(amount for key, amount in increases.items() if key[0] == what)


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


def quotas_near_limit(present: Iterable[ScrapedSample], now: float) -> tuple[QuotaRow, ...]:
    """Return the quota keys close to their limit, as last read by any process."""
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
            continue  # incomplete, or the window has ended
        row = QuotaRow(quota=quota, key=key, **values)
        other = newest.setdefault((quota, key), row)
        # Usage only increases within a window, so the higher value is newer.
        if (row.resets, row.used) > (other.resets, other.used):
            newest[quota, key] = row
    near = [row for row in newest.values() if row.share >= NEAR_END]
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
