"""A halt as the readers of a stream get it: the end user's text, once, within a valid stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent
from strands.handlers import PrintingCallbackHandler
from strands.hooks import AfterInvocationEvent

import otel_limits
from otel_limits import Limits, enable
from otel_limits.testing import FakeTime, ScriptedModel, endless, fails, says, uses

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from strands.types.streaming import StreamEvent

    from tests.conftest import MakeAgent

pytestmark = pytest.mark.usefixtures("source")

STEPS = "This request could not be completed because it took too many steps."
TIME = "This request could not be completed because it took too long."

TEXT_EVENTS = ["messageStart", "contentBlockStart", "contentBlockDelta", "data"]
TEXT_EVENTS += ["contentBlockStop", "messageStop", "message"]
"""An answer as Strands streams it, without its metadata."""


def read(agent: Agent, **arguments: Any) -> list[dict[str, Any]]:
    """Read a whole stream, also of an agent that raises."""
    events: list[dict[str, Any]] = []

    async def collect() -> None:
        async for event in agent.stream_async("go", **arguments):
            events.append(event)  # noqa: PERF401  kept if the stream raises

    try:
        asyncio.run(collect())
    except otel_limits.LimitReachedError as error:
        events.append({"raised": error})
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Name the parts of answers in a stream: chunks, texts and messages of the assistant."""
    found: list[str] = []
    for event in events:
        if "event" in event:
            found += event["event"]
        elif "data" in event:
            found.append("data")
        elif event.get("message", {}).get("role") == "assistant":
            found.append("message")
    return [kind for kind in found if kind != "metadata"]


def texts(events: list[dict[str, Any]]) -> list[str]:
    """Return the texts of a stream."""
    return [event["data"] for event in events if "data" in event]


def test_halt_after_tools_streams_an_answer(make_agent: MakeAgent) -> None:
    """A chat page shows the text like any answer, and then gets the message."""
    enable(Limits(max_turns=2))
    agent = make_agent(ScriptedModel(endless(uses("search"))))
    events = read(agent)
    assert (kinds(events)[-7:], texts(events)) == (TEXT_EVENTS, [STEPS])
    assert [event["message"] for event in events if "message" in event][-1] is agent.messages[-1]
    assert events[-1]["result"].stop_reason == "max_turns"


def test_refused_call_streams_an_answer(make_agent: MakeAgent) -> None:
    """So does a halt before a model call, here the first of a second leg."""
    enable(Limits(max_turns=1))
    agent = make_agent(ScriptedModel(endless(says("hello"))))
    left = iter(["once more"])

    def resume(event: AfterInvocationEvent) -> None:
        event.resume = next(left, None)

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    events = read(agent)
    assert (kinds(events)[-7:], texts(events)[-1]) == (TEXT_EVENTS, STEPS)


class Slow(ScriptedModel):
    """Streams the start of an answer and hangs."""

    def __init__(self, *chunks: Any, on_hang: Callable[[], object]) -> None:
        super().__init__(())
        self.chunks, self.on_hang = chunks, on_hang

    async def stream(self, *_: Any, **__: Any) -> AsyncIterable[StreamEvent]:
        """Stream the chunks, and then nothing."""
        self.calls += 1
        for chunk in self.chunks:
            yield chunk
        self.on_hang()
        await asyncio.Event().wait()


START: Any = {"messageStart": {"role": "assistant"}}
BLOCK: Any = {"contentBlockStart": {"start": {}}}
DELTA: Any = {"contentBlockDelta": {"delta": {"text": "Once"}}}


@pytest.mark.parametrize(
    ("chunks", "expected", "shown"),
    [
        ((), TEXT_EVENTS, [TIME]),
        ((START,), TEXT_EVENTS, [TIME]),
        (
            (START, BLOCK, DELTA),
            [*TEXT_EVENTS[:4], "contentBlockStop", *TEXT_EVENTS[1:]],
            ["Once", f"\n{TIME}"],
        ),
    ],
    ids=["before", "message", "block"],
)
def test_cut_response_is_closed_first(
    make_agent: MakeAgent,
    chunks: Any,
    expected: list[str],
    shown: list[str],
    fake_time: FakeTime,
) -> None:
    """The text is a separate block and line, in the message that the model began."""
    enable(Limits(max_duration_seconds=1))
    events = read(make_agent(Slow(*chunks, on_hang=lambda: fake_time.advance(1))))
    assert (kinds(events), texts(events)) == (expected, shown)
    assert events[-1]["result"].stop_reason == "max_duration"


@pytest.mark.parametrize("is_slow", [True, False])
def test_raised_halt_streams_nothing(
    make_agent: MakeAgent, fake_time: FakeTime, *, is_slow: bool
) -> None:
    """The exception is the answer."""
    caps: Any = {"max_duration_seconds": 1} if is_slow else {"max_turns": 2}
    enable(Limits(**caps), action="raise")
    slow = Slow(START, BLOCK, DELTA, on_hang=lambda: fake_time.advance(1))
    model = slow if is_slow else ScriptedModel(endless(uses("search")))
    *events, last = read(make_agent(model))
    assert "raised" in last
    assert "completed" not in "".join(texts(events))
    messages = [event["message"] for event in events if "message" in event]
    assert not any(map(otel_limits.is_synthetic, messages))


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (says("in short"), ["in short", f"\n{STEPS}"]),
        (says(" "), [" ", STEPS]),
        (uses("search"), [STEPS]),
        (fails(OSError("gone")), [STEPS]),
    ],
    ids=["answer", "blank", "tool-use", "failed"],
)
def test_last_answer_streams_the_text_once(
    make_agent: MakeAgent, last: Any, expected: list[str]
) -> None:
    """Below an answer, or instead of one."""
    enable(Limits(max_turns=1), action="wrap_up")
    agent = make_agent(ScriptedModel([uses("search"), last]))
    events = read(agent)
    assert texts(events) == expected
    assert [event["message"] for event in events if "message" in event][-1] is agent.messages[-1]
    assert kinds(events).count("messageStart") == kinds(events).count("messageStop")


def test_text_of_a_sub_agent_stays_in_its_stream(make_agent: MakeAgent) -> None:
    """The reader of the parent gets it as an event of the tool, not as an answer."""
    enable(Limits(max_turns=2))
    child = make_agent(ScriptedModel(endless(uses("search"))), name="child")
    model = ScriptedModel([uses("child"), says("done")])
    events = read(Agent(model=model, tools=[child.as_tool()], callback_handler=None))
    assert texts(events) == ["done"]
    inner = [each["tool_stream_event"]["data"] for each in events if "tool_stream_event" in each]
    assert texts(inner) == [STEPS]


def test_delegated_text_is_streamed_once(make_agent: MakeAgent) -> None:
    """The stream of a delegation is that of its parent."""
    enable(Limits(max_turns=2))
    child = make_agent(ScriptedModel(endless(uses("search"))), name="child")
    model = ScriptedModel([uses("child")])
    parent = Agent(model=model, tools=[child.as_tool(delegate=True)], callback_handler=None)
    assert texts(read(parent)) == [STEPS]


def test_callback_handler_prints_the_text(
    make_agent: MakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal shows why the agent stopped."""
    enable(Limits(max_turns=1))
    agent = make_agent(ScriptedModel(endless(uses("search"))))
    agent.callback_handler = PrintingCallbackHandler()
    agent("go")
    assert capsys.readouterr().out.rstrip().endswith(STEPS)
