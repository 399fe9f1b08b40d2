"""All model classes of Strands against a server on loopback: every request is counted.

The servers send as little as each client accepts. Clients that are not installed are skipped.
"""

from __future__ import annotations

import json
import pkgutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import strands.models
from strands.models import Model

from otel_limits import Event, Limits, enable
from tests.processes import SOON
from tests.unit.strands.test_sent_requests import asking, calls, extract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OUTPUT = json.dumps({"text": "a report"})
CHAT = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": OUTPUT, "refusal": None},
        }
    ],
    "usage": {"prompt_tokens": 70, "completion_tokens": 30, "total_tokens": 100},
}
CALLED: dict[str, Any] = {
    **CHAT,
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "extract_report", "arguments": OUTPUT},
                    }
                ],
            },
        }
    ],
}
RESPONSE = {
    "id": "r",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": False,
    "temperature": 1,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1,
    "output": [
        {
            "id": "o",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": OUTPUT, "annotations": []}],
        }
    ],
}
CONVERSE = {
    "output": {
        "message": {
            "role": "assistant",
            "content": [
                {"toolUse": {"toolUseId": "t", "name": "Report", "input": {"text": "a report"}}}
            ],
        }
    },
    "stopReason": "tool_use",
    "usage": {"inputTokens": 70, "outputTokens": 30, "totalTokens": 100},
    "metrics": {"latencyMs": 1},
}
GEMINI = {
    "candidates": [{"content": {"role": "model", "parts": [{"text": OUTPUT}]}}],
    "usageMetadata": {"promptTokenCount": 70, "candidatesTokenCount": 30, "totalTokenCount": 100},
}
OLLAMA = {
    "model": "m",
    "created_at": "2025-01-01T00:00:00Z",
    "message": {"role": "assistant", "content": OUTPUT},
    "done": True,
    "prompt_eval_count": 70,
    "eval_count": 30,
}
LLAMA = {
    "id": "l",
    "completion_message": {
        "role": "assistant",
        "stop_reason": "stop",
        "content": {"type": "text", "text": OUTPUT},
    },
}


def server_events(*data: dict[str, Any], named: bool = False) -> bytes:
    """Server-sent events, as a provider streams them."""
    lines = [
        (f"event: {each['type']}\n" if named else "") + f"data: {json.dumps(each)}\n\n"
        for each in data
    ]
    return "".join([*lines, "" if named else "data: [DONE]\n\n"]).encode()


ANTHROPIC = server_events(
    {
        "type": "message_start",
        "message": {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 70, "output_tokens": 1},
        },
    },
    {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "tool_use", "id": "t", "name": "Report", "input": {}},
    },
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "input_json_delta", "partial_json": OUTPUT},
    },
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 30},
    },
    {"type": "message_stop"},
    named=True,
)
LLAMACPP = server_events(
    {"choices": [{"index": 0, "delta": {"content": OUTPUT}, "finish_reason": None}]},
    {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 70, "completion_tokens": 30, "total_tokens": 100},
    },
)


def provider(name: str, **arguments: Any) -> Any:
    """Make a model from the module `name`, with the one class defined there."""
    module = pytest.importorskip(f"strands.models.{name}", exc_type=ImportError)
    (kind,) = (
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Model) and each.__module__ == module.__name__
    )
    return kind(**arguments)


def sagemaker(url: str) -> Any:
    """Make a model at a SageMaker endpoint."""
    session = pytest.importorskip("boto3").Session("key", "secret", region_name="eu-west-1")
    model = provider(
        "sagemaker",
        endpoint_config={"endpoint_name": "e", "region_name": "eu-west-1"},
        payload_config={"max_tokens": 100},
        boto_session=session,
    )
    model.client = session.client("sagemaker-runtime", endpoint_url=url)
    return model


def bedrock(url: str) -> Any:
    """Make a Bedrock model that does not stream."""
    session = pytest.importorskip("boto3").Session("key", "secret", region_name="eu-west-1")
    return provider(
        "bedrock", model_id="m", boto_session=session, endpoint_url=url, streaming=False
    )


