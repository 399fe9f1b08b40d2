"""Puts the parts of quotas together for a process, by the URL of their store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from otel_limits.quotas.client import StoreClient
from otel_limits.quotas.conversation_sync import ConversationSync, SharedConversations
from otel_limits.quotas.engine import Engine
from otel_limits.quotas.kill_listener import KillListener
from otel_limits.quotas.recovery import Recovery
from otel_limits.quotas.store import KeepsConversations
from otel_limits.quotas.store_worker import InlineExecutor, ThreadedExecutor
from otel_limits.quotas.stores import is_shared, open_shared_store, open_store
from otel_limits.quotas.wait_queues import WaitQueues
from otel_limits.runs.clock import CLOCK

if TYPE_CHECKING:
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.recovery import CallRecords
    from otel_limits.quotas.store import StorePlace
    from otel_limits.quotas.store_worker import StoreThread
    from otel_limits.runs.registry import RunRegistry


class Quotas:
    """Everything about quotas that is open in a process.

    Args:
        place: Where they are counted.
        quotas: The quotas in force.
        runs: The active invocations; kills end them.
        records: The calls in the ledger of this process.
    """

    def __init__(
        self,
        place: StorePlace,
        quotas: Callable[[], Sequence[Quota]],
        runs: RunRegistry,
        records: CallRecords,
    ) -> None:
        """Install the quota gate for all model calls of `runs`."""
        self.asked = (place.url, place.timeout, place.namespace)
        self._runs = runs
        self._threads: list[StoreThread] = []
        queues = WaitQueues(CLOCK)
        conversations: ConversationSync | None = None
        if is_shared(place.url):
            # One store per thread: none may be closed while another thread uses it.
            recovery = Recovery(open_shared_store(place), records, quotas)
            store = open_shared_store(place)
            executor = ThreadedExecutor(store, recovery.rebuild)
            listener = KillListener(
                open_shared_store(place),
                lambda agent, before: runs.kill(agent=agent, before=before),
                queues.notify_freed,
            )
            self._threads = [listener, recovery]
            client = StoreClient(executor, place.timeout, CLOCK, listener.look_soon)
            if isinstance(store, KeepsConversations):
                shared = SharedConversations(client, CLOCK)
                conversations = ConversationSync(shared, runs)
        else:
            client = StoreClient(
                InlineExecutor(open_store(place), queues.notify_freed), place.timeout, CLOCK
            )
        self._engine = Engine(
            quotas,
            client,
            publish=runs.observers.publish,
            price=runs.price_of_request,
            queues=queues,
            is_active=runs.__contains__,
            conversations=conversations,
        )
        # In the background: the first call finds the connection open and the scripts loaded.
        self._engine.client.start()
        # Last, because model calls use the gate from here on.
        runs.observers.gate = self._engine

    def after_fork(self) -> None:
        """Restart threads in a forked child; the run registry resets the gate."""
        for thread in self._threads:
            thread.after_fork()

    def close(self) -> None:
        """Remove the gate, flush pending operations and stop all threads."""
        # First, so that no call uses a store that is being closed.
        self._runs.observers.gate = None
        self._engine.close()
        for thread in self._threads:
            thread.close()
