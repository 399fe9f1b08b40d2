"""The in-memory quota store: the default, and the local store during outages."""

from __future__ import annotations

import math
import threading
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

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
    ConversationRecord,
    Count,
    CountConversation,
    CountName,
    CountState,
    Demand,
    Grant,
    Operation,
    QuotaKey,
    QuotaStore,
    ReadConversation,
    ReadCounts,
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

if TYPE_CHECKING:
    from otel_limits.quotas.store import Refill


# --- the store ------------------------------------------------------------------------------------

SWEEP_AT: Final = 1000
"""Number of counts at which old ones are first dropped."""


@dataclass(frozen=True, slots=True, order=True)
class WaitingNeed:
    """The amount that a waiting call needs; the oldest is the smallest."""

    since: int
    """In milliseconds since the epoch."""
    operation: str
    amount: int = field(compare=False)
    until: float = field(compare=False)


@dataclass(slots=True, eq=False)
class OpenDemand:
    """A demand with the count that it reserves in."""

    demand: Demand
    bucket: Bucket
    is_new: bool
    """Whether the count was created for it."""
    lease: float
    """In seconds."""
    whole: int
    """The amount of the quota, with grants."""
    state: CountState
    """Before the reservation."""
    amount: int
    """To be reserved."""
    needed: int
    """Must be left for it."""
    needs: dict[str, WaitingNeed]
    """Those of waiting calls."""
    lacking: int = 0
    """How much too little is left."""

    def shortage(self, this: WaitingNeed) -> int:
        """Return how much too little is left, next to calls that have waited longer."""
        demand, state = self.demand, self.state
        older = [each for each in self.needs.values() if demand.enforced and each < this]
        ahead = sum(min(each.amount, state.limit) for each in older)
        is_oversized = demand.alone and self.needed > state.limit
        # An oversized call is admitted as the only one in flight.
        if is_oversized and not ahead and not state.reserved and state.used < state.limit:
            return 0
        return state.used + state.reserved + ahead + self.needed - state.limit

    def changes_at(self) -> float:
        """Return when the first reservation of the count expires, or enough has flowed back."""
        bucket = self.bucket
        ends = min((lease.expires for lease in bucket.leases.values()), default=math.inf)
        return min(ends, bucket.room_at(self.lacking)) if bucket.amount else ends


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
        self._lock = threading.RLock()
        self._buckets: dict[CountName, Bucket] = {}
        self._grants: dict[QuotaKey, list[Grant]] = {}
        self._needs: dict[QuotaKey, dict[str, WaitingNeed]] = {}
        """Needs of waiting calls by their operation."""
        self._last_calls: dict[tuple[str, str], OrderedDict[str, deque[int]]] = {}
        """Quota and unit → model → usage of its last calls; the model called last is the last."""
        self._done: OrderedDict[str, CompletedOperation] = OrderedDict()
        self._conversations: dict[str, tuple[float, ConversationRecord]] = {}
        """Records of conversations, each with its expiry."""
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
        (reply,) = self.run([ReadCounts(tuple(counts))])
        return list(reply.states)

    def change(self, count: Count, change: Change) -> int:
        """Reset a count or grant more: the only changes within a process."""
        if not isinstance(change, Reset | Grant):
            raise StoreError("counts in memory have neither set amounts nor blocks")
        with self._lock:
            if isinstance(change, Grant):
                self._grants.setdefault(count.quota_key, []).append(change)
                return 0
            self._bucket(count, 0).reset(self._clock())
            return 0

    def after_fork(self) -> None:
        """Replace the lock in a child, which continues with its own counts."""
        self._lock = threading.RLock()

    # --- under the lock ---------------------------------------------------------------------------

    def _run(self, operation: Operation, now: float) -> Reply:
        if isinstance(operation, ReadCounts):
            states = tuple(self._state(*each, now) for each in operation.counts)
            return Reply("looked", now, states, workers=bool(operation.worker))
        if isinstance(operation, Renew):
            return self._renew(operation, now)
        if isinstance(operation, CountConversation | ReadConversation):
            return self._converse(operation, now)
        done = self._done.get(operation.id)
        # One ID is one call: nothing follows its settlement, a repeated reservation gets the same
        # reply, and only its settlement, which has the same ID, is applied.
        if done is not None and (done.status == "settled" or isinstance(operation, Reserve)):
            return self._repeat(operation, done, now)
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

    def _repeat(self, operation: Reserve | Settle, done: CompletedOperation, now: float) -> Reply:
        """Return the remembered result of an operation, with current counts."""
        if isinstance(operation, Settle):
            counts = [each.count for each in operation.charges]
            found = [self._buckets.get(count.name, Bucket(count)) for count in counts]
            for bucket in found:
                bucket.flow(now)
            states = [bucket.state(0) for bucket in found]
        else:
            states = [
                self._state(each.count, each.limit, now, operation.lease_seconds, each.known)
                for each in operation.demands
            ]
        return Reply(done.status, now, tuple(states), done.unmet)

    def _renew(self, operation: Renew, now: float) -> Reply:
        ends = now + operation.lease_seconds
        for demand in operation.demands:
            bucket = self._buckets.get(demand.count.name, Bucket(demand.count))
            lease = bucket.leases.get(operation.id)
            if lease is not None and lease.expires > now:
                lease.expires = ends
            elif lease is None and operation.again and operation.id not in bucket.lost:
                bucket = self._bucket(demand.count, 0)
                lost = demand.amount if demand.model else 0
                bucket.reserve(operation.id, Lease(demand.amount, demand.certain, ends, lost))
        return Reply("renewed", now)

    def _converse(self, operation: CountConversation | ReadConversation, now: float) -> Reply:
        """Add to the record of a conversation, if this is one, and return it."""
        expires, record = self._conversations.get(operation.conversation, (0.0, None))
        record = record if expires > now else None
        if isinstance(operation, CountConversation) and operation.id not in self._done:
            sums = Counter(record.sums if record is not None else {})
            sums.update(operation.parts)
            record = ConversationRecord(operation.conversation, operation.agent, sums, now)
            self._conversations[operation.conversation] = now + operation.idle_seconds, record
            done = CompletedOperation(now + REMEMBERED_SECONDS, "looked", ())
            self._done[operation.id] = done
        return Reply("looked", now, conversation=record)

    def _reserve(self, operation: Reserve, now: float) -> Reply:
        # Before any change: a reservation applies to all of its counts or to none.
        if any(now not in demand.count.window for demand in operation.demands):
            return Reply("elsewhere", now)
        demands = [self._open(each, operation.lease_of(each), now) for each in operation.demands]
        this = _waiting_call(operation, demands, now)
        for each in demands:
            each.lacking = each.shortage(this)
        unmet = tuple(position for position, each in enumerate(demands) if each.lacking > 0)
        refusing = [each for each in demands if each.lacking > 0 and each.demand.enforced]
        waits = all(each.demand.waits for each in refusing)
        for each in demands:
            is_waiting = waits and each in refusing
            _leave_room(each.needs, this, each.needed if is_waiting else None, now)
        if refusing:
            # Drop what the refused call created: another client may know what was lost.
            for each in demands:
                if each.is_new and not each.bucket.used:
                    self._buckets.pop(each.demand.count.name, None)
            states = tuple(each.state for each in demands)
            ends = min(each.changes_at() for each in refusing)
            return Reply("refused", now, states, unmet, ends)
        states = tuple(self._reserve_in(operation.id, each, now) for each in demands)
        return Reply("admitted", now, states, unmet)

    def _open(self, demand: Demand, lease: float, now: float) -> OpenDemand:
        """Find the count of a demand, bring it up to date, and compute what is needed of it."""
        count, refill = demand.count, demand.count.refill
        is_new = count.name not in self._buckets
        # A lost count is created with the usage that the client knows.
        bucket = self._bucket(count, demand.known)
        limit = whole = demand.limit + self._granted(count, now)
        if refill is not None:
            limit = refill.capacity(whole)
            # Also if the call is refused: the flow begins now.
            if not bucket.amount or now * 1000 < bucket.flowed_until:
                bucket.pace(refill, whole, now)
        bucket.flow(now)
        bucket.expire(now, lease)
        # Concurrent calls of unknown size could each exceed their estimate, and together the limit.
        alone = demand.certain or all(each.certain for each in bucket.leases.values())
        amount = demand.amount if alone else DOUBTFUL * demand.amount
        # A call above the burst goes out when the bucket is full.
        needed = amount if refill is None else min(amount, limit)
        needs = self._needs_of(count, now)
        return OpenDemand(
            demand, bucket, is_new, lease, whole, bucket.state(limit), amount, needed, needs
        )

    def _reserve_in(self, operation: str, opened: OpenDemand, now: float) -> CountState:
        """Reserve one demand of an admitted call."""
        demand, bucket, refill = opened.demand, opened.bucket, opened.demand.count.refill
        # Kept for the longest of the windows it was used with: a rule may change.
        bucket.count = max(bucket.count, demand.count, key=lambda each: each.window.end)
        if refill is not None:
            bucket.pace(refill, opened.whole, now)
        lost = self._charged_if_lost(demand, opened.amount)
        lease = Lease(opened.amount, demand.certain, now + opened.lease, lost)
        bucket.reserve(operation, lease)
        return bucket.state(opened.state.limit)

    def _needs_of(self, count: Count, now: float) -> dict[str, WaitingNeed]:
        """Return the needs of waiting calls, without those of ended ones."""
        needs = self._needs.setdefault(count.quota_key, {})
        for name in [name for name, each in needs.items() if each.until <= now]:
            del needs[name]
        return needs

    def _charge(self, operation: str, charge: Charge, now: float) -> CountState:
        # A missing count is created: usage must be counted even without a reservation.
        bucket = self._bucket(charge.count, charge.known)
        bucket.flow(now)
        if not bucket.settle(operation, charge.amount):
            self._needs_of(charge.count, now).pop(operation, None)
            # The actual usage replaces what was charged when the lease expired.
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

    def _state(
        self, count: Count, amount: int, now: float, longest: float = float("inf"), known: int = 0
    ) -> CountState:
        bucket = self._buckets.get(count.name, Bucket(count, known))
        bucket.flow(now)
        bucket.expire(now, longest)
        limit = amount + self._granted(count, now)
        return bucket.state(limit if count.refill is None else count.refill.capacity(limit))

    def _granted(self, count: Count, now: float) -> int:
        # Expired grants are kept: operators make them, so there are few.
        grants = self._grants.get(count.quota_key, ())
        return sum(each.amount for each in grants if each.until > now)

    def _bucket(self, count: Count, known: int) -> Bucket:
        bucket = self._buckets.get(count.name)
        if bucket is None:
            bucket = self._buckets[count.name] = Bucket(count, known)
        return bucket

    def _forget(self, now: float) -> None:
        """Drop results and counts past their retention, to bound memory."""
        while self._done and next(iter(self._done.values())).until <= now:
            self._done.popitem(last=False)
        if len(self._buckets) + len(self._conversations) > self._sweep_at:
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
            self._conversations = {
                name: kept for name, kept in self._conversations.items() if kept[0] > now
            }
            # Twice the rest, so that counts within their retention are not scanned on every call.
            left = len(self._buckets) + len(self._conversations)
            self._sweep_at = max(SWEEP_AT, 2 * left)