KEY = {"api_key": "k"}
PROVIDERS: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "anthropic": (
        ANTHROPIC,
        lambda url: provider(
            "anthropic", client_args={**KEY, "base_url": url}, model_id="m", max_tokens=99
        ),
    ),
    "bedrock": (CONVERSE, bedrock),
    "gemini": (
        GEMINI,
        lambda url: provider(
            "gemini", client_args={**KEY, "http_options": {"base_url": url}}, model_id="m"
        ),
    ),
    "litellm": (
        CALLED,
        lambda url: provider(
            "litellm", client_args={**KEY, "base_url": url}, model_id="openai/unknown-model"
        ),
    ),
    "llamaapi": (
        LLAMA,
        lambda url: provider("llamaapi", client_args={**KEY, "base_url": url}, model_id="m"),
    ),
    "llamacpp": (LLAMACPP, lambda url: provider("llamacpp", base_url=url, model_id="m")),
    "mistral": (
        CALLED,
        lambda url: provider("mistral", api_key="k", client_args={"server_url": url}, model_id="m"),
    ),
    "ollama": (OLLAMA, lambda url: provider("ollama", host=url, model_id="m")),
    "openai": (
        CHAT,
        lambda url: provider("openai", client_args={**KEY, "base_url": url}, model_id="m"),
    ),
    "openai_responses": (
        RESPONSE,
        lambda url: provider(
            "openai_responses", client_args={**KEY, "base_url": url}, model_id="m"
        ),
    ),
    "sagemaker": (CHAT, sagemaker),
    "writer": (
        CHAT,
        lambda url: provider("writer", client_args={**KEY, "base_url": url}, model_id="m"),
    ),
}


class Provider(ThreadingHTTPServer):
    """A server that gives every request the same response, and counts requests."""

    daemon_threads = True

    def __init__(self, answer: bytes | dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_stream = isinstance(answer, bytes)
        self.answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Provider

    def do_POST(self) -> None:
        """Respond."""
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.requests.append(self.path)
        self.send_response(200)
        kind = "text/event-stream" if self.server.is_stream else "application/json"
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[[Any], Provider]]:
    """Start servers that end with the test."""
    servers: list[Provider] = []

    def start(answer: Any) -> Provider:
        servers.append(Provider(answer))
        threading.Thread(target=servers[-1].serve_forever, args=(SOON,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_every_strands_provider_is_listed() -> None:
    """A module of a later Strands version makes this fail until it is listed."""
    modules = {
        each.name
        for each in pkgutil.iter_modules(strands.models.__path__)
        if not each.name.startswith("_") and each.name not in ("model", "routing")
    }
    assert modules == set(PROVIDERS)


MEASURED = ("anthropic", "bedrock", "llamacpp")
"""Models that get structured output from their own `stream`, which reports usage."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROVIDERS)
def test_structured_output_is_one_counted_request(
    name: str, serve: Callable[[Any], Provider], events: list[Event]
) -> None:
    """Every request that reached the provider was counted, and none twice."""
    answer, make = PROVIDERS[name]
    server = serve(answer)
    model = make(server.url)
    enable(observers=[events.append])
    agent = asking(lambda: extract(model))
    agent("go")
    counted = [each for each in calls(events) if each.side]
    if name == "llamaapi":  # has none: it raises before any request
        assert (server.requests, counted) == ([], [])
        return
    assert len(server.requests) == len(counted) == 1, agent.messages
    (call,) = counted
    assert call.provider == name
    if name in MEASURED:
        assert (call.kind, call.usage.total) == ("measured", 100)
    else:
        assert (call.kind, call.estimated) == ("estimated", True)
        assert (call.usage.input > 20, call.usage.output > 2) == (True, True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROVIDERS)
def test_spent_budget_refuses_structured_output(
    name: str, serve: Callable[[Any], Provider]
) -> None:
    """No request reaches the provider."""
    answer, make = PROVIDERS[name]
    server = serve(answer)
    model = make(server.url)
    enable(Limits(max_model_calls=1))
    asking(lambda: extract(model))("go")
    assert server.requests == []
