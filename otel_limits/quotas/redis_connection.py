"""Asks a Redis or Valkey server one thing at a time, on a connection where nobody waits."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING, Final

from otel_limits.quotas import redis_scripts as scripts
from otel_limits.quotas.redis_asker import FAILURES, told
from otel_limits.quotas.store import StoreError

if TYPE_CHECKING:
    import socket

    from otel_limits.quotas.redis_asker import Link
    from otel_limits.quotas.redis_scripts import KeyNames
    from otel_limits.quotas.store import Operation, Reply

READ_BYTES: Final = 65_536

NOT_YET: Final = (BlockingIOError, ssl.SSLWantReadError)
"""Nothing is there to be read, or nothing of ours: TLS has messages of its own."""


class RedisConnection:
    """One connection.

    Only the reply of a script that has done its work is read here: a bulk string
    (https://redis.io/docs/latest/develop/reference/protocol-spec/#bulk-strings).

    Args:
        link: Leads to the server.
        names: How keys are called there.

    Raises:
        StoreError: The server does not answer, or its client has no socket that could be watched.
    """

    def __init__(self, link: Link, names: KeyNames) -> None:
        """Connect as the client of Redis does it, with TLS, authentication and sentinels."""
        self._names = names
        self._process = os.getpid()
        self._read = b""
        try:
            self._connection = link.client().connection_pool.make_connection()
            self._connection.connect()
        except FAILURES as error:
            raise StoreError(told(error)) from error
        # Private, as the client has no public way to await a reply in the loop that runs. Where it
        # is gone one day, the courier does everything.
        found: socket.socket | None = getattr(self._connection, "_sock", None)
        if found is None:
            self.close()
            raise StoreError("the client of Redis does not show its socket")
        found.settimeout(0)
        self._socket = found

    def fileno(self) -> int:
        """Return the number of the socket."""
        return self._socket.fileno()

    def send(self, operation: Operation) -> None:
        """Send an operation.

        Raises:
            StoreError: It could not be sent at once.
        """
        packed = scripts.packed([self._names.call_of(operation).command])
        try:
            sent = self._socket.send(packed)
        except OSError as error:
            raise StoreError(told(error)) from error
        if sent != len(packed):
            raise StoreError("the server takes nothing more")

    def receive(self) -> Reply | None:
        """Return the reply; `None` while it is not all there.

        Raises:
            StoreError: The connection has ended, or something else has come.
        """
        # It would be taken from the parent.
        if os.getpid() != self._process:
            raise StoreError("this connection is that of a parent")
        try:
            came = self._socket.recv(READ_BYTES)
        except NOT_YET:
            return None
        except OSError as error:
            raise StoreError(told(error)) from error
        self._read += came
        begin, end, rest = self._read.partition(b"\r\n")
        if not came or not self._read.startswith(b"$") or (end and not begin[1:].isdigit()):
            raise StoreError("the server has answered with something else")
        if not end or len(rest) < int(begin[1:]) + len(end):
            return None
        self._read = b""
        return scripts.reply_of(rest[: -len(end)].decode())

    def close(self) -> None:
        """Close it."""
        self._connection.disconnect()
