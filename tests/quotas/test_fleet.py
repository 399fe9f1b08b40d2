"""Several processes on one real server: what they may use together, and when some of them die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from otel_limits.quotas.keys import Template
from otel_limits.quotas.store import Charge, Count, Settle, Standing
from otel_limits.quotas.windows import Windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.quotas.redis_store import RedisStore
    from tests.quotas.conftest import Server

WORKER = Path(__file__).parent / "worker.py"
PROCESSES = 4
LEASE = 1.0


class Fleet(Protocol):
    """Runs a task in several processes at once."""

    def __call__(
        self, quota: dict[str, Any], task: str, processes: int = PROCESSES, **arguments: Any
    ) -> Counter[str]:
        """Hold `quota` under the name `q`, and add up what they say."""


@pytest.fixture
def fleet(server: Server, tmp_path: Path) -> Fleet:
    """Processes that share the server."""

    def run(
        quota: dict[str, Any], task: str, processes: int = PROCESSES, **arguments: Any
    ) -> Counter[str]:
        policy = tmp_path / "limits.yaml"
        policy.write_text(json.dumps({"quotas": {"q": quota}}))
        variables = {"OTEL_LIMITS_POLICY": str(policy), "OTEL_LIMITS_QUOTA_STORE": server.url}
        with ExitStack() as stack:
            command = [sys.executable, str(WORKER), task, json.dumps(arguments)]
            workers = [stack.enter_context(process(command, variables)) for _ in range(processes)]
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "ready\n"
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
            outputs = [worker.communicate()[0] for worker in workers]
            assert [worker.returncode for worker in workers] == [0] * processes
        return sum((Counter(json.loads(output)) for output in outputs), Counter())

    return run


@contextmanager
def process(command: list[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and end it with all that it started."""
    started = subprocess.Popen(
        command,
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


def this_count(rule: str = "month") -> Count:
    """What quota `q` counts now."""
    key = Template("").key("q", dict[str, object]().get)
    return Count("q", key.id, Windows(rule).at(time.time()))


def standing(store: RedisStore, amount: int) -> Standing:
    """How quota `q` stands."""
    (found,) = store.look([(this_count(), amount)])
    return found


def test_of_a_thousand_that_ask_at_once_a_hundred_are_admitted(
    fleet: Fleet, store: RedisStore
) -> None:
    """Four processes with 250 agents each, on a quota of 100 calls: exactly 100."""
    said = fleet({"model_calls": 100, "window": "month"}, "ask_once", count=250)
    assert said["end_turn"] == 100
    assert said["quota_exceeded"] == 900
    assert standing(store, 100) == Standing(100, 0, 100)


def test_a_token_quota_is_never_passed_where_output_caps_are_known(
    fleet: Fleet, store: RedisStore
) -> None:
    """Forty agents in four processes loop until they are stopped: overshoot 0."""
    amount = 100_000
    said = fleet(
        {"tokens": amount, "window": "month"}, "spend", agents=10, low=1, high=500, cap=500
    )
    assert said["quota_exceeded"] == 40
    found = standing(store, amount)
    assert found.used <= amount
    assert found.used > amount // 2
    assert found.reserved == 0


def test_without_caps_a_quota_is_passed_by_one_calls_estimate_error_at_most(
    fleet: Fleet, store: RedisStore
) -> None:
    """Answers are 6000 tokens long where 4096 are assumed, for forty agents at once."""
    amount = 170_000
    said = fleet(
        {"tokens": amount, "window": "month"}, "spend", agents=10, low=6000, high=6000, cap=None
    )
    assert said["quota_exceeded"] == 40
    found = standing(store, amount)
    assert found.used <= amount + 6000 - 4096
    assert found.reserved == 0


def test_what_killed_workers_held_comes_back_and_what_they_spent_is_counted(
    fleet: Fleet, store: RedisStore, tmp_path: Path
) -> None:
    """Half of four workers are killed at random, fifty times.

    Each may die between noting a settlement and hearing that it was done. Sending all of them
    again, as the ids of operations permit, leaves exactly the sum that was noted.
    """
    journals = tmp_path / "journals"
    journals.mkdir()
    amount = 10**9
    quota = {"tokens": amount, "window": "month"}
    said = fleet(quota, "breed", 1, folder=str(journals), lease=LEASE, workers=4, rounds=50)
    before = standing(store, amount)
    noted = [
        json.loads(line) for path in journals.iterdir() for line in path.read_text().splitlines()
    ]
    spent = sum(charge for _, charge, _ in noted)
    assert said["killed"] == 104
    assert before.used > 0
    assert 0 <= spent - before.used <= said["killed"] * 110

    window = this_count().window
    assert {start for _, _, start in noted} == {window.start}
    store.run([Settle(name, (Charge(count=this_count(), amount=each),)) for name, each, _ in noted])
    give_up = time.monotonic() + 10 * LEASE
    while standing(store, amount).reserved and time.monotonic() < give_up:
        continue
    assert standing(store, amount) == Standing(spent, 0, amount)
