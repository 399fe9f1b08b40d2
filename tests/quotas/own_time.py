"""A fleet of waiting calls in simulated time.

Engines, queues and the store are the real ones. Clocks and the connection to the store are
simulated: half a minute takes no time, and the order of events is fixed.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

from otel_limits.core.events import Invocation, ModelCall, Stop
from otel_limits.core.price import Quote
from otel_limits.core.usage import Usage
from otel_limits.quotas.client import LEASE_SECONDS, StoreClient
from otel_limits.quotas.engine import Engine
from otel_limits.quotas.needs import SLOT_LEASE_SECONDS
from otel_limits.quotas.quota import Quota, Unit
from otel_limits.quotas.store import (
    FOREVER,
    Count,
    CountState,
    Freed,
    Operation,
    QuotaStore,
    Reply,
    Settle,
    SharedStore,
    StoreOutageError,
)
from otel_limits.quotas.wait_queues import QueueKey, WaitQueues
from otel_limits.quotas.windows import UnboundedWindow, Windows
from otel_limits.runs.quota_gate import AdmissionRequest

if TYPE_CHECKING:
    from otel_limits.core.policy import Verdict


def _quota(
    name: str,
    unit: Unit,
    amount: int,
    windows: Windows | UnboundedWindow,
    max_wait: float = 0.0,
    **more: Any,
) -> Quota:
    """Create one of the quotas below; without `max_wait` it refuses."""
    waits: dict[str, Any] = {"on_exceeded": "wait", "max_wait": max_wait} if max_wait else {}
    where = (("agent", f"*{name}*"),)
    return Quota(
        name=name,
        unit=unit,
        amount=amount,
        windows=windows,
        where=where,
        grace=0.0,
        **waits,
        **more,
    )


QUOTAS: Final = {
    "p": _quota("p", "concurrency", 2, UnboundedWindow(), max_wait=40.0),
    "q": _quota("q", "model_calls", 3, Windows("PT1M"), max_wait=20.0),
    "r": _quota("r", "model_calls", 8, Windows("PT20M"), on_lost="charge"),
    "s": _quota("s", "model_calls", 6, Windows("PT1M"), max_wait=20.0, pace="smooth", burst=2),
}
"""A concurrency quota, a rate of three per minute, a quota that refuses and charges lost calls, and
a token bucket. An agent's name lists those that apply to it."""

AGENTS: Final = ("p", "q", "pq", "pr", "qr", "pqr", "s", "ps")
WORKERS: Final = 3
POLLING: Final = 2
"""The worker without a subscription, which polls once a second."""


@dataclass
class Clock:
    """Shows the time it is set to, to all workers."""

    begin: float
    """The start, in seconds since the epoch."""
    now: float = 0.0

    def time(self) -> float:
        """Return the time of day."""
        return self.begin + self.now


class Loop(asyncio.SelectorEventLoop):
    """An event loop driven by that clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock_shown = clock
        super().__init__()

    def time(self) -> float:
        """Return the clock's time."""
        return self._clock_shown.now


class WorkerClock:
    """The clock of one worker, which its event loop drives."""

    def __init__(self, clock: Clock, loop: Loop) -> None:
        self._loop = loop
        self._handles: list[asyncio.TimerHandle] = []
        self.now, self.time = loop.time, clock.time

    async def wait(self, future: asyncio.Future[None], until: float) -> None:
        """Wait until something is done."""
        await asyncio.wait([future], timeout=max(0.0, until - self.now()))

    def schedule(self, at: float, callback: Callable[[], None]) -> int:
        """Call something at a time."""
        self._handles.append(self._loop.call_at(at, callback))
        return len(self._handles) - 1

    def cancel(self, number: int) -> None:
        """Cancel a scheduled call."""
        self._handles[number].cancel()


class Place(NamedTuple):
    """The store of a fleet."""

    store: QuotaStore
    set_clock: Callable[[float], None]
    read_news: Callable[[], Iterable[Freed]] | None = None
    """Return the server's news; `None` without a server."""
    shared: SharedStore | None = None
    """The same store, for an operator."""


class Connection:
    """Sends operations to the store, some of them twice, and none from a dead worker."""

    is_shared = True

    def __init__(self, store: QuotaStore, free: Callable[[Freed], None] | None) -> None:
        self._store = store
        self._free = free
        self.is_dead = False
        self.is_lossy = False
        """Whether replies are lost, so every operation is sent again."""

    async def ask(self, _operation: Operation, _seconds: float) -> None:
        """Leave it to `send`."""

    def send(self, operation: Operation) -> Future[Reply]:
        """Run the operation immediately."""
        future: Future[Reply] = Future()
        if self.is_dead:
            future.set_exception(StoreOutageError("dead"))
            return future
        replies = [self._store.run([operation])[0] for _ in range(1 + self.is_lossy)]
        future.set_result(replies[-1])
        if self._free is not None and isinstance(operation, Settle):
            for charge in operation.charges:
                self._free(Freed((charge.count.quota, charge.count.key)))
        return future


