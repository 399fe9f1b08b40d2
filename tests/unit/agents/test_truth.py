"""The sum of the ledger is the scripted truth, in every way in which an agent spends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent
from strands.multiagent import GraphBuilder
from strands.types.exceptions import (
    ContextWindowOverflowException,
    EventLoopException,
    ModelThrottledException,
)

from otel_limits import Limits, enable
from otel_limits.testing import Answer, ScriptedModel, endless, fails, says, tokens, uses

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

ONE = 15
"""Tokens that a scripted answer reports unless told otherwise."""


class Verdict(BaseModel):
    """A structured output."""

    verdict: str = "fine"


@tool
def search(query: str = "") -> str:
    """Search."""
    return "nothing"


def agent(*script: Answer, name: str = "a", **arguments: Any) -> Agent:
    """Make an agent that follows a script."""
    defaults: dict[str, Any] = {"tools": [search], "name": name, "callback_handler": None}
    return Agent(model=ScriptedModel(script), **(defaults | arguments))


@dataclass(frozen=True)
class Truth:
    """The real usage of a scenario, as scripted."""

    tokens: int
    """Reported by the model."""
    calls: int
    """Requests that reached it."""
    estimated_calls: int = 0
    """Of these, those without usage that were still billed."""
    stops: dict[str, int] = field(default_factory=dict)
    """Invocations by reason."""


Scenario = Callable[[], Truth]


def plain() -> Truth:
    """Two turns and an answer."""
    agent(uses("search"), uses("search"), says("x"))("go")
    return Truth(3 * ONE, 3, stops={"end_turn": 1})


def used_again() -> Truth:
    """One agent three times: Strands' own sums would count 6 answers."""
    one = agent(says("x"), says("y"), says("z"))
    for _ in range(3):
        one("go")
    return Truth(3 * ONE, 3, stops={"end_turn": 3})


def halted() -> Truth:
    """A limit ends a runaway."""
    model = ScriptedModel(endless(uses("search")))
    one = Agent(model=model, tools=[search], callback_handler=None)
    one("go")
    one("go")
    return Truth(10 * ONE, 10, stops={"max_turns": 2})


def resumed() -> Truth:
    """A hook starts a second leg of the same invocation."""
    one = agent(says("x"), says("y"))
    left = iter([True])

    def resume(event: AfterInvocationEvent) -> None:
        if next(left, False):
            event.resume = "once more"

    one.hooks.add_callback(AfterInvocationEvent, resume)
    one("go")
    return Truth(2 * ONE, 2, stops={"end_turn": 1})


def retried() -> Truth:
    """A hook has a response made again: both cost."""
    one = agent(says("x"), says("y"))
    left = iter([True])

    def retry(event: AfterModelCallEvent) -> None:
        event.retry = next(left, False)

    one.hooks.add_callback(AfterModelCallEvent, retry)
    one("go")
    return Truth(2 * ONE, 2, stops={"end_turn": 1})


def throttled(monkeypatch: pytest.MonkeyPatch) -> Truth:
    """A provider refuses twice before it answers: refusals cost nothing."""

    async def at_once(_seconds: float) -> None:
        return None

    monkeypatch.setattr("strands.event_loop._retry.asyncio.sleep", at_once)
    refusal = fails(ModelThrottledException("slow down"))
    agent(refusal, refusal, says("x"))("go")
    return Truth(ONE, 3, stops={"end_turn": 1})


def nested() -> Truth:
    """An agent is another's tool."""
    child = agent(uses("search"), says("y"), name="child")
    parent = agent(
        uses("child", arguments={"input": "go"}),
        says("x"),
        name="parent",
        tools=[child.as_tool(name="child", description="Ask.")],
    )
    parent("go")
    return Truth(4 * ONE, 4, stops={"end_turn": 2})


def graph() -> Truth:
    """Two nodes work one after the other."""
    builder = GraphBuilder()
    builder.add_node(agent(says("x"), name="one"), "one")
    builder.add_node(agent(uses("search"), says("y"), name="two"), "two")
    builder.add_edge("one", "two")
    builder.set_entry_point("one")
    builder.set_max_node_executions(10)
    builder.build()("go")
    return Truth(3 * ONE, 3, stops={"end_turn": 2})


