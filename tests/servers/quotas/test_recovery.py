"""Counts that no living process saw are rebuilt from a shared ledger when the store restarts."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

import otel_limits
from otel_limits import cli
from otel_limits.ledger.address import parse
from otel_limits.ledger.quota_usage import charges_between
from otel_limits.quotas.keys import Template
from otel_limits.quotas.recovery import Recovery, decode_charges
from otel_limits.quotas.store import (
    Charge,
    Count,
    CountState,
    Demand,
    KnownCount,
    Refill,
    Reserve,
    Settle,
    StorePlace,
)
from otel_limits.quotas.windows import UnboundedWindow, Windows
from otel_limits.testing import ScriptedModel, endless, says
from tests.quotas.fixtures import eventually, open_redis
from tests.unit.agents.test_quotas import carrying

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server

pytestmark = pytest.mark.usefixtures("faulty")

AMOUNT, USED = 20, 12
QUOTA = {"model_calls": AMOUNT, "window": "P366D", "key": "baggage.user.id", "grace": 0}


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record every call in a ledger."""
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(tmp_path / "ledger.db"))
    monkeypatch.setenv("OTEL_LIMITS_LEDGER_SYNC", "call")


def call(make_agent: MakeAgent, calls: int, user: str = "joe") -> list[str]:
    """Call as a user; return the stop reasons."""
    model = ScriptedModel(endless(says("done")))
    with carrying(user__id=user):
        return [make_agent(model)("go").stop_reason for _ in range(calls)]


def state(server: Server, user: str = "joe") -> CountState:
    """The state of a user's count in the store."""
    key = Template("baggage.user.id").key("q", {"baggage.user.id": user}.get)
    store = open_redis(StorePlace(server.url, 5.0))
    try:
        window = Windows("P366D").at(time.time())
        (found,) = store.look([(Count("q", key.id, window, "model_calls"), AMOUNT)])
    finally:
        store.close()
    return found


def restart(server: Server) -> None:
    """Restart the server without data, when no process of the fleet is alive."""
    otel_limits.disable()
    server.stop()
    server.start()


def test_usage_of_dead_processes_is_rebuilt(
    hold: Hold, make_agent: MakeAgent, own_server: Server
) -> None:
    """No living process saw it; calls since the restart are counted once."""
    hold({"q": QUOTA}, own_server.url)
    assert call(make_agent, USED) == ["end_turn"] * USED
    assert call(make_agent, 1, "ann") == ["end_turn"]
    restart(own_server)
    hold({"q": QUOTA}, own_server.url)
    eventually(lambda: call(make_agent, 1, "bob") == ["end_turn"])
    eventually(lambda: state(own_server).used == USED)
    assert state(own_server, "ann").used == 1
    rest = AMOUNT - USED
    assert call(make_agent, rest + 1) == ["end_turn"] * rest + ["quota_exceeded"]
    assert state(own_server, "bob").used <= 2


def test_rebuilt_key_is_listed_before_its_next_call(
    hold: Hold, make_agent: MakeAgent, own_server: Server
) -> None:
    """An operator sees its usage right after an outage."""
    hold({"q": QUOTA}, own_server.url)
    call(make_agent, 2)
    restart(own_server)
    hold({"q": QUOTA}, own_server.url)
    eventually(lambda: state(own_server).used == 2)
    store = open_redis(StorePlace(own_server.url, 5.0))
    assert list(store.keys("q")) == [Template("baggage.user.id").key("q", lambda _: "joe")]
    store.close()


def test_counts_are_rebuilt_once_in_a_run(
    hold: Hold, make_agent: MakeAgent, own_server: Server
) -> None:
    """A process that starts later reads no ledger: an operator's reset stays a reset."""

    def times_left(pattern: str) -> list[int]:
        return [own_server.client.ttl(key) for key in own_server.client.keys(pattern)]

    hold({"q": QUOTA}, own_server.url)
    call(make_agent, USED)
    restart(own_server)
    hold({"q": QUOTA}, own_server.url)
    eventually(lambda: state(own_server).used == USED)
    eventually(lambda: times_left("*:rebuilt:*")[0] > 3600)  # noted after the counts
    assert len(times_left("*:rebuilt:*")) == 1
    otel_limits.disable()
    own_server.client.delete(*own_server.client.keys("*:q:*"))
    asked = own_server.calls("set")
    hold({"q": QUOTA}, own_server.url)
    eventually(lambda: own_server.calls("set") > asked)
    assert state(own_server).used == 0


@pytest.mark.parametrize("moment", ["before the restart", "after the restart"])
def test_usage_before_a_reset_is_not_rebuilt(
    hold: Hold, make_agent: MakeAgent, own_server: Server, moment: str
) -> None:
    """The ledger has the operator's command, or the store has it."""
    hold({"q": QUOTA}, own_server.url)
    call(make_agent, 5)
    if moment == "before the restart":
        cli.main(["quotas", "reset", "q", "joe"])
    call(make_agent, 3)
    restart(own_server)
    if moment == "after the restart":
        cli.main(["quotas", "reset", "q", "joe"])
    hold({"q": QUOTA}, own_server.url)
    eventually(lambda: bool(own_server.client.keys("*:rebuilt:*")))
    eventually(lambda: own_server.client.ttl(own_server.client.keys("*:rebuilt:*")[0]) > 3600)
    assert state(own_server).used == (3 if moment == "before the restart" else 0)


