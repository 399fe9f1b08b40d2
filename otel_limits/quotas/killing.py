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

logger = logging.getLogger("otel_limits")

RETRY_SECONDS: Final = 0.5
"""How long a listener waits before it connects again."""

MAX_SEEN: Final = 1000


class KillListener:
    """Waits for kills in a thread of its own.

    Args:
        store: Where they are sent; nobody else uses this one.
        kill: Ends the agents whose name fits a pattern in this process, and returns how many.
    """

    def __init__(self, store: SharedStore, kill: Callable[[str], int]) -> None:
        """Begin to listen."""
        self._store = store
        self._kill = kill
        self._start()

    def after_fork(self) -> None:
        """Listen in a child, too: threads are not inherited."""
        self._store.after_fork()
        self._start()

    def close(self) -> None:
        """Stop listening, within a second."""
        self._closing.set()

    def _start(self) -> None:
        # One per thread: the parent's may have been set, and its thread does not exist in a child.
        self._closing = threading.Event()
        self._since: float | None = None
        # More than are sent in the minute for which kills are noted.
        self._seen: deque[str] = deque(maxlen=MAX_SEEN)
        threading.Thread(
            target=self._listen, args=(self._closing,), name="otel-limits-kill", daemon=True
        ).start()

    @never_raises("kill")
    def _listen(self, closing: threading.Event) -> None:
        while not closing.is_set():
            self._hear(closing)
            closing.wait(RETRY_SECONDS)
        self._store.close()

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
