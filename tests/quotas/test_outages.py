"""What happens to agents, and to what is counted, when the store does not do what it should."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import pytest

import otel_limits
from otel_limits.core.events import InternalError, QuotaDecision, QuotaUse
from otel_limits.core.internal_errors import INTERNAL_ERRORS
from otel_limits.quotas import client, engine, store_worker
from otel_limits.quotas.keys import Template
from otel_limits.quotas.redis_scripts import EVERY_CALL, KeyNames, sha_of
from otel_limits.quotas.store import (
    Count,
    CountState,
    Demand,
    Reserve,
    SharedStore,
    StorePlace,
)
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import Windows
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, says
from tests.quotas.conftest import PATIENCE, Server, Wire, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from strands import Agent

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent
    from tests.quotas.conftest import Hold

TIMEOUT = 0.1
AMOUNT = 5
CALLS = {"model_calls": AMOUNT, "window": "month", "grace": 0}
"""Without a share of what was left, which `test_grace.py` is about."""

pytestmark = pytest.mark.usefixtures("faulty")


class Place:
    """A server, and the way to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.wire = Wire(server.port)
        self.store = open_shared_store(StorePlace(server.url, PATIENCE))

    @property
    def url(self) -> str:
        """Where agents find it."""
        return self.wire.url

    def refuse(self) -> None:
        """Nobody listens any more."""
        self.server.stop()

    def hang(self) -> None:
        """Connections stay open and nothing is answered."""
        self.server.freeze()

    def be_read_only(self) -> None:
        """It has become a replica of something that is not there."""
        self.server.client.replicaof("127.0.0.1", 1)

    def be_full(self) -> None:
        """Its memory is used up, and it evicts nothing."""
        self.server.client.config_set("maxmemory", 1)

    def be_slow(self) -> None:
        """Every answer takes twice as long as anybody waits."""
        self.wire.delay = 2 * TIMEOUT

    def recover(self) -> None:
        """All is well again; a server that was stopped begins empty."""
        self.wire.delay = 0.0
        self.server.thaw()
        if not self.server.is_running:
            self.server.start()
        self.server.client.replicaof("NO", "ONE")
        self.server.client.config_set("maxmemory", 0)

    def standing(self) -> CountState:
        """How quota `calls` stands."""
        (found,) = self.store.look([(self.count(), AMOUNT)])
        return found

    def count(self) -> Count:
        """What quota `calls` counts now."""
        key = Template("").key("calls", dict[str, object]().get)
        return Count("calls", key.id, Windows("month").at(time.time()), "model_calls")


@pytest.fixture
def place(own_server: Server) -> Iterator[Place]:
    """A server of this test's own."""
    place = Place(own_server)
    yield place
    own_server.thaw()
    place.wire.close()
    place.store.close()


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """See soon whether a lost store is back."""
    monkeypatch.setattr(store_worker, "LOOK_INTERVAL_SECONDS", 0.02)
    # Here, too: it would keep this one for the tests that follow if it were first imported now.
    monkeypatch.setattr(engine, "LOOK_INTERVAL_SECONDS", 0.02)


@pytest.fixture(params=["refuse", "hang", "be_read_only", "be_full", "be_slow"])
def fail(request: pytest.FixtureRequest, place: Place) -> Callable[[], None]:
    """One way in which a store fails."""
    way: Callable[[], None] = getattr(place, request.param)
    return way


class Lose(Protocol):
    """Has an agent used a store that is then lost."""

    def __call__(self, mode: str) -> Agent:
        """Use one call of the quota, which has this `on_store_error`, and lose the store."""


@pytest.fixture
def lose(
    hold: Hold,
    make_agent: MakeAgent,
    place: Place,
    fail: Callable[[], None],
    events: list[Event],
) -> Lose:
    """An agent, one call, and an outage."""

    def make(mode: str) -> Agent:
        hold({"calls": CALLS}, place.url, [events.append], timeout=TIMEOUT)
        agent = make_agent(ScriptedModel(endless(says("done"))))
        eventually(lambda: agent("go").stop_reason == "end_turn")
        events.clear()
        hold({"calls": CALLS | {"on_store_error": mode}}, place.url, [events.append])
        fail()
        return agent

    return make


def decisions(events: list[Event]) -> list[str]:
    """What was decided."""
    return [event.decision for event in events if isinstance(event, QuotaDecision)]


# --- deny, allow, local ---------------------------------------------------------------------------


def test_deny_refuses_what_nobody_can_check(lose: Lose, events: list[Event]) -> None:
    """No model is called, and the message says why."""
    agent = lose("deny")
    model: Any = agent.model
    result = agent("go")
    assert (result.stop_reason, model.calls) == ("quota_unavailable", 1)
    said = str(result)
    assert "could not be checked, because its store does not answer; when it was last" in said
    assert re.search(r"used \d of 5 model calls, reserved \d, begins again at \S+;", said)
    assert decisions(events) == ["degraded_denied"]


