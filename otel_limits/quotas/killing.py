"""Ends agents in every process of a fleet: one process tells, all that share the store listen."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from otel_limits.core.faults import never_raises
from otel_limits.quotas.store import StoreError

logger = logging.getLogger("otel_limits")

RETRY_SECONDS: Final = 0.5
"""How long a listener waits before it connects again."""

MAX_SEEN: Final = 1000


@dataclass(frozen=True, slots=True)
class Kill:
    """The order to end agents."""

    id: str
    pattern: str
    """Name of the agents; `*` and `?` stand for any characters."""


class Channel(Protocol):
    """Where kills are told and heard."""

    def now(self) -> float:
        """Return the time of those who tell."""

    def kills(self, since: float, closing: threading.Event) -> Iterator[Kill]:
        """Wait for kills until `closing` is set.

        Args:
            since: One that was told after this while nobody listened comes first.
            closing: Ends the waiting.

        Raises:
            StoreError: The connection was lost.
        """

    def reset_after_fork(self) -> None:
        """Connect anew in a child."""

    def close(self) -> None:
        """Let go of connections."""


class Listener:
    """Hears kills in a thread of its own.

    Args:
        channel: Where they are told; nobody else uses it.
        kill: Ends the agents whose name fits a pattern in this process, and returns how many.
    """

    def __init__(self, channel: Channel, kill: Callable[[str], int]) -> None:
        """Begin to listen."""
        self._channel = channel
        self._kill = kill
        self._start()

    def reset_after_fork(self) -> None:
        """Listen in a child, too: threads are not inherited."""
        self._channel.reset_after_fork()
        self._start()

    def close(self) -> None:
        """Stop listening, within a second."""
        self._closing.set()

    def _start(self) -> None:
        self._closing = threading.Event()
        self._since: float | None = None
        self._seen: deque[str] = deque(maxlen=MAX_SEEN)
        threading.Thread(
            target=self._listen, args=(self._closing,), name="otel-limits-kill", daemon=True
        ).start()

    @never_raises("kill")
    def _listen(self, closing: threading.Event) -> None:
        while not closing.is_set():
            self._hear(closing)
            closing.wait(RETRY_SECONDS)
        self._channel.close()

    @never_raises("kill")
    def _hear(self, closing: threading.Event) -> None:
        """Obey until the connection is lost."""
        with contextlib.suppress(StoreError):
            if self._since is None:
                self._since = self._channel.now()
            for kill in self._channel.kills(self._since, closing):
                if not closing.is_set():
                    self._obey(kill)

    def _obey(self, kill: Kill) -> None:
        """End what is live now; a kill that is heard twice is obeyed once."""
        if kill.id in self._seen:
            return
        self._seen.append(kill.id)
        ended = self._kill(kill.pattern)
        logger.warning(
            "otel-limits: told to end agents named %r: %d invocations end.", kill.pattern, ended
        )
