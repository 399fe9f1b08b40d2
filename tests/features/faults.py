"""Our own faults: never felt by the agents of any framework."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from unittest.mock import patch

import otel_limits
from otel_limits import Event, InternalError, Limits, ModelCall, Stop
from otel_limits.core.policy import Policy
from otel_limits.core.price_lookup import Prices
from otel_limits.runs.registry import LIVE
from otel_limits.testing import endless, fails, says
from tests.features.observed import SEARCH, TURNS, enabled
from tests.features.seen import STEPS, Row, expect, facts, recording

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from tests.features.subject import Subject


def failing(*_: Any, **__: Any) -> Any:
    """A function that always fails."""
    raise OSError("out of order")


def failing_observer(subject: Subject) -> None:
    """Each failure is counted, no other observer misses an event, and the agent is halted."""
    events: list[Event] = []
    with enabled(limits=TURNS, observers=[failing, events.append]):
        model = subject.model(endless(SEARCH))
        ending = subject.call(subject.agent(model))
    seen = facts(subject, model, ending, events)
    faults = {each.component for each in events if isinstance(each, InternalError)}
    expect({**seen, "faults": faults}, calls=2, reason="max_turns", text=STEPS, faults={"observer"})


def failing_prices(subject: Subject) -> None:
    """A call without a price counts with its tokens, and is not free."""
    with patch.object(Prices, "quote", failing), recording(limits=TURNS) as events:
        model = subject.model(endless(SEARCH))
        ending = subject.call(subject.agent(model))
    prices = [each.price for each in events if isinstance(each, ModelCall)]
    seen = {**facts(subject, model, ending, events), "prices": prices}
    expect(seen, calls=2, reason="max_turns", prices=[None] * 2, tokens=[15] * 2)


def failing_judgement(subject: Subject) -> None:
    """A fault in comparing with the limits permits one further call, and no more."""
    judge, numbers = Policy.breaches, itertools.count(1)

    def fail_once(policy: Policy, *tallies: Any) -> Any:
        if next(numbers) == 2:
            failing()
        return judge(policy, *tallies)

    with patch.object(Policy, "breaches", fail_once), recording(limits=TURNS) as events:
        model = subject.model(endless(SEARCH))
        ending = subject.call(subject.agent(model))
    seen = facts(subject, model, ending, events)
    expect({**seen, "few": model.calls in (2, 3)}, few=True, reason="max_turns", synthetic=True)


class UnreadableError(Exception):
    """An error of a client whose attributes raise when they are read."""

    def __getattr__(self, name: str) -> Any:
        """Raise, and not an `AttributeError`."""
        raise OSError(f"{name} is gone")


def unreadable_error(subject: Subject) -> None:
    """An error of a model that cannot be read is the program's own, and the call is counted."""

    def felt() -> str:
        agent = subject.agent(subject.model([fails(UnreadableError("down"))]))
        try:
            subject.call(agent)
        except Exception as error:  # noqa: BLE001  compared below
            return repr(error)
        return ""

    without = felt()
    with recording(limits=TURNS) as events:
        limited = felt()
    ends = [each.reason for each in events if isinstance(each, Stop)]
    calls = sum(isinstance(each, ModelCall) for each in events)
    seen = {"error": limited, "ends": ends, "calls": calls}
    expect(seen, error=without, ends=["error"], calls=1)


PACKAGE: Final = Path(otel_limits.__file__).parent
ROOMS: Final = tuple(f"{PACKAGE / room}/" for room in ("core", "runs", "usage"))
"""Rooms whose functions every binding calls."""
Trace = Callable[["FrameType", str, Any], None]
Wrong = Mapping[str, tuple[str, int, int, int]]
"""By function: how the agent ended, its model calls, errors reported, and invocations left."""
ENTRANCES: Final = {"guarded", "finish", "forget"}
"""Functions on the way in and out, which do nothing that can fail but call what they guard."""


@contextlib.contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Set a function that sees each call of a function, also for threads that begin within."""
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(cast("Any", None))  # as documented


def outcome_of(subject: Subject, trace: Trace) -> tuple[str, int]:
    """Call an agent under a trace function; returns how it ended, and after how many calls."""
    model = subject.model([SEARCH, SEARCH, says("done")])
    agent = subject.agent(model)
    try:
        with traced(trace):
            ending = asyncio.run(subject.call_later(agent))
    except Exception as felt:  # noqa: BLE001  compared by the caller
        return repr(felt), model.calls
    return ending.stop.reason if ending.stop else "end", model.calls


def shared_functions(subject: Subject) -> Mapping[CodeType, str]:
    """Return the names of the functions that all bindings share, of those that an agent calls."""
    called: dict[CodeType, str] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS) and code.co_name[0] != "<":
            called[code] = f"{Path(code.co_filename).stem}.{code.co_name}"

    with recording(limits=Limits(max_turns=1)):
        outcome_of(subject, lambda *_: None)  # what is done once per process
        outcome_of(subject, note)
    assert len(called) > 50
    return {code: name for code, name in called.items() if code.co_name not in ENTRANCES}


def faults_in(subject: Subject, functions: Mapping[CodeType, str]) -> Wrong:
    """Throw in each of these functions once, while an agent runs; returns what went wrong.

    A fault is reported. It can cost one more turn, the message of a halt and, at the beginning of
    the invocation, its limits.
    """
    wrong = {}
    with recording(limits=Limits(max_turns=1)) as events:
        for code, name in functions.items():
            events.clear()
            outcome = outcome_of(subject, throwing_in(code))
            reported = sum(isinstance(each, InternalError) for each in events)
            permitted = [("max_turns", 1), ("max_turns", 2), *(("end", n) for n in (1, 2, 3))]
            if outcome not in permitted or reported != 1 or len(LIVE):
                wrong[name] = (*outcome, reported, len(LIVE))
            LIVE.after_fork()
    return wrong


def throwing_in(code: CodeType) -> Trace:
    """Make a trace function that throws an error when a function is called first."""
    thrown: list[bool] = []

    def throw(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code is code and event == "call" and not thrown:
            thrown.append(True)
            raise RuntimeError("thrown")

    return throw


FAULT_ROWS: Final[Mapping[str, Row]] = {
    "observer that fails": failing_observer,
    "prices that fail": failing_prices,
    "judgement that fails once": failing_judgement,
    "error that cannot be read": unreadable_error,
}
"""Rows in which otel-limits logs errors."""
