"""Concurrent invocations of one agent: ending one leaves the others alone."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.hooks import BeforeModelCallEvent
from strands.middleware import InvokeModelStage
from strands.tools.executors import SequentialToolExecutor
from strands.types.exceptions import ModelThrottledException

import otel_limits
from otel_limits import Limits, ModelCall, Started, Stop, enable
from otel_limits.runs.registry import LIVE
from otel_limits.testing import Answer, FakeTime, ScriptedModel, endless, says, uses
from tests.processes import PATIENCE_SECONDS
from tests.unit.test_deadlines import FIRST_CHUNKS
from tests.unit.test_trees import agent_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from strands.types.streaming import StreamEvent

    from otel_limits import Event

pytestmark = pytest.mark.usefixtures("source")

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
