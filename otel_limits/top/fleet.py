"""The state of a fleet: agents, totals, quotas and recent halts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Final

SCHEMA: Final = "otel-limits/top/1"
"""Schema of the JSON. The number increases if a field is removed or changes its meaning."""

NEAR_END: Final = 0.8
"""Share of a cap or quota that is highlighted, as in `otel-limits quotas`."""

LATEST: Final = datetime(9999, 12, 31, tzinfo=timezone.utc).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapShare:
    """Utilization of a cap."""

    limit: str
    cap: float | None
    share: float
    """1 if the cap is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Usage per unit of time. `None` if not known yet."""

    turns_per_minute: float | None = None
    tokens_per_minute: float | None = None
    usd_per_hour: float | None = None
    """Cost of calls with a known price. `None` if no call has one."""
    unpriced_tokens_per_minute: float | None = None
    """Tokens of calls without a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """One agent, summed over all processes."""

    agent: str
    in_progress: int | None
    """`None` if no feed reports it."""
    rates: Rates
    usd_share: float | None
    """Share of the fleet's spend."""
    now: Sequence[CapShare]
    """Mean utilization of caps by invocations in progress, highest first."""
    hour: Sequence[CapShare]
    """p95 utilization of caps by finished invocations, highest first."""
    halts: Mapping[str, int]
    """Halts by reason, most frequent first."""
    refusals: Mapping[str, int]
    """Refused tool calls by tool, most frequent first."""
    errors: Mapping[str, int]
    """Failed model calls, tool calls and invocations."""

    @property
    def halt_count(self) -> int:
        """Total number of halts."""
        return sum(self.halts.values())

    @property
    def refusal_count(self) -> int:
        """Total number of refused tool calls."""
        return sum(self.refusals.values())

    @property
    def error_count(self) -> int:
        """Failed calls. Failed invocations usually result from one that is already counted."""
        return self.errors.get("model_calls", 0) + self.errors.get("tool_calls", 0)

    @property
    def nearest(self) -> float:
        """Highest utilization of a cap, by invocations in progress or else by finished ones."""
        return max((each.share for each in self.now or self.hour), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRow:
    """Usage of one quota key."""

    quota: str
    key: str
    used: float
    reserved: float
    limit: float
    resets: float
    """End of the window, in seconds since the epoch."""

    @property
    def share(self) -> float:
        """Utilization, including reservations. 1 if the limit is 0."""
        return (self.used + self.reserved) / self.limit if self.limit else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentHalt:
    """Halts of one agent with one reason between two scrapes."""

    at: float
    agent: str
    reason: str
    action: str
    count: int
    trace_id: str | None
    """Trace of the last halt, if exported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals of all agents."""

    agents: int
    in_progress: int
    rates: Rates
    halts: int
    refusals: int
    errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The state of the fleet at one time."""

    at: float
    feeds: Mapping[str, str]
    """Addresses and their error messages, empty if there is none."""
    rate_seconds: float | None
    """Window of turn and token rates. `None` if it is still too short."""
    usd_seconds: float | None
    halts_since: float
    """Start of the window of halts, refusals and errors, at most one hour ago."""
    totals: Totals
    agents: Sequence[AgentRow] = ()
    quotas: Sequence[QuotaRow] = ()
    """Quotas close to their limit, highest utilization first."""
    last_halts: Sequence[RecentHalt] = ()
    """Halts since `top` was started, newest first."""
    warnings: Sequence[str] = field(default=())
    """Problems of otel-limits itself."""

    @property
    def problems(self) -> list[str]:
        """All messages to show."""
        return [*filter(None, self.feeds.values()), *self.warnings]


def as_json(fleet: Fleet) -> dict[str, Any]:
    """Return the fleet as JSON."""
    return {
        "schema": SCHEMA,
        "at": iso(fleet.at),
        "feeds": [{"address": name, "error": error or None} for name, error in fleet.feeds.items()],
        "warnings": list(fleet.warnings),
        "rates_over_seconds": _rounded(fleet.rate_seconds),
        "usd_over_seconds": _rounded(fleet.usd_seconds),
        "halts_since": iso(fleet.halts_since),
        "totals": _flat(fleet.totals),
        "agents": [_flat(row) for row in fleet.agents],
        "quotas_near_limit": [
            {**dataclasses.asdict(row), "share": row.share, "resets": iso(row.resets)}
            for row in fleet.quotas
        ],
        "last_halts": [
            {**dataclasses.asdict(halt), "at": iso(halt.at)} for halt in fleet.last_halts
        ],
    }


def iso(at: float) -> str:
    """Format a time as ISO 8601 in UTC."""
    at = min(max(at, 0.0), LATEST)  # an endpoint may report any value
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _flat(row: AgentRow | Totals) -> dict[str, Any]:
    """Merge the rates into the other fields."""
    values = dataclasses.asdict(row)
    rates = values.pop("rates")
    return values | {name: _rounded(rate) for name, rate in rates.items()}


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 6)
