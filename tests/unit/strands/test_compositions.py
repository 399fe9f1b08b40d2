"""Unusual compositions of Strands agents, and concurrent invocations of one: the cap holds."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    MessageAddedEvent,
)
from strands.middleware import InvokeModelStage
from strands.models.routing import ClassifierStrategy, ModelRouter
from strands.multiagent import Swarm
from strands.tools.executors import SequentialToolExecutor
from strands.types.exceptions import ModelThrottledException

import otel_limits
from otel_limits import Event, LimitReachedError, Limits, ModelCall, Started, Stop, enable
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.registry import LIVE
from otel_limits.testing import Answer, FakeTime, ScriptedModel, endless, says, uses
from tests.compositions.ways import in_plain_threads
from tests.metered import Metered
from tests.processes import PATIENCE_SECONDS
from tests.unit.agents.test_deadlines import FIRST_CHUNKS
from tests.unit.runs.test_budget import agent_of, asking, calls_of, runaways
from tests.unit.strands.test_group_calls import Asking, graph_of
from tests.unit.strands.test_late_work import remembering
from tests.unit.strands.test_sent_requests import ByItself, Report, calls, extract, read, stops

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from strands.types.streaming import StreamEvent


pytestmark = pytest.mark.usefixtures("source")


def test_a_hook_that_starts_a_plain_thread() -> None:
    """Its agents are of the invocation whose hook it is; after that, they are free."""
    enable(tree=Limits(max_turns=4))
    child = agent_of(Metered(endless(uses("look"))), "child")
    parent = agent_of(Metered(endless(says("done"))), "parent")

    def ask_child() -> None:
        with suppress(LimitReachedError):
            child("go")

    parent.hooks.add_callback(BeforeModelCallEvent, lambda _: in_plain_threads([ask_child]))
    assert str(parent("go").stop_reason) == "max_turns"
    assert calls_of(parent, child) == 4
    in_plain_threads([ask_child])
    assert calls_of(child) == 8


class Threading(Asking):
    """A node that runs agents in plain threads."""

    def __init__(self, ask: list[Any]) -> None:
        super().__init__(ScriptedModel([]), 0)
        self.ask = ask

    async def invoke_async(self, *_: Any, **__: Any) -> Any:
        """Run them."""
        in_plain_threads(self.ask)
        return await super().invoke_async()


def test_a_node_that_starts_plain_threads(events: list[Event]) -> None:
    """A node that is not an agent, of a graph with a budget."""
    enable(tree=Limits(max_turns=4), observers=[events.append])
    children = runaways(3)
    graph_of(Threading([functools.partial(each, "go") for each in children]))("go")
    assert calls_of(*children) == 4


def test_agents_as_tools_of_a_swarm() -> None:
    """A node calls ten agents concurrently."""
    enable(tree=Limits(max_turns=6))
    children = runaways(10)
    first, second = asking(children), agent_of(Metered(endless(uses("look"))), "second")
    Swarm([first, second], max_iterations=4)("go")
    assert calls_of(first, second, *children) == 6


@pytest.mark.parametrize("way", ["loop", "direct", "model"])
def test_structured_output_in_parallel_tools(way: str) -> None:
    """Whichever way it is asked for."""
    enable(tree=Limits(max_model_calls=5))
    children = [agent_of(ByItself(endless(says("no output"))), f"child{n}") for n in range(10)]

    async def ask(child: Agent) -> Any:
        if way == "loop":
            return await child.invoke_async("go", structured_output_model=Report)
        if way == "direct":
            return await child.structured_output_async(Report, "go")
        return await extract(child.model)

    @tool
    async def ask_all() -> str:
        """Call all of them concurrently."""
        return str(await asyncio.gather(*map(ask, children), return_exceptions=True))

    parent = agent_of(Metered(endless(uses("ask_all"))), "parent", tools=[ask_all])
    assert str(parent("go").stop_reason) == "max_model_calls"
    assert calls_of(parent, *children) == 5


EVENTS = (
    *(BeforeInvocationEvent, BeforeModelCallEvent, AfterInvocationEvent),
    *(MessageAddedEvent, AfterToolCallEvent),
)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("how", ["awaited", "called"])
def test_hooks_that_ask_other_agents(event: Any, how: str) -> None:
    """Agents that hooks ask are within the tree of whose hook it is."""
    enable(tree=Limits(max_turns=4))
    helper, agent = runaways(1)[0], agent_of(Metered(endless(uses("look"))), "agent")

    async def ask(_: Any) -> None:
        await helper.invoke_async("go")

    def ask_now(_: Any) -> None:
        helper("go")

    agent.hooks.add_callback(event, ask if how == "awaited" else ask_now)
    with suppress(LimitReachedError):  # of a hook before or after the loop
        agent("go")
    assert calls_of(helper, agent) == 4


def test_a_tool_that_a_hook_repeats() -> None:
    """Each attempt asks another agent; all of them are in the tree."""
    enable(tree=Limits(max_turns=4))
    (child,) = runaways(1)
    parent = asking([child])
    left = iter(range(20))

    def again(event: AfterToolCallEvent) -> None:
        event.retry = next(left, None) is not None

    parent.hooks.add_callback(AfterToolCallEvent, again)
    parent("go")
    assert calls_of(parent, child) == 4


def test_a_stream_that_another_task_closes() -> None:
    """Everything is given back, and the next call of the agent has the whole budget."""
    enable(tree=Limits(max_turns=4))
    children = runaways(5)
    parent = asking(children)

    async def main() -> None:
        stream: Any = parent.stream_async("go")
        for _ in range(12):
            await anext(stream)
        await asyncio.create_task(stream.aclose())
        assert len(LIVE) == 0
        before = calls_of(parent, *children)
        result = await parent.invoke_async("again")
        assert str(result.stop_reason) == "max_turns"
        assert calls_of(parent, *children) - before == 4

    asyncio.run(main())


class Hanging(Metered):
    """Never sends anything."""

    def __init__(self, began: threading.Semaphore) -> None:
        super().__init__([])
        self.began = began

    async def stream(self, *_: Any, **__: Any) -> Any:
        """Announce the call, and hang."""
        self.began.release()
        await asyncio.sleep(10 * PATIENCE_SECONDS)
        yield {}


@pytest.mark.parametrize("why", ["killed", "max_duration"])
def test_parallel_nodes_that_hang_are_ended(
    why: str, events: list[Event], fake_time: FakeTime
) -> None:
    """A kill or the deadline of the tree ends all of them immediately."""
    limits = Limits(max_duration_seconds=30) if why == "max_duration" else Limits(max_turns=99)
    enable(tree=limits, observers=[events.append])
    began = threading.Semaphore(0)
    nodes = [agent_of(Hanging(began), f"node{n}") for n in range(5)]
    graph = graph_of(*nodes)

    async def main() -> None:
        task = asyncio.create_task(graph.invoke_async("go"))
        for _ in nodes:
            await asyncio.to_thread(began.acquire, timeout=PATIENCE_SECONDS)
        if why == "killed":
            assert otel_limits.kill(all=True) == 5
        else:
            fake_time.advance(30)
        await asyncio.wait_for(task, PATIENCE_SECONDS)

    asyncio.run(main())
    assert [fact.reason for fact in stops(events).values()] == [why] * 5


def reentrant_child() -> Agent:
    """A runaway that may run several invocations concurrently."""
    model = Metered(endless(uses("look")))
    return agent_of(model, "child", concurrent_invocation_mode="unsafe_reentrant")


def test_concurrent_calls_of_one_agent_are_capped_each(events: list[Event]) -> None:
    """Each invocation has its own budget, and is halted by it."""
    enable(Limits(max_turns=3), observers=[events.append])
    child = reentrant_child()

    async def main() -> Any:
        return await asyncio.gather(*(child.invoke_async("go") for _ in range(5)))

    assert [str(each.stop_reason) for each in asyncio.run(main())] == ["max_turns"] * 5
    assert calls_of(child) == 15
    told = [fact for fact in events if isinstance(fact, Stop)]
    assert [(each.turns, each.model_calls) for each in told] == [(3, 3)] * 5


def test_concurrent_calls_of_one_agent_share_the_tree() -> None:
    """The tree holds all of its invocations together."""
    enable(tree=Limits(max_turns=5))
    child = reentrant_child()

    @tool
    async def ask_often() -> str:
        """Call it many times concurrently."""
        return str(await asyncio.gather(*(child.invoke_async("go") for _ in range(10))))

    parent = agent_of(Metered(endless(uses("ask_often"))), "parent", tools=[ask_often])
    assert str(parent("go").stop_reason) == "max_turns"
    assert calls_of(parent, child) == 5


def test_a_kill_of_one_of_several_invocations_of_an_agent(events: list[Event]) -> None:
    """It ends before its next model call, and the others go on."""
    enable(Limits(max_turns=9), observers=[events.append])
    child = reentrant_child()

    async def main() -> None:
        streams = [child.stream_async("go") for _ in range(3)]
        await anext(streams[0])
        began = CLOCK.now()
        for stream in streams[1:]:
            await anext(stream)
        assert LIVE.kill(all=True, before=began) == 1
        for stream in streams:
            async for _ in stream:
                pass

    asyncio.run(main())
    told = [fact for fact in events if isinstance(fact, Stop)]
    assert sorted(each.reason for each in told) == ["killed", "max_turns", "max_turns"]
    assert max(each.model_calls for each in told if each.reason == "killed") <= 1


def asks(helper: ScriptedModel) -> Any:
    """A hook that calls a model directly."""

    async def ask(_: Any) -> None:
        await read(helper)

    return ask


def test_streams_that_are_read_in_turns_with_side_calls(events: list[Event]) -> None:
    """Usage of a hook counts for its agent, whichever stream was read before."""
    enable(observers=[events.append])
    helpers = [ScriptedModel(endless(says("x")), model_id=f"helper{n}") for n in range(2)]
    agents = [agent_of(Metered([*[uses("look")] * 3, says("done")]), f"agent{n}") for n in range(2)]
    for agent, helper in zip(agents, helpers, strict=True):
        agent.hooks.add_callback(BeforeModelCallEvent, asks(helper))
        agent.hooks.add_callback(AfterToolCallEvent, asks(helper))

    async def main() -> None:
        streams = [agent.stream_async("go") for agent in agents]
        while streams:
            for stream in list(streams):
                if await anext(stream, None) is None:
                    streams.remove(stream)

    asyncio.run(main())
    side = {(each.invocation.agent, each.model) for each in calls(events) if each.side}
    assert side == {("agent0", "helper0"), ("agent1", "helper1")}


def test_graphs_in_a_graph_that_a_thread_runs() -> None:
    """All nodes are in the tree of the agent whose tool runs them."""
    enable(tree=Limits(max_turns=7))
    leaves = runaways(6)
    outer = graph_of(graph_of(*leaves[:3]), graph_of(*leaves[3:]))

    @tool
    def run() -> str:
        """Run the graph, in a thread."""
        return str(outer("go").status)

    parent = agent_of(Metered(endless(uses("run"))), "parent", tools=[run])
    parent("go")
    assert calls_of(parent, *leaves) == 7


def test_a_direct_call_of_a_tool() -> None:
    """An agent used as a tool is called as a method of the other."""
    enable(tree=Limits(max_turns=4))
    (child,) = runaways(1)
    other = agent_of(Metered([]), "other", tools=[child.as_tool(name="ask", description="Ask.")])

    @tool
    def direct() -> str:
        """Call it."""
        return str(other.tool.ask(input="go"))

    parent = agent_of(Metered(endless(uses("direct"))), "parent", tools=[direct])
    parent("go")
    assert calls_of(parent, child) == 4


def test_agents_that_are_tools_in_the_background_one_at_a_time() -> None:
    """They wait for a place, and for who asked."""
    enable(tree=Limits(max_turns=5))
    children = runaways(4)
    tools = [child.as_tool(name=child.name, description="Ask.") for child in children]
    ask = Answer(tools=tuple((child.name, {"input": "go"}) for child in children))
    parent = agent_of(
        Metered([ask, *[says("waiting")] * 9]),
        "parent",
        tools=tools,
        background_tasks={"always": tools, "max_concurrency": 1},
    )
    parent("go")
    assert calls_of(parent, *children) == 5


def test_memory_extraction_of_concurrent_agents_is_capped(events: list[Event]) -> None:
    """Extraction of one is held by what the others have used."""
    enable(tree=Limits(max_model_calls=12), observers=[events.append])
    extractor = ScriptedModel(endless(says("[]")), model_id="extractor")
    children = [remembering(extractor, ScriptedModel(endless(says("done")))) for _ in range(10)]

    async def ask(child: Agent) -> None:
        await child.invoke_async("go")
        await child.memory_manager.flush()  # type: ignore[union-attr]

    @tool
    async def ask_all() -> str:
        """Ask all, and wait for their memories."""
        return str(await asyncio.gather(*map(ask, children), return_exceptions=True))

    parent = agent_of(Metered(endless(uses("ask_all"))), "parent", tools=[ask_all])
    assert str(parent("go").stop_reason) == "max_model_calls"
    assert calls_of(parent, *children) + extractor.calls == 12


def test_routers_of_concurrent_agents_are_capped() -> None:
    """Classifiers and the models that they choose have one budget together."""
    enable(tree=Limits(max_model_calls=9))
    classifier = ByItself([], model_id="classifier")
    models = [Metered(endless(uses("look")), model_id=f"m{n}") for n in (1, 2)]
    routers: list[Any] = [
        ModelRouter(models, strategy=ClassifierStrategy(classifier)) for _ in range(5)
    ]
    children = [agent_of(router, f"child{n}") for n, router in enumerate(routers)]
    parent = asking(children)
    assert str(parent("go").stop_reason) == "max_model_calls"
    assert calls_of(parent) + classifier.calls + sum(model.calls for model in models) == 9


# --- concurrent invocations of one agent ----------------------------------------------------------

TOOL_USE: list[StreamEvent] = [
    {"messageStart": {"role": "assistant"}},
    {"contentBlockStart": {"start": {"toolUse": {"name": "look", "toolUseId": "one"}}}},
    {"contentBlockDelta": {"delta": {"toolUse": {"input": "{}"}}}},
    {"contentBlockStop": {}},
    {"messageStop": {"stopReason": "tool_use"}},
]


class Waiting(ScriptedModel):
    """Answers only after the test's kills; hangs for the prompt `hang`.

    Args:
        sent: Chunks sent before it hangs.
    """

    def __init__(self, sent: list[StreamEvent]) -> None:
        super().__init__(endless(says("answer")))
        self.sent = sent
        self.asked = 0
        self.all_asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def stream(self, messages: Any, *args: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Hang in the first call."""
        self.asked += 1
        hangs = self.asked == 1
        if self.asked == 3:
            self.all_asked.set()
        if hangs:
            for event in self.sent:
                yield event
            await asyncio.Event().wait()
        await self.go_on.wait()
        async for event in super().stream(messages, *args, **named):
            yield event


