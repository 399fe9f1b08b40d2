"""Opens the store on the server that sentinels of Redis or Valkey name as a service's master."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode

from redis.connection import SSLConnection, parse_url
from redis.sentinel import Sentinel

from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.redis_server import ServerLink, client_settings, redacted_errors
from otel_limits.quotas.redis_store import RedisStore

if TYPE_CHECKING:
    import redis

    from otel_limits.quotas.store import StorePlace

FORM: Final = re.compile(
    r"\w+\+sentinel://(?P<user>[^@/]*@)?(?P<hosts>[^/@]+)/(?P<service>[^/?]+)(?P<db>/\d+)?"
    r"(\?(?P<options>.*))?"
)
PREFIX: Final = "sentinel_"
"""Begin of the options with which the sentinels themselves are asked."""


def require_readable(name: str, url: str) -> None:
    """Make sure that the client understands a URL and its options."""
    with redacted_errors(name, url):
        _Service(url)


def open_store(place: StorePlace) -> RedisStore:
    """Make the store on the master of a service."""
    settings = client_settings(place)
    service = _Service(place.url)

    sentinels = settings | service.of_sentinels

    def connect() -> ServerLink:
        watcher = Sentinel(  # type: ignore[no-untyped-call]
            service.sentinels, sentinel_kwargs=sentinels, **settings, **service.of_master
        )
        client: redis.Redis = watcher.master_for(service.name)  # type: ignore[no-untyped-call]
        return ServerLink(client)

    return RedisStore(place.url, connect, KeyNames(place.namespace))


class _Service:
    """A parsed Sentinel URL.

    Raises:
        ValueError: The URL is invalid.
    """

    def __init__(self, url: str) -> None:
        found = FORM.fullmatch(url)
        if found is None:
            raise ValueError
        options = dict(parse_qsl(found["options"] or "", strict_parsing=bool(found["options"])))
        tls = {"ssl": True} if options.pop("tls", "false") == "true" else {}
        user = {
            name.removeprefix(PREFIX): options.pop(name)
            for name in (PREFIX + "username", PREFIX + "password")
            if name in options
        }
        self.name: str = found["service"]
        self.sentinels = [
            (host, int(port))
            for host, _, port in (each.rpartition(":") for each in found["hosts"].split(","))
        ]
        # As the URL of a server, whose user, password, database and options the client can read.
        begin = f"{'rediss' if tls else 'redis'}://{found['user'] or ''}localhost"
        server = f"{begin}{found['db'] or ''}?{urlencode(options)}"
        read: dict[str, Any] = parse_url(server)  # type: ignore[no-untyped-call]
        for name in ("host", "port", "connection_class"):
            read.pop(name, None)
        # Which options a connection takes, making one shows.
        SSLConnection(**read)
        self.of_master: dict[str, Any] = read | tls
        encryption = {name: each for name, each in read.items() if name.startswith("ssl_")}
        self.of_sentinels: dict[str, Any] = user | tls | encryption
