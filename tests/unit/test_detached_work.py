"""Work that outlives a turn or an agent: memory extraction and background tools, counted once."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from strands import Agent, tool
from strands.memory import ExtractionConfig, InvocationTrigger, MemoryManager, ModelExtractor
from strands.vended_memory_stores import TestMemoryStore as MemoryStore

from otel_limits import Event, Limits, enable
from otel_limits.runs.registry import LIVE, MAX_AGE_SECONDS
from otel_limits.testing import FakeTime, ScriptedModel, endless, says, tokens, uses
from tests.unit.test_tracked_requests import calls, extract, read, stops

if TYPE_CHECKING:
    import pytest

    from tests.conftest import MakeAgent, Metric


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
