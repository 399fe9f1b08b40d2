"""A thread that works with a shared store of its own until it is told to end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from otel_limits.quotas.store import SharedStore


class StoreThread(ABC):
    """Works in a thread of its own, in each process anew.

    Args:
        store: Where it works; nobody else uses this one.
    """

    name: ClassVar[str]
    """What the thread is called."""

    def __init__(self, store: SharedStore) -> None:
        """Start the thread."""
        self._store = store
        self._start()

    def after_fork(self) -> None:
        """Work in a child, too: threads are not inherited."""
        self._store.after_fork()
        self._start()

    def close(self) -> None:
        """Tell the thread to end, and do not wait for it."""
        self._closing.set()

    @abstractmethod
    def work(self, closing: threading.Event) -> None:
        """Work until `closing` is set."""

    def _start(self) -> None:
        # One per thread: the parent's may have been set, and its thread does not exist in a child.
        self._closing = threading.Event()
        threading.Thread(
            target=self._run, args=(self._closing,), name=self.name, daemon=True
        ).start()

    @suppress_errors("quotas")
    def _run(self, closing: threading.Event) -> None:
        self.work(closing)
        # In the thread that used it: a connection is never closed while another thread waits on it.
        self._store.close()
