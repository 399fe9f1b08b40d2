"""Counts quotas in the memory of this process: the default, and what is left in an outage."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from otel_limits.quotas.keys import Key
from otel_limits.quotas.store import (
    DOUBTFUL,
    REMEMBERED_SECONDS,
    RETENTION_SECONDS,
    Charge,
    Count,
    CountState,
    Demand,
    Operation,
    QuotaStore,
    ReadCounts,
    Renew,
    Reply,
    Reserve,
    Settle,
    Status,
    StorePlace,
)

Name: TypeAlias = tuple[str, str, str, int]
"""Quota, unit, key and first second of the window."""

SWEEP_AT: Final = 1000
"""Counts that are kept before the first look for old ones."""


@dataclass(slots=True)
class Lease:
    """What one operation has set aside."""

    amount: int
    certain: bool
    expires: float


@dataclass(slots=True)
class Bucket:
    """One count."""

    count: Count
    used: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """What is set aside."""
        return sum(lease.amount for lease in self.leases.values())

    def purge(self, now: float, longest: float) -> None:
        """Drop leases that have expired."""
        # A copy, as leases are dropped on the way.
        for operation, lease in list(self.leases.items()):
            # The clock may have been set back: no lease lasts longer than a new one.
            lease.expires = min(lease.expires, now + longest)
            if lease.expires <= now:
                del self.leases[operation]


class CompletedOperation(NamedTuple):
    """What was done of an operation, and until when that is remembered."""

    until: float
    status: Status
    unmet: tuple[int, ...]


class MemoryStore(QuotaStore):
    """Counts in this process alone, and does in Python what the scripts do in Redis."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Begin with nothing counted."""
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[Name, Bucket] = {}
        self._grants: dict[tuple[str, str, str], list[tuple[float, int]]] = {}
        self._done: OrderedDict[str, CompletedOperation] = OrderedDict()
        self._sweep_at = SWEEP_AT

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Do `operations` in order."""
        with self._lock:
            # Under the lock, so that no operation sees an earlier time than the one before it.
            now = self._clock()
            self._forget(now)
            return [self._run(each, now) for each in operations]

    def check(self) -> None:
        """Memory can be written to."""

    def now(self) -> float:
        """Return the time of day."""
        return self._clock()

    def keys(self, quota: str) -> Iterator[Key]:
        """Go through the keys of a quota that were used lately."""
        with self._lock:
            counts = [each.count for each in self._buckets.values() if each.count.quota == quota]
        return iter([Key(*pair) for pair in {(each.key, each.shown): None for each in counts}])

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[CountState]:
        """Return how counts stand."""
        (reply,) = self.run([ReadCounts("", tuple(counts))])
        return list(reply.standings)

    def reset(self, count: Count) -> None:
        """Begin to count from 0."""
        with self._lock:
            self._bucket(count, 0).used = 0

    def grant(self, count: Count, amount: int, until: float) -> None:
        """Permit `amount` more until a time."""
        with self._lock:
            self._grants.setdefault((count.quota, count.unit, count.key), []).append(
                (until, amount)
            )

    def after_fork(self) -> None:
        """Renew the lock in a child, which goes on counting for itself."""
        self._lock = threading.Lock()

    # --- under the lock ---------------------------------------------------------------------------

    def _run(self, operation: Operation, now: float) -> Reply:
        if isinstance(operation, ReadCounts):
            looked = tuple(self._standing(*each, now) for each in operation.counts)
            return Reply("looked", now, looked, workers=bool(operation.worker))
        if isinstance(operation, Renew):
            return self._renew(operation, now)
        done = self._done.get(operation.id)
        # The same id is one call: a settlement ends it for good, while a reservation that is sent
        # again is answered as before. Only its settlement, which bears the same id, goes on.
        if done is not None and (done.status == "settled" or isinstance(operation, Reserve)):
            return self._again(operation, done, now)
        if isinstance(operation, Settle):
            charged = tuple(self._charge(operation.id, each) for each in operation.charges)
            reply = Reply("settled", now, charged)
        else:
            reply = self._reserve(operation, now)
        if reply.status in ("admitted", "settled"):
            # Taken out first, so that the newest stands last: `_forget` ends at the first that
            # is not old.
            self._done.pop(operation.id, None)
            self._done[operation.id] = CompletedOperation(
                now + REMEMBERED_SECONDS, reply.status, reply.unmet
            )
        return reply

    def _again(self, operation: Reserve | Settle, done: CompletedOperation, now: float) -> Reply:
        """Tell what was done of an operation before, and how its counts stand now."""
        if isinstance(operation, Settle):
            counts = [each.count for each in operation.charges]
            found = [self._buckets.get(_name(count), Bucket(count)) for count in counts]
            standings = [CountState(bucket.used, bucket.reserved, 0) for bucket in found]
        else:
            standings = [
                self._standing(each.count, each.limit, now, operation.lease_seconds, each.known)
                for each in operation.demands
            ]
        return Reply(done.status, now, tuple(standings), done.unmet)

    def _renew(self, operation: Renew, now: float) -> Reply:
        for count in operation.counts:
            # Not made where it is missing: it would have been lost, and goes on from what is known.
            lease = self._buckets.get(_name(count), Bucket(count)).leases.get(operation.id)
            if lease is not None and lease.expires > now:
                lease.expires = now + operation.lease_seconds
        return Reply("renewed", now)

    def _reserve(self, operation: Reserve, now: float) -> Reply:
        # Before anything is changed: a reservation holds in all of its counts or in none.
        if any(now not in demand.count.window for demand in operation.demands):
            return Reply("elsewhere", now)
        leases = [operation.lease_of(demand) for demand in operation.demands]
        # First, as it makes anew a count that was lost, from what the asker knows of it.
        wanted = [
            self._wanted(demand, now, lease)
            for demand, lease in zip(operation.demands, leases, strict=True)
        ]
        standings = [
            self._standing(demand.count, demand.limit, now) for demand in operation.demands
        ]
        lacking = tuple(
            position
            for position, (amount, standing) in enumerate(zip(wanted, standings, strict=True))
            if standing.used + standing.reserved + amount > standing.limit
            and not _is_lone(operation.demands[position], amount, standing)
        )
        if any(operation.demands[position].enforced for position in lacking):
            short = (operation.demands[position] for position in lacking)
            ends = min(self._ends(demand.count) for demand in short if demand.enforced)
            return Reply("refused", now, tuple(standings), lacking, ends)
        for demand, amount, lease in zip(operation.demands, wanted, leases, strict=True):
            bucket = self._bucket(demand.count, demand.known)
            bucket.count = demand.count  # one without a window is kept for a day from now on
            bucket.leases[operation.id] = Lease(amount, demand.certain, now + lease)
        taken = tuple(
            CountState(each.used, each.reserved + amount, each.limit)
            for each, amount in zip(standings, wanted, strict=True)
        )
        return Reply("admitted", now, taken, lacking)

    def _ends(self, count: Count) -> float:
        """Return when the first reservation of a count ends by itself."""
        leases = self._bucket(count, 0).leases.values()
        return min((lease.expires for lease in leases), default=math.inf)

    def _wanted(self, demand: Demand, now: float, longest: float) -> int:
        bucket = self._bucket(demand.count, demand.known)
        bucket.purge(now, longest)
        # Several calls of unknown size at once could each turn out bigger, and together
        # pass the limit.
        alone = demand.certain or all(lease.certain for lease in bucket.leases.values())
        return demand.amount if alone else DOUBTFUL * demand.amount

    def _charge(self, operation: str, charge: Charge) -> CountState:
        # The count is made where it is missing: what was used has to be counted, reserved or not.
        bucket = self._bucket(charge.count, charge.known)
        bucket.leases.pop(operation, None)
        bucket.used += charge.amount
        return CountState(bucket.used, bucket.reserved, 0)

    def _standing(
        self, count: Count, amount: int, now: float, longest: float = float("inf"), known: int = 0
    ) -> CountState:
        bucket = self._buckets.get(_name(count), Bucket(count, known))
        bucket.purge(now, longest)
        # Not dropped when they end: a person gives them, so there are few.
        grants = self._grants.get((count.quota, count.unit, count.key), ())
        granted = sum(each for until, each in grants if until > now)
        return CountState(bucket.used, bucket.reserved, amount + granted)

    def _bucket(self, count: Count, known: int) -> Bucket:
        bucket = self._buckets.get(_name(count))
        if bucket is None:
            bucket = self._buckets[_name(count)] = Bucket(count, known)
        return bucket

    def _forget(self, now: float) -> None:
        """Drop what nobody can ask for any more, so that memory stays bounded."""
        while self._done and next(iter(self._done.values())).until <= now:
            self._done.popitem(last=False)
        if len(self._buckets) > self._sweep_at:
            self._buckets = {
                name: bucket
                for name, bucket in self._buckets.items()
                if bucket.count.window.end + RETENTION_SECONDS > now
            }
            # Twice what was left, so that counts which cannot be dropped yet are not looked at
            # with every call.
            self._sweep_at = max(SWEEP_AT, 2 * len(self._buckets))


def _is_lone(demand: Demand, amount: int, standing: CountState) -> bool:
    """Tell whether a call may go out by itself, since its estimate could never be met."""
    return (
        demand.alone
        and amount > standing.limit
        and standing.reserved == 0
        and standing.used < standing.limit
    )


def require_readable(_name: str, _url: str) -> None:
    """There is one URL, and nothing in it to be read."""


def open_store(_: StorePlace) -> MemoryStore:
    """Make a store for this process; there is nothing to connect to."""
    return MemoryStore()


def _name(count: Count) -> Name:
    return count.quota, count.unit, count.key, count.window.start
