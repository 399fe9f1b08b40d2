"""Counts survive a server that restarts with old data or none, and a replica that lags."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

from otel_limits.quotas import fallback
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import CountState, Reset, StorePlace
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import UnboundedWindow
from tests.clock import Clock
from tests.quotas.fixtures import Server, eventually
from tests.quotas.fleets import Worker, quota, standing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("faulty", "redis_installed")

AMOUNT = 20
USED = 12


class Loss(Protocol):
    """A server that loses what was written after `remember`."""

    url: str

    def remember(self) -> None:
        """Keep what was written so far."""

    def happen(self) -> None:
        """Lose what was written since, and be available again."""

    @property
    def server(self) -> Server:
        """The server that is used now."""


class Empty:
    """A server without persistence: it restarts without any data."""

    options: tuple[str, ...] = ()

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self.server = Server(directory, *self.options)
        stack.callback(self.stop)
        self.server.start()
        self.server.age()
        self.url = self.server.url

    def stop(self) -> None:
        """Stop the server that is used now."""
        self.server.stop()

    def remember(self) -> None:
        """Remember nothing."""

    def happen(self) -> None:
        """Restart."""
        self.server.stop()
        self.server.start()


class StaleSnapshot(Empty):
    """A server that restarts from an RDB file."""

    def remember(self) -> None:
        """Save now, and never again."""
        self.server.client.save()


class StaleLog(Empty):
    """A server that restarts from an append-only file that lacks its end."""

    options = ("--appendonly", "yes", "--appendfsync", "always")

    def remember(self) -> None:
        """Copy the files as they are now."""
        shutil.copytree(self._directory / "appendonlydir", self._directory / "copy")

    def happen(self) -> None:
        """Restart with the copies."""
        self.server.stop()
        shutil.rmtree(self._directory / "appendonlydir")
        (self._directory / "copy").rename(self._directory / "appendonlydir")
        self.server.start()


class LaggingReplica(Empty):
    """A master whose replica stops receiving, and takes over."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        super().__init__(directory, stack)
        (directory / "replica").mkdir()
        self._replica = Server(directory / "replica")
        stack.callback(self._replica.stop)
        self._replica.start()
        self._replica.client.replicaof("127.0.0.1", self.server.port)
        eventually(lambda: self._replica.client.info("replication")["master_link_status"] == "up")

    def remember(self) -> None:
        """Wait for the replica, then stop the replication."""
        self.server.client.wait(1, 0)
        self._replica.client.replicaof("NO", "ONE")

    def happen(self) -> None:
        """Let the replica take the place of the master, at its address."""
        self._replica.client.save()
        self.server.stop()
        self._replica.stop()
        self.server = Server(self._directory / "replica", port=self.server.port)
        self.server.start()


LOSSES = (Empty, StaleSnapshot, StaleLog, LaggingReplica)


@pytest.fixture(params=LOSSES, ids=lambda kind: kind.__name__)
def loss(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loss]:
    """Each way in which a server loses what was written last."""
    with ExitStack() as stack:
        yield request.param(tmp_path, stack)


@pytest.fixture
def open_worker() -> Iterator[type[Worker]]:
    """Open workers, and close them after the test."""
    with ExitStack() as stack:

        def opened(url: str, held: Quota) -> Worker:
            worker = Worker(url, held)
            stack.callback(worker.engine.close)
            return worker

        yield opened  # type: ignore[misc]


def state(loss: Loss, held: Quota) -> CountState:
    """The state of a quota in the store."""
    store = open_shared_store(StorePlace(loss.url, 2.0))
    try:
        return standing(store, held)
    finally:
        store.close()


def use(worker: Worker, calls: int) -> None:
    """Make calls that are admitted."""
    assert [worker.call() for _ in range(calls)] == [True] * calls


def use_up(*workers: Worker) -> int:
    """Call in turn until the store has refused each; return how many calls were admitted."""
    admitted, since = 0, [len(worker.decisions()) for worker in workers]
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        admitted += sum(worker.call() for worker in workers)
        if all(
            "refused" in worker.decisions()[n:] for worker, n in zip(workers, since, strict=True)
        ):
            return admitted
        time.sleep(0.02)
    raise AssertionError([worker.decisions()[-3:] for worker in workers])


