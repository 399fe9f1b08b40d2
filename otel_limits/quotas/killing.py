"""Ends agents in every process of a fleet: one sends a kill, all that share the store listen."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from otel_limits.core.faults import never_raises
from otel_limits.quotas.store import Kill, SharedStore, StoreError
from otel_limits.quotas.store_thread import StoreThread

logger = logging.getLogger("otel_limits")

RETRY_SECONDS: Final = 0.5
"""How long a listener waits before it connects again."""

MAX_SEEN: Final = 1000


class KillListener(StoreThread):
    """Waits for kills, and ends within a second of being told to.

    Args:
        store: Where they are sent.
        kill: Ends the agents whose name fits a pattern in this process, and returns how many.
    """

    name = "otel-limits-kill"

    def __init__(self, store: SharedStore, kill: Callable[[str], int]) -> None:
        """Begin to listen."""
        self._kill = kill
        super().__init__(store)

    def work(self, closing: threading.Event) -> None:
        """Listen, and connect again where the connection is lost."""
        # Here, as a child has heard nothing yet of what its parent has.
        self._since: float | None = None
        # More than are sent in the minute for which kills are noted.
        self._seen: deque[str] = deque(maxlen=MAX_SEEN)
        while not closing.is_set():
            self._hear(closing)
            closing.wait(RETRY_SECONDS)

    @never_raises("kill")
    def _hear(self, closing: threading.Event) -> None:
        """Obey kills until the connection is lost."""
        with contextlib.suppress(StoreError):
            if self._since is None:
                # The store's time and not ours, and only once: after a reconnection what was missed
                # counts as well.
                self._since = self._store.now()
            for kill in self._store.kills(self._since, closing):
                # What arrives after `close()` is meant for those who still listen.
                if not closing.is_set():
                    self._obey(kill)

    def _obey(self, kill: Kill) -> None:
        """End what is live now."""
        # After reconnecting, those of the last minute are heard again.
        if kill.id in self._seen:
            return
        # Before it is obeyed: one that fails half-way is not begun again at every reconnection.
        self._seen.append(kill.id)
        ended = self._kill(kill.pattern)
        logger.warning(
            "otel-limits: told to end agents named %r: %d invocations end.", kill.pattern, ended
        )