class Worker:
    """One process of the fleet, with its own event loop, which pauses while suspended."""

    def __init__(self, connection: Connection, shown: Clock, number: int) -> None:
        loop = Loop(shown)
        clock: Any = WorkerClock(shown, loop)
        executor: Any = connection
        self.connection = connection
        self.loop = loop
        self.actions: list[Callable[[], object]] = []
        """The next actions of its agents."""
        self.news: list[Freed] = []
        """Notifications that it has not processed yet."""
        self.suspended_at: float | None = None
        self.queues = WaitQueues(clock)
        # Of two calls that have waited equally long, that with the smaller ID is the older one.
        name = SimpleNamespace(hex=f"worker{number:03}")
        with patch.object(uuid, "uuid4", lambda: name):
            self.engine = Engine(
                lambda: tuple(QUOTAS.values()),
                StoreClient(executor, 2.0, clock),
                publish=lambda _: None,
                price=lambda *_: Quote(price=Decimal(0)),
                queues=self.queues,
                is_active=lambda _: True,
            )

    def run(self) -> None:
        """Act, process notifications, and run all that is due."""
        self.loop.run_until_complete(self._act())

    async def _act(self) -> None:
        # Only here, because waiters without a running event loop are passed over.
        while self.actions:
            self.actions.pop(0)()
        while self.news:
            self.queues.notify_freed(self.news.pop(0).queue)
        for _ in range(30):
            await asyncio.sleep(0)

    def queued(self, queues: Mapping[QueueKey, str]) -> frozenset[QueueKey]:
        """Return those of these queues in which a new call would wait."""

        async def join() -> frozenset[QueueKey]:
            waiter = self.queues.join(queues, lambda: False)
            lacks = waiter.lacks
            self.queues.leave(waiter)
            return lacks

        return self.loop.run_until_complete(join())

    def close(self) -> None:
        """Close its event loop."""
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@dataclass
class Call:
    """A call that requested admission."""

    number: int
    worker: Worker
    invocation: Invocation
    since: float
    task: asyncio.Task[Verdict | None] = field(init=False)
    is_cancelled: bool = False
    state: str = "waiting"
    admitted: float = 0.0
    died: float = FOREVER
    needs_until: float = 0.0
    """Until when later calls leave room for it, if it waited when its worker was killed."""
    could_go_since: float = FOREVER
    lapsed: dict[float, bool] = field(default_factory=dict)
    """Leases that may have expired while its worker was suspended → whether they surely did."""

    @property
    def quotas(self) -> frozenset[str]:
        """The quotas that apply to it."""
        return frozenset(self.invocation.agent)

    def held(self, lease: float, now: float) -> tuple[bool, bool]:
        """Return whether it surely, and possibly, has its reservation of this lease."""
        # A reservation is renewed while its call lasts. Only its worker knew when it last did so.
        surely, until = now < self.admitted + lease, self.died
        if self.state == "in flight" and self.worker.suspended_at is not None:
            until = self.worker.suspended_at
        elif self.state == "in flight":
            return lease not in self.lapsed, not self.lapsed.get(lease, False)
        is_alive = not self.lapsed.get(lease, False) and now < until + lease
        return surely and lease not in self.lapsed, is_alive


