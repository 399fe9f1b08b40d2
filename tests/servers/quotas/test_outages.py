"""Agents and counts during store outages."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from strands import tool

import otel_limits
from otel_limits import QuotaUnavailableError, stop_of
from otel_limits.core.events import InternalError, QuotaDecision, QuotaUse
from otel_limits.quotas.keys import Template
from otel_limits.quotas.redis_scripts import LOADED, KeyNames, sha_of
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
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.registry import LIVE
from otel_limits.testing import (
    FakeTime,
    ScriptedChatModel,
    ScriptedModel,
    endless,
    says,
    uses,
)
from tests.quotas.fixtures import PATIENCE, Server, Wire, eventually
from tests.quotas.waiters import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterator
    from pathlib import Path

    from strands import Agent
    from strands.types.streaming import StreamEvent

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold

TIMEOUT = 0.5
UNAVAILABLE, RECOVERED = "quota store unavailable", "quota store recovered"
"""Of the store's connections. Agents do not time out: their clock is frozen."""
AMOUNT = 5
CALLS = {"model_calls": AMOUNT, "window": "month", "grace": 0}
"""Without a share of the remaining amount, which `test_fallback.py` covers."""

pytestmark = pytest.mark.usefixtures("faulty")


class Place:
    """A server, and a proxy to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.wire = Wire(server.port)
        self.store = open_shared_store(StorePlace(server.url, PATIENCE))

    @property
    def url(self) -> str:
        """The address for agents."""
        return self.wire.url

    def refuse(self) -> None:
        """The port is closed."""
        self.server.stop()

    def hang(self) -> None:
        """Connections stay open and get no replies."""
        self.server.freeze()

    def be_read_only(self) -> None:
        """It becomes a replica of a missing server."""
        self.server.client.replicaof("127.0.0.1", 1)

    def be_full(self) -> None:
        """Its memory is used up, and it evicts nothing."""
        self.server.client.config_set("maxmemory", 1)

    def be_slow(self) -> None:
        """Every reply takes twice as long as the timeout."""
        self.wire.delay = 2 * TIMEOUT

    def recover(self) -> None:
        """Everything works again; a stopped server starts empty."""
        self.wire.delay = 0.0
        self.server.thaw()
        if not self.server.is_running:
            self.server.start()
        self.server.client.replicaof("NO", "ONE")
        self.server.client.config_set("maxmemory", 0)

    def standing(self) -> CountState:
        """The state of quota `calls`."""
        (found,) = self.store.look([(self.count(), AMOUNT)])
        return found

    def count(self) -> Count:
        """The current count of quota `calls`."""
        key = Template("").key("calls", dict[str, object]().get)
        return Count("calls", key.id, Windows("month").at(time.time()), "model_calls")


@pytest.fixture
def place(own_server: Server) -> Iterator[Place]:
    """A server for this test alone."""
    place = Place(own_server)
    yield place
    own_server.thaw()
    place.wire.close()
    place.store.close()


@pytest.fixture
def replica(place: Place, tmp_path: Path) -> Iterator[Server]:
    """A replica of that server, with the same data."""
    (tmp_path / "replica").mkdir()
    server = Server(tmp_path / "replica")
    server.start()
    server.client.replicaof("127.0.0.1", place.server.port)
    eventually(lambda: server.client.info("replication")["master_link_status"] == "up")
    yield server
    otel_limits.disable()  # or a worker would log that its server is gone
    server.stop()


@pytest.fixture(params=["refuse", "hang", "be_read_only", "be_full", "be_slow"])
def fail(request: pytest.FixtureRequest, place: Place) -> Callable[[], None]:
    """One way in which a store fails."""
    way: Callable[[], None] = getattr(place, request.param)
    return way


class StartOutage(Protocol):
    """Makes an agent use a store, then breaks the store."""

    def __call__(self, mode: str) -> Agent:
        """Use one call of the quota, which has this `on_store_error`, and break the store."""


@pytest.fixture
def start_outage(
    fake_time: FakeTime,
    hold: Hold,
    make_agent: MakeAgent,
    place: Place,
    fail: Callable[[], None],
    events: list[Event],
) -> StartOutage:
    """An agent, one call, and an outage."""

    def make(mode: str) -> Agent:
        hold({"calls": CALLS}, place.url, [events.append], timeout=TIMEOUT)
        agent = make_agent(ScriptedModel(endless(says("done"))))
        eventually(lambda: agent("go").stop_reason == "end_turn")
        events.clear()
        quota = CALLS | {"on_store_error": mode}
        hold({"calls": quota}, place.url, [events.append], timeout=TIMEOUT)
        fail()
        return agent

    return make


def decisions(events: list[Event]) -> list[str]:
    """The decisions so far."""
    return [event.decision for event in events if isinstance(event, QuotaDecision)]


# --- deny, allow, local ---------------------------------------------------------------------------


def test_deny_refuses_calls_in_an_outage(start_outage: StartOutage, events: list[Event]) -> None:
    """No model is called, and the operator reads the reason."""
    agent = start_outage("deny")
    model: Any = agent.model
    result = agent("go")
    assert (result.stop_reason, model.calls) == ("quota_unavailable", 1)
    stop = otel_limits.stop_of(result)
    assert stop is not None
    said = stop.sentence
    assert "could not be checked because the quota store is unavailable; last known state" in said
    assert re.search(r"\d of 5 model calls used, \d reserved, resets at \S+\.", said)
    assert decisions(events) == ["degraded_denied"]


def test_outage_leaves_no_last_answer(
    fake_time: FakeTime, hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """Nothing would count it, so `wrap_up` halts, also if the agent has something to sum up."""
    hold({"calls": CALLS | {"action": "wrap_up"}}, place.url, timeout=TIMEOUT)
    eventually(lambda: make_agent(ScriptedModel([says("hello")]))("go").stop_reason == "end_turn")

    @tool
    def search() -> str:
        """Break the store."""
        place.refuse()
        return "found"

    model = ScriptedModel(endless(uses("search")))
    result = make_agent(model, tools=[search])("go")
    assert (result.stop_reason, model.calls) == ("quota_unavailable", 1)
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert "No final answer was requested: the quotas could not count it." in stop.sentence


def test_allow_admits_every_call_and_counts_it_after_recovery(
    start_outage: StartOutage, place: Place, events: list[Event]
) -> None:
    """After recovery all usage is counted, above the quota if necessary."""
    agent = start_outage("allow")
    assert [agent("go").stop_reason for _ in range(7)] == ["end_turn"] * 7
    assert decisions(events) == ["degraded_allowed"] * 7
    place.recover()
    eventually(lambda: place.standing() == CountState(8, 0, AMOUNT))


def test_local_lets_each_process_use_the_remaining_amount(
    start_outage: StartOutage, place: Place, events: list[Event]
) -> None:
    """Four calls remained at the last reply; they are counted after recovery."""
    agent = start_outage("local")
    reasons = [agent("go").stop_reason for _ in range(6)]
    assert reasons == ["end_turn"] * 4 + ["quota_exceeded"] * 2
    assert decisions(events) == ["degraded_local_admitted"] * 4 + ["degraded_local_refused"] * 2
    place.recover()
    eventually(lambda: place.standing() == CountState(5, 0, AMOUNT))


def test_local_usage_counts_once_across_two_outages(
    start_outage: StartOutage,
    place: Place,
    fail: Callable[[], None],
    events: list[Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The store has counted it in between, and the process continues from the store's count."""
    agent = start_outage("local")
    agent("go")
    place.recover()
    # Calling the agent would use up the rest.
    eventually(lambda: RECOVERED in caplog.text)

    def is_admitted() -> bool:
        if agent("go").stop_reason == "quota_exceeded":
            # On a busy machine another reply was late, and the local share was used up.
            place.server.client.flushdb()
        return decisions(events)[-1] == "admitted"

    eventually(is_admitted)
    used = [event.used for event in events if isinstance(event, QuotaUse)][-1]
    events.clear()
    fail()
    reasons = [agent("go").stop_reason for _ in range(6)]
    assert reasons.count("end_turn") == AMOUNT - int(used)


