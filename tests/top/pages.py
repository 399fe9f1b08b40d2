"""Expositions as a process would write them, and scrapes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from otel_limits.top.fleet_state import FleetTracker
from otel_limits.top.scrapes import Scrape, samples_of

if TYPE_CHECKING:
    from otel_limits.top.fleet import AgentRow, Fleet

BEGAN = 1_800_000_000.0
"""Start time of the view, in a test."""
OLD = f"process_start_time_seconds {BEGAN - 90_000:.0f}"
"""A process that began a day ago."""
YOUNG = f"process_start_time_seconds {BEGAN - 600:.0f}"


def page(lines: str) -> str:
    """Write an exposition; metric names omit their `otel_limits_` prefix, for short."""
    whole = (line.strip() for line in lines.strip().splitlines())
    return "".join(
        f"{line if line.startswith('process_') else f'otel_limits_{line}'}\n"
        for line in whole
        if line
    )


def scrape(lines: str, after: float, feed: str = "one", *, is_past: bool = False) -> Scrape:
    """Make the scrape of an exposition, `after` seconds after the view started."""
    samples = tuple(samples_of(page(lines), is_openmetrics=False))
    return Scrape(feed, BEGAN + after, samples, is_past=is_past)


def watched(*scrapes: Scrape, rate_seconds: float = 60.0, least_seconds: float = 5.0) -> Fleet:
    """Return the fleet's state after some scrapes."""
    watch = FleetTracker(BEGAN, rate_seconds, least_seconds)
    for each in scrapes:
        watch.add(each)
    return watch.fleet()


def row_of(fleet: Fleet, agent: str = "a") -> AgentRow:
    """Return the row of an agent."""
    (row,) = (row for row in fleet.agents if row.agent == agent)
    return row


def names(rows: Iterable[AgentRow]) -> list[str]:
    """Return the agents in the order of their rows."""
    return [row.agent for row in rows]
