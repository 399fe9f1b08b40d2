"""Readers of streams: between two events their context is their own, not that of the agent."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from strands import Agent, tool
from strands.multiagent import GraphBuilder, Swarm

from otel_limits import Event, Limits, Started, enable
from otel_limits.bindings.strands.patches import keep_apart
from otel_limits.runs.current import CURRENT, TASK_SCOPE
from otel_limits.testing import ScriptedModel, says, uses

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

pytestmark = pytest.mark.usefixtures("source")


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
