"""Counts quotas in Redis or Valkey, for every process that uses the same server.

Each operation is one script, so that it is atomic, and a batch of operations is one round trip.
All keys share one hash tag: in a cluster they live on one node, as a script needs it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.resources
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    ConnectionError as Disconnected,
)
from redis.exceptions import (
    MovedError,
    NoScriptError,
    RedisClusterException,
    RedisError,
)
from redis.exceptions import (
    TimeoutError as TimedOut,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from otel_limits.quotas.killing import Kill
from otel_limits.quotas.store import (
    RECOVERABLE_SECONDS,
    REMEMBERED_SECONDS,
    RETENTION_SECONDS,
    Count,
    Listed,
    Operation,
    Reply,
    Reserve,
    Settle,
    Standing,
    Status,
    StoreError,
)
from otel_limits.quotas.urls import (
    CLUSTER_URL,
    CUT_PASSWORD,
    PLAIN_URL,
    SENTINEL_URL,
    require_store_url,
)

if TYPE_CHECKING:
    import re


FAILURES: Final = (RedisError, RedisClusterException, OSError)
"""Whatever says that the server was not reached or refused; a cluster's is no `RedisError`."""

TAG: Final = "{otel_limits}"
OPERATION_KEY: Final = TAG + ":operation:"
KILLS_KEY: Final = TAG + ":kills"
CHECK_KEY: Final = TAG + ":check"
EXPIRED_KEY: Final = TAG + ":expired"

KILL_NOTED_SECONDS: Final = 60
"""How long a kill is noted for processes that were not connected when it was told."""


class Link:
    """How one server is reached."""

    def __init__(self, client: redis.Redis) -> None:
        """Take the client of the server."""
        self._client = client

    def client(self) -> Any:
        """Return the client of the server that has our keys."""
        return self._client

    def learn(self) -> None:
        """Look again where our keys are."""

    def close(self) -> None:
        """Close every connection."""
        self._client.close()