def test_after_an_outage_the_store_decides_again(
    start_outage: StartOutage, place: Place, events: list[Event]
) -> None:
    """No process needs a restart."""
    agent = start_outage("deny")
    agent("go")
    place.recover()
    eventually(lambda: agent("go").stop_reason == "end_turn")
    assert decisions(events)[-1] == "admitted"


def test_outage_costs_one_timeout_not_one_per_call(
    start_outage: StartOutage, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """After the first, nothing is sent until recovery; the outage is reported once."""
    agent = start_outage("allow")
    caplog.clear()
    agent("go")
    eventually(lambda: UNAVAILABLE in caplog.text)
    waits: list[float] = []

    async def wait(*given: Any) -> None:
        waits.append(given[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLOCK, "wait", wait)
        for _ in range(30):
            agent("go")
    assert waits == []
    assert caplog.text.count("quota store unavailable") == 1
    assert len([event for event in events if event == InternalError(component="quotas")]) == 1


def test_no_wait_is_longer_than_the_timeout(start_outage: StartOutage) -> None:
    """Independent of earlier operations of the call."""
    agent = start_outage("allow")
    waits: list[float] = []

    def noted(waiting: Any) -> Any:
        def wait(*given: Any) -> Any:
            waits.append(given[-1] - CLOCK.now())
            return waiting(*given)

        return wait

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLOCK, "wait", noted(CLOCK.wait))
        agent("go")
    assert waits
    assert max(waits) <= TIMEOUT + 1e-6  # rounding


def test_one_denying_quota_refuses_the_call(
    hold: Hold, make_agent: MakeAgent, place: Place, events: list[Event]
) -> None:
    """An observed quota never refuses, whatever its `on_store_error`."""
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


# --- slow stores ----------------------------------------------------------------------------------


def test_short_store_pause_halts_no_agent(
    hold: Hold, make_agent: MakeAgent, place: Place, fake_time: FakeTime
) -> None:
    """200 agents call while it does not reply; none of them is refused."""
    hold({"calls": {"model_calls": 1_000, "window": "month"}}, place.url)
    agents = [make_agent(ScriptedModel([says("done")])) for _ in range(200)]
    waits = itertools.count(1)

    async def ask_all() -> set[str]:
        place.server.freeze()
        results = await asyncio.gather(*(agent.invoke_async("go") for agent in agents))
        return {each.stop_reason for each in results}

    def wait(*given: Any) -> Any:
        if next(waits) == 10:
            place.server.thaw()
        return clock_wait(*given)

    clock_wait = CLOCK.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLOCK, "wait", wait)
        assert asyncio.run(ask_all()) == {"end_turn"}
    assert next(waits) > 10


