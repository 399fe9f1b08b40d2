"""Quotas on a server: leases, slots, units, estimates and token buckets."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import pytest
from strands import tool

import otel_limits
from otel_limits import cli
from otel_limits.quotas.client import LEASE_SECONDS
from otel_limits.quotas.keys import Template
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.needs import SLOT_LEASE_SECONDS
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.recovery import decode_charges, encode_charges
from otel_limits.quotas.store import (
    FOREVER,
    Block,
    Charge,
    Count,
    CountState,
    Demand,
    Grant,
    Refill,
    Reply,
    Reserve,
    Reset,
    Settle,
    SharedStore,
)
from otel_limits.quotas.windows import Windows
from otel_limits.testing import ScriptedModel, endless, fails, says, uses
from tests.quotas.fixtures import eventually
from tests.quotas.fleets import Worker
from tests.quotas.own_time import Clock, Place, SimulatedFleet
from tests.quotas.waiters import SOON, DecisionRecorder, Held, seconds_of, start, until
from tests.servers.quotas.test_truth import BEGIN
from tests.unit.quotas.test_estimates import Meeting
from tests.unit.quotas.test_memory import LEASE, NOON, TWO, Bucket, count, in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.quotas.quota import Unit
    from otel_limits.quotas.redis_store import RedisStore
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server, Timed


LONG: Final = int(2.2 * LEASE_SECONDS)
"""Seconds of a long call: without a renewal, its reservations would have expired."""


class Fleet(SimulatedFleet):
    """A fleet driven by a test, in simulated time."""

    def wait(self, seconds: float) -> None:
        """Let time pass, second by second."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.set_clock(self.clock.time())
            self.do()

    def held(self) -> tuple[int, int]:
        """The reserved amounts of a slot quota and a call quota in the first window."""
        place, calls = self.store.look([(self.count(name, 0.0), 9) for name in "pr"])
        return place.reserved, calls.reserved


