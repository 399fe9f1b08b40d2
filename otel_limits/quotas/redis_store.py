"""Counts quotas in Redis or Valkey, for every process that uses the same server.

Each operation is one script, so that it is atomic, and a batch of operations is one round trip.
"""

from __future__ import annotations

import ctypes
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from redis import exceptions

from otel_limits.quotas import redis_scripts as scripts
from otel_limits.quotas.keys import Key
from otel_limits.quotas.redis_scripts import CHECK_KEY, EXPIRED_KEY, KILLS_KEY, TAG, ScriptCall
from otel_limits.quotas.store import (
    LOOKED_AT,
    RECOVERABLE_SECONDS,
    RETENTION_SECONDS,
    Count,
    Kill,
    Look,
    Operation,
    Reply,
    Standing,
    StoreError,
)

FAILURES: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
"""All that means the server was not reached, or refused; a cluster's is not a `RedisError`."""

KILL_NOTED_SECONDS: Final = 60
"""How long a kill is noted for processes that were not connected when it was sent."""


class Link(Protocol):
    """How the server that has our keys is reached."""

    def client(self) -> Any:
        """Return its client."""

    def learn(self) -> None:
        """Look again where our keys are."""

    def close(self) -> None:
        """Close every connection."""


class RedisStore:
    """Counts on a server, for one thread: each has a store of its own.

    A thread that closes a connection while another waits for an answer on it makes that one fail
    in ways that no client documents.

    Args:
        url: Where the server is.
        connect: Makes a link to it, without connecting yet.
    """

    def __init__(self, url: str, connect: Callable[[], Link]) -> None:
        """Connect on first use."""
        self._connect = connect
        self._link = connect()
        # Databases of one server share their channels, so that the name has the database in it.
        self._channel = f"{TAG}:kill:{urlsplit(url).path.strip('/') or '0'}"

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Do `operations` in order, in one round trip.

        Raises:
            StoreError: Some may have been done and some not: do all of them again.
        """
        replies = self._replies([scripts.call_of(each) for each in operations])
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

        def load(client: Any) -> None:
            pipe = client.pipeline(transaction=False)
            for script in scripts.EVERY_CALL:
                pipe.script_load(scripts.source_of(script))
            pipe.execute()

        self._ask(load)

    def check(self) -> None:
        """Make sure that the server can be written to.

        Raises:
            StoreError: It cannot.
        """
        # A write, as a replica, or a server whose disk is full, still answers to PING.
        self._ask(lambda client: client.set(CHECK_KEY, "1", px=1000))

    def now(self) -> float:
        """Return the server's time.

        Raises:
            StoreError: It does not answer.
        """
        seconds, microseconds = self._ask(lambda client: client.time())
        return float(seconds) + float(microseconds) / 1e6

    def keys(self, quota: str) -> Iterator[Key]:
        """Go through the keys of a quota that were used in a window that has not ended.

        Raises:
            StoreError: The server does not answer.
        """
        now, cursor, index = self.now() * 1000, 0, scripts.index_key(quota)
        told: set[str] = set()  # a cursor may come by a member twice
        while True:
            look = methodcaller("zscan", index, cursor, count=LOOKED_AT)
            cursor, page = self._ask(look)
            for member, ends in page:
                if ends > now and member not in told:
                    told.add(member)
                    yield Key(*member.split(" ", 1))
            if not cursor:
                return

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[Standing]:
        """Return how counts stand.

        Raises:
            StoreError: The server does not answer.
        """
        standings: list[Standing] = []
        for first in range(0, len(counts), LOOKED_AT):
            page = tuple(counts[first : first + LOOKED_AT])
            (reply,) = self.run([Look(uuid.uuid4().hex, page)])
            if reply.status == "failed":
                raise StoreError(reply.error)
            standings += reply.standings
        return standings

    def reset(self, count: Count) -> None:
        """Begin to count from 0.

        Raises:
            StoreError: The server does not answer.
        """

        def write(client: Any) -> None:
            bucket, _ = scripts.bucket_keys(count)
            # Both or none: a count without its expiry would stay for ever.
            pipe = client.pipeline(transaction=True)
            pipe.hset(bucket, "used", 0)
            pipe.pexpireat(bucket, scripts.expires(count))
            pipe.execute()

        self._ask(write)

    def grant(self, count: Count, amount: int, until: float) -> None:
        """Permit `amount` more until a time.

        Raises:
            StoreError: The server does not answer.
        """
        # A set holds a member once, and two grants of one amount are two.
        member = f"{amount}:{uuid.uuid4().hex}"
        arguments = [member, str(int(until * 1000)), str(RETENTION_SECONDS * 1000)]
        self._evaluate(ScriptCall("grant", [scripts.grants_key(count)], arguments))

    def expired(self, most: int) -> list[str]:
        """Return ids of reservations that nobody settled in time, the latest first.

        Raises:
            StoreError: The server does not answer.
        """
        since = int((self.now() - RECOVERABLE_SECONDS) * 1000)
        found: list[str] = self._ask(
            lambda client: client.zrevrangebyscore(EXPIRED_KEY, "+inf", since, 0, most)
        )
        return found

    def done(self, ids: Sequence[str]) -> None:
        """Note that these reservations have been settled after all.

        Raises:
            StoreError: The server does not answer.
        """
        self._ask(lambda client: client.zrem(EXPIRED_KEY, *ids))

    def kill(self, pattern: str) -> int:
        """Tell every listening process to end agents; returns how many heard it.

        Raises:
            StoreError: The server does not answer.
        """
        arguments = [f"{uuid.uuid4().hex} {pattern}", self._channel, str(KILL_NOTED_SECONDS * 1000)]
        return int(self._evaluate(ScriptCall("kill", [KILLS_KEY], arguments)))

    def kills(self, since: float, closing: threading.Event) -> Iterator[Kill]:
        """Wait for kills until `closing` is set.

        Args:
            since: Server time; a kill that was sent after it while nobody listened comes first.
            closing: Ends the waiting within a second.

        Raises:
            StoreError: The connection was lost.
        """
        try:
            client = self._link.client()
            with client.pubsub(ignore_subscribe_messages=True) as subscription:
                subscription.subscribe(self._channel)
                subscription.get_message(timeout=1.0)
                # Only now, being subscribed: otherwise a kill between the two would be missed.
                noted = client.zrangebyscore(KILLS_KEY, f"({int(since * 1000)}", "+inf")
                yield from (Kill(*text.split(" ", 1)) for text in noted)
                while not closing.is_set():
                    message = subscription.get_message(timeout=1.0)
                    if message:
                        yield Kill(*message["data"].split(" ", 1))
        except FAILURES as error:
            raise StoreError(str(error)) from error
        finally:
            self._link.close()

    def after_fork(self) -> None:
        """Connect anew in a child, and leave what the parent connected with alone for ever.

        A thread of the parent may have held a lock of a client, which nobody gives back here, and
        a client takes its locks to notice the fork, and even to be freed.
        """
        never_free(self._link)
        self._link = self._connect()

    def close(self) -> None:
        """Close every connection."""
        self._link.close()

    # --- how --------------------------------------------------------------------------------------

    def _evaluate(self, call: ScriptCall) -> Any:
        (reply,) = self._replies([call])
        if isinstance(reply, Exception):
            raise StoreError(str(reply)) from reply
        return reply

    def _replies(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run scripts in one round trip; one that fails by itself has its error for a reply."""

        def evaluate(client: Any) -> list[Any]:
            # Each script is atomic by itself: a transaction would only keep others waiting.
            pipe = client.pipeline(transaction=False)
            for script, keys, arguments in calls:
                pipe.evalsha(scripts.sha_of(script), len(keys), *keys, *arguments)
            replies: list[Any] = pipe.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception) and not is_about_one_key(reply):
                    raise reply
            return replies

        def load_and_evaluate(client: Any) -> list[Any]:
            try:
                return evaluate(client)
            except exceptions.NoScriptError:  # the server is new, or was restarted
                for script in {call.script for call in calls}:
                    client.script_load(scripts.source_of(script))
                return evaluate(client)

        result: list[Any] = self._ask(load_and_evaluate)
        return result

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Ask once, and once more where the connection was cut: operations have ids."""
        try:
            try:
                return question(self._link.client())
            except exceptions.TimeoutError:  # nobody waits for a second timeout
                raise
            except (exceptions.ConnectionError, exceptions.MovedError, OSError):
                self._link.learn()
                return question(self._link.client())
        except FAILURES as error:
            raise StoreError(str(error)) from error


def is_about_one_key(error: Exception) -> bool:
    """Tell whether a script failed because of what stands under its keys, so that others work."""
    # What concerns the whole server has a class of its own in redis-py, or begins with another
    # word: READONLY, OOM, NOPERM, LOADING, …
    # (https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors).
    return type(error) is exceptions.ResponseError and str(error).startswith(("WRONGTYPE", "ERR"))


def never_free(inherited: object) -> None:
    """Keep something until the process is gone, also while the interpreter takes itself apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
