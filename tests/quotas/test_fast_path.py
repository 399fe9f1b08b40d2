"""A call that is alone asks the store from its own event loop; everything else is carried."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from otel_limits.quotas.courier import Courier
from otel_limits.quotas.fast_path import FastPath
from otel_limits.quotas.store import (
    Charge,
    Count,
    Demand,
    Reserve,
    Settle,
    SharedStore,
    Standing,
    StoreError,
    StorePlace,
)
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import Windows
from tests.quotas.conftest import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.quotas.store import Operation, Reply
    from tests.quotas.conftest import Server, Wire

TIMEOUT = 2.0
"""Seconds that ship."""


def this_count() -> Count:
    """What these tests count."""
    return Count("fast", "0" * 32, Windows("P366D").at(time.time()), "(all)", "tokens")


def reserve(name: str, *, waits: float = 0.0) -> Reserve:
    """Set 10 aside."""
    return Reserve(name, (Demand(count=this_count(), amount=10, limit=10**6, waits=waits),), 300.0)


def settle(name: str) -> Settle:
    """Use 7."""
    return Settle(name, (Charge(count=this_count(), amount=7),))


class Process(NamedTuple):
    """What asks in a process, over a wire."""

    courier: Courier
    wire: Wire
    carried: list[str]
    """Ids of operations that the thread has carried."""

    @property
    def free(self) -> list[Any]:
        """The connection that nobody uses now."""
        connections: list[Any] = self.courier._fast._free
        return connections

    async def ask(self, operation: Operation) -> Reply:
        """Ask as a model call does."""
        reply = await self.courier.ask(operation, TIMEOUT)
        if reply is None:
            reply = await asyncio.to_thread(self.courier.send(operation).result, TIMEOUT)
        return reply


@pytest.fixture
def process(wire: Wire) -> Iterator[Process]:
    """A courier whose fast path is open."""
    place, carried = StorePlace(wire.url, TIMEOUT), list[str]()
    carrying = open_shared_store(place)
    run = carrying.run

    def note(operations: Any) -> list[Reply]:
        carried.extend(each.id for each in operations)
        return run(operations)

    carrying.run = note  # type: ignore[method-assign]
    courier = Courier(carrying, FastPath(open_shared_store(place)))
    process = Process(courier, wire, carried)
    courier.start(lambda: None)
    eventually(lambda: bool(process.free))
    yield process
    courier.close()


def unique() -> str:
    """An id such as operations have."""
    return f"{uuid.uuid4().hex}-0"


def standing(store: SharedStore) -> Standing:
    """How the count stands."""
    return store.look([(this_count(), 10**6)])[0]


def test_a_call_that_is_alone_wakes_no_thread(process: Process, store: SharedStore) -> None:
    """Neither to reserve nor to settle."""
    name = unique()
    assert asyncio.run(process.ask(reserve(name))).status == "admitted"
    assert asyncio.run(process.ask(settle(name))).status == "settled"
    assert (process.carried, standing(store)) == ([], Standing(7, 0, 10**6))


def test_the_loop_of_an_agent_goes_on_while_the_store_is_late(
    process: Process, server: Server
) -> None:
    """What is sent from it is sent on a socket that never waits."""

    async def run() -> None:
        server.freeze()
        try:
            asked = asyncio.create_task(process.courier.ask(reserve(unique()), PATIENCE))
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert not asked.done()
        finally:
            server.thaw()
        reply = await asked
        assert reply is not None
        assert reply.status == "admitted"

    asyncio.run(run())
    assert process.free[0]._socket.gettimeout() == 0


def test_calls_at_once_are_carried_beside_the_first(process: Process, store: SharedStore) -> None:
    """Each is counted once, whichever way it took."""

    async def run() -> set[str]:
        replies = await asyncio.gather(*(process.ask(reserve(unique())) for _ in range(20)))
        return {reply.status for reply in replies}

    assert asyncio.run(run()) == {"admitted"}
    assert (len(process.carried), standing(store).reserved) == (19, 200)


@pytest.mark.parametrize("fault", ["cut", "truncate"])
def test_what_is_cut_off_is_done_by_the_courier(
    process: Process, store: SharedStore, fault: str
) -> None:
    """Sent twice it is counted once; a second later the fast path is open again."""
    name = unique()
    process.wire.faults.append(fault)
    assert asyncio.run(process.ask(reserve(name))).status == "admitted"
    assert (process.carried, standing(store).reserved) == ([name], 10)

    def is_open() -> bool:
        asyncio.run(process.ask(reserve(name)))
        return bool(process.free)

    eventually(is_open)


@pytest.mark.usefixtures("faulty")
def test_what_the_server_refuses_is_told_by_the_courier(process: Process, server: Server) -> None:
    """Here a key of a wrong type, which no other operation has to suffer for."""
    names: Any = process.courier._store
    server.client.set(names._names.buckets(this_count())[0], "of somebody else")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        asyncio.run(process.ask(reserve(unique())))
    assert not process.courier._is_down


def test_an_idle_connection_that_the_server_has_closed_harms_nobody(
    process: Process, server: Server, store: SharedStore
) -> None:
    """Servers and firewalls do that after some minutes."""
    server.client.client_kill_filter(_type="normal", skipme=True)
    names = [unique() for _ in range(3)]
    replies = [asyncio.run(process.ask(reserve(name))).status for name in names]
    assert (replies, standing(store).reserved) == (["admitted"] * 3, 30)


def test_a_settlement_whose_call_is_cancelled_is_counted(
    process: Process, store: SharedStore
) -> None:
    """Nobody knows by then whether it has arrived."""
    name = unique()
    asyncio.run(process.ask(reserve(name)))
    process.wire.delay = 0.3

    async def run() -> None:
        asked = asyncio.create_task(process.ask(settle(name)))
        await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])

    asyncio.run(run())
    process.wire.delay = 0.0
    eventually(lambda: process.carried == [name])
    eventually(lambda: standing(store) == Standing(7, 0, 10**6))


@pytest.mark.usefixtures("faulty")
def test_silence_is_a_loss_for_everybody(process: Process, store: SharedStore) -> None:
    """Whoever asks next waits for nothing, and a settlement is sent when the store is back."""
    name = unique()
    process.wire.faults.append("hang")

    async def run() -> float:
        with pytest.raises(StoreError, match="in time"):
            await process.courier.ask(settle(name), 0.1)
        began = time.perf_counter()
        assert await process.courier.ask(reserve(unique()), TIMEOUT) is None
        assert process.courier.send(reserve(unique())).exception() is not None
        return time.perf_counter() - began

    # Who waited would wait as long as that; how fast it is otherwise is for the machine to say.
    assert asyncio.run(run()) < TIMEOUT
    eventually(lambda: standing(store) == Standing(7, 0, 10**6))


def test_a_loop_that_was_late_itself_has_lost_nothing(process: Process) -> None:
    """An answer that came in time counts, however late the loop looks at it."""

    async def run() -> Reply | None:
        asked = asyncio.create_task(process.courier.ask(reserve(unique()), 0.5))
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251  it is the loop that is to be late
        return await asked

    reply = asyncio.run(run())
    assert reply is not None
    assert reply.status == "admitted"


def test_who_may_have_to_wait_in_line_is_carried(process: Process) -> None:
    """On two connections nobody knows who comes first."""
    name = unique()
    assert asyncio.run(process.ask(reserve(name, waits=1.0))).status == "admitted"
    assert process.carried == [name]


def test_what_was_sent_before_is_not_overtaken(process: Process, store: SharedStore) -> None:
    """A settlement that nobody waits for may free what the next call needs."""
    name, other = unique(), unique()
    asyncio.run(process.ask(reserve(name)))

    async def run() -> Reply:
        process.courier.send(settle(name))
        return await process.ask(reserve(other))

    assert asyncio.run(run()).standings == (Standing(7, 10, 10**6),)
    assert process.carried == [name, other]
    assert standing(store) == Standing(7, 10, 10**6)


def test_when_all_was_carried_the_fast_path_is_taken_again(process: Process) -> None:
    """As soon as the courier has nothing to do."""
    process.courier.send(reserve(unique())).result(TIMEOUT)
    eventually(lambda: not process.courier._is_carrying)
    asyncio.run(process.ask(reserve(unique())))
    assert len(process.carried) == 1


def test_a_loop_that_watches_no_sockets_is_served_by_the_courier(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of Windows."""

    def watch_nothing(*_: Any) -> None:
        raise NotImplementedError

    async def run() -> Reply:
        monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", watch_nothing, raising=False)
        return await process.ask(reserve(unique()))

    assert asyncio.run(run()).status == "admitted"


def test_a_child_leaves_its_parents_connection_alone(process: Process, store: SharedStore) -> None:
    """What its parent asks on it is answered to its parent."""
    connection, name = process.free[0], unique()
    connection.send(reserve(name))
    child = os.fork()
    if child == 0:
        try:
            connection.receive()
        except StoreError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    eventually(lambda: connection.receive() is not None)
    assert standing(store).reserved == 10


def test_closing_waits_for_no_answer_and_leaves_nothing_open(
    process: Process, server: Server
) -> None:
    """Whoever is asking just then has its answer, and closes the connection."""

    async def run() -> Reply | None:
        server.freeze()
        try:
            asked = asyncio.create_task(process.courier.ask(reserve(unique()), PATIENCE))
            await asyncio.sleep(0.01)
            process.courier._fast.close()
        finally:
            server.thaw()  # until here nobody could answer
        return await asked

    assert asyncio.run(run()) is not None
    assert process.free == []
    eventually(lambda: "otel-limits-fast" not in {each.name for each in threading.enumerate()})
