"""Puts the parts of quotas together for a process, by the URL of their store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from otel_limits.quotas.courier import Courier, Direct
from otel_limits.quotas.engine import TIMEOUT_SECONDS, Engine
from otel_limits.quotas.killing import Listener
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.recovery import Recovery
from otel_limits.quotas.urls import MEMORY_URL

if TYPE_CHECKING:
    from otel_limits.quotas.courier import Carrier
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.recovery import Find
    from otel_limits.quotas.redis_store import RedisStore
    from otel_limits.runs.registry import Runs

HEALTH_INTERVAL_SECONDS: Final = 15
"""How often a listener looks whether its silent connection is still one."""


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
            carrier = Courier(open_store(url))
            listening = open_store(url, health_interval=HEALTH_INTERVAL_SECONDS)
            self._threads.append(Listener(listening, lambda pattern: runs.kill(agent=pattern)))
            self._threads.append(Recovery(open_store(url), find))
        self._engine = Engine(
            quotas,
            carrier,
            tell=runs.observers.publish,
            price=runs.price_of,
            timeout=TIMEOUT_SECONDS,
        )
        runs.observers.gate = self._engine

    def reset_after_fork(self) -> None:
        """Listen and look again in a child; the runs see to the rest."""
        for thread in self._threads:
            thread.reset_after_fork()

    def close(self) -> None:
        """Send what is left, and stop asking and listening."""
        self._runs.observers.gate = None
        self._engine.close()
        for thread in self._threads:
            thread.close()


def open_store(url: str, health_interval: int = 0) -> RedisStore:
    """Make the store that a fleet shares, without connecting, for one thread.

    Args:
        url: Where it is.
        health_interval: Seconds after which a silent connection is tried; 0 for never.
    """
    from otel_limits.quotas.redis_store import RedisStore

    return RedisStore(url, TIMEOUT_SECONDS, health_interval)
