"""What happens to a store of quotas: its answers are late, cut off, truncated, or never come.

And its server dies, where another one can take over.
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
from otel_limits.quotas.store import CountState, StorePlace
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import UnboundedWindow
from tests.drills.deployments import DEPLOYMENTS
from tests.quotas.conftest import PATIENCE, eventually
from tests.quotas.fleets import Worker, quota, standing

if TYPE_CHECKING:
    from tests.drills.deployments import Deployment

FAULTS: Final = ("delay", "cut", "truncate", "hang")
WORKERS: Final = 3
SCARCE: Final = 60
PLENTY: Final = 10**6
IN_LINE: Final = 4
"""Calls that each worker makes at once, where there are as many places as workers."""

REPLICATED: Final = 1.0
"""Seconds after which a replica surely has what its master has acknowledged: Redis replicates
afterwards, and promises nothing of what was acknowledged last
(https://redis.io/docs/latest/operate/oss_and_stack/management/replication/)."""


def faults(directory: Path, size: int, kind: str = "alone") -> str:
    """So many of each kind while workers call, and a fail-over; with the times that ship."""
    told = []
    with DEPLOYMENTS[kind](directory) as place:
        if place.has_wires:
            told.append(f"{_count(place, size)} calls counted beside {size} of {', '.join(FAULTS)}")
            _exhaust(place, size)
            told.append(f"no quota of {SCARCE} was passed")
            told.append(f"{_queue(place, size)} calls went through a line")
        if place.has_replica:
            told.append(_fail_over(place))
    return "; ".join(told)


def _count(place: Deployment, size: int) -> int:
    """Every call that went out is counted, once, nothing stays reserved, and nobody is ended."""
    held = quota("plenty", PLENTY)
    with _working(place, held, WORKERS) as work:
        _spoil(place, size)
        spoiled = time.monotonic()
        eventually(lambda: work.is_served(since=spoiled))
    assert not work.refused, f"{work.refused} calls were refused"
    _expect(place, held, CountState(len(work.ended), 0, PLENTY))
    return len(work.ended)


def _exhaust(place: Deployment, size: int) -> None:
    """A worker that is alone uses a quota up, and never more, whatever happens meanwhile."""
    held = quota("scarce", SCARCE)
    worker = Worker(place.url, held)
    try:
        went_out = 0
        for fault in FAULTS * size:
            place.faults.append(fault)
            went_out += sum(worker.call() for _ in range(max(1, SCARCE // (len(FAULTS) * size))))
        place.faults.clear()
        # Until the store itself says that there is nothing left, and not the end of a share.
        while not worker.decisions() or worker.decisions()[-1] != "refused":
            went_out += worker.call()
            time.sleep(0.01)
    finally:
        worker.engine.close()
    assert went_out == SCARCE, f"{went_out} of {SCARCE} calls went out"
    _expect(place, held, CountState(SCARCE, 0, SCARCE))


def _queue(place: Deployment, size: int) -> int:
    """Calls wait in line for places; it drains, and only who cannot ask is refused."""
    held = Quota(
        name="line",
        unit="concurrency",
        amount=WORKERS,
        windows=UnboundedWindow(),
        on_exceeded="wait",
        max_wait=PATIENCE,
    )
    with _working(place, held, WORKERS, at_once=IN_LINE) as work:
        _spoil(place, size)
    # While the store is lost to a worker, there may be no share of a place.
    allowed = {"admitted", "waited", "degraded_grace_admitted", "degraded_denied"}
    assert allowed >= set(work.decisions()), set(work.decisions())
    assert "waited" in work.decisions()
    _expect(place, held, CountState(0, 0, WORKERS))
    return len(work.ended)


def _fail_over(place: Deployment) -> str:
    """The server that has the keys is killed: nobody is ended, and what was replicated counts."""
    plenty, scarce = quota("moved", PLENTY), quota("last", 10 * SCARCE)
    with _working(place, plenty, WORKERS) as work, _working(place, scarce, 1) as last:
        eventually(lambda: len(work.ended) > SCARCE and len(last.ended) > SCARCE)
        place.servers[0].stop()
        killed = time.monotonic()
        eventually(lambda: work.is_served(since=killed))
        seconds = time.monotonic() - killed
        eventually(lambda: last.decisions()[-1] == "refused")
    assert not work.refused, f"{work.refused} calls were refused"
    lost = [_lost(place, *each, killed) for each in ((work, plenty), (last, scarce))]
    assert len(last.ended) <= scarce.amount + lost[1]
    return (
        f"served {seconds:.1f} s after a kill -9, {sum(lost)} of "
        f"{len(work.ended) + len(last.ended)} calls lost by replication"
    )


def _lost(place: Deployment, work: Work, held: Quota, killed: float) -> int:
    """Return how many calls a replica did not have, of those that it may not have had."""
    at_stake = sum(abs(at - killed) < REPLICATED for at in work.ended)
    went_out = len(work.ended)
    _until(place, held, lambda found: went_out - at_stake <= found.used <= went_out)
    _until(place, held, lambda found: found.reserved <= at_stake)
    return went_out - _standing(place, held).used


# --- workers --------------------------------------------------------------------------------------


class Work:
    """What workers do meanwhile."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self.ended: list[float] = []
        """When each call that went out had ended."""
        self.refused = 0

    def decisions(self) -> list[str]:
        """What was decided, by each worker in turn."""
        return [each for worker in self._workers for each in worker.decisions()]

    def is_served(self, since: float) -> bool:
        """Whether every worker asks the store, and all have made some calls since."""
        is_back = all(worker.decisions()[-1:] == ["admitted"] for worker in self._workers)
        return is_back and sum(at > since for at in self.ended) > 10 * len(self._workers)

    def begin(self, worker: Worker) -> None:
        """Have a worker see the store: before that it has no share of anything."""
        assert worker.call()
        self.ended.append(time.monotonic())
        eventually(lambda: worker.engine.client.fallback.workers > 0)

    def go_on(self, worker: Worker, done: threading.Event) -> None:
        """Call until it is enough."""
        while not done.wait(0.01):
            if worker.call():
                self.ended.append(time.monotonic())
            else:
                self.refused += 1


@contextmanager
def _working(place: Deployment, held: Quota, number: int, at_once: int = 1) -> Iterator[Work]:
    """Let so many workers call, and so many agents of each at once, until the end of the block."""
    done = threading.Event()
    with ExitStack() as stack:
        workers = [stack.enter_context(_begun(place.url, held)) for _ in range(number)]
        pool = stack.enter_context(ThreadPoolExecutor(number * at_once))
        stack.callback(done.set)  # also where something fails
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
    """Begin a worker that hears what becomes free."""
    worker = Worker(url, held)
    listener = KillListener(
        open_shared_store(StorePlace(url, 2.0)), lambda *_: 0, worker.lines.notify_freed
    )
    try:
        yield worker
    finally:
        listener.close()
        worker.engine.close()


def _spoil(place: Deployment, size: int) -> None:
    """Do every harm so often, now and then."""
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
