"""What happens to a store of quotas: its answers are late, cut off, truncated, or never come."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_limits.quotas.store import Standing, StorePlace
from otel_limits.quotas.stores import open_shared_store
from tests.quotas.conftest import Server, Wire, eventually
from tests.quotas.fleets import Worker, quota, standing

if TYPE_CHECKING:
    from otel_limits.quotas.quota import Quota

FAULTS: Final = ("delay", "cut", "truncate", "hang")
WORKERS: Final = 3
SCARCE: Final = 60


def faults(directory: Path, size: int) -> str:
    """So many of each kind, beside each other, while workers call; with the times that ship."""
    server = Server(directory)
    server.start()
    try:
        with ThreadPoolExecutor(2 * len(FAULTS)) as pool:
            plenty = [pool.submit(_count, server, fault, size) for fault in FAULTS]
            scarce = [pool.submit(_exhaust, server, fault, size) for fault in FAULTS]
            told = [
                f"{fault}: {each.result()} calls counted, none twice"
                for fault, each in zip(FAULTS, plenty, strict=True)
            ]
            for each in scarce:
                each.result()
    finally:
        server.stop()
    return f"{'; '.join(told)}; no quota of {SCARCE} was passed"


def _count(server: Server, fault: str, size: int) -> int:
    """Every call that went out is counted, once, and nothing stays reserved."""
    held, chance = quota(f"plenty-{fault}", 10**6), random.Random(fault)  # noqa: S311  no secret
    with ExitStack() as stack:
        wire, workers = _start(stack, server, held, WORKERS)
        done = threading.Event()
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        counts = [pool.submit(_work, worker, done) for worker in workers]
        for _ in range(size):
            time.sleep(chance.random() / 5)
            wire.faults.append(fault)
            eventually(lambda: not wire.faults)
        done.set()
        went_out = sum(count.result() for count in counts)
        _expect(server, held, Standing(went_out, 0, held.amount))
    return went_out


def _work(worker: Worker, done: threading.Event) -> int:
    number = 0
    while not done.wait(0.01):
        number += worker.call()
    return number


def _exhaust(server: Server, fault: str, size: int) -> None:
    """A worker that is alone uses a quota up, and never more, whatever happens meanwhile."""
    held = quota(f"scarce-{fault}", SCARCE)
    with ExitStack() as stack:
        wire, (worker,) = _start(stack, server, held, 1)
        went_out = 0
        for _ in range(size):
            wire.faults.append(fault)
            went_out += sum(worker.call() for _ in range(SCARCE // size))
        wire.faults.clear()
        # Until the store itself says that there is nothing left, and not the end of a share.
        while not worker.decisions() or worker.decisions()[-1] != "refused":
            went_out += worker.call()
            time.sleep(0.01)
        assert went_out == SCARCE, f"{fault}: {went_out} of {SCARCE} calls went out"
        _expect(server, held, Standing(SCARCE, 0, SCARCE))


def _start(stack: ExitStack, server: Server, held: Quota, number: int) -> tuple[Wire, list[Worker]]:
    wire = Wire(server.port)
    stack.callback(wire.close)
    workers = [Worker(wire.url, held) for _ in range(number)]
    for worker in workers:
        stack.callback(worker.engine.close)
    return wire, workers


def _expect(server: Server, held: Quota, expected: Standing) -> None:
    store = open_shared_store(StorePlace(server.url, 2.0))
    try:
        eventually(lambda: standing(store, held) == expected)
    except AssertionError:
        raise AssertionError(f"{held.name}: {standing(store, held)}, not {expected}") from None
    finally:
        store.close()
