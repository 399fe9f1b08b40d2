"""Sums of model calls, by any property."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, Final, TypeAlias

from otel_limits.ledger.calendar import PERIODS, QUARTER, QUARTER_SECONDS, label
from otel_limits.ledger.rows import EPOCH, dollars

DATES: Final = ("hour", "day", "week", "month")
"""Properties that are ordered by time."""

TOOL_ERRORS: Final = (
    "Errors of tools are those that the framework reports; limits on failing tools also count "
    "results that read like an error."
)
"""Part of the notes below tables with errors of tools."""


@dataclass(slots=True)
class Sums:
    """Sums of model calls."""

    calls: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    written: int = 0
    """Input that was written to a cache."""
    pico: int = 0
    has_price: bool = False
    saved: int = 0
    """Picodollars that caching saved."""
    has_saved: bool = False
    unpriced_tokens: int = 0
    estimated_calls: int = 0
    unmeasured_calls: int = 0

    def add(self, row: Sequence[Any]) -> None:
        """Add one group of calls, as summed by the ledger."""
        calls, sent, received, cached, written, pico, saved, unpriced, *unknown = row
        self.calls += int(calls)
        self.input += int(sent)
        self.output += int(received)
        self.cached += int(cached)
        self.written += int(written)
        # Converted: PostgreSQL returns decimals, and SQLite may return text.
        self.pico += int(pico or 0)
        self.has_price |= pico is not None
        self.saved += int(saved or 0)
        self.has_saved |= saved is not None
        self.unpriced_tokens += int(unpriced)
        estimated, unmeasured = unknown
        self.estimated_calls += int(estimated)
        self.unmeasured_calls += int(unmeasured)

    @property
    def tokens(self) -> int:
        """Input and output."""
        return self.input + self.output

    @property
    def cost(self) -> Decimal | None:
        """USD of the calls with a price; `None` if there are others, and none has one."""
        is_unknown = self.unpriced_tokens or self.unmeasured_calls or not self.calls
        return None if is_unknown and not self.has_price else dollars(self.pico)

    @property
    def cache_saved(self) -> Decimal | None:
        """USD that caching saved, negative if it cost more; `None` if unknown."""
        return dollars(self.saved) if self.has_saved else None

    @property
    def row(self) -> tuple[int | None, ...]:
        """The parameter of `add`."""
        # A missing price is not 0: a group without any must stay unknown in a larger one.
        pico = self.pico if self.has_price else None
        saved = self.saved if self.has_saved else None
        counted = (self.calls, self.input, self.output, self.cached, self.written)
        unknown = (self.estimated_calls, self.unmeasured_calls)
        return (*counted, pico, saved, self.unpriced_tokens, *unknown)

    @property
    def cached_share(self) -> float | None:
        """The part of the input that came from a cache, at most 1."""
        return min(1.0, self.cached / self.input) if self.input else None

    def merge(self, part: Sums) -> None:
        """Add other sums."""
        # Through `add`, so that a new sum is only added there.
        self.add(part.row)


Groups: TypeAlias = dict[tuple[Any, ...], Sums]
SummedCalls: TypeAlias = Iterable[tuple[Mapping[str, Any], Sequence[Any]]]
"""Properties of groups of calls, with their sums for `Sums.add`."""


def fold(rows: SummedCalls, by: Sequence[str], zone: tzinfo = timezone.utc) -> Groups:
    """Add up groups that may be finer than `by`; `zone` is the time zone of their days."""
    groups: Groups = {}
    for keys, sums in rows:
        key = tuple(property_of(keys, name, zone) for name in by)
        groups.setdefault(key, Sums()).add(sums)
    return groups


def property_of(keys: Mapping[str, Any], name: str, zone: tzinfo) -> Any:
    """Return one property of a group of calls; hours, days, weeks and months as text."""
    if name not in PERIODS:
        return keys[name]
    # For other zones than UTC, the ledger returns quarters of an hour: the days of every zone
    # consist of whole ones.
    if QUARTER in keys:
        local = datetime.fromtimestamp(int(keys[QUARTER]) * QUARTER_SECONDS, zone)
    elif name == "hour":
        local = datetime.fromtimestamp(int(keys["hour"]) * 3600, timezone.utc)
    else:
        local = EPOCH + timedelta(days=int(keys["day"]))
    return label(name, local)
