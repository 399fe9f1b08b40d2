"""Later calls of a fleet leave room for a waiting one, and sharers of a queue take turns."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

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
        waiting = lines.join({line: "a"}, lambda: False)
        lines.requeue(waiting, [line])
        for _ in range(999):
            lines.join({line: "a"}, lambda: False)
        another = lines.join({line: "b"}, lambda: False)
        served: list[Any] = []
        while (first := lines._first(line)) is not None:
            served.append(first)
            lines.leave(first)
        assert served.index(another) == 1
        assert len(served) == 1_001
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
