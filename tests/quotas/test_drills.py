"""Small runs of the quota drills; in full: `python -m tests.drills`."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.quotas import redis_scripts
from otel_limits.quotas.keys import Template
from otel_limits.quotas.store import Charge, Count, Demand, Reserve, Settle
from otel_limits.quotas.tickets import SLOT_LEASE_SECONDS
from otel_limits.quotas.windows import UnboundedWindow
from tests.drills.__main__ import DRILLS
from tests.drills.lines import kills, open_queue, suspend
from tests.drills.rebuild import rebuild
from tests.drills.rows import charges, restarts
from tests.drills.store import FAULTS, faults
from tests.ledger.test_postgresql import PROGRAMS

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.quotas.store import SharedStore
    from tests.quotas.conftest import Server


@pytest.mark.usefixtures("faulty", "redis_installed")
def test_store_faults_neither_lose_nor_overadmit_calls(tmp_path: Path) -> None:
    """Late, cut, truncated and missing replies, with the default timeouts."""
    told = faults(tmp_path, 1)
    assert all(fault in told for fault in FAULTS)


@pytest.mark.usefixtures("redis_installed")
def test_killed_processes_do_not_block_the_queue(tmp_path: Path) -> None:
    """A killed waiter never does, and a killed slot holder only until its lease ends.

    The lease is two seconds here, and the default in full runs.
    """
    assert "was free after" in kills(tmp_path, 2)
    assert DRILLS["quota-line-alone"][1] == SLOT_LEASE_SECONDS


@pytest.mark.usefixtures("redis_installed")
def test_suspended_process_does_not_block_the_queue(tmp_path: Path) -> None:
    """It keeps its place in the queue for ten seconds, and is served once it continues."""
    assert "past a suspended waiter" in suspend(tmp_path, 30)


@pytest.mark.usefixtures("redis_installed")
def test_guarded_server_that_loses_data_admits_the_quota_exactly(tmp_path: Path) -> None:
    """Over TLS with the documented rights, which suffice for restoring and renewing."""
    assert "20 of 20 after no data, old RDB, old AOF" in restarts(tmp_path, 20, "guarded")


@pytest.mark.usefixtures("redis_installed")
def test_lost_calls_of_a_fleet_in_a_cluster_are_charged(tmp_path: Path) -> None:
    """Real processes are killed, and suspended past a lease of three seconds."""
    assert "50 tokens" in charges(tmp_path, 3, "cluster")


@pytest.mark.skipif(
    not PROGRAMS and os.environ.get("CI") != "true", reason="PostgreSQL is missing."
)
@pytest.mark.usefixtures("redis_installed")
def test_counts_are_rebuilt_from_the_ledger_of_a_fleet(tmp_path: Path) -> None:
    """Also calls of a killed process, and once a call that a suspended one settles late."""
    assert "20 of 20 calls admitted" in rebuild(tmp_path, 5)


def test_fleet_is_admitted_in_the_order_of_its_requests(
    server: Server, store: SharedStore, tmp_path: Path
) -> None:
    """Within a process by arrival; between processes, by a request after a slot is free."""
    reserve, settle = (redis_scripts.sha_of(script) for script in ("reserve", "settle"))
    count = Count(
        "q",
        Template("").key("q", dict[str, object]().get).id,
        UnboundedWindow().at(store.now()),
        "concurrency",
    )
    store.run([Reserve("held-0", (Demand(count=count, amount=1, limit=1),), 300.0)])
    with (
        open_queue(server, tmp_path, SLOT_LEASE_SECONDS) as queue,
        server.client.monitor() as monitor,
    ):
        processes = [queue.join([f"{each}1", f"{each}2", f"{each}3"]) for each in "ab"]
        store.run([Settle("held-0", (Charge(count=count, amount=0),))])
        said = [each.communicate()[0] for each in processes]
        server.client.publish("done", "")
        asked = _asked(monitor, reserve, settle)
    for name, lines in zip("ab", said, strict=True):
        assert lines.split("\n")[:3] == [f"asked {name}{number}" for number in (1, 2, 3)]
    # Each settlement frees a slot for one of the requests after it: of the older call, if both
    # have been refused before.
    settled = [n for n, (script, _) in enumerate(asked) if script == settle]
    assert len(settled) == 7
    for one, other in pairwise(settled):
        assert asked[other][1] in {name for _, name in asked[one + 1 : other]}


def _asked(monitor: Any, reserve: str, settle: str) -> list[tuple[str, str]]:
    """Return the scripts called, each with its operation, in order."""
    asked: list[tuple[str, str]] = []
    for said in monitor.listen():
        words = said["command"].split()
        if words[0] == "PUBLISH" and words[1] == "done":
            return asked
        if words[0] == "EVALSHA" and words[1] in (reserve, settle):
            asked.append((words[1], words[3 + int(words[2])]))
    raise AssertionError("the server went away")
