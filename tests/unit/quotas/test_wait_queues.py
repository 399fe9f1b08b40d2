"""Later calls of a fleet leave room for a waiting one, and sharers of a queue take turns."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import TYPE_CHECKING

import pytest

from otel_limits.quotas.wait_queues import LOOK_SECONDS, WaitQueues
from otel_limits.runs.clock import CLOCK
from otel_limits.testing import ScriptedModel, endless, says
from tests.quotas.fixtures import PATIENCE
from tests.quotas.gates import quota
from tests.quotas.waiters import until

if TYPE_CHECKING:
    from otel_limits.testing import FakeTime
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold
    from tests.quotas.gates import OpenGate


def test_thousand_calls_of_one_sharer_do_not_delay_another() -> None:
    """Neither in their order, nor by the time that joining takes."""

    async def run() -> None:
        lines = WaitQueues(CLOCK)
        line = ("q", uuid.uuid4().hex)
        first = lines.join({line: "a"}, lambda: False)
        lines.requeue(first, [line])
        waiting = [lines.join({line: "a"}, lambda: False) for _ in range(999)]
        another = lines.join({line: "b"}, lambda: False)
        waiting.append(another)
        lines.leave(first)
        served = []
        while woken := [each for each in waiting if each.is_woken]:
            served += woken
            waiting = [each for each in waiting if not each.is_woken]
            lines.leave(woken[0])
        assert served.index(another) == 0
        assert len(served) == 1_000
        lines.close()

    asyncio.run(run())


def test_fair_by_without_waiting_is_an_error(hold: Hold) -> None:
    """Its author expects a queue."""
    with pytest.raises(ValueError, match="add on_exceeded: wait, or remove fair_by"):
        hold({"q": {"tokens": 5, "window": "day", "fair_by": "baggage.tenant.id"}})


def test_fair_by_is_a_source(hold: Hold, make_agent: MakeAgent) -> None:
    """Callers without the value share their turns."""
    with pytest.raises(ValueError, match="fair_by must consist of agent, model"):
        hold({"q": {"concurrency": 5, "on_exceeded": "wait", "fair_by": "tenant"}})
    hold({"q": {"concurrency": 5, "on_exceeded": "wait", "fair_by": "attribute.tenant"}})
    model = ScriptedModel(endless(says("done")))
    assert make_agent(model)("go").stop_reason == "end_turn"


@pytest.mark.parametrize("state", ["in a queue", "behind the first of its invocation"])
def test_call_that_the_garbage_collector_closes_waits_for_no_lock(
    state: str, open_gate: OpenGate, fake_time: FakeTime
) -> None:
    """It may do so in a thread that holds any lock. The call leaves its queues later."""
    gate = open_gate(quota(), quota("runs", "invocations", amount=9))
    is_locked, may_continue = threading.Event(), threading.Event()

    def is_cancelled() -> bool:
        # The clock checks it while it holds the lock of the queues.
        if threading.current_thread().name == "otel-limits-deadlines":
            is_locked.set()
            may_continue.wait(PATIENCE)
        return False

    async def run() -> None:
        holder, last = gate.request(), gate.request("last", is_cancelled=is_cancelled)
        assert await gate.admit(holder)
        calls = [gate.request("gone", "1")]
        if state != "in a queue":
            calls.append(gate.request("gone", "2"))
        closed = [gate.engine.admit_by_quotas(each) for each in calls]
        for each in closed:
            each.send(None)
        task = asyncio.create_task(gate.admit(last))
        await until(lambda: gate.recorder.waiting == 2)
        looking = threading.Thread(target=fake_time.advance, args=(LOOK_SECONDS,))
        looking.start()
        assert is_locked.wait(PATIENCE)
        closing = threading.Thread(target=lambda: [each.close() for each in closed])
        closing.start()
        closing.join(5.0)
        was_blocked = closing.is_alive()
        may_continue.set()
        for thread in (closing, looking):
            thread.join()
        assert not was_blocked
        fake_time.advance(LOOK_SECONDS)
        assert gate.recorder.waiting == 1
        await gate.settle(holder)
        assert await task
        assert (gate.used(), gate.used("runs")) == ((0, 1), (1, 1))

    asyncio.run(run())


def test_next_call_removes_what_is_left_of_a_closed_one(open_gate: OpenGate) -> None:
    """It reserves nothing any longer."""
    gate = open_gate(quota())

    async def run() -> None:
        gate.executor.is_silent = True
        closed = gate.engine.admit_by_quotas(gate.request("i"))
        closed.send(None)
        closed.close()
        assert gate.used() == (0, 1)
        gate.executor.is_silent = False
        assert await gate.admit(gate.request())

    asyncio.run(run())
