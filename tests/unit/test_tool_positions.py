"""Calls of one turn are distinguished by position, whatever ids a model gives them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool
from strands.hooks import BeforeToolCallEvent
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor

from otel_limits import Limits, ToolCall, enable
from otel_limits.testing import Answer, ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from strands.types.streaming import StreamEvent

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent

pytestmark = pytest.mark.usefixtures("source")

EXECUTORS = pytest.mark.parametrize("executor", [ConcurrentToolExecutor, SequentialToolExecutor])


class OneId(ScriptedModel):
    """Gives every tool use of every turn the same id, as some models do."""

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer with one id for all."""
        async for event in super().stream(*arguments, **named):
            use = event.get("contentBlockStart", {}).get("start", {}).get("toolUse")
            if use is not None:
                use["toolUseId"] = "call_0"
            yield event


@tool
async def look(query: str) -> str:
    """Look something up; the first query takes longest."""
    await asyncio.sleep(0.02 if query == "a" else 0)
    return f"about {query}"


def asks(*queries: str) -> Answer:
    """Ask for `look` with each of these."""
    return Answer(tools=tuple(("look", {"query": each}) for each in queries))


@EXECUTORS
def test_different_calls_with_one_id_are_no_loop(
    make_agent: MakeAgent, executor: Any, events: list[Event]
) -> None:
    """Each has its own arguments and its own result."""
    enable(Limits(max_identical_tool_calls=2), observers=[events.append])
    model = OneId([asks("a", "b", "c"), says("done")])
    agent = make_agent(model, tools=[look], tool_executor=executor())
    assert (agent("go").stop_reason, model.calls) == ("end_turn", 2)
    calls = [fact for fact in events if isinstance(fact, ToolCall)]
    assert len({call.fingerprint for call in calls}) == 3
    assert [call.status for call in calls] == ["success"] * 3


@EXECUTORS
def test_equal_calls_with_one_id_are_a_loop(make_agent: MakeAgent, executor: Any) -> None:
    """Repetition is still detected."""
    enable(Limits(max_identical_tool_calls=3))
    model = OneId(endless(asks("a", "b", "a")))
    agent = make_agent(model, tools=[look], tool_executor=executor())
    assert (agent("go").stop_reason, model.calls) == ("loop_detected", 2)


@EXECUTORS
@pytest.mark.parametrize("replaces", [False, True], ids=["as-asked", "replaced-by-a-hook"])
def test_only_what_has_no_call_left_is_refused(
    make_agent: MakeAgent, executor: Any, events: list[Event], *, replaces: bool
) -> None:
    """Of five calls with one id, the first two run; also where a hook rewrites each of them."""
    enable(Limits(max_tool_calls=2), observers=[events.append])
    ran: list[str] = []

    @tool
    async def look(query: str) -> str:
        """Look something up."""
        ran.append(query)
        return f"about {query}"

    agent = make_agent(
        OneId(endless(asks("a", "b", "c", "d", "e"))), tools=[look], tool_executor=executor()
    )
    if replaces:
        agent.hooks.add_callback(BeforeToolCallEvent, replace_use)
    assert agent("go").stop_reason == "max_tool_calls"
    assert ran == ["a", "b"]
    statuses = [fact.status for fact in events if isinstance(fact, ToolCall)]
    assert statuses == ["success"] * 2 + ["refused"] * 3


def replace_use(event: BeforeToolCallEvent) -> None:
    """Replace a tool use with another object."""
    event.tool_use = {**event.tool_use}


# --- the nudge ------------------------------------------------------------------------------------


def nudged(agent: Any) -> list[tuple[str, bool]]:
    """Return each result's text, and whether it contains the nudge."""
    return [
        (block["toolResult"]["content"][0]["text"], "repeating yourself" in str(block))
        for message in agent.messages
        for block in message["content"]
        if "toolResult" in block
    ]


@EXECUTORS
@pytest.mark.parametrize("model", [ScriptedModel, OneId])
@pytest.mark.parametrize("order", [("b", "a", "c"), ("a", "b", "c"), ("b", "c", "a")])
def test_the_nudge_lands_on_the_call_that_repeats(
    make_agent: MakeAgent, executor: Any, model: type[ScriptedModel], order: tuple[str, ...]
) -> None:
    """At any position in its turn, and in any order of completion."""
    enable(Limits(max_identical_tool_calls=3))
    script = [asks("a"), asks(*order), says("done")]
    agent = make_agent(model(script), tools=[look], tool_executor=executor())
    agent("go")
    expected = [("about a", False), *((f"about {each}", each == "a") for each in order)]
    assert nudged(agent) == expected


def test_an_exempt_call_is_not_nudged(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may repeat; the positions of the others still count it."""
    monkeypatch.setenv("OTEL_LIMITS_EXEMPT_TOOLS", "search")
    enable(Limits(max_identical_tool_calls=3))
    script = [
        asks("a"),
        Answer(tools=(("search", {}), ("look", {"query": "a"}), ("search", {}))),
        says("done"),
    ]

    @tool
    def search() -> str:
        """Search."""
        return "nothing"

    agent = make_agent(ScriptedModel(script), tools=[look, search])
    agent("go")
    assert [is_nudged for _, is_nudged in nudged(agent)] == [False, False, True, False]


def test_without_progress_the_last_call_is_nudged(make_agent: MakeAgent) -> None:
    """No single call repeats: the turn does."""
    enable(Limits(max_no_progress_turns=2))
    agent = make_agent(ScriptedModel([uses("search"), uses("search", "search"), says("done")]))
    agent("go")
    assert [is_nudged for _, is_nudged in nudged(agent)] == [False, False, True]
