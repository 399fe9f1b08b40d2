"""Streams that are not read to the end: dropped, closed or cancelled at every event."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool

import otel_limits
from otel_limits import Event, Limits, ModelCall, Started, Stop, enable
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from strands.types.streaming import StreamEvent

    from tests.conftest import MakeAgent

pytestmark = pytest.mark.usefixtures("source")

Leave = Callable[[Agent, int], Coroutine[Any, Any, None]]


class PausingModel(ScriptedModel):
    """Yields to other tasks before every chunk, as a provider's socket does."""

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer of the script."""
        async for event in super().stream(*arguments, **named):
            await asyncio.sleep(0)
            yield event


@tool
async def search(query: str = "") -> str:
    """Search for a query."""
    await asyncio.sleep(0)
    return "nothing found"


async def break_off(agent: Agent, at: int) -> None:
    """Leave the loop over the stream, and the stream to the garbage collector."""
    number = 0
    async for _ in agent.stream_async("go"):
        number += 1
        if number == at:
            break


async def close(agent: Agent, at: int) -> None:
    """Close the stream, as a web framework does when its client disconnects."""
    stream: Any = agent.stream_async("go")
    assert isinstance(stream, AsyncGenerator)
    for _ in range(at):
        await anext(stream, None)
    await stream.aclose()


async def cancel_inside(agent: Agent, at: int) -> None:
    """Cancel the task while the agent works after event `at`."""

    async def read() -> None:
        number = 0
        async for _ in agent.stream_async("go"):
            number += 1
            if number == at:
                task.cancel()

    task = asyncio.ensure_future(read())
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def cancel_outside(agent: Agent, at: int) -> None:
    """Cancel the task while it handles event `at` and the agent waits."""

    async def read() -> None:
        number = 0
        async for _ in agent.stream_async("go"):
            number += 1
            if number == at:
                task.cancel()
                await asyncio.sleep(0)

    task = asyncio.ensure_future(read())
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture(params=[break_off, close, cancel_inside, cancel_outside])
def leave(request: pytest.FixtureRequest) -> Leave:
    """Every way to leave a stream."""
    way: Leave = request.param
    return way


def runaway(make_agent: MakeAgent) -> Agent:
    """Make an agent that requests one more search forever."""
    return make_agent(PausingModel(endless(uses("search"))), tools=[search])


def count_events(make_agent: MakeAgent) -> int:
    """Number of events of a whole stream."""

    async def count() -> int:
        return sum([1 async for _ in runaway(make_agent).stream_async("go")])

    return asyncio.run(count())


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return loggers and messages since the last call."""
    gc.collect(0)
    lines = [(r.name, r.getMessage()) for r in caplog.records if r.levelname != "DEBUG"]
    caplog.clear()
    return lines


def test_abandoned_stream_leaves_nothing_behind(
    leave: Leave, make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """At every event: no active invocation, one stop, and only the halt in our log."""
    events: list[Event] = []
    enable(Limits(max_turns=2), observers=[events.append])
    number = count_events(make_agent)
    assert number > 20
    for at in range(1, number + 1):
        events.clear()
        caplog.clear()
        asyncio.run(leave(runaway(make_agent), at))
        ours = [text for name, text in logged(caplog) if name.startswith("otel_limits")]
        assert len(LIVE) == 0, at
        assert [text for text in ours if "halted by" not in text] == [], at
        kinds = [type(event) for event in events if isinstance(event, Started | Stop)]
        assert kinds == [Started, Stop], at


def every_other(end: int, source: str) -> range:
    """Return every second event before `end`: the odd ones with spans, the even ones without."""
    return range(1 if source == "spans" else 2, end, 2)


def test_abandoned_stream_with_action_raise_is_silent(
    leave: Leave, make_agent: MakeAgent, source: str
) -> None:
    """With `raise`, a stream that was left early has no caller to raise to."""
    enable(Limits(max_turns=2), action="halt")
    number = count_events(make_agent)
    otel_limits.disable()
    enable(Limits(max_turns=2), action="raise")
    # Without the 7 events of the end user's text.
    for at in every_other(number - 2 - 7, source):
        asyncio.run(leave(runaway(make_agent), at))
        assert len(LIVE) == 0, at


def test_abandoned_stream_adds_no_log_lines(
    leave: Leave, make_agent: MakeAgent, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    """We add nothing to what Strands and OpenTelemetry log about an abandoned stream."""

    def run(at: int) -> list[tuple[str, str]]:
        answers = [uses("search"), says("done")]
        asyncio.run(leave(make_agent(PausingModel(answers), tools=[search]), at))
        return sorted((name, text.split(" at 0x")[0]) for name, text in logged(caplog))

    indices = every_other(25, source)
    before = {at: run(at) for at in indices}
    enable(Limits(max_turns=9))
    assert {at: run(at) for at in indices} == before


def test_agent_of_abandoned_stream_can_be_called_again(leave: Leave, make_agent: MakeAgent) -> None:
    """The next invocation inherits nothing from the abandoned one."""
    enable(Limits(max_turns=2))
    for at in (1, 5, 12, 20):
        agent = runaway(make_agent)
        asyncio.run(leave(agent, at))
        assert isinstance(agent.model, ScriptedModel)
        calls = agent.model.calls
        agent.messages.clear()
        assert str(agent("x").stop_reason) == "max_turns"
        assert agent.model.calls == calls + 2


def test_interrupted_response_is_counted(leave: Leave, make_agent: MakeAgent, source: str) -> None:
    """An in-flight call is recorded as failed, with its input if chunks had arrived."""
    events: list[Event] = []
    enable(observers=[events.append])
    agent = make_agent(PausingModel([says("a long story")]))
    asyncio.run(leave(agent, 6))
    (call,) = [event for event in events if isinstance(event, ModelCall)]
    (stop,) = [event for event in events if isinstance(event, Stop)]
    assert (call.kind, call.estimated, call.usage.input > 0) == ("failed", True, True)
    assert (stop.reason, stop.usage) == ("aborted", call.usage)


def test_unread_stream_is_not_an_invocation(make_agent: MakeAgent) -> None:
    """Requesting a stream without reading it starts nothing."""
    events: list[Event] = []
    enable(observers=[events.append])
    stream = make_agent(ScriptedModel([])).stream_async("go")
    assert isinstance(stream, AsyncGenerator)
    asyncio.run(stream.aclose())
    assert not [event for event in events if isinstance(event, (Started, Stop))]


def test_timeout_around_agent_leaves_nothing_behind(make_agent: MakeAgent) -> None:
    """`asyncio.wait_for` cancels an invocation in the middle of a tool."""
    enable(Limits(max_turns=3))

    async def run() -> None:
        hangs = asyncio.Event()

        @tool
        async def hang() -> str:
            """Never return."""
            hangs.set()
            await asyncio.Event().wait()
            return "never"

        agent = make_agent(ScriptedModel(endless(uses("hang"))), tools=[hang])
        call = asyncio.ensure_future(agent.invoke_async("go"))
        await hangs.wait()
        await asyncio.wait_for(call, timeout=0)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(run())
    assert len(LIVE) == 0
