"""A model server on loopback that streams every answer in 250 ms.

`python -m tests.benchmarks.served` prints its port. The first message of a conversation is the
number of tool calls; the agent takes one turn more than that.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

ANSWER_SECONDS: Final = 0.25
CHUNKS: Final = 25


class Handler(BaseHTTPRequestHandler):
    """Implements the OpenAI protocol like the server of llama.cpp."""

    def do_POST(self) -> None:
        """Stream an answer. Reject requests to count tokens, so that the client estimates them."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.endswith("/chat/completions"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        begin = time.perf_counter()
        deltas = deltas_for(request["messages"])
        for number, delta in enumerate(deltas, start=1):
            # Relative to the start, so that delays do not add up.
            time.sleep(
                max(0.0, begin + ANSWER_SECONDS * number / len(deltas) - time.perf_counter())
            )
            self.write({"choices": [{"index": 0, **delta}]})
        usage = {"prompt_tokens": 100, "completion_tokens": CHUNKS, "total_tokens": 100 + CHUNKS}
        self.write({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def write(self, chunk: dict[str, Any]) -> None:
        """Send one event."""
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def deltas_for(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a few words, then a tool call or the end."""
    first = messages[0]["content"]
    wanted = int(first if isinstance(first, str) else "".join(each["text"] for each in first))
    had = sum(message["role"] == "tool" for message in messages)
    words = [{"delta": {"content": "word "}, "finish_reason": None}] * (CHUNKS - 2)
    if had >= wanted:
        return [*words, {"delta": {}, "finish_reason": "stop"}]
    function = {"name": "look_up", "arguments": "{}"}
    call = {"index": 0, "id": f"call-{had}", "type": "function", "function": function}
    asks = {"delta": {"tool_calls": [call]}, "finish_reason": None}
    return [*words, asks, {"delta": {}, "finish_reason": "tool_calls"}]


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
