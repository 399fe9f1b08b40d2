"""Decisions without the store, by the counts that a process has seen."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from otel_limits.quotas.known_counts import MAX_KNOWN, latest
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.store import LOOKED_AT, Count, CountState, Demand, QuotaKey, Reply, Reserve

if TYPE_CHECKING:
    from otel_limits.quotas.needs import Asked, QuotaNeed, QuotaReservation
    from otel_limits.quotas.quota import Quota


# A local share is only as accurate as the last read.
LOOK_SECONDS: Final = 1.0
"""Read interval of a worker, in a fleet of up to 100 workers."""

LOOKS_A_SECOND: Final = 100
"""Total reads per second of a larger fleet, whose workers read less often."""

MAX_LOOK_SECONDS: Final = 20.0
"""Maximum read interval: well below `WORKER_SECONDS`."""

Rule: TypeAlias = Literal["grace", "deny", "allow", "local"]
"""How a need is decided: by the local share (`grace`), or by `on_store_error`."""

RECENT_SECONDS: Final = 60.0
"""How long after its last call a key is read."""


def look_seconds(processes: int) -> float:
    """Return the read interval in a fleet of this size."""
    return min(MAX_LOOK_SECONDS, max(LOOK_SECONDS, processes / LOOKS_A_SECOND))


@dataclass(slots=True)
class CachedCount:
    """The last known state of one key of a quota, in its latest window."""

    quota: Quota
    count: Count
    state: CountState
    limit: int
    """The amount of its quota for the last call, without grants."""
    has_share: bool
    """Whether a local share of it may be used, which requires regular reads."""
    called_at: float
    """Its last call here, in monotonic seconds."""
    seen: int
    """The read after which it was last seen."""

    def now(self, now: float) -> tuple[Count, int]:
        """Return its count at a time, and the limit without grants."""
        # Runs every second, so the window is computed only if needed.
        is_present = now in self.count.window
        window = self.count.window if is_present else self.quota.window_at(now)
        return replace(self.count, window=window), self.limit


@dataclass(slots=True)
class OutageDecision:
    """A decision made without the store."""

    rules: list[tuple[QuotaNeed, Rule]]
    """The rule that decided each need."""
    unanswered: list[Asked] = field(default_factory=list)
    """Needs that refuse the call because the remainder is unknown."""
    asked: list[Asked] = field(default_factory=list)
    """Needs decided by the local store."""
    reply: Reply | None = None
    """Reply of the local store; `None` if it was not used."""

    @property
    def is_admitted(self) -> bool:
        """Whether the call is admitted."""
        return not self.unanswered and (self.reply is None or self.reply.status == "admitted")


class Fallback:
    """Caches counts and grants this process its local share during an outage.

    Args:
        clock: Returns the time, in monotonic seconds.
        store_time: Returns the store's time.
        lease_seconds: Lease of local reservations.
    """

    def __init__(
        self, clock: Callable[[], float], store_time: Callable[[], float], lease_seconds: float
    ) -> None:
        """Create an empty cache."""
        self._clock = clock
        self._store_time = store_time
        self._lease = lease_seconds
        self._lock = threading.RLock()
        self._known: OrderedDict[QuotaKey, CachedCount] = OrderedDict()
        self._memory = MemoryStore(store_time)
        self._is_used = False
        self._lost_at: float | None = None
        self._heard_at = 0.0
        self.workers = 0
        """Processes that share at the last read; 0 before the first."""
        self._living = 0
        self.looks = 0
        """Number of completed reads."""

    def known(self, count: Count) -> CountState | None:
        """Return the last known state of a count."""
        known = self._known.get(count.quota_key)
        return known.state if known is not None and known.count.name == count.name else None

    def remember(self, need: QuotaNeed, demand: Demand, state: CountState) -> CountState:
        """Cache the state of a count, and return it with its limit."""
        count = demand.count
        with self._lock:
            earlier = self._known.get(count.quota_key)
            # The reply to a settlement has no limit: only a reservation looks up the grants.
            if not state.limit:
                before = self.known(count) or CountState(0, 0, demand.capacity)
                state = replace(state, limit=before.limit, block=before.block)
            # A call that ends after its window has no data about the current one.
            if earlier is None or earlier.count.window.start <= count.window.start:
                if earlier is not None and earlier.count.name == count.name:
                    state = latest(earlier.state, state)
                self._known[count.quota_key] = CachedCount(
                    need.quota,
                    count,
                    state,
                    need.limit,
                    has_share=bool(need.quota.grace),
                    called_at=self._clock(),
                    seen=self.looks,
                )
                self._known.move_to_end(count.quota_key)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return state

    def blocked(self, demand: Demand) -> CountState | None:
        """Return the last known state of a key whose block is active, else `None`."""
        known = self._known.get(demand.count.quota_key)
        block = None if known is None else known.state.block
        is_blocked = block is not None and block.until > self._store_time()
        return known.state if known is not None and is_blocked else None

    # --- regular reads ----------------------------------------------------------------------------

    @property
    def look_seconds(self) -> float:
        """Seconds until the next read."""
        return look_seconds(self._living)

    def shared(self) -> tuple[tuple[Count, int], ...]:
        """Return the counts to read: current windows of the most recently used keys."""
        now, since = self._store_time(), self._clock() - RECENT_SECONDS
        with self._lock:
            recent = takewhile(
                lambda known: known.called_at > since, reversed(self._known.values())
            )
            held = (known for known in recent if known.has_share)
            return tuple(known.now(now) for known in islice(held, LOOKED_AT))

    def looked(self, counts: Sequence[tuple[Count, int]], reply: Reply) -> None:
        """Cache the counts of a completed read."""
        with self._lock:
            self.workers, self._living = reply.workers, reply.living
            self.looks += 1
            for (count, _), state in zip(counts, reply.states, strict=True):
                known = self._known.get(count.quota_key)
                if known is None or known.count.window.start > count.window.start:
                    continue
                is_same = known.count.name == count.name
                known.state = latest(known.state, state) if is_same else state
                known.count, known.seen = count, self.looks

    def unshare(self, counts: Sequence[tuple[Count, int]]) -> None:
        """Stop reading these until they are used again: one of them is unreadable."""
        with self._lock:
            for count, _ in counts:
                if count.quota_key in self._known:
                    self._known[count.quota_key].has_share = False

    # --- without the store ------------------------------------------------------------------------

    def enter_outage(self) -> None:
        """Record that the store is unavailable."""
        if self._lost_at is None:
            self._lost_at = self._clock()

    def is_in_grace(self, quota: Quota) -> bool:
        """Return whether local shares of a quota may be used now."""
        lost_at = self._lost_at
        return lost_at is not None and self._clock() - lost_at < quota.grace

    def on_reply(self, now: float) -> None:
        """End the outage: the store answers, and local usage is being sent to it.

        Args:
            now: The store's time.
        """
        self._lost_at, self._heard_at = None, now
        if self._is_used:
            # Create a new one: open reservations settle in the one that holds them.
            self._memory, self._is_used = MemoryStore(self._store_time), False

    def decide(self, reservation: QuotaReservation) -> OutageDecision:
        """Decide about a call and reserve locally."""
        rules = [self._rule(*each) for each in reservation.asked]
        while True:
            outcome = self._try(reservation, rules)
            short = () if outcome.reply is None else outcome.reply.unmet
            used_up = [outcome.asked[n][0] for n in short]
            # Only if a share is used up: then `on_store_error` applies.
            passed = [
                n
                for n, need in enumerate(reservation.needs)
                if rules[n] == "grace" and need in used_up
            ]
            if outcome.is_admitted or not passed:
                return outcome
            for n in passed:
                rules[n] = reservation.needs[n].quota.on_store_error

    def _try(self, reservation: QuotaReservation, rules: Sequence[Rule]) -> OutageDecision:
        outcome = OutageDecision(list(zip(reservation.needs, rules, strict=True)))
        asked = reservation.asked
        outcome.unanswered = [
            each
            for each, rule in zip(asked, rules, strict=True)
            if rule == "deny" and each[0].is_enforced
        ]
        # If any quota denies, the call is not sent and nothing is reserved.
        chosen = [n for n, rule in enumerate(rules) if rule in ("grace", "local")]
        if outcome.unanswered or not chosen:
            return outcome
        outcome.asked = [asked[n] for n in chosen]
        demands = tuple(self._reduced(asked[n][1], rules[n]) for n in chosen)
        (outcome.reply,) = self._memory.run([Reserve(reservation.id, demands, self._lease)])
        self._is_used = True
        reservation.reserved_in = self._memory if outcome.is_admitted else None
        return outcome

    def _rule(self, need: QuotaNeed, demand: Demand) -> Rule:
        """Return the rule for a need: its local share while there is one."""
        known = self._known.get(demand.count.quota_key)
        # Shares are wrong by no more than the usage of others since the last two reads.
        is_fresh = known is not None and known.seen >= self.looks - 1
        has_share = self.workers > 0 and is_fresh and self._left(demand) is not None
        if has_share and self.is_in_grace(need.quota):
            return "grace"
        return need.quota.on_store_error

    def _left(self, demand: Demand) -> int | None:
        """Return the remainder to share; `None` if unknown to this process."""
        known = self.known(demand.count)
        if known is not None:
            return known.remaining
        # In a window that began during the outage only shares were used, so the whole amount is
        # left. A key never seen before may be blocked, though.
        is_seen = demand.count.quota_key in self._known
        is_new = demand.count.window.start > self._heard_at
        return demand.capacity if is_seen and is_new else None

    def _reduced(self, demand: Demand, rule: Rule) -> Demand:
        left = self._left(demand)
        limit = demand.capacity if left is None else left
        if rule == "grace":
            # Every worker gets the same share, rounded down. `alone` does not apply: other workers
            # could each send an oversized call, too.
            limit //= self.workers
        # Known usage is already deducted from the limit. Slots need no short lease here: this store
        # ends with the process that uses them.
        alone = demand.alone and rule == "local"
        # A share of a token bucket does not refill: others use what flows back.
        count = replace(demand.count, refill=None)
        return replace(
            demand, count=count, limit=limit, known=0, alone=alone, lease_seconds=None, waits=0.0
        )
