"""Keeps the places of calls that are under way, where a quota permits only so many at once.

A place is leased for half a minute: that of a worker which was killed is free again by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from otel_limits.core.faults import never_raises
from otel_limits.quotas.store import Operation, Renew
from otel_limits.quotas.tickets import PLACE_LEASE_SECONDS

if TYPE_CHECKING:
    from otel_limits.quotas.tickets import Ticket
    from otel_limits.runs.deadlines import Deadlines

# Two renewals may be lost, or come late, before the place is.
RENEW_SECONDS: Final = PLACE_LEASE_SECONDS / 3
"""How often the places of this process are renewed."""


class Places:
    """Renews places while their calls last.

    Args:
        deadlines: The timer of the process.
        send: Brings an operation to the store, without waiting.
    """

    def __init__(self, deadlines: Deadlines, send: Callable[[Operation], object]) -> None:
        """Begin with none."""
        self._deadlines = deadlines
        self._send = send
        self.start_afresh()

    def start_afresh(self) -> None:
        """Forget all, in a child: they are its parent's."""
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []
        self._timer: int | None = None

    def hold(self, ticket: Ticket) -> None:
        """Renew the places of a ticket, if it has some, until it is settled."""
        if not any(need.quota.unit == "concurrency" for need in ticket.needs):
            return
        with self._lock:
            self._tickets.append(ticket)
            if self._timer is None:
                self._timer = self._deadlines.after(RENEW_SECONDS, self._renew)

    def close(self) -> None:
        """Renew nothing any more."""
        with self._lock:
            self._tickets = []
            timer, self._timer = self._timer, None
        if timer is not None:
            self._deadlines.cancel(timer)

    @never_raises("quotas")
    def _renew(self) -> None:
        with self._lock:
            held = self._tickets = [each for each in self._tickets if not each.is_settled]
            self._timer = self._deadlines.after(RENEW_SECONDS, self._renew) if held else None
        for ticket in held:
            counts = (demand.count for demand in ticket.demands if demand.lease_seconds)
            self._send(Renew(ticket.id, tuple(counts), PLACE_LEASE_SECONDS))
