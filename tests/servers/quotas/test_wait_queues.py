"""Calls that wait for a quota on a server: their order, and the room that later ones leave."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.quotas import redis_scripts
from otel_limits.quotas.keys import Template
from otel_limits.quotas.kill_listener import KillListener
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.needs import SLOT_LEASE_SECONDS
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import (
    MOST_NEEDS,
    NEED_SECONDS,
    Charge,
    Count,
    Demand,
    QuotaStore,
    Reply,
    Reserve,
    Settle,
    StorePlace,
)
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import UnboundedWindow, Window, Windows
from tests.drills.lines import open_queue
from tests.quotas.fleets import Worker
from tests.quotas.waiters import DecisionRecorder, Held, start, until
from tests.unit.agents.test_quotas import carrying

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from otel_limits.quotas.store import SharedStore
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server, Timed


NOON = Windows("day").at(time.time() + 2 * 86_400).start + 12 * 3600.0
LIMIT = 20_000
LEASE = 300.0


@dataclass
class Fleet:
    """Calls of a fleet that share counts of 20,000 tokens, whose clock the test sets."""

    store: QuotaStore
    set_clock: Callable[[float], None]
    now: float = NOON
    since: dict[str, float] = field(default_factory=dict)
    """When each call was refused first."""

    def __post_init__(self) -> None:
        """Start its clock."""
        self.set_clock(self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.set_clock(self.now)

    def call(self, name: str, amount: int, *quotas: str) -> bool:
        """Reserve for a call that waits if it is refused; return whether it was admitted."""
        demands = [
            Demand(count=counted(quota), amount=amount, limit=LIMIT, waits=30.0)
            for quota in quotas or ("q",)
        ]
        waited = self.now - self.since.get(name, self.now)
        (reply,) = self.store.run([Reserve(name, tuple(demands), LEASE, waited)])
        if reply.status == "refused":
            self.since.setdefault(name, self.now)
        return reply.status == "admitted"

    def end(self, name: str, *quotas: str) -> Reply:
        """Settle a call that used nothing, or that no longer waits."""
        charges = [Charge(count=counted(quota), amount=0) for quota in quotas or ("q",)]
        return self.store.run([Settle(name, tuple(charges))])[0]


def counted(quota: str) -> Count:
    """The count of a quota."""
    day = Windows("day").at(NOON)
    return Count(quota, "k", Window(day.start, day.end + 86_400), "tokens", "all")


@pytest.fixture(params=["memory", "redis"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """A fleet with each kind of store."""
    if request.param == "memory":
        clock = [0.0]
        return Fleet(MemoryStore(lambda: clock[0]), lambda now: clock.__setitem__(0, now))
    timed: Timed = request.getfixturevalue("timed_store")
    return Fleet(*timed)


# --- the store ------------------------------------------------------------------------------------


def test_later_calls_leave_room_for_a_waiting_one(fleet: Fleet) -> None:
    """125 small ones passed a call of 14,000 tokens, which then gave up."""
    assert fleet.call("one", 5_000)
    assert fleet.call("two", 5_000)
    assert not fleet.call("large", 14_000)
    fleet.wait(1.0)
    assert not fleet.call("small", 5_000)
    fleet.end("one")
    assert not fleet.call("small", 5_000)
    fleet.end("small")
    assert fleet.call("tiny", 1_000)  # fits next to it
    assert fleet.call("large", 14_000)
    fleet.end("two")
    assert fleet.call("last", 5_000)


def test_room_is_left_for_ten_seconds_after_the_last_attempt(fleet: Fleet) -> None:
    """The process of a waiting call may have been killed or suspended."""
    assert fleet.call("one", 10_000)
    assert not fleet.call("killed", 14_000)
    fleet.wait(NEED_SECONDS - 1)
    assert not fleet.call("killed", 14_000)
    fleet.wait(NEED_SECONDS - 1)
    assert not fleet.call("small", 5_000)
    fleet.wait(1.0)
    assert fleet.call("small", 5_000)


def test_call_that_no_longer_waits_needs_no_room(fleet: Fleet) -> None:
    """It was cancelled, or has given up."""
    assert fleet.call("one", 10_000)
    assert not fleet.call("cancelled", 14_000)
    assert not fleet.call("small", 5_000)
    fleet.end("cancelled")
    assert fleet.call("small", 5_000)


def test_need_is_at_most_the_amount_of_the_quota(fleet: Fleet) -> None:
    """An estimate above it is admitted alone, and others behind it."""
    assert fleet.call("one", 5_000)
    assert not fleet.call("huge", 90_000)
    assert not fleet.call("small", 1)
    fleet.end("huge")
    assert fleet.call("small", 1)


def test_oldest_waiting_calls_are_remembered(fleet: Fleet) -> None:
    """The others behind them; an older one takes the place of the youngest."""
    assert fleet.call("one", LIMIT)
    for number in range(MOST_NEEDS):
        fleet.wait(0.125)
        assert not fleet.call(f"waiting {number}", 1_500)
    fleet.since["older"] = NOON
    assert not fleet.call("older", 6_000)
    fleet.wait(0.125)
    assert not fleet.call("younger", 1_500)
    fleet.end("one")
    assert not fleet.call("late", 700)  # 9 * 1,500 and 6,000 are ahead of it
    assert fleet.call("late", 500)


def test_calls_that_wait_for_two_quotas_do_not_block_each_other(fleet: Fleet) -> None:
    """Each waits for one that the other one needs, too; the older goes first in both."""
    assert fleet.call("one", LIMIT, "p")
    assert fleet.call("two", LIMIT, "q")
    assert not fleet.call("older", 15_000, "p", "q")
    fleet.wait(1.0)
    assert not fleet.call("younger", 15_000, "q", "p")
    fleet.end("one", "p")
    assert not fleet.call("younger", 15_000, "q", "p")
    assert not fleet.call("older", 15_000, "p", "q")
    fleet.end("two", "q")
    assert not fleet.call("younger", 15_000, "q", "p")
    assert fleet.call("older", 15_000, "p", "q")


# --- a fleet --------------------------------------------------------------------------------------


def test_waiting_call_is_not_passed_by_another_process(server: Server) -> None:
    """Small calls of the other process always leave too little for it."""
    held = Quota(
        name="q",
        unit="tokens",
        amount=LIMIT,
        windows=Windows("P366D"),
        on_exceeded="wait",
        grace=0.0,
    )
    one, other = Worker(server.url, held), Worker(server.url, held)
    listeners = [
        KillListener(
            open_shared_store(StorePlace(server.url, 2.0)), lambda *_: 0, each.queues.notify_freed
        )
        for each in (one, other)
    ]
    order: list[str] = []

    ends: list[asyncio.Event] = []
    is_over: list[bool] = []

    async def call(worker: Worker, name: str, amount: int) -> None:
        invocation = await worker.admit(name, amount)
        assert invocation is not None
        order.append(name)
        ends.append(end := asyncio.Event())
        if not is_over:
            await end.wait()
        await asyncio.to_thread(worker.end, invocation)

    def has_decided(asked: int) -> bool:
        return len(order) + len(other.waits()) > asked

    async def run() -> None:
        calls = [asyncio.create_task(call(other, "first", 5_000)) for _ in range(3)]
        await until(lambda: len(order) == 3)
        calls.append(asyncio.create_task(call(one, "large", 14_000)))
        await until(lambda: bool(one.waits()))
        # The oldest ends whenever another one has come, and was admitted or waits.
        for _ in range(20):
            asked = len(order) + len(other.waits())
            calls.append(asyncio.create_task(call(other, "small", 5_000)))
            await until(partial(has_decided, asked))
            next((each for each in ends if not each.is_set()), asyncio.Event()).set()
        is_over.append(True)
        for each in ends:
            each.set()
        await asyncio.gather(*calls)

    try:
        asyncio.run(run())
        assert order.index("large") - 3 <= 10
    finally:
        for worker in (one, other):
            worker.engine.close()
        for listener in listeners:
            listener.close()


# --- a process ------------------------------------------------------------------------------------


def test_sharers_of_a_queue_take_turns(hold: Hold, make_agent: MakeAgent, url: str) -> None:
    """The many calls of one tenant do not delay the only one of another."""
    recorder = DecisionRecorder()
    quota = {"concurrency": 1, "on_exceeded": "wait", "max_wait": "10m"}
    hold({"q": quota | {"fair_by": "baggage.tenant.id"}}, url, [recorder])

    async def run() -> list[str]:
        model = Held()
        tasks = []
        for name in ("a0", "a1", "a2", "a3", "a4", "b0", "b1", "c0"):
            with carrying(**{"tenant.id": name[0]}):
                tasks.append(start(make_agent(model), name))
            await until(lambda: recorder.waiting == len(tasks) - 1 and bool(model.asked))
        model.may_answer.set()
        await asyncio.gather(*tasks)
        return model.asked

    assert asyncio.run(run()) == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"]


# --- the order of several processes ---------------------------------------------------------------


def test_fleet_is_admitted_in_the_order_of_its_requests(
    server: Server, store: SharedStore, tmp_path: Path
) -> None:
    """Within a process by arrival; between processes, by a request after a slot is free."""
    reserve, settle = (redis_scripts.sha_of(script) for script in ("reserve", "settle"))
    count = Count(
        "q",
        Template("").key("q", dict[str, object]().get).id,
        UnboundedWindow().at(store.now()),
        "concurrency",
    )
    store.run([Reserve("held-0", (Demand(count=count, amount=1, limit=1),), 300.0)])
    with (
        open_queue(server, tmp_path, SLOT_LEASE_SECONDS) as queue,
        server.client.monitor() as monitor,
    ):
        processes = [queue.join([f"{each}1", f"{each}2", f"{each}3"]) for each in "ab"]
        store.run([Settle("held-0", (Charge(count=count, amount=0),))])
        said = [each.communicate()[0] for each in processes]
        server.client.publish("done", "")
        asked = _asked(monitor, reserve, settle)
    for name, lines in zip("ab", said, strict=True):
        assert lines.split("\n")[:3] == [f"asked {name}{number}" for number in (1, 2, 3)]
    # Each settlement frees a slot for one of the requests after it: of the older call, if both
    # have been refused before.
    settled = [n for n, (script, _) in enumerate(asked) if script == settle]
    assert len(settled) == 7
    for one, other in pairwise(settled):
        assert asked[other][1] in {name for _, name in asked[one + 1 : other]}


def _asked(monitor: Any, reserve: str, settle: str) -> list[tuple[str, str]]:
    """Return the scripts called, each with its operation, in order."""
    asked: list[tuple[str, str]] = []
    for said in monitor.listen():
        words = said["command"].split()
        if words[0] == "PUBLISH" and words[1] == "done":
            return asked
        if words[0] == "EVALSHA" and words[1] in (reserve, settle):
            asked.append((words[1], words[3 + int(words[2])]))
    raise AssertionError("the server went away")
