"""Faults in the LangChain binding: never felt by the graph, counted once, and nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from otel_limits import Event, InternalError, Limits, ModelCall, Stop, enable, stop_of
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedChatModel, says, uses
from tests.langchain.graphs import ASK, STEPS, agent
from tests.nightly.each_call import SECOND, InternalCalls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.core.policy import Action
    from tests.nightly.each_call import Profile

pytestmark = pytest.mark.usefixtures("faulty")

CALLS = InternalCalls(
    """
    _only method coroutine_method wrapped _wrapped stream astream generate agenerate run arun
    answer answered answered_blocking streamed_blocking wrap _described _ended_in_time
    _is_asked request_for _request_for_all _request_within _request_for_all_within
    admit_blocking settle_blocking refused refuse halted passed _parts_of catch __class__
    last_chunks raise_if_asked _begun end end_by gate track_stream track_astream
    track_generate track_agenerate track_run track_arun _is_halt
    """
)


@contextlib.contextmanager
def profiled(profile: Profile) -> Iterator[None]:
    """Set a profile function, also for the threads in which LangGraph runs tools."""
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(cast("Any", None))  # as documented


def run_with(graph: Any, how: str, profile: Profile) -> str:
    """Invoke a graph under a profile function and return its stop reason."""

    async def invoke() -> Any:
        with profiled(profile):
            return await graph.ainvoke(ASK, STEPS)

    if how == "ainvoke":
        state = asyncio.run(invoke())
    else:
        with profiled(profile):
            # A fault in leaving a context would leave it to the tests that follow.
            state = contextvars.copy_context().run(graph.invoke, ASK, STEPS)
    stop = stop_of(state)
    return stop.reason if stop is not None else "end_turn"


@pytest.mark.parametrize(
    ("how", "action", "error", "which"),
    [
        ("invoke", "halt", RecursionError, "first"),
        ("ainvoke", "halt", RuntimeError, "last"),
        ("invoke", "wrap_up", RuntimeError, "last"),
        ("ainvoke", "wrap_up", RuntimeError, "first"),
    ],
)
def test_a_fault_in_each_internal_call_in_turn(
    how: str, action: Action, error: type[Exception], which: str
) -> None:
    """The graph never feels it, every call counts, it ends at the limit, and nothing stays live.

    A fault in the counting of a turn permits one further turn. One in the halt can cost its
    message. One at the beginning leaves the graph without limits. Each is reported.
    """
    events: list[Event] = []
    enable(Limits(max_turns=1), action=action, observers=[events.append])
    script = [uses("search"), SECOND[action], says("done")]
    agent(ScriptedChatModel(script)).invoke(ASK, STEPS)  # what is done once per process
    inside = CALLS.count(functools.partial(run_with, agent(ScriptedChatModel(script)), how))
    wrong = {}
    for name, times in inside.items():
        events.clear()
        model = ScriptedChatModel(script)
        number = 1 if which == "first" else times
        fault = CALLS.throw_in(name, number, error)
        try:
            reason = run_with(agent(model), how, fault)
        except BaseException as felt:  # noqa: BLE001  all of them are asserted below
            reason = repr(felt)
        assert fault.is_thrown, f"{name} was not called {number} times"
        booked = [each.usage.total for each in events if isinstance(each, ModelCall)]
        counted = [each.model_calls for each in events if isinstance(each, Stop)]
        faults = len([each for each in events if isinstance(each, InternalError)])
        fine = (
            reason in ("max_turns", "end_turn")
            and model.calls in (1, 2)
            and faults == 1
            and 0 not in booked
            and all(calls >= model.calls for calls in counted)
            and len(LIVE) == 0
        )
        is_unlimited = (reason, faults, booked) == ("end_turn", 1, []) and len(LIVE) == 0
        if not (fine or is_unlimited):
            wrong[name, number] = (reason, model.calls, faults, booked, counted, len(LIVE))
    assert not wrong, "\n".join(f"{place}: {seen}" for place, seen in wrong.items())
