"""Keeps what is set aside for calls that are under way, for as long as they last.

All of it is leased: what a worker held that was killed is free again when its leases end, which is
after minutes, and for a place among the calls at once after half a minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.quotas.tickets import SLOT_LEASE_SECONDS

if TYPE_CHECKING:
    from otel_limits.quotas.tickets import Ticket
    from otel_limits.runs.deadlines import Deadlines

# Two renewals may be lost, or come late, before the shortest lease ends.
RENEW_SECONDS: Final = SLOT_LEASE_SECONDS / 3
"""How often a process looks what it has to renew."""


class Leases:
    """Renews leases while their calls last.

    Args:
        deadlines: The timer of the process.
        held: Returns the tickets for which something is set aside.
        renew: Renews what is due of a ticket, without waiting.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        held: Callable[[], Sequence[Ticket]],
        renew: Callable[[Ticket], None],
    ) -> None:
        """Begin with nothing to renew."""
        self._deadlines = deadlines
        self._held = held
        self._renew_ticket = renew
        self.reset()

    def reset(self) -> None:
        """Forget the timer, in a child: it is its parent's."""
        self._lock = threading.Lock()
        self._timer: int | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Renew from now on, until nothing is held any more."""
        with self._lock:
            if self._timer is None and not self._is_closed:
                self._timer = self._deadlines.schedule(RENEW_SECONDS, self._renew)

    def close(self) -> None:
        """Renew nothing any more."""
        with self._lock:
            self._is_closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            self._deadlines.cancel(timer)

    @suppress_errors("quotas")
    def _renew(self) -> None:
        with self._lock:
            held = () if self._is_closed else self._held()
            # Whoever holds something from here on begins anew.
            self._timer = self._deadlines.schedule(RENEW_SECONDS, self._renew) if held else None
        for ticket in held:
            self._renew_ticket(ticket)
