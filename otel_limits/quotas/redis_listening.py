"""Subscription to kills and releases on a Redis or Valkey server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from redis import exceptions

from otel_limits.quotas import redis_scripts as scripts
from otel_limits.quotas.redis_executor import FAILURES
from otel_limits.quotas.store import Freed, Kill, StoreError, SubscribeDeniedError

if TYPE_CHECKING:
    from otel_limits.quotas.redis_executor import RedisExecutor
    from otel_limits.quotas.redis_scripts import KeyNames

ASK_SECONDS: Final = 5.0
"""Silence after which the server is pinged."""
LOST_SECONDS: Final = 7.0
"""Silence after which it is unavailable: `ASK_SECONDS` plus the default store timeout."""


def messages(
    server: RedisExecutor,
    names: KeyNames,
    closing: threading.Event,
    missed: Callable[[], Iterable[Kill]],
) -> Iterator[Kill | Freed | None]:
    """Wait for messages until `closing` is set; `None` after a second without any.

    Args:
        server: The server; its connections are closed at the end.
        names: Names of the channels.
        closing: Ends the wait within a second.
        missed: Returns kills sent before the subscription; they come first.

    Raises:
        SubscribeDeniedError: The user is not allowed to subscribe.
        StoreError: The connection was lost.
    """
    try:
        with server.client().pubsub(ignore_subscribe_messages=True) as subscription:
            channels = (names.kill_channel, names.freed_channel)
            subscription.subscribe(*channels)
            for _ in channels:
                subscription.get_message(timeout=1.0)
            # Only after subscribing, so that no message is missed in between.
            yield from missed()
            yield Freed()
            for message in _received(subscription, closing):
                if message is None:
                    yield None
                    continue
                is_kill = message["channel"] == names.kill_channel
                read = scripts.kill_of if is_kill else scripts.freed_of
                yield read(message["data"])
    except exceptions.NoPermissionError as error:
        raise SubscribeDeniedError(server.redacted(error)) from error
    except FAILURES as error:
        raise StoreError(server.redacted(error)) from error
    finally:
        server.close()


def _received(subscription: Any, closing: threading.Event) -> Iterator[Any]:
    """Yield messages of the channels, and `None` after a second without any.

    Ends when `closing` is set.

    Raises:
        StoreError: The server hangs; its open connections do not reveal it.
    """
    received, is_pinged = time.monotonic(), False
    while not closing.is_set():
        message = subscription.get_message(timeout=1.0)
        silent = time.monotonic() - received
        if message is not None:
            received, is_pinged = time.monotonic(), False
        elif silent > LOST_SECONDS:
            raise StoreError(f"no reply from the server for {silent:.0f} s")
        elif silent > ASK_SECONDS and not is_pinged:
            subscription.ping()
            is_pinged = True
        yield None if message is None or message["type"] == "pong" else message
