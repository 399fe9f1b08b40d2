"""The grace in an outage of a server: each worker may use an equal share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import otel_limits
from otel_limits.quotas.keys import Template
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.store import (
    FOREVER,
    LOOKED_AT,
    Block,
    CountState,
    StorePlace,
)
from otel_limits.quotas.stores import open_shared_store
from otel_limits.runs.clock import CLOCK
from otel_limits.testing import FakeTime, ScriptedModel, endless, says
from tests.quotas.fixtures import eventually
from tests.quotas.fleets import Fleet, Worker, quota

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from otel_limits.quotas.store import SharedStore
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server

pytestmark = pytest.mark.usefixtures("faulty")


StoreOf = Callable[["Server"], "SharedStore"]


@pytest.fixture
def store_of() -> Iterator[StoreOf]:
    """Open the store on a server, as an operator does."""
    with ExitStack() as stack:

        def opened(server: Server) -> SharedStore:
            store = open_shared_store(StorePlace(server.url, 2.0))
            stack.callback(store.close)
            return store

        yield opened


@pytest.fixture
def fleet(server: Server) -> Iterator[Fleet]:
    """A fleet without workers."""
    made = Fleet(server)
    yield made
    made.close()


def test_the_shares_of_a_fleet_are_no_more_than_what_was_left(fleet: Fleet) -> None:
    """96 of 100 remain for four workers: 24 each, and not one call more."""
    fleet.join(4)
    assert fleet.standing() == CountState(4, 0, 100)
    fleet.cut()
    assert [worker.use_all() for worker in fleet.workers] == [24] * 4
    first = fleet.workers[0].decisions()
    assert first == ["admitted"] + ["degraded_grace_admitted"] * 24 + ["degraded_denied"]


def test_share_remainder_is_unused(fleet: Fleet) -> None:
    """97 remain for three workers: 32 each."""
    fleet.join(3)
    fleet.cut()
    assert fleet.use_all() == 96


def test_in_flight_reservation_is_not_shared(fleet: Fleet) -> None:
    """Its reservation belongs to its own worker."""
    one, two = fleet.join(2)
    under_way = one.ask()
    assert under_way is not None
    for worker in (one, two):
        worker.look()
    fleet.cut()
    assert fleet.use_all() == 2 * (97 // 2)
    one.end(under_way)


def test_shares_overshoot_at_most_by_usage_since_the_last_refresh(fleet: Fleet) -> None:
    """One of two workers made 40 calls: the overshoot is its half of them."""
    one, _ = fleet.join(2)
    for _ in range(40):
        one.call()
    fleet.cut()
    admitted = fleet.use_all()
    used = 42 + admitted
    assert 100 < used <= 100 + 40 // 2


def test_late_joiner_overshoots_the_quota_by_its_share_only(fleet: Fleet) -> None:
    """Two workers know of two workers, the third of three: the overshoot is its share."""
    fleet.join(2)
    third = Worker(fleet.wire.url, quota())
    third.call()
    third.look()
    fleet.workers.append(third)
    fleet.cut()
    used = 3 + fleet.use_all()
    assert 100 < used <= 100 + 97 // 3 + 1


def test_window_that_starts_in_an_outage_is_shared_in_full(fleet: Fleet) -> None:
    """100 for four workers: 25 each, whatever remained before; and again in the next window."""
    for worker in fleet.join(4):
        for _ in range(20):
            worker.call()
    fleet.cut()
    for _ in range(2):
        for worker in fleet.workers:
            worker.begin_a_window()
        assert [worker.use_all() for worker in fleet.workers] == [25] * 4


def test_late_joiner_overshoots_a_new_window_by_its_share_only(fleet: Fleet) -> None:
    """As in any other: two workers know of two, the third of three."""
    fleet.join(2)
    third = Worker(fleet.wire.url, quota())
    fleet.workers.append(third)
    third.call()
    third.look()
    fleet.cut()
    for worker in fleet.workers:
        worker.begin_a_window()
    assert fleet.use_all() == 2 * (100 // 2) + 100 // 3


def test_key_that_is_no_longer_read_has_no_share(fleet: Fleet) -> None:
    """Others may have used it up: a share is given out of what the last two reads have seen."""
    held = {"amount": 40, "key": Template("agent")}
    one, two = (Worker(fleet.wire.url, quota(**held)) for _ in range(2))  # type: ignore[arg-type]
    fleet.workers += [one, two]
    assert one.call("joe")
    for number in range(LOOKED_AT + 5):
        assert one.call(f"other {number}")
    assert [two.call("joe") for _ in range(40)] == [True] * 39 + [False]
    for _ in range(2):
        one.look()
    fleet.cut()
    assert not one.call("joe")
    assert one.call(f"other {LOOKED_AT}")


def test_damaged_key_leaves_the_others_their_shares(fleet: Fleet, server: Server) -> None:
    """They are read together."""
    worker = Worker(fleet.wire.url, quota(key=Template("agent")))
    fleet.workers.append(worker)
    assert worker.call("joe")
    (damaged,) = server.client.keys("*:model_calls")
    assert worker.call("jane")
    server.client.hset(damaged, "used", "x")
    client = worker.engine.client
    looked = client.fallback.looks

    def has_looked() -> bool:
        client.look_again()
        return client.fallback.looks >= looked + 3

    eventually(has_looked)
    fleet.cut()
    assert worker.call("jane")


def test_known_block_is_enforced_in_an_outage(
    hold: Hold, make_agent: MakeAgent, own_server: Server, store_of: StoreOf
) -> None:
    """Also with `allow`, and only for the agent it blocks."""
    calls = {"model_calls": 50, "window": "P366D", "key": "agent", "on_store_error": "allow"}
    hold({"q": calls}, own_server.url)
    joe, jane = (
        make_agent(ScriptedModel(endless(says("done"))), name=name) for name in ("joe", "jane")
    )
    for agent in (joe, jane):
        assert agent("go").stop_reason == "end_turn"
    held = quota(key=Template("agent"))
    key = held.key.key_of_text("q", "joe")
    store_of(own_server).change(held.count(key, time.time()), Block(FOREVER, "unpaid"))
    assert joe("go").stop_reason == "quota_exceeded"
    own_server.stop()
    for _ in range(2):
        stop = otel_limits.stop_of(joe("go"))
        assert stop is not None
        assert (stop.reason, "unpaid" in stop.sentence) == ("quota_exceeded", True)
        assert jane("go").stop_reason == "end_turn"


def test_process_without_store_contact_has_no_share(fleet: Fleet) -> None:
    """It does not know the remaining amount."""
    fleet.cut()
    worker = Worker(fleet.wire.url, quota())
    fleet.workers.append(worker)
    assert not worker.call()
    assert worker.decisions() == ["degraded_denied"]


def test_share_usage_is_settled_when_the_store_recovers(fleet: Fleet, server: Server) -> None:
    """In-flight calls are reserved then, so no other worker can use their amounts."""
    (worker,) = fleet.join(1)
    server.freeze()
    try:
        assert [worker.call() for _ in range(10)] == [True] * 10
        under_way = worker.ask()
    finally:
        server.thaw()
    eventually(lambda: fleet.standing() == CountState(11, 1, 100))
    assert under_way is not None
    worker.end(under_way)
    eventually(lambda: fleet.standing() == CountState(12, 0, 100))


def test_only_the_first_call_waits_in_an_outage(
    fleet: Fleet, server: Server, monkeypatch: pytest.MonkeyPatch, fake_time: FakeTime
) -> None:
    """Until the store worker's timeout; the others use the share immediately."""
    (worker,) = fleet.join(1)
    waits, wait = list[float](), CLOCK.wait

    def note(future: Any, until: float) -> Any:
        waits.append(until - CLOCK.now())
        return wait(future, until)

    monkeypatch.setattr(CLOCK, "wait", note)
    server.freeze()
    try:
        assert all(worker.call() for _ in range(5))
    finally:
        server.thaw()
    assert waits == [2.0]


