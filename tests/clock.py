"""A clock for time bounds: it stops while the machine gives its cores to other processes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Self

TICK_SECONDS: Final = 0.01
LONGEST_SECONDS: Final = 2 * TICK_SECONDS
"""The most that one tick counts. A later one was delayed by the machine."""


class Clock:
    """Counts the seconds in which this process could run.

    A thread ticks during the test. Waiting for I/O or for an event loop that
    is blocked delays no tick; a machine that stalls delays the ticks and the test alike.
    """

    def __init__(self) -> None:
        """Begin at 0."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._counted, self._ticked = 0.0, time.monotonic()

    def __enter__(self) -> Self:
        """Begin to tick."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stand still for good."""
        self._over.set()
        self._thread.join()

    def __call__(self) -> float:
        """Return the seconds so far."""
        with self._lock:
            return self._counted + min(time.monotonic() - self._ticked, LONGEST_SECONDS)

    def _tick(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            with self._lock:
                now = time.monotonic()
                self._counted += min(now - self._ticked, LONGEST_SECONDS)
                self._ticked = now
