"""The demo's servers, on loopback: an OpenAI-compatible model, and the jobs that its agent watches.

The model is a stand-in that follows one rule: look at the job again until it is done. Everything
around it is real: HTTP, server-sent events, tool calls in pieces, and usage that grows with the
prompt (four characters count as one token).
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

CACHE: Final = "cache"
"""Name under which the model answers as a caching gateway does: at no cost, with zero tokens."""
CACHED_ANSWER: Final = "You asked this before: the answer comes from a cache and costs nothing."


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the servers have seen of one agent."""

    requests: int = 0
    looks: int = 0
    tokens: int = 0
    last_tokens: int = 0
    """Those of the newest request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """What the model says: a text, or a tool call when there are arguments."""

    text: str = ""
    arguments: str = ""
    prompt_tokens: int = 0

    @property
    def usage(self) -> dict[str, int]:
        """Tokens, under the names of the OpenAI protocol."""
        output = tokens(self.text + self.arguments) if self.prompt_tokens else 0
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
        }


class Servers(socketserver.ThreadingTCPServer):
    """Both servers on one free port; each agent has a path of its own and is counted apart.

    Args:
        pending_looks: How often a job is found pending before it is done, so that nothing runs
            for ever: this is what bounds the demo.
    """

    daemon_threads = True

    def __init__(self, pending_looks: int) -> None:
        """Bind a free port on loopback."""
        super().__init__(("127.0.0.1", 0), Handler)
        self._pending_looks = pending_looks
        self._lock = threading.Lock()
        self._seen: defaultdict[str, Seen] = defaultdict(Seen)

    def __enter__(self) -> Self:
        """Serve in a thread of its own."""
        # Half a second by default, which `shutdown` would wait for at the end of the demo.
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def url(self, agent: str) -> str:
        """Where one agent finds its servers: the model below /v1, the jobs below /jobs."""
        return f"http://127.0.0.1:{self.server_address[1]}/{agent}"

    def seen(self, agent: str) -> Seen:
        """What has been seen of one agent."""
        with self._lock:
            return self._seen[agent]

    def look(self, agent: str) -> str:
        """One agent looks at its job."""
        # Under the lock: an agent may ask several tools at once.
        with self._lock:
            seen = self._seen[agent]
            self._seen[agent] = dataclasses.replace(seen, looks=seen.looks + 1)
        # After its number was taken, so that two looks at once cannot both be the last pending one.
        return "pending" if seen.looks < self._pending_looks else "done"

    def answer(self, agent: str, messages: Sequence[Mapping[str, Any]]) -> ModelReply:
        """Answer one agent's model call."""
        reply = think(messages) if agent != CACHE else ModelReply(text=CACHED_ANSWER)
        used = reply.usage["total_tokens"]
        with self._lock:
            seen = self._seen[agent]
            self._seen[agent] = dataclasses.replace(
                seen, requests=seen.requests + 1, tokens=seen.tokens + used, last_tokens=used
            )
        return reply

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of an agent that hung up: those of an interrupted demo do."""
        # Anything else is a mistake of the demo, and is shown.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def think(messages: Sequence[Mapping[str, Any]]) -> ModelReply:
    """Look again, unless the last thing heard is that the job is done."""
    prompt_tokens = tokens(json.dumps(messages))
    last = messages[-1]
    # As text, since tools answer in text whatever they mean by it.
    if last["role"] == "tool" and '"done"' in "".join(each["text"] for each in last["content"]):
        return ModelReply(text=ANSWER, prompt_tokens=prompt_tokens)
    return ModelReply(arguments=json.dumps({"job": JOB}), prompt_tokens=prompt_tokens)


def tokens(text: str) -> int:
    """Tokens of a text, at least one."""
    return max(1, len(text) // CHARACTERS_PER_TOKEN)


def chunks(reply: ModelReply, model: str, call_id: str) -> Iterator[dict[str, Any]]:
    """Say a reply in the chunks of the OpenAI protocol, usage in the last one."""

    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {**head, "choices": [choice]}

    head = {"id": f"chatcmpl-{call_id}", "object": "chat.completion.chunk", "model": model}
    yield chunk({"role": "assistant"})
    # Word by word, as a real model streams: a single chunk would hide what breaks between two.
    for piece in re.findall(r"\s*\S+", reply.text):
        yield chunk({"content": piece})
    if reply.arguments:
        # In two pieces, as providers send arguments: nothing may rely on whole JSON in a chunk.
        yield chunk(tool_call_delta(reply.arguments[:1], call_id, "job_state"))
        yield chunk(tool_call_delta(reply.arguments[1:]))
    yield chunk({}, "tool_calls" if reply.arguments else "stop")
    yield {**head, "choices": [], "usage": reply.usage}


def tool_call_delta(
    arguments: str, call_id: str | None = None, name: str | None = None
) -> dict[str, Any]:
    """Make a piece of a tool call; only the first one has an id and a name."""
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    identity = {"id": call_id, "type": "function"} if call_id else {}
    return {"tool_calls": [{"index": 0, **identity, "function": function}]}


class Handler(BaseHTTPRequestHandler):
    """Translates HTTP into the servers' methods."""

    server: Servers

    def do_GET(self) -> None:
        """Tell the state of a job: GET /AGENT/jobs/JOB."""
        # Each agent by a path of its own, so that its calls are counted without any header.
        agent, kind, job = self._path()
        if kind != "jobs":
            self._send(404, "application/json", b'{"error": "There are only jobs here."}')
            return
        state = {"job": job, "state": self.server.look(agent)}
        self._send(200, "application/json", json.dumps(state).encode())

    def do_POST(self) -> None:
        """Answer a model call: POST /AGENT/v1/chat/completions."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        agent, version, method = self._path()
        if (version, method) != ("v1", "chat/completions") or not request.get("stream"):
            error = b'{"error": {"message": "Only streaming /v1/chat/completions is served."}}'
            self._send(400, "application/json", error)
            return
        reply = self.server.answer(agent, request["messages"])
        call_id = f"call-{self.server.seen(agent).requests}"
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
        """Keep quiet: the display belongs to the demo."""
