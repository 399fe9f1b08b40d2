"""Renews the reservations of in-flight calls.

The store releases a killed worker's reservations when their leases expire: slots after 30 seconds,
all others after minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.quotas.needs import SLOT_LEASE_SECONDS

if TYPE_CHECKING:
    from otel_limits.quotas.needs import QuotaReservation
    from otel_limits.runs.clock import Clock

# Two renewals may be lost or late before the shortest lease expires.
RENEW_SECONDS: Final = SLOT_LEASE_SECONDS / 3
"""How often a process checks for due renewals."""


class Leases:
    """Renews leases while their calls last.

    Args:
        clock: The clock of the process.
        held: Returns the reservations of in-flight calls.
        renew: Renews the due leases of a reservation, without waiting.
    """

    def __init__(
        self,
        clock: Clock,
        held: Callable[[], Sequence[QuotaReservation]],
        renew: Callable[[QuotaReservation], None],
    ) -> None:
        """Create an idle renewer."""
        self._clock = clock
        self._held = held
        self._renew_one = renew
        self.reset()

    def reset(self) -> None:
        """Reset in a forked child: the timer belongs to its parent."""
        self._lock = threading.Lock()
        self._timer: int | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Start renewing, until no reservation is left."""
        with self._lock:
            if self._timer is None and not self._is_closed:
                self._timer = self._renew_later()

    def close(self) -> None:
        """Stop renewing."""
        with self._lock:
            self._is_closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            self._clock.cancel(timer)

    @suppress_errors("quotas")
    def _renew(self) -> None:
        with self._lock:
            held = () if self._is_closed else self._held()
            # A later reservation calls `begin` again.
            self._timer = self._renew_later() if held else None
        for reservation in held:
            self._renew_one(reservation)

    def _renew_later(self) -> int:
        return self._clock.schedule(self._clock.now() + RENEW_SECONDS, self._renew)