@pytest.mark.parametrize("grace", [30.0, 0.0])
def test_one_worker_is_admitted_20_of_20(
    loss: Loss, open_worker: type[Worker], grace: float
) -> None:
    """The worker restores its usage, and the reservation of its in-flight call."""
    held = quota(amount=AMOUNT, grace=grace)
    worker = open_worker(loss.url, held)
    use(worker, 5)
    ended_since = worker.ask()
    assert ended_since is not None
    loss.remember()
    worker.end(ended_since)
    use(worker, USED - 6)
    in_flight = worker.ask()
    assert in_flight is not None
    loss.happen()
    assert use_up(worker) == AMOUNT - USED - 1
    worker.end(in_flight)
    eventually(lambda: state(loss, held) == CountState(AMOUNT, 0, AMOUNT))


def test_reset_before_the_loss_stays_a_reset(loss: Loss, open_worker: type[Worker]) -> None:
    """Another worker knows more usage, from before the reset; the later reset wins."""
    held = quota(amount=AMOUNT, grace=0.0)
    one, other = open_worker(loss.url, held), open_worker(loss.url, held)
    use(one, 15)
    use(other, 1)
    loss.remember()
    store = open_shared_store(StorePlace(loss.url, 2.0))
    try:
        store.change(held.count(held.key.key_of_text(held.name, ""), time.time()), Reset())
    finally:
        store.close()
    use(one, 3)
    loss.happen()
    assert use_up(one, other) == AMOUNT - 3
    assert state(loss, held) == CountState(AMOUNT, 0, AMOUNT)


def test_slots_of_in_flight_calls_are_taken_again(loss: Loss, open_worker: type[Worker]) -> None:
    """Calls that ended hold none."""
    held = Quota(name="q", unit="concurrency", amount=2, windows=UnboundedWindow(), grace=0.0)
    one, other = open_worker(loss.url, held), open_worker(loss.url, held)
    ended = one.ask()
    assert ended is not None
    loss.remember()
    one.end(ended)
    in_flight = one.ask()
    assert in_flight is not None
    for worker in (one, other):
        worker.look()
    loss.happen()
    eventually(lambda: other.ask() is not None)
    assert other.ask() is None
    assert state(loss, held) == CountState(0, 2, 2)
    one.end(in_flight)
    eventually(lambda: other.ask() is not None)


def test_process_that_starts_after_the_loss_is_served_immediately(
    server: Server, open_worker: type[Worker]
) -> None:
    """A store without data may be a new one."""
    worker = open_worker(server.url, quota(grace=0.0))
    assert worker.call()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_process_that_starts_around_the_loss_is_part_of_the_fleet(
    own_server: Server, open_worker: type[Worker], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Others have not seen it yet, or it has not seen them."""
    held = quota(amount=AMOUNT, grace=0.0)
    with monkeypatch.context() as patch:
        if moment == "before":
            # The old one does not see the new one: its next regular read is due in a minute.
            patch.setattr(fallback, "look_seconds", lambda _: 60.0)
        old = open_worker(own_server.url, held)
        old.look()
        old.look()  # after the first regular one
    new = open_worker(own_server.url, held) if moment == "before" else None
    use(new or old, USED)
    own_server.stop()
    own_server.start()
    assert use_up(old if new else open_worker(own_server.url, held)) == AMOUNT - USED


def test_killed_worker_delays_the_others_for_seconds(
    own_server: Server, open_worker: type[Worker]
) -> None:
    """It cannot restore counts, and others may take some seconds for that."""
    held = quota(grace=0.0)
    one, other = open_worker(own_server.url, held), open_worker(own_server.url, held)
    for worker in (one, other):
        use(worker, 1)
    one.look()
    other.engine.close()
    own_server.stop()
    own_server.start()
    with Clock() as clock:
        eventually(one.call)
        assert clock() < 10.0


@pytest.mark.parametrize("caller", ["who used it", "who was idle"])
def test_two_workers_are_admitted_20_of_20(
    loss: Loss, open_worker: type[Worker], caller: str
) -> None:
    """The idle one restores the count before the other one is admitted."""
    held = quota(amount=AMOUNT, grace=0.0)
    one, other = open_worker(loss.url, held), open_worker(loss.url, held)
    use(one, 2)
    loss.remember()
    use(one, USED - 2)
    for worker in (one, other):
        worker.look()
    loss.happen()
    assert use_up(one if caller == "who used it" else other) == AMOUNT - USED
    assert state(loss, held) == CountState(AMOUNT, 0, AMOUNT)
