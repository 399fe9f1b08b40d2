"""Quotas in memory: slots of concurrent calls, and token buckets."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import tool
from strands.middleware import InvokeModelStage
from strands.types.events import ModelStopReason

import otel_limits
from otel_limits import cli
from otel_limits.quotas.keys import Template
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.store import (
    Charge,
    Count,
    CountState,
    Demand,
    QuotaStore,
    Refill,
    Renew,
    Reply,
    Reserve,
    Settle,
)
from otel_limits.quotas.windows import UnboundedWindow, Window, Windows
from otel_limits.runs.registry import LIVE
from otel_limits.settings.policy.reader import parse
from otel_limits.testing import ScriptedModel, says
from tests.price_list import listed
from tests.quotas.waiters import Held, start, until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from otel_limits.quotas.store import Operation
    from otel_limits.testing import FakeTime
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Timed


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


# --- token buckets --------------------------------------------------------------------------------

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
        return reply.states[0]

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


# --- policy files and commands --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "problem"),
    [
        ({"tokens": 5, "window": "day", "pace": "smooth"}, "window of up to an hour"),
        ({"tokens": 5, "window": "PT1M", "burst": 2}, "its pace is window"),
        ({"tokens": 5, "window": "PT1M", "pace": "smooth", "burst": 0.5}, "burst must be a whole"),
        ({"tokens": 5, "window": "PT1M", "pace": "smooth", "burst": 2.5}, r"number .*, got 2\.5\."),
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


def test_burst_of_tokens_has_the_range_of_tokens(hold: Hold) -> None:
    """Not that of USD, which are counted in smaller parts."""
    hold({"q": {"tokens": 10**9, "window": "PT1M", "pace": "smooth", "burst": 10**8}})
    assert otel_limits.remaining("q").limit == 10**8


@listed
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
