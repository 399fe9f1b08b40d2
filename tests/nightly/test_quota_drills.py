"""Small runs of the quota drills; in full: `python -m tests.drills`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from otel_limits.quotas.needs import SLOT_LEASE_SECONDS
from tests.drills.__main__ import DRILLS
from tests.drills.lines import kills, suspend
from tests.drills.rebuild import rebuild
from tests.drills.rows import charges, restarts
from tests.drills.store import FAULTS, faults
from tests.postgresql import PROGRAMS

if TYPE_CHECKING:
    from pathlib import Path


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
