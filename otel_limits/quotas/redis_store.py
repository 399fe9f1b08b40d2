"""The Redis and Valkey quota store: its connection, operations and required rights.

Each operation is one atomic script, and a batch of operations is one round trip. `redis_scripts`
writes the calls of the scripts and reads their replies, and `RedisExecutor` sends them.
"""

from __future__ import annotations

import ctypes
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

from redis import exceptions
from redis.exceptions import AuthenticationError, NoPermissionError

from otel_limits.core.secrets import redact_error, redact_secrets, redact_url, secrets_in
from otel_limits.quotas import redis_scripts as scripts
from otel_limits.quotas.keys import Key
from otel_limits.quotas.redis_scripts import KeyNames, ScriptCall, sha_of
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
    PermanentStoreError,
    Publishes,
    ReadConversation,
    ReadCounts,
    Renew,
    Reply,
    Reserve,
    Restores,
    SendsKills,
    Settle,
    StoreAuthenticationError,
    StoreError,
    StorePlace,
    SubscribeDeniedError,
    Withdraw,
)

if TYPE_CHECKING:
    import redis


T = TypeVar("T")

# --- the store ------------------------------------------------------------------------------------

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
            self._reply_to(operation, reply)
            for operation, reply in zip(operations, found, strict=True)
        ]
        if any(reply.status == "lost" for reply in replies):
            # A new connection begins a run if there is none: the server may have been emptied.
            self._server.disconnect()
        return replies

    def _reply_to(self, operation: Operation, reply: Any) -> Reply:
        if isinstance(reply, Exception):
            return self._without_damaged(operation, reply)
        try:
            return scripts.reply_of(operation, reply)
        except ValueError as error:  # a count is not a number
            return self._without_damaged(operation, error)

    def _without_damaged(self, operation: Operation, error: Exception) -> Reply:
        """Apply an operation to the counts whose keys are in order, unless it reserves all or none.

        Returns:
            Its failure, with the positions of the other counts.
        """
        failure = Reply("failed", time.time(), error=str(error))
        names = self._damaged(counts_of(operation))
        damaged = [n for n, name in enumerate(names) if name]
        if not damaged:
            return failure
        rest = leave_out(operation, damaged)
        if rest is not None:
            self._server.replies([self._names.call_of(rest)])
        why = data_of_others(*(names[n] for n in damaged))
        return replace(failure, error=why, unmet=tuple(damaged))

    def _damaged(self, counts: Sequence[Count]) -> list[str]:
        """Name the key of each count that has data of another program; empty if it has none."""
        names: list[str] = self._server.evaluate(self._names.probe(counts)) if counts else []
        return names

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
                raise PermanentStoreError(reply.error, tuple(first + n for n in reply.unmet))
            states += reply.states
        return states

    def change(self, count: Count, change: Change) -> int:
        """Change a count, or its key in all windows; return how many active changes it withdrew."""
        (reply,) = self._server.replies([self._names.change(count, change)])
        if isinstance(reply, Exception):
            (damaged,) = self._damaged([count])
            if damaged:
                raise PermanentStoreError(data_of_others(damaged)) from reply
            raise StoreError(str(reply)) from reply
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


def counts_of(operation: Operation) -> list[Count]:
    """Return the counts that an operation changes or reads."""
    match operation:
        case ReadCounts(counts=counts):
            return [count for count, _ in counts]
        case Settle(charges=parts) | Reserve(demands=parts) | Renew(demands=parts):
            return [each.count for each in parts]
        case _:
            return []


def leave_out(operation: Operation, positions: Collection[int]) -> Operation | None:
    """Return an operation without some of its counts; `None` if it must have all of them."""
    match operation:
        case Settle(charges=charges):
            return replace(operation, charges=without(charges, positions))
        case Renew(demands=demands):
            return replace(operation, demands=without(demands, positions))
        case Reserve(demands=demands) if not any(each.enforced for each in demands):
            return replace(operation, demands=without(demands, positions))
        case _:
            return None


def without(parts: Sequence[T], positions: Collection[int]) -> tuple[T, ...]:
    """Return what is not at these positions."""
    return tuple(each for n, each in enumerate(parts) if n not in positions)


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


# --- the connection -------------------------------------------------------------------------------

FAILURES: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
"""Errors of an unavailable server; a cluster's is not a `RedisError`."""

MOVED: Final = (exceptions.MovedError, exceptions.ReadOnlyError, exceptions.MasterDownError)
"""Replies of a node that no longer serves our keys, e.g. a master that a failover made a replica:
behind the same address, new connections may lead to the new master."""

