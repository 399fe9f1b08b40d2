"""Operations reach the store in order and once, without blocking the caller's event loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

import pytest

from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.store import (
    Charge,
    Count,
    CountState,
    Demand,
    Reserve,
    Settle,
    SharedStore,
    StoreError,
    StorePlace,
)
from otel_limits.quotas.store_worker import ThreadedExecutor
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import Windows
from tests.quotas.fixtures import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.quotas.store import Operation, Reply
    from tests.quotas.fixtures import Server, Wire

TIMEOUT = 2.0
"""The default timeout, in seconds."""


def this_count() -> Count:
    """The count of these tests."""
    return Count("worker", "0" * 32, Windows("P366D").at(time.time()), "tokens", "(all)")


def reserve(name: str) -> Reserve:
    """Reserve 10."""
    return Reserve(name, (Demand(count=this_count(), amount=10, limit=10**6),), 300.0)


def settle(name: str) -> Settle:
    """Use 7."""
    return Settle(name, (Charge(count=this_count(), amount=7),))


class Process(NamedTuple):
    """A worker that reaches its store through a wire with faults."""

    store_worker: ThreadedExecutor
    wire: Wire

    def send(self, operation: Operation) -> Reply:
        """Wait for the reply to an operation."""
        return self.store_worker.send(operation).result(TIMEOUT)


@pytest.fixture
def process(wire: Wire) -> Iterator[Process]:
    """A worker that is connected."""
    store_worker = ThreadedExecutor(open_shared_store(StorePlace(wire.url, TIMEOUT)))
    store_worker.start(lambda: None, tuple)
    process = Process(store_worker, wire)
    process.send(settle(unique()))  # connected, scripts loaded
    process.send(Settle(unique(), ()))
    yield process
    store_worker.close()


def unique() -> str:
    """An operation ID."""
    return f"{uuid.uuid4().hex}-0"


def standing(store: SharedStore) -> CountState:
    """Return the state of the count."""
    return store.look([(this_count(), 10**6)])[0]


def test_event_loop_runs_while_the_store_is_slow(process: Process, server: Server) -> None:
    """Only the worker thread waits for the network."""

    async def run() -> None:
        server.freeze()
        try:
            asked = asyncio.wrap_future(process.store_worker.send(reserve(unique())))
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert not asked.done()
        finally:
            server.thaw()
        assert (await asyncio.wait_for(asked, PATIENCE)).status == "admitted"

    asyncio.run(run())


def test_concurrent_operations_count_once_each(process: Process, store: SharedStore) -> None:
    """They are sent in batches."""
    futures = [process.store_worker.send(reserve(unique())) for _ in range(20)]
    assert {each.result(TIMEOUT).status for each in futures} == {"admitted"}
    assert standing(store).reserved == 200


@pytest.mark.parametrize("fault", ["cut", "truncate"])
def test_operation_is_sent_again_after_a_broken_connection(
    process: Process, store: SharedStore, fault: str
) -> None:
    """Sent twice, it counts once."""
    process.wire.faults.append(fault)
    assert process.send(reserve(unique())).status == "admitted"
    assert standing(store).reserved == 10


@pytest.mark.usefixtures("faulty")
def test_key_of_a_wrong_type_fails_one_operation_only(process: Process, server: Server) -> None:
    """Other operations must not suffer, so this is not an outage."""
    server.client.set(KeyNames().bucket(this_count())[0], "foreign")
    with pytest.raises(StoreError, match="data of another program is under the key"):
        process.send(reserve(unique()))
    assert process.send(Settle(unique(), ())).status == "settled"


@pytest.mark.usefixtures("faulty")
def test_field_that_is_no_number_fails_one_operation_only(process: Process, server: Server) -> None:
    """As a key of a wrong type."""
    server.client.hset(KeyNames().bucket(this_count())[0], "used", "foreign")
    with pytest.raises(StoreError, match="data of another program is under the key"):
        process.send(reserve(unique()))
    assert process.send(Settle(unique(), ())).status == "settled"


def test_idle_connection_closed_by_the_server_is_replaced(
    process: Process, server: Server, store: SharedStore
) -> None:
    """Servers and firewalls close idle connections after some minutes."""
    server.client.client_kill_filter(_type="normal", skipme=True)
    assert [process.send(reserve(unique())).status for _ in range(3)] == ["admitted"] * 3
    assert standing(store).reserved == 30


def test_operations_are_done_in_order(process: Process, store: SharedStore) -> None:
    """A settlement may free what the next call needs."""
    name = unique()
    process.send(reserve(name))
    process.store_worker.send(settle(name))
    assert process.send(reserve(unique())).states[0].reserved == 10
    assert standing(store).reserved == 10
