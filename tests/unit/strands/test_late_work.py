"""Work that starts late or outlives its invocation belongs to the tree of its invocation."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from strands import Agent, tool
from strands.memory import ExtractionConfig, InvocationTrigger, MemoryManager, ModelExtractor
from strands.multiagent import GraphBuilder
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.vended_memory_stores import TestMemoryStore as MemoryStore

from otel_limits import Event, Limits, enable
from otel_limits.runs.registry import LIVE, MAX_AGE_SECONDS
from otel_limits.testing import Answer, FakeTime, ScriptedModel, endless, says, tokens, uses
from tests.unit.strands.test_group_calls import Asking, graph_of
from tests.unit.strands.test_sent_requests import calls, extract, read, stops

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.conftest import MakeAgent, Metric


PATIENCE_SECONDS = 60


class Queue:
    """An agent whose tools run in the background, one at a time, each as soon as possible."""

    def __init__(self, script: Any, *work: Callable[[], Awaitable[Any]], tools: Any = ()) -> None:
        """Make it; each call of its tool runs the next function of `work`."""
        self.may_go = threading.Event()
        self.has_ended = threading.Semaphore(0)
        self.number = len(work)
        to_do = iter(work)

        @tool
        async def think() -> str:
            """Run the next function."""
            do = next(to_do)
            await asyncio.to_thread(self.may_go.wait, PATIENCE_SECONDS)
            try:
                return str(await do())
            finally:
                self.has_ended.release()

        self.agent = Agent(
            model=ScriptedModel(script),
            tools=[think, *tools],
            callback_handler=None,
            name="busy",
            background_tasks={
                "always": [think],
                "wait_for_completion": False,
                "max_concurrency": 1,
            },
        )

    def drain(self) -> None:
        """Let all of it continue, and wait until it has ended."""
        self.may_go.set()
        for _ in range(self.number):
            assert self.has_ended.acquire(timeout=PATIENCE_SECONDS)


def children(number: int) -> list[Agent]:
    """Agents that answer immediately."""
    return [
        Agent(model=ScriptedModel([says("done")]), callback_handler=None, name=f"child{n}")
        for n in range(number)
    ]


def called(agents: list[Agent]) -> int:
    """Number of requests that reached their models."""
    return sum(agent.model.calls for agent in agents)  # type: ignore[attr-defined]


async def nothing() -> str:
    """Do nothing."""
    return "nothing"


def test_queued_tool_counts_for_its_invocation(source: str, events: list[Event]) -> None:
    """Not for the earlier invocation, whose tool had the slot before."""
    enable(observers=[events.append])
    helper = ScriptedModel(endless(says("hint", usage=tokens(1000))), model_id="helper")
    queue = Queue([uses("think"), says("done")] * 2, nothing, lambda: read(helper))

    async def main() -> None:
        await queue.agent.invoke_async("one")
        first = stops(events)["busy"].invocation_id
        await queue.agent.invoke_async("two")
        await asyncio.to_thread(queue.drain)
        second = stops(events)["busy"].invocation_id
        assert first != second
        assert [each.invocation.id for each in calls(events) if each.side] == [second]

    asyncio.run(main())


def test_queued_tool_is_limited_by_budget_of_its_invocation(source: str) -> None:
    """Its model calls count against that budget until it ends."""
    enable(Limits(max_token_budget=200))
    helper = ScriptedModel(endless(says("hint", usage=tokens(1000))), model_id="helper")

    async def often() -> str:
        for _ in range(5):
            await read(helper)
        return "done"

    @tool
    def hold() -> str:
        """Wait for the other tool."""
        queue.drain()
        return "held"

    script = [uses("think"), says("done"), uses("think"), uses("hold"), says("done")]
    queue = Queue(script, nothing, often, tools=[hold])

    async def main() -> None:
        await queue.agent.invoke_async("one")
        result = await queue.agent.invoke_async("two")
        assert str(result.stop_reason) == "max_token_budget"

    asyncio.run(main())
    assert helper.calls == 1


@pytest.mark.parametrize("prompts", [1, 2])
def test_agents_of_queued_tool_are_in_its_tree(prompts: int, source: str) -> None:
    """Even if its invocation ended before the tool started, or had the slot before it."""
    enable(tree=Limits(max_turns=4))
    asked = children(6)

    async def ask() -> str:
        return str([await child.invoke_async("go") for child in asked])

    both = Answer(tools=(("think", {}), ("think", {})))
    scripts = {1: [both, says("done")], 2: [uses("think"), says("done")] * 2}
    queue = Queue(scripts[prompts], nothing, ask)

    async def main() -> None:
        for _ in range(prompts):
            await queue.agent.invoke_async("go")
        await asyncio.to_thread(queue.drain)

    asyncio.run(main())
    assert called(asked) == 2


def test_tool_thread_counts_for_its_invocation(
    events: list[Event],
) -> None:
    """A plain thread only has the span of its parent, which is that of the right invocation."""
    enable(observers=[events.append])
    helper = ScriptedModel(endless(says("hint")), model_id="helper")

    async def ask() -> str:
        span = trace.get_current_span()

        def work() -> None:
            with trace.use_span(span):
                asyncio.run(read(helper))

        thread = threading.Thread(target=work)
        thread.start()
        await asyncio.to_thread(thread.join)
        return "asked"

    @tool
    def hold() -> str:
        """Wait for the other tool."""
        queue.drain()
        return "held"

    script = [uses("think"), says("done"), uses("think"), uses("hold"), *[says("done")] * 3]
    queue = Queue(script, nothing, ask, tools=[hold])

    async def main() -> None:
        await queue.agent.invoke_async("one")
        await queue.agent.invoke_async("two")

    asyncio.run(main())
    second = stops(events)["busy"].invocation_id
    assert [each.invocation.id for each in calls(events) if each.side] == [second]


@pytest.mark.parametrize("is_plain", [False, True], ids=["of-asyncio", "plain"])
@pytest.mark.parametrize("executor", [ConcurrentToolExecutor, SequentialToolExecutor])
def test_abandoned_thread_of_cancelled_agent_stays_in_its_tree(
    executor: Any, *, is_plain: bool, source: str
) -> None:
    """Whether its tools run concurrently or one by one in the task that reads the stream."""
    enable(tree=Limits(max_turns=3))
    asked, is_asking, has_ended = children(6), threading.Event(), threading.Event()

    @tool
    def ask() -> str:
        """Invoke agents one by one in a thread, which starts another one without a context."""
        is_asking.set()
        assert has_ended.wait(PATIENCE_SECONDS)
        if not is_plain:
            ask_all()
            return "asked"
        thread = threading.Thread(target=ask_all)
        thread.start()
        thread.join()
        return "asked"

    def ask_all() -> None:
        for child in asked:
            child("go")

    parent = Agent(
        model=ScriptedModel(endless(uses("ask"))),
        tools=[ask],
        callback_handler=None,
        tool_executor=executor(),
    )

    async def main() -> None:
        task = asyncio.create_task(parent.invoke_async("go"))
        await asyncio.to_thread(is_asking.wait, PATIENCE_SECONDS)
        task.cancel()
        await asyncio.wait([task])
        has_ended.set()  # the event loop waits for the thread at its end

    asyncio.run(main())
    assert called(asked) == 2


def test_continuing_thread_keeps_no_agent_alive(source: str) -> None:
    """It keeps its invocation alive, but not the agent that the application has dropped."""
    enable(Limits(max_turns=3))
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, args=(PATIENCE_SECONDS,))

    @tool
    def leave_behind() -> str:
        """Start a thread without waiting for it."""
        thread.start()
        return "started"

    def ask() -> list[weakref.ref[Any]]:
        model = ScriptedModel([uses("leave_behind"), says("done")])
        agent = Agent(model=model, tools=[leave_behind], callback_handler=None)
        agent("go")
        return [weakref.ref(agent), weakref.ref(agent.hooks)]

    seen = ask()
    gc.collect()
    assert [each() for each in seen] == [None, None]
    is_over.set()
    thread.join()


def test_abandoned_thread_of_node_stays_in_tree_of_its_graph(source: str) -> None:
    """A node need not be an agent, and another node may fail while its thread runs."""
    enable(tree=Limits(max_turns=2))
    asked, is_asking, has_ended = children(6), threading.Event(), threading.Event()

    class Threaded(Asking):
        async def invoke_async(self, *_: Any, **__: Any) -> Any:
            await asyncio.to_thread(self.work)

        def work(self) -> None:
            is_asking.set()
            assert has_ended.wait(PATIENCE_SECONDS)
            for child in asked:
                child("go")

    class Failing(Asking):
        async def invoke_async(self, *_: Any, **__: Any) -> Any:
            await asyncio.to_thread(is_asking.wait, PATIENCE_SECONDS)
            raise OSError("gone")

    async def main() -> None:
        none = ScriptedModel([])
        with pytest.raises(OSError, match="gone"):
            await graph_of(Threaded(none, 0), Failing(none, 0)).invoke_async("go")
        has_ended.set()

    asyncio.run(main())
    assert called(asked) == 2


def test_work_after_end_of_node_is_not_in_tree_of_its_graph(source: str) -> None:
    """A task that outlives its node on purpose, e.g. a server, belongs to no graph."""
    enable(tree=Limits(max_turns=2))
    asked, has_ended = children(4), asyncio.Event()
    served: list[asyncio.Task[Any]] = []

    async def serve() -> None:
        await has_ended.wait()
        for child in asked:
            await child.invoke_async("go")

    class Serving(Asking):
        async def invoke_async(self, *_: Any, **__: Any) -> Any:
            served.append(asyncio.create_task(serve()))
            return await super().invoke_async()

    async def main() -> None:
        await graph_of(Serving(ScriptedModel([]), 0)).invoke_async("go")
        has_ended.set()
        await served[0]

    asyncio.run(main())
    assert called(asked) == 4


def test_graphs_with_interleaved_streams_keep_their_trees(source: str) -> None:
    """Nodes that run after the other graph has ended belong to their own tree."""
    enable(tree=Limits(max_turns=2))

    def chain(number: int) -> tuple[Any, list[Agent]]:
        builder, nodes = GraphBuilder(), children(number)
        for before, node in zip([None, *nodes], nodes, strict=False):
            builder.add_node(node, node.name)
            if before is not None:
                builder.add_edge(before.name, node.name)
        return builder.set_max_node_executions(9).build(), nodes

    (short, few), (long, many) = chain(1), chain(5)

    async def main() -> None:
        streams = [graph.stream_async("go") for graph in (long, short)]
        await anext(streams[0])
        for stream in streams[::-1]:
            async for _ in stream:
                pass

    asyncio.run(main())
    assert (called(few), called(many)) == (1, 2)


# --- work that outlives a turn or an agent --------------------------------------------------------


def remembering(extractor: ScriptedModel, model: ScriptedModel) -> Agent:
    """Make an agent that extracts memories from each finished conversation."""
    store = MemoryStore(
        name="events",
        writable=True,
        extraction=ExtractionConfig(
            trigger=[InvocationTrigger()], extractor=ModelExtractor(model=extractor)
        ),
    )
    return Agent(
        model=model,
        callback_handler=None,
        name="remembering",
        memory_manager=MemoryManager(stores=[store], search_tool_config=False, injection=False),
    )


def test_memory_extraction_is_recorded(source: str, events: list[Event], metric: Metric) -> None:
    """It runs after the invocation, is attributed to it, and is never refused."""
    enable(Limits(max_token_budget=20, max_model_calls=1), observers=[events.append])
    extractor = ScriptedModel(endless(says("[]", usage=tokens(5000))), model_id="extractor")
    before = metric(
        "otel_limits_tokens_total", agent="remembering", model="extractor", type="input"
    )
    agent = remembering(extractor, ScriptedModel(endless(says("done"))))
    for _ in range(3):
        assert agent("go").stop_reason == "end_turn"
    late = [each for each in calls(events) if each.model == "extractor"]
    assert extractor.calls == len(late) == 3
    assert [(each.side, each.kind, each.usage.total) for each in late] == [
        (True, "measured", 5000)
    ] * 3
    assert len({each.invocation.id for each in late}) == 3
    after = metric("otel_limits_tokens_total", agent="remembering", model="extractor", type="input")
    assert after - before == 3 * 4999


def test_memory_extraction_is_limited_by_its_tree(source: str, events: list[Event]) -> None:
    """The agent that uses the remembering one as a tool is still running, and so is its tree."""
    enable(tree=Limits(max_token_budget=2000), observers=[events.append])
    extractor = ScriptedModel(endless(says("[]", usage=tokens(1500))), model_id="extractor")
    inner = remembering(extractor, ScriptedModel(endless(says("done"))))

    @tool
    async def ask() -> str:
        """Invoke the remembering agent and wait for its memory."""
        text = str(await inner.invoke_async("go"))
        await inner.memory_manager.flush()  # type: ignore[union-attr]
        return text

    outer = Agent(
        model=ScriptedModel(endless(uses("ask"))), tools=[ask], callback_handler=None, name="outer"
    )
    assert outer("go").stop_reason == "max_token_budget"
    assert extractor.calls == 2
    assert outer.model.calls == 2  # type: ignore[attr-defined]


def in_background(ask: Any, script: Any, *, waits: bool) -> Agent:
    """Make an agent whose tool runs in the background."""

    @tool
    async def think() -> str:
        """Call another model."""
        return str(await ask())

    return Agent(
        model=ScriptedModel(script),
        tools=[think],
        callback_handler=None,
        name="busy",
        background_tasks={"always": [think], "wait_for_completion": waits},
    )


def test_background_tools_are_limited(source: str, events: list[Event]) -> None:
    """They run after their turn, while the loop continues."""
    enable(Limits(max_token_budget=200), observers=[events.append])
    helper = ScriptedModel(endless(says("hint", usage=tokens(1000))), model_id="helper")

    async def often() -> str:
        for _ in range(5):
            await read(helper)
        return "done"

    agent = in_background(often, [uses("think"), *[says("waiting")] * 5], waits=True)
    assert agent("go").stop_reason == "max_token_budget"
    assert helper.calls == 1
    assert [each.usage.total for each in calls(events) if each.model == "helper"] == [1000]


def test_background_tools_after_invocation_are_recorded(source: str, events: list[Event]) -> None:
    """Each call counts once, for the invocation that used the tool."""
    enable(observers=[events.append])
    helper = ScriptedModel(endless(says("hint", usage=tokens(1000))), model_id="helper")

    async def main() -> None:
        ended, done = asyncio.Event(), asyncio.Event()

        async def often() -> str:
            await ended.wait()
            for _ in range(3):
                await read(helper)
            await extract(helper)
            done.set()
            return "done"

        agent = in_background(often, [uses("think"), says("done")], waits=False)
        await agent.invoke_async("go")
        ended.set()
        await asyncio.wait_for(done.wait(), 30)

    asyncio.run(main())
    late = [each for each in calls(events) if each.side]
    assert [each.usage.total for each in late[:3]] == [1000] * 3
    assert [each.kind for each in late[3:]] == ["estimated"]
    assert {each.invocation.id for each in late} == {stops(events)["busy"].invocation_id}


def test_eviction_in_another_thread_counts_call_once(
    make_agent: MakeAgent,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    fake_time: FakeTime,
) -> None:
    """A day old, it is evicted when another one begins, perhaps while its call is counted."""
    quote = LIVE.quote
    others = [make_agent(ScriptedModel([says("done")]), name="other")]

    def slow_quote(sale: Any) -> Any:
        while others:
            fake_time.advance(MAX_AGE_SECONDS + 1)
            beginning = threading.Thread(target=others.pop(), args=("go",))
            beginning.start()
            beginning.join()
        return quote(sale)

    monkeypatch.setattr(LIVE, "quote", slow_quote)
    enable(tree=Limits(max_turns=5), observers=[events.append])
    make_agent(ScriptedModel([says("done")]))("go")
    assert [each.number for each in calls(events) if each.invocation.agent == "tester"] == [1]
