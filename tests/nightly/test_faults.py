"""Faults inside otel-limits: never felt by the agent, counted once, and nothing lost to them."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import TYPE_CHECKING, Any

import pytest
from strands.telemetry import tracer as strands_tracer

from otel_limits import Event, InternalError, Limits, ModelCall, Stop, enable
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, says, uses
from tests.features.faults import faults_in, shared_functions
from tests.nightly.each_call import SECOND, InternalCalls
from tests.unit.agents.test_behaviours import COLUMNS, source_of
from tests.unit.core.test_internal_errors import search

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strands import Agent

    from otel_limits.core.policy import Action
    from tests.conftest import MakeAgent
    from tests.nightly.each_call import Profile

pytestmark = pytest.mark.usefixtures("faulty")

CALLS = InternalCalls(
    """
    start end stream _begun begin leave is_on _ended after_leg agent_stage model_stage
    ending_as_last stream_async _follow_leg _follow _follow_response gives_call_to note_chunk
    on_start on_end tool_stage _stop put_stop invocation_of get _module switch_in switch_out
    with_text _track_progress accept_or_reject
    """
)
"""Functions on the way in and out, which do nothing that can fail but call the next or what they
guard, and the one that replaces the stop reason: a fault in it leaves the framework's own."""


def run_with(agent: Agent, profile: Profile) -> str:
    """Invoke `agent` under a profile function and return its stop reason."""

    async def invoke() -> str:
        sys.setprofile(profile)
        try:
            return str((await agent.invoke_async("go")).stop_reason)
        finally:
            sys.setprofile(None)

    return asyncio.run(invoke())


def short_runaway(make_agent: MakeAgent, action: Action) -> Agent:
    """An agent that would end by itself after two or three model calls."""
    script = [uses("search"), SECOND[action], says("done")]
    return make_agent(ScriptedModel(script), tools=[search])


@pytest.mark.parametrize(
    ("source", "action", "error", "which"),
    [
        ("spans", "halt", RecursionError, "first"),
        ("hooks", "halt", RuntimeError, "last"),
        ("spans", "wrap_up", RuntimeError, "last"),
        ("hooks", "wrap_up", RuntimeError, "first"),
    ],
    indirect=["source"],
)
def test_a_fault_in_each_internal_call_in_turn(
    source: str, action: Action, error: type[Exception], which: str, make_agent: MakeAgent
) -> None:
    """The agent still halts; the fault is counted once, and no call is lost or zero.

    A fault in the counting of a turn permits one further turn, and no more. One in the last answer
    costs its mark. After a fault at its start, an invocation is not followed at all.
    """
    events: list[Event] = []
    enable(Limits(max_turns=1), action=action, observers=[events.append])
    short_runaway(make_agent, action)("go")  # what is done once per process
    inside = CALLS.count(functools.partial(run_with, short_runaway(make_agent, action)))
    wrong = {}
    for name, times in inside.items():
        events.clear()
        number = 1 if which == "first" else times
        agent, fault = short_runaway(make_agent, action), CALLS.throw_in(name, number, error)
        try:
            reason = run_with(agent, fault)
        except Exception as felt:  # noqa: BLE001  all of them are asserted below
            reason = repr(felt)
        assert fault.is_thrown, f"{name} was not called {number} times"
        assert isinstance(agent.model, ScriptedModel)
        booked = [fact.usage.total for fact in events if isinstance(fact, ModelCall)]
        spent = [fact.usage.total for fact in events if isinstance(fact, Stop)]
        seen = (reason, agent.model.calls, len([f for f in events if isinstance(f, InternalError)]))
        permitted = {("max_turns", 1, 1), ("max_turns", 2, 1)}
        if action == "wrap_up":
            permitted.add(("end_turn", 2, 1))
        if (name, error) == ("requests._copy", RecursionError):
            permitted = {("max_turns", 1, 0)}  # no fault: the messages are counted for each call
        is_counted = 0 not in booked and all(tokens >= 15 for tokens in spent)
        by_itself = 3 if action == "halt" else 2
        is_not_followed = seen == ("end_turn", by_itself, 1) and not booked and not any(spent)
        fine = (seen in permitted and is_counted) or is_not_followed
        fine = fine and len(LIVE) == 0
        if not fine:
            wrong[name, number] = (*seen, booked, spent, len(LIVE))
    assert not wrong, "\n".join(f"{place}: {seen}" for place, seen in wrong.items())


@pytest.mark.parametrize("column", COLUMNS)
def test_fault_in_each_shared_function(
    column: str, monkeypatch: pytest.MonkeyPatch, tracers: Mapping[str, Any]
) -> None:
    """The agents of every framework never feel it; a unit test tries each function in one."""
    monkeypatch.setattr(strands_tracer, "_tracer_instance", tracers[source_of(column)])
    subject = COLUMNS[column]
    assert faults_in(subject, shared_functions(subject)) == {}