def reentrant(model: ScriptedModel, **arguments: Any) -> Agent:
    """Make an agent that allows concurrent invocations."""
    return agent_of(model, "agent", concurrent_invocation_mode="unsafe_reentrant", **arguments)


class First:
    """The first invocation."""

    begun = math.inf

    def __call__(self, event: Event) -> None:
        """Note when it began."""
        if isinstance(event, Started):
            self.begun = min(self.begun, LIVE.now())

    def kill(self) -> None:
        """Kill it, as `kill()` does after finding one by its trace."""
        assert LIVE.kill(all=True, before=self.begun + 1e-9) == 1


@pytest.fixture
def first() -> First:
    """The first invocation of a test whose observers include this."""
    return First()


async def with_three(agent: Agent, model: Waiting, first: First) -> list[str]:
    """Run three invocations, kill the first while it hangs, then let the others finish."""
    tasks = []
    for _ in range(3):
        tasks.append(asyncio.create_task(agent.invoke_async("go")))
        await asyncio.sleep(0.001)  # gives each its own start time
    await model.all_asked.wait()
    first.kill()
    # The provider sends nothing: only the kill can end it.
    killed = await asyncio.wait_for(tasks[0], PATIENCE_SECONDS)
    assert [task.done() for task in tasks] == [True, False, False]
    model.go_on.set()
    return [str(result.stop_reason) for result in [killed, *await asyncio.gather(*tasks[1:])]]


