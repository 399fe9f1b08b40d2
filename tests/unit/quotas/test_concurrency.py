"""Concurrency quotas: slots are leased, renewed and released."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool
from strands.middleware import InvokeModelStage
from strands.types.events import ModelStopReason

from otel_limits.quotas.keys import Template
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.store import Count, Renew
from otel_limits.quotas.windows import UnboundedWindow
from otel_limits.runs.registry import LIVE
from otel_limits.settings.policy.reader import parse
from otel_limits.testing import ScriptedModel, says
from tests.quotas.waiters import Held, start, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.quotas.store import Operation
    from otel_limits.testing import FakeTime
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold

TWO = {"concurrency": 2}


def count() -> Count:
    """The count of quota `q`."""
    key = Template("").key("q", dict[str, object]().get)
    return Count("q", key.id, UnboundedWindow().at(time.time()), "concurrency", key.shown)


def test_slots_are_renewed_three_times_per_lease_while_held(
    hold: Hold, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, fake_time: FakeTime
) -> None:
    """With the default times: every ten seconds, for thirty."""
    hold({"q": TWO})
    sent: list[Renew] = []
    run_in_store = MemoryStore.run

    def note(store: MemoryStore, operations: Sequence[Operation]) -> Any:
        sent.extend(each for each in operations if isinstance(each, Renew))
        return run_in_store(store, operations)

    monkeypatch.setattr(MemoryStore, "run", note)

    async def run() -> None:
        model = Held()
        task = start(make_agent(model))
        await until(lambda: bool(model.asked))
        fake_time.advance(9.9)
        assert not sent
        fake_time.advance(0.1)
        (renewal,) = sent
        (demand,) = renewal.demands
        assert (demand.count, renewal.lease_seconds) == (count(), 30.0)
        fake_time.advance(20)
        assert len(sent) == 3
        model.may_answer.set()
        await task
        fake_time.advance(10)
        assert (len(sent), LIVE.clock.scheduled) == (3, 0)

    asyncio.run(run())


def test_answer_from_a_cache_frees_its_slot(hold: Hold, make_agent: MakeAgent) -> None:
    """Nothing was sent for the slot, which the agent in a tool of the answer needs."""
    hold({"q": {"concurrency": 1}})
    reasons: list[str] = []

    @tool
    def ask() -> str:
        """Call another agent."""
        reasons.append(str(make_agent(ScriptedModel([says("done")]))("go").stop_reason))
        return "asked"

    async def cache(context: Any, next_fn: Any) -> Any:
        if reasons:
            async for event in next_fn(context):
                yield event
            return
        wanted = {"toolUse": {"toolUseId": "1", "name": "ask", "input": {}}}
        message: Any = {"role": "assistant", "content": [wanted]}
        usage: Any = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
        yield ModelStopReason("tool_use", message, usage, {"latencyMs": 0})

    agent = make_agent(ScriptedModel([says("hello"), says("done")]), tools=[ask])
    agent("hello")  # middleware registered after the first invocation runs within our stage
    agent.add_middleware(InvokeModelStage, cache)
    assert agent("go").stop_reason == "end_turn"
    assert reasons == ["end_turn"]


# --- policy files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["window", "time_zone"])
def test_concurrency_quota_with_a_window_is_rejected(hold: Hold, key: str) -> None:
    """The key would have no effect."""
    sentence = rf'quotas\["q"\] limits concurrent calls and has no {key}: remove it\.'
    value = {"window": "day", "time_zone": "Europe/Berlin"}[key]
    with pytest.raises(ValueError, match=sentence):
        hold({"q": TWO | {key: value}})


def test_concurrency_quota_is_described_in_one_line() -> None:
    """`otel-limits check` prints it."""
    section = {"q": {"concurrency": 4, "key": "model", "on_exceeded": "wait"}}
    document, _ = parse(json.dumps({"quotas": section}), "limits.yaml")
    assert (
        str(document.quotas["q"].value)
        == "4 concurrent model calls for each model; calls wait up to 30 s"
    )
