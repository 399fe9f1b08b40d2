"""A store compared with a model after every step of a random fleet history."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.redis_scripts import KeyNames, freed_of
from otel_limits.quotas.windows import Windows
from tests.quotas.fixtures import PATIENCE
from tests.quotas.own_time import Clock, Place
from tests.quotas.queues import QueueMachine
from tests.quotas.truth import StoreMachine, Stores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.quotas.store import Freed, SharedStore
    from tests.quotas.fixtures import Server, Timed

BEGIN = Windows("day").at(time.time() + 2 * 86_400).start + 12 * 3600.0
"""Noon of a day in the future, so that a server does not treat its counts as expired."""


CLOCK = "{otel_limits}:clock"
"""The key with the time that the test sets."""


class LossyServer:
    """A server that goes back to its last snapshot, or forgets everything, but for the clock."""

    def __init__(self, store: SharedStore, server: Server) -> None:
        self._store, self._server = store, server
        self._client = redis.Redis(port=server.port)
        self._kept: dict[bytes, tuple[bytes, int]] = {}

    def forget(self) -> None:
        """Start without data and without a snapshot."""
        self._kept = {}
        self._client.flushdb()

    def save(self) -> None:
        """Remember every key."""
        kept = {key: (self._client.dump(key), self._client.pttl(key)) for key in self._keys()}
        self._kept = {key: (value, left) for key, (value, left) in kept.items() if value}

    def restart(self, *, everything: bool) -> None:
        """Replace every key; the server is a new run, as after a restart."""
        for key in self._keys():
            self._client.delete(key)
        for key, (value, left) in () if everything else self._kept.items():
            self._client.restore(key, max(0, left), value)
        self._client.hset(KeyNames().marker, "server", "before")
        self._store.close()  # its next operation connects

    def _keys(self) -> list[bytes]:
        return [key for key in self._client.scan_iter() if key != CLOCK.encode()]


def small(examples: int, *without: Phase) -> settings:
    """Settings for runs of thirty steps."""
    return settings(
        max_examples=examples,
        phases=set(Phase) - {Phase.explain, *without},
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def test_memory_store_matches_the_model_after_every_step() -> None:
    """Never more is admitted than the limit, and nothing stays reserved after settlement."""

    class InMemory(StoreMachine):
        def __init__(self) -> None:
            clock = [0.0]
            store = MemoryStore(lambda: clock[0])
            super().__init__(Stores(store, lambda now: clock.__setitem__(0, now), BEGIN))

    run_state_machine_as_test(InMemory, settings=small(60))


def test_server_matches_the_model_after_every_step(timed_store: Timed, server: Server) -> None:
    """The same, with the real scripts on a real server that loses data; every key expires."""
    lossy = LossyServer(timed_store.store, server)

    class OnServer(StoreMachine):
        def __init__(self) -> None:
            lossy.forget()
            super().__init__(Stores(*timed_store, BEGIN, timed_store.store, lossy))

        def teardown(self) -> None:
            super().teardown()
            keys = set(server.client.scan_iter()) - {CLOCK}
            assert not [key for key in keys if server.client.ttl(key) < 0]

    run_state_machine_as_test(OnServer, settings=small(25))


@pytest.fixture
def clock() -> Clock:
    """The clock of every waiter."""
    return Clock(BEGIN)


def test_waiters_in_memory_are_admitted_in_order_and_promptly(clock: Clock) -> None:
    """Three workers that share a memory store: no wait is forgotten, and all queues drain."""

    class InMemory(QueueMachine):
        def __init__(self) -> None:
            store = MemoryStore(clock.time)
            super().__init__(Place(store, lambda _: None), clock)

    run_state_machine_as_test(InMemory, settings=small(25, Phase.shrink))


def test_waiters_on_a_server_are_admitted_in_order_and_promptly(
    timed_store: Timed, server: Server, clock: Clock
) -> None:
    """The same with the server's notifications, and an operator who grants, blocks and resets."""
    with server.client.pubsub() as subscription:
        channel = KeyNames().freed_channel
        subscription.subscribe(channel)

        def read_news() -> Iterator[Freed]:
            # This marker arrives after every earlier notification.
            server.client.publish(channel, "end")
            while (message := subscription.get_message(timeout=PATIENCE))["data"] != "end":
                if message["type"] == "message":
                    yield freed_of(message["data"])

        class OnServer(QueueMachine):
            def __init__(self) -> None:
                server.client.flushdb()
                super().__init__(Place(*timed_store, read_news, timed_store.store), clock)

        run_state_machine_as_test(OnServer, settings=small(15, Phase.shrink))
