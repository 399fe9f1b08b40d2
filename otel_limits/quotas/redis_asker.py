"""Asks a Redis or Valkey server: one question, or many scripts in one round trip."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from redis import exceptions

from otel_limits.core.secrets import masked
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


class RedisAsker:
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

        result: list[Any] = self.ask(load_and_evaluate)
        return result

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """Ask once, and once more where the connection was cut: operations have ids."""
        try:
            try:
                return question(self.link.client())
            except exceptions.TimeoutError:  # nobody waits for a second timeout
                # But whoever asks next is to find the node that has taken over from one that hangs.
                self.link.learn()
                raise
            except (exceptions.ConnectionError, exceptions.MovedError, OSError):
                self.link.learn()
                return question(self.link.client())
        except FAILURES as error:
            raise StoreError(told(error)) from error

    def after_fork(self) -> None:
        """Connect anew in a child, and leave what the parent connected with alone for ever.

        A thread of the parent may have held a lock of a client, which nobody gives back here, and
        a client takes its locks to notice the fork, and even to be freed.
        """
        never_free(self.link)
        self.link = self._connect()

    def close(self) -> None:
        """Close every connection."""
        self.link.close()


def told(error: Exception) -> str:
    """Return what went wrong as it may be shown."""
    # Of a connection the client quotes the URL, as far as it could make sense of it; a server
    # quotes nothing of it, and has an @ of its own.
    return str(error) if isinstance(error, exceptions.ResponseError) else masked(str(error))


def is_about_one_key(error: Exception) -> bool:
    """Tell whether a script failed because of what stands under its keys, so that others work."""
    # What concerns the whole server has a class of its own in redis-py, or begins with another
    # word: READONLY, OOM, NOPERM, LOADING, …
    # (https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors).
    return type(error) is exceptions.ResponseError and str(error).startswith(("WRONGTYPE", "ERR"))


def never_free(inherited: object) -> None:
    """Keep something until the process is gone, also while the interpreter takes itself apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