def test_allow_lets_everything_go_and_counts_it_afterwards(
    lose: Lose, place: Place, events: list[Event]
) -> None:
    """Once the store is back, all that was used is counted, more than the quota if need be."""
    agent = lose("allow")
    assert [agent("go").stop_reason for _ in range(7)] == ["end_turn"] * 7
    assert decisions(events) == ["degraded_allowed"] * 7
    place.recover()
    eventually(lambda: place.standing() == CountState(8, 0, AMOUNT))


def test_local_lets_each_process_use_what_was_left(
    lose: Lose, place: Place, events: list[Event]
) -> None:
    """Four calls were left when the store was last heard; afterwards they are counted."""
    agent = lose("local")
    reasons = [agent("go").stop_reason for _ in range(6)]
    assert reasons == ["end_turn"] * 4 + ["quota_exceeded"] * 2
    assert decisions(events) == ["degraded_local_admitted"] * 4 + ["degraded_local_refused"] * 2
    place.recover()
    eventually(lambda: place.standing() == CountState(5, 0, AMOUNT))


def test_what_was_used_locally_counts_once_in_the_next_outage(
    lose: Lose, place: Place, fail: Callable[[], None], events: list[Event]
) -> None:
    """The store knows of it by then, and what it says is where the process begins again."""
    agent = lose("local")
    agent("go")
    place.recover()
    gate: Any = LIVE.observers.gate
    eventually(
        lambda: not gate._client._executor._is_down
    )  # asking the agent would use up what was left
    eventually(
        lambda: agent("go").stop_reason == "end_turn" and decisions(events)[-1] == "admitted"
    )
    used = [event.used for event in events if isinstance(event, QuotaUse)][-1]
    events.clear()
    fail()
    reasons = [agent("go").stop_reason for _ in range(6)]
    assert reasons.count("end_turn") == AMOUNT - int(used)


def test_after_an_outage_the_store_decides_again(
    lose: Lose, place: Place, events: list[Event]
) -> None:
    """Nobody has to be restarted."""
    agent = lose("deny")
    agent("go")
    place.recover()
    eventually(lambda: agent("go").stop_reason == "end_turn")
    assert decisions(events)[-1] == "admitted"