HANGS = {"before-first": [], "within-text": FIRST_CHUNKS[:3], "within-tool-use": TOOL_USE[:3]}


@pytest.mark.parametrize("sent", HANGS.values(), ids=HANGS)
def test_kill_ends_only_the_hanging_invocation(
    sent: list[StreamEvent], events: list[Event], open_spans: Callable[[], list[str]], first: First
) -> None:
    """The history is valid, the usage is estimated, spans end, and the next call works."""
    enable(Limits(max_turns=9), observers=[events.append, first])
    agent = reentrant(model := Waiting(sent))
    assert asyncio.run(with_three(agent, model, first)) == ["killed", "end_turn", "end_turn"]
    stops = [event for event in events if isinstance(event, Stop)]
    assert [(fact.reason, fact.turns) for fact in stops] == [
        ("killed", 0),
        ("end_turn", 1),
        ("end_turn", 1),
    ]
    assert sorted(fact.kind for fact in events if isinstance(fact, ModelCall)) == [
        "failed",
        "measured",
        "measured",
    ]
    synthetic = [message for message in agent.messages if otel_limits.is_synthetic(message)]
    assert [len(synthetic), "usage" in synthetic[0]["metadata"]] == [1, False]
    assert not any("toolUse" in block for each in agent.messages for block in each["content"])
    # Strands keeps one span per agent, so of concurrent invocations only the last one's span ends.
    assert [name for name in open_spans() if not name.startswith("invoke_agent")] == []
    assert agent("next").stop_reason == "end_turn"


