"""Concurrency quotas on a server: slots are leased, renewed and released."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool

import otel_limits
from otel_limits.quotas.store import CountState, Demand, Grant, Reserve
from otel_limits.testing import ScriptedModel, endless, fails, says, uses
from tests.quotas.fixtures import eventually
from tests.quotas.waiters import SOON, DecisionRecorder, Held, seconds_of, start, until
from tests.unit.quotas.test_concurrency import TWO, count

if TYPE_CHECKING:
    from otel_limits.quotas.redis_store import RedisStore
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server


@pytest.fixture
def recorder() -> DecisionRecorder:
    """An observer."""
    return DecisionRecorder()


def standing(store: RedisStore) -> CountState:
    """The state of quota `q`."""
    (found,) = store.look([(count(), 2)])
    return found


def test_concurrency_quota_caps_in_flight_calls(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """One more is refused with a retry time; when one ends, a slot is free."""
    hold({"q": TWO}, url, [recorder])

    async def run() -> None:
        model = Held()
        tasks = [start(make_agent(model)) for _ in range(2)]
        await until(lambda: len(model.asked) == 2)
        left = await otel_limits.remaining_async("q")
        assert (left.used, left.reserved, left.left, left.limit) == (0, 2, 0, 2)
        assert left.unit == "concurrent model calls"
        result = await start(make_agent(model))
        assert result.stop_reason == "quota_exceeded"
        stop = otel_limits.stop_of(result)
        assert stop is not None
        assert stop.quota is not None
        assert (stop.quota.reserved, stop.quota.retry_after_seconds) == (2, 1.0)
        assert stop.breach is not None
        assert stop.breach.note == (
            "quota 'q' allows 2 concurrent model calls: 2 in flight; a slot is released when a "
            "call ends"
        )
        model.may_answer.set()
        await asyncio.gather(*tasks)
        assert (await start(make_agent(model))).stop_reason == "end_turn"

    asyncio.run(run())
    assert recorder.decisions() == ["admitted", "admitted", "refused", "admitted"]


def test_calls_queue_for_a_slot_with_on_exceeded_wait(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """Twenty calls share two slots, never more than two concurrently."""
    hold({"q": TWO | {"on_exceeded": "wait"}}, url, [recorder])
    under_way: list[int] = []

    class Counting(ScriptedModel):
        """A model that counts its in-flight calls."""

        now = 0

        async def stream(self, *arguments: Any, **named: Any) -> Any:
            """Take some time."""
            self.now += 1
            under_way.append(self.now)
            await asyncio.sleep(0.001)
            async for event in super().stream(*arguments, **named):
                yield event
            self.now -= 1

    async def run() -> None:
        model = Counting(endless(says("done")))
        results = await asyncio.gather(*(start(make_agent(model)) for _ in range(20)))
        assert {result.stop_reason for result in results} == {"end_turn"}

    asyncio.run(run())
    assert (len(under_way), max(under_way)) == (20, 2)
    assert sorted(recorder.decisions()) == ["admitted"] * 2 + ["waited"] * 18


@pytest.mark.parametrize("end", ["answer", "error"])
def test_slot_is_released_when_its_call_ends(
    hold: Hold, make_agent: MakeAgent, server: Server, store: RedisStore, end: str
) -> None:
    """Independent of how it ended; the quota has no usage."""
    hold({"q": {"concurrency": 1}}, server.url)
    script = {"answer": [says("done")], "error": [fails(ValueError("no"))]}[end]
    with suppress(ValueError):
        make_agent(ScriptedModel(script))("go")
    eventually(lambda: standing(store) == CountState(0, 0, 2))


def test_tools_run_without_a_slot(
    hold: Hold, make_agent: MakeAgent, server: Server, store: RedisStore
) -> None:
    """Only model calls take one."""
    hold({"q": {"concurrency": 1}}, server.url)
    held: list[int] = []

    @tool
    def look() -> str:
        """Check the slots."""
        held.append(standing(store).reserved)
        return "checked"

    make_agent(ScriptedModel([uses("look"), says("done")]), tools=[look])("go")
    assert held == [0]


def test_concurrency_grant_adds_slots(
    hold: Hold, make_agent: MakeAgent, server: Server, store: RedisStore
) -> None:
    """Until it expires, as for any quota."""
    hold({"q": {"concurrency": 1}}, server.url)
    store.change(count(), Grant(1, time.time() + 60))

    async def run() -> None:
        model = Held()
        tasks = [start(make_agent(model)) for _ in range(2)]
        await until(lambda: len(model.asked) == 2)
        model.may_answer.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


# --- leases ---------------------------------------------------------------------------------------


def test_dead_process_slot_is_free_when_its_lease_ends(
    hold: Hold, make_agent: MakeAgent, server: Server, store: RedisStore
) -> None:
    """A waiter is admitted then; such calls are not recovered from the ledger."""
    hold({"q": {"concurrency": 1, "on_exceeded": "wait"}}, server.url)
    demand = Demand(count=count(), amount=1, limit=1, lease_seconds=1.0)
    store.run([Reserve("dead", (demand,), 300.0)])
    result, seconds = seconds_of(lambda: make_agent(ScriptedModel([says("done")]))("go"))
    assert result.stop_reason == "end_turn"
    assert seconds < 1.0 + SOON
    assert store.expired(0, 10) == []


def test_slot_is_leased_for_30_seconds(hold: Hold, make_agent: MakeAgent, server: Server) -> None:
    """A killed worker holds it no longer than that."""
    hold({"q": TWO}, server.url)

    async def run() -> None:
        model = Held()
        task = start(make_agent(model))
        await until(lambda: bool(model.asked))
        ((_, ends),) = server.client.zrange(
            "{otel_limits}:q:" + count().key + ":0:concurrency:leases", 0, -1, withscores=True
        )
        assert 20 < ends / 1000 - time.time() <= 30
        model.may_answer.set()
        await task

    asyncio.run(run())