def test_an_outage_costs_one_timeout_and_not_one_per_call(
    lose: Lose, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """After it was noticed, nothing is sent before the store is back; it is told once."""
    agent = lose("allow")
    caplog.clear()
    agent("go")
    gate: Any = LIVE.observers.gate
    eventually(lambda: gate._client._executor._is_down)
    waits: list[float] = []

    async def wait(*given: Any) -> None:
        waits.append(given[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_wait", wait)
        for _ in range(30):
            agent("go")
    assert waits == []
    assert caplog.text.count("quota store unavailable") == 1
    assert len([event for event in events if event == InternalError(component="quotas")]) == 1


def test_no_wait_is_longer_than_the_timeout(lose: Lose) -> None:
    """Whatever a call has asked before."""
    agent = lose("allow")
    waits: list[float] = []

    def noted(waiting: Any) -> Any:
        def wait(*given: Any) -> Any:
            waits.append(given[-1])
            return waiting(*given)

        return wait

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_wait", noted(client._wait))
        agent("go")
    assert waits
    assert max(waits) <= TIMEOUT


def test_of_several_quotas_one_that_denies_is_enough(
    hold: Hold, make_agent: MakeAgent, place: Place, events: list[Event]
) -> None:
    """An observed one denies nothing, whatever it says."""
    place.refuse()
    quotas = {
        "open": CALLS | {"on_store_error": "allow"},
        "here": CALLS | {"on_store_error": "local"},
        "watched": CALLS | {"action": "observe"},
    }
    hold(quotas, place.url, [events.append], timeout=TIMEOUT)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert agent("go").stop_reason == "end_turn"
    hold(quotas | {"strict": CALLS}, place.url, [events.append], timeout=TIMEOUT)
    other = make_agent(ScriptedModel(endless(says("done"))))
    assert other("go").stop_reason == "quota_unavailable"
    decided = [event for event in events if isinstance(event, QuotaDecision)]
    assert [event.quota for event in decided if event.decision == "degraded_denied"] == ["strict"]


# --- a store that is slow -------------------------------------------------------------------------


def test_a_pause_of_the_store_ends_nobody(hold: Hold, make_agent: MakeAgent, place: Place) -> None:
    """200 agents ask while it does not answer for 150 ms; none of them is refused."""
    hold({"calls": {"model_calls": 1_000, "window": "month"}}, place.url)
    agents = [make_agent(ScriptedModel([says("done")])) for _ in range(200)]

    async def ask_all() -> set[str]:
        calls = [asyncio.ensure_future(agent.invoke_async("go")) for agent in agents]
        # In a thread: the loop has 200 agents to start before it comes back to this.
        thaw = threading.Timer(0.15, place.server.thaw)
        place.server.freeze()
        thaw.start()
        reasons: set[str] = {(await call).stop_reason for call in calls}
        thaw.join()
        return reasons

    assert asyncio.run(ask_all()) == {"end_turn"}


def test_the_first_call_of_a_process_finds_a_distant_store(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """100 ms for every answer, with the time to wait that is shipped."""
    place.wire.delay = 0.1
    hold({"calls": CALLS}, place.url)
    assert make_agent(ScriptedModel([says("done")]))("go").stop_reason == "end_turn"


def test_connecting_begins_before_the_first_call(hold: Hold, place: Place) -> None:
    """Switching on is enough for the server to know the scripts."""
    hold({"calls": CALLS}, place.server.url)
    shas = [sha_of(script) for script in EVERY_CALL]
    eventually(lambda: place.server.client.script_exists(*shas) == [True, True])


def test_a_store_that_is_away_is_known_before_the_first_call(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """The call does not wait for it."""
    place.refuse()
    hold({"calls": CALLS | {"on_store_error": "allow"}}, place.url, timeout=PATIENCE)
    gate: Any = LIVE.observers.gate
    eventually(lambda: gate._client._executor._is_down)
    began = time.monotonic()
    assert make_agent(ScriptedModel([says("done")]))("go").stop_reason == "end_turn"
    assert time.monotonic() - began < PATIENCE  # which is what it may wait for an answer


# --- lost replies, lost counts --------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1], ids=["reserve", "settle"])
def test_a_reply_that_is_lost_moves_the_count_once(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    wire: Wire,
    events: list[Event],
    cut: int,
) -> None:
    """The connection is cut after the server did what it was asked; it is asked again."""
    hold({"calls": CALLS}, wire.url, [events.append])
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    wire.let_pass = cut
    wire.cuts = 1
    before = server.calls()
    agent("go")
    assert wire.cuts == 0
    assert server.calls() == before + 3
    uses = [event for event in events if isinstance(event, QuotaUse)]
    assert (uses[-1].used, uses[-1].reserved) == (2, 0)
    assert decisions(events) == ["admitted"] * 2


def test_a_settlement_that_is_lost_again_and_again_counts_once(
    hold: Hold, make_agent: MakeAgent, wire: Wire, store: SharedStore
) -> None:
    """It is kept until the store says that it was done."""
    hold({"calls": CALLS | {"on_store_error": "allow"}}, wire.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    wire.let_pass = 1
    wire.cuts = 5
    agent("go")
    key = Template("").key("calls", dict[str, object]().get)
    count = Count("calls", key.id, Windows("month").at(time.time()), "model_calls")
    eventually(lambda: wire.cuts == 0)
    eventually(lambda: store.look([(count, AMOUNT)]) == [CountState(2, 0, AMOUNT)])


def test_a_server_that_comes_back_empty_goes_on_from_what_is_known(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """What this process saw used is used; its scripts are sent again."""
    hold({"calls": CALLS}, place.server.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    for _ in range(3):
        agent("go")
    place.server.stop()
    place.server.start()
    reasons = [agent("go").stop_reason for _ in range(3)]
    assert reasons == ["end_turn", "end_turn", "quota_exceeded"]
    assert place.standing() == CountState(5, 0, AMOUNT)


def test_a_process_that_never_heard_the_store_uses_the_whole_amount_locally(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """It cannot know of others; the README says so."""
    place.refuse()
    hold({"calls": CALLS | {"on_store_error": "local"}}, place.url, timeout=TIMEOUT)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    reasons = [agent("go").stop_reason for _ in range(6)]
    assert reasons == ["end_turn"] * 5 + ["quota_exceeded"]


def test_a_courier_that_cannot_start_is_started_for_the_next(
    hold: Hold, make_agent: MakeAgent, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the system has no thread left it is as if the store did not answer; all is counted."""
    start, failures = threading.Thread.start, iter([RuntimeError("can't start new thread")] * 2)

    def fail_twice(thread: threading.Thread) -> None:
        failure = next(failures, None) if thread.name == "otel-limits-quotas" else None
        if failure is not None:
            raise failure
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_twice)
    hold({"calls": CALLS | {"on_store_error": "allow"}}, place.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert [agent("go").stop_reason for _ in range(3)] == ["end_turn"] * 3
    eventually(lambda: place.standing() == CountState(3, 0, AMOUNT))


def test_settlements_that_wait_are_bounded(
    hold: Hold, make_agent: MakeAgent, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is given up, and said to be; a refused call leaves nothing to wait."""
    monkeypatch.setattr(store_worker, "MAX_KEPT", 3)
    place.refuse()
    quotas = {"calls": CALLS | {"on_store_error": "allow"}}
    hold(quotas, place.url, timeout=TIMEOUT)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    for _ in range(6):
        agent("go")
    gate: Any = LIVE.observers.gate
    assert len(gate._client._executor._kept) == 3


def test_a_refused_call_leaves_nothing_to_be_sent(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """Ten thousand denials during an outage don't push out what has to be counted."""
    place.refuse()
    hold({"calls": CALLS}, place.url, timeout=TIMEOUT)
    agent = make_agent(ScriptedModel([]))
    gate: Any = LIVE.observers.gate
    agent("go")
    eventually(lambda: gate._client._executor._is_down)
    kept = len(gate._client._executor._kept)
    for _ in range(5):
        agent("go")
    assert len(gate._client._executor._kept) == kept <= 1


@pytest.mark.parametrize(("way", "lost"), [("deny", False), ("allow", True)])
def test_only_what_was_used_is_missed_at_the_end(
    hold: Hold,
    make_agent: MakeAgent,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    *,
    lost: bool,
) -> None:
    """A process that ends during an outage says so when a call that took something is lost."""
    said: list[str] = []
    place.refuse()
    hold({"calls": CALLS | {"on_store_error": way}}, place.url, timeout=TIMEOUT)
    make_agent(ScriptedModel(endless(says("done"))))("go")
    gate: Any = LIVE.observers.gate
    eventually(lambda: gate._client._executor._is_down)
    monkeypatch.setattr(INTERNAL_ERRORS, "report", lambda _, error: said.append(str(error)))
    gate.close()
    assert said == ["1 settlements lost at exit"] * lost


def test_a_client_that_quotes_its_url_tells_no_password(
    hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    """Two slashes too few, and the user and the password are a path."""
    hold({"calls": CALLS}, "unix:////u:hunter2@host.sock")
    eventually(lambda: "quota store unavailable" in caplog.text)
    assert "hunter2" not in caplog.text


# --- one key that is not ours ---------------------------------------------------------------------


def test_a_key_of_a_wrong_type_refuses_nobody_else(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """Others go on; the one concerned is decided by `on_store_error`."""
    hold({"calls": CALLS | {"key": "agent"}}, place.server.url)
    joe, jane = (
        make_agent(ScriptedModel(endless(says("done"))), name=name) for name in ("joe", "jane")
    )
    joe("go")
    (bucket,) = place.server.client.keys("*:calls:*:model_calls")
    place.server.client.set(bucket, "not ours")
    assert joe("go").stop_reason == "quota_unavailable"
    assert [jane("go").stop_reason for _ in range(3)] == ["end_turn"] * 3


def test_what_all_counts_share_may_be_of_a_wrong_type(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """What was noted there, of kills, dead workers and keys, is lost; calls go on and count."""
    for name in (KeyNames().kills, KeyNames().expired, KeyNames().index("calls")):
        place.server.client.set(name, "not ours")
    hold({"calls": CALLS}, place.server.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert agent("go").stop_reason == "end_turn"
    demand = Demand(count=place.count(), amount=3, limit=AMOUNT)
    place.store.run([Reserve("dead-0", (demand,), 0.01)])
    eventually(lambda: place.standing().reserved == 0)
    assert [agent("go").stop_reason for _ in range(4)] == ["end_turn"] * 4
    assert place.standing() == CountState(5, 0, AMOUNT)


def test_a_settlement_that_can_never_be_done_holds_up_no_other(
    hold: Hold, make_agent: MakeAgent, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage, too: it is set aside and said, and the store counts as back."""
    said: list[str] = []
    quota = CALLS | {"key": "agent", "on_store_error": "allow"}
    hold({"calls": quota}, place.url)
    joe, jane = (
        make_agent(ScriptedModel(endless(says("done"))), name=name) for name in ("joe", "jane")
    )
    joe("go")
    (bucket,) = place.server.client.keys("*:calls:*:model_calls")
    place.server.client.set(bucket, "not ours")
    monkeypatch.setattr(INTERNAL_ERRORS, "report", lambda *what: said.append(what[-1]))
    place.be_read_only()
    for agent in (joe, jane):
        agent("go")
    place.recover()
    gate: Any = LIVE.observers.gate
    eventually(lambda: not gate._client._executor._is_down)
    assert otel_limits.remaining("calls", agent="jane").used == 1
    assert any("quarantined: WRONGTYPE" in str(sentence) for sentence in said)
