"""A loopback server that sends a test's queued replies."""

from __future__ import annotations

import contextlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKEN = json.dumps({"access_token": "x", "expires_in": 3600, "token_type": "Bearer"}).encode()


@dataclass
class Reply:
    """One answer."""

    chunks: list[bytes]
    """The body, in the parts in which it is sent."""
    content_type: str = "text/event-stream"
    status: int = 200
    breaks_off: bool = False
    """True if the connection is dropped before the body is complete."""
    hangs: bool = False
    """True if nothing follows these chunks until the test releases it."""


@dataclass
class Vendor:
    """The queued replies and the received requests."""

    url: str
    replies: list[Reply] = field(default_factory=list)
    """In order; the last one repeats."""
    requests: list[bytes] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    """Ends the hanging replies."""
    on_hang: Callable[[], object] = lambda: None
    """Called when a reply begins to hang."""

    def next_reply(self) -> Reply:
        """Return the next reply."""
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


@contextmanager
def serving() -> Iterator[Vendor]:
    """Serve until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    vendor = Vendor(f"http://127.0.0.1:{server.server_address[1]}")
    Handler.vendor = vendor
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield vendor
    finally:
        vendor.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # send each chunk immediately; Nagle delays the last by 40 ms
    vendor: Vendor

    def do_POST(self) -> None:
        """Send the reply in chunks, as a model does."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/token":  # Google's clients request a token before the first call
            self._send(Reply([TOKEN], "application/json"))
            return
        self.vendor.requests.append(body)
        with contextlib.suppress(ConnectionError):  # a cancelled client has closed the connection
            self._send(self.vendor.next_reply())

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("content-type", reply.content_type)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in reply.chunks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.flush()
        if reply.hangs:
            self.vendor.on_hang()
            self.vendor.is_over.wait()
        if reply.breaks_off or reply.hangs:
            self.close_connection = True
            self.connection.close()
        else:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Log nothing."""