def test_call_that_is_cancelled_before_the_reply_keeps_nothing(hold: Hold, server: Server) -> None:
    """Its own retry finds the slot free, although the store made the reservation."""
    hold({"slot": {"concurrency": 1}, "q": CALLS}, server.url)
    model = ScriptedChatModel(endless(says("done")))

    async def work(_: Any) -> dict[str, Any]:
        await model.ainvoke("go")
        server.client.execute_command("CLIENT", "PAUSE", "600000", "WRITE")
        task = asyncio.ensure_future(model.ainvoke("go"))
        await until(lambda: server.client.info("clients")["blocked_clients"] > 0)
        task.cancel()
        await asyncio.wait([task])
        server.client.execute_command("CLIENT", "UNPAUSE")
        return {"messages": [AIMessage((await model.ainvoke("go")).text)]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("work", work).add_edge(START, "work")
    asyncio.run(graph.compile().ainvoke({"messages": []}))
    used = {name: otel_limits.remaining(name) for name in ("slot", "q")}
    assert (model.calls, used["q"].used) == (2, 2)
    assert [each.reserved for each in used.values()] == [0, 0]


def test_the_first_call_of_a_process_finds_a_distant_store(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """100 ms for every reply, with the default timeout."""
    place.wire.delay = 0.1
    hold({"calls": CALLS}, place.url)
    assert make_agent(ScriptedModel([says("done")]))("go").stop_reason == "end_turn"


def test_connecting_begins_before_the_first_call(hold: Hold, place: Place) -> None:
    """Enabling is enough to load the scripts into the server."""
    hold({"calls": CALLS}, place.server.url)
    shas = [sha_of(script) for script in LOADED]
    eventually(lambda: place.server.client.script_exists(*shas) == [True] * len(shas))


def test_outage_is_detected_before_the_first_call(
    hold: Hold, make_agent: MakeAgent, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The call does not wait for the timeout."""
    place.refuse()
    hold({"calls": CALLS | {"on_store_error": "allow"}}, place.url, timeout=PATIENCE)
    eventually(lambda: UNAVAILABLE in caplog.text)
    began = time.monotonic()
    assert make_agent(ScriptedModel([says("done")]))("go").stop_reason == "end_turn"
    assert time.monotonic() - began < PATIENCE  # the timeout of one operation


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
    """The connection is cut after the server ran the operation; it is sent again."""
    hold({"calls": CALLS}, wire.url, [events.append])
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    wire.let_pass = cut
    wire.cuts = 1
    before = server.calls()
    agent("go")
    assert wire.cuts == 0
    assert server.calls() > before + 2
    uses = [event for event in events if isinstance(event, QuotaUse)]
    assert (uses[-1].used, uses[-1].reserved) == (2, 0)
    assert decisions(events) == ["admitted"] * 2


def test_a_settlement_that_is_lost_again_and_again_counts_once(
    hold: Hold, make_agent: MakeAgent, wire: Wire, store: SharedStore
) -> None:
    """It is kept until the store acknowledges it."""
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


def test_server_restarted_empty_resumes_from_known_counts(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """Usage seen by this process still counts; its scripts are loaded again."""
    hold({"calls": CALLS}, place.server.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    for _ in range(3):
        agent("go")
    place.server.stop()
    place.server.start()
    reasons = [agent("go").stop_reason for _ in range(3)]
    assert reasons == ["end_turn", "end_turn", "quota_exceeded"]
    assert place.standing() == CountState(5, 0, AMOUNT)


OF_REDIS_6 = {
    b"-READONLY You": b"-ERR Error running script (call to f_0a): @user_script:4: @user_script: 4: "
    b"-READONLY You"
}
"""An error in a script, as Redis 7 and Redis 6 reply it
(https://github.com/spring-projects/spring-data-redis/issues/3042, read 2026-11-30)."""


@pytest.mark.parametrize("replaced", [{}, OF_REDIS_6], ids=["Redis 7", "Redis 6"])
def test_failover_behind_one_address_is_followed(
    hold: Hold,
    make_agent: MakeAgent,
    place: Place,
    replica: Server,
    replaced: dict[bytes, bytes],
) -> None:
    """A virtual IP or the name of a service changes for new connections: open ones stay."""
    place.wire.replaced = replaced
    hold({"calls": CALLS}, place.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert agent("go").stop_reason == "end_turn"
    place.server.client.wait(1, 0)
    replica.client.replicaof("NO", "ONE")
    place.server.client.replicaof("127.0.0.1", replica.port)
    place.wire.target = replica.port
    reasons: list[str] = []

    def is_refused() -> bool:
        reasons.append(agent("go").stop_reason)
        return reasons[-1] == "quota_exceeded"

    eventually(is_refused)
    # The replica may have to be given what it lacks, in the meantime.
    admitted = [each for each in reasons if each != "quota_unavailable"]
    assert admitted == ["end_turn"] * (AMOUNT - 1) + ["quota_exceeded"]


def test_process_without_store_contact_uses_the_whole_amount_locally(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """It cannot know of others, as the README states."""
    place.refuse()
    hold({"calls": CALLS | {"on_store_error": "local"}}, place.url, timeout=TIMEOUT)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    reasons = [agent("go").stop_reason for _ in range(6)]
    assert reasons == ["end_turn"] * 5 + ["quota_exceeded"]


def test_store_worker_that_cannot_start_is_retried(
    hold: Hold, make_agent: MakeAgent, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the system has no thread left, it counts as an outage; no usage is lost."""
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


def close_gate() -> None:
    """End the quotas, as at the exit of a process."""
    gate = LIVE.observers.gate
    assert gate is not None
    gate.close()


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("way", ["deny", "allow"])
def test_exit_in_an_outage_reports_unsent_usage_only(
    hold: Hold,
    make_agent: MakeAgent,
    place: Place,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    """A process that exits during an outage reports lost usage, if there is any."""
    place.refuse()
    hold({"calls": CALLS | {"on_store_error": way}}, place.url, timeout=TIMEOUT)
    make_agent(ScriptedModel(endless(says("done"))))("go")
    eventually(lambda: UNAVAILABLE in caplog.text)
    close_gate()
    sentence = "1 settlement was lost at exit, because the quota store is unavailable;"
    assert caplog.text.count("lost at exit") == caplog.text.count(sentence) == (way == "allow")


def test_password_in_a_client_error_is_redacted(
    hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    """With two missing slashes, user and password become a path."""
    hold({"calls": CALLS}, "unix:////u:hunter2@host.sock")
    eventually(lambda: "quota store unavailable" in caplog.text)
    assert "hunter2" not in caplog.text


# --- third-party keys -----------------------------------------------------------------------------


def test_key_of_a_wrong_type_affects_one_key_only(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """Other keys continue; calls on this one follow `on_store_error`."""
    hold({"calls": CALLS | {"key": "agent"}}, place.server.url)
    joe, jane = (
        make_agent(ScriptedModel(endless(says("done"))), name=name) for name in ("joe", "jane")
    )
    joe("go")
    (bucket,) = place.server.client.keys("*:calls:*:model_calls")
    place.server.client.set(bucket, "not ours")
    assert joe("go").stop_reason == "quota_unavailable"
    assert [jane("go").stop_reason for _ in range(3)] == ["end_turn"] * 3


DAMAGES: dict[str, tuple[str, Callable[[Any, str], object]]] = {
    "another type": ("", lambda client, key: client.lpush(key, "x")),
    "no number": ("", lambda client, key: client.hset(key, "used", "x")),
    "leases": (":leases", lambda client, key: client.set(key, "x")),
}
"""How another program changes the key of a count, or one that begins with its name."""


def damage(place: Place, quota: str, kind: str) -> str:
    """Damage a key of a quota as another program would; return its name."""
    suffix, write = DAMAGES[kind]
    (bucket,) = place.server.client.keys(f"*:{quota}:*:model_calls")
    key: str = bucket + suffix
    if kind != "no number":
        place.server.client.delete(key)
    write(place.server.client, key)
    return key


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("mode", ["allow", "deny"])
def test_damaged_key_affects_its_quota_only(
    hold: Hold, make_agent: MakeAgent, place: Place, mode: str, kind: str
) -> None:
    """`on_store_error` decides about it, and the others count the call."""
    hold({"calls": CALLS | {"on_store_error": mode}, "total": CALLS}, place.server.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    key = damage(place, "calls", kind)
    result = agent("go")
    stop = stop_of(result)
    assert result.stop_reason == ("end_turn" if mode == "allow" else "quota_unavailable")
    named = f"under the key '{key}' of the quota store; rename that key"
    assert (stop is not None and named in stop.sentence) == (mode == "deny")
    total = otel_limits.remaining("total")
    assert (total.used, total.reserved) == (1 + (mode == "allow"), 0)


def test_reading_a_damaged_count_fails_alone(
    hold: Hold, make_agent: MakeAgent, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no outage."""
    hold({"calls": CALLS, "total": CALLS}, place.server.url)
    make_agent(ScriptedModel([says("done")]))("go")
    key = damage(place, "calls", "no number")
    with pytest.raises(QuotaUnavailableError) as caught:
        otel_limits.remaining("calls")
    assert repr(key) in str(caught.value.__cause__)
    assert otel_limits.remaining("total").used == 1
    assert UNAVAILABLE not in caplog.text


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_key_loses_no_settlement_of_other_quotas(
    hold: Hold,
    make_agent: MakeAgent,
    place: Place,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log names the key."""
    hold({"calls": CALLS, "total": CALLS}, place.server.url)
    keys: list[str] = []

    class Damaging(ScriptedModel):
        """A model during whose call a key is damaged."""

        async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
            """Damage it."""
            keys.append(damage(place, "calls", kind))
            async for event in super().stream(*arguments, **named):
                yield event

    make_agent(Damaging([says("done")]))("go")
    total = otel_limits.remaining("total")
    assert (total.used, total.reserved) == (1, 0)
    assert f"under the key '{keys[0]}' of the quota store" in caplog.text


def test_shared_keys_of_a_wrong_type_stop_no_call(
    hold: Hold, make_agent: MakeAgent, place: Place
) -> None:
    """The kills, dead workers and key names stored there are lost; calls still count."""
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


@pytest.mark.usefixtures("faulty")
def test_impossible_settlement_is_quarantined(
    hold: Hold,
    make_agent: MakeAgent,
    place: Place,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also after an outage: it is quarantined and reported, and the store counts as recovered."""
    quota = CALLS | {"key": "agent", "on_store_error": "allow"}
    hold({"calls": quota}, place.url)
    joe, jane = (
        make_agent(ScriptedModel(endless(says("done"))), name=name) for name in ("joe", "jane")
    )
    joe("go")
    (bucket,) = place.server.client.keys("*:calls:*:model_calls")
    place.server.client.set(bucket, "not ours")
    place.be_read_only()
    for agent in (joe, jane):
        agent("go")
    place.recover()
    eventually(lambda: RECOVERED in caplog.text)
    assert otel_limits.remaining("calls", agent="jane").used == 1
    assert f"quarantined: data of another program is under the key {bucket!r}" in caplog.text
