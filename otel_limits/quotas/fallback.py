"""Remembers how counts stood, and holds quotas in this process while the store is lost."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.store import Count, Demand, Reply, Reserve, Standing

if TYPE_CHECKING:
    from otel_limits.quotas.tickets import Asked, Ticket

MAX_KNOWN: Final = 10_000
"""Counts whose last standing is remembered."""


class Fallback:
    """Remembers how counts stood, and lets this process use what was left.

    Processes cannot know of each other meanwhile: n of them can use n times what was left.
    """

    def __init__(self, clock: Callable[[], float], lease_seconds: float) -> None:
        """Begin with nothing known."""
        self._clock = clock
        self._lease = lease_seconds
        self._lock = threading.Lock()
        self._known: OrderedDict[Count, Standing] = OrderedDict()
        self._memory = MemoryStore(clock)
        self._is_used = False

    def known(self, count: Count) -> Standing | None:
        """Return how a count stood when the store was last heard."""
        return self._known.get(count)

    def remember(self, demand: Demand, standing: Standing) -> Standing:
        """Note how a count stands, and return it with its limit."""
        with self._lock:
            earlier = self._known.get(demand.count)
            # The reply to a settlement has no limit: only a reservation looks up the grants.
            limit = standing.limit or (earlier.limit if earlier else demand.limit)
            latest = self._known[demand.count] = replace(standing, limit=limit)
            self._known.move_to_end(demand.count)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return latest

    def end(self) -> None:
        """Begin anew: the store answers again, and what was used here is on its way to it."""
        if self._is_used:
            # A new one, as tickets that are still open settle in the one that they
            # were reserved in.
            self._memory, self._is_used = MemoryStore(self._clock), False

    def reserve(self, ticket: Ticket) -> tuple[list[Asked], Reply | None]:
        """Reserve here for the quotas that say so.

        Returns:
            What is asked of those quotas and the reply to it, if there are any.
        """
        chosen = [each for each in ticket.asked if each[0].quota.on_backend_error == "local"]
        if not chosen:
            return [], None
        demands = tuple(self._left(demand) for _, demand in chosen)
        (reply,) = self._memory.run([Reserve(ticket.id, demands, self._lease)])
        self._is_used = True
        ticket.reserved_in = self._memory if reply.status == "admitted" else None
        return chosen, reply

    def _left(self, demand: Demand) -> Demand:
        known = self.known(demand.count)
        limit = demand.limit if known is None else known.remaining
        # What was known is taken off the limit already: it must not be counted a second time.
        return replace(demand, limit=limit, known=0)
