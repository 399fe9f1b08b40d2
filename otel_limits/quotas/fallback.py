"""Remembers how counts stood, and decides about calls in this process while the store is lost."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.store import LOOKED_AT, Count, CountState, Demand, Reply, Reserve

if TYPE_CHECKING:
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.tickets import Asked, QuotaNeed, Ticket

MAX_KNOWN: Final = 10_000
"""Counts whose last standing is remembered."""

# A share is as good as the look that it comes from.
LOOK_SECONDS: Final = 1.0
"""How often a worker looks at what it has a share of, in a fleet of up to a hundred workers."""

LOOKS_A_SECOND: Final = 100
"""Looks of a larger fleet together: each of its workers looks less often."""

MAX_LOOK_SECONDS: Final = 20.0
"""How often a worker looks at least, so that it is not taken for gone."""

Rule: TypeAlias = Literal["grace", "deny", "allow", "local"]
"""What decides about a need: this worker's share, or what `on_store_error` says."""


QuotaKey: TypeAlias = tuple[str, str, str]
"""Quota, unit and id of the key, in whichever window."""


@dataclass(slots=True)
class CachedCount:
    """What was heard of one key of a quota, in the latest window that was heard of."""

    quota: Quota
    count: Count
    standing: CountState
    has_share: bool
    """Whether a share of it may be used, so that it has to be looked at."""

    def now(self, now: float) -> tuple[Count, int]:
        """Return what is counted of it at a time, and what its quota permits without grants."""
        # The window is worked out where it has to be, and no more: it is asked for each second.
        is_present = now in self.count.window
        window = self.count.window if is_present else self.quota.windows.at(now)
        return replace(self.count, window=window), self.quota.amount


@dataclass(slots=True)
class OutageDecision:
    """What was decided about a call without the store."""

    rules: list[tuple[QuotaNeed, Rule]]
    """What decided, for each need."""
    unanswered: list[Asked] = field(default_factory=list)
    """What refuses the call, because nobody knows whether there is enough."""
    asked: list[Asked] = field(default_factory=list)
    """What was asked of the memory of this process."""
    reply: Reply | None = None
    """Its answer; `None` where nothing was asked of it."""

    @property
    def is_admitted(self) -> bool:
        """Whether the call may go out."""
        return not self.unanswered and (self.reply is None or self.reply.status == "admitted")


