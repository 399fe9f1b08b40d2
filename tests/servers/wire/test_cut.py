"""Answers that end before the vendor reports usage: the streamed part counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent

import otel_limits
from otel_limits import Limits, ModelCall, Stop, enable
from tests.wire.providers import BY_NAME
from tests.wire.server import Reply
from tests.wire.usages import Bill

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits import Event
    from otel_limits.testing import FakeTime
    from tests.wire.server import Vendor

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the vendors' clients

SENTENCE = "The ships left the harbour at dawn, and the quay was silent all morning. "
LONG = SENTENCE * 486
"""33,534 characters: 7,777 tokens, by `o200k_base`."""
TOKENS = 7_777
VENDORS = (
    "OpenAI Chat",
    "OpenAI Responses",
    "Anthropic",
    "Bedrock",
    "Gemini",
    "Mistral",
    "Ollama",
    "LiteLLM, xAI",
    "LiteLLM, Vertex",
    "Writer",
    "SageMaker",
)
"""All but the class for llama.cpp, which passes on nothing before the end, and the one for the
Llama API, which blocks its event loop."""


class Reader:
    """Reads an answer, and releases the server when the invocation ends."""

    def __init__(self, vendor: Vendor, name: str) -> None:
        self.vendor = vendor
        self.events: list[Event] = []
        self.has_read = False
        self.provider = BY_NAME[name]
        self.on_text: Callable[[], object] = lambda: None

    def follow(self, event: Event) -> None:
        """Receive an event."""
        self.events.append(event)
        if isinstance(event, Stop):
            self.vendor.is_over.set()

    def agent(self) -> Agent:
        """Make an agent whose vendor sends `LONG` and then hangs."""
        self.events.clear()
        self.vendor.is_over.clear()
        self.vendor.replies[:] = [self.provider.hangs(Bill(input=13, output=19), LONG)]

        def record(**event: Any) -> None:
            if event.get("data", "no text") in LONG and not self.has_read:  # not a halt's text
                self.has_read = True
                self.on_text()

        model = self.provider.make(self.vendor.url)
        return Agent(model=model, callback_handler=record, retry_strategy=None, name="reader")

    def counted(self) -> ModelCall:
        """The only call that was counted."""
        (call,) = (event for event in self.events if isinstance(event, ModelCall))
        return call


@pytest.fixture(params=VENDORS)
def reader(request: pytest.FixtureRequest, vendor: Vendor) -> Reader:
    """A reader of each vendor."""
    return Reader(vendor, request.param)


def check(call: ModelCall) -> None:
    """The request and the streamed part are billed, but neither is reported."""
    assert call.estimated
    assert call.kind in ("estimated", "failed")
    assert 6 <= call.usage.input <= 26
    assert 0.8 * TOKENS <= call.usage.output <= 1.6 * TOKENS


def test_deadline_counts_streamed_part(reader: Reader, fake_time: FakeTime) -> None:
    """`max_duration` ends a hanging answer."""
    enable(Limits(max_duration_seconds=30), observers=[reader.follow])
    reader.on_text = lambda: fake_time.advance(30)
    assert reader.agent()("Describe the harbour.").stop_reason == "max_duration"
    check(reader.counted())


def test_kill_counts_streamed_part(reader: Reader) -> None:
    """`kill` ends an answer that has started."""
    enable(observers=[reader.follow])
    reader.on_text = lambda: otel_limits.kill(agent="reader")
    assert reader.agent()("Describe the harbour.").stop_reason == "killed"
    check(reader.counted())


def test_closed_stream_counts_streamed_part(reader: Reader) -> None:
    """An application leaves the stream once it has seen enough."""

    async def read() -> None:
        stream: Any = reader.agent().stream_async("Describe the harbour.")
        async for event in stream:
            if "data" in event:
                break
        await stream.aclose()

    enable(observers=[reader.follow])
    asyncio.run(read())
    check(reader.counted())


def test_failing_vendor_counts_streamed_part(reader: Reader) -> None:
    """An answer is interrupted after it has started."""
    enable(observers=[reader.follow])
    agent = reader.agent()
    reader.vendor.replies[0].hangs, reader.vendor.replies[0].breaks_off = False, True
    try:
        agent("Describe the harbour.")
    except Exception:
        logging.getLogger(__name__).debug("The call failed", exc_info=True)
    check(reader.counted())


@pytest.mark.parametrize("name", ["Gemini", "Ollama", "LiteLLM, xAI", "LiteLLM, Vertex", "Bedrock"])
def test_unreachable_vendor_counts_nothing(name: str, events: list[Event], vendor: Vendor) -> None:
    """Undelivered answers are not billed, even if the class starts streaming before the request."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    model = BY_NAME[name].make(vendor.url if name == "LiteLLM, Vertex" else nowhere)
    if name == "LiteLLM, Vertex":  # its token request still reaches the server
        client_args: Any = vars(model)["client_args"]
        client_args["api_base"] = nowhere
    enable(observers=[events.append])
    with pytest.raises(Exception):  # noqa: B017, PT011  each client has its own error
        Agent(model=model, callback_handler=None, retry_strategy=None)("Describe the harbour.")
    (call,) = (event for event in events if isinstance(event, ModelCall))
    assert (call.kind, call.estimated, call.usage.total) == ("failed", False, 0)


@pytest.mark.parametrize("name", ["Anthropic", "Bedrock", "Gemini", "OpenAI Chat", "SageMaker"])
def test_unreadable_answer_is_counted(name: str, events: list[Event], vendor: Vendor) -> None:
    """An error after the status 200 is billed, even if it is a proxy's page."""
    enable(observers=[events.append])
    vendor.replies[:] = [Reply([b"<html>what is no answer of a vendor</html>"], "text/html")]
    model = BY_NAME[name].make(vendor.url)
    with contextlib.suppress(Exception):
        Agent(model=model, callback_handler=None, retry_strategy=None)("Describe the harbour.")
    (call,) = [event for event in events if isinstance(event, ModelCall)]
    assert call.kind in ("failed", "estimated")
    assert (call.estimated, call.usage.input > 5, call.usage.output) == (True, True, 0)
