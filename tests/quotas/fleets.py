"""Workers of a fleet within one process, each with an engine and a connection of its own."""

from __future__ import annotations

import asyncio
import itertools
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from otel_limits.core.events import Invocation, ModelCall, QuotaDecision
from otel_limits.core.usage import Usage
from otel_limits.quotas.client import StoreClient
from otel_limits.quotas.engine import Engine
from otel_limits.quotas.keys import Template
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import CountState, SharedStore, StorePlace
from otel_limits.quotas.store_worker import StoreWorker
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.wait_queues import WaitQueues
from otel_limits.quotas.windows import Windows
from otel_limits.runs.deadlines import Deadlines
from otel_limits.runs.gate import Request
from tests.quotas.conftest import Wire, eventually

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from tests.quotas.conftest import Server

NUMBERS = itertools.count()


def quota(name: str = "q", amount: int = 100, **more: Any) -> Quota:
    """Model calls, for long enough that no window ends within a test."""
    return Quota(name=name, unit="model_calls", amount=amount, windows=Windows("P366D"), **more)


class Worker:
    """What a process of a fleet has, with a connection of its own."""

    def __init__(self, url: str, held: Quota) -> None:
        self.events: list[Event] = []
        place = StorePlace(url, 2.0)
        store_worker = StoreWorker(open_shared_store(place))
        self.lines = WaitQueues(Deadlines())
        self.engine = Engine(
            lambda: [held],
            StoreClient(store_worker, 2.0),
            publish=self.events.append,
            price=lambda *_: Decimal(1),
            lines=self.lines,
            deadlines=Deadlines(),
        )
        self.engine.client.start()

    def call(self) -> bool:
        """Make one model call, from asking to its settlement; whether it went out."""
        invocation = self.ask()
        if invocation is None:
            return False
        self.end(invocation)
        return True

    def use_all(self) -> int:
        """Call until it is refused; how many calls went out."""
        return next(number for number in itertools.count() if not self.call())

    def ask(self) -> Invocation | None:
        """Ask for a call, of an invocation of its own."""
        name = f"i{next(NUMBERS)}"
        invocation = Invocation(agent="a", id=name, root_id=name)
        request = Request(invocation=invocation, model="m", input=1, output_cap=1)
        return None if asyncio.run(self.engine.admit(request)) else invocation

    def end(self, invocation: Invocation) -> None:
        """It took what it took."""
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
        """Look at the store now, as it does once a second."""
        looked = self.engine.client.fallback.looks
        self.engine.client.look_again()
        eventually(lambda: self.engine.client.fallback.looks > looked)

    def begin_a_window(self) -> None:
        """Let a window pass by the store's clock, as this worker knows it."""
        self.engine.client._clock_offset += 366 * 86_400

    def decisions(self) -> list[str]:
        """What was decided."""
        return [each.decision for each in self.events if isinstance(each, QuotaDecision)]


class Fleet:
    """Workers behind one wire."""

    def __init__(self, server: Server) -> None:
        self.wire = Wire(server.port)
        self.store = open_shared_store(StorePlace(server.url, 2.0))
        self.workers: list[Worker] = []

    def join(self, number: int, **more: Any) -> list[Worker]:
        """Let more workers begin: each makes a call, and all have seen how many they are."""
        begun = [Worker(self.wire.url, quota(**more)) for _ in range(number)]
        self.workers += begun
        for worker in begun:
            assert worker.call()
        for worker in self.workers:
            worker.look()
        return begun

    def cut(self) -> None:
        """Let nobody reach the store any more."""
        self.wire.close()

    def standing(self) -> CountState:
        """How the quota stands in the store."""
        return standing(self.store, quota())

    def use_all(self) -> int:
        """Let every worker call until it is refused; how many calls went out."""
        return sum(worker.use_all() for worker in self.workers)

    def close(self) -> None:
        """End all of them."""
        for worker in self.workers:
            worker.engine.close()
        self.wire.close()
        self.store.close()


def standing(store: SharedStore, held: Quota) -> CountState:
    """How a quota without a key stands in the store."""
    key = Template("").key(held.name, dict[str, object]().get)
    (found,) = store.look([(held.count(key, time.time()), held.amount)])
    return found
