"""The quota gate of one process, whose quotas are in memory."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from otel_limits.core.events import Invocation, ModelCall, Stop
from otel_limits.core.price import Quote
from otel_limits.core.usage import Usage
from otel_limits.quotas.client import StoreClient
from otel_limits.quotas.engine import Engine
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import Operation, Reply, Reserve
from otel_limits.quotas.store_worker import InlineExecutor
from otel_limits.quotas.wait_queues import WaitQueues
from otel_limits.quotas.windows import UnboundedWindow, Windows
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.quota_gate import AdmissionRequest
from tests.quotas.waiters import DecisionRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT = 2.0
"""How long a call waits for the store, in seconds."""
MAX_WAIT = 60.0
"""How long it waits for quota."""

NAMES = itertools.count()


def quota(name: str = "q", unit: Any = "concurrency", amount: int = 1, **more: Any) -> Quota:
    """Return a quota for which calls wait, whose window outlasts the test."""
    windows: Any = UnboundedWindow() if unit == "concurrency" else Windows("P366D")
    fields: dict[str, Any] = {"on_exceeded": "wait", "max_wait": MAX_WAIT} | more
    return Quota(name=name, unit=unit, amount=amount, windows=windows, **fields)


class Executor(InlineExecutor):
    """Applies operations in this process, unless the store is silent."""

    is_silent = False
    """True while it does not answer reservations, but applies them."""

    def send(self, operation: Operation) -> Future[Reply]:
        """Apply an operation, and answer it or not."""
        future = super().send(operation)
        return Future() if self.is_silent and isinstance(operation, Reserve) else future


class Gate:
    """The quota gate of a process.

    Args:
        quotas: The quotas.
    """

    def __init__(self, *quotas: Quota) -> None:
        self.recorder = DecisionRecorder()
        self.ended: set[str] = set()
        """The invocations that have ended."""
        self.on_event: Callable[[object], object] = lambda _: None
        """Is called with each event."""
        self._quotas = quotas
        queues = WaitQueues(CLOCK)
        self.store = MemoryStore()
        self.executor = Executor(self.store, queues.notify_freed)
        self.engine = Engine(
            lambda: quotas,
            StoreClient(self.executor, TIMEOUT, CLOCK),
            publish=self._publish,
            price=lambda *_: Quote(price=Decimal(1)),
            queues=queues,
            is_active=lambda name: name not in self.ended,
        )

    def _publish(self, event: Any) -> None:
        self.recorder(event)
        self.on_event(event)

    def request(self, invocation: str = "", call_id: str = "", **more: Any) -> AdmissionRequest:
        """Return a request for a call, by default of a new invocation."""
        name = invocation or f"i{next(NAMES)}"
        return AdmissionRequest(
            invocation=Invocation(agent="a", id=name, root_id=name),
            call_id=call_id,
            model="m",
            input=1,
            output_cap=1,
            **more,
        )

    async def admit(self, request: AdmissionRequest) -> bool:
        """Request a call; return whether it is admitted."""
        return await self.engine.admit_by_quotas(request) is None

    async def settle(self, request: AdmissionRequest, *, is_sent: bool = True) -> None:
        """End the call of a request."""
        if is_sent:
            self.record(request)
        await self.engine.settle(request.invocation.id, request.call_id)

    def record(self, request: AdmissionRequest) -> None:
        """Publish the usage of a call."""
        self.engine(
            ModelCall(
                invocation=request.invocation,
                number=1,
                model=request.model,
                kind="measured",
                usage=Usage(input=1, output=1),
                estimated=False,
                span_id=None,
                seconds=None,
                call_id=request.call_id,
            )
        )

    def stop(self, request: AdmissionRequest, reason: str = "end_turn") -> None:
        """End the invocation of a request."""
        self.ended.add(request.invocation.id)
        invocation_id = request.invocation.id
        self.engine(Stop(reason=reason, action="none", breach=None, invocation_id=invocation_id))

    def used(self, name: str = "q") -> tuple[int, int]:
        """Return the used and reserved amounts of a quota."""
        (held,) = (each for each in self._quotas if each.name == name)
        count = held.count(held.key.key(name, lambda _: None), CLOCK.time())
        (state,) = self.store.look([(count, held.amount)])
        return state.used, state.reserved

    def close(self) -> None:
        """Disable the quotas."""
        self.engine.close()


class OpenGate(Protocol):
    """Opens a gate."""

    def __call__(self, *quotas: Quota) -> Gate:
        """Open a gate with these quotas."""


@pytest.fixture
def open_gate() -> Iterator[OpenGate]:
    """Gates that are closed after the test."""
    gates = []

    def opened(*quotas: Quota) -> Gate:
        gates.append(Gate(*quotas))
        return gates[-1]

    yield opened
    for gate in gates:
        gate.close()
