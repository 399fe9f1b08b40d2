"""The times and bounds of quotas as they are shipped, which other tests shorten."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from otel_limits import enable
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.recovery import Recovery
from otel_limits.quotas.store import Operation, Reply, Settle, StoreError
from otel_limits.quotas.store_worker import StoreWorker
from otel_limits.testing import ScriptedModel, endless, says
from tests.clock import Clock
from tests.quotas.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.conftest import MakeAgent
    from tests.quotas.conftest import Hold, Server

pytestmark = pytest.mark.usefixtures("faulty")


class LostStore(MemoryStore):
    """A store that does not answer until it is back."""

    def __init__(self) -> None:
        """Begin lost."""
        super().__init__()
        self.is_lost = True
        self.arrived: list[str] = []
        self.looks: list[float] = []
        self.asked: list[int] = []

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Note what arrives."""
        if self.is_lost:
            raise StoreError("lost")
        self.arrived += [each.id for each in operations]
        return super().run(operations)

    def check(self) -> None:
        """Note when somebody looks; it is back for the one after the first."""
        self.looks.append(time.monotonic())
        if len(self.looks) == 1:
            raise StoreError("lost")
        self.is_lost = False

    def expired(self, first: int, most: int) -> list[str]:
        """Note who asks for reservations that nobody settled."""
        assert first == 0
        self.asked.append(most)
        return []

    def forget_expired(self) -> int:
        """There is nothing old."""
        return 0


@pytest.fixture
def store() -> LostStore:
    """A store that is lost."""
    return LostStore()


@pytest.fixture
def store_worker(store: LostStore) -> Iterator[StoreWorker]:
    """A store_worker that has noticed the loss."""
    store_worker = StoreWorker(store)
    store_worker.send(Settle("first", ())).exception()
    yield store_worker
    store_worker.close()


def test_a_lost_store_is_looked_for_once_a_second(
    store: LostStore, store_worker: StoreWorker
) -> None:
    """What it missed is sent as soon as it is back, and new operations go to it again."""
    eventually(lambda: store.arrived == ["first"])
    assert store.looks[1] - store.looks[0] >= 0.99
    eventually(lambda: not store_worker._is_down)
    assert store_worker.send(Settle("second", ())).result().status == "settled"


def test_agents_go_on_within_seconds_when_a_store_is_back(
    hold: Hold, make_agent: MakeAgent, own_server: Server
) -> None:
    """Real agents and a real server, with all times as they are shipped."""
    hold({"calls": {"model_calls": 50, "window": "P366D", "grace": 0}}, own_server.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert agent("go").stop_reason == "end_turn"
    own_server.stop()
    assert agent("go").stop_reason == "quota_unavailable"
    own_server.start()
    with Clock() as clock:
        eventually(lambda: agent("go").stop_reason == "end_turn")
        # It is looked for once a second; the rest is for a machine that is slow.
        assert clock() < 1.0 + 5.0


def test_ten_thousand_settlements_wait_and_no_more(
    store: LostStore, store_worker: StoreWorker
) -> None:
    """The oldest are given up, the youngest wait for the store."""
    with store_worker._wake:  # so that nothing is sent meanwhile
        for number in range(10_020):
            store_worker.send(Settle(str(number), ()))
        assert len(store_worker._kept) == 10_000
        kept = list(store_worker._kept)
        assert (kept[0], kept[-1]) == ("20", "10019")


def test_the_settlements_of_the_dead_are_looked_for_once_a_minute(store: LostStore) -> None:
    """A thousand at a time."""
    recovery = Recovery(store, lambda _: ())  # type: ignore[arg-type]
    recovery.close()
    waited: list[float] = []

    class Closing:
        """An event that is set after the second time that it is waited for."""

        def wait(self, seconds: float) -> bool:
            """Wait for no time."""
            waited.append(seconds)
            return len(waited) == 2

    recovery.work(Closing())  # type: ignore[arg-type]
    assert (waited, store.asked) == ([60.0, 60.0], [1_000])


def test_a_policy_file_that_changes_is_read_within_a_second(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its quota holds from then on, and counts no call from before."""
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