@pytest.fixture(params=["memory", "redis"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet with one in-flight call, which holds a slot and is counted."""
    clock = Clock(BEGIN)
    if request.param == "memory":
        place = Place(MemoryStore(clock.time), lambda _: None)
    else:
        timed: Timed = request.getfixturevalue("timed_store")
        place = Place(*timed)
    fleet = Fleet(place, clock)
    fleet.do((fleet.workers[0], lambda: fleet.begin(fleet.workers[0], "pr")))
    yield fleet
    for worker in fleet.workers:
        worker.close()


def test_a_call_keeps_what_it_holds_however_long_it_takes(fleet: Fleet) -> None:
    """Some answers stream for ten minutes; at the end everything is released."""
    fleet.wait(LONG)
    assert fleet.held() == (1, 1)
    fleet.do((fleet.workers[0], lambda: fleet.settle(fleet.calls[0])))
    assert fleet.held() == (0, 0)


def test_dead_workers_reservations_expire_with_their_leases(fleet: Fleet) -> None:
    """Independent of how long its call had taken: renewals end with the worker."""
    fleet.wait(LONG)
    fleet.workers[0].connection.is_dead = True
    fleet.wait(SLOT_LEASE_SECONDS)
    assert fleet.held() == (0, 1)
    fleet.wait(LEASE_SECONDS - SLOT_LEASE_SECONDS)
    assert fleet.held() == (0, 0)


def test_reservation_made_in_an_outage_is_renewed_locally(fleet: Fleet) -> None:
    """Calls longer than a lease also use up a share or a local amount."""
    engine = fleet.workers[0].engine
    reservation = engine.client.in_flight()[0]
    memory = reservation.reserved_in = MemoryStore(fleet.clock.time)
    asked = fleet.count("r", 0.0)
    (reply,) = memory.run([Reserve(reservation.id, reservation.demands, LEASE_SECONDS)])
    assert reply.status == "admitted"
    fleet.wait(LONG)
    assert memory.look([(asked, 9)])[0].reserved == 1


# --- slots ----------------------------------------------------------------------------------------


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


# --- units ----------------------------------------------------------------------------------------

PRICES: Final = {"*": {"price": {"input": 1_000_000, "output": 1_000_000}}}
"""One dollar per token."""


@pytest.fixture(params=["memory", "redis", "cluster"])
def url_of_unit(request: pytest.FixtureRequest) -> str:
    """Every kind of store with its own scripts or rules."""
    if request.param == "memory":
        return "memory://"
    found = request.getfixturevalue({"redis": "server", "cluster": "cluster"}[request.param])
    return found if isinstance(found, str) else str(found.url)


def test_edited_unit_starts_a_separate_count(
    hold: Hold, make_agent: MakeAgent, url_of_unit: str
) -> None:
    """15 USD are not 15,000,000,000 tokens; edited back, the 15 USD are there again."""
    agent = make_agent(ScriptedModel(endless(says("done"))), tools=[])
    usd, tokens = ({unit: 1_000_000, "window": "P366D"} for unit in ("usd", "tokens"))
    hold({"year": usd}, url_of_unit, models=PRICES)
    agent("go")
    assert otel_limits.remaining("year").used == 15
    hold({"year": tokens}, url_of_unit, models=PRICES)
    assert otel_limits.remaining("year") == replace(
        otel_limits.remaining("year"), unit="tokens", used=0, reserved=0, left=1_000_000
    )
    agent("go")
    assert otel_limits.remaining("year").used == 15
    hold({"year": usd}, url_of_unit, models=PRICES)
    assert otel_limits.remaining("year").used == Decimal(15)


def this(unit: Unit) -> Count:
    """The current count of a quota with this unit."""
    quota = Quota(name="q", unit=unit, amount=100, windows=Windows("P366D"))
    return quota.count(Template("").key("q", dict[str, object]().get), time.time())


THIS: Final = this("usd")


def reserve(store: SharedStore, name: str, amount: int, unit: Unit = "usd") -> Reply:
    """Reserve as this version does."""
    demand = Demand(count=this(unit), amount=amount, limit=100)
    (reply,) = store.run([Reserve(name, (demand,), 300.0)])
    return reply


def settle(store: SharedStore, name: str, amount: int, unit: Unit = "usd") -> None:
    """Settle as this version does."""
    store.run([Settle(name, (Charge(count=this(unit), amount=amount),))])


def test_a_grant_is_of_its_unit_and_a_block_of_every_unit(store: SharedStore) -> None:
    """A blocked key stays blocked when the unit is edited."""
    store.change(THIS, Grant(50, time.time() + 3600))
    assert store.look([(THIS, 100), (this("tokens"), 100)]) == [
        CountState(0, 0, 150),
        CountState(0, 0, 100),
    ]
    store.change(THIS, Block(FOREVER, "unpaid"))
    assert reserve(store, "a", 1, "tokens").status == "refused"


def test_a_reset_counts_its_own_unit_from_0(store: SharedStore) -> None:
    """The other one is unchanged."""
    for name, unit in (("a", "usd"), ("b", "tokens")):
        settle(store, name, 60, unit)  # type: ignore[arg-type]
    store.change(this("tokens"), Reset())
    looked = store.look([(THIS, 100), (this("tokens"), 100)])
    assert [each.used for each in looked] == [60, 0]


def test_settlement_in_the_ledger_keeps_its_unit() -> None:
    """A surviving worker charges the same count as the killed one."""
    (charge,) = decode_charges(encode_charges((Charge(count=THIS, amount=7),)))
    assert (charge.count.unit, charge.amount) == ("usd", 7)


# --- worst cases above a quota --------------------------------------------------------------------

STORES = ["memory", "redis"]


def url_of(store: str, request: pytest.FixtureRequest) -> str:
    """The URL of a kind of store."""
    if store == "memory":
        return "memory://"
    server: Server = request.getfixturevalue("server")
    return server.url


@pytest.mark.parametrize("store", STORES)
def test_a_quota_below_every_estimate_admits_calls_one_after_the_other(
    hold: Hold, make_agent: MakeAgent, store: str, request: pytest.FixtureRequest
) -> None:
    """1,000 tokens an hour: no estimate of a model without a cap is below 4,096."""
    hold({"small": {"tokens": 1_000, "window": "month"}}, url_of(store, request))
    usage = {"inputTokens": 100, "outputTokens": 300, "totalTokens": 400}
    agent = make_agent(ScriptedModel(endless(says("done", usage=usage))), tools=[])
    reasons = []
    for _ in range(5):
        agent.messages.clear()
        reasons.append(agent("go").stop_reason)
    assert reasons == ["end_turn"] * 3 + ["quota_exceeded"] * 2


@pytest.mark.parametrize("store", STORES)
def test_quota_below_every_estimate_admits_one_call_at_a_time(
    hold: Hold, make_agent: MakeAgent, store: str, request: pytest.FixtureRequest
) -> None:
    """Otherwise concurrent calls could exceed it many times over."""
    hold({"small": {"tokens": 1_000, "window": "month"}}, url_of(store, request))
    model = Meeting()
    first = threading.Thread(target=make_agent(model), args=("go",))
    first.start()
    assert model.is_asked.wait(20)
    other = make_agent(ScriptedModel(endless(says("done"))))
    concurrent = other("go").stop_reason
    model.may_answer.set()
    first.join()
    other.messages.clear()
    assert (concurrent, other("go").stop_reason) == ("quota_exceeded", "end_turn")


# --- token buckets --------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "redis"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """A bucket in each kind of store."""
    if request.param == "memory":
        return in_memory()
    timed: Timed = request.getfixturevalue("timed_store")
    return Bucket(*timed)


# --- the bucket -----------------------------------------------------------------------------------


def test_full_bucket_holds_a_tenth_of_the_amount(bucket: Bucket) -> None:
    """The rest flows back evenly: 100 per minute are one every 0.6 s."""
    assert [bucket.reserve(str(n), 1).status for n in range(11)] == ["admitted"] * 10 + ["refused"]
    for n in range(10):
        bucket.settle(str(n), 1)
    assert bucket.state() == CountState(10, 0, 10)
    assert bucket.state().full_at == NOON + 6.0
    assert bucket.reserve("early", 1).changes_at == NOON + 0.6
    bucket.wait(0.5)
    assert bucket.reserve("early", 1).status == "refused"
    bucket.wait(0.125)
    assert bucket.reserve("in time", 1).status == "admitted"
    bucket.wait(60.0)
    assert bucket.state() == CountState(0, 0, 10)


def test_call_above_the_burst_goes_out_at_a_full_bucket_and_leaves_a_debt(bucket: Bucket) -> None:
    """It would otherwise wait forever."""
    bucket.reserve("small", 1)
    refused = bucket.reserve("large", 35)
    assert (refused.status, refused.changes_at) == ("refused", NOON + 0.6)
    bucket.wait(0.625)
    assert bucket.reserve("large", 35).states == (CountState(0, 35, 10),)
    assert bucket.reserve("next", 1).changes_at == NOON + 0.625 + 0.6 * 26
    bucket.wait(15.5)
    assert bucket.reserve("next", 1).status == "refused"
    bucket.wait(0.125)
    assert bucket.reserve("next", 1).status == "admitted"


def test_settlement_below_its_reservation_gives_back_what_has_not_flowed_back(
    bucket: Bucket,
) -> None:
    """Others could use the rest already."""
    bucket.reserve("a", 10)
    bucket.wait(2.5)  # 4 flowed back
    assert bucket.state() == CountState(0, 6, 10)
    assert bucket.settle("a", 2) == CountState(0, 0, 0)
    bucket.reserve("b", 10)
    assert bucket.settle("b", 4) == CountState(4, 0, 0)
    bucket.reserve("c", 6)
    bucket.wait(60.0)
    bucket.reserve("d", 10)
    after = bucket.settle("c", 0)
    assert after.used + after.reserved == 10
    assert bucket.settle("d", 17) == CountState(17, 0, 0)


def test_lost_call_returns_what_it_reserved_or_is_charged(bucket: Bucket) -> None:
    """As in a window, without what has flowed back."""
    bucket.refill = Refill(3600, 100)  # one flows back in 36 s
    bucket.reserve("free", 50)
    bucket.reserve("charged", 50, model="m")
    bucket.wait(LEASE)
    assert bucket.state() == CountState(50, 0, 100)  # 8 of them flowed back from the first
    assert bucket.settle("charged", 60) == CountState(60, 0, 0)


def test_reset_fills_the_bucket_and_a_grant_raises_the_amount(bucket: Bucket) -> None:
    """A reset also forgives the debt of calls in flight; a grant raises rate and burst."""
    bucket.reserve("a", 80)
    bucket.store.change(bucket.count, Reset())
    assert bucket.state() == CountState(0, 0, 10)
    assert bucket.settle("a", 80) == CountState(0, 0, 0)
    bucket.store.change(bucket.count, Grant(100, bucket.now + 3600))
    assert bucket.state().limit == 20
    assert bucket.reserve("b", 20).status == "admitted"
    assert bucket.reserve("c", 1).changes_at == NOON + 0.3


def test_clock_that_is_set_back_does_not_stop_the_flow(bucket: Bucket) -> None:
    """It continues from the new time."""
    bucket.reserve("a", 10)
    bucket.settle("a", 10)
    bucket.wait(-3600.0)
    assert bucket.reserve("b", 1).status == "refused"
    bucket.wait(0.625)
    assert bucket.reserve("b", 1).status == "admitted"


# --- agents ---------------------------------------------------------------------------------------


def test_waiting_calls_are_spread_evenly(hold: Hold, make_agent: MakeAgent, url: str) -> None:
    """With windows, twice the amount goes out around the end of one."""
    per_second, burst, calls = 20, 2, 16
    quota = {"model_calls": per_second, "window": "PT1S", "pace": "smooth", "on_exceeded": "wait"}
    hold({"q": quota}, url)
    asked: list[float] = []

    class Model(ScriptedModel):
        def stream(self, *arguments: Any, **named: Any) -> Any:
            asked.append(time.monotonic())
            return super().stream(*arguments, **named)

    async def run() -> list[Any]:
        model = Model(endless(says("done")))
        return await asyncio.gather(*(start(make_agent(model)) for _ in range(calls)))

    begun = time.monotonic()
    assert {result.stop_reason for result in asyncio.run(run())} == {"end_turn"}
    # They can only be seen later than they were admitted.
    for number, at in enumerate(asked, 1):
        assert number <= burst + per_second * (at - begun) + 1e-9


def test_refusal_reports_when_the_bucket_is_full(
    hold: Hold, make_agent: MakeAgent, url: str
) -> None:
    """And when to try again: earlier, once there is room for the call."""
    hold({"q": {"model_calls": 60, "window": "hour", "pace": "smooth"}}, url)
    model = ScriptedModel(endless(says("done")))
    reasons = [make_agent(model)("go").stop_reason for _ in range(6)]
    before = time.time()
    result = make_agent(model)("go")
    assert reasons == ["end_turn"] * 6
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert stop.quota is not None
    assert stop.breach is not None
    assert (stop.quota.used, stop.quota.limit) == (6, 6)
    assert stop.quota.resets_at == pytest.approx(before + 360, abs=30)
    assert stop.quota.retry_after_seconds is not None
    assert 30 <= stop.quota.retry_after_seconds <= 60
    assert stop.breach.note.startswith("quota 'q' allows 6 model calls in a burst: 6 used")
    assert "; full at 20" in stop.breach.note
    left = otel_limits.remaining("q")
    assert (left.left, left.limit) == (0, 6)
    assert left.resets_at == pytest.approx(stop.quota.resets_at, abs=0.1)


def test_call_that_waits_in_vain_is_refused_immediately(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """One flows back every minute, and it would wait for 30 s."""
    quota = {"model_calls": 60, "window": "hour", "pace": "smooth", "burst": 1}
    hold({"q": quota | {"on_exceeded": "wait"}}, url, [recorder])
    model = ScriptedModel(endless(says("done")))
    assert [make_agent(model)("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]
    assert recorder.waits == 0


@pytest.mark.usefixtures("faulty")
def test_usage_survives_a_restart_without_data(
    own_server: Server,
) -> None:
    """Like that of windows, and it flows back from then on."""
    held = Quota(
        name="q", unit="model_calls", amount=60, windows=Windows("PT1H"), pace="smooth", grace=0.0
    )
    worker = Worker(own_server.url, held)
    try:
        assert worker.use_all() == 6
        own_server.stop()
        own_server.start()
        eventually(lambda: worker.call() or worker.decisions()[-1] == "refused")
        assert worker.decisions()[-1] == "refused"
    finally:
        worker.engine.close()


@pytest.mark.usefixtures("faulty")
def test_local_shares_of_an_outage_do_not_refill(own_server: Server) -> None:
    """Two processes share what a bucket held."""
    held = Quota(name="q", unit="model_calls", amount=200, windows=Windows("PT1S"), pace="smooth")
    workers = [Worker(own_server.url, held) for _ in range(2)]
    try:
        for worker in workers:
            assert worker.call()
        for worker in workers:
            worker.look()
        own_server.stop()
        assert sum(worker.use_all() for worker in workers) <= 20
    finally:
        for worker in workers:
            worker.engine.close()


def test_quotas_command_shows_the_bucket(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its limit is that of a full bucket."""
    hold({"q": {"model_calls": 60, "window": "hour", "pace": "smooth"}}, server.url)
    make_agent(ScriptedModel([says("done")]))("go")
    cli.main(["quotas", "--format", "json"])
    (row,) = json.loads(capsys.readouterr().out)["quotas"]
    assert (row["used"], row["remaining"], row["limit"]) == (1, 5, 6)
