"""Counts quotas in Redis or Valkey, for every process that uses the same server.

Each operation is one script, so that it is atomic, and a batch of operations is one round trip.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import methodcaller
from typing import Final
from urllib.parse import urlsplit

from otel_limits.quotas import redis_scripts as scripts
from otel_limits.quotas.keys import Key
from otel_limits.quotas.redis_executor import Link, RedisExecutor
from otel_limits.quotas.redis_listening import messages
from otel_limits.quotas.redis_rights import missing
from otel_limits.quotas.redis_scripts import KeyNames, ScriptCall
from otel_limits.quotas.store import (
    LOOKED_AT,
    RECOVERABLE_SECONDS,
    RETENTION_SECONDS,
    Block,
    Count,
    CountState,
    Freed,
    Kill,
    Operation,
    ReadCounts,
    Reply,
    SharedStore,
    StoreError,
)

KILL_NOTED_SECONDS: Final = 3600
"""How long a kill is noted for processes that did not hear it when it was sent."""


class RedisStore(SharedStore):
    """Counts on a server, for one thread: each has a store of its own.

    Args:
        url: Where the server is.
        connect: Makes a link to it, without connecting yet.
        names: How keys are called there.
    """

    has_channels = True

    def __init__(self, url: str, connect: Callable[[], Link], names: KeyNames) -> None:
        """Connect on first use."""
        self._server = RedisExecutor(connect)
        self._names = replace(names, database=urlsplit(url).path.strip("/") or "0")

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Do `operations` in order, in one round trip.

        Raises:
            StoreError: Some may have been done and some not: do all of them again.
        """
        replies = self._server.replies([self._names.call_of(each) for each in operations])
        return [
            Reply("failed", time.time(), error=str(reply))
            if isinstance(reply, Exception)
            else scripts.reply_of(reply)
            for reply in replies
        ]

    def warm(self) -> None:
        """Connect, and have the server know the scripts of every model call.

        Raises:
            StoreError: The server does not answer.
        """
        self._server.load(scripts.EVERY_CALL)

    def check(self) -> None:
        """Make sure that the server can be written to.

        Raises:
            StoreError: It cannot.
        """
        # A write, as a replica, or a server whose disk is full, still answers to PING.
        self._server.ask(lambda client: client.set(self._names.check, "1", px=1000))

    def missing_rights(self) -> list[str]:
        """Return the rules of the server's ACL that this user lacks.

        Raises:
            StoreAuthenticationError: It accepts no user or password of ours.
            StoreError: The server does not answer.
        """
        return missing(self._server, self._names)

    def now(self) -> float:
        """Return the server's time.

        Raises:
            StoreError: It does not answer.
        """
        seconds, microseconds = self._server.ask(lambda client: client.time())
        return float(seconds) + float(microseconds) / 1e6

    def keys(self, quota: str) -> Iterator[Key]:
        """Go through the keys of a quota that were used in a window that has not ended.

        Raises:
            StoreError: The server does not answer.
        """
        now, cursor, index = self.now() * 1000, 0, self._names.index(quota)
        told: set[str] = set()  # a cursor may come by a member twice
        while True:
            look = methodcaller("zscan", index, cursor, count=LOOKED_AT)
            cursor, page = self._server.ask(look)
            for member, ends in page:
                if ends > now and member not in told:
                    told.add(member)
                    yield Key(*member.split(" ", 1))
            if not cursor:
                return

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[CountState]:
        """Return how counts stand.

        Raises:
            StoreError: The server does not answer.
        """
        standings: list[CountState] = []
        for first in range(0, len(counts), LOOKED_AT):
            page = tuple(counts[first : first + LOOKED_AT])
            (reply,) = self.run([ReadCounts(uuid.uuid4().hex, page)])
            if reply.status == "failed":
                raise StoreError(reply.error)
            standings += reply.standings
        return standings

    def reset(self, count: Count) -> None:
        """Begin to count from 0.

        Raises:
            StoreError: The server does not answer.
        """
        arguments = [str(scripts.expires(count))]
        self._server.evaluate(ScriptCall("reset", [*self._names.bucket(count)], arguments))
        self._publish_freed(count)

    def grant(self, count: Count, amount: int, until: float) -> None:
        """Permit `amount` more until a time.

        Raises:
            StoreError: The server does not answer.
        """
        # A set holds a member once, and two grants of one amount are two.
        member = f"{amount}:{uuid.uuid4().hex}:{count.unit}"
        self._add_grant(count, member, until)

    def revoke(self, count: Count) -> int:
        """Take back what was granted to a key; returns how many grants were in force.

        Raises:
            StoreError: The server does not answer.
        """
        # Nobody is told: there is less than before.
        return self._remove(count, "^%d+:")

    def block(self, count: Count, block: Block) -> None:
        """Permit nothing of a key until a time.

        Raises:
            StoreError: The server does not answer.
        """
        # Who waits is told, to be refused with the reason instead of waiting on.
        self._add_grant(count, scripts.block_member(uuid.uuid4().hex, block), block.until)

    def unblock(self, count: Count) -> int:
        """Take back the blocks of a key; returns how many were in force.

        Raises:
            StoreError: The server does not answer.
        """
        found = self._remove(count, "^block:")
        self._publish_freed(count)
        return found

    def expired(self, first: int, most: int) -> list[str]:
        """Return ids of reservations that nobody settled in time, the latest first.

        Raises:
            StoreError: The server does not answer.
        """
        since = int((self.now() - RECOVERABLE_SECONDS) * 1000)
        found: list[str] = self._server.ask(
            lambda client: client.zrevrangebyscore(self._names.expired, "+inf", since, first, most)
        )
        return found

    def forget_expired(self) -> int:
        """Drop reservations that are too old to be settled; returns how many there were.

        Raises:
            StoreError: The server does not answer.
        """
        until = int((self.now() - RECOVERABLE_SECONDS) * 1000) - 1
        # Each is counted by one process only, however many look.
        return int(
            self._server.ask(
                lambda client: client.zremrangebyscore(self._names.expired, "-inf", until)
            )
        )

    def mark_settled(self, ids: Sequence[str]) -> None:
        """Note that these reservations have been settled after all.

        Raises:
            StoreError: The server does not answer.
        """
        self._server.ask(lambda client: client.zrem(self._names.expired, *ids))

    def kill(self, pattern: str) -> int:
        """Tell every listening process to end agents; returns how many heard it.

        Raises:
            StoreError: The server does not answer.
        """
        noted = str(KILL_NOTED_SECONDS * 1000)
        arguments = [uuid.uuid4().hex, pattern, self._names.kill_channel, noted]
        return int(self._server.evaluate(ScriptCall("kill", [self._names.kills], arguments)))

    def messages(self, since: float, closing: threading.Event) -> Iterator[Kill | Freed | None]:
        """Wait for what others tell, until `closing` is set; `None` after a second without any.

        Args:
            since: Server time; a kill that was sent after it while nobody listened comes first.
            closing: Ends the waiting within a second.

        Raises:
            SubscribeDeniedError: The user of this process may not subscribe.
            StoreError: The connection was lost.
        """
        return messages(self._server.link, self._names, closing, lambda: self.noted_kills(since))

    def noted_kills(self, since: float) -> list[Kill]:
        """Return the kills of the last hour that were given after a time.

        Raises:
            StoreError: The server does not answer.
        """
        first = f"({int(since * 1000)}"
        read = methodcaller("zrangebyscore", self._names.kills, first, "+inf")
        return [scripts.kill_of(order) for order in self._server.ask(read)]

    def after_fork(self) -> None:
        """Connect anew in a child, and leave what the parent connected with alone for ever."""
        self._server.after_fork()

    def close(self) -> None:
        """Close every connection."""
        self._server.close()

    def _add_grant(self, count: Count, member: str, until: float) -> None:
        keys = [self._names.grants(count), self._names.index(count.quota)]
        kept = str(RETENTION_SECONDS * 1000)
        arguments = [member, str(int(until * 1000)), kept, f"{count.key} {count.shown}"]
        self._server.evaluate(ScriptCall("grant", keys, arguments))
        self._publish_freed(count)

    def _remove(self, count: Count, pattern: str) -> int:
        call = ScriptCall("revoke", [self._names.grants(count)], [pattern])
        return int(self._server.evaluate(call))

    def _publish_freed(self, count: Count) -> None:
        """Wake who waits for a count; what an operator has changed stands, heard or not."""
        line = scripts.line_of(count)
        with suppress(StoreError):
            self._server.ask(lambda client: client.publish(self._names.freed_channel, line))