class ClusterLink:
    """How the node of a cluster that has our keys is reached."""

    def __init__(self, connect: Callable[[], RedisCluster]) -> None:
        """Connect on first use."""
        self._connect = connect
        self._cluster: RedisCluster | None = None

    def client(self) -> Any:
        """Return the client of the node."""
        if self._cluster is None:
            self._cluster = self._connect()
        return self._cluster.get_redis_connection(self._cluster.get_node_from_key(TAG))  # type: ignore[no-untyped-call]

    def learn(self) -> None:
        """Look again where our keys are."""
        self.close()

    def close(self) -> None:
        """Close every connection."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


class RedisStore:
    """Counts on a server, for one thread: each has a store of its own.

    What closes a connection under a question of another thread makes that fail in ways that no
    client documents.

    Args:
        url: `redis://`, `rediss://`, `unix://`, `redis+cluster://host:port` or
            `redis+sentinel://host:port,host:port/service`; `valkey` means the same as `redis`.
        timeout: Seconds after which the server counts as gone.
        health_interval: Seconds after which a silent connection is tried, for one that listens;
            0 for never.
    """

    def __init__(self, url: str, timeout: float, health_interval: int = 0) -> None:
        """Connect on first use.

        Raises:
            ValueError: The URL is none of these.
        """
        self._connect = functools.partial(link_to, url, timeout, health_interval)
        self._link = self._connect()
        self._channel = f"{TAG}:kill:{urlsplit(url).path.strip('/') or '0'}"

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Do `operations` in order, in one round trip.

        Raises:
            StoreError: Some may have been done and some not: do all of them again.
        """
        calls = [_call_of(each) for each in operations]
        return [_reply(text) for text in self._evaluate(calls)]

    def check(self) -> None:
        """See whether the server can be written to.

        Raises:
            StoreError: It cannot.
        """
        self._ask(lambda client: client.set(CHECK_KEY, "1", px=1000))

    def now(self) -> float:
        """Return the server's time.

        Raises:
            StoreError: It does not answer.
        """
        seconds, microseconds = self._ask(lambda client: client.time())
        return float(seconds) + float(microseconds) / 1e6

    def keys(self, quota: str) -> list[Listed]:
        """Return the keys of a quota that were used in a window that has not ended.

        Raises:
            StoreError: The server does not answer.
        """
        first = int(self.now() * 1000)
        members = self._ask(lambda client: client.zrangebyscore(_index(quota), first, "+inf"))
        return [Listed(*member.split(" ", 1)) for member in members]

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[Standing]:
        """Return how counts stand.

        Raises:
            StoreError: The server does not answer.
        """
        if not counts:
            return []
        keys = [key for count, _ in counts for key in (*_bucket(count), _grants(count))]
        (text,) = self._evaluate(
            [("look", [EXPIRED_KEY, *keys], [str(amount) for _, amount in counts])]
        )
        return _standings(text.split())

    def reset(self, count: Count) -> None:
        """Begin to count from 0.

        Raises:
            StoreError: The server does not answer.
        """

        def write(client: Any) -> None:
            bucket, _ = _bucket(count)
            pipe = client.pipeline(transaction=True)
            pipe.hset(bucket, "used", 0)
            pipe.pexpireat(bucket, _expires(count))
            pipe.execute()

        self._ask(write)

    def grant(self, count: Count, amount: int, until: float) -> None:
        """Permit `amount` more until a time.

        Raises:
            StoreError: The server does not answer.
        """
        member = f"{amount}:{uuid.uuid4().hex}"
        arguments = [member, str(int(until * 1000)), str(RETENTION_SECONDS * 1000)]
        self._evaluate([("grant", [_grants(count)], arguments)])

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
        """Tell every listening process to end agents; returns how many were told.

        Raises:
            StoreError: The server does not answer.
        """
        arguments = [f"{uuid.uuid4().hex} {pattern}", self._channel, str(KILL_NOTED_SECONDS * 1000)]
        (told,) = self._evaluate([("kill", [KILLS_KEY], arguments)])
        return int(told)

    def kills(self, since: float, closing: threading.Event) -> Iterator[Kill]:
        """Wait for kills until `closing` is set.

        Args:
            since: Server time; a kill that was told after it while nobody listened comes first.
            closing: Ends the waiting within a second.

        Raises:
            StoreError: The connection was lost.
        """
        try:
            client = self._link.client()
            with client.pubsub(ignore_subscribe_messages=True) as subscription:
                subscription.subscribe(self._channel)
                subscription.get_message(timeout=1.0)
                noted = client.zrangebyscore(KILLS_KEY, f"({int(since * 1000)}", "+inf")
                yield from (_kill(text) for text in noted)
                while not closing.is_set():
                    message = subscription.get_message(timeout=1.0)
                    if message:
                        yield _kill(message["data"])
        except FAILURES as error:
            raise StoreError(str(error)) from error
        finally:
            self._link.close()

    def reset_after_fork(self) -> None:
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

    def _evaluate(self, calls: Sequence[tuple[str, list[str], list[str]]]) -> list[Any]:
        def evaluate(client: Any) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for script, keys, arguments in calls:
                pipe.evalsha(sha_of(script), len(keys), *keys, *arguments)
            replies: list[Any] = pipe.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies

        def load_and_evaluate(client: Any) -> list[Any]:
            try:
                return evaluate(client)
            except NoScriptError:  # the server is new, or was restarted
                for script in {script for script, _, _ in calls}:
                    client.script_load(source_of(script))
                return evaluate(client)

        result: list[Any] = self._ask(load_and_evaluate)
        return result

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Ask once, and once more where the connection was cut: operations have ids."""
        try:
            try:
                return question(self._link.client())
            except TimedOut:
                raise
            except (Disconnected, MovedError, OSError):
                self._link.learn()
                return question(self._link.client())
        except FAILURES as error:
            raise StoreError(str(error)) from error


def never_free(inherited: object) -> None:
    """Keep something until the process is gone, also while the interpreter takes itself apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


# --- where the server is --------------------------------------------------------------------------


def require_readable(name: str, url: str) -> None:
    """Make sure that the client understands a URL of a known kind, without connecting.

    Raises:
        ValueError: It does not. What it says itself is kept back: it quotes pieces of passwords.
    """
    if SENTINEL_URL.fullmatch(url):
        return
    plain = _as_redis(url).replace("+cluster", "", 1)
    try:
        if CUT_PASSWORD.match(url):
            raise ValueError  # noqa: TRY301  for the sentence below
        pool = redis.ConnectionPool.from_url(plain)
        if PLAIN_URL.fullmatch(url):  # a cluster takes other options, and passes over what is none
            pool.make_connection()
    except (ValueError, TypeError, AttributeError, RedisError):
        raise ValueError(
            f"{name} must be a URL that the client of Redis can read; it cannot read this one "
            f"with the scheme {url.partition(':')[0]!r}. The port must be a number up to 65535, "
            "the options after ? must be known to the client, and in a password write %2F for /, "
            "%3F for ?, %23 for # and %40 for @."
        ) from None


