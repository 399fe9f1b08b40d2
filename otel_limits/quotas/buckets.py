"""One count in memory: its usage, its leases, and the flow of a token bucket."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from otel_limits.quotas.store import CountState

if TYPE_CHECKING:
    from otel_limits.quotas.store import Count, Refill


@dataclass(slots=True)
class Lease:
    """The reservation of one operation in one count."""

    amount: int
    certain: bool
    expires: float
    lost: int = 0
    """Charged if it expires."""
    returned_after: int = 0
    """In a token bucket: what `Bucket.returned` is once all of it has flowed back."""


@dataclass(slots=True)
class Bucket:
    """One count with its leases."""

    count: Count
    used: int = 0
    reserved: int = 0
    """By unsettled reservations; in a token bucket, without what has flowed back."""
    leases: dict[str, Lease] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    """Operations whose leases expired → what they were charged."""
    reset_mark: str = ""
    """Time and ID of its last reset, as in `CountState`."""
    amount: int = 0
    """In a token bucket: what flows back in `period`; 0 for other counts."""
    period: int = 1
    """In milliseconds."""
    flowed_until: int = 0
    """The last time that usage flowed back, in milliseconds since the epoch."""
    fraction: int = 0
    """The fraction of a part that flowed back until then, in `1 / period`."""
    returned: int = 0
    """All that ever flowed back or was given back."""

    def state(self, limit: int) -> CountState:
        """Return its state."""
        full_at = self.room_at(self.used + self.reserved) if self.amount else 0.0
        return CountState(self.used, self.reserved, limit, reset=self.reset_mark, full_at=full_at)

    def room_at(self, lacking: int) -> float:
        """Return when this much more has flowed back, in seconds since the epoch."""
        left = -((self.fraction - lacking * self.period) // self.amount)
        return (self.flowed_until + max(0, left)) / 1000

    def flow(self, now: float) -> None:
        """Let usage flow back since the last time."""
        if not self.amount:
            return
        at = int(now * 1000)
        gone, rest = divmod((at - self.flowed_until) * self.amount + self.fraction, self.period)
        level = self.used + self.reserved
        # At its end, and after the clock was set back, the flow starts over.
        if gone >= level or at < self.flowed_until:
            gone, rest = max(0, min(gone, level)), 0
        self.flowed_until, self.fraction = at, rest
        self.returned += gone
        of_used = min(gone, self.used)
        self.used -= of_used
        self.reserved -= gone - of_used

    def pace(self, refill: Refill, limit: int, now: float) -> None:
        """Let `limit` flow back per time from now on."""
        if not self.amount:
            self.flowed_until = int(now * 1000)
        if (self.amount, self.period) != (limit, refill.seconds * 1000):
            self.amount, self.period, self.fraction = limit, refill.seconds * 1000, 0

    def reserve(self, operation: str, lease: Lease) -> None:
        """Reserve for an operation."""
        self.reserved += lease.amount
        lease.returned_after = self.returned + self.used + self.reserved
        self.leases[operation] = lease

    def settle(self, operation: str, used: int) -> bool:
        """Release the lease of an operation and count its usage; False if it has none."""
        lease = self.leases.pop(operation, None)
        if lease is None:
            return False
        held = min(lease.amount, self.reserved)
        unspent = lease.amount - used
        if self.amount:
            # What has flowed back is not given back again.
            unspent = min(unspent, held, max(0, lease.returned_after - self.returned))
            self.returned += max(0, unspent)
        self.reserved -= held
        self.used += held - unspent
        return True

    def reset(self, now: float) -> None:
        """Set usage to 0; a token bucket is full."""
        # Later than the last one, also in its millisecond; padded, so texts compare like times.
        last = int(self.reset_mark.partition(".")[0] or 0)
        at = max(int(now * 1000), last + 1)
        if self.amount:
            self.returned += self.used + self.reserved
            self.reserved = 0
        self.used, self.reset_mark = 0, f"{at:014}.{uuid.uuid4().hex}"
        self.lost.clear()

    def expire(self, now: float, longest: float) -> None:
        """Drop leases that have expired, and charge those that are charged."""
        # A copy, because leases are dropped in the loop.
        for operation, lease in list(self.leases.items()):
            # The clock may have been set back: no lease lasts longer than a new one.
            lease.expires = min(lease.expires, now + longest)
            if lease.expires <= now:
                self.settle(operation, lease.lost)
                if lease.lost:
                    self.lost[operation] = lease.lost