def _waiting_call(operation: Reserve, demands: Sequence[OpenDemand], now: float) -> WaitingNeed:
    """Return since when a call waits, as a need of nothing."""
    since = int(now * 1000) - int(operation.waited * 1000)
    for each in demands:
        # In all counts the same, so that no two calls leave room for each other.
        since = each.needs[operation.id].since if operation.id in each.needs else since
    return WaitingNeed(since, operation.id, 0, 0.0)


def _leave_room(
    needs: dict[str, WaitingNeed], this: WaitingNeed, needed: int | None, now: float
) -> None:
    """Let later calls leave room for this one, or no longer if it needs nothing."""
    needs.pop(this.operation, None)
    if needed is None:
        return
    oldest = sorted(needs.values())
    if len(oldest) >= MOST_NEEDS:
        if oldest[MOST_NEEDS - 1] < this:
            return
        del needs[oldest[MOST_NEEDS - 1].operation]
    needs[this.operation] = replace(this, amount=needed, until=now + NEED_SECONDS)


def require_readable(_name: str, _url: str) -> None:
    """Do nothing: the only URL has no parts to parse."""


def open_store(_: StorePlace) -> MemoryStore:
    """Return a new store for this process."""
    return MemoryStore()


# --- one count ------------------------------------------------------------------------------------


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
