"""Opens the store on the node of a Redis or Valkey cluster that has our keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import redis
from redis.cluster import RedisCluster

from otel_limits.quotas.redis_scripts import TAG
from otel_limits.quotas.redis_server import client_settings, no_secrets_told, redis_url
from otel_limits.quotas.redis_store import RedisStore


class ClusterLink:
    """How the node of a cluster that has our keys is reached."""

    def __init__(self, connect: Callable[[], RedisCluster]) -> None:
        """Connect on first use: the client of a cluster does so as soon as it is made."""
        self._connect = connect
        self._cluster: RedisCluster | None = None

    def client(self) -> Any:
        """Return the client of the node."""
        if self._cluster is None:
            self._cluster = self._connect()
        return self._cluster.get_redis_connection(self._cluster.get_node_from_key(TAG))  # type: ignore[no-untyped-call]

    def learn(self) -> None:
        """Look again where our keys are."""
        self.close()

    def close(self) -> None:
        """Close every connection."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


def require_readable(name: str, url: str) -> None:
    """Make sure that the client understands a URL."""
    # Its options are not tried: a cluster takes others than a server, and ignores unknown ones.
    with no_secrets_told(name, url):
        redis.ConnectionPool.from_url(_url_of_node(url))


def open_store(url: str, timeout: float, health_interval: int) -> RedisStore:
    """Make the store on a cluster."""
    settings = client_settings(timeout, health_interval)
    connect = functools.partial(RedisCluster.from_url, _url_of_node(url), **settings)
    return RedisStore(url, lambda: ClusterLink(connect))


def _url_of_node(url: str) -> str:
    return redis_url(url).replace("+cluster", "", 1)
