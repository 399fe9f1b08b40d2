"""Random agents against a simple reference model: the counts agree, with limits and without."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strands import Agent, ModelRetryStrategy, tool
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent
from strands.types.exceptions import ModelThrottledException

import otel_limits
from otel_limits import Limits, Stop, enable
from otel_limits.testing import Answer, ScriptedModel, fails, says, tokens, uses

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Step:
    """One response of the model: what precedes it, and what it asks for."""

    total: int
    throttles: int = 0
    discards: int = 0
    tools: int = 0
    child: Program | None = None


@dataclass(frozen=True)
class Program:
    """An agent's program: legs of steps, each leg ending in text."""

    legs: tuple[tuple[Step, ...], ...]


@dataclass
class Counts:
    """The expected outcome of one invocation."""

    turns: int = 0
    calls: int = 0
    total: int = 0
    tool_calls: int = 0
    reason: str = "end_turn"
    children: list[Counts] = field(default_factory=list)


def breached(counts: Counts, turns: int | None, budget: int | None) -> str | None:
    """Decide as the documentation says."""
    if turns is not None and counts.turns >= turns:
        return "max_turns"
    return "max_token_budget" if budget is not None and counts.total >= budget else None


def simulate(program: Program, turns: int | None, budget: int | None) -> Counts:
    """Compute a program's outcome from the documentation alone."""
    counts = Counts()
    for leg in program.legs:
        reason = run_leg(leg, counts, turns, budget)
        refused = reason is not None and counts.reason == reason
        counts.reason = reason or "end_turn"
        if refused:
            break
    return counts


def run_leg(
    leg: tuple[Step, ...], counts: Counts, turns: int | None, budget: int | None
) -> str | None:
    """Run one leg; returns the reason when a limit ends it."""
    for step in leg:
        for _ in range(step.discards):
            if reason := breached(counts, turns, budget):
                return reason
            counts.calls += 1
            counts.total += step.total
        if reason := breached(counts, turns, budget):
            return reason
        counts.calls += step.throttles + 1
        counts.turns += 1
        counts.total += step.total
        if not step.tools and step.child is None:
            return None
        counts.tool_calls += step.tools + (step.child is not None)
        if step.child is not None:
            counts.children.append(simulate(step.child, turns, budget))
        if reason := breached(counts, turns, budget):
            return reason
    return None


def script(program: Program) -> Iterator[Answer]:
    """Script the model of a program."""
    for step in itertools.chain(*program.legs):
        yield from [answer(step, "discard me")] * step.discards
        yield from [fails(ModelThrottledException("busy"))] * step.throttles
        yield answer(step)


def answer(step: Step, text: str = "") -> Answer:
    """Script one response."""
    if text:
        return says(text, usage=tokens(step.total))
    if not step.tools and step.child is None:
        return says("done", usage=tokens(step.total))
    names = ["work"] * step.tools + ["ask"] * (step.child is not None)
    return uses(*names, arguments={}, usage=tokens(step.total))


def make(program: Program, name: str = "root") -> tuple[Agent, ScriptedModel]:
    """Make the agent of a program; its children are made when they are asked."""
    children = iter([step.child for step in itertools.chain(*program.legs) if step.child])

    @tool
    def work() -> str:
        """Work."""
        return "worked"

    @tool
    def ask() -> str:
        """Call the next child."""
        child, _model = make(next(children), "child")
        return str(child("go").stop_reason)

    model = ScriptedModel(script(program))
    agent = Agent(
        model=model,
        tools=[work, ask],
        name=name,
        callback_handler=None,
        retry_strategy=ModelRetryStrategy(max_attempts=6, initial_delay=0, max_delay=0),
    )
    legs = iter(range(len(program.legs) - 1))

    def resume(event: AfterInvocationEvent) -> None:
        event.resume = None if next(legs, None) is None else "go on"

    def discard(event: AfterModelCallEvent) -> None:
        response = event.stop_response
        event.retry = event.retry or (
            response is not None and response.message["content"] == [{"text": "discard me"}]
        )

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    agent.hooks.add_callback(AfterModelCallEvent, discard)
    return agent, model


def steps(children: st.SearchStrategy[Program] | None) -> st.SearchStrategy[Step]:
    """Generate steps that use tools."""
    return st.builds(
        Step,
        total=st.integers(2, 20),
        throttles=st.integers(0, 2),
        discards=st.integers(0, 2),
        tools=st.integers(1, 3),
        child=st.none() if children is None else st.one_of(st.none(), children),
    )


def programs(children: st.SearchStrategy[Program] | None = None) -> st.SearchStrategy[Program]:
    """Generate programs, whose steps may ask programs."""
    text = st.builds(Step, total=st.integers(2, 20), discards=st.integers(0, 1))
    leg = st.tuples(st.lists(steps(children), max_size=3), text).map(lambda p: (*p[0], p[1]))
    return st.lists(leg, min_size=1, max_size=3).map(lambda legs: Program(tuple(legs)))


def seen(events: list[Any]) -> list[tuple[str, int, int, int, int, str]]:
    """The published outcome of each invocation, in order of completion."""
    return [
        (fact.agent, fact.turns, fact.model_calls, fact.usage.total, fact.tool_calls, fact.reason)
        for fact in events
        if isinstance(fact, Stop)
    ]


def expected(counts: Counts, name: str = "root") -> list[tuple[str, int, int, int, int, str]]:
    """The expected outcomes: children end before their parents."""
    inner = [each for child in counts.children for each in expected(child, "child")]
    own = (name, counts.turns, counts.calls, counts.total, counts.tool_calls, counts.reason)
    return [*inner, own]


@pytest.mark.parametrize("followed", ["spans", "hooks"])
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    program=programs(programs()),
    turns=st.one_of(st.none(), st.integers(1, 6)),
    budget=st.one_of(st.none(), st.integers(1, 80)),
)
def test_the_counts_agree(
    followed: str,
    program: Program,
    turns: int | None,
    budget: int | None,
    tracers: Any,
) -> None:
    """Turns, calls, tokens, tools and reasons are those of the reference, for every agent."""
    from strands.telemetry import tracer as strands_tracer

    events: list[Any] = []
    enable(Limits(max_turns=turns, max_token_budget=budget), observers=[events.append])
    before, strands_tracer._tracer_instance = strands_tracer._tracer_instance, tracers[followed]
    try:
        agent, model = make(program)
        agent("go")
    finally:
        strands_tracer._tracer_instance = before
        otel_limits.disable()
    counts = simulate(program, turns, budget)
    assert seen(events) == expected(counts)
    assert model.calls == counts.calls
