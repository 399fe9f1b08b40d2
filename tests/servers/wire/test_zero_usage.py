"""Usage of 0 tokens in every framework: estimated for an answer, believed for none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from agents import Agent as SdkAgent
from agents import Runner, function_tool
from langchain.agents import create_agent
from strands import Agent

from otel_limits import Limits, ModelCall, enable, stop_of
from tests.wire import agents_models, chat_models, formats, models
from tests.wire.formats import Answer
from tests.wire.server import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits import Event
    from tests.wire.server import Vendor

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the vendors' clients

ZERO = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
NULL = dict.fromkeys(ZERO)
WORDS = ("word " * 200,)
LIMITS = Limits(max_turns=3)


def search() -> str:
    """Find nothing."""
    return ""


def reply(answer: Answer, *, is_streamed: bool) -> Reply:
    """Answer in OpenAI's format."""
    return chat_models.reply("ChatOpenAI", answer, is_streamed=is_streamed)


def ask_strands(url: str) -> Any:
    """Call Strands' agent, which always streams."""
    return Agent(model=models.openai(url), tools=[], callback_handler=None)("How much?")


def ask_langchain(url: str) -> Any:
    """Call LangChain's agent."""
    graph: Any = create_agent(chat_models.openai(url), [search], name="a")
    return graph.invoke({"messages": "How much?"})


async def _ask_langchain(url: str) -> Any:
    graph: Any = create_agent(chat_models.openai(url), [search], name="a")
    return await graph.ainvoke({"messages": "How much?"})


def stream_langchain(url: str) -> Any:
    """Stream LangChain's agent."""
    graph: Any = create_agent(chat_models.openai(url), [search], name="a")
    return list(graph.stream({"messages": "How much?"}, stream_mode="messages"))


async def _ask_sdk(url: str) -> Any:
    agent = SdkAgent(name="a", model=agents_models.chat(url), tools=[function_tool(search)])
    return await Runner.run(agent, "How much?")


async def _stream_sdk(url: str) -> Any:
    agent = SdkAgent(name="a", model=agents_models.chat(url), tools=[function_tool(search)])
    result = Runner.run_streamed(agent, "How much?")
    return [event async for event in result.stream_events()]


Way = tuple[bool, "Callable[[str], Any]"]

WAYS: dict[str, Way] = {
    "strands": (True, ask_strands),
    "langchain": (False, ask_langchain),
    "langchain, async": (False, _ask_langchain),
    "langchain, streamed": (True, stream_langchain),
    "sdk": (False, _ask_sdk),
    "sdk, streamed": (True, _stream_sdk),
}
"""Whether the vendor streams, and how to call."""

TOLD = {name: way for name, way in WAYS.items() if not name.startswith("sdk")}
"""Those in which a guardrail's block differs from an answer."""


def first_call(
    way: Way, answer: Answer, vendor: Vendor, loop: asyncio.AbstractEventLoop
) -> ModelCall:
    """Call once, and return the first event."""
    is_streamed, ask = way
    answers = [answer, Answer(usages=(), parts=("Done.",))]
    vendor.replies[:] = [reply(each, is_streamed=is_streamed) for each in answers]
    events: list[Event] = []
    enable(LIMITS, observers=[events.append])
    result = ask(vendor.url)
    if asyncio.iscoroutine(result):
        loop.run_until_complete(result)
    return next(event for event in events if isinstance(event, ModelCall))


CASES = [
    *((way, ZERO) for way in WAYS),
    # The other clients reject nulls themselves.
    *((way, NULL) for way in ("langchain", "langchain, async")),
]


@pytest.mark.parametrize(("way", "usage"), CASES)
def test_zeros_for_an_answer_are_estimated(
    way: str, usage: Any, vendor: Vendor, loop: asyncio.AbstractEventLoop
) -> None:
    """200 words cannot have cost nothing, whichever framework passes on the zeros."""
    call = first_call(WAYS[way], Answer(usages=(usage,), parts=WORDS), vendor, loop)
    assert (call.kind, call.estimated) == ("estimated", True)
    assert call.usage.input > 0
    assert 180 < call.usage.output < 260


@pytest.mark.parametrize("way", [each for each in WAYS if each != "strands"])
def test_zeros_for_a_tool_call_are_estimated(
    way: str, vendor: Vendor, loop: asyncio.AbstractEventLoop
) -> None:
    """Also if the call has no text and no arguments."""
    answer = Answer(usages=(ZERO,), parts=(), tool=("search", "{}"))
    call = first_call(WAYS[way], answer, vendor, loop)
    assert (call.kind, call.estimated, call.usage.output > 0) == ("estimated", True, True)


@pytest.mark.parametrize("way", WAYS)
def test_zeros_for_an_empty_answer_are_believed(
    way: str, vendor: Vendor, loop: asyncio.AbstractEventLoop
) -> None:
    """Nothing was written, so nothing contradicts the zeros."""
    call = first_call(WAYS[way], Answer(usages=(ZERO,), parts=("",)), vendor, loop)
    assert (call.kind, call.usage.total) == ("zero_token", 0)


@pytest.mark.parametrize("way", TOLD)
def test_zeros_of_a_guardrail_are_believed(
    way: str, vendor: Vendor, loop: asyncio.AbstractEventLoop
) -> None:
    """The text of a block was not written by the model."""
    answer = Answer(usages=(ZERO,), parts=("I cannot help with that.",), is_filtered=True)
    call = first_call(TOLD[way], answer, vendor, loop)
    assert (call.kind, call.usage.total) == ("zero_token", 0)


def test_token_budget_halts_behind_a_gateway_that_reports_zeros(vendor: Vendor) -> None:
    """A runaway agent must not run forever because a gateway counts nothing."""
    answer = Answer(usages=(ZERO,), parts=WORDS, tool=("search", "{}"))
    vendor.replies[:] = [Reply(formats.sse_with_end(*formats.openai_chat(answer)))] * 41
    enable(Limits(max_token_budget=5_000, max_turns=40))
    agent = Agent(model=models.openai(vendor.url), callback_handler=None)
    stop = stop_of(agent("go"))
    assert stop is not None
    assert stop.reason == "max_token_budget"
    assert len(vendor.requests) < 10
