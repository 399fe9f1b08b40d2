"""Connection to a Redis or Valkey server: commands, batched scripts, messages and rights."""

from __future__ import annotations

import ctypes
import re
import ssl
from collections.abc import Callable, Collection, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from redis import exceptions

from otel_limits.core.secrets import redact_error, redact_secrets, redact_url
from otel_limits.quotas import redis_scripts as scripts
from otel_limits.quotas.store import StoreError

if TYPE_CHECKING:
    import redis

    from otel_limits.quotas.redis_scripts import ScriptCall

FAILURES: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
"""Errors of an unavailable server; a cluster's is not a `RedisError`."""

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
            StoreError: The server is unavailable, or the script failed.
        """
        (reply,) = self.replies([call])
        if isinstance(reply, Exception):
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
            StoreError: The server is unavailable, or refuses the command.
        """
        return self.ask(methodcaller(name, *arguments, **options))

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """Use the client, and retry once if the connection was cut: operations are idempotent."""
        try:
            try:
                return question(self.client())
            except exceptions.TimeoutError:  # a retry would exceed the caller's timeout
                # The next command must find the node that took over from a hanging one.
                self._rediscover()
                raise
            except (exceptions.ConnectionError, exceptions.MovedError, OSError):
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
            return error

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


def is_about_one_key(error: Exception) -> bool:
    """Return whether a script failed because of the data under its keys: others still work."""
    # Errors of the whole server have their own class in redis-py, or another prefix: READONLY,
    # OOM, NOPERM, LOADING, …
    # (https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors).
    return type(error) is exceptions.ResponseError and str(error).startswith(("WRONGTYPE", "ERR"))


def keep_alive(inherited: object) -> None:
    """Keep an object until the process ends, even during interpreter shutdown."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
