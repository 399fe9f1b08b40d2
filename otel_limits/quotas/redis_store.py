"""The Redis and Valkey quota store, shared by all processes that use the server.

Each operation is one atomic script, and a batch of operations is one round trip. `redis_scripts`
writes the calls of the scripts and reads their replies, and `redis_executor` sends them.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Final
from urllib.parse import urlsplit

from redis.exceptions import NoPermissionError

from otel_limits.core.secrets import secrets_in
from otel_limits.quotas import redis_scripts as scripts
from otel_limits.quotas.keys import Key
from otel_limits.quotas.redis_executor import FAILURES, Connect, RedisExecutor
from otel_limits.quotas.redis_rights import missing
from otel_limits.quotas.redis_scripts import KeyNames, ScriptCall
from otel_limits.quotas.store import (
    LOOKED_AT,
    RECOVERABLE_SECONDS,
    RETENTION_SECONDS,
    Change,
    ConversationRecord,
    Count,
    CountState,
    Diagnoses,
    Freed,
    Grant,
    KeepsConversations,
    Kill,
    KnownCount,
    NotesExpired,
    Operation,
    Publishes,
    ReadConversation,
    ReadCounts,
    Reply,
    Restores,
    SendsKills,
    StoreError,
    StorePlace,
    SubscribeDeniedError,
    Withdraw,
)

CLAIM_SECONDS: Final = 20
"""For how long other processes leave the rebuilding of counts to one that has begun."""

KILL_NOTED_SECONDS: Final = 3600
"""How long kills are kept for processes that missed the message."""

ASK_SECONDS: Final = 5.0
"""Silence of a subscription after which the server is pinged."""
LOST_SECONDS: Final = 7.0
"""Silence after which it is unavailable: `ASK_SECONDS` plus the default store timeout."""

# ZADD GT, which keeps the lists of keys, came with Redis 6.2. 7.2 is the first Valkey.
OLDEST: Final = {"Redis": (6, 2), "Valkey": (7, 2)}
"""Oldest supported versions."""

VERSION: Final = re.compile(r"(\d+)\.(\d+)")


class RedisStore(Diagnoses, Restores, NotesExpired, KeepsConversations, SendsKills, Publishes):
    """A store on a server. Not thread-safe: each thread uses its own.

    Args:
        place: Its settings.
        connect: Returns a client of the server.
    """

    def __init__(self, place: StorePlace, connect: Connect) -> None:
        """Connect on first use."""
        database = urlsplit(place.url).path.strip("/") or "0"
        self._names = KeyNames(place.namespace, database)
        self._server = RedisExecutor(connect, self._names.beginning(), secrets_in(place.url))
        self._rebuilding = ""

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Apply `operations` in order, in one round trip.

        Raises:
            StoreError: Some may have been applied. Send all of them again.
        """
        found = self._server.replies([self._names.call_of(each) for each in operations])
        replies = [
            Reply("failed", time.time(), error=str(reply))
            if isinstance(reply, Exception)
            else scripts.reply_of(operation, reply)
            for operation, reply in zip(operations, found, strict=True)
        ]
        if any(reply.status == "lost" for reply in replies):
            # A new connection begins a run if there is none: the server may have been emptied.
            self._server.disconnect()
        return replies

    def restore(self, counts: Sequence[KnownCount]) -> str:
        """Restore counts; return the name of the server's current run."""
        pages = [counts[first : first + LOOKED_AT] for first in range(0, len(counts), LOOKED_AT)]
        run = ""
        for page in pages or [counts]:
            run = str(self._server.evaluate(self._names.restoration(page)))
        return run

    def follow(self, run: str) -> None:
        """From now on, apply operations in this run only."""
        self._names = replace(self._names, run=run)

    def join(self, worker: str, known: int, least: float, most: float) -> float | None:
        """Join the run that this instance follows."""
        if not self._names.run:
            return None
        times = [str(int(seconds * 1000)) for seconds in (most, least)]
        arguments = [worker, self._names.run, str(known), *times]
        keys = [self._names.marker, self._names.restored]
        waits = int(self._server.evaluate(ScriptCall("join", keys, arguments)))
        return waits / 1000 if waits >= 0 else None

    def begin_rebuilding(self, source: str) -> float | None:
        """Let this process rebuild counts of the current run."""
        now = self.now() * 1000
        name, opens = self._server.command("hmget", self._names.marker, ("name", "opens"))
        if not name or not opens or int(opens) > now:
            return None
        self._rebuilding = self._names.rebuilt(source, name)
        # Not for long: this process may be killed before it is done.
        if self._server.command("set", self._rebuilding, "1", px=CLAIM_SECONDS * 1000, nx=True):
            return int(name.partition("-")[0]) / 1000
        # The claim of a process that failed or was killed expires, and another attempt follows.
        left = int(self._server.command("pttl", self._rebuilding))
        return 0.0 if left > CLAIM_SECONDS * 1000 else None

    def count_from_ledger(self, operations: Sequence[str]) -> set[str]:
        """Settle calls of earlier runs, whose usage is being rebuilt; return those of this run."""
        if not operations:
            return set()
        counted = self._server.evaluate(self._names.rebuilding(operations))
        return {operations[position] for position in counted}

    def end_rebuilding(self) -> None:
        """Record that counts were rebuilt."""
        self._server.command("pexpire", self._rebuilding, RETENTION_SECONDS * 1000)

    def warm(self) -> str:
        """Connect and load the scripts that a process uses; return a problem of its version."""
        return outdated(self._server.load(scripts.LOADED))

    def outdated(self) -> str:
        """Return what is wrong with the server's version; empty if nothing is, or it is unknown."""
        try:
            return outdated(self._server.command("info", "server"))
        except StoreError:  # unavailable, denied, or not offered by a hosted service
            return ""

    def check(self) -> None:
        """Verify that the server accepts writes."""
        # Write, because a replica or a server with a full disk still answers PING.
        self._server.command("set", self._names.check, "1", px=1000)

    def missing_rights(self) -> list[str]:
        """Return the ACL rules that this user lacks.

        Raises:
            StoreAuthenticationError: Authentication failed.
        """
        return missing(self._server, self._names)

    def now(self) -> float:
        """Return the server's time."""
        seconds, microseconds = self._server.command("time")
        return float(seconds) + float(microseconds) / 1e6

    def keys(self, quota: str) -> Iterator[Key]:
        """Iterate over the keys of a quota that were used in a current window."""
        for member in self._members(self._names.index(quota)):
            yield Key(*member.split(" ", 1))

    def _members(self, index: str) -> Iterator[str]:
        """Iterate over the members of a sorted set that have not expired, each once."""
        now, cursor = self.now() * 1000, 0
        seen: set[str] = set()  # a cursor may return a member twice
        while True:
            cursor, page = self._server.command("zscan", index, cursor, count=LOOKED_AT)
            for member, ends in page:
                if ends > now and member not in seen:
                    seen.add(member)
                    yield member
            if not cursor:
                return

    def conversations(self) -> Iterator[ConversationRecord]:
        """Iterate over the records of conversations."""
        members = self._members(self._names.conversations)
        while page := [ReadConversation(each) for each in islice(members, LOOKED_AT)]:
            found = (reply.conversation for reply in self.run(page))
            yield from (record for record in found if record is not None)

    def forget_conversation(self, conversation: str) -> bool:
        """Drop a record; False if there is none."""
        self._server.command("zrem", self._names.conversations, conversation)
        return bool(self._server.command("delete", self._names.conversation(conversation)))

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[CountState]:
        """Return the state of counts."""
        states: list[CountState] = []
        for first in range(0, len(counts), LOOKED_AT):
            page = tuple(counts[first : first + LOOKED_AT])
            (reply,) = self.run([ReadCounts(page)])
            if reply.status == "failed":
                raise StoreError(reply.error)
            states += reply.states
        return states

    def change(self, count: Count, change: Change) -> int:
        """Change a count, or its key in all windows; return how many active changes it withdrew."""
        reply = self._server.evaluate(self._names.change(count, change))
        # A revoked grant leaves less than before. Waiters for a blocked key are woken to be refused
        # with the reason.
        if change != Withdraw(Grant):
            # Best effort: the change itself is already stored.
            freed = scripts.encode_freed(count)
            with suppress(StoreError):
                self._server.command("publish", self._names.freed_channel, freed)
        return int(reply) if isinstance(change, Withdraw) else 0

    def expired(self, first: int, most: int) -> list[str]:
        """Return IDs of reservations that expired unsettled, latest first."""
        since = int((self.now() - RECOVERABLE_SECONDS) * 1000)
        found: list[str] = self._server.command(
            "zrevrangebyscore", self._names.expired, "+inf", since, first, most
        )
        return found

    def forget_expired(self) -> int:
        """Drop reservations that are too old to be settled; return their number."""
        until = int((self.now() - RECOVERABLE_SECONDS) * 1000) - 1
        # Atomic: each is counted by one process only.
        return int(self._server.command("zremrangebyscore", self._names.expired, "-inf", until))

    def mark_settled(self, ids: Sequence[str]) -> None:
        """Mark these expired reservations as settled."""
        self._server.command("zrem", self._names.expired, *ids)

    def kill(self, pattern: str) -> int:
        """Send a kill to all processes; return how many subscribers received it."""
        noted = str(KILL_NOTED_SECONDS * 1000)
        arguments = [uuid.uuid4().hex, pattern, self._names.kill_channel, noted]
        return int(self._server.evaluate(ScriptCall("kill", [self._names.kills], arguments)))

    def subscribe(self, since: float, closing: threading.Event) -> Iterator[Kill | Freed | None]:
        """Wait for messages until `closing` is set; `None` after a second without any.

        Raises:
            SubscribeDeniedError: The user is not allowed to subscribe.
            StoreError: The connection was lost.
        """
        channels = (self._names.kill_channel, self._names.freed_channel)
        try:
            with self._server.client().pubsub(ignore_subscribe_messages=True) as subscription:
                subscription.subscribe(*channels)
                for _ in channels:
                    subscription.get_message(timeout=1.0)
                # Only after subscribing, so that no message is missed in between.
                yield from self.noted_kills(since)
                yield Freed()
                for message in _received(subscription, closing):
                    if message is None:
                        yield None
                    elif message["channel"] == self._names.kill_channel:
                        yield scripts.kill_of(message["data"])
                    else:
                        yield scripts.freed_of(message["data"])
        except NoPermissionError as error:
            raise SubscribeDeniedError(self._server.redacted(error)) from error
        except FAILURES as error:
            raise StoreError(self._server.redacted(error)) from error
        finally:
            self._server.close()

    def noted_kills(self, since: float) -> list[Kill]:
        """Return the kills of the last hour that were sent after a time."""
        first = f"({int(since * 1000)}"
        found = self._server.command("zrangebyscore", self._names.kills, first, "+inf")
        return [scripts.kill_of(order) for order in found]

    def after_fork(self) -> None:
        """Use new connections in a child, and never touch those of its parent."""
        self._server.after_fork()

    def close(self) -> None:
        """Close every connection."""
        self._server.close()


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


def outdated(info: Mapping[str, Any]) -> str:
    """Return what is wrong with a server's version; empty if nothing is, or it is unknown.

    Args:
        info: The server's reply to `INFO server`.
    """
    # Valkey also reports the Redis version that it is compatible with.
    product = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get(f"{product.lower()}_version", "")).strip()
    found = VERSION.match(version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST[product]:
        return ""
    oldest = " or ".join(f"{name} {major}.{minor}" for name, (major, minor) in OLDEST.items())
    return f"the server is {product} {version}, but quotas need {oldest} or later. Upgrade it."
