"""Default times and capacities of quotas, which other tests shorten."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from otel_limits import enable
from otel_limits.core.internal_errors import INTERNAL_ERRORS
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.recovery import Recovery
from otel_limits.quotas.store import (
    Charge,
    Count,
    Demand,
    Operation,
    ReadConversation,
    ReadCounts,
    Reply,
    Reserve,
    Settle,
    StoreError,
    StorePlace,
)
from otel_limits.quotas.store_worker import ThreadedExecutor
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import Windows
from otel_limits.runtime.wiring import LedgerRecords
from otel_limits.testing import ScriptedModel, endless, says
from tests.clock import Clock
from tests.quotas.fixtures import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server

pytestmark = pytest.mark.usefixtures("faulty")


class LostStore(MemoryStore):
    """A store that is unavailable until it recovers."""

    def __init__(self) -> None:
        """Start unavailable."""
        super().__init__()
        self.is_lost = True
        self.arrived: list[str] = []
        self.looks: list[float] = []
        self.asked: list[int] = []
        self.may_recover = threading.Event()
        self.may_recover.set()

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Record the operations that arrive."""
        if self.is_lost:
            raise StoreError("lost")
        self.arrived += [
            each.id for each in operations if not isinstance(each, (ReadCounts, ReadConversation))
        ]
        return super().run(operations)

    def check(self) -> None:
        """Record each check; the store recovers after the first."""
        self.looks.append(time.monotonic())
        if len(self.looks) == 1:
            raise StoreError("lost")
        self.may_recover.wait()
        self.is_lost = False

    def expired(self, first: int, most: int) -> list[str]:
        """Record each search for expired reservations."""
        assert first == 0
        self.asked.append(most)
        return []

    def forget_expired(self) -> int:
        """Forget nothing."""
        return 0

    def mark_settled(self, ids: Sequence[str]) -> None:
        """Find none to mark."""
        raise AssertionError(ids)

    def close(self) -> None:
        """Close nothing."""


class Ticking:
    """A clock that a test moves."""

    now = 0.0

    def monotonic(self) -> float:
        """Return its time."""
        return self.now


@pytest.fixture
def store() -> LostStore:
    """An unavailable store."""
    return LostStore()


@pytest.fixture
def store_worker(store: LostStore) -> Iterator[ThreadedExecutor]:
    """A store worker that has detected the outage."""
    store_worker = ThreadedExecutor(store)
    store_worker.send(Settle("first", ())).exception()
    yield store_worker
    store_worker.close()


def test_unavailable_store_is_checked_once_a_second(
    store: LostStore, store_worker: ThreadedExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """Pending operations are sent on recovery, and new ones reach the store again."""
    eventually(lambda: store.arrived == ["first"])
    assert store.looks[1] - store.looks[0] >= 0.99
    eventually(lambda: "quota store recovered" in caplog.text)
    assert store_worker.send(Settle("second", ())).result().status == "settled"


def test_agents_resume_within_seconds_of_a_recovery(
    hold: Hold, make_agent: MakeAgent, own_server: Server
) -> None:
    """With real agents, a real server and all defaults."""
    hold({"calls": {"model_calls": 50, "window": "P366D", "grace": 0}}, own_server.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert agent("go").stop_reason == "end_turn"
    own_server.stop()
    assert agent("go").stop_reason == "quota_unavailable"
    own_server.start()
    with Clock() as clock:
        eventually(lambda: agent("go").stop_reason == "end_turn")
        # It is checked once a second; the rest is for a slow machine.
        assert clock() < 1.0 + 5.0


def test_pending_settlements_are_capped_at_ten_thousand(
    store: LostStore, store_worker: ThreadedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are dropped and reported, the newest wait for the store."""
    said: list[str] = []
    monkeypatch.setattr(INTERNAL_ERRORS, "report", lambda _, error: said.append(str(error)))
    store.may_recover.clear()
    for number in range(10_020):
        store_worker.send(Settle(str(number), ()))
    store.may_recover.set()
    eventually(lambda: len(store.arrived) == 10_000)
    assert (store.arrived[0], store.arrived[-1]) == ("20", "10019")
    assert said == ["settlement dropped: buffer full"] * 21


def test_refused_calls_displace_no_settlements(
    store: LostStore, store_worker: ThreadedExecutor
) -> None:
    """An agent may be refused ten thousand times during an outage."""
    store.may_recover.clear()
    count = Count("q", "k", Windows("P366D").at(time.time()), "tokens")
    demand = Demand(count=count, amount=1, limit=1)
    for number in range(10_001):
        store_worker.send(Reserve(str(number), (demand,), 60.0))
    store.may_recover.set()
    eventually(lambda: store_worker.send(Settle("second", ())).exception() is None)
    assert store.arrived[0] == "first"
    assert set(store.arrived) == {"first", "second"}


def test_process_restores_the_ten_thousand_keys_that_it_saw_last(own_server: Server) -> None:
    """Callers may choose keys: what is remembered for a restart of the store is bounded."""
    place, window = StorePlace(own_server.url, PATIENCE), Windows("P366D").at(time.time())
    counts = [Count("q", str(number), window, "tokens") for number in range(10_001)]
    store_worker = ThreadedExecutor(open_shared_store(place))
    settled = [
        store_worker.send(Settle(f"a-{number}", (Charge(count=count, amount=1),)))
        for number, count in enumerate((*counts, counts[0]))
    ]
    assert {each.result().status for each in settled} == {"settled"}
    own_server.stop()
    own_server.start()
    store_worker.send(ReadCounts(())).result()
    store_worker.close()
    store = open_shared_store(place)
    found = store.look([(count, 1) for count in counts])
    store.close()
    assert [each.used for each in found] == [2, 0, *[1] * 9_999]


def test_killed_workers_settlements_are_searched_once_a_minute(
    store: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand at a time."""
    store.is_lost = False
    recovery = Recovery(store, LedgerRecords(lambda: None), lambda: ())
    recovery.close()
    clock = Ticking()
    monkeypatch.setattr("otel_limits.quotas.recovery.time", clock)

    class Closing:
        """An event that is set after two minutes."""

        def wait(self, seconds: float) -> bool:
            """Let the time pass."""
            clock.now += seconds
            return clock.now > 121.0

    recovery.work(Closing())  # type: ignore[arg-type]
    assert store.asked == [1_000, 1_000]


def test_a_policy_file_that_changes_is_read_within_a_second(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its quota is enforced from then on, and counts no earlier call."""
    path = tmp_path / "limits.yaml"
    path.write_text("defaults: {limits: {max_turns: 5}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    began = time.monotonic()
    enable()
    agent = make_agent(ScriptedModel(endless(says("done"))))
    path.write_text("quotas: {calls: {model_calls: 1, window: month}}")
    assert agent("go").stop_reason == "end_turn"
    eventually(lambda: agent("go").stop_reason == "quota_exceeded")
    assert time.monotonic() - began >= 0.5
