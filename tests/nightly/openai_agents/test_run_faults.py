"""Faults in the binding for the OpenAI Agents SDK: never felt by a run, and nothing lost."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import TYPE_CHECKING, Any

import pytest
from agents import Runner

from otel_limits import Event, InternalError, Limits, ModelCall, enable, stop_of
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedAgentsModel, says, uses
from tests.nightly.each_call import SECOND, InternalCalls
from tests.openai_agents.runs import UNTRACED, agent, streamed

if TYPE_CHECKING:
    from otel_limits.core.policy import Action
    from tests.nightly.each_call import Profile

pytestmark = pytest.mark.usefixtures("faulty")

CALLS = InternalCalls(
    """
    _only method coroutine_method wrapped _wrapped run run_streamed answer answered stream
    read_elsewhere invoke get_all_tools hook end end_by on_llm_start ended note_failure
    refused halted parts_of_refusal halted_parts _message response_of message_of events_of
    _events_of_text _is_typed text_of for_end_user track_run track_run_streamed
    track_get_response track_stream_response track_invocation track_get_all_tools _passed_on
    _end around run_sync
    """
)


def run_with(boss: Any, how: str, profile: Profile) -> str:
    """Run an agent under a profile function and return its stop reason."""

    async def run() -> Any:
        sys.setprofile(profile)
        try:
            if how == "run":
                return await Runner.run(boss, "go", run_config=UNTRACED)
            return await streamed(boss)
        finally:
            sys.setprofile(None)

    stop = stop_of(asyncio.run(run()))
    return stop.reason if stop is not None else "end_turn"


@pytest.mark.parametrize(
    ("how", "action", "error", "which"),
    [
        ("run", "halt", RuntimeError, "last"),
        ("run_streamed", "halt", RuntimeError, "last"),
        ("run", "wrap_up", RuntimeError, "last"),
        ("run_streamed", "wrap_up", RuntimeError, "last"),
    ],
)
def test_a_fault_in_each_internal_call_in_turn(
    how: str, action: Action, error: type[Exception], which: str
) -> None:
    """The run never feels it, no call is lost, and nothing stays live.

    A fault can cost the limits of an invocation or the message of its halt, and is reported.
    """
    events: list[Event] = []
    enable(Limits(max_turns=1), action=action, observers=[events.append])
    script = [uses("search"), SECOND[action], says("done")]
    run_with(agent(ScriptedAgentsModel(script)), how, lambda *_: None)  # done once per process
    inside = CALLS.count(functools.partial(run_with, agent(ScriptedAgentsModel(script)), how))
    wrong = {}
    for name, times in inside.items():
        events.clear()
        model = ScriptedAgentsModel(script)
        number = 1 if which == "first" else times
        fault = CALLS.throw_in(name, number, error)
        try:
            reason = run_with(agent(model), how, fault)
        except BaseException as felt:  # noqa: BLE001  all of them are asserted below
            reason = repr(felt)
        assert fault.is_thrown, f"{name} was not called {number} times"
        booked = [each.usage.total for each in events if isinstance(each, ModelCall)]
        faults = len([each for each in events if isinstance(each, InternalError)])
        is_felt = reason not in ("max_turns", "end_turn")
        if is_felt or faults != 1 or 0 in booked or len(LIVE):
            wrong[name, number] = (reason, model.calls, faults, booked, len(LIVE))
    assert not wrong, "\n".join(f"{place}: {seen}" for place, seen in wrong.items())
