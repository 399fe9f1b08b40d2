"""Opens the store on the node of a Redis or Valkey cluster that has our keys."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import redis
from redis.cluster import ClusterNode, RedisCluster

from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.redis_server import client_settings, redacted_errors, redis_url
from otel_limits.quotas.redis_store import RedisStore

if TYPE_CHECKING:
    from otel_limits.quotas.store import StorePlace

FURTHER_SEED: Final = re.compile(r",([^,/?@]+):(\d+)(?=[,/?]|$)")
"""Every host and port but the first."""

Address = tuple[str, int]


def require_readable(name: str, url: str) -> None:
    """Make sure that the client understands a URL."""
    # Its options are not tried: a cluster takes others than a server, and ignores unknown ones.
    with redacted_errors(name, url):
        redis.ConnectionPool.from_url(_seeds(url)[0])


def open_store(place: StorePlace) -> RedisStore:
    """Make the store on a cluster."""
    settings = client_settings(place)
    first, others = _seeds(place.url)
    known: list[Address] = []

    def connect(_: redis.Redis | None) -> redis.Redis:
        """Return a client of the node with our keys."""
        # redis-py's own refresh uses either the addresses of the URL or the nodes found last
        # (`dynamic_startup_nodes`). Either may be gone for good: the first hosts, or all nodes of a
        # cluster that was replaced behind the same name.
        nodes = [ClusterNode(*each) for each in dict.fromkeys((*others, *known))]  # type: ignore[no-untyped-call]
        cluster = RedisCluster.from_url(first, startup_nodes=nodes, **settings)
        found = cluster.get_nodes()  # type: ignore[no-untyped-call]
        known[:] = [(node.host, int(node.port)) for node in found]
        node = cluster.get_node_from_key(KeyNames(place.namespace).tag)  # type: ignore[no-untyped-call]
        client = cluster.get_redis_connection(node)
        # Connections of the search. `RedisCluster.close()` leaves them open.
        cluster.disconnect_connection_pools()  # type: ignore[no-untyped-call]
        return client

    return RedisStore(place, connect)


def _seeds(url: str) -> tuple[str, list[Address]]:
    """Return the URL of the first node, and the addresses of the others."""
    first = FURTHER_SEED.sub("", redis_url(url).replace("+cluster", "", 1))
    return first, [(host, int(port)) for host, port in FURTHER_SEED.findall(url)]
