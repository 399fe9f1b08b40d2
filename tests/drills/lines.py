"""Kills processes that wait for a concurrency quota or hold its slot."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_limits.quotas.engine import NEED_RENEWALS
from otel_limits.quotas.keys import Template
from otel_limits.quotas.store import (
    MOST_NEEDS,
    NEED_SECONDS,
    Charge,
    Count,
    Demand,
    Reserve,
    Settle,
    StorePlace,
)
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import UnboundedWindow
from tests.drills.deployments import DEPLOYMENTS
from tests.servers.quotas.test_fleet import process, variables

if TYPE_CHECKING:
    import subprocess

    from tests.drills.deployments import Deployment
    from tests.quotas.fixtures import Server

ONE_SLOT: Final = {"concurrency": 1, "on_exceeded": "wait", "max_wait": "5m"}
FOREVER: Final = 1000.0
BUSY: Final = 20.0
"""The maximum delay in seconds on a busy machine: less than the default lease."""


class Queue:
    """A queue of processes for one slot.

    Args:
        server: The store.
        directory: Directory of the policy file.
        lease: Seconds until the slot of a killed process is free.
    """

    def __init__(self, server: Server | Deployment, directory: Path, lease: float) -> None:
        self._lease = lease
        self._settings = variables(server, directory / "ledger.db")
        self._stack = ExitStack()
        (directory / "limits.yaml").write_text(json.dumps({"quotas": {"q": ONE_SLOT}}))

    def join(self, names: list[str], seconds: float = 0.0) -> subprocess.Popen[str]:
        """Start a process whose agents call in sequence; return when all are queued."""
        arguments = {"names": names, "seconds": seconds, "lease": self._lease}
        command = [sys.executable, "-m", "tests.quotas.worker", "line_up", json.dumps(arguments)]
        begun = self._stack.enter_context(process(command, self._settings))
        assert begun.stdin is not None
        begun.stdin.write("go\n")
        begun.stdin.flush()
        assert read(begun)[-1] == "queued"
        return begun

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


@contextmanager
def open_queue(server: Server | Deployment, directory: Path, lease: float) -> Iterator[Queue]:
    """Create a queue, and end its processes afterwards."""
    made = Queue(server, directory, lease)
    try:
        yield made
    finally:
        made.close()


def read(one: subprocess.Popen[str], last: str = "queued") -> list[str]:
    """Return a process's output up to a line."""
    assert one.stdout is not None
    output = [one.stdout.readline().strip()]
    while output[-1] != last:
        assert output[-1], f"it exited before printing {last!r}: {output}"
        output.append(one.stdout.readline().strip())
    return output


def suspend(directory: Path, lease: int, kind: str = "alone") -> str:
    """Suspend the first waiter: the next gets the slot, and the suspended one later."""
    with DEPLOYMENTS[kind](directory) as place, open_queue(place, directory, lease) as queue:
        store = open_shared_store(StorePlace(place.url, 5.0))
        window = UnboundedWindow().at(store.now())
        count = Count("q", Template("").key("q", dict[str, object]().get).id, window, "concurrency")
        store.run([Reserve("held-0", (Demand(count=count, amount=1, limit=1),), FOREVER)])
        first, second = queue.join(["stopped"]), queue.join(["next"])
        first.send_signal(signal.SIGSTOP)
        store.run([Settle("held-0", (Charge(count=count, amount=0),))])
        store.close()
        freed = time.monotonic()
        read(second, "asked next")
        waited = time.monotonic() - freed
        second.communicate()
        first.send_signal(signal.SIGCONT)
        read(first, "asked stopped")
        first.communicate()
    assert waited < NEED_SECONDS * (1 + 1 / NEED_RENEWALS) + BUSY, f"{waited:.1f} s"
    return f"a call got the slot {waited:.1f} s after it was free, past a suspended waiter"


def starve(directory: Path, calls: int, kind: str = "alone") -> str:
    """A call of 14,000 tokens waits in one process while another one keeps making small ones.

    Before it, two others waited, whose processes were killed and suspended.
    """
    held = {"tokens": 20_000, "window": "P366D", "on_exceeded": "wait", "max_wait": "5m"}
    (directory / "limits.yaml").write_text(json.dumps({"quotas": {"q": held}}))
    with DEPLOYMENTS[kind](directory) as place, ExitStack() as stack:
        settings = variables(place, directory / "ledger.db")
        many, killed, suspended, one = (
            stack.enter_context(
                process(
                    [sys.executable, "-m", "tests.quotas.worker", "spread", json.dumps(each)],
                    settings,
                )
            )
            for each in (
                {"cap": 4_900, "seconds": 0.1, "agents": 4, "calls": calls},
                *[{"cap": 13_900, "seconds": 0.0, "agents": 1, "calls": 1}] * 3,
            )
        )
        for worker in (many, killed, suspended, one):
            read(worker, "ready")
        begun = _begin(many, 8)
        # From here on, the quota is used up.
        for worker, end in ((killed, signal.SIGKILL), (suspended, signal.SIGSTOP)):
            _begin(worker, 1)
            worker.send_signal(end)
        _begin(one, 0)
        # Replies are cut once and stall, both for less than a call waits for them.
        place.faults.append("cut")
        for wire in place.wires:
            wire.delay = 0.1
        small, large = (each.communicate()[0].splitlines() for each in (many, one))
    assert json.loads(small[-1]) == {"end_turn": 4 * calls}
    assert json.loads(large[-1]) == {"end_turn": 1}
    since, until = float(large[0].split()[1]), float(large[-2].split()[1])
    admitted = [each for each in (*begun, *small) if each.startswith("admitted")]
    passed = sum(since < float(each.split()[1]) < until for each in admitted)
    assert passed <= MOST_NEEDS, f"{passed} calls passed it"
    seconds = until - since
    return f"{passed} small calls passed a waiting one of 14,000 tokens, which took {seconds:.1f} s"


def _begin(worker: subprocess.Popen[str], lines: int) -> list[str]:
    """Let a worker make its calls; return its first lines."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    return [worker.stdout.readline() for _ in range(lines)]


def kills(directory: Path, lease: int, kind: str = "alone") -> str:
    """Kill the slot holder and the first waiter: the next gets the slot when the lease ends."""
    with DEPLOYMENTS[kind](directory) as place, open_queue(place, directory, lease) as queue:
        holder = queue.join(["holder"], FOREVER)
        first, second = queue.join(["a", "b"]), queue.join(["c", "d"])
        for each in (first, holder):
            each.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        read(second, "asked c")
        seconds = time.monotonic() - killed
        output, _ = second.communicate()
    assert output.split("\n", 1)[0] == "asked d"
    assert json.loads(output.splitlines()[-1]) == {"end_turn": 2}
    assert seconds < lease + BUSY, f"the slot was free after {seconds:.1f} s"
    return f"the slot of a killed process was free after {seconds:.1f} s"
