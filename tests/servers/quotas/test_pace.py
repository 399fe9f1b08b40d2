"""Quotas with `pace: smooth`: token buckets in memory and on a real server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

import otel_limits
from otel_limits import cli
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import (
    CountState,
    Grant,
    Refill,
    Reset,
)
from otel_limits.quotas.windows import Windows
from otel_limits.testing import ScriptedModel, endless, says
from tests.quotas.fixtures import eventually
from tests.quotas.fleets import Worker
from tests.quotas.waiters import start
from tests.unit.quotas.test_pace import LEASE, NOON, Bucket, in_memory

if TYPE_CHECKING:
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server, Timed


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
    hold: Hold, make_agent: MakeAgent, url: str
) -> None:
    """One flows back every minute, and it would wait for 30 s."""
    quota = {"model_calls": 60, "window": "hour", "pace": "smooth", "burst": 1}
    hold({"q": quota | {"on_exceeded": "wait"}}, url)
    model = ScriptedModel(endless(says("done")))
    begun = time.monotonic()
    assert [make_agent(model)("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]
    assert time.monotonic() - begun < 20


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