class Fallback:
    """Remembers how counts stood, and lets this process use its share of what was left.

    Args:
        clock: What the store's clock shows.
        lease_seconds: How long a call holds what is set aside for it.
    """

    def __init__(self, clock: Callable[[], float], lease_seconds: float) -> None:
        """Begin with nothing known."""
        self._clock = clock
        self._lease = lease_seconds
        self._lock = threading.Lock()
        self._known: OrderedDict[QuotaKey, CachedCount] = OrderedDict()
        self._memory = MemoryStore(clock)
        self._is_used = False
        self._lost_at: float | None = None
        self._heard_at = 0.0
        self.workers = 0
        """Processes that looked at the store when this one did last; 0 before."""
        self.looks = 0
        """How often it was looked."""

    def known(self, count: Count) -> CountState | None:
        """Return how a count stood when the store was last heard."""
        known = self._known.get(_line(count))
        is_same = known is not None and known.count.window.start == count.window.start
        return known.standing if known is not None and is_same else None

    def remember(self, need: QuotaNeed, demand: Demand, standing: CountState) -> CountState:
        """Note how a count stands, and return it with its limit."""
        count = demand.count
        with self._lock:
            earlier = self._known.get(_line(count))
            # The reply to a settlement has no limit: only a reservation looks up the grants.
            if not standing.limit:
                before = self.known(count) or CountState(0, 0, demand.limit)
                standing = replace(standing, limit=before.limit, block=before.block)
            # A call that ends after its window tells nothing of the present one.
            if earlier is None or earlier.count.window.start <= count.window.start:
                has_share = bool(need.quota.grace)
                self._known[_line(count)] = CachedCount(need.quota, count, standing, has_share)
                self._known.move_to_end(_line(count))
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return standing

    def blocked(self, demand: Demand) -> CountState | None:
        """Return how a key stood that was seen blocked, while its block lasts."""
        known = self._known.get(_line(demand.count))
        block = None if known is None else known.standing.block
        is_blocked = block is not None and block.until > self._clock()
        return known.standing if known is not None and is_blocked else None

    # --- looking again ----------------------------------------------------------------------------

    @property
    def look_seconds(self) -> float:
        """After how long to look again."""
        return min(MAX_LOOK_SECONDS, max(LOOK_SECONDS, self.workers / LOOKS_A_SECOND))

    def shared(self) -> tuple[tuple[Count, int], ...]:
        """Return the counts to look at: those of the keys that were used last, in the present."""
        now = self._clock()
        with self._lock:
            held = (known for known in reversed(self._known.values()) if known.has_share)
            return tuple(known.now(now) for known in islice(held, LOOKED_AT))

    def looked(self, counts: Sequence[tuple[Count, int]], reply: Reply) -> None:
        """Note how counts stand after a look at them."""
        with self._lock:
            self.workers = reply.workers
            self.looks += 1
            for (count, _), standing in zip(counts, reply.standings, strict=True):
                known = self._known.get(_line(count))
                if known is not None and known.count.window.start <= count.window.start:
                    known.count, known.standing = count, standing

    def unshare(self, counts: Sequence[tuple[Count, int]]) -> None:
        """Look at these no more until they are heard of again: one of them can never be read."""
        with self._lock:
            for count, _ in counts:
                if _line(count) in self._known:
                    self._known[_line(count)].has_share = False

    # --- without the store ------------------------------------------------------------------------

    def enter_outage(self) -> None:
        """Note that the store does not answer."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()

    def is_in_grace(self, quota: Quota) -> bool:
        """Tell whether shares of a quota may be used now."""
        lost_at = self._lost_at
        return lost_at is not None and time.monotonic() - lost_at < quota.grace

    def on_reply(self, now: float) -> None:
        """Begin anew: the store answers, and what was used here is on its way to it.

        Args:
            now: Its time.
        """
        self._lost_at, self._heard_at = None, now
        if self._is_used:
            # A new one, as tickets that are still open settle in the one that they
            # were reserved in.
            self._memory, self._is_used = MemoryStore(self._clock), False

    def decide(self, ticket: Ticket) -> OutageDecision:
        """Decide about a call, and reserve for it here."""
        rules = [self._rule(*each) for each in ticket.asked]
        while True:
            outcome = self._try(ticket, rules)
            short = () if outcome.reply is None else outcome.reply.unmet
            used_up = [need for need, _ in (outcome.asked[n] for n in short)]
            # Only where a share is used up: what a quota says for this case then applies.
            passed = [
                n for n, need in enumerate(ticket.needs) if rules[n] == "grace" and need in used_up
            ]
            if outcome.is_admitted or not passed:
                return outcome
            for n in passed:
                rules[n] = ticket.needs[n].quota.on_store_error

    def _try(self, ticket: Ticket, rules: Sequence[Rule]) -> OutageDecision:
        outcome = OutageDecision(list(zip(ticket.needs, rules, strict=True)))
        asked = ticket.asked
        outcome.unanswered = [
            each
            for each, rule in zip(asked, rules, strict=True)
            if rule == "deny" and each[0].is_enforced
        ]
        # Not at all where a quota denies: the call does not go out, so that nothing is
        # to be reserved.
        chosen = [n for n, rule in enumerate(rules) if rule in ("grace", "local")]
        if outcome.unanswered or not chosen:
            return outcome
        outcome.asked = [asked[n] for n in chosen]
        demands = tuple(self._reduced(asked[n][1], rules[n]) for n in chosen)
        (outcome.reply,) = self._memory.run([Reserve(ticket.id, demands, self._lease)])
        self._is_used = True
        ticket.reserved_in = self._memory if outcome.is_admitted else None
        return outcome

    def _rule(self, need: QuotaNeed, demand: Demand) -> Rule:
        """Return what decides about a need: its share while there is one."""
        has_share = self.workers > 0 and self._left(demand) is not None
        if has_share and self.is_in_grace(need.quota):
            return "grace"
        return need.quota.on_store_error

    def _left(self, demand: Demand) -> int | None:
        """Return what is left to be shared; `None` where this process cannot know it."""
        known = self.known(demand.count)
        if known is not None:
            return known.remaining
        # In a window that has begun since, nobody has used anything but a share: all of it is
        # left. But of a key that was never seen nobody knows whether it is blocked.
        is_seen = _line(demand.count) in self._known
        is_new = demand.count.window.start > self._heard_at
        return demand.limit if is_seen and is_new else None

    def _reduced(self, demand: Demand, rule: Rule) -> Demand:
        left = self._left(demand)
        limit = demand.limit if left is None else left
        if rule == "grace":
            # Every worker may use as much: what is left over is nobody's. And none sends a call
            # that is more than its share, though it be the only one, since others may do the same.
            limit //= self.workers
        # What was known is taken off the limit already: it must not be counted a second time.
        # Nor are places renewed here: this memory dies with the process that holds them.
        alone = demand.alone and rule == "local"
        return replace(demand, limit=limit, known=0, alone=alone, lease_seconds=None)


def _line(count: Count) -> QuotaKey:
    return count.quota, count.unit, count.key
