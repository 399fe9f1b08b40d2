"""The in-memory quota store: the default, and the local store during outages."""

from __future__ import annotations

import math
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from otel_limits.quotas.keys import Key
from otel_limits.quotas.store import (
    DOUBTFUL,
    MOST_NEEDS,
    NEED_SECONDS,
    REMEMBERED_CALLS,
    REMEMBERED_MODELS,
    REMEMBERED_SECONDS,
    RETENTION_SECONDS,
    Change,
    Charge,
    Count,
    CountState,
    Demand,
    Grant,
    Operation,
    QuotaStore,
    ReadCounts,
    Refill,
    Renew,
    Reply,
    Reserve,
    Reset,
    Settle,
    Status,
    StoreError,
    StorePlace,
)
from otel_limits.runs.clock import CLOCK

Name: TypeAlias = tuple[str, str, str, int]
"""Quota, unit, key and first second of the window."""

SWEEP_AT: Final = 1000
"""Number of counts at which old ones are first dropped."""


@dataclass(slots=True)
class Lease:
    """The reservation of one operation in one count."""

    amount: int
    certain: bool
    expires: float
    lost: int = 0
    """Charged if it expires."""
    place: int = 0
    """In a token bucket: what must flow back until all of it has."""


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
    reset: str = ""
    amount: int = 0
    """In a token bucket: what flows back in `per`; 0 for other counts."""
    per: int = 1
    """In milliseconds."""
    at: int = 0
    """Until when it flowed back, in milliseconds since the epoch."""
    rest: int = 0
    """The fraction of a part that flowed back until then, in `1 / per`."""
    out: int = 0
    """All that ever flowed back or was given back."""

    def state(self, limit: int) -> CountState:
        """Return its state."""
        full_at = self.at_room(self.used + self.reserved) if self.amount else 0.0
        return CountState(self.used, self.reserved, limit, reset=self.reset, full_at=full_at)

    def at_room(self, lacking: int) -> float:
        """Return when this much more has flowed back, in seconds since the epoch."""
        left = -((self.rest - lacking * self.per) // self.amount)
        return (self.at + max(0, left)) / 1000

    def flow(self, now: float) -> None:
        """Let usage flow back since the last time."""
        if not self.amount:
            return
        at = int(now * 1000)
        gone, rest = divmod((at - self.at) * self.amount + self.rest, self.per)
        level = self.used + self.reserved
        # At its end, and after the clock was set back, the flow starts over.
        if gone >= level or at < self.at:
            gone, rest = max(0, min(gone, level)), 0
        self.at, self.rest = at, rest
        self.out += gone
        of_used = min(gone, self.used)
        self.used -= of_used
        self.reserved -= gone - of_used

    def pace(self, refill: Refill, limit: int, now: float) -> None:
        """Let `limit` flow back per time from now on."""
        if not self.amount:
            self.at = int(now * 1000)
        if (self.amount, self.per) != (limit, refill.seconds * 1000):
            self.amount, self.per, self.rest = limit, refill.seconds * 1000, 0

    def reserve(self, operation: str, lease: Lease) -> None:
        """Reserve for an operation."""
        self.reserved += lease.amount
        lease.place = self.out + self.used + self.reserved
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
            unspent = min(unspent, held, max(0, lease.place - self.out))
            self.out += max(0, unspent)
        self.reserved -= held
        self.used += held - unspent
        return True

    def purge(self, now: float, longest: float) -> None:
        """Drop leases that have expired, and charge those that are charged."""
        # A copy, because leases are dropped in the loop.
        for operation, lease in list(self.leases.items()):
            # The clock may have been set back: no lease lasts longer than a new one.
            lease.expires = min(lease.expires, now + longest)
            if lease.expires <= now:
                self.settle(operation, lease.lost)
                if lease.lost:
                    self.lost[operation] = lease.lost


@dataclass(frozen=True, slots=True, order=True)
class Need:
    """The amount that a waiting call needs; the oldest is the smallest."""

    since: int
    """In milliseconds since the epoch."""
    operation: str
    amount: int = field(compare=False)
    until: float = field(compare=False)


class CompletedOperation(NamedTuple):
    """The remembered result of an operation."""

    until: float
    status: Status
    unmet: tuple[int, ...]


class MemoryStore(QuotaStore):
    """Counts in this process; implements the Redis scripts in Python."""

    def __init__(self, clock: Callable[[], float] = CLOCK.time) -> None:
        """Create an empty store."""
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[Name, Bucket] = {}
        self._grants: dict[tuple[str, str, str], list[Grant]] = {}
        self._needs: dict[tuple[str, str, str], dict[str, Need]] = {}
        """Quota, unit and key → needs of waiting calls by their operation."""
        self._last_calls: dict[tuple[str, str], OrderedDict[str, deque[int]]] = {}
        """Quota and unit → model → usage of its last calls; the model called last is the last."""
        self._done: OrderedDict[str, CompletedOperation] = OrderedDict()
        self._sweep_at = SWEEP_AT

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Apply `operations` in order."""
        with self._lock:
            # Under the lock, so that no operation sees an earlier time than the one before it.
            now = self._clock()
            self._forget(now)
            return [self._run(each, now) for each in operations]

    def now(self) -> float:
        """Return the time of the clock."""
        return self._clock()

    def keys(self, quota: str) -> Iterator[Key]:
        """Iterate over recently used keys of a quota."""
        with self._lock:
            counts = [each.count for each in self._buckets.values() if each.count.quota == quota]
        return iter([Key(*pair) for pair in {(each.key, each.shown): None for each in counts}])

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[CountState]:
        """Return the state of counts."""
        (reply,) = self.run([ReadCounts("", tuple(counts))])
        return list(reply.standings)

    def change(self, count: Count, change: Change) -> int:
        """Reset a count or grant more: the only changes within a process."""
        if not isinstance(change, Reset | Grant):
            raise StoreError("counts in memory have neither set amounts nor blocks")
        with self._lock:
            if isinstance(change, Grant):
                name = count.quota, count.unit, count.key
                self._grants.setdefault(name, []).append(change)
                return 0
            bucket = self._bucket(count, 0)
            # Later than the last one, also in its millisecond; padded, so texts compare like times.
            last = int(bucket.reset.partition(".")[0] or 0)
            at = max(int(self._clock() * 1000), last + 1)
            if bucket.amount:
                bucket.out += bucket.used + bucket.reserved
                bucket.reserved = 0
            bucket.used, bucket.reset = 0, f"{at:014}.{uuid.uuid4().hex}"
            bucket.lost.clear()
            return 0

    def after_fork(self) -> None:
        """Replace the lock in a child, which continues with its own counts."""
        self._lock = threading.Lock()

    # --- under the lock ---------------------------------------------------------------------------

    def _run(self, operation: Operation, now: float) -> Reply:
        if isinstance(operation, ReadCounts):
            looked = tuple(self._standing(*each, now) for each in operation.counts)
            return Reply("looked", now, looked, workers=bool(operation.worker))
        if isinstance(operation, Renew):
            return self._renew(operation, now)
        done = self._done.get(operation.id)
        # One ID is one call: nothing follows its settlement, a repeated reservation gets the same
        # reply, and only its settlement, which has the same ID, is applied.
        if done is not None and (done.status == "settled" or isinstance(operation, Reserve)):
            return self._again(operation, done, now)
        if isinstance(operation, Settle):
            charged = tuple(self._charge(operation.id, each, now) for each in operation.charges)
            reply = Reply("settled", now, charged)
        else:
            reply = self._reserve(operation, now)
        if reply.status in ("admitted", "settled"):
            # Removed first to keep the order by age, which `_forget` relies on.
            self._done.pop(operation.id, None)
            self._done[operation.id] = CompletedOperation(
                now + REMEMBERED_SECONDS, reply.status, reply.unmet
            )
        return reply

    def _again(self, operation: Reserve | Settle, done: CompletedOperation, now: float) -> Reply:
        """Return the remembered result of an operation, with current counts."""
        if isinstance(operation, Settle):
            counts = [each.count for each in operation.charges]
            found = [self._buckets.get(_name(count), Bucket(count)) for count in counts]
            for bucket in found:
                bucket.flow(now)
            standings = [bucket.state(0) for bucket in found]
        else:
            standings = [
                self._standing(each.count, each.limit, now, operation.lease_seconds, each.known)
                for each in operation.demands
            ]
        return Reply(done.status, now, tuple(standings), done.unmet)

    def _renew(self, operation: Renew, now: float) -> Reply:
        ends = now + operation.lease_seconds
        for demand in operation.demands:
            bucket = self._buckets.get(_name(demand.count), Bucket(demand.count))
            lease = bucket.leases.get(operation.id)
            if lease is not None and lease.expires > now:
                lease.expires = ends
            elif lease is None and operation.again and operation.id not in bucket.lost:
                bucket = self._bucket(demand.count, 0)
                lost = demand.amount if demand.model else 0
                bucket.reserve(operation.id, Lease(demand.amount, demand.certain, ends, lost))
        return Reply("renewed", now)

    def _reserve(self, operation: Reserve, now: float) -> Reply:
        # Before any change: a reservation applies to all of its counts or to none.
        if any(now not in demand.count.window for demand in operation.demands):
            return Reply("elsewhere", now)
        leases = [operation.lease_of(demand) for demand in operation.demands]
        missing = {_name(each.count) for each in operation.demands} - self._buckets.keys()
        # First, because it recreates a lost count from the usage known to the client.
        wanted = [
            self._wanted(demand, now, lease)
            for demand, lease in zip(operation.demands, leases, strict=True)
        ]
        standings = [
            self._standing(demand.count, demand.limit, now) for demand in operation.demands
        ]
        needed = [
            # A call above the burst goes out when the bucket is full.
            amount if demand.count.refill is None else min(amount, standing.limit)
            for demand, amount, standing in zip(operation.demands, wanted, standings, strict=True)
        ]
        this = self._since(operation, now)
        lacks = [
            self._shortage(demand, amount, standing, this)
            for demand, amount, standing in zip(operation.demands, needed, standings, strict=True)
        ]
        lacking = tuple(position for position, amount in enumerate(lacks) if amount > 0)
        is_refused = any(operation.demands[position].enforced for position in lacking)
        waits = is_refused and all(
            operation.demands[position].waits
            for position in lacking
            if operation.demands[position].enforced
        )
        for position, demand in enumerate(operation.demands):
            is_waiting = waits and position in lacking and demand.enforced
            self._leave_room(demand.count, this, needed[position] if is_waiting else None, now)
        if is_refused:
            ends = min(
                self._changes_at(demand.count, lack)
                for demand, lack in zip(operation.demands, lacks, strict=True)
                if lack > 0 and demand.enforced
            )
            for name in missing:
                # It counted nothing, and another client may know what was lost.
                if not self._buckets[name].used:
                    del self._buckets[name]
            return Reply("refused", now, tuple(standings), lacking, ends)
        states = []
        for demand, amount, lease in zip(operation.demands, wanted, leases, strict=True):
            bucket = self._bucket(demand.count, demand.known)
            # Kept for the longest of the windows it was used with: a rule may change.
            bucket.count = max(bucket.count, demand.count, key=lambda each: each.window.end)
            self._pace(bucket, demand, now)
            lost = self._charged_if_lost(demand, amount)
            bucket.reserve(operation.id, Lease(amount, demand.certain, now + lease, lost))
            states.append(self._standing(demand.count, demand.limit, now))
        return Reply("admitted", now, tuple(states), lacking)

    def _since(self, operation: Reserve, now: float) -> Need:
        """Return since when a call waits, as a need of nothing."""
        since = int(now * 1000) - int(operation.waited * 1000)
        for demand in operation.demands:
            needs = self._needs_of(demand.count, now)
            # In all counts the same, so that no two calls leave room for each other.
            since = needs[operation.id].since if operation.id in needs else since
        return Need(since, operation.id, 0, 0.0)

    def _needs_of(self, count: Count, now: float) -> dict[str, Need]:
        """Return the needs of waiting calls, without those of ended ones."""
        needs = self._needs.setdefault((count.quota, count.unit, count.key), {})
        for name in [name for name, each in needs.items() if each.until <= now]:
            del needs[name]
        return needs

    def _shortage(self, demand: Demand, needed: int, standing: CountState, this: Need) -> int:
        """Return how much too little is left, next to calls that have waited longer."""
        count = demand.count
        needs = self._needs.get((count.quota, count.unit, count.key), {}).values()
        older = [each for each in needs if demand.enforced and each < this]
        ahead = sum(min(each.amount, standing.limit) for each in older)
        if not ahead and _is_lone(demand, needed, standing):
            return 0
        return standing.used + standing.reserved + ahead + needed - standing.limit

    def _leave_room(self, count: Count, this: Need, needed: int | None, now: float) -> None:
        """Let later calls leave room for this one, or no longer if it needs nothing."""
        needs = self._needs_of(count, now)
        needs.pop(this.operation, None)
        if needed is None:
            return
        oldest = sorted(needs.values())
        if len(oldest) >= MOST_NEEDS:
            if oldest[MOST_NEEDS - 1] < this:
                return
            del needs[oldest[MOST_NEEDS - 1].operation]
        needs[this.operation] = replace(this, amount=needed, until=now + NEED_SECONDS)

    def _pace(self, bucket: Bucket, demand: Demand, now: float) -> None:
        """Let the current amount of a token bucket flow back from now on."""
        if demand.count.refill is not None:
            granted = self._granted(demand.count, now)
            bucket.pace(demand.count.refill, demand.limit + granted, now)

    def _changes_at(self, count: Count, lacking: int) -> float:
        """Return when the first reservation of a count expires, or enough has flowed back."""
        bucket = self._bucket(count, 0)
        ends = min((lease.expires for lease in bucket.leases.values()), default=math.inf)
        return min(ends, bucket.at_room(lacking)) if bucket.amount else ends

    def _wanted(self, demand: Demand, now: float, longest: float) -> int:
        bucket = self._bucket(demand.count, demand.known)
        if not bucket.amount or now * 1000 < bucket.at:
            self._pace(bucket, demand, now)
        bucket.flow(now)
        bucket.purge(now, longest)
        # Concurrent calls of unknown size could each exceed their estimate, and together the limit.
        alone = demand.certain or all(lease.certain for lease in bucket.leases.values())
        return demand.amount if alone else DOUBTFUL * demand.amount

    def _charge(self, operation: str, charge: Charge, now: float) -> CountState:
        # A missing count is created: usage must be counted even without a reservation.
        bucket = self._bucket(charge.count, charge.known)
        bucket.flow(now)
        if not bucket.settle(operation, charge.amount):
            # The actual usage replaces what was charged when the lease expired.
            self._leave_room(charge.count, Need(0, operation, 0, 0.0), None, now)
            more = charge.amount - bucket.lost.pop(operation, 0)
            bucket.used += max(0, more) if bucket.amount else more
        if charge.model:
            self._note_call(charge)
        return bucket.state(0)

    def _charged_if_lost(self, demand: Demand, amount: int) -> int:
        """Return what to charge for a call if its lease expires."""
        if not demand.model:
            return 0
        models = self._last_calls.get((demand.count.quota, demand.count.unit))
        calls = models.get(demand.model) if models else None
        return min(amount, math.ceil(sum(calls) / len(calls))) if calls else amount

    def _note_call(self, charge: Charge) -> None:
        """Add a call to the last ones of its model."""
        name = (charge.count.quota, charge.count.unit)
        models = self._last_calls.setdefault(name, OrderedDict())
        calls = models.setdefault(charge.model, deque(maxlen=REMEMBERED_CALLS))
        calls.append(charge.amount)
        models.move_to_end(charge.model)
        if len(models) > REMEMBERED_MODELS:
            models.popitem(last=False)

    def _standing(
        self, count: Count, amount: int, now: float, longest: float = float("inf"), known: int = 0
    ) -> CountState:
        bucket = self._buckets.get(_name(count), Bucket(count, known))
        bucket.flow(now)
        bucket.purge(now, longest)
        limit = amount + self._granted(count, now)
        return bucket.state(limit if count.refill is None else count.refill.capacity(limit))

    def _granted(self, count: Count, now: float) -> int:
        # Expired grants are kept: operators make them, so there are few.
        grants = self._grants.get((count.quota, count.unit, count.key), ())
        return sum(each.amount for each in grants if each.until > now)

    def _bucket(self, count: Count, known: int) -> Bucket:
        bucket = self._buckets.get(_name(count))
        if bucket is None:
            bucket = self._buckets[_name(count)] = Bucket(count, known)
        return bucket

    def _forget(self, now: float) -> None:
        """Drop results and counts past their retention, to bound memory."""
        while self._done and next(iter(self._done.values())).until <= now:
            self._done.popitem(last=False)
        if len(self._buckets) > self._sweep_at:
            self._buckets = {
                name: bucket
                for name, bucket in self._buckets.items()
                if bucket.count.window.end + RETENTION_SECONDS > now
            }
            self._needs = {
                key: needs
                for key, needs in self._needs.items()
                if any(each.until > now for each in needs.values())
            }
            # Twice the rest, so that counts within their retention are not scanned on every call.
            self._sweep_at = max(SWEEP_AT, 2 * len(self._buckets))


def _is_lone(demand: Demand, amount: int, standing: CountState) -> bool:
    """Return whether an oversized call may run as the only one in flight."""
    return (
        demand.alone
        and amount > standing.limit
        and standing.reserved == 0
        and standing.used < standing.limit
    )


def require_readable(_name: str, _url: str) -> None:
    """Do nothing: the only URL has no parts to parse."""


def open_store(_: StorePlace) -> MemoryStore:
    """Return a new store for this process."""
    return MemoryStore()


def _name(count: Count) -> Name:
    return count.quota, count.unit, count.key, count.window.start
