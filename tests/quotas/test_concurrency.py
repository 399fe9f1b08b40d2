"""Quotas of model calls at once: places that are leased, renewed and given back."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool

import otel_limits
from otel_limits.quotas.keys import Template
from otel_limits.quotas.section import read_quotas
from otel_limits.quotas.store import Count, CountState, Demand, Renew, Reserve
from otel_limits.quotas.windows import UnboundedWindow
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, fails, says, uses
from tests.quotas.conftest import eventually
from tests.quotas.waiters import SOON, Held, Told, seconds_of, start, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.quotas.store import Operation, SharedStore
    from tests.conftest import MakeAgent
    from tests.quotas.conftest import Hold, Server

TWO = {"concurrency": 2}


@pytest.fixture
def told() -> Told:
    """An observer."""
    return Told()


def count() -> Count:
    """What quota `q` counts."""
    key = Template("").key("q", dict[str, object]().get)
    return Count("q", key.id, UnboundedWindow().at(time.time()), "concurrency", key.shown)


def standing(store: SharedStore) -> CountState:
    """How quota `q` stands."""
    (found,) = store.look([(count(), 2)])
    return found


def test_no_more_calls_are_under_way_at_once_than_a_quota_permits(
    hold: Hold, make_agent: MakeAgent, url: str, told: Told
) -> None:
    """One more is refused, and told when to ask again; when one ends there is a place."""
    hold({"q": TWO}, url, [told])

    async def run() -> None:
        model = Held()
        tasks = [start(make_agent(model)) for _ in range(2)]
        await until(lambda: len(model.asked) == 2)
        left = await otel_limits.remaining_async("q")
        assert (left.used, left.reserved, left.left, left.limit) == (0, 2, 0, 2)
        assert left.unit == "model calls at once"
        result = await start(make_agent(model))
        assert result.stop_reason == "quota_exceeded"
        stop = otel_limits.stop_of(result)
        assert stop is not None
        assert stop.quota is not None
        assert (stop.quota.reserved, stop.quota.retry_after_seconds) == (2, 1.0)
        assert stop.breach is not None
        assert stop.breach.note == (
            "quota q permits 2 model calls at once, and with this call it would be 3; 2 are under "
            "way, and there is a place as soon as one of them ends; ask again in 1 s"
        )
        model.may_answer.set()
        await asyncio.gather(*tasks)
        assert (await start(make_agent(model))).stop_reason == "end_turn"

    asyncio.run(run())
    assert told.decisions() == ["admitted", "admitted", "refused", "admitted"]


def test_calls_queue_for_a_place_where_the_quota_says_so(
    hold: Hold, make_agent: MakeAgent, url: str, told: Told
) -> None:
    """Twenty go through two places, and never more than two at once."""
    hold({"q": TWO | {"on_exceeded": "wait"}}, url, [told])
    under_way: list[int] = []

    class Counting(ScriptedModel):
        """Notes how many calls are under way with it."""

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
    assert sorted(told.decisions()) == ["admitted"] * 2 + ["waited"] * 18


@pytest.mark.parametrize("end", ["answer", "error"])
def test_a_place_is_free_when_its_call_is_over(
    hold: Hold, make_agent: MakeAgent, server: Server, store: SharedStore, end: str
) -> None:
    """However it ended; nothing of it stays used."""
    hold({"q": {"concurrency": 1}}, server.url)
    script = {"answer": [says("done")], "error": [fails(ValueError("no"))]}[end]
    with suppress(ValueError):
        make_agent(ScriptedModel(script))("go")
    eventually(lambda: standing(store) == CountState(0, 0, 2))


def test_tools_run_without_a_place(
    hold: Hold, make_agent: MakeAgent, server: Server, store: SharedStore
) -> None:
    """Only calls of models take one."""
    hold({"q": {"concurrency": 1}}, server.url)
    held: list[int] = []

    @tool
    def look() -> str:
        """Look who has a place."""
        held.append(standing(store).reserved)
        return "nobody"

    make_agent(ScriptedModel([uses("look"), says("done")]), tools=[look])("go")
    assert held == [0]


def test_a_grant_permits_more_calls_at_once(
    hold: Hold, make_agent: MakeAgent, server: Server, store: SharedStore
) -> None:
    """Until its end, as for any quota."""
    hold({"q": {"concurrency": 1}}, server.url)
    store.grant(count(), 1, time.time() + 60)

    async def run() -> None:
        model = Held()
        tasks = [start(make_agent(model)) for _ in range(2)]
        await until(lambda: len(model.asked) == 2)
        model.may_answer.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


# --- leases ---------------------------------------------------------------------------------------


def test_the_place_of_a_dead_process_is_free_when_its_lease_ends(
    hold: Hold, make_agent: MakeAgent, server: Server, store: SharedStore
) -> None:
    """Whoever waits for it goes out then, and nobody looks for what it used."""
    hold({"q": {"concurrency": 1, "on_exceeded": "wait"}}, server.url)
    demand = Demand(count=count(), amount=1, limit=1, lease_seconds=1.0)
    store.run([Reserve("dead", (demand,), 300.0)])
    result, seconds = seconds_of(lambda: make_agent(ScriptedModel([says("done")]))("go"))
    assert result.stop_reason == "end_turn"
    assert seconds < 1.0 + SOON
    assert store.expired(0, 10) == []


def test_a_place_is_leased_for_half_a_minute(
    hold: Hold, make_agent: MakeAgent, server: Server
) -> None:
    """So that a killed worker holds it no longer than that."""
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


def test_places_are_renewed_three_times_in_a_lease_and_by_nobody_when_none_is_held(
    hold: Hold, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the times that are shipped: every ten seconds, for thirty."""
    timers: list[tuple[float, Callable[[], None]]] = []

    def schedule(seconds: float, callback: Callable[[], None]) -> int:
        timers.append((seconds, callback))
        return len(timers)

    monkeypatch.setattr(LIVE.deadlines, "schedule", schedule)
    hold({"q": TWO})
    gate: Any = LIVE.observers.gate
    sent: list[Renew] = []
    send = gate._client._executor.send

    def note(operation: Operation) -> Any:
        if isinstance(operation, Renew):
            sent.append(operation)
        return send(operation)

    monkeypatch.setattr(gate._client._executor, "send", note)

    async def run() -> None:
        model = Held()
        task = start(make_agent(model))
        await until(lambda: bool(model.asked))
        ((seconds, renew),) = timers
        renew()
        assert seconds == 10.0
        (renewal,) = sent
        assert (renewal.counts, renewal.lease_seconds) == ((count(),), 30.0)
        model.may_answer.set()
        await task
        timers.pop()[1]()
        assert (len(sent), len(timers)) == (1, 1)

    asyncio.run(run())


# --- what a policy file may say -------------------------------------------------------------------


@pytest.mark.parametrize("key", ["window", "time_zone"])
def test_calls_at_once_have_no_window(hold: Hold, key: str) -> None:
    """A file that gives one is told so."""
    sentence = rf'quotas\["q"\] counts calls at once and has no {key}: leave it out\.'
    value = {"window": "day", "time_zone": "Europe/Berlin"}[key]
    with pytest.raises(ValueError, match=sentence):
        hold({"q": TWO | {key: value}})


def test_a_quota_of_calls_at_once_is_said_in_one_line() -> None:
    """`otel-limits check` shows it like that."""
    section = {"q": {"concurrency": 4, "key": "model", "on_exceeded": "wait"}}
    (quota,) = read_quotas(section, lambda *_: None).values()
    assert str(quota) == "4 model calls at once for each model; calls wait up to 30 s"
