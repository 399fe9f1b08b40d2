"""Asks a Redis or Valkey server: one question, or many scripts in one round trip."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from redis import exceptions

from otel_limits.core.secrets import redact_url
from otel_limits.quotas import redis_scripts as scripts
from otel_limits.quotas.store import StoreError

if TYPE_CHECKING:
    from otel_limits.quotas.redis_scripts import ScriptCall

FAILURES: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
"""All that means the server was not reached, or refused; a cluster's is not a `RedisError`."""


class Link(Protocol):
    """How the server that has our keys is reached."""

    def client(self) -> Any:
        """Return its client."""

    def learn(self) -> None:
        """Look again where our keys are."""

    def close(self) -> None:
        """Close every connection."""


class RedisExecutor:
    """Asks a server, for one thread.

    A thread that closes a connection while another waits for an answer on it makes that one fail
    in ways that no client documents.

    Args:
        connect: Makes a link to it, without connecting yet.
    """

    def __init__(self, connect: Callable[[], Link]) -> None:
        """Connect on first use."""
        self._connect = connect
        self.link = connect()
        self._connection: Any = None
        """What scripts are sent on, once there was one."""

    def evaluate(self, call: ScriptCall) -> Any:
        """Run one script.

        Raises:
            StoreError: The server does not answer, or the script failed.
        """
        (reply,) = self.replies([call])
        if isinstance(reply, Exception):
            raise StoreError(str(reply)) from reply
        return reply

    def replies(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run scripts in one round trip; one that fails by itself has its error for a reply."""
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

    def load(self, names: Collection[str]) -> None:
        """Connect, and have the server know these scripts.

        Raises:
            StoreError: The server does not answer, or does not take them.
        """
        self.ask(lambda client: self._load(client, names))

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """Ask once, and once more where the connection was cut: operations have ids."""
        try:
            try:
                return question(self.link.client())
            except exceptions.TimeoutError:  # nobody waits for a second timeout
                # But whoever asks next is to find the node that has taken over from one that hangs.
                self._rediscover()
                raise
            except (exceptions.ConnectionError, exceptions.MovedError, OSError):
                self._rediscover()
                return question(self.link.client())
        except FAILURES as error:
            raise StoreError(redacted(error)) from error

    def after_fork(self) -> None:
        """Connect anew in a child, and leave what the parent connected with alone for ever.

        A thread of the parent may have held a lock of a client, which nobody gives back here, and
        a client takes its locks to notice the fork, and even to be freed.
        """
        keep_alive((self.link, self._connection))
        self.link, self._connection = self._connect(), None

    def close(self) -> None:
        """Close every connection."""
        self._disconnect()
        self.link.close()

    def _rediscover(self) -> None:
        """Look again where our keys are, and send nothing more to where they were."""
        self._disconnect()
        self.link.learn()

    def _load(self, client: Any, names: Collection[str]) -> None:
        sources = [["SCRIPT", "LOAD", scripts.source_of(name)] for name in names]
        for reply in self._exchange(client, sources):
            if isinstance(reply, Exception):
                raise reply

    def _exchange(self, client: Any, commands: Sequence[Sequence[str]]) -> list[Any]:
        """Send commands and read their replies, errors among them."""
        # Not through the client's pipeline and pool, which add 30 % to a round trip. This thread
        # alone uses the connection, and operations on a stale one are sent again.
        try:
            if self._connection is None:
                self._connection = client.connection_pool.make_connection()
                self._connection.connect()
            self._connection.send_packed_command(self._connection.pack_commands(commands))
            return [_reply_on(self._connection) for _ in commands]
        except BaseException:
            # What is still to come on it must not be taken for the reply to something else.
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()


def _reply_on(connection: Any) -> Any:
    """Read one reply, or the error that a command was answered with."""
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:
        return error


def redacted(error: Exception) -> str:
    """Return what went wrong as it may be shown."""
    # Of a connection the client quotes the URL, as far as it could make sense of it; a server
    # quotes nothing of it, and has an @ of its own.
    return str(error) if isinstance(error, exceptions.ResponseError) else redact_url(str(error))


def is_about_one_key(error: Exception) -> bool:
    """Tell whether a script failed because of what stands under its keys, so that others work."""
    # What concerns the whole server has a class of its own in redis-py, or begins with another
    # word: READONLY, OOM, NOPERM, LOADING, …
    # (https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors).
    return type(error) is exceptions.ResponseError and str(error).startswith(("WRONGTYPE", "ERR"))


def keep_alive(inherited: object) -> None:
    """Keep something until the process is gone, also while the interpreter takes itself apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
