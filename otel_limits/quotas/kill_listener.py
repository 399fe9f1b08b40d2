"""Listens to what other processes of a fleet tell: whom to end, and what of a quota became free."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.wording import pluralize
from otel_limits.quotas.store import Freed, Kill, SharedStore, StoreError, SubscribeDeniedError
from otel_limits.quotas.store_thread import StoreThread

if TYPE_CHECKING:
    from otel_limits.quotas.wait_queues import QueueKey

logger = logging.getLogger("otel_limits")

RETRY_SECONDS: Final = 0.5
"""How long a listener waits before it connects again."""

LOOK_SECONDS: Final = 1.0
"""How often a process that may not listen looks for kills."""

COMPARISONS: Final = 5
"""How often both clocks are compared: the first question also connects, the fastest is best."""

MAX_SEEN: Final = 1000


class KillListener(StoreThread):
    """Waits for kills and for what becomes free, and ends within a second of being told to.

    Args:
        store: Where they are sent.
        kill: Ends the agents whose name fits a pattern and that began before a time, in monotonic
            seconds; returns how many.
        free: Wakes who waits in a line; in every line where it is `None`.
    """

    name = "otel-limits-kill"

    def __init__(
        self,
        store: SharedStore,
        kill: Callable[[str, float], int],
        free: Callable[[QueueKey | None], None],
    ) -> None:
        """Begin to listen."""
        self._kill = kill
        self._free = free
        super().__init__(store)

    def look_soon(self) -> None:
        """Look within a second whether a kill was given that was not heard."""
        # What is published reaches who is connected, and nobody says when it does not: a proxy in
        # between can lose it.
        self._has_missed = True

    def work(self, closing: threading.Event) -> None:
        """Listen, and connect again where the connection is lost."""
        # Here, as a child has heard nothing yet of what its parent has.
        self._began = time.monotonic()
        self._clock_offset = 0.0
        self._is_polling, self._has_missed = not self._store.has_channels, False
        # More than are sent in the hour for which kills are noted.
        self._seen: deque[str] = deque(maxlen=MAX_SEEN)
        while not closing.is_set():
            self._receive(closing)
            closing.wait(LOOK_SECONDS if self._is_polling else RETRY_SECONDS)

    @suppress_errors("kill")
    def _receive(self, closing: threading.Event) -> None:
        """Obey kills, and wake who waits, until the connection is lost."""
        with contextlib.suppress(StoreError):
            self._clock_offset = min(self._compare_clocks() for _ in range(COMPARISONS))
            # Ignore kills sent before this thread started.
            since = self._began + self._clock_offset
            try:
                for message in self._messages(since, closing):
                    # What arrives after `close()` is meant for those who still listen.
                    if closing.is_set():
                        return
                    if isinstance(message, Freed):
                        self._free(message.queue)
                    elif message is not None:
                        self._apply(message)
                    if self._has_missed:
                        self._has_missed = False
                        self._look(since)
            except SubscribeDeniedError as error:
                self._fall_back_to_polling(error)

    def _compare_clocks(self) -> float:
        """Return how far the store's clock is ahead of our monotonic one, at most."""
        # Before the question and not after it: at worst an invocation that began while it was
        # under way is taken for a later one.
        asked = time.monotonic()
        return self._store.now() - asked

    def _look(self, since: float) -> None:
        for kill in self._store.noted_kills(since):
            self._apply(kill)

    def _messages(self, since: float, closing: threading.Event) -> Iterable[Kill | Freed | None]:
        if self._is_polling:
            # Nobody tells it what became free: the first in each line asks as often as it looks.
            return (*self._store.noted_kills(since), Freed())
        return self._store.messages(since, closing)

    def _fall_back_to_polling(self, error: SubscribeDeniedError) -> None:
        """Log once that kills are polled."""
        self._is_polling = True
        INTERNAL_ERRORS.publish("kill")
        logger.warning(
            "otel-limits: cannot subscribe to kills (%s); polling every %g s. Allow its user to "
            "subscribe to the channels of otel-limits.",
            error,
            LOOK_SECONDS,
        )

    def _apply(self, kill: Kill) -> None:
        """Kill invocations that started before the kill was sent."""
        # After reconnecting, those of the last hour are heard again.
        if kill.id in self._seen:
            return
        # Before it is obeyed: one that fails half-way is not begun again at every reconnection.
        self._seen.append(kill.id)
        ended = self._kill(kill.pattern, kill.at - self._clock_offset)
        logger.warning(
            "otel-limits: received kill for agents matching %r: %s.",
            kill.pattern,
            pluralize(ended, "invocation halted", "invocations halted"),
        )