def summarised() -> Truth:
    """The context overflows and a model summarises it: that costs too."""
    history: list[Any] = [
        {"role": role, "content": [{"text": str(n)}]}
        for n in range(10)
        for role in ("user", "assistant")
    ]
    agent(
        fails(ContextWindowOverflowException("too long")),
        says("summary", usage=tokens(100)),
        says("x"),
        messages=history,
        conversation_manager=SummarizingConversationManager(preserve_recent_messages=2),
    )("go")
    return Truth(100 + ONE, 3)


def structured() -> Truth:
    """A structured output is forced after an answer in words."""
    one = agent(says("x"), uses("Verdict", arguments={"verdict": "good"}))
    one("go", structured_output_model=Verdict)
    return Truth(2 * ONE, 2, stops={"tool_use": 1})


def unreported() -> Truth:
    """If a provider reports no usage, an estimate replaces it and is marked."""
    agent(uses("search"), says("x", usage=None))("go")
    return Truth(ONE, 2, estimated_calls=1, stops={"end_turn": 1})


def broken_off() -> Truth:
    """A model fails in mid-stream: its input was billed."""
    one = agent(uses("search"), says("x", usage=None, error=ConnectionError("gone")))
    with pytest.raises(EventLoopException):
        one("go")
    return Truth(ONE, 2, estimated_calls=1, stops={"error": 1})


def refused() -> Truth:
    """A model fails before anything came: nothing was billed."""
    one = agent(uses("search"), fails(ConnectionError("gone")))
    with pytest.raises(EventLoopException):
        one("go")
    return Truth(ONE, 2, stops={"error": 1})


def abandoned() -> Truth:
    """A reader leaves in mid-stream: the call is billed, and estimated."""

    async def leave() -> None:
        events = agent(uses("search"), says("a long answer"), says("never")).stream_async("go")
        starts = 0
        async for event in events:
            starts += "messageStart" in event.get("event", {})
            if starts == 2:
                break
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    return Truth(ONE, 2, estimated_calls=1, stops={"aborted": 1})


def cached() -> Truth:
    """Cached tokens outside the input are input too, once."""
    usage = {
        "inputTokens": 40,
        "outputTokens": 7,
        "totalTokens": 147,
        "cacheReadInputTokens": 90,
        "cacheWriteInputTokens": 10,
    }
    agent(says("x", usage=usage))("go")
    return Truth(147, 1, stops={"end_turn": 1})


def in_parallel() -> Truth:
    """Many concurrent agents, on one event loop."""

    async def work() -> None:
        many = [agent(uses("search"), says("x"), name=f"n{number}") for number in range(12)]
        await asyncio.gather(*(each.invoke_async("go") for each in many))

    asyncio.run(work())
    return Truth(24 * ONE, 24, stops={"end_turn": 12})


SCENARIOS: dict[str, Callable[..., Truth]] = {
    scenario.__name__: scenario
    for scenario in (
        plain,
        used_again,
        halted,
        resumed,
        retried,
        throttled,
        nested,
        graph,
        summarised,
        structured,
        unreported,
        broken_off,
        refused,
        abandoned,
        cached,
        in_parallel,
    )
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_ledger_is_the_truth(
    source: str, ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Calls, tokens, estimates and stops are those that the script says, and the totals agree."""
    enable(Limits(max_turns=5))
    scenario = SCENARIOS[name]
    truth = scenario(monkeypatch) if name == "throttled" else scenario()
    calls, invocations = ledger.calls(), ledger.invocations()
    estimated = [call for call in calls if call["estimated"]]
    exact = [call for call in calls if not call["estimated"]]
    assert sum(c["input_tokens"] + c["output_tokens"] for c in exact) == truth.tokens
    assert (len(calls), len(estimated)) == (truth.calls, truth.estimated_calls)
    assert all(call["input_tokens"] > 0 for call in estimated)
    for row in invocations:
        own = [call for call in calls if call["invocation_id"] == row["id"]]
        assert row["model_calls"] == len(own)
        for column in ("input_tokens", "output_tokens", "cache_read_tokens"):
            assert row[column] == sum(call[column] for call in own)
    reasons = [row["reason"] for row in invocations]
    assert truth.stops in ({}, {reason: reasons.count(reason) for reason in set(reasons)})
