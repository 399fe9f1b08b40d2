"""Receives kills and released quota from other processes."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.labels import quoted
from otel_limits.core.wording import pluralize
from otel_limits.quotas.store import (
    Freed,
    Kill,
    Publishes,
    SendsKills,
    SharedStore,
    StoreError,
    SubscribeDeniedError,
)
from otel_limits.quotas.store_worker import StoreThread
from otel_limits.runs.clock import CLOCK

if TYPE_CHECKING:
    from otel_limits.quotas.wait_queues import QueueKey

logger = logging.getLogger("otel_limits")

RETRY_SECONDS: Final = 0.5
"""Delay before reconnecting."""

POLL_SECONDS: Final = 1.0
"""Polling interval of a process that cannot subscribe."""

COMPARISONS: Final = 5
"""Clock comparisons; the fastest is used, because the first also connects."""

MAX_SEEN: Final = 1000


class KillListener(StoreThread):
    """A thread that applies kills and wakes waiters; it stops within a second.

    Args:
        store: Delivers the messages.
        kill: Kills invocations of matching agents that began before a time, in monotonic seconds;
            returns their number.
        free: Wakes the waiters of a queue, or of all queues for `None`.
    """

    name = "otel-limits-kill"

    def __init__(
        self,
        store: SharedStore,
        kill: Callable[[str, float], int],
        free: Callable[[QueueKey | None], None],
    ) -> None:
        """Start the thread."""
        self._kill = kill
        self._free = free
        super().__init__(store)

    def look_soon(self) -> None:
        """Check for missed kills within a second."""
        # Pub/sub delivery is not guaranteed: a proxy in between can lose messages.
        self._has_missed = True

    def work(self, closing: threading.Event) -> None:
        """Receive messages, reconnecting when the connection is lost."""
        # Reset here, because a child has received no messages yet.
        self._began = CLOCK.now()
        self._clock_offset = 0.0
        self._is_polling, self._has_missed = not isinstance(self._store, Publishes), False
        # More than are sent in the hour for which kills are kept.
        self._seen: deque[str] = deque(maxlen=MAX_SEEN)
        while not closing.is_set():
            self._receive(closing)
            closing.wait(POLL_SECONDS if self._is_polling else RETRY_SECONDS)

    @suppress_errors("kill")
    def _receive(self, closing: threading.Event) -> None:
        """Apply kills and wake waiters until the connection is lost."""
        with contextlib.suppress(StoreError):
            self._clock_offset = min(self._compare_clocks() for _ in range(COMPARISONS))
            # Ignore kills sent before this thread started.
            since = self._began + self._clock_offset
            try:
                for message in self._messages(since, closing):
                    # Ignore messages after `close()`.
                    if closing.is_set():
                        return
                    if isinstance(message, Freed):
                        self._free(message.queue)
                    elif message is not None:
                        self._apply(message)
                    if self._has_missed:
                        self._has_missed = False
                        for kill in self._noted_kills(since):
                            self._apply(kill)
            except SubscribeDeniedError as error:
                self._fall_back_to_polling(error)

    def _compare_clocks(self) -> float:
        """Return the store's time minus the monotonic time, at most."""
        # Measured before the request: at worst, an invocation that began during it escapes a kill
        # sent during it.
        asked = CLOCK.now()
        return self._store.now() - asked

    def _noted_kills(self, since: float) -> list[Kill]:
        return self._store.noted_kills(since) if isinstance(self._store, SendsKills) else []

    def _messages(self, since: float, closing: threading.Event) -> Iterable[Kill | Freed | None]:
        if isinstance(self._store, Publishes) and not self._is_polling:
            return self._store.subscribe(since, closing)
        # Releases are not notified: wake the first waiter of each queue at every poll.
        return (*self._noted_kills(since), Freed())

    def _fall_back_to_polling(self, error: SubscribeDeniedError) -> None:
        """Log once that kills are polled."""
        self._is_polling = True
        INTERNAL_ERRORS.publish("kill")
        logger.warning(
            "otel-limits: cannot subscribe to kills (%s); polling every %g s. Allow its user to "
            "subscribe to the channels of otel-limits.",
            error,
            POLL_SECONDS,
        )

    def _apply(self, kill: Kill) -> None:
        """Kill invocations that started before the kill was sent."""
        # After reconnecting, kills of the last hour are received again.
        if kill.id in self._seen:
            return
        # Before applying it: one that fails must not be retried at every reconnection.
        self._seen.append(kill.id)
        ended = self._kill(kill.pattern, kill.at - self._clock_offset)
        logger.warning(
            "otel-limits: received kill for agents matching %s: %s.",
            quoted(kill.pattern),
            pluralize(ended, "invocation halted", "invocations halted"),
        )