def test_another_process_rebuilds_until_one_is_done(
    hold: Hold, make_agent: MakeAgent, server: Server
) -> None:
    """The claim of a process that fails or is killed must not pass for a finished rebuild."""
    hold({"q": QUOTA}, server.url)
    call(make_agent, 1)
    first, second = (open_redis(StorePlace(server.url, 5.0)) for _ in range(2))
    eventually(lambda: bool(first.begin_rebuilding("another ledger")))
    assert second.begin_rebuilding("another ledger") is None
    first.end_rebuilding()
    assert second.begin_rebuilding("another ledger") == 0
    first.close()
    second.close()


def test_counts_are_rebuilt_again_if_the_store_restarts_meanwhile(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the first attempt must not pass for that of the second."""
    store, records = open_redis(StorePlace(server.url, 5.0)), SimpleNamespace(source="ledger")
    attempts: list[str] = []
    restart: Future[Callable[[], None]] = Future()

    def begin(source: str) -> float:
        """Restart during the first attempt, and leave nothing to be rebuilt."""
        attempts.append(source)
        if len(attempts) == 1:
            restart.result()()
        return 0.0

    monkeypatch.setattr(store, "begin_rebuilding", begin)
    found = Recovery(store, cast("Any", records), lambda: ())
    restart.set_result(found.rebuild)
    eventually(lambda: len(attempts) == 2)
    found.close()


def late_settlements(ledger: Path) -> list[Settle]:
    """The settlements of all calls in the ledger, as a process sends them after a restart."""
    address = parse("ledger", str(ledger), ledger.parent)
    return [
        Settle(call.operation, decode_charges(call.charges), is_earlier=True)
        for call in charges_between(address, 0, time.time())
    ]


@pytest.mark.parametrize("moment", ["before the rebuild", "after the rebuild"])
def test_late_settlement_and_rebuild_count_a_call_once(
    hold: Hold, make_agent: MakeAgent, own_server: Server, tmp_path: Path, moment: str
) -> None:
    """Its process was suspended or disconnected when the call ended and the server restarted."""
    hold({"q": QUOTA}, own_server.url)
    call(make_agent, 3)
    restart(own_server)
    late = late_settlements(tmp_path / "ledger.db")[:2]
    store = open_redis(StorePlace(own_server.url, 5.0))
    store.check()
    store.follow(store.restore(()))
    if moment == "before the rebuild":
        store.run(late)
    hold({"q": QUOTA}, own_server.url)
    eventually(lambda: state(own_server).used == 3)
    if moment == "after the rebuild":
        store.run(late)
    store.run(late)
    store.close()
    assert state(own_server).used == 3


def test_call_that_ended_in_an_outage_adds_to_what_others_saw(server: Server) -> None:
    """A process restores 10 and sends its call; another one saw an eleventh."""
    count = Count("q", "k", Windows("P366D").at(time.time()), "model_calls")
    store = open_redis(StorePlace(server.url, 5.0))
    store.follow(store.restore([KnownCount(count, 10)]))
    store.run([Settle("a-0", (Charge(count=count, amount=1),), is_earlier=True)])
    store.restore([KnownCount(count, 11)])
    (found,) = store.look([(count, 20)])
    store.close()
    assert found.used == 12


BUCKET = {
    "model_calls": 3600,
    "window": "PT1H",
    "pace": "smooth",
    "burst": AMOUNT,
    "key": "baggage.user.id",
    "grace": 0,
}
"""One call a second."""


def test_token_bucket_is_rebuilt_to_its_level(
    hold: Hold, make_agent: MakeAgent, own_server: Server
) -> None:
    """Usage that has not flowed back yet is not available again."""
    hold({"q": BUCKET}, own_server.url)
    begun = time.time()
    assert call(make_agent, AMOUNT) == ["end_turn"] * AMOUNT
    restart(own_server)
    hold({"q": BUCKET}, own_server.url)
    eventually(lambda: bool(own_server.client.keys("*:q:*:0:model_calls")))
    admitted = AMOUNT + call(make_agent, AMOUNT).count("end_turn")
    assert AMOUNT <= admitted <= AMOUNT + 1 + time.time() - begun


def test_rebuilt_token_bucket_flows_back_before_its_next_call(server: Server) -> None:
    """A call that comes much later finds it full."""
    count = Count("q", "k", UnboundedWindow().at(time.time()), "tokens", refill=Refill(1, 100))
    demand = Demand(count=count, amount=100, limit=1000)
    store = open_redis(StorePlace(server.url, 5.0))
    store.follow(store.restore([KnownCount(count, 100)]))
    store.join("w", 0, 0.0, 0.0)
    (found,) = store.look([(count, 1000)])
    restored = time.monotonic()
    eventually(lambda: time.monotonic() - restored > 0.11)
    (reply,) = store.run([Reserve("a-0", (demand,), 300.0)])
    store.close()
    assert (found.used, reply.status) == (100, "admitted")