def test_grace_ends(fleet: Fleet, fake_time: FakeTime) -> None:
    """30 seconds after the first failed operation, `on_store_error` applies."""
    (worker,) = fleet.join(1)
    fleet.cut()
    worker.engine.client.fallback.enter_outage()
    fake_time.advance(29.9)
    assert worker.engine.client.fallback.is_in_grace(quota())
    fake_time.advance(0.1)
    assert not worker.engine.client.fallback.is_in_grace(quota())


@pytest.mark.parametrize(
    ("mode", "calls"), [("deny", 49), ("local", 98), ("allow", 120)], ids=["deny", "local", "allow"]
)
def test_store_error_action_applies_after_the_share(fleet: Fleet, mode: str, calls: int) -> None:
    """`local` uses the whole remaining amount, `allow` is unlimited."""
    worker, _ = fleet.join(2, on_store_error=mode)
    fleet.cut()
    assert [worker.call() for _ in range(120)].count(True) == calls


def test_grace_of_zero_shares_nothing_and_reads_no_counts(fleet: Fleet, server: Server) -> None:
    """Its process does not reduce the shares of others, and an outage takes effect immediately."""
    worker = Worker(fleet.wire.url, quota(grace=0.0))
    fleet.workers.append(worker)
    assert worker.call()
    worker.look()
    assert server.client.zcard(KeyNames().living) == 1
    assert server.client.zcard(KeyNames().sharing) == 0
    fleet.cut()
    assert not worker.call()


def test_agent_continues_on_its_share_in_an_outage(
    hold: Hold, make_agent: MakeAgent, own_server: Server, events: list[Event]
) -> None:
    """With all defaults: its store is gone, and it uses its share."""
    hold({"calls": {"model_calls": 5, "window": "month"}}, own_server.url, [events.append])
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert agent("go").stop_reason == "end_turn"
    eventually(lambda: own_server.client.zcard("{otel_limits}:sharing") == 1)
    own_server.stop()
    reasons = [agent("go").stop_reason for _ in range(5)]
    assert reasons == ["end_turn"] * 4 + ["quota_unavailable"]