class SimulatedFleet:
    """A fleet of callers, with a model of its expected state.

    Args:
        place: The store.
        clock: The clock of the fleet.
    """

    def __init__(self, place: Place, clock: Clock) -> None:
        """Start without calls."""
        super().__init__()
        self.store, self.set_clock, self.read_news, self.shared = place
        self.clock, clock.now = clock, 0.0
        self.set_clock(clock.time())
        self.numbers, self.worker_numbers = itertools.count(), itertools.count()
        self.workers = [self.worker() for _ in range(WORKERS)]
        self.calls: list[Call] = []
        self.used: Counter[Count] = Counter()
        self.late: Counter[Count] = Counter()
        """Usage of calls whose reservation may have expired before they ended."""
        self.paced: list[float] = []
        """When calls of the token bucket were admitted."""
        self.most: dict[Count, int] = {}
        self.grants: list[tuple[str, float, int]] = []
        self.given: list[tuple[str, float, int]] = []
        """All grants ever, also revoked ones."""
        self.blocks: dict[str, float] = {}
        self.time_has_passed = False

    def worker(self) -> Worker:
        """Start a worker."""
        connection = Connection(self.store, None if self.read_news else self.free)
        return Worker(connection, self.clock, next(self.worker_numbers))

    # --- actions ----------------------------------------------------------------------------------

    def do(self, *what: tuple[Worker, Callable[[], object]]) -> None:
        """Let workers act, and run those that are not suspended until nothing changes."""
        for worker, action in what:
            worker.actions.append(action)
        is_restless = True
        while is_restless:
            for worker in self.awake():
                worker.run()
            for freed in self.read_news() if self.read_news else ():
                self.free(freed)
            has_news = any(worker.news for worker in self.awake())
            is_restless = self.collect() or has_news

    def awake(self) -> list[Worker]:
        """Return the workers that are not suspended."""
        return [each for each in self.workers if each.suspended_at is None]

    def resume(self, worker: Worker) -> None:
        """Let a suspended worker continue."""
        since, worker.suspended_at = worker.suspended_at, None
        assert since is not None
        for call in self.with_state("in flight"):
            for lease in (SLOT_LEASE_SECONDS, LEASE_SECONDS):
                if call.worker is worker and self.clock.now >= call.admitted + lease:
                    is_over = call.lapsed.get(lease, False) or self.clock.now >= since + lease
                    call.lapsed[lease] = is_over

    def begin(self, worker: Worker, agent: str) -> None:
        """AdmissionRequest admission for a call of an agent."""
        number = next(self.numbers)
        name = f"i{number}"
        call = Call(number, worker, Invocation(agent=agent, id=name, root_id=name), self.clock.now)
        request = AdmissionRequest(
            invocation=call.invocation,
            model="m",
            input=1,
            output_cap=1,
            is_cancelled=lambda: call.is_cancelled,
        )
        call.task = worker.loop.create_task(worker.engine.admit_by_quotas(request))
        self.calls.append(call)

    def settle(self, call: Call) -> None:
        """End a call and settle its usage."""
        for count in self.counts(call):
            lease = lease_of(count)
            surely, _ = call.held(lease, self.clock.now)
            # Others may have used what it reserved, unless it was charged.
            self.late[count] += not surely and QUOTAS[count.quota].on_lost == "free"
        call.state = "over"
        engine, usage = call.worker.engine, Usage(input=1, output=1)
        engine(
            ModelCall(
                invocation=call.invocation,
                number=1,
                model="m",
                kind="measured",
                usage=usage,
                estimated=False,
                span_id=None,
                seconds=None,
            )
        )
        for count in self.counts(call):
            if count.quota not in "ps":
                self.used[count] += 1
        self.stop(call)

    def stop(self, call: Call) -> None:
        """End an invocation."""
        identity = call.invocation.id
        call.worker.engine(
            Stop(reason="end_turn", action="none", breach=None, invocation_id=identity)
        )

    def free(self, freed: Freed, *, polling: bool = False) -> None:
        """Notify the subscribed workers of freed quota, or the one that polls."""
        for number, worker in enumerate(self.workers):
            if polling == (number == POLLING):
                worker.news.append(freed)

    def collect(self) -> bool:
        """Process the calls that have an answer, in the order of their requests."""
        answered = [each for each in self.with_state("waiting") if each.task.done()]
        off = [each for each in answered if each.is_cancelled or each.task.cancelled()]
        refused = [each for each in answered if each not in off and each.task.result() is not None]
        for call in answered:
            if call in off or call in refused:
                continue
            call.state, call.admitted = "in flight", self.clock.now
            self.paced += [self.clock.now] * ("s" in call.quotas)
            alike = [each for each in self.with_state("waiting") if each.quotas == call.quotas]
            earlier = [each for each in alike if each.number < call.number]
            assert not [
                each for each in earlier if each.worker is call.worker and not each.task.done()
            ]
        # Only now: a later request of another worker may have used the remaining amount.
        for call in off + refused:
            call.state = "gone"
            assert call in off or self.may_be_refused(call)
            self.stop(call)
        return bool(answered)

    # --- expected state ---------------------------------------------------------------------------

    def count(self, name: str, now: float | None = None) -> Count:
        """The count of a quota now, or at a given time."""
        quota, time = QUOTAS[name], self.clock.now if now is None else now
        return quota.count(quota.key.key(name, lambda _: None), self.clock.begin + time)

    def counts(self, call: Call) -> Iterator[Count]:
        """The counts of an admitted call."""
        return (self.count(name, call.admitted) for name in sorted(call.quotas))

    def reserved(self, count: Count) -> tuple[int, int]:
        """The minimum and maximum that calls have reserved of a count."""
        held = [call.held(lease_of(count), self.clock.now) for call in self.holders(count)]
        return sum(surely for surely, _ in held), sum(possibly for _, possibly in held)

    def holders(self, count: Count) -> list[Call]:
        """Return the calls that reserved of a count and were not settled."""
        return [
            call
            for call in self.with_state("in flight", "dead")
            if count.quota in call.quotas
            and (count.quota == "p" or self.count(count.quota, call.admitted) == count)
        ]

    def occupied(self, count: Count) -> int:
        """Return the most that calls have used, reserved and been charged of a count."""
        if count.quota == "s":
            (found,) = self.store.look([(count, QUOTAS["s"].amount)])
            return found.used + found.reserved
        is_charged = QUOTAS[count.quota].on_lost == "charge"
        held = len(self.holders(count)) if is_charged else self.reserved(count)[1]
        return self.used[count] + held

    def permitted(self, name: str) -> int:
        """Return the limit of a quota now."""
        held = (
            amount
            for quota, until, amount in self.grants
            if quota == name and until > self.clock.now
        )
        refill = QUOTAS[name].refill
        return refill.burst if refill else QUOTAS[name].amount + sum(held)

    def is_permitted(self, count: Count, standing: CountState) -> bool:
        """Return whether usage never exceeded the highest limit so far."""
        name = Count(count.quota, count.key, count.window, "")
        self.most[name] = max(self.most.get(name, 0), standing.limit)
        return standing.used + standing.reserved <= self.most[name] + self.late[count]

    def is_blocked(self, name: str) -> bool:
        """Return whether the key of a quota is blocked."""
        return self.blocks.get(name, 0.0) > self.clock.now

    def fits(self, call: Call) -> bool:
        """Return whether all quotas of a call surely have enough left, next to older calls."""
        return all(
            self.occupied(count) + self.ahead(call, count.quota) < self.permitted(count.quota)
            and not self.is_blocked(count.quota)
            for count in map(self.count, call.quotas)
        )

    def ahead(self, call: Call, name: str) -> int:
        """Return the most calls for which a call leaves room."""
        older = [each for each in self.calls if each.since <= call.since and each is not call]
        return sum(
            name in each.quotas
            and (
                (each.state == "waiting" and each.worker.suspended_at is None)
                or each.needs_until > self.clock.now
            )
            for each in older
        )

    def may_be_refused(self, call: Call) -> bool:
        """Return whether a call may be refused now."""
        shortest = min(QUOTAS[name].max_wait for name in call.quotas)
        hard = self.count("r")
        is_over = self.occupied(hard) >= self.permitted("r")
        patience = call.since + shortest - self.clock.now
        return (
            any(map(self.is_blocked, call.quotas))
            or ("r" in call.quotas and is_over)
            or patience <= 0
            or ("q" in call.quotas and self.is_in_vain(patience))
            # One call flows back in this time.
            or ("s" in call.quotas and patience <= 60 / QUOTAS["s"].amount)
        )

    def is_in_vain(self, seconds: float) -> bool:
        """Return whether nothing of the rate comes back within the rest of a wait."""
        count = self.count("q")
        left = count.window.end - self.clock.time()
        return self.used[count] >= self.permitted("q") and left > seconds

    def first_of(self, worker: Worker) -> list[Call]:
        """The calls of a worker that are first in all of their queues."""
        taken: set[str] = set()
        found = []
        for call in self.with_state("waiting"):
            if call.worker is worker and not call.is_cancelled:
                if not taken & call.quotas:
                    found.append(call)
                taken |= call.quotas
        return found

    def active(self, state: str) -> list[Call]:
        """Return the calls in a state whose workers are not suspended."""
        return [each for each in self.with_state(state) if each.worker.suspended_at is None]

    def with_state(self, *states: str) -> list[Call]:
        """Return the calls that are in one of these states."""
        return [each for each in self.calls if each.state in states]


def lease_of(count: Count) -> float:
    """Return the lease of a reservation."""
    return SLOT_LEASE_SECONDS if count.quota == "p" else LEASE_SECONDS


def is_overtaken(one: Call, other: Call) -> bool:
    """Return whether an earlier call for the same quotas is still waiting."""
    is_before = one.worker is other.worker and one.number < other.number
    return is_before and one.quotas == other.quotas and not one.task.done()