QUOTED: Final = re.compile(r"(?<=: -)(?!ERR )(?P<code>[A-Z]+) .*")
"""An error of a command in an error of a script, with a code that says more than ERR."""

ARGUMENTS: Final = re.compile(r"(?s),? with args beginning with:.*")
"""The arguments of an unknown command, which an error of Redis repeats, escaped and cut."""

NO_TLS: Final = (
    "The server did not answer with TLS. If its port has no TLS, the URL begins with redis:// "
    "instead of rediss://."
)

INFO_LINE: Final = re.compile(r"^(\w+):(\S+)", re.MULTILINE)


Connect: TypeAlias = "Callable[[redis.Redis | None], redis.Redis]"
"""Returns a client of the server with our keys, which connects on use. It gets the previous client,
which failed: if that locates the server by itself, it is returned."""


class RedisExecutor:
    """Sends commands to a server. Not thread-safe.

    If one thread closes a connection while another waits on it, the latter fails in undocumented
    ways.

    Args:
        connect: Returns a client of the server.
        greeting: The script to run on each new connection.
        secrets: Texts that no error may show.
    """

    def __init__(self, connect: Connect, greeting: ScriptCall, secrets: Collection[str]) -> None:
        """Connect on first use."""
        self._secrets = secrets
        self._connect = connect
        self._greeting = greeting
        self._client: redis.Redis | None = None
        self._failed: redis.Redis | None = None
        """The client to be replaced."""
        self._connection: Any = None
        """The connection for scripts; `None` until used."""

    def evaluate(self, call: ScriptCall) -> Any:
        """Run one script.

        Raises:
            PermanentStoreError: Another program's data is under its only key.
            StoreError: The server is unavailable, or the script failed.
        """
        (reply,) = self.replies([call])
        if isinstance(reply, Exception):
            if len(call.keys) == 1:
                raise PermanentStoreError(data_of_others(*call.keys)) from reply
            raise StoreError(str(reply)) from reply
        return reply

    def replies(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run scripts in one round trip; the reply of a failed script is its error."""
        commands = [call.command for call in calls]

        def evaluate(client: Any) -> list[Any]:
            replies = self._exchange(client, commands)
            for reply in replies:
                if isinstance(reply, Exception) and not is_about_one_key(reply):
                    raise reply
            return replies

        def load_and_evaluate(client: Any) -> list[Any]:
            try:
                return evaluate(client)
            except exceptions.NoScriptError:  # the server is new, or was restarted
                self._load(client, {call.script for call in calls})
                return evaluate(client)

        result: list[Any] = self.ask(load_and_evaluate)
        return result

    def load(self, names: Collection[str]) -> dict[str, str]:
        """Connect and load these scripts; return the server's reply to `INFO server`.

        Raises:
            StoreError: The server is unavailable, or rejects the scripts.
        """
        (info,) = self.ask(lambda client: self._load(client, names, ["INFO", "server"]))
        # An error if it is denied, or not offered by a hosted service.
        return dict(INFO_LINE.findall(str(info)))

    def command(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the client.

        Raises:
            PermanentStoreError: Another program's data is under the key, the first argument.
            StoreError: The server is unavailable, or refuses the command.
        """
        try:
            return self.ask(methodcaller(name, *arguments, **options))
        except StoreError as error:
            if isinstance(error.__cause__, Exception) and is_about_one_key(error.__cause__):
                raise PermanentStoreError(data_of_others(arguments[0])) from error
            raise

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """Use the client, and retry once if the connection was cut or leads to another node.

        Operations are idempotent.
        """
        try:
            try:
                return question(self.client())
            except exceptions.TimeoutError:  # a retry would exceed the caller's timeout
                # The next command must find the node that took over from a hanging one.
                self._rediscover()
                raise
            except (*MOVED, exceptions.ConnectionError, OSError):
                self._rediscover()
                return question(self.client())
        except FAILURES as error:
            raise StoreError(self.redacted(error)) from error

    def after_fork(self) -> None:
        """Use new connections in a child, and never touch those of its parent.

        A thread of the parent may have held a lock of a client. The lock is never released in the
        child, and clients acquire it to detect the fork and even to be freed.
        """
        keep_alive((self._client, self._failed, self._connection))
        self._client = self._failed = self._connection = None

    def client(self) -> Any:
        """Return a client of the server, for commands other than scripts."""
        if self._client is None:
            self._client = self._connect(self._failed)
            self._failed = None
        return self._client

    def close(self) -> None:
        """Close every connection."""
        self.disconnect()
        if self._client is not None:
            # `Redis.close()` leaves the pool of a cluster's node open.
            self._client.connection_pool.disconnect()

    def _rediscover(self) -> None:
        """Locate the server again, and drop the old connections."""
        self.close()
        self._client, self._failed = None, self._client

    def _load(self, client: Any, names: Collection[str], *more: Sequence[str]) -> list[Any]:
        """Load scripts; return the replies to more commands, sent in the same round trip."""
        sources = [["SCRIPT", "LOAD", scripts.source_of(name)] for name in names]
        replies = self._exchange(client, [*sources, *more])
        for reply in replies[: len(sources)]:
            if isinstance(reply, Exception):
                raise reply
        return replies[len(sources) :]

    def _exchange(self, client: Any, commands: Sequence[Sequence[str]]) -> list[Any]:
        """Send commands and return their replies, including errors."""
        # Bypass the client's pipeline and pool, which add 30% to a round trip. Only this thread
        # uses the connection, and operations on a stale one are sent again.
        try:
            greetings: list[list[str]] = []
            if self._connection is None:
                # Not made by the pool, which would count it forever.
                pool = client.connection_pool
                self._connection = pool.connection_class(**pool.connection_kwargs)
                self._connection.connect()
                # Loaded each time, because a new connection may be to a new server.
                script = scripts.source_of(self._greeting.script)
                greetings = [["SCRIPT", "LOAD", script], self._greeting.command]
            # In one round trip.
            sent = [*greetings, *commands]
            self._connection.send_packed_command(self._connection.pack_commands(sent))
            for _ in greetings:
                self._connection.read_response()
            return [self._reply_on(self._connection) for _ in commands]
        except BaseException:
            # Outstanding replies must not be read as replies to later commands.
            self.disconnect()
            raise

    def _reply_on(self, connection: Any) -> Any:
        """Return one reply, or the error of its command."""
        try:
            return connection.read_response()
        except exceptions.ResponseError as error:
            self.redacted(error)
            return _error_within(error)

    def redacted(self, error: Exception) -> str:
        """Redact secrets in an error, and return its text."""
        redact_error(error, self._redact)
        # Connection errors can quote the URL. Errors of the server never do, but may contain an @.
        is_reply = isinstance(error, exceptions.ResponseError)
        text = str(error) if is_reply else redact_url(self._redact(str(error)))
        return f"{text}. {NO_TLS}" if _is_without_tls(error) else text

    def _redact(self, text: str) -> str:
        return redact_secrets(ARGUMENTS.sub("", text), self._secrets)

    def disconnect(self) -> None:
        """Use a new connection for scripts from now on."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()


def _is_without_tls(error: BaseException | None) -> bool:
    """Return whether a TLS handshake failed, except because of a certificate."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return not isinstance(error, ssl.SSLCertVerificationError)
        # A server without TLS waits for the end of a line, which never comes.
        if isinstance(error, TimeoutError) and "handshake" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _error_within(error: exceptions.ResponseError) -> exceptions.ResponseError:
    """Return the error of a command in a script, which Redis 6 quotes in an error of the script."""
    quoted = QUOTED.search(str(error))
    if quoted is None:
        return error
    is_read_only = quoted["code"] == "READONLY"
    kind = exceptions.ReadOnlyError if is_read_only else exceptions.ResponseError
    return kind(quoted[0])


def is_about_one_key(error: Exception) -> bool:
    """Return whether a script failed because of the data under its keys: others still work."""
    # Errors of the whole server have their own class in redis-py, or another code: READONLY, OOM,
    # NOPERM, LOADING, … (https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors).
    # redis-py removes the code ERR, which scripts have for a field that is not a number, and Redis
    # adds where in the script it was.
    text = str(error)
    is_of_script = "user_script:" in text and not text.split(" ", 1)[0].isupper()
    return type(error) is exceptions.ResponseError and (
        text.startswith("WRONGTYPE") or is_of_script
    )


def data_of_others(*keys: str) -> str:
    """Return the error of keys with data of another program."""
    named = " and ".join(map(repr, keys))
    return f"data of another program is under the key {named} of the quota store; rename that key"


def keep_alive(inherited: object) -> None:
    """Keep an object until the process ends, even during interpreter shutdown."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


# --- required rights ------------------------------------------------------------------------------

# Scripts are checked command by command, too
# (https://redis.io/docs/latest/operate/oss_and_stack/management/security/acl/#command-categories).
COMMANDS: Final[Mapping[str, tuple[str | int, ...]]] = {
    "ping": (),
    "info": ("server",),
    "time": (),
    "script|load": ("return 1",),
    "evalsha": (sha_of("reserve"), 0),
    "set": ("KEY", "1", "PX", 1),
    "del": ("KEY",),
    "exists": ("KEY",),
    "hget": ("HASH", "f"),
    "hgetall": ("HASH",),
    "hincrby": ("HASH", "f", 1),
    "hlen": ("HASH",),
    "hmget": ("HASH", "f"),
    "hset": ("HASH", "f", "1"),
    "hdel": ("HASH", "f"),
    "zadd": ("SET", "XX", 0, "m"),
    "zrem": ("SET", "m"),
    "zcard": ("SET",),
    "zscan": ("SET", 0),
    "zscore": ("SET", "m"),
    "zrange": ("SET", 0, 0),
    "zrangebyscore": ("SET", 0, 0),
    "zrevrangebyscore": ("SET", 0, 0),
    "zremrangebyscore": ("SET", 0, 0),
    "pttl": ("SET",),
    "pexpire": ("HASH", 1),
    "pexpireat": ("HASH", 1),
    "publish": ("CHANNEL", ""),
}
"""Commands that quotas use, each with arguments that leave no data behind."""

REFUSED_COMMAND: Final = re.compile(r"'([\w|]+)' command")
"""Extracts the command from a permission error."""

LISTENING: Final = ("subscribe", "unsubscribe")
"""Commands for receiving kills and releases without polling."""


def needed(names: KeyNames) -> str:
    """Return all ACL rules that quotas need."""
    commands = (f"+{each}" for each in (*COMMANDS, *LISTENING))
    return " ".join((f"~{names.tag}*", f"&{names.tag}*", *commands))


def missing(server: RedisExecutor, names: KeyNames) -> list[str]:
    """Return the ACL rules that the user lacks, such as `+hset`.

    Raises:
        StoreAuthenticationError: Authentication failed.
        StoreError: The server is unavailable.
    """
    try:
        found: list[str] = server.ask(lambda client: _missing(client, names))
    except StoreError as error:
        # With a cluster or Sentinels, the server must be located first.
        rule = _missing_to_connect(error)
        if rule is None:
            raise
        return [rule]
    return found


def _missing(client: Any, names: KeyNames) -> list[str]:
    places = {each: f"{names.check}:{each.lower()}" for each in ("KEY", "HASH", "SET", "CHANNEL")}
    pipe = client.pipeline(transaction=False)
    for command, arguments in COMMANDS.items():
        filled = [places.get(str(each), each) for each in arguments]
        pipe.execute_command(*command.upper().split("|"), *filled)
    found = {
        _rule(command, str(reply), names)
        for command, reply in zip(COMMANDS, pipe.execute(raise_on_error=False), strict=True)
        if isinstance(reply, NoPermissionError)
    }
    return sorted(found | _missing_channels(client, names))


def _missing_to_connect(error: Exception) -> str | None:
    """Return the missing rule that prevented locating the server.

    Args:
        error: Why it was not located; the result is `None` if a rule was not the cause.

    Raises:
        StoreAuthenticationError: Authentication failed.
    """
    # Without permission, a cluster client reports that there is no cluster: check the causes.
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for each in causes:
        command = REFUSED_COMMAND.search(str(each))
        if isinstance(each, NoPermissionError) and command is not None:
            return f"+{command[1]}"
        if isinstance(each, AuthenticationError):
            raise StoreAuthenticationError(str(error)) from error
    return None


def _missing_channels(client: Any, names: KeyNames) -> set[str]:
    """Return the rules that a user lacks to subscribe."""
    with client.pubsub() as subscription:
        try:
            subscription.subscribe(names.kill_channel, names.freed_channel)
            subscription.get_message(timeout=1.0)
        except NoPermissionError as error:
            return {_rule("subscribe", str(error), names)}
        return set()


def _rule(command: str, error: str, names: KeyNames) -> str:
    """Return the rule that allows a denied command."""
    # Only these words are common to Redis 6 and 7 and Valkey.
    if "channel" in error:
        return f"&{names.tag}*"
    return f"~{names.tag}*" if "key" in error.rsplit("'", maxsplit=1)[-1] else f"+{command}"
