"""Servers whose error texts repeat the secrets that they receive."""

from __future__ import annotations

import base64
import contextlib
import socketserver
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote


class Redis(socketserver.StreamRequestHandler):
    """Knows no command, and repeats its arguments as Redis does: all of it, in 128 characters."""

    def handle(self) -> None:
        """Answer each command."""
        while line := self.rfile.readline():
            command, *words = [self._word() for _ in range(int(line[1:]))]
            told = " ".join(f"'{word}'" for word in words)[:128]
            begin = f"-ERR unknown command '{command}', with args beginning with: "
            self.wfile.write(f"{begin}{told}\r\n".encode())

    def _word(self) -> str:
        length = int(self.rfile.readline()[1:])
        return self.rfile.read(length + 2)[:-2].decode()


class Proxy(Redis):
    """Knows no command, and repeats its arguments in its own words."""

    def handle(self) -> None:
        """Answer each command."""
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            self.wfile.write(f"-ERR not allowed: {' '.join(words)}\r\n".encode())


class PostgreSQL(socketserver.StreamRequestHandler):
    """Asks for the password, and repeats it in its error."""

    def handle(self) -> None:
        """Reject a login."""
        # https://www.postgresql.org/docs/current/protocol-message-formats.html
        while struct.unpack("!I", self._message())[0] != 3 << 16:
            self.wfile.write(b"N")  # no encryption
        self.wfile.write(struct.pack("!cII", b"R", 8, 3))
        self.rfile.read(1)
        password = self._message(4) + self.rest
        fields = [b"SFATAL", b"C28P01", b"Mno user with password " + password.rstrip(b"\0"), b""]
        body = b"\0".join(fields) + b"\0"
        self.wfile.write(b"E" + struct.pack("!I", len(body) + 4) + body)

    def _message(self, head: int = 4) -> bytes:
        (length,) = struct.unpack("!I", self.rfile.read(4))
        text = self.rfile.read(length - 4)
        self.rest = text[head:]
        return text[:head]


class Query(BaseHTTPRequestHandler):
    """A Prometheus that rejects all queries, and repeats them."""

    status = 400
    page = '{{"error": "cannot serve {}"}}'
    space = " "

    def do_GET(self) -> None:
        """Repeat path and header."""
        header = self.headers["Authorization"] or ""
        plain = base64.b64decode(header[6:]).decode() if header.startswith("Basic ") else ""
        path = self.path.partition("query=")[0]  # it would hide the rest
        told = f"{header} {plain} {path} {unquote(path)}"
        body = self.page.format(told.replace(" ", self.space)).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Stay silent."""


class Collector(Query):
    """A collector that rejects exports, and repeats its requests."""

    page = "cannot serve {}"

    def do_POST(self) -> None:
        """Reject an export."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def send_response(self, code: int, message: str | None = None) -> None:
        """Repeat them in the status line, too: exporters show only that."""
        told = f"cannot serve {self.headers['Authorization']} {unquote(self.path)}"
        super().send_response(code, message or told)


class Page(Query):
    """A metrics endpoint that returns a text without metrics."""

    status = 200
    page = "otel_limits_turns_total cannot-serve-{}\n"
    space = "-"


@contextlib.contextmanager
def listening(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    """Serve on a port."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
