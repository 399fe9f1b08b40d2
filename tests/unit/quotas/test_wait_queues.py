"""Later calls of a fleet leave room for a waiting one, and sharers of a queue take turns."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import pytest

from otel_limits.quotas.wait_queues import WaitQueues
from otel_limits.runs.clock import CLOCK
from otel_limits.testing import ScriptedModel, endless, says

if TYPE_CHECKING:
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold


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
