"""Opens the store on the node of a Redis or Valkey cluster that has our keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

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


class ClusterLink:
    """How the node of a cluster that has our keys is reached.

    Args:
        connect: Makes a client that looks for the cluster at these addresses, among others.
        tag: Begin of the names of our keys, which all are on one node.
    """

    def __init__(self, connect: Callable[[Sequence[Address]], RedisCluster], tag: str) -> None:
        """Connect on first use: the client of a cluster does so as soon as it is made."""
        self._connect = connect
        self._tag = tag
        self._cluster: RedisCluster | None = None
        self._known: list[Address] = []

    def client(self) -> Any:
        """Return the client of the node."""
        if self._cluster is None:
            self._cluster = self._connect(self._known)
        return self._cluster.get_redis_connection(self._cluster.get_node_from_key(self._tag))  # type: ignore[no-untyped-call]

    def learn(self) -> None:
        """Look again where our keys are."""
        # Any node that was there knows the cluster: those that the URL names may be gone for good.
        if self._cluster is not None:
            nodes = self._cluster.get_nodes()  # type: ignore[no-untyped-call]
            self._known = [(node.host, int(node.port)) for node in nodes]
        self.close()

    def close(self) -> None:
        """Close every connection."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            # `close()` leaves them open.
            cluster.disconnect_connection_pools()  # type: ignore[no-untyped-call]
            cluster.close()


def require_readable(name: str, url: str) -> None:
    """Make sure that the client understands a URL."""
    # Its options are not tried: a cluster takes others than a server, and ignores unknown ones.
    with redacted_errors(name, url):
        redis.ConnectionPool.from_url(_seeds(url)[0])


def open_store(place: StorePlace) -> RedisStore:
    """Make the store on a cluster."""
    settings, names = client_settings(place), KeyNames(place.namespace)
    first, others = _seeds(place.url)

    def connect(known: Sequence[Address]) -> RedisCluster:
        nodes = [ClusterNode(*each) for each in dict.fromkeys((*others, *known))]  # type: ignore[no-untyped-call]
        return RedisCluster.from_url(first, startup_nodes=nodes, **settings)

    return RedisStore(place.url, lambda: ClusterLink(connect, names.tag), names)


def _seeds(url: str) -> tuple[str, list[Address]]:
    """Return the URL of the first node, and the addresses of the others."""
    first = FURTHER_SEED.sub("", redis_url(url).replace("+cluster", "", 1))
    return first, [(host, int(port)) for host, port in FURTHER_SEED.findall(url)]
