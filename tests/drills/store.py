"""Drills for a quota store: replies are late, cut off, truncated or missing.

Where a replica can take over, the server is also killed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_limits.quotas.kill_listener import KillListener
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import BURSTS, CountState, StorePlace
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import UnboundedWindow, Windows
from tests.drills.deployments import DEPLOYMENTS
from tests.quotas.fixtures import PATIENCE, eventually
from tests.quotas.fleets import Worker, quota, standing

if TYPE_CHECKING:
    from tests.drills.deployments import Deployment

FAULTS: Final = ("delay", "cut", "truncate", "hang")
WORKERS: Final = 3
SCARCE: Final = 60
PACE: Final = 20
"""Calls a second."""
PLENTY: Final = 10**6
CALLS_PER_WORKER: Final = 4
"""Concurrent calls per worker; there are as many slots as workers."""

REPLICATED: Final = 1.0
"""Seconds after which a replica surely has what its master has acknowledged: Redis replicates
afterwards, and promises nothing of what was acknowledged last
(https://redis.io/docs/latest/operate/oss_and_stack/management/replication/)."""


def faults(directory: Path, size: int, kind: str = "alone") -> str:
    """Inject `size` faults of each kind under load, then fail over; with the default timeouts."""
    results = []
    with DEPLOYMENTS[kind](directory) as place:
        if place.wires:
            results.append(
                f"{_count(place, size)} calls counted under {size} each of {', '.join(FAULTS)}"
            )
            _exhaust(place, size)
            results.append(f"no quota of {SCARCE} was exceeded")
            results.append(f"{_queue(place, size)} calls went through a queue")
            results.append(_pace_calls(place, size))
        if place.has_replica:
            results.append(_fail_over(place))
    return "; ".join(results)


def _count(place: Deployment, size: int) -> int:
    """Every admitted call counts once, nothing stays reserved, and none is refused."""
    held = quota("plenty", PLENTY)
    with _working(place, held, WORKERS) as work:
        _spoil(place, size)
        spoiled = time.monotonic()
        eventually(lambda: work.is_served(since=spoiled))
    assert not work.refused, f"{work.refused} calls were refused"
    _expect(place, held, CountState(len(work.ended), 0, PLENTY))
    return len(work.ended)


def _exhaust(place: Deployment, size: int) -> None:
    """A single worker uses a quota up exactly, despite all faults."""
    held = quota("scarce", SCARCE)
    worker = Worker(place.url, held)
    try:
        admitted = 0
        for fault in FAULTS * size:
            place.faults.append(fault)
            admitted += sum(worker.call() for _ in range(max(1, SCARCE // (len(FAULTS) * size))))
        place.faults.clear()
        # Until the store itself refuses, which may be later than the end of a share.
        while not worker.decisions() or worker.decisions()[-1] != "refused":
            admitted += worker.call()
            time.sleep(0.01)
    finally:
        worker.engine.close()
    assert admitted == SCARCE, f"{admitted} of {SCARCE} calls were admitted"
    _expect(place, held, CountState(SCARCE, 0, SCARCE))


def _queue(place: Deployment, size: int) -> int:
    """Calls queue for slots; the queue drains, and only calls in an outage are refused."""
    held = Quota(
        name="queue",
        unit="concurrency",
        amount=WORKERS,
        windows=UnboundedWindow(),
        on_exceeded="wait",
        max_wait=PATIENCE,
    )
    with _working(place, held, WORKERS, at_once=CALLS_PER_WORKER) as work:
        _spoil(place, size)
    # While a worker cannot reach the store, it may have no share of a slot.
    allowed = {"admitted", "waited", "degraded_grace_admitted", "degraded_denied"}
    assert allowed >= set(work.decisions()), set(work.decisions())
    assert "waited" in work.decisions()
    _expect(place, held, CountState(0, 0, WORKERS))
    return len(work.ended)


def _pace_calls(place: Deployment, size: int) -> str:
    """A token bucket admits no more than its burst and what flows back."""
    held = Quota(
        name="paced",
        unit="model_calls",
        amount=PACE,
        windows=Windows("PT1S"),
        pace="smooth",
        on_exceeded="wait",
        max_wait=PATIENCE,
    )
    begun = time.monotonic()
    with _working(place, held, WORKERS) as work:
        _spoil(place, size)
        spoiled = time.monotonic()
        eventually(lambda: sum(at > spoiled for at in work.ended) > PACE)
    # They can only be seen later than they were admitted. In an outage, the rest of the burst is
    # shared, and then it is not refilled.
    for number, at in enumerate(sorted(work.ended), 1):
        most = 2 * PACE // BURSTS + PACE * (at - begun)
        assert number <= most, f"{number} calls after {at - begun:.2f} s"
    _until(place, held, lambda found: found.used + found.reserved == 0)
    return f"{len(work.ended)} calls kept the pace of a token bucket"


def _fail_over(place: Deployment) -> str:
    """The server with the keys is killed: no call is refused, and replicated counts survive."""
    plenty, scarce = quota("moved", PLENTY), quota("last", 10 * SCARCE)
    with _working(place, plenty, WORKERS) as work, _working(place, scarce, 1) as last:
        eventually(lambda: len(work.ended) > SCARCE and len(last.ended) > SCARCE)
        place.servers[0].stop()
        killed = time.monotonic()
        eventually(lambda: work.is_served(since=killed))
        seconds = time.monotonic() - killed
        eventually(lambda: last.decisions()[-1] == "refused")
    assert not work.refused, f"{work.refused} calls were refused"
    lost = [_count_lost(place, *each, killed) for each in ((work, plenty), (last, scarce))]
    assert len(last.ended) <= scarce.amount + lost[1]
    return (
        f"served {seconds:.1f} s after a kill -9, {sum(lost)} of "
        f"{len(work.ended) + len(last.ended)} calls lost by replication"
    )


def _count_lost(place: Deployment, work: Work, held: Quota, killed: float) -> int:
    """Return the number of calls lost by replication, which is within the expected range."""
    at_stake = sum(abs(at - killed) < REPLICATED for at in work.ended)
    admitted = len(work.ended)
    _until(place, held, lambda found: admitted - at_stake <= found.used <= admitted)
    _until(place, held, lambda found: found.reserved <= at_stake)
    return admitted - _standing(place, held).used


# --- workers --------------------------------------------------------------------------------------


class Work:
    """Calls made by workers, and their results."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self.ended: list[float] = []
        """The end times of admitted calls."""
        self.refused = 0

    def decisions(self) -> list[str]:
        """The decisions, by worker."""
        return [each for worker in self._workers for each in worker.decisions()]

    def is_served(self, since: float) -> bool:
        """Whether every worker reaches the store, and all have made some calls since."""
        is_back = all(worker.decisions()[-1:] == ["admitted"] for worker in self._workers)
        return is_back and sum(at > since for at in self.ended) > 10 * len(self._workers)

    def begin(self, worker: Worker) -> None:
        """Let a worker read the store's counts: before that it has no share."""
        # On a busy machine, the connection may take longer than a call waits for it.
        eventually(worker.call)
        self.ended.append(time.monotonic())
        eventually(lambda: worker.engine.client.fallback.workers > 0)

    def go_on(self, worker: Worker, done: threading.Event) -> None:
        """Call until the event is set."""
        while not done.wait(0.01):
            if worker.call():
                self.ended.append(time.monotonic())
            else:
                self.refused += 1


@contextmanager
def _working(place: Deployment, held: Quota, number: int, at_once: int = 1) -> Iterator[Work]:
    """Run `number` workers, each with `at_once` concurrent agents, until the end of the block."""
    done = threading.Event()
    with ExitStack() as stack:
        workers = [stack.enter_context(_begun(place.url, held)) for _ in range(number)]
        pool = stack.enter_context(ThreadPoolExecutor(number * at_once))
        stack.callback(done.set)  # also after a failure
        work = Work(workers)
        for worker in workers:
            work.begin(worker)
        ends = [pool.submit(work.go_on, each, done) for each in workers for _ in range(at_once)]
        yield work
        done.set()
        for end in ends:
            end.result()


@contextmanager
def _begun(url: str, held: Quota) -> Iterator[Worker]:
    """Start a worker that is notified of freed quota."""
    worker = Worker(url, held)
    listener = KillListener(
        open_shared_store(StorePlace(url, 2.0)), lambda *_: 0, worker.queues.notify_freed
    )
    try:
        yield worker
    finally:
        listener.close()
        worker.engine.close()


def _spoil(place: Deployment, size: int) -> None:
    """Inject every fault `size` times, at random intervals."""
    chance = random.Random(size)  # noqa: S311  no secret
    for fault in FAULTS * size:
        time.sleep(chance.random() / 5)
        place.faults.append(fault)
        eventually(lambda: not place.faults)


# --- the store ------------------------------------------------------------------------------------


def _expect(place: Deployment, held: Quota, expected: CountState) -> None:
    _until(place, held, lambda found: found == expected)


def _until(place: Deployment, held: Quota, is_right: Callable[[CountState], bool]) -> None:
    try:
        eventually(lambda: is_right(_standing(place, held)))
    except AssertionError:
        raise AssertionError(f"{held.name}: {_standing(place, held)}") from None


def _standing(place: Deployment, held: Quota) -> CountState:
    store = open_shared_store(StorePlace(place.url, 2.0))
    try:
        return standing(store, held)
    finally:
        store.close()
