"""Streams: left at every event, read in their own context, and halted."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from strands import Agent, tool
from strands.handlers import PrintingCallbackHandler
from strands.hooks import AfterInvocationEvent
from strands.multiagent import GraphBuilder, Swarm

import otel_limits
from otel_limits import Event, Limits, ModelCall, Started, Stop, enable
from otel_limits.bindings.strands.patches import keep_apart
from otel_limits.runs.current import CURRENT, TASK_SCOPE
from otel_limits.runs.registry import LIVE
from otel_limits.testing import FakeTime, ScriptedModel, endless, fails, says, uses

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


# --- the context of a reader ----------------------------------------------------------------------


@tool
async def look() -> str:
    """Look."""
    await asyncio.sleep(0)
    return "nothing"


def agent_of(name: str, *answers: Any) -> Agent:
    """Make an agent with a script; by default it looks once and answers."""
    script = answers or (uses("look"), says("done"))
    return Agent(
        model=ScriptedModel(itertools.cycle(script)), tools=[look], name=name, callback_handler=None
    )


def graph() -> Any:
    """Make a graph of two nodes, one after the other."""
    builder = GraphBuilder()
    builder.add_node(agent_of("first"), "first")
    builder.add_node(agent_of("second"), "second")
    builder.add_edge("first", "second")
    builder.set_entry_point("first")
    builder.set_max_node_executions(5)
    return builder.build()


def nested() -> Any:
    """Make an agent whose tool is an agent."""
    child = agent_of("child").as_tool(name="child", description="Ask.")
    ask = uses("child", arguments={"input": "go"})
    return Agent(
        model=ScriptedModel(itertools.cycle((ask, says("done")))),
        tools=[child],
        name="parent",
        callback_handler=None,
    )


STREAMS: dict[str, Callable[[], Any]] = {
    "agent": lambda: agent_of("agent"),
    "agent as a tool": nested,
    "graph": graph,
    "swarm": lambda: Swarm([agent_of("first"), agent_of("second")]),
}


def context_now() -> tuple[Any, ...]:
    """Return what the current task works for, and its span and baggage."""
    return CURRENT.get(), TASK_SCOPE.get(), otel_context.get_current()


def parents(events: list[Event]) -> dict[str, str | None]:
    """Return the parent's name of each invocation."""
    started = [event.invocation for event in events if isinstance(event, Started)]
    names = {each.id: each.agent for each in started}
    return {each.agent: names.get(each.parent_id or "") for each in started}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_reader_between_events_has_its_own_context(make: Callable[[], Any]) -> None:
    """After each event and after the last, it has the same span, baggage and parent as before."""
    enable(Limits(max_turns=9), tree=Limits(max_turns=99))
    tracer = trace.get_tracer("application")
    wrong: list[int] = []

    async def read() -> int:
        number = 0
        with tracer.start_as_current_span("request"):
            otel_context.attach(baggage.set_baggage("tenant", "one"))
            before = context_now()
            async for _ in make().stream_async("go"):
                number += 1
                if context_now() != before:
                    wrong.append(number)
            assert context_now() == before
        return number

    assert asyncio.run(read()) > 20
    assert wrong == []


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("is_closed", [False, True], ids=["abandoned", "closed"])
def test_reader_that_stops_reading_has_its_own_context(
    make: Callable[[], Any], *, is_closed: bool
) -> None:
    """Leaving a stream at any event, open or closed, leaves nothing in the reader's context."""
    enable(Limits(max_turns=9), tree=Limits(max_turns=99))

    async def leave(at: int) -> None:
        before = context_now()
        stream = make().stream_async("go")
        for _ in range(at):
            await anext(stream)
        if is_closed:
            await stream.aclose()
        assert context_now() == before

    for at in (1, 2, 5, 9, 14, 20):
        asyncio.run(leave(at))


def test_conversations_of_one_task_are_separate_trees(events: list[Event]) -> None:
    """A long-lived task that leaves each stream at its first sentence starts a tree each time."""
    enable(tree=Limits(max_turns=3), observers=[events.append])

    async def serve() -> list[Any]:
        kept = []
        for number in range(12):
            stream = agent_of(f"agent{number}", says("One. Two.")).stream_async("go")
            kept.append(stream)
            async for event in stream:
                assert "Halt" not in str(event)
                if "data" in event:
                    break
        return kept

    kept = asyncio.run(serve())
    assert parents(events) == {f"agent{number}": None for number in range(len(kept))}
    roots = {event.invocation.root_id for event in events if isinstance(event, Started)}
    assert len(roots) == 12