def link_to(url: str, timeout: float, health_interval: int) -> Link | ClusterLink:
    """Make the link to a server, without connecting.

    Raises:
        ValueError: The URL is of no known kind.
    """
    settings: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": True,
        "health_check_interval": health_interval,
    }
    if PLAIN_URL.fullmatch(url):
        return Link(redis.Redis.from_url(_as_redis(url), **settings))
    if CLUSTER_URL.fullmatch(url):
        plain = _as_redis(url).replace("+cluster", "", 1)
        return ClusterLink(functools.partial(RedisCluster.from_url, plain, **settings))
    require_store_url("url", url)
    sentinel = cast("re.Match[str]", SENTINEL_URL.fullmatch(url))
    return Link(_sentinel(sentinel["hosts"], sentinel["service"], settings))


def _as_redis(url: str) -> str:
    return "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url


def _sentinel(hosts: str, service: str, settings: dict[str, Any]) -> redis.Redis:
    addresses = [
        (each.rpartition(":")[0], int(each.rpartition(":")[2])) for each in hosts.split(",")
    ]
    watcher = Sentinel(addresses, sentinel_kwargs=settings, **settings)  # type: ignore[no-untyped-call]
    client: redis.Redis = watcher.master_for(service)  # type: ignore[no-untyped-call]
    return client


# --- scripts --------------------------------------------------------------------------------------


@functools.cache
def source_of(script: str) -> str:
    """Return the text of a script."""
    folder = importlib.resources.files("otel_limits.quotas") / "scripts"
    return "\n".join((folder / f"{each}.lua").read_text() for each in ("common", script))


@functools.cache
def sha_of(script: str) -> str:
    """Return the name under which a server knows a script."""
    return hashlib.sha1(source_of(script).encode(), usedforsecurity=False).hexdigest()


def _call_of(operation: Operation) -> tuple[str, list[str], list[str]]:
    if isinstance(operation, Reserve):
        return "reserve", _reserve_keys(operation), _reserve_arguments(operation)
    return "settle", _settle_keys(operation), _settle_arguments(operation)


def _reserve_keys(operation: Reserve) -> list[str]:
    counts = [demand.count for demand in operation.demands]
    keys = ((*_bucket(each), _grants(each), _index(each.quota)) for each in counts)
    return [OPERATION_KEY + operation.id, EXPIRED_KEY, *itertools.chain.from_iterable(keys)]


def _reserve_arguments(operation: Reserve) -> list[str]:
    arguments: list[object] = [
        operation.id,
        int(operation.lease_seconds * 1000),
        REMEMBERED_SECONDS * 1000,
    ]
    for demand in operation.demands:
        count = demand.count
        arguments += [
            demand.amount,
            demand.limit,
            count.window.start * 1000,
            count.window.end * 1000,
            _expires(count),
            int(demand.enforced),
            int(demand.certain),
            demand.known,
            f"{count.key} {count.shown}",
        ]
    return [str(each) for each in arguments]


def _settle_keys(operation: Settle) -> list[str]:
    buckets = (_bucket(charge.count) for charge in operation.charges)
    return [OPERATION_KEY + operation.id, *itertools.chain.from_iterable(buckets)]


def _settle_arguments(operation: Settle) -> list[str]:
    arguments: list[object] = [operation.id, REMEMBERED_SECONDS * 1000]
    for charge in operation.charges:
        arguments += [charge.amount, _expires(charge.count), charge.known]
    return [str(each) for each in arguments]


def _bucket(count: Count) -> tuple[str, str]:
    name = f"{TAG}:{count.quota}:{count.key}:{count.window.start}"
    return name, f"{name}:leases"


def _grants(count: Count) -> str:
    return f"{TAG}:{count.quota}:{count.key}:grants"


def _index(quota: str) -> str:
    return f"{TAG}:{quota}:index"


def _expires(count: Count) -> int:
    """Return when a count may be forgotten, in milliseconds since the epoch."""
    return (count.window.end + RETENTION_SECONDS) * 1000


def _reply(text: str) -> Reply:
    status, now, lacking, *numbers = text.split()
    return Reply(
        cast("Status", status),
        int(now) / 1000,
        tuple(_standings(numbers)),
        () if lacking == "-" else tuple(int(each) for each in lacking.split(",")),
    )


def _standings(numbers: list[str]) -> list[Standing]:
    values = [int(each) for each in numbers]
    return [Standing(*values[n : n + 3]) for n in range(0, len(values), 3)]


def _kill(text: str) -> Kill:
    identity, _, pattern = text.partition(" ")
    return Kill(identity, pattern)
