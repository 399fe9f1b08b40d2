"""Faults in the binding for the OpenAI Agents SDK: never felt by a run, and nothing lost."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from agents import Runner

import otel_limits
from otel_limits import Event, InternalError, Limits, ModelCall, enable, stop_of
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedAgentsModel, says, uses
from tests.openai_agents.runs import UNTRACED, agent, streamed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

pytestmark = pytest.mark.usefixtures("faulty")

PACKAGE = str(Path(otel_limits.__file__).parent)

NOT_THROWN_IN = ("scripted_agents_model.py", "pending_waits.py", "script.py")
"""Scripted models, and the waits that every event goes through on its way."""

ENTRANCES = {
    *("guarded", "decorate", "suppress_errors", "_only", "next_of"),
    *("method", "coroutine_method", "wrapped", "_wrapped"),
    *("run", "run_streamed", "answer", "answered", "stream", "streamed", "read_elsewhere", "send"),
    *("invoke", "get_all_tools", "hook", "_prepare", "prepare", "_opened", "end", "end_by"),
    *("on_llm_start", "admit", "settle", "wait", "ended", "finish", "forget", "note_failure"),
    *("refused", "halted", "parts_of_refusal", "halted_parts", "_message", "response_of"),
    *("message_of", "events_of", "_events_of_text", "_is_typed", "text_of", "for_end_user"),
    *("track_run", "track_run_streamed", "track_get_response", "track_stream_response"),
    *("track_invocation", "track_get_all_tools", "_passed_on", "_end", "around"),
    *("_finish_run", "run_sync"),
}
"""Functions on the way in and out, which do nothing that can fail but call what they guard."""


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


def run_with(boss: Any, how: str, profile: Callable[[FrameType, str, Any], None]) -> str:
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
    ("how", "error", "which"),
    [("run", RuntimeError, "last"), ("run_streamed", RuntimeError, "last")],
)
def test_a_fault_in_each_internal_call_in_turn(
    how: str, error: type[Exception], which: str
) -> None:
    """The run never feels it, no call is lost, and nothing stays live.

    A fault can cost the limits of an invocation or the message of its halt, and is reported.
    """
    events: list[Event] = []
    enable(Limits(max_turns=1), observers=[events.append])
    script = [uses("search"), uses("search"), says("done")]
    run_with(agent(ScriptedAgentsModel(script)), how, lambda *_: None)  # done once per process
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_ours(frame):
            called.append(name_of(frame))

    run_with(agent(ScriptedAgentsModel(script)), how, note)
    inside = Counter(called)
    assert len(inside) > 50
    wrong = {}
    for name, times in inside.items():
        events.clear()
        model = ScriptedAgentsModel(script)
        try:
            number = 1 if which == "first" else times
            reason = run_with(agent(model), how, throw_in(name, number, error))
        except BaseException as felt:  # noqa: BLE001  all of them are asserted below
            reason = repr(felt)
        booked = [each.usage.total for each in events if isinstance(each, ModelCall)]
        faults = len([each for each in events if isinstance(each, InternalError)])
        is_felt = reason not in ("max_turns", "end_turn")
        if is_felt or faults != 1 or 0 in booked or len(LIVE):
            wrong[name, number] = (reason, model.calls, faults, booked, len(LIVE))
        LIVE.after_fork()
    assert not wrong, "\n".join(f"{place}: {seen}" for place, seen in wrong.items())
