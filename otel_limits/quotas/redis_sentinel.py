"""Opens the store on the server that sentinels of Redis or Valkey name as a service's master."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redis.sentinel import Sentinel

from otel_limits.quotas.redis_server import ServerLink, client_settings
from otel_limits.quotas.redis_store import RedisStore

if TYPE_CHECKING:
    import redis


def require_readable(_name: str, _url: str) -> None:
    """Nothing is left to check: the pattern of these URLs permits no password and no option."""


def open_store(url: str, timeout: float, health_interval: int) -> RedisStore:
    """Make the store on the master of a service."""
    settings = client_settings(timeout, health_interval)
    hosts, _, service = url.partition("://")[2].partition("/")
    sentinels = [
        (host, int(port)) for host, _, port in (each.partition(":") for each in hosts.split(","))
    ]

    def connect() -> ServerLink:
        watcher = Sentinel(sentinels, sentinel_kwargs=settings, **settings)  # type: ignore[no-untyped-call]
        client: redis.Redis = watcher.master_for(service)  # type: ignore[no-untyped-call]
        return ServerLink(client)

    return RedisStore(url, connect)
