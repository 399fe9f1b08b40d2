"""All vendors at one address of loopback: each request is answered, and is put on the bill."""

from __future__ import annotations

import json
import random
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from tests.bills.billed import BilledCall
from tests.wire import formats, usages
from tests.wire.formats import Answer
from tests.wire.usages import Bill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.bills.billed import Vendor

HOSTS: Final[dict[str, Vendor]] = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
    "openrouter.ai": "openrouter",
    "litellm.internal": "litellm",
}
SECONDS: Final = 1.5
"""Every call takes this long."""
TURNS: Final = 4
"""Model calls of an agent with a tool."""


@dataclass
class Biller:
    """The bill of all vendors."""

    clock: Callable[[], float]
    wait: Callable[[float], None]
    """Moves the clock."""
    port: int = 0
    calls: list[BilledCall] = field(default_factory=list)
    silent: int = 0
    """How many of the next answers do not report their usage."""
    _random: random.Random = field(default_factory=lambda: random.Random(51))  # noqa: S311

    def answer(self, host: str, request: Any) -> list[bytes]:
        """Put a call on the bill, and return its answer in the vendor's format."""
        vendor, model = HOSTS[host], request["model"]
        # Its history is its question, and an answer and a tool's result for each turn.
        turns = sum(each["role"] == "assistant" for each in request["messages"])
        has_end = not request.get("tools") or turns + 1 >= TURNS
        started = self.clock()
        self.wait(SECONDS)
        sent = self._random.randint(400, 9_000)
        read = self._random.randrange(sent // 2) // 128 * 128
        written = 0
        if vendor == "anthropic":
            written = self._random.randrange(sent - read)
        bill = Bill(
            input=sent,
            output=self._random.randint(20, 900),
            read=read,
            write=written,
        )
        self.calls.append(
            BilledCall(
                vendor=vendor,
                model=model,
                identity=f"gen-{len(self.calls):04d}",
                started=started,
                ended=self.clock(),
                bill=bill,
            )
        )
        usage = usages.anthropic(bill) if vendor == "anthropic" else usages.openai(bill)
        if vendor != "anthropic":
            del usage["prompt_tokens_details"]["cache_write_tokens"]
        reported = () if self.silent else (usage,)
        self.silent = max(0, self.silent - 1)
        answer = Answer(usages=reported, tool=None if has_end else ("look", "{}"))
        if vendor == "anthropic":
            return formats.sse(*formats.anthropic(answer), names=True)
        return formats.sse_with_end(*formats.openai_chat(answer))


class BillingHandler(BaseHTTPRequestHandler):
    """Answers one request as the host that it is for."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    biller: Biller

    def do_POST(self) -> None:
        """Answer a request for a stream."""
        body: Any = json.loads(self.rfile.read(int(self.headers["content-length"])))
        host = self.headers["host"].partition(":")[0]
        answer = b"".join(self.biller.answer(host, body))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def billing(clock: Callable[[], float], wait: Callable[[float], None]) -> Iterator[Biller]:
    """Serve until the end of the block; the names of all hosts lead to loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BillingHandler)
    server.daemon_threads = True
    BillingHandler.biller = biller = Biller(clock, wait, port=server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    resolve = socket.getaddrinfo

    def resolved(host: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        return resolve("127.0.0.1" if name in HOSTS else host, *arguments, **options)

    try:
        with patch.object(socket, "getaddrinfo", resolved):
            yield biller
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
