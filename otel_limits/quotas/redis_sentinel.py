"""Opens the store on the server that sentinels of Redis or Valkey name as a service's master."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode

from redis.connection import parse_url
from redis.sentinel import Sentinel

from otel_limits.quotas.redis_server import client_settings, redacted_errors
from otel_limits.quotas.redis_store import RedisStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    import redis

    from otel_limits.quotas.store import StorePlace

FORM: Final = re.compile(
    r"\w+\+sentinel://(?P<user>[^@/]*@)?(?P<hosts>[^/@]+)/(?P<service>[^/?]+)(?P<db>/\d+)?"
    r"(\?(?P<options>.*))?"
)
PREFIX: Final = "sentinel_"
"""Beginning of the options for the sentinels themselves."""


def require_readable(name: str, url: str) -> None:
    """Make sure that the client understands a URL and its options."""
    with redacted_errors(name, url):
        _master_of(url, {}).connection_pool.make_connection()


def open_store(place: StorePlace) -> RedisStore:
    """Make the store on the master of a service."""
    settings = client_settings(place)
    # The client queries the sentinels at every new connection.
    return RedisStore(place, lambda previous: previous or _master_of(place.url, settings))


def _master_of(url: str, settings: Mapping[str, Any]) -> redis.Redis:
    """Return a client of the master, without connecting: redis-py has no URLs of sentinels.

    Raises:
        ValueError: The URL is invalid.
    """
    found = FORM.fullmatch(url)
    if found is None:
        raise ValueError
    options = dict(parse_qsl(found["options"] or "", strict_parsing=bool(found["options"])))
    tls = {"ssl": True} if options.pop("tls", "false") == "true" else {}
    of_sentinels = {
        name.removeprefix(PREFIX): options.pop(name)
        for name in (PREFIX + "username", PREFIX + "password")
        if name in options
    }
    # As the URL of a server, whose user, password, database and options redis-py parses.
    begin = f"{'rediss' if tls else 'redis'}://{found['user'] or ''}localhost"
    server = f"{begin}{found['db'] or ''}?{urlencode(options)}"
    master: dict[str, Any] = parse_url(server)  # type: ignore[no-untyped-call]
    for name in ("host", "port", "connection_class"):
        master.pop(name, None)
    encryption = {name: each for name, each in master.items() if name.startswith("ssl_")}
    hosts = (each.rpartition(":") for each in found["hosts"].split(","))
    watcher = Sentinel(  # type: ignore[no-untyped-call]
        [(host, int(port)) for host, _, port in hosts],
        sentinel_kwargs={**settings, **of_sentinels, **tls, **encryption},
        **{**settings, **master, **tls},
    )
    client: redis.Redis = watcher.master_for(found["service"])  # type: ignore[no-untyped-call]
    return client
