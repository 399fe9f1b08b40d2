"""Fixtures of tests with servers: one of a kind for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import postgresql as servers
from tests.ledger.fixtures import ledger, program
from tests.quotas.fixtures import (
    cluster,
    hold,
    own_server,
    rare_looks,
    redis_installed,
    server,
    shared_cluster,
    shared_sentinel,
    shared_server,
    store,
    timed_store,
    url,
    wire,
)

__all__ = [
    "cluster",
    "hold",
    "ledger",
    "own_server",
    "program",
    "rare_looks",
    "redis_installed",
    "server",
    "shared_cluster",
    "shared_sentinel",
    "shared_server",
    "store",
    "timed_store",
    "url",
    "wire",
]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.Server]:
    """One server for all tests of this process, each with its own database."""
    with servers.running() as server:
        yield server
