"""Puts the parts of quotas together for a process, by the URL of their store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from otel_limits.addresses import MEMORY_URL
from otel_limits.quotas.courier import Courier, Direct
from otel_limits.quotas.engine import TIMEOUT_SECONDS, Engine
from otel_limits.quotas.killing import Listener
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.recovery import Recovery

if TYPE_CHECKING:
    from otel_limits.quotas.courier import Carrier
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.recovery import Find
    from otel_limits.quotas.redis_store import RedisStore
    from otel_limits.runs import Runs


class Quotas:
    """Everything about quotas that is open in a process.

    Args:
        url: Where they are counted.
        quotas: What is to be held now.
        runs: The invocations that are asked about, and ended from afar.
        find: Looks up what killed workers did not settle.
    """

    def __init__(
        self,
        url: str,
        quotas: Callable[[], Sequence[Quota]],
        runs: Runs,
        find: Find,
    ) -> None:
        """Put them before every model call of `runs`."""
        carrier: Carrier
        self.url = url
        self._runs = runs
        self._threads: list[Listener | Recovery] = []
        if url == MEMORY_URL:
            carrier = Direct(MemoryStore())
        else:
            store = open_store(url, TIMEOUT_SECONDS)
            carrier = Courier(store)
            self._threads.append(Listener(store, lambda pattern: runs.kill(agent=pattern)))
            self._threads.append(Recovery(store, find))
        self._engine = Engine(
            quotas, carrier, tell=runs.tell, price=runs.price_of, timeout=TIMEOUT_SECONDS
        )
        runs.gate = self._engine

    def reset_after_fork(self) -> None:
        """Listen and look again in a child; the runs see to the rest."""
        for thread in self._threads:
            thread.reset_after_fork()

    def close(self) -> None:
        """Send what is left, and stop asking and listening."""
        self._runs.gate = None
        self._engine.close()
        for thread in self._threads:
            thread.close()


def open_store(url: str, timeout: float) -> RedisStore:
    """Make the store that a fleet shares, without connecting.

    Args:
        url: Where it is.
        timeout: Seconds after which it counts as gone.
    """
    from otel_limits.quotas.redis_store import RedisStore

    return RedisStore(url, timeout)
