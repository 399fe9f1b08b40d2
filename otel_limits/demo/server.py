"""The demo's servers on loopback: an OpenAI-compatible model and the jobs its agent polls.

The model follows one rule: poll the job until it is done. Everything else is real: HTTP,
server-sent events, tool calls in several chunks, and usage that grows with the prompt (four
characters count as one token).
"""

from __future__ import annotations

import dataclasses
import json
import re
import socketserver
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

CHARACTERS_PER_TOKEN: Final = 4

JOB: Final = "nightly-report"
ANSWER: Final = f"The job {JOB} is done."

GUARDED: Final = "faq-assistant"
"""The agent whose prompts a guardrail blocks: its answers are empty and cost zero tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests of one scenario."""

    requests: int = 0
    polls: int = 0
    tokens: int = 0
    last_tokens: int = 0
    """Tokens of the latest request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """A text, or a tool call if there are arguments."""

    text: str = ""
    arguments: str = ""
    prompt_tokens: int = 0

    @property
    def usage(self) -> dict[str, int]:
        """Usage in the OpenAI protocol."""
        output = count_tokens(self.text + self.arguments) if self.prompt_tokens else 0
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
        }


class DemoServers(socketserver.ThreadingTCPServer):
    """Both servers on one free port, with a path per scenario to count its requests.

    Args:
        pending_polls: Polls that return "pending" before the job is done, which ends the demo.
    """

    daemon_threads = True

    def __init__(self, pending_polls: int) -> None:
        """Bind a free port on loopback."""
        super().__init__(("127.0.0.1", 0), Handler)
        self._pending_polls = pending_polls
        self._lock = threading.Lock()
        self._seen: defaultdict[str, RequestCounts] = defaultdict(RequestCounts)

    def __enter__(self) -> Self:
        """Start serving in a background thread."""
        # `shutdown` waits for the poll interval, by default 0.5 s.
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def url(self, agent: str) -> str:
        """Return the base URL of a scenario: its model is at /v1, its jobs at /jobs."""
        return f"http://127.0.0.1:{self.server_address[1]}/{agent}"

    def counts(self, agent: str) -> RequestCounts:
        """Return the requests of a scenario so far."""
        with self._lock:
            return self._seen[agent]

    def poll(self, agent: str) -> str:
        """Return the state of a scenario's job."""
        # An agent may call several tools concurrently.
        with self._lock:
            seen = self._seen[agent]
            self._seen[agent] = dataclasses.replace(seen, polls=seen.polls + 1)
        return "pending" if seen.polls < self._pending_polls else "done"

    def answer(self, agent: str, messages: Sequence[Mapping[str, Any]]) -> ModelReply:
        """Return the model's reply and count its tokens."""
        reply = next_reply(messages) if agent != GUARDED else ModelReply()
        used = reply.usage["total_tokens"]
        with self._lock:
            seen = self._seen[agent]
            self._seen[agent] = dataclasses.replace(
                seen, requests=seen.requests + 1, tokens=seen.tokens + used, last_tokens=used
            )
        return reply

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections, which an interrupted demo causes."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def next_reply(messages: Sequence[Mapping[str, Any]]) -> ModelReply:
    """Poll the job again, or answer if it is done."""
    prompt_tokens = count_tokens(json.dumps(messages))
    last = messages[-1]
    if last["role"] == "tool" and '"done"' in "".join(each["text"] for each in last["content"]):
        return ModelReply(text=ANSWER, prompt_tokens=prompt_tokens)
    return ModelReply(arguments=json.dumps({"job": JOB}), prompt_tokens=prompt_tokens)


def count_tokens(text: str) -> int:
    """Estimate the tokens of a text, at least one."""
    return max(1, len(text) // CHARACTERS_PER_TOKEN)


def chunks(reply: ModelReply, model: str, call_id: str) -> Iterator[dict[str, Any]]:
    """Split a reply into chunks of the OpenAI protocol, with usage in the last one."""

    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {**head, "choices": [choice]}

    head = {"id": f"chatcmpl-{call_id}", "object": "chat.completion.chunk", "model": model}
    yield chunk({"role": "assistant"})
    # Word by word, as real models stream: a single chunk would hide bugs at chunk boundaries.
    for piece in re.findall(r"\s*\S+", reply.text):
        yield chunk({"content": piece})
    if reply.arguments:
        # In two pieces, like real providers: a chunk need not contain complete JSON.
        yield chunk(tool_call_delta(reply.arguments[:1], call_id, "job_state"))
        yield chunk(tool_call_delta(reply.arguments[1:]))
    yield chunk({}, "tool_calls" if reply.arguments else "stop")
    yield {**head, "choices": [], "usage": reply.usage}


def tool_call_delta(
    arguments: str, call_id: str | None = None, name: str | None = None
) -> dict[str, Any]:
    """Return part of a tool call. Only the first part has an ID and a name."""
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    identity = {"id": call_id, "type": "function"} if call_id else {}
    return {"tool_calls": [{"index": 0, **identity, "function": function}]}


class Handler(BaseHTTPRequestHandler):
    """The HTTP interface of the servers."""

    server: DemoServers

    def do_GET(self) -> None:
        """Return the state of a job: GET /SCENARIO/jobs/JOB."""
        agent, kind, job = self._path()
        if kind != "jobs":
            self._send(404, "application/json", b'{"error": "Only /jobs is served."}')
            return
        state = {"job": job, "state": self.server.poll(agent)}
        self._send(200, "application/json", json.dumps(state).encode())

    def do_POST(self) -> None:
        """Serve a model call: POST /SCENARIO/v1/chat/completions."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        agent, version, method = self._path()
        if (version, method) != ("v1", "chat/completions") or not request.get("stream"):
            error = b'{"error": {"message": "Only streaming /v1/chat/completions is served."}}'
            self._send(400, "application/json", error)
            return
        reply = self.server.answer(agent, request["messages"])
        call_id = f"call-{self.server.counts(agent).requests}"
        self._send(200, "text/event-stream")
        for chunk in chunks(reply, request["model"], call_id):
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _path(self) -> tuple[str, str, str]:
        agent, _, rest = self.path.lstrip("/").partition("/")
        kind, _, name = rest.partition("/")
        return agent, kind, name

    def _send(self, status: int, content_type: str, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class' name
        """Log nothing, as the terminal shows the demo."""
