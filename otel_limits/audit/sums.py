"""Model calls added up, by any property of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, Final, TypeAlias

from otel_limits.ledger.calendar import PERIODS, QUARTER, QUARTER_SECONDS, label
from otel_limits.ledger.rows import dollars

EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
DATES: Final = ("hour", "day", "week", "month")
"""Properties that stand in the order of time."""


@dataclass(slots=True)
class Sums:
    """Model calls added up."""

    calls: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    written: int = 0
    """Input that was put in a cache."""
    pico: int = 0
    has_price: bool = False
    saved: int = 0
    """Picodollars that the calls would have cost more without a cache."""
    has_saved: bool = False
    unpriced_tokens: int = 0
    unmeasured_calls: int = 0

    def add(self, row: Sequence[Any]) -> None:
        """Add one group of calls, as the ledger sums them."""
        calls, sent, received, cached, written, pico, saved, unpriced, unmeasured = row
        self.calls += int(calls)
        self.input += int(sent)
        self.output += int(received)
        self.cached += int(cached)
        self.written += int(written)
        # As whole numbers: PostgreSQL answers with decimals, and SQLite may with text.
        self.pico += int(pico or 0)
        self.has_price |= pico is not None
        self.saved += int(saved or 0)
        self.has_saved |= saved is not None
        self.unpriced_tokens += int(unpriced)
        self.unmeasured_calls += int(unmeasured)

    @property
    def tokens(self) -> int:
        """Input and output together."""
        return self.input + self.output

    @property
    def cost(self) -> Decimal | None:
        """USD of the calls with a price; `None` when none has one."""
        return dollars(self.pico) if self.has_price else None

    @property
    def cache_saved(self) -> Decimal | None:
        """USD that caching saved, below 0 where it cost more; `None` where no call tells."""
        return dollars(self.saved) if self.has_saved else None

    @property
    def row(self) -> tuple[int | None, ...]:
        """What `add` takes."""
        # No price is not 0: a group without any has to stay unknown in a larger one.
        pico = self.pico if self.has_price else None
        saved = self.saved if self.has_saved else None
        counted = (self.calls, self.input, self.output, self.cached, self.written)
        return (*counted, pico, saved, self.unpriced_tokens, self.unmeasured_calls)

    @property
    def cached_share(self) -> float | None:
        """The part of the input that came from a cache.

        Never above 1: what was imported by a version that took the cached part for a part beside
        the input says more than the whole.
        """
        return min(1.0, self.cached / self.input) if self.input else None

    def merge(self, part: Sums) -> None:
        """Add what was summed elsewhere."""
        # By the same door as rows of the ledger, so that a new sum is added in one place.
        self.add(part.row)


Groups: TypeAlias = dict[tuple[Any, ...], Sums]
SummedCalls: TypeAlias = Iterable[tuple[Mapping[str, Any], Sequence[Any]]]
"""Properties of groups of calls, each with its sums as `Sums.add` takes them."""


def fold(rows: SummedCalls, by: Sequence[str], zone: tzinfo = timezone.utc) -> Groups:
    """Add up groups that may be finer than `by`; `zone` is that of their days."""
    groups: Groups = {}
    for keys, sums in rows:
        key = tuple(property_of(keys, name, zone) for name in by)
        groups.setdefault(key, Sums()).add(sums)
    return groups


def property_of(keys: Mapping[str, Any], name: str, zone: tzinfo) -> Any:
    """One property of a group of calls, hours, days, weeks and months as text."""
    if name not in PERIODS:
        return keys[name]
    # Where a day of the zone is not one of UTC, the ledger gives quarters of an hour: every zone's
    # days consist of whole ones.
    if QUARTER in keys:
        local = datetime.fromtimestamp(int(keys[QUARTER]) * QUARTER_SECONDS, zone)
    elif name == "hour":
        local = datetime.fromtimestamp(int(keys["hour"]) * 3600, timezone.utc)
    else:
        local = EPOCH + timedelta(days=int(keys["day"]))
    return label(name, local)
