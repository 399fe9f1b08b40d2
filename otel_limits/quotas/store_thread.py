"""Background threads with their own shared store."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from otel_limits.quotas.store import SharedStore


class StoreThread(ABC):
    """A background thread, restarted in forked children.

    Args:
        store: A store that only this thread uses.
    """

    name: ClassVar[str]
    """Name of the thread."""

    def __init__(self, store: SharedStore) -> None:
        """Start the thread."""
        self._store = store
        self._start()

    def after_fork(self) -> None:
        """Restart in a child: threads are not inherited."""
        self._store.after_fork()
        self._start()

    def close(self) -> None:
        """Stop the thread without waiting for it."""
        self._closing.set()

    @abstractmethod
    def work(self, closing: threading.Event) -> None:
        """Work until `closing` is set."""

    def _start(self) -> None:
        # A new event: the inherited one may be set.
        self._closing = threading.Event()
        threading.Thread(
            target=self._run, args=(self._closing,), name=self.name, daemon=True
        ).start()

    @suppress_errors("quotas")
    def _run(self, closing: threading.Event) -> None:
        self.work(closing)
        # In the thread that used it: no other thread may close its connection.
        self._store.close()
