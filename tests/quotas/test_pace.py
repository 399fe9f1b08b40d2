"""Quotas with `pace: smooth`: token buckets in memory and on a real server."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import otel_limits
from otel_limits import cli
from otel_limits.quotas import store_worker
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import (
    Charge,
    Count,
    CountState,
    Demand,
    Grant,
    QuotaStore,
    Refill,
    Reply,
    Reserve,
    Reset,
    Settle,
)
from otel_limits.quotas.windows import Window, Windows
from otel_limits.testing import ScriptedModel, endless, says
from tests.quotas.conftest import eventually
from tests.quotas.fleets import Worker
from tests.quotas.waiters import start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import MakeAgent
    from tests.quotas.conftest import Hold, Server, Timed

NOON = Windows("day").at(time.time() + 2 * 86_400).start + 12 * 3600.0
"""A time in the future, so that a server does not treat its counts as expired."""

LEASE = 300.0


@dataclass
class Bucket:
    """A token bucket of 100 per minute with a burst of 10, whose clock the test sets."""

    store: QuotaStore
    set_clock: Callable[[float], None]
    refill: Refill = field(default_factory=lambda: Refill(60))
    now: float = NOON
    calls: list[tuple[float, int]] = field(default_factory=list)
    """Time and usage of each call."""

    def __post_init__(self) -> None:
        """Start its clock."""
        self.set_clock(self.now)

    @property
    def count(self) -> Count:
        """Its count."""
        return Count("q", "k", Window(0, int(NOON) + 86_400), "tokens", "all", refill=self.refill)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.set_clock(self.now)

    def reserve(self, name: str, amount: int, **more: Any) -> Reply:
        """Reserve for a call."""
        demand = Demand(count=self.count, amount=amount, limit=100, **more)
        (reply,) = self.store.run([Reserve(name, (demand,), LEASE)])
        return reply

    def settle(self, name: str, used: int) -> CountState:
        """Settle a call."""
        (reply,) = self.store.run([Settle(name, (Charge(count=self.count, amount=used),))])
        return reply.standings[0]

    def state(self) -> CountState:
        """Its state."""
        (state,) = self.store.look([(self.count, 100)])
        return state


def in_memory() -> Bucket:
    """A bucket in memory."""
    clock = [0.0]
    return Bucket(MemoryStore(lambda: clock[0]), lambda now: clock.__setitem__(0, now))


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
    assert bucket.reserve("large", 35).standings == (CountState(0, 35, 10),)
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


CALLS = st.lists(
    st.tuples(
        st.integers(0, 32),  # eighths of a second since the last call
        st.integers(1, 40),  # reserved
        st.integers(0, 40),  # used at most
        st.integers(0, 80),  # eighths of a second until it ends
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(CALLS, st.sampled_from([0, 3, 30]))
def test_no_interval_of_the_windows_length_has_more_than_amount_and_burst(
    calls: list[tuple[int, int, int, int]], burst: int
) -> None:
    """For calls that use less than they reserved, counted at the time they go out."""
    bucket = in_memory()
    bucket.refill = Refill(10, burst)
    ends: list[tuple[float, str, int]] = []
    for number, (since, reserved, used, lasts) in enumerate(calls):
        until = bucket.now + since / 8
        for end, name, amount in sorted(ends):
            if end <= until:
                bucket.wait(end - bucket.now)
                bucket.settle(name, amount)
                ends.remove((end, name, amount))
        bucket.wait(until - bucket.now)
        if bucket.reserve(str(number), reserved).status == "admitted":
            bucket.calls.append((bucket.now, min(used, reserved)))
            ends.append((bucket.now + lasts / 8, str(number), min(used, reserved)))
    largest = max((reserved for _, reserved, _, _ in calls), default=0)
    for begin, _ in bucket.calls:
        within = sum(used for at, used in bucket.calls if begin <= at < begin + 10)
        assert within <= 100 + max(burst or 10, largest)


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
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like that of windows, and it flows back from then on."""
    monkeypatch.setattr(store_worker, "LOOK_INTERVAL_SECONDS", 0.1)
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


# --- policy files and commands --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "problem"),
    [
        ({"tokens": 5, "window": "day", "pace": "smooth"}, "window of up to an hour"),
        ({"tokens": 5, "window": "PT1M", "burst": 2}, "its pace is window"),
        ({"tokens": 5, "window": "PT1M", "pace": "smooth", "burst": 0.5}, "burst must be a whole"),
        ({"concurrency": 5, "pace": "smooth"}, "which have no pace"),
        (
            {"tokens": 5, "window": "hour", "pace": "smooth", "time_zone": "Europe/Berlin"},
            "whatever the time of day",
        ),
    ],
)
def test_pace_that_contradicts_the_quota_is_an_error(
    hold: Hold, quota: dict[str, Any], problem: str
) -> None:
    """Its author expects an effect."""
    with pytest.raises(ValueError, match=problem):
        hold({"q": quota})


def test_check_warns_of_small_bursts_and_vain_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are valid, and hardly meant."""
    quotas: dict[str, dict[str, Any]] = {
        "small": {"tokens": 30_000, "window": "PT1M"},
        "slow": {"model_calls": 60, "window": "hour", "on_exceeded": "wait"},
        "fine": {"usd": 20, "window": "PT1M", "burst": 0.5},
    }
    path = tmp_path / "limits.yaml"
    path.write_text(
        json.dumps({"quotas": {name: each | {"pace": "smooth"} for name, each in quotas.items()}})
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    cli.main(["check"])
    said = capsys.readouterr().err
    assert 'quotas["small"] has a burst of 3,000 tokens' in said
    assert "one of its model calls only returns every 60 s" in said
    assert "fine" not in said


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
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["used"], row["remaining"], row["limit"]) == (1, 5, 6)
