"""Calls that wait for a quota instead of being refused, in memory and on a real server."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import otel_limits
from otel_limits.quotas.keys import Template
from otel_limits.quotas.store import (
    FOREVER,
    Block,
    Charge,
    Count,
    Demand,
    Grant,
    Reserve,
    Reset,
    Settle,
    StorePlace,
    Withdraw,
)
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.wait_queues import LOOK_SECONDS
from otel_limits.quotas.windows import Windows
from otel_limits.testing import FakeTime, ScriptedModel, endless, says
from tests.quotas.fixtures import PATIENCE
from tests.quotas.waiters import SOON, DecisionRecorder, Held, seconds_of, start, until

if TYPE_CHECKING:
    from otel_limits.quotas.store import SharedStore
    from tests.conftest import MakeAgent, Metric
    from tests.quotas.fixtures import Hold, Server

TOKENS = {"tokens": 1000, "window": "month", "on_exceeded": "wait"}
"""Admits one call with a cap of 600 at a time; each settles at 15."""

CALLS = {"model_calls": 1, "window": "month", "on_exceeded": "wait"}


@pytest.fixture
def recorder() -> DecisionRecorder:
    """An observer."""
    return DecisionRecorder()


def count(quota: str = "q", rule: str = "month", unit: str = "tokens") -> Count:
    """The current count of a quota without a key."""
    key = Template("").key(quota, dict[str, object]().get)
    return Count(quota, key.id, Windows(rule).at(time.time()), unit, key.shown)


def reserve(store: SharedStore, name: str, amount: int, lease: float = 60.0, **of: str) -> None:
    """Reserve as another process of the fleet would."""
    (reply,) = store.run(
        [Reserve(name, (Demand(count=count(**of), amount=amount, limit=10**6),), lease)]
    )
    assert reply.status == "admitted"


def settle(store: SharedStore, name: str, used: int, **of: str) -> None:
    """Settle as another process of the fleet would."""
    store.run([Settle(name, (Charge(count=count(**of), amount=used),))])


# --- queues ---------------------------------------------------------------------------------------


def test_waiting_calls_are_admitted_in_order(
    hold: Hold, make_agent: MakeAgent, url: str, metric: Metric, recorder: DecisionRecorder
) -> None:
    """Each is admitted as others release unused amounts; none is refused, and the queue drains."""
    hold({"q": TOKENS}, url, [recorder])

    async def run() -> list[str]:
        model = Held()
        tasks = []
        for number in range(5):
            tasks.append(start(make_agent(model), str(number)))
            await until(lambda: recorder.waiting == len(tasks) - 1 and bool(model.asked))
        assert model.asked == ["0"]
        assert metric("otel_limits_quota_waiting", quota="q") == 4
        model.may_answer.set()
        results = await asyncio.gather(*tasks)
        assert {result.stop_reason for result in results} == {"end_turn"}
        return model.asked

    assert asyncio.run(run()) == ["0", "1", "2", "3", "4"]
    assert recorder.decisions() == ["admitted"] + ["waited"] * 4
    assert recorder.waiting == metric("otel_limits_quota_waiting", quota="q") == 0


def test_later_call_does_not_overtake_a_waiter(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """Even if it would fit into the remaining amount."""
    hold({"q": TOKENS}, url, [recorder])

    async def run() -> list[str]:
        large, small = Held(), Held(cap=10)
        small.asked = large.asked
        tasks = [start(make_agent(large), "first"), start(make_agent(large), "large")]
        await until(lambda: recorder.waiting == 1)
        tasks.append(start(make_agent(small), "small"))
        await until(lambda: recorder.waiting == 2)
        for model in (large, small):
            model.may_answer.set()
        await asyncio.gather(*tasks)
        return large.asked

    assert asyncio.run(run()) == ["first", "large", "small"]


def test_waiter_for_one_quota_does_not_block_another(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """It reserves nothing while waiting, and requests all of its quotas together."""
    quotas = {
        "narrow": TOKENS | {"where": {"agent": "both"}},
        "wide": TOKENS | {"tokens": 1400},
    }
    hold(quotas, url, [recorder])

    async def run() -> list[str]:
        model = Held()
        first = start(make_agent(model, name="both"), "first")
        await until(lambda: model.asked == ["first"])
        second = start(make_agent(model, name="both"), "second")
        await until(lambda: recorder.waiting == 1)
        other = start(make_agent(model, name="other"), "other")
        await until(lambda: len(model.asked) == 2)
        model.may_answer.set()
        await asyncio.gather(first, second, other)
        return model.asked

    assert asyncio.run(run()) == ["first", "other", "second"]


def test_agents_in_threads_of_their_own_wait_for_each_other(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """Each has its own event loop, and none of them blocks another."""
    hold({"q": TOKENS}, url, [recorder])
    model = ScriptedModel(endless(says("done")))
    model.update_config(max_tokens=600)
    results: list[str] = []
    agents = [make_agent(model) for _ in range(6)]
    threads = [
        threading.Thread(target=lambda agent=agent: results.append(agent("go").stop_reason))
        for agent in agents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == ["end_turn"] * 6
    assert set(recorder.decisions()) <= {"admitted", "waited"}


# --- how waits end --------------------------------------------------------------------------------


def test_call_waits_no_longer_than_max_wait(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder, fake_time: FakeTime
) -> None:
    """The agent is then halted, and the halt reports the wait."""
    hold({"q": CALLS | {"max_wait": "20s"}}, url, [recorder])

    async def run() -> list[Any]:
        model, never = Held(), ScriptedModel([says("never")])
        first = start(make_agent(model))
        await until(lambda: bool(model.asked))
        waiting = [start(make_agent(never)) for _ in range(3)]
        await until(lambda: recorder.waiting == 3)
        fake_time.advance(19)
        await asyncio.sleep(0)
        assert recorder.waiting == 3
        fake_time.advance(1)
        results = await asyncio.gather(*waiting)
        model.may_answer.set()
        await first
        return results

    results = asyncio.run(run())
    assert recorder.decisions() == ["admitted"] + ["gave_up"] * 3
    for result in results:
        assert result.stop_reason == "quota_exceeded"
        stop = otel_limits.stop_of(result)
        assert stop is not None
        assert stop.breach is not None
        assert stop.breach.note.endswith("; the call waited 20 s for it")
        assert stop.quota is not None
        assert (stop.quota.reserved, stop.quota.limit) == (1, 1)


def test_call_whose_loop_missed_the_end_of_its_wait_tries_once_more(
    hold: Hold, make_agent: MakeAgent, recorder: DecisionRecorder, fake_time: FakeTime
) -> None:
    """A step of a test, or a busy event loop, may pass several windows and the whole wait."""
    hold({"q": CALLS | {"window": "hour", "max_wait": "1h"}}, observers=[recorder])

    async def run() -> Any:
        model = ScriptedModel(endless(says("done")))
        await start(make_agent(model))
        waiting = start(make_agent(model))
        await until(lambda: recorder.waiting == 1)
        fake_time.advance(2 * 3600 + 1)
        return await waiting

    assert asyncio.run(run()).stop_reason == "end_turn"
    assert recorder.decisions() == ["admitted", "waited"]


def test_the_end_of_a_window_ends_a_wait(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """A quota per second paces calls: each is admitted in a separate window."""
    hold({"q": CALLS | {"window": "PT1S"}}, url, [recorder])

    async def run() -> list[Any]:
        model = ScriptedModel(endless(says("done")))
        return await asyncio.gather(*(start(make_agent(model)) for _ in range(2)))

    begun = int(time.time())
    assert {result.stop_reason for result in asyncio.run(run())} == {"end_turn"}
    assert "waited" in recorder.decisions() or int(time.time()) > begun


def test_release_by_another_process_ends_a_wait(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    store: SharedStore,
    recorder: DecisionRecorder,
) -> None:
    """The server notifies the waiters."""
    hold({"q": TOKENS}, server.url, [recorder])
    reserve(store, "elsewhere", 900)

    async def run() -> float:
        model = Held()
        model.may_answer.set()
        task = start(make_agent(model))
        await until(lambda: recorder.waiting == 1)
        begun = time.monotonic()
        await asyncio.to_thread(settle, store, "elsewhere", 100)
        assert (await task).stop_reason == "end_turn"
        return time.monotonic() - begun

    assert asyncio.run(run()) < SOON


@pytest.mark.parametrize("how", ["grant", "reset"])
def test_grant_or_reset_ends_a_wait(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    store: SharedStore,
    how: str,
    recorder: DecisionRecorder,
) -> None:
    """A grant, or a reset to 0."""
    hold({"q": TOKENS}, server.url, [recorder])
    settle(store, "earlier", 300)
    reserve(store, "elsewhere", 300)
    this = count()

    async def run() -> float:
        model = Held()
        model.may_answer.set()
        task = start(make_agent(model))
        await until(lambda: recorder.waiting == 1)
        begun = time.monotonic()
        if how == "grant":
            await asyncio.to_thread(store.change, this, Grant(1000, time.time() + 60))
        else:
            await asyncio.to_thread(store.change, this, Reset())
        assert (await task).stop_reason == "end_turn"
        return time.monotonic() - begun

    assert asyncio.run(run()) < SOON


def test_block_ends_a_wait_and_revoke_wakes_no_waiter(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    store: SharedStore,
    recorder: DecisionRecorder,
) -> None:
    """Waiters for a blocked key are refused with the reason."""
    hold({"q": CALLS}, server.url, [recorder])
    reserve(store, "elsewhere", 1, unit="model_calls")
    this = count(unit="model_calls")

    async def run() -> None:
        tasks = [start(make_agent(ScriptedModel([says("never")]))) for _ in range(2)]
        await until(lambda: recorder.waiting == 2)
        with server.client.pubsub() as subscription:
            subscription.subscribe("{otel_limits}:freed:0")
            await asyncio.to_thread(store.change, this, Withdraw(Grant))
            await asyncio.to_thread(store.change, this, Block(FOREVER, "unpaid"))
            results = await asyncio.gather(*tasks)
            await asyncio.to_thread(store.change, this, Withdraw(Block))
            server.client.publish("{otel_limits}:freed:0", "the last one")
            received = [subscription.get_message(timeout=SOON) for _ in range(4)]
        # Its subscription, the block and the end of it; no message about the revoked grant.
        assert [each["type"] for each in received] == ["subscribe"] + ["message"] * 3
        assert received[-1]["data"] == "the last one"
        assert {result.stop_reason for result in results} == {"quota_exceeded"}
        stops = [otel_limits.stop_of(result) for result in results]
        assert all(stop is not None and "unpaid" in stop.sentence for stop in stops)

    asyncio.run(run())


def test_the_lease_of_a_dead_process_ends_a_wait(
    hold: Hold, make_agent: MakeAgent, server: Server, store: SharedStore
) -> None:
    """No message is sent: the waiter knows when the lease expires."""
    hold({"q": TOKENS}, server.url)
    reserve(store, "dead", 900, lease=1.0)
    model = ScriptedModel([says("done")])
    model.update_config(max_tokens=600)
    result, seconds = seconds_of(lambda: make_agent(model)("go"))
    assert result.stop_reason == "end_turn"
    assert seconds < 1.0 + SOON


def test_waiter_asks_again_after_reconnecting(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    store: SharedStore,
    recorder: DecisionRecorder,
) -> None:
    """Its connection was cut while quota was freed."""
    hold({"q": TOKENS}, server.url, [recorder])
    reserve(store, "elsewhere", 900)

    async def run() -> str:
        model = Held()
        model.may_answer.set()
        task = start(make_agent(model))
        await until(lambda: recorder.waiting == 1)
        server.client.hdel(*server.client.keys("*q:*:tokens"), "waited")  # suppresses the message
        await asyncio.to_thread(settle, store, "elsewhere", 100)
        server.client.client_kill_filter(_type="pubsub")
        return str((await task).stop_reason)

    assert asyncio.run(run()) == "end_turn"


@pytest.mark.parametrize("end", ["free", "max_wait"])
def test_process_denied_subscribing_polls_while_waiting(
    hold: Hold, make_agent: MakeAgent, server: Server, end: str, recorder: DecisionRecorder
) -> None:
    """It polls once a second instead, and waits no longer than others."""
    rights = ("on", ">hunter2", "~*", "resetchannels", "+@all")
    server.client.execute_command("ACL", "SETUSER", "deaf", *rights)
    own_store = open_shared_store(StorePlace(server.url, 2.0))
    url = server.url.replace("redis://", "redis://deaf:hunter2@")
    hold({"q": TOKENS | {"max_wait": "1s" if end == "max_wait" else "30s"}}, url, [recorder])
    reserve(own_store, "elsewhere", 900)

    async def run() -> tuple[str, float]:
        model = Held()
        model.may_answer.set()
        task = start(make_agent(model))
        await until(lambda: recorder.waiting == 1)
        begun = time.monotonic()
        if end == "free":
            await asyncio.to_thread(settle, own_store, "elsewhere", 100)
        return (await task).stop_reason, time.monotonic() - begun

    reason, seconds = asyncio.run(run())
    own_store.close()
    assert reason == ("end_turn" if end == "free" else "quota_exceeded")
    assert seconds < 1.0 + SOON


@pytest.mark.parametrize("way", ["kill", "deadline", "cancel", "agent.cancel"])
def test_ended_invocation_leaves_the_queue(
    hold: Hold,
    make_agent: MakeAgent,
    url: str,
    way: str,
    recorder: DecisionRecorder,
    fake_time: FakeTime,
) -> None:
    """Immediately; the next waiter is admitted in its turn."""
    agents = {"ended": {"limits": {"max_duration_seconds": 10}}}
    hold({"q": TOKENS}, url, [recorder], agents=agents)

    async def run() -> None:
        model = Held()
        first = start(make_agent(model), "first")
        await until(lambda: model.asked == ["first"])
        agent = make_agent(model, name="ended")
        ended = start(agent, "ended")
        await until(lambda: recorder.waits == 1)
        last = start(make_agent(model), "last")
        await until(lambda: recorder.waits == 2)
        if way == "cancel":
            ended.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ended
        else:
            reasons = {"kill": "killed", "deadline": "max_duration", "agent.cancel": "cancelled"}
            if way == "kill":
                assert otel_limits.kill(agent="ended") == 1
            elif way == "deadline":
                fake_time.advance(10)
            elif way == "agent.cancel":
                agent.cancel()
                fake_time.advance(LOOK_SECONDS)
            assert (await ended).stop_reason == reasons[way]
        assert recorder.waiting == 1
        model.may_answer.set()
        assert [(await each).stop_reason for each in (first, last)] == ["end_turn"] * 2
        assert model.asked == ["first", "last"]

    asyncio.run(run())


def test_agent_cancelled_in_the_queue_can_be_called_again(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """Its history is valid, no model was called, and no quota was used."""
    hold({"q": TOKENS}, url, [recorder])

    async def run() -> None:
        held, model = Held(), ScriptedModel(endless(says("done")))
        model.update_config(max_tokens=600)
        first = start(make_agent(held))
        await until(lambda: bool(held.asked))
        agent = make_agent(model)
        task = start(agent)
        await until(lambda: recorder.waiting == 1)
        agent.cancel(message="enough")
        result = await task
        assert (result.stop_reason, model.calls) == ("cancelled", 0)
        assert [message["role"] for message in agent.messages] == ["user", "assistant"]
        assert agent.messages[-1]["content"] == [{"text": "enough"}]
        held.may_answer.set()
        await first
        assert (await start(agent)).stop_reason == "end_turn"
        assert (await otel_limits.remaining_async("q")).used == 30

    asyncio.run(run())


def test_switching_off_ends_a_wait(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """Disabling admits the call."""
    hold({"q": CALLS}, url, [recorder])

    async def run() -> list[str]:
        model = Held()
        tasks = [start(make_agent(model), "first")]
        await until(lambda: bool(model.asked))
        tasks.append(start(make_agent(model), "second"))
        await until(lambda: recorder.waiting == 1)
        otel_limits.disable()
        await until(lambda: model.asked == ["first", "second"])
        model.may_answer.set()
        return [str((await task).stop_reason) for task in tasks]

    assert asyncio.run(run()) == ["end_turn"] * 2


# --- calls that do not wait -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "reason"),
    [({"action": "observe"}, "end_turn"), ({"on_exceeded": "refuse"}, "quota_exceeded")],
    ids=["observe", "refuse"],
)
def test_only_quotas_with_on_exceeded_wait_queue_calls(
    hold: Hold,
    make_agent: MakeAgent,
    url: str,
    quota: dict[str, str],
    reason: str,
    recorder: DecisionRecorder,
) -> None:
    """An observed quota never delays a call."""
    hold({"q": CALLS | quota}, url, [recorder])
    model = ScriptedModel(endless(says("done")))
    reasons = [make_agent(model)("go").stop_reason for _ in range(2)]
    assert reasons == ["end_turn", reason]
    assert recorder.waits == 0


def test_refusing_quota_refuses_next_to_a_waiting_one(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """A refusal by one quota is immediate."""
    rate = CALLS | {"window": "PT20S"}
    hold({"q": rate, "hard": CALLS | {"on_exceeded": "refuse"}}, url, [recorder])
    model = ScriptedModel(endless(says("done")))
    reasons = [make_agent(model)("go").stop_reason for _ in range(2)]
    assert reasons == ["end_turn", "quota_exceeded"]
    assert recorder.decisions("hard") == ["admitted", "refused"]


def test_call_larger_than_the_quota_is_refused_immediately(
    hold: Hold, make_agent: MakeAgent, url: str
) -> None:
    """Waiting would not make it smaller."""
    hold({"q": TOKENS}, url)
    model = ScriptedModel([says("never")])
    model.update_config(max_tokens=2000)
    result, seconds = seconds_of(lambda: make_agent(model)("go"))
    assert result.stop_reason == "quota_exceeded"
    assert seconds < SOON


@pytest.mark.parametrize("unit", ["model_calls", "tokens"])
def test_call_that_would_wait_in_vain_is_refused_immediately(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder, unit: str
) -> None:
    """Nothing reserved can come back, and the window ends after `max_wait`: why wait for it?"""
    hold({"q": {unit: 12, "window": "year", "on_exceeded": "wait"}}, url, [recorder])
    model = ScriptedModel(endless(says("done")))
    agents = [make_agent(model) for _ in range(13)]
    results, seconds = seconds_of(lambda: [agent("go").stop_reason for agent in agents])
    admitted = 12 if unit == "model_calls" else 1
    assert results == ["end_turn"] * admitted + ["quota_exceeded"] * (13 - admitted)
    assert seconds < SOON
    assert recorder.waits == 0


def test_waiters_are_refused_once_nothing_can_come_back(
    hold: Hold, make_agent: MakeAgent, url: str, recorder: DecisionRecorder
) -> None:
    """They waited for a call in flight, which has used all that it reserved."""
    hold({"q": CALLS | {"max_wait": "10m"}}, url, [recorder])

    async def run() -> list[str]:
        model = Held()
        tasks = [start(make_agent(model))]
        await until(lambda: bool(model.asked))
        tasks += [start(make_agent(model)) for _ in range(3)]
        await until(lambda: recorder.waiting == 3)
        model.may_answer.set()
        return [(await task).stop_reason for task in tasks]

    results, seconds = seconds_of(lambda: asyncio.run(run()))
    assert results == ["end_turn"] + ["quota_exceeded"] * 3
    assert seconds < SOON


def test_blocked_key_is_refused_immediately(
    hold: Hold, make_agent: MakeAgent, server: Server, store: SharedStore
) -> None:
    """An operator has blocked all of its usage."""
    hold({"q": CALLS}, server.url)
    store.change(count(unit="model_calls"), Block(FOREVER, "unpaid"))
    result, seconds = seconds_of(lambda: make_agent(ScriptedModel([says("never")]))("go"))
    assert result.stop_reason == "quota_exceeded"
    assert seconds < SOON


# --- costs ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rare_looks")
def test_thousand_waiting_agents_send_no_commands(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    store: SharedStore,
    recorder: DecisionRecorder,
    fake_time: FakeTime,
) -> None:
    """When quota is freed, the first waiter asks, and then the one after it."""
    hold({"q": CALLS | {"grace": 0, "max_wait": "10m"}}, server.url, [recorder])
    reserve(store, "elsewhere", 1, lease=600.0, unit="model_calls")

    async def run() -> None:
        model = ScriptedModel(endless(says("done")))
        tasks = [start(make_agent(model))]
        # Waiters ask again when the process subscribes, since it may have missed a message.
        await until(
            lambda: bool(server.client.pubsub_channels("*freed*")) and recorder.waiting == 1
        )
        tasks += [start(make_agent(model)) for _ in range(999)]
        await until(lambda: recorder.waiting == 1_000)
        # A question is answered after all that was sent before it.
        await otel_limits.remaining_async("q")
        before = server.calls()
        assert before < 1_010
        fake_time.advance(2 * LOOK_SECONDS)
        await otel_limits.remaining_async("q")
        assert server.calls() == before + 1
        await asyncio.to_thread(
            store.change, count(unit="model_calls"), Grant(50, time.time() + 60)
        )
        await until(lambda: recorder.waiting == 950)
        await until(lambda: sum(task.done() for task in tasks) == 50)
        # A reservation and a settlement for each, the grant, and the attempts refused in between.
        assert server.calls() - before < 50 * 2 + 70
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(each, "stop_reason", "") for each in ended].count("end_turn") == 50

    asyncio.run(run())


# --- policy files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["30", 30, "0s", "soon", -1])
def test_a_wait_is_a_duration(hold: Hold, wait: object) -> None:
    """Any other value is an error, and the quota is not enforced."""
    with pytest.raises(ValueError, match=r'quotas\["q"\]: max_wait must be a duration above 0'):
        hold({"q": CALLS | {"max_wait": wait}})