def in_task(agent: Agent) -> None:
    """Call an agent in a thread that has no Python context, only OpenTelemetry's."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(agent, "go").result()


async def awaited(agent: Agent) -> None:
    """Call an agent in the reader's task."""
    await agent.invoke_async("go")


@pytest.mark.parametrize("call", [in_task, awaited])
def test_agent_called_between_events_belongs_to_the_reader(
    call: Callable[[Agent], Any], events: list[Event]
) -> None:
    """Whether the reader awaits it or hands it to a thread, it starts another tree."""
    enable(Limits(max_turns=5), tree=Limits(max_turns=9), observers=[events.append])

    async def read() -> None:
        number = 0
        async for event in agent_of("read").stream_async("go"):
            if "message" in event:
                number += 1
                outcome = call(agent_of(f"other{number}"))
                if outcome is not None:
                    await outcome

    asyncio.run(read())
    found = parents(events)
    assert len(found) > 2
    assert set(found.values()) == {None}


def test_agent_called_by_a_reading_tool_belongs_to_the_agent_of_the_tool(
    events: list[Event],
) -> None:
    """The reader's own context may be that of a tool: the stream it reads is not its parent."""
    enable(Limits(max_turns=5), tree=Limits(max_turns=9), observers=[events.append])

    @tool
    async def read() -> str:
        """Read one agent's stream, and ask another one in between."""
        async for event in agent_of("read").stream_async("go"):
            if "message" in event:
                await agent_of("between").invoke_async("go")
                break
        await agent_of("after").invoke_async("go")
        return "read"

    outer = Agent(
        model=ScriptedModel([uses("read"), says("done")]),
        tools=[read],
        name="outer",
        callback_handler=None,
    )
    outer("go")
    assert parents(events) == {"outer": None, "read": "outer", "between": "outer", "after": "outer"}


def test_span_started_between_events_belongs_to_the_reader(exporter: Any) -> None:
    """The application's span for handling an event is not within the agent's span."""
    enable(Limits(max_turns=5))
    tracer = trace.get_tracer("application")

    async def read() -> None:
        with tracer.start_as_current_span("request"):
            async for _ in agent_of("read").stream_async("go"):
                with tracer.start_as_current_span("handle"):
                    pass

    asyncio.run(read())
    spans = exporter.get_finished_spans()
    (request,) = [span for span in spans if span.name == "request"]
    handled = [span for span in spans if span.name == "handle"]
    assert len(handled) > 10
    assert {span.parent.span_id for span in handled} == {request.context.span_id}


def test_agent_keeps_its_own_context_while_the_reader_changes_its_own(events: list[Event]) -> None:
    """Another task may read each event, with other baggage: tools still see the agent's."""
    seen: list[Any] = []

    @tool
    async def ask() -> str:
        """Note the baggage, and call a helper."""
        seen.append(baggage.get_baggage("tenant"))
        return str(await agent_of("helper").invoke_async("go"))

    enable(Limits(max_turns=5), observers=[events.append])
    agent = Agent(
        model=ScriptedModel([uses("ask"), says("done")]),
        tools=[ask],
        name="asks",
        callback_handler=None,
    )

    async def next_of(stream: AsyncGenerator[Any, None]) -> Any:
        return await anext(stream, None)

    async def read() -> None:
        otel_context.attach(baggage.set_baggage("tenant", "one"))
        stream: Any = agent.stream_async("go")
        await anext(stream)
        otel_context.attach(baggage.set_baggage("tenant", "two"))
        while await contextvars.Context().run(asyncio.ensure_future, next_of(stream)):
            pass
        assert baggage.get_baggage("tenant") == "two"

    asyncio.run(read())
    assert seen == ["one"]
    assert parents(events) == {"asks": None, "helper": "asks"}


# Python itself complains: a generator destroyed like that cannot close the inner one.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_stream_destroyed_during_a_wait_changes_no_other_context() -> None:
    """A task that is destroyed while it waits is closed wherever the garbage collector runs."""

    @keep_apart
    async def stream() -> AsyncGenerator[str, None]:
        await asyncio.sleep(0)
        yield "event"

    step: Any = anext(stream())
    contextvars.copy_context().run(step.send, None)
    before = context_now()
    step.close()
    assert context_now() == before


# --- a halt in a stream ---------------------------------------------------------------------------

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