@pytest.mark.parametrize("sent", [FIRST_CHUNKS, TOOL_USE], ids=["text", "tool-use"])
def test_complete_answer_of_killed_invocation_is_kept(
    sent: list[StreamEvent], events: list[Event], first: First
) -> None:
    """The tools that it requests do not run, but each has a result."""
    enable(Limits(max_turns=9), observers=[events.append, first])
    looked: list[str] = []

    @tool
    def look() -> str:
        """Look."""
        looked.append("looked")
        return "nothing"

    agent = reentrant(model := Waiting(sent), tools=[look])
    assert asyncio.run(with_three(agent, model, first)) == ["killed", "end_turn", "end_turn"]
    assert looked == []
    killed = next(fact for fact in events if isinstance(fact, Stop))
    assert (killed.reason, killed.turns, killed.tool_calls) == ("killed", 1, 0)
    blocks = [block for message in agent.messages for block in message["content"]]
    assert [b["toolUse"]["toolUseId"] for b in blocks if "toolUse" in b] == [
        b["toolResult"]["toolUseId"] for b in blocks if "toolResult" in b
    ]


@pytest.mark.parametrize("where", ["middleware", "retry"])
def test_kill_ends_invocation_before_its_request(where: str, first: First) -> None:
    """It waits in a middleware or for the next attempt; the others continue."""
    enable(Limits(max_turns=9), observers=[first])
    model = Waiting([])
    held: list[object] = []

    async def hold(context: Any, next_fn: Any) -> Any:
        if not held:
            held.append(context)
            model.asked = 1
            if where == "retry":
                raise ModelThrottledException("busy")
            await asyncio.Event().wait()
        async for event in next_fn(context):
            yield event

    agent = reentrant(model)
    agent.add_middleware(InvokeModelStage, hold)
    assert asyncio.run(with_three(agent, model, first)) == ["killed", "end_turn", "end_turn"]


