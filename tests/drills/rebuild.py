"""The store and a worker are lost together, and the counts are rebuilt from PostgreSQL."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_limits.quotas.store import CountState, StorePlace
from otel_limits.quotas.stores import open_shared_store
from tests.drills.deployments import DEPLOYMENTS
from tests.ledger.test_postgresql import own_server
from tests.quotas.conftest import eventually
from tests.quotas.fleets import quota, standing
from tests.quotas.test_fleet import process, variables

if TYPE_CHECKING:
    import subprocess

    from tests.drills.deployments import Deployment

DATABASE: Final = "drill"


def rebuild(directory: Path, calls: int) -> str:
    """One worker is killed, one suspended and one lives on while the store restarts empty.

    The living one has not seen all calls of the killed one. A call of the suspended one ended when
    the store was unavailable: the rebuild counts it, and its late settlement changes nothing.
    """
    # Each of the three workers makes some calls, and some are left.
    amount = 4 * calls
    held = {"model_calls": amount, "window": "P366D", "grace": 0}
    (directory / "limits.yaml").write_text(json.dumps({"quotas": {"q": held}}))
    with (
        own_server() as ledger,
        DEPLOYMENTS["alone"](directory) as place,
        ExitStack() as stack,
    ):
        ledger.ask("postgres", f"CREATE DATABASE {DATABASE}")
        settings = variables(place, directory / "ledger.db")
        settings["OTEL_LIMITS_LEDGER"] = ledger.url(DATABASE)
        command = [sys.executable, "-m", "tests.quotas.worker", "serve", "{}"]
        living, killed, suspended = (
            stack.enter_context(process(command, settings)) for _ in range(3)
        )
        for worker in (living, killed, suspended):
            _write(worker, "go")
        assert _call(living, calls) == {"end_turn": calls}
        assert _call(suspended, calls - 1) == {"end_turn": calls - 1}
        _write(suspended, "hold")
        assert _read(suspended) == "asked"
        assert _call(killed, calls) == {"end_turn": calls}
        place.servers[0].freeze()
        killed.send_signal(signal.SIGKILL)
        _write(suspended, "answer")
        assert json.loads(_read(suspended)) == {"end_turn": 1}
        suspended.send_signal(signal.SIGSTOP)
        place.servers[0].stop()
        place.servers[0].start()
        restarted = time.monotonic()
        while _call(living, 1) != {"end_turn": 1}:
            pass
        seconds = time.monotonic() - restarted
        eventually(lambda: _state(place, amount).used == 3 * calls + 1)
        rebuilt = time.monotonic() - restarted
        assert _call(living, amount)["end_turn"] == calls - 1
        suspended.send_signal(signal.SIGCONT)
        while _call(suspended, 1) != {"quota_exceeded": 1}:
            pass
        assert _state(place, amount) == CountState(amount, 0, amount)
    return (
        f"{amount} of {amount} calls admitted, served {seconds:.1f} s after an empty restart, "
        f"counts rebuilt after {rebuilt:.1f} s"
    )


def _write(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()


def _read(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline().strip()
    return _read(worker) if line == "ready" else line


def _call(worker: subprocess.Popen[str], number: int) -> Counter[str]:
    """Let a worker make calls; return how they ended."""
    _write(worker, str(number))
    return Counter(json.loads(_read(worker)))


def _state(place: Deployment, amount: int) -> CountState:
    store = open_shared_store(StorePlace(place.url, 5.0))
    try:
        return standing(store, quota(amount=amount))
    finally:
        store.close()
