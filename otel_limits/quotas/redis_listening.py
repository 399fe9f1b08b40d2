"""Listens to what processes of a fleet tell each other through a Redis or Valkey server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from redis import exceptions

from otel_limits.quotas import redis_scripts as scripts
from otel_limits.quotas.redis_executor import FAILURES, redacted
from otel_limits.quotas.store import Freed, Kill, StoreError, SubscribeDeniedError

if TYPE_CHECKING:
    from otel_limits.quotas.redis_executor import Link
    from otel_limits.quotas.redis_scripts import KeyNames

ASK_SECONDS: Final = 5.0
"""After so long without a word, the server is asked for one."""
LOST_SECONDS: Final = 7.0
"""After so long it is lost: it has had as long for its answer as any question has by default."""


def messages(
    link: Link, names: KeyNames, closing: threading.Event, missed: Callable[[], Iterable[Kill]]
) -> Iterator[Kill | Freed | None]:
    """Wait for messages until `closing` is set; `None` after a second without any.

    Args:
        link: Leads to the server; it is closed in the end.
        names: How the channels are called.
        closing: Ends the waiting within a second.
        missed: Returns the kills that were sent while nobody listened; they come first.

    Raises:
        SubscribeDeniedError: The user of this process may not subscribe.
        StoreError: The connection was lost.
    """
    try:
        with link.client().pubsub(ignore_subscribe_messages=True) as subscription:
            channels = (names.kill_channel, names.freed_channel)
            subscription.subscribe(*channels)
            for _ in channels:
                subscription.get_message(timeout=1.0)
            # Only now, being subscribed: what is told between the two would be missed.
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
        raise SubscribeDeniedError(str(error)) from error
    except FAILURES as error:
        raise StoreError(redacted(error)) from error
    finally:
        link.close()


def _received(subscription: Any, closing: threading.Event) -> Iterator[Any]:
    """Yield what is told on the channels, and `None` after a second without any.

    Ends when `closing` is set.

    Raises:
        StoreError: It hangs. Its connections stay open, so that nothing else tells.
    """
    heard, is_asked = time.monotonic(), False
    while not closing.is_set():
        message = subscription.get_message(timeout=1.0)
        silent = time.monotonic() - heard
        if message is not None:
            heard, is_asked = time.monotonic(), False
        elif silent > LOST_SECONDS:
            raise StoreError(f"the server has been silent for {silent:.0f} s")
        elif silent > ASK_SECONDS and not is_asked:
            subscription.ping()
            is_asked = True
        yield None if message is None or message["type"] == "pong" else message