def test_kill_prevents_tools_not_yet_started(first: First) -> None:
    """The running one is awaited; those of another invocation run."""
    enable(Limits(max_turns=9), observers=[first])
    ran: list[str] = []
    begun = {"first": asyncio.Event(), "other": asyncio.Event()}
    release = asyncio.Event()

    @tool
    async def look(query: str = "") -> str:
        """Look."""
        ran.append(query)
        if query in begun:
            begun[query].set()
            await release.wait()
        return "seen"

    def script() -> Any:
        yield Answer(tools=(("look", {"query": "first"}), ("look", {"query": "second"})))
        yield Answer(tools=(("look", {"query": "other"}), ("look", {"query": "more"})))
        yield from endless(says("done"))

    agent = reentrant(ScriptedModel(script()), tools=[look], tool_executor=SequentialToolExecutor())

    async def main() -> list[str]:
        one = asyncio.create_task(agent.invoke_async("go"))
        await begun["first"].wait()
        other = asyncio.create_task(agent.invoke_async("go"))
        await begun["other"].wait()
        assert len(LIVE) == 2  # killing the only invocation would cancel the agent
        first.kill()
        release.set()
        return [str(each.stop_reason) for each in await asyncio.gather(one, other)]

    assert asyncio.run(main()) == ["killed", "end_turn"]
    assert sorted(ran) == ["first", "more", "other"]


