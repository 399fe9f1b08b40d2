"""Makes the fixtures again: spans of the libraries themselves, of calls to a loopback server.

In an environment of its own, as these libraries are no dependency of ours:

    pip install openai anthropic opentelemetry-sdk openinference-instrumentation-openai \
        openinference-instrumentation-anthropic opentelemetry-instrumentation-openai \
        opentelemetry-instrumentation-anthropic
    PYTHONPATH=. python tests/emitters/make.py
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.ledger.otlp import line

HERE = Path(__file__).parent

OPENAI = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt-4o-2024-08-06",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hi"}}
    ],
    "usage": {
        "prompt_tokens": 1_200,
        "completion_tokens": 30,
        "total_tokens": 1_230,
        "prompt_tokens_details": {"cached_tokens": 1_000},
    },
}
ANTHROPIC = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-sonnet-4-5-20250929",
    "content": [{"type": "text", "text": "Hi"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 50,
        "cache_read_input_tokens": 1_000,
        "cache_creation_input_tokens": 150,
        "output_tokens": 30,
    },
}
EMITTERS = {
    "openinference-openai": ("openinference.instrumentation.openai", "OpenAIInstrumentor"),
    "openinference-anthropic": ("openinference.instrumentation.anthropic", "AnthropicInstrumentor"),
    "openllmetry-openai": ("opentelemetry.instrumentation.openai", "OpenAIInstrumentor"),
    "openllmetry-anthropic": ("opentelemetry.instrumentation.anthropic", "AnthropicInstrumentor"),
}


class Vendor(BaseHTTPRequestHandler):
    """Answers as both vendors do."""

    def do_POST(self) -> None:
        """Answer any request."""
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps(ANTHROPIC if "messages" in self.path else OPENAI).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def ask(name: str, address: str) -> None:
    """Make one call."""
    if name.endswith("openai"):
        client = import_module("openai").OpenAI(api_key="k", base_url=f"{address}/v1")
        message = {"role": "user", "content": "Hello"}
        client.chat.completions.create(model="gpt-4o", messages=[message])
    else:
        client = import_module("anthropic").Anthropic(api_key="k", base_url=address)
        client.messages.create(
            model="claude-sonnet-4-5",
            max_tokens=100,
            messages=[{"role": "user", "content": "Hello"}],
        )


def main() -> None:
    """Write one file for each instrumentation."""
    server = HTTPServer(("127.0.0.1", 0), Vendor)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, (module, instrumentor) in EMITTERS.items():
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        instrumentation = getattr(import_module(module), instrumentor)()
        instrumentation.instrument(tracer_provider=provider)
        with provider.get_tracer("app").start_as_current_span("request"):
            ask(name, f"http://127.0.0.1:{server.server_port}")
        instrumentation.uninstrument()
        (HERE / f"{name}.jsonl").write_text(line(exporter.get_finished_spans()))
    server.shutdown()


if __name__ == "__main__":
    main()
