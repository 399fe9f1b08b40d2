"""Faults inside otel-limits: never felt by the agent, counted once, and nothing lost to them."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import otel_limits
from otel_limits import Event, InternalError, Limits, ModelCall, Stop, enable
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, says, uses
from tests.unit.test_faults import search

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from strands import Agent

    from tests.conftest import MakeAgent

pytestmark = pytest.mark.usefixtures("faulty")

PACKAGE = str(Path(otel_limits.__file__).parent)

ENTRANCES = {
    "guarded",
    "decorate",
    "suppress_errors",
    "start",
    "end",
    "stream",
    "prepare",
    "_begun",
    "begin",
    "leave",
    "is_on",
    "_ended",
    "after_leg",
    "finish",
    "forget",
    "agent_stage",
    "model_stage",
    "stream_async",
    "_follow_leg",
    "_follow",
    "_follow_response",
    "streamed",
    "admit",
    "_prepare",
    "_opened",
    "send",
    "wait",
    "gives_call_to",
    "read_part",
    "settle",
    "__enter__",
    "__exit__",
    "_finish_run",
    "next_of",
    "note_chunk",
    "on_start",
    "on_end",
    "tool_stage",
    "_stop",
    "put_stop",
    "live_of",
    "get",
    "_module",
    "switch_in",
    "switch_out",
    "with_text",
    "_track_progress",
}
"""Functions on the way in and out, which do nothing that can fail but call the next or what they
guard, and the one that replaces the stop reason: a fault in it leaves the framework's own."""


NOT_THROWN_IN = ("scripted_model.py", "pending_waits.py")
"""Scripted models, and the waits that every event goes through on its way."""


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame is one of those in which a fault is thrown."""
    code = frame.f_code
    return (
        code.co_filename.startswith(PACKAGE)
        and not code.co_filename.endswith(NOT_THROWN_IN)
        and code.co_name not in ENTRANCES
        and not code.co_name.startswith("<")
    )


def name_of(frame: FrameType) -> str:
    """Name the function of a frame."""
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


def run_with(agent: Agent, profile: Callable[[FrameType, str, Any], None]) -> str:
    """Invoke `agent` under a profile function and return its stop reason."""

    async def invoke() -> str:
        sys.setprofile(profile)
        try:
            return str((await agent.invoke_async("go")).stop_reason)
        finally:
            sys.setprofile(None)

    return asyncio.run(invoke())


def short_runaway(make_agent: MakeAgent) -> Agent:
    """An agent that would end by itself after three model calls."""
    return make_agent(ScriptedModel([uses("search")] * 2 + [says("done")]), tools=[search])


def calls_inside(make_agent: MakeAgent) -> Counter[str]:
    """How often a halted invocation calls every internal function."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_ours(frame):
            called.append(name_of(frame))

    run_with(short_runaway(make_agent), note)
    return Counter(called)


def throw_in(name: str, number: int, error: type[Exception]) -> Callable[..., None]:
    """Make a profile function that throws `error` when function `name` is called that often."""
    seen = 0

    def throw(frame: FrameType, event: str, _: Any) -> None:
        nonlocal seen
        if event == "call" and is_ours(frame) and name_of(frame) == name:
            seen += 1
            if seen == number:
                raise error(f"thrown in {name}")

    return throw


@pytest.mark.parametrize(
    ("source", "error", "which"),
    [("spans", RecursionError, "first"), ("hooks", RuntimeError, "last")],
    indirect=["source"],
)
def test_a_fault_in_each_internal_call_in_turn(
    source: str, error: type[Exception], which: str, make_agent: MakeAgent
) -> None:
    """The agent still halts; the fault is counted once, and no call is lost or zero.

    A fault in the counting of a turn permits one further turn, and no more. After a fault at its
    start, an invocation is not followed at all.
    """
    events: list[Event] = []
    enable(Limits(max_turns=1), observers=[events.append])
    short_runaway(make_agent)("go")  # what is done once per process
    inside = calls_inside(make_agent)
    assert len(inside) > 50
    wrong = {}
    for name, times in inside.items():
        events.clear()
        number = 1 if which == "first" else times
        agent = short_runaway(make_agent)
        try:
            reason = run_with(agent, throw_in(name, number, error))
        except Exception as felt:  # noqa: BLE001  all of them are asserted below
            reason = repr(felt)
        assert isinstance(agent.model, ScriptedModel)
        booked = [fact.usage.total for fact in events if isinstance(fact, ModelCall)]
        spent = [fact.usage.total for fact in events if isinstance(fact, Stop)]
        seen = (reason, agent.model.calls, len([f for f in events if isinstance(f, InternalError)]))
        permitted = {("max_turns", 1, 1), ("max_turns", 2, 1)}
        if (name, error) == ("projection._copy", RecursionError):
            permitted = {("max_turns", 1, 0)}  # no fault: the messages are counted for each call
        is_counted = 0 not in booked and all(tokens >= 15 for tokens in spent)
        is_not_followed = seen == ("end_turn", 3, 1) and not booked and not any(spent)
        fine = (seen in permitted and is_counted) or is_not_followed
        fine = fine and len(LIVE) == 0
        if not fine:
            wrong[name, number] = (*seen, booked, spent, len(LIVE))
        LIVE.after_fork()
    assert not wrong, "\n".join(f"{place}: {seen}" for place, seen in wrong.items())
