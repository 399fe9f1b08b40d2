"""Workers of a fleet within one process, each with its own engine and connection."""

from __future__ import annotations

import asyncio
import itertools
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from otel_limits.core.events import Invocation, ModelCall, QuotaDecision, QuotaWait
from otel_limits.core.price import Quote
from otel_limits.core.usage import Usage
from otel_limits.quotas.client import StoreClient
from otel_limits.quotas.engine import Engine
from otel_limits.quotas.keys import Template
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import CountState, SharedStore, StorePlace
from otel_limits.quotas.store_worker import ThreadedExecutor
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.wait_queues import WaitQueues
from otel_limits.quotas.windows import Windows
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.quota_gate import AdmissionRequest
from tests.quotas.fixtures import Wire, eventually

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from tests.quotas.fixtures import Server

NUMBERS = itertools.count()


def quota(name: str = "q", amount: int = 100, **more: Any) -> Quota:
    """A quota of model calls whose window outlasts the test."""
    return Quota(name=name, unit="model_calls", amount=amount, windows=Windows("P366D"), **more)


class Worker:
    """One process of a fleet, with its own connection."""

    def __init__(self, url: str, held: Quota) -> None:
        self.events: list[Event] = []
        place = StorePlace(url, 2.0)
        store_worker = ThreadedExecutor(open_shared_store(place))
        self.queues = WaitQueues(CLOCK)
        self.engine = Engine(
            lambda: [held],
            StoreClient(store_worker, 2.0, CLOCK),
            publish=self.events.append,
            price=lambda *_: Quote(price=Decimal(1)),
            queues=self.queues,
            is_active=lambda _: True,
        )
        self.engine.client.start()

    def call(self, agent: str = "a") -> bool:
        """Make one model call, from reservation to settlement; return whether it was admitted."""
        invocation = self.ask(agent)
        if invocation is None:
            return False
        self.end(invocation)
        return True

    def use_all(self) -> int:
        """Call until refused; return how many calls were admitted."""
        return next(number for number in itertools.count() if not self.call())

    def ask(self, agent: str = "a") -> Invocation | None:
        """Reserve a call for a new invocation."""
        return asyncio.run(self.admit(agent))

    async def admit(self, agent: str = "a", tokens: int = 2) -> Invocation | None:
        """Reserve a call of this size for a new invocation."""
        name = f"i{next(NUMBERS)}"
        invocation = Invocation(agent=agent, id=name, root_id=name)
        request = AdmissionRequest(invocation=invocation, model="m", input=1, output_cap=tokens - 1)
        return None if await self.engine.admit_by_quotas(request) else invocation

    def end(self, invocation: Invocation) -> None:
        """Settle the call at its actual usage."""
        self.engine(
            ModelCall(
                invocation=invocation,
                number=1,
                model="m",
                kind="measured",
                usage=Usage(input=1, output=1),
                estimated=False,
                span_id=None,
                seconds=None,
            )
        )
        asyncio.run(self.engine.settle(invocation.id))

    def look(self) -> None:
        """Refresh the counts now, as happens once a second."""
        looked = self.engine.client.fallback.looks
        self.engine.client.look_again()
        eventually(lambda: self.engine.client.fallback.looks > looked)

    def begin_a_window(self) -> None:
        """Move the last refresh to before the current window."""
        self.engine.client._clock_offset += 366 * 86_400

    def waits(self) -> list[QuotaWait]:
        """The starts of waits so far."""
        waits = (each for each in self.events if isinstance(each, QuotaWait))
        return [each for each in waits if each.seconds is None]

    def decisions(self) -> list[str]:
        """The decisions so far."""
        return [each.decision for each in self.events if isinstance(each, QuotaDecision)]


class Fleet:
    """Workers behind one proxy."""

    def __init__(self, server: Server) -> None:
        self.wire = Wire(server.port)
        self.store = open_shared_store(StorePlace(server.url, 2.0))
        self.workers: list[Worker] = []

    def join(self, number: int, **more: Any) -> list[Worker]:
        """Add workers: each makes a call and has seen the size of the fleet."""
        begun = [Worker(self.wire.url, quota(**more)) for _ in range(number)]
        self.workers += begun
        for worker in begun:
            assert worker.call()
        for worker in self.workers:
            worker.look()
        return begun

    def cut(self) -> None:
        """Cut every worker off from the store."""
        self.wire.close()

    def standing(self) -> CountState:
        """The quota's state in the store."""
        return standing(self.store, quota())

    def use_all(self) -> int:
        """Let every worker call until refused; return how many calls were admitted."""
        return sum(worker.use_all() for worker in self.workers)

    def close(self) -> None:
        """Close all workers."""
        for worker in self.workers:
            worker.engine.close()
        self.wire.close()
        self.store.close()


def standing(store: SharedStore, held: Quota) -> CountState:
    """The state of a quota without a key in the store."""
    key = Template("").key(held.name, dict[str, object]().get)
    (found,) = store.look([(held.count(key, time.time()), held.amount)])
    return found
