"""Fixtures of tests of quotas."""

from __future__ import annotations

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
from tests.servers.ledger.conftest import postgresql

__all__ = [
    "cluster",
    "hold",
    "own_server",
    "postgresql",
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
