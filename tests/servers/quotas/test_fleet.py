"""Several processes on one real server: their shared usage, and killed workers."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import redis
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from strands.middleware import InvokeModelStage

from otel_limits.core.events import ModelCall
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from otel_limits.ledger.spill import SpillFiles, restore_spilled
from otel_limits.quotas.keys import Template
from otel_limits.quotas.recovery import (
    decode_charges,
    encode_charges,
    forget_expired,
    settle_expired,
)
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.store import RECOVERABLE_SECONDS, Charge, Count, CountState, Demand, Reserve
from otel_limits.quotas.windows import Windows
from otel_limits.runs.registry import LIVE
from otel_limits.runtime.wiring import LedgerRecords
from otel_limits.testing import ScriptedChatModel, ScriptedModel, endless, says, tokens
from tests.paths import ROOT
from tests.processes import tied
from tests.quotas.fixtures import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from otel_limits.core.events import Event
    from otel_limits.quotas.redis_store import RedisStore
    from otel_limits.testing import Answer
    from tests.conftest import MakeAgent
    from tests.drills.deployments import Deployment
    from tests.quotas.fixtures import Hold, Server

EXPIRED_KEY = KeyNames().expired
WORKER = ROOT / "tests/quotas/worker.py"
PROCESSES = 4
LEASE = 1.0
LARGEST_CALL = 110
"""Tokens per call of the workers to be killed."""


COMMAND = "import sys; from otel_limits.cli import main; sys.exit(main())"


class Fleet(Protocol):
    """Runs a task in several concurrent processes."""

    def __call__(
        self,
        quota: dict[str, Any],
        task: str,
        processes: int = PROCESSES,
        status: int = 0,
        **arguments: Any,
    ) -> Counter[str]:
        """Enforce `quota` as `q`, and add up the results."""


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """The ledger, with each call durable before the next."""
    return tmp_path / "ledger.db"


@pytest.fixture
def fleet(server: Server, ledger: Path, tmp_path: Path) -> Fleet:
    """Processes that share the server."""

    def run(
        quota: dict[str, Any],
        task: str,
        processes: int = PROCESSES,
        status: int = 0,
        **arguments: Any,
    ) -> Counter[str]:
        policy = tmp_path / "limits.yaml"
        policy.write_text(json.dumps({"quotas": {"q": quota}}))
        settings = variables(server, ledger)
        command = [sys.executable, str(WORKER), task, json.dumps(arguments), str(processes)]
        with process(command, settings) as workers:
            assert workers.stdout is not None
            assert [workers.stdout.readline() for _ in range(processes)] == ["ready\n"] * processes
            output, _ = workers.communicate("go\n")
        *results, statuses = map(json.loads, output.splitlines())
        assert statuses == [status] * processes
        return sum(map(Counter, results), Counter())

    return run


def variables(server: Server | Deployment, ledger: Path) -> dict[str, str]:
    """The environment of every process."""
    return {
        "OTEL_LIMITS_POLICY": str(ledger.with_name("limits.yaml")),
        "OTEL_LIMITS_QUOTA_STORE": server.url,
        "OTEL_LIMITS_LEDGER": str(ledger),
        "OTEL_LIMITS_LEDGER_SYNC": "call",
    }


@contextmanager
def process(command: list[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and end it with all of its children."""
    started = subprocess.Popen(
        tied(*command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | variables,
        text=True,
        start_new_session=True,
    )
    with started:
        try:
            yield started
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def this_count(unit: str = "tokens") -> Count:
    """The current count of quota `q`."""
    key = Template("").key("q", dict[str, object]().get)
    return Count("q", key.id, Windows("month").at(time.time()), unit)


def standing(store: RedisStore, amount: int, unit: str = "tokens") -> CountState:
    """The state of quota `q`."""
    (found,) = store.look([(this_count(unit), amount)])
    return found


def test_quota_of_50_admits_50_of_200_concurrent_calls(fleet: Fleet, store: RedisStore) -> None:
    """Four processes with 50 agents each, on a quota of 50 calls: exactly 50."""
    said = fleet({"model_calls": 50, "window": "month"}, "ask_once", count=50)
    assert said["end_turn"] == 50
    assert said["quota_exceeded"] == 150
    assert standing(store, 50, "model_calls") == CountState(50, 0, 50)


def test_a_token_quota_is_never_passed_where_output_caps_are_known(
    fleet: Fleet, store: RedisStore
) -> None:
    """Twenty agents in four processes loop until refused: overshoot 0."""
    amount = 50_000
    said = fleet({"tokens": amount, "window": "month"}, "spend", agents=5, low=1, high=500, cap=500)
    assert said["quota_exceeded"] == 20
    found = standing(store, amount)
    assert found.used <= amount
    assert found.used > amount // 2
    assert found.reserved == 0


def test_without_caps_a_quota_is_passed_by_one_calls_estimate_error_at_most(
    fleet: Fleet, store: RedisStore
) -> None:
    """Forty concurrent agents, with answers of 6000 tokens where 4096 are assumed."""
    amount = 170_000
    said = fleet(
        {"tokens": amount, "window": "month"}, "spend", agents=10, low=6000, high=6000, cap=None
    )
    assert said["quota_exceeded"] == 40
    found = standing(store, amount)
    assert found.used <= amount + 6000 - 4096
    assert found.reserved == 0


def test_killed_workers_reservations_are_released_and_their_spend_counted(
    fleet: Fleet, server: Server, store: RedisStore, ledger: Path
) -> None:
    """Half of four workers are killed at random, four times.

    At first the quota lacks the last call of each killed worker that ended but was not settled. The
    ledger has it, unless the worker was killed even earlier. The `quotas` command then settles
    these too, once.
    """
    amount = 10**9
    quota = {"tokens": amount, "window": "month"}
    said = fleet(quota, "breed", 1, lease=LEASE, workers=4, rounds=4)
    assert said["killed"] == 12
    eventually(lambda: standing(store, amount).reserved == 0)
    spent, used = recorded(ledger), standing(store, amount).used
    assert used > 0
    assert 0 <= spent - used <= said["killed"] * LARGEST_CALL

    for _ in range(2):
        assert shown(server, ledger) == spent
        assert standing(store, amount) == CountState(spent, 0, amount)


def test_surviving_worker_settles_for_killed_worker(
    fleet: Fleet, store: RedisStore, ledger: Path
) -> None:
    """Two workers are killed between a call and its settlement; a third one settles for them."""
    fleet({"tokens": 1000, "window": "month"}, "die", 2, -signal.SIGKILL, lease=0.1)
    assert recorded(ledger) == 200
    eventually(lambda: standing(store, 1000) == CountState(0, 0, 1000))

    address = parse("ledger", str(ledger), ledger.parent)
    settle_expired(store, LedgerRecords(lambda: address).charges_of)
    assert standing(store, 1000) == CountState(200, 0, 1000)
    assert store.expired(0, 10) == []


def test_killed_workers_calls_are_charged_until_they_are_settled(
    fleet: Fleet, server: Server, store: RedisStore, ledger: Path
) -> None:
    """Two workers are killed before they settle 100 each; their ledger then does."""
    quota = {"tokens": 1000, "window": "month", "on_lost": "charge"}
    fleet(quota, "die", 2, -signal.SIGKILL, lease=0.1)
    eventually(lambda: standing(store, 1000).reserved == 0)
    assert standing(store, 1000).used > 200
    assert shown(server, ledger) == 200
    assert standing(store, 1000) == CountState(200, 0, 1000)


def test_killed_call_is_charged_the_mean_of_earlier_ones(
    fleet: Fleet, store: RedisStore, hold: Hold, make_agent: MakeAgent, server: Server
) -> None:
    """Of the last 20 of its model, rounded up; they were made by another process."""
    quota = {"tokens": 10_000, "window": "month", "on_lost": "charge"}
    hold({"q": quota}, server.url)
    for output in (90, *[20] * 19, 80):
        make_agent(ScriptedModel([says("done", usage=tokens(output))]))("go")
    used = standing(store, 10_000).used
    assert used == 90 + 19 * 20 + 80
    fleet(quota, "die", 1, -signal.SIGKILL, lease=0.1)
    eventually(lambda: standing(store, 10_000) == CountState(used + 23, 0, 10_000))


def test_second_call_counts_after_another_worker_settled_the_first(
    hold: Hold, make_agent: MakeAgent, events: list[Event], server: Server, store: RedisStore
) -> None:
    """Two calls share one reservation, and its lease ends during the second."""
    hold({"q": {"tokens": 100_000, "window": "month"}}, server.url, [events.append])
    gate: Any = LIVE.observers.gate
    gate.client.lease_seconds = 0.1

    def settled_elsewhere() -> bool:
        standing(store, 100_000)
        calls = [fact for fact in events if isinstance(fact, ModelCall)]
        found = [(call.quota_operation or "", call.quota_charges or "") for call in calls]
        return settle_expired(store, lambda _: found) == 1

    def script() -> Iterator[Answer]:
        yield says("draft", usage=tokens(100))
        eventually(settled_elsewhere)
        yield says("better", usage=tokens(50))

    async def twice(given: Any, call: Any) -> AsyncGenerator[Any, None]:
        async for _ in call(given):
            pass
        async for event in call(given):
            yield event

    agent = make_agent(ScriptedModel(script()))
    agent.add_middleware(InvokeModelStage, twice)
    agent("go")
    eventually(lambda: standing(store, 100_000) == CountState(150, 0, 100_000))


def test_calls_of_one_request_are_settled_together(
    hold: Hold, events: list[Event], server: Server, store: RedisStore
) -> None:
    """Each is recorded with its usage; another worker settles their reservation at the sum."""
    hold({"q": {"tokens": 100_000, "window": "month"}}, server.url, [events.append])
    model = ScriptedChatModel(endless(says("done", usage=tokens(10))))

    def work(_: Any) -> dict[str, Any]:
        model.generate([[HumanMessage("go")]] * 3)
        return {"messages": []}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("work", work).add_edge(START, "work").compile().invoke({"messages": []})
    calls = [fact for fact in events if isinstance(fact, ModelCall)]
    assert len({call.quota_operation for call in calls}) == 1
    charged = [decode_charges(call.quota_charges or "") for call in calls]
    assert [each.amount for (each,) in charged] == [10] * 3
    assert standing(store, 100_000) == CountState(30, 0, 100_000)

    ((charge,), *_) = charged
    demand = Demand(count=charge.count, amount=30, limit=100_000)
    store.run([Reserve("killed", (demand,), 0.01)])
    eventually(lambda: standing(store, 100_000).reserved == 0)
    recorded = [("killed", call.quota_charges or "") for call in calls]
    assert settle_expired(store, lambda ids: recorded if "killed" in ids else []) == 1
    assert standing(store, 100_000) == CountState(60, 0, 100_000)


def test_recovery_ignores_long_expired_reservations(server: Server, store: RedisStore) -> None:
    """Operation IDs are forgotten after an hour: it could count twice."""
    long_ago = (time.time() - RECOVERABLE_SECONDS - 1) * 1000
    with redis.Redis.from_url(server.url) as client:
        client.zadd(EXPIRED_KEY, {"old": long_ago, "new": time.time() * 1000})
    assert store.expired(0, 10) == ["new"]


@pytest.mark.usefixtures("faulty")
def test_reservation_too_old_to_settle_is_dropped_and_counted(
    server: Server, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted once in a fleet, by the worker that drops it."""
    long_ago = (time.time() - RECOVERABLE_SECONDS - 1) * 1000
    with redis.Redis.from_url(server.url) as client:
        client.zadd(EXPIRED_KEY, {"old": long_ago, "older": long_ago, "new": time.time() * 1000})
        forget_expired(store)
        forget_expired(store)
        assert client.zrange(EXPIRED_KEY, 0, -1) == [b"new"]
    assert caplog.text.count("2 model calls of killed workers were not settled") == 1


def test_unknown_reservations_do_not_hide_a_recorded_one(server: Server, store: RedisStore) -> None:
    """3,000 expired reservations of other ledgers, then one of this ledger."""
    store.warm()  # the first connection to a server discards those of an earlier run
    now = time.time() * 1000
    with redis.Redis.from_url(server.url) as client:
        client.zadd(EXPIRED_KEY, {f"of-others-{n}": now for n in range(3_000)})
        client.zadd(EXPIRED_KEY, {"ours": now - 1_000_000})
        charges = encode_charges([Charge(count=this_count(), amount=7)])
        found = [("ours", charges)]
        assert settle_expired(store, lambda ids: [each for each in found if each[0] in ids]) == 1
        assert client.zcard(EXPIRED_KEY) == 3_000
    assert standing(store, 1000).used == 7


def test_expired_reservations_are_kept_for_an_hour_at_most(
    server: Server, store: RedisStore
) -> None:
    """Workers killed during calls leave nothing that stays or grows."""
    demand = Demand(count=this_count(), amount=1, limit=1000)
    with redis.Redis.from_url(server.url) as client:
        client.zadd(EXPIRED_KEY, {"old": (time.time() - 3601) * 1000})
        store.run([Reserve("dead", (demand,), 0.01)])
        eventually(lambda: standing(store, 1000).reserved == 0)
        assert client.zrange(EXPIRED_KEY, 0, -1) == [b"dead"]
        assert 0 < client.pttl(EXPIRED_KEY) <= 3_600_000


def shown(server: Server, ledger: Path) -> int:
    """The usage shown by `otel-limits quotas`."""
    found = subprocess.run(
        [sys.executable, "-c", COMMAND, "quotas", "--format", "json"],
        env=os.environ | variables(server, ledger),
        stdout=subprocess.PIPE,
        check=True,
    )
    (level,) = json.loads(found.stdout)["quotas"]
    return int(level["used"])


def recorded(ledger: Path) -> int:
    """Tokens of all model calls in a ledger, side calls included."""
    database = Database(parse("ledger", str(ledger), ledger.parent))
    for _ in restore_spilled(database, SpillFiles(database.address)):
        continue
    database.close()
    with closing(sqlite3.connect(ledger)) as connection:
        rows = "SELECT sum(input_tokens + output_tokens) FROM otel_limits_model_calls"
        (tokens,) = connection.execute(rows).fetchone()
    return int(tokens)
