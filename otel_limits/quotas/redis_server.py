"""Opens the store on one Redis or Valkey server, and reads the URLs of all kinds of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from otel_limits.quotas.redis_store import RedisStore
from otel_limits.quotas.stores import scheme_of

if TYPE_CHECKING:
    from otel_limits.quotas.store import StorePlace

CUT_PASSWORD: Final = re.compile(r"(rediss?|valkeys?)(\+cluster)?://[^?/]*/[^?]*@")
"""Detects a password that contains `/`: its beginning would be parsed as host and port."""


def require_readable(name: str, url: str) -> None:
    """Make sure that the client understands a URL and its options."""
    with redacted_errors(name, url):
        # Parsing a URL checks little; making a connection, without opening it, checks the
        # options as well.
        redis.ConnectionPool.from_url(redis_url(url)).make_connection()


def open_store(place: StorePlace) -> RedisStore:
    """Make the store on one server."""
    url, settings = redis_url(place.url), client_settings(place)
    return RedisStore(place, lambda previous: previous or redis.Redis.from_url(url, **settings))


def redis_url(url: str) -> str:
    """Return a URL as the client of Redis writes it: it does not know those of Valkey."""
    return "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url


def client_settings(place: StorePlace) -> dict[str, Any]:
    """Return what every client is made with."""
    return {
        # Both, because connecting and replying can each hang.
        "socket_timeout": place.timeout,
        "socket_connect_timeout": place.timeout,
        # We retry: the client's retries would take longer than an agent waits.
        "retry": Retry(NoBackoff(), 0),
        # The third version of the protocol needs two more round trips to connect.
        "protocol": 2,
        # All our data is ASCII or UTF-8 text.
        "decode_responses": True,
    }


@contextlib.contextmanager
def redacted_errors(name: str, url: str) -> Iterator[None]:
    """Replace errors of the client about a URL, because they can quote parts of passwords.

    Raises:
        ValueError: The client cannot parse the URL.
    """
    try:
        if CUT_PASSWORD.match(url):
            raise ValueError  # noqa: TRY301  for the sentence below
        yield
    # All errors of redis-py for a URL; they differ by option.
    except (ValueError, TypeError, AttributeError, RedisError):
        raise ValueError(
            f"{name} is not a URL that redis-py can parse (scheme {scheme_of(url)!r}). The port "
            "must be a number up to 65535, and the options after ? must be known to redis-py. In a "
            "password, write %2F for /, %3F for ?, %23 for # and %40 for @."
        ) from None