class HangingLast(Waiting):
    """Hangs during the second answer, which is the last one of the first invocation."""

    def __init__(self) -> None:
        super().__init__(FIRST_CHUNKS[:3])
        self.hangs = asyncio.Event()

    async def stream(self, *args: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Request a tool first, then hang; answer the others once the test allows it."""
        self.asked += 1
        if self.asked == 1:
            script = ScriptedModel([uses("look")])
            async for event in script.stream(*args, **named):
                yield event
        elif self.asked == 2:
            for event in self.sent:
                yield event
            self.hangs.set()
            await asyncio.Event().wait()
        else:
            self.all_asked.set()
            await self.go_on.wait()
            async for event in ScriptedModel([says("done")]).stream(*args, **named):
                yield event


def test_interrupted_last_answer_gets_no_note(first: First) -> None:
    """The reader sees the text of the model, and then that of the kill instead of a note."""
    enable(Limits(max_turns=1), action="wrap_up", observers=[first])

    @tool
    def look() -> str:
        """Look."""
        return "nothing"

    agent = reentrant(model := HangingLast(), tools=[look])

    async def main() -> tuple[list[str], Any]:
        texts, result = [], None

        async def read() -> None:
            nonlocal result
            async for event in agent.stream_async("go"):
                texts.append(str(event.get("data", "")))
                result = event.get("result", result)

        one = asyncio.create_task(read())
        await model.hangs.wait()
        other = asyncio.create_task(agent.invoke_async("go"))
        await model.all_asked.wait()
        first.kill()
        await asyncio.wait_for(one, PATIENCE_SECONDS)
        model.go_on.set()
        await other
        return [text for text in texts if text], result

    texts, result = asyncio.run(main())
    assert result.stop_reason == "killed"
    assert otel_limits.is_synthetic(result.message)
    assert texts == ["Once upon", "\nThis request could not be completed because it was stopped."]


def test_invocation_started_after_kill_is_not_cancelled(first: First) -> None:
    """The agent was cancelled for its only invocation at the time, and a tool still runs."""
    enable(Limits(max_turns=9), observers=[first])
    begun, release = asyncio.Event(), asyncio.Event()

    @tool
    async def look() -> str:
        """Look."""
        begun.set()
        await release.wait()
        return "seen"

    agent = reentrant(ScriptedModel([uses("look"), says("done")]), tools=[look])

    async def main() -> list[str]:
        one = asyncio.create_task(agent.invoke_async("go"))
        await begun.wait()
        first.kill()
        other = await asyncio.wait_for(agent.invoke_async("go"), PATIENCE_SECONDS)
        release.set()
        return [str(each.stop_reason) for each in [await one, other]]

    assert asyncio.run(main()) == ["killed", "end_turn"]


def test_refusal_keeps_tools_of_another_invocation(first: First) -> None:
    """They have their own results, and would get a second one."""
    enable(Limits(max_turns=9), observers=[first])
    begun, release = asyncio.Event(), asyncio.Event()

    @tool
    async def look() -> str:
        """Look."""
        begun.set()
        await release.wait()
        return "seen"

    async def linger(event: BeforeModelCallEvent) -> None:
        del event
        if model.calls == 0 and len(LIVE) == 1:
            await begun.wait()
            first.kill()

    agent = reentrant(model := ScriptedModel([uses("look"), says("done")]), tools=[look])
    agent.hooks.add_callback(BeforeModelCallEvent, linger)

    async def main() -> list[str]:
        refused = asyncio.create_task(agent.invoke_async("go"))
        await asyncio.sleep(0.001)
        other = asyncio.create_task(agent.invoke_async("go"))
        ended = await asyncio.wait_for(refused, PATIENCE_SECONDS)
        release.set()
        return [str(each.stop_reason) for each in [ended, await other]]

    assert asyncio.run(main()) == ["killed", "end_turn"]
    blocks = [block for message in agent.messages for block in message["content"]]
    assert len([block for block in blocks if "toolResult" in block]) == 1


def test_deadline_ends_only_its_invocation(events: list[Event], fake_time: FakeTime) -> None:
    """One times out while its provider hangs; the others answer after that."""
    enable(Limits(max_duration_seconds=30), observers=[events.append])
    agent = reentrant(model := Waiting([]))

    async def main() -> list[str]:
        first = asyncio.create_task(agent.invoke_async("go"))
        await asyncio.sleep(0)
        enable(Limits(max_duration_seconds=60), observers=[events.append])
        others = [asyncio.create_task(agent.invoke_async("go")) for _ in range(2)]
        await model.all_asked.wait()
        fake_time.advance(30)
        ended = await asyncio.wait_for(first, PATIENCE_SECONDS)
        model.go_on.set()
        return [str(each.stop_reason) for each in [ended, *await asyncio.gather(*others)]]

    assert asyncio.run(main()) == ["max_duration", "end_turn", "end_turn"]
    stops = [event for event in events if isinstance(event, Stop)]
    # Only the first one had an expired deadline, and it ended no earlier.
    assert [stop.reason for stop in stops] == ["max_duration", "end_turn", "end_turn"]
    assert stops[0].seconds == 30
