"""How a fleet stands: a row for each agent, what they come to, and what is to be seen at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Final

SCHEMA: Final = "otel-limits/top/1"
"""What the JSON calls its schema; the number rises when a field goes or means something else."""

NEAR_END: Final = 0.8
"""Share of a cap or a quota from which on it is shown as nearly used up, as `quotas` does."""

LATEST: Final = datetime(9999, 12, 31, tzinfo=timezone.utc).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapShare:
    """How much of a cap is used."""

    limit: str
    cap: float | None
    share: float
    """1 when it is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast something is used; `None` is not known, or not yet."""

    turns_per_minute: float | None = None
    tokens_per_minute: float | None = None
    usd_per_hour: float | None = None
    """Of calls whose price is known; `None` as well where there is a price for none of them."""
    unpriced_tokens_per_minute: float | None = None
    """Of calls whose price is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """One agent, over all processes."""

    agent: str
    in_progress: int | None
    """`None` where nobody who answers knows it."""
    rates: Rates
    usd_share: float | None
    """Of what the whole fleet spends an hour."""
    now: Sequence[CapShare]
    """What the invocations in progress have used of the agent's caps, on average; nearest first."""
    hour: Sequence[CapShare]
    """What 95 % of the invocations that ended used at most; nearest first."""
    halts: Mapping[str, int]
    """By reason, the most frequent first."""
    errors: Mapping[str, int]
    """Model calls and tool calls that failed, and invocations that an exception ended."""

    @property
    def halt_count(self) -> int:
        """How often it was halted."""
        return sum(self.halts.values())

    @property
    def error_count(self) -> int:
        """Calls that failed; an invocation that an exception ended is mostly one of them."""
        # An invocation that an exception ended is left out, as the call that failed is counted
        # already.
        return self.errors.get("model_calls", 0) + self.errors.get("tool_calls", 0)

    @property
    def nearest(self) -> float:
        """The greatest share of a cap: of what is in progress, otherwise of what has ended."""
        # What is in progress can still be halted; what has ended can only tell what is usual.
        return max((each.share for each in self.now or self.hour), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRow:
    """How one key of a quota stands."""

    quota: str
    key: str
    used: float
    reserved: float
    limit: float
    resets: float
    """When the window ends, in seconds since the epoch."""

    @property
    def share(self) -> float:
        """What is used or reserved of what is permitted; 1 where nothing is permitted."""
        # A quota that permits nothing is used up from the start.
        return (self.used + self.reserved) / self.limit if self.limit else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentHalt:
    """Halts of one agent for one reason that were seen between two scrapes."""

    at: float
    agent: str
    reason: str
    action: str
    count: int
    trace_id: str | None
    """Of the last of them, where its trace is exported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What all agents come to."""

    agents: int
    in_progress: int
    rates: Rates
    halts: int
    errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How the fleet stands at one time."""

    at: float
    feeds: Mapping[str, str]
    """Who was asked, and what is wrong with the answer: a sentence, or nothing."""
    rate_seconds: float | None
    """Over how long turns and tokens were counted; `None` before that is long enough."""
    usd_seconds: float | None
    halts_since: float
    """Since when halts and errors are known: an hour ago, or later."""
    totals: Totals
    agents: Sequence[AgentRow] = ()
    quotas: Sequence[QuotaRow] = ()
    """Those that are nearly used up, the nearest first."""
    last_halts: Sequence[RecentHalt] = ()
    """The newest first, since somebody looks."""
    warnings: Sequence[str] = field(default=())
    """What is wrong with otel-limits itself, as sentences."""

    @property
    def problems(self) -> list[str]:
        """Every sentence that a person has to read."""
        return [*filter(None, self.feeds.values()), *self.warnings]


def as_json(fleet: Fleet) -> dict[str, Any]:
    """Return what a script is given."""
    return {
        "schema": SCHEMA,
        "at": iso(fleet.at),
        "feeds": [{"address": name, "error": said or None} for name, said in fleet.feeds.items()],
        "warnings": list(fleet.warnings),
        "rates_over_seconds": _rounded(fleet.rate_seconds),
        "usd_over_seconds": _rounded(fleet.usd_seconds),
        "halts_since": iso(fleet.halts_since),
        "totals": _flat(fleet.totals),
        "agents": [_flat(row) for row in fleet.agents],
        "quotas_near_their_end": [
            {**dataclasses.asdict(row), "share": row.share, "resets": iso(row.resets)}
            for row in fleet.quotas
        ],
        "last_halts": [
            {**dataclasses.asdict(halt), "at": iso(halt.at)} for halt in fleet.last_halts
        ],
    }


def iso(at: float) -> str:
    """Write a time as ISO 8601, to the second, in UTC."""
    at = min(max(at, 0.0), LATEST)  # whatever an endpoint says, it is shown
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _flat(row: AgentRow | Totals) -> dict[str, Any]:
    """Put the rates among the other values."""
    values = dataclasses.asdict(row)
    rates = values.pop("rates")
    return values | {name: _rounded(rate) for name, rate in rates.items()}


def _rounded(number: float | None) -> float | None:
    # What is counted over some seconds has no more digits than these.
    return None if number is None else round(number, 6)
