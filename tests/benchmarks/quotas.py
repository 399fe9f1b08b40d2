"""The overhead of quotas on a real Redis server, and the accuracy of each reservation mode.

`python -m tests.benchmarks.quotas` prints the tables of `otel_limits/docs/quotas.md` and
`quota-store.md`. Its exit status is 1 if a bound is exceeded. Compared measurements alternate in
short laps, because machines and moments differ more than quotas cost.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
import uuid
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import redis

from otel_limits.core.events import Invocation, ModelCall, QuotaUse
from otel_limits.core.price import Quote
from otel_limits.core.usage import Usage
from otel_limits.quotas.client import StoreClient
from otel_limits.quotas.engine import Engine
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import Charge, Count, Demand, Reserve, Reset, Settle, StorePlace
from otel_limits.quotas.store_worker import InlineExecutor, ThreadedExecutor
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.wait_queues import WaitQueues
from otel_limits.quotas.windows import Windows
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.quota_gate import AdmissionRequest
from tests.benchmarks.table import markdown
from tests.quotas.fixtures import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.core.events import Event
    from otel_limits.core.policy import Verdict
    from otel_limits.quotas.estimates import Reserved

LAPS: Final = 20
ROUNDS: Final = 100
"""Calls per lap."""
CALLS: Final = 2_000
"""Calls for the measurement of memory."""
AGENTS: Final = 200
TIMEOUT: Final = 2.0
"""Seconds that ship."""
CALLERS: Final = 40
INPUT: Final = 1_000
TOKENS: Final = 200_000
TAUGHT: Final = 25
"""Calls that establish the usual size of a model's answers."""
ANSWERS: Final = (100, 1_000, 4_000, 20_000)
WAYS: Final[tuple[tuple[Reserved, int | None], ...]] = (
    ("worst_case", 64_000),
    ("worst_case", None),
    ("expected", 64_000),
)
"""Reservation modes, each with the output cap that the model declares."""


def quota(number: int, **more: Any) -> Quota:
    """Return one of several quotas that apply to each call."""
    fields: dict[str, Any] = {"unit": "tokens", "amount": 10**12, "windows": Windows("P366D")}
    return Quota(name=f"q{number}", **fields | {"grace": 0.0} | more)


class Process:
    """The quota engine of a process."""

    def __init__(
        self, quotas: Sequence[Quota], executor: ThreadedExecutor | InlineExecutor
    ) -> None:
        self.events: list[Event] = []
        self._numbers = itertools.count()
        self.engine = Engine(
            lambda: quotas,
            StoreClient(executor, TIMEOUT, CLOCK),
            publish=self.events.append,
            price=lambda *_: Quote(price=Decimal(1)),
            queues=WaitQueues(CLOCK),
            is_active=lambda _: True,
        )
        self.engine.client.start()

    def request(self, output_cap: int | None = 100) -> AdmissionRequest:
        """Return a request for a call of a new invocation."""
        name = f"i{next(self._numbers)}"
        invocation = Invocation(agent="a", id=name, root_id=name)
        return AdmissionRequest(
            invocation=invocation, model="m", input=INPUT, output_cap=output_cap
        )

    async def ask(self, output_cap: int | None = 100) -> tuple[Invocation, Verdict | None]:
        """Request a call of a new invocation."""
        request = self.request(output_cap)
        return request.invocation, await self.engine.admit_by_quotas(request)

    async def end(self, invocation: Invocation, output: int) -> None:
        """Record an answer of `tokens` tokens."""
        call = ModelCall(
            invocation=invocation,
            number=1,
            model="m",
            kind="measured",
            usage=Usage(input=INPUT, output=output),
            estimated=False,
            span_id=None,
            seconds=None,
        )
        self.engine(call)
        await self.engine.settle(invocation.id)


def store_worker(server: Server) -> ThreadedExecutor:
    """Sends requests to the server."""
    place = StorePlace(server.url, TIMEOUT)
    return ThreadedExecutor(open_shared_store(place))


# --- on a server ----------------------------------------------------------------------------------


def one_admission(server: Server) -> float:
    """Return how many times as long an admission takes as a bare EVALSHA, each alone."""
    client = redis.Redis(port=server.port)
    sha = client.script_load("return 1")
    process = Process([quota(1)], store_worker(server))

    async def lap() -> float:
        bare, admitted = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            client.evalsha(sha, 0)
            bare.append(time.perf_counter() - began)
            request = process.request()
            began = time.perf_counter()
            await process.engine.admit_by_quotas(request)
            admitted.append(time.perf_counter() - began)
            await process.end(request.invocation, 50)
        return statistics.median(admitted) / statistics.median(bare)

    ratios = [asyncio.run(lap()) for _ in range(LAPS)]
    process.engine.close()
    client.close()
    return statistics.median(ratios)


def many_agents(server: Server, times: int) -> tuple[int, float]:
    """Run agents concurrently, several times; return the refusals and the slowest admission."""
    process = Process([quota(1)], store_worker(server))
    seconds: list[float] = []

    async def agent() -> int:
        began = time.perf_counter()
        invocation, verdict = await process.ask()
        seconds.append(time.perf_counter() - began)
        if verdict is None:
            await process.end(invocation, 50)
        return verdict is not None

    async def measure() -> int:
        return sum(
            [sum(await asyncio.gather(*(agent() for _ in range(AGENTS)))) for _ in range(times)]
        )

    refused = asyncio.run(measure())
    process.engine.close()
    return refused, max(seconds)


def server_seconds(server: Server) -> tuple[float, float]:
    """Return the CPU seconds of the server for one model call, admission and settlement.

    Returns:
        Those with one quota, and how many times as much it is with four.
    """
    processes = [Process([quota(n) for n in range(held)], store_worker(server)) for held in (1, 4)]

    async def calls(process: Process) -> None:
        for _ in range(ROUNDS):
            invocation, _ = await process.ask()
            await process.end(invocation, 50)

    def spent(process: Process) -> float:
        before = cpu(server)
        asyncio.run(calls(process))
        return (cpu(server) - before) / ROUNDS

    laps = [[spent(process) for process in processes] for _ in range(LAPS)][1:]
    for process in processes:
        process.engine.close()
    return (
        statistics.median(one for one, _ in laps),
        statistics.median(four / one for one, four in laps),
    )


def cpu(server: Server) -> float:
    """Return the CPU seconds of the server."""
    told = server.client.info("cpu")
    return float(told["used_cpu_user"] + told["used_cpu_sys"])


def kept(server: Server, quotas: int, calls: int = CALLS) -> tuple[float, float]:
    """Return the server's bytes per call and per quota key."""
    store, window = open_shared_store(StorePlace(server.url, TIMEOUT)), Windows("P366D")
    owner = uuid.uuid4().hex

    def call(number: int, key: str) -> None:
        now = window.at(time.time())
        counts = [Count(f"k{n}", key, now, "tokens", "#0123456789ab") for n in range(quotas)]
        name = f"{owner}-{number}"
        demands = tuple(Demand(count=each, amount=9, limit=10**12) for each in counts)
        store.run([Reserve(name, demands, 300.0)])
        store.run([Settle(name, tuple(Charge(count=each, amount=5) for each in counts))])

    def memory(keys: Sequence[str]) -> float:
        before = server.client.info("memory")["used_memory"]
        for key in keys:
            call(next(numbers), key)
        return float(server.client.info("memory")["used_memory"] - before) / len(keys)

    numbers = itertools.count()
    call(next(numbers), "0" * 32)
    for_a_call = memory(["0" * 32] * calls)
    for_a_key = memory([f"{number:032}" for number in range(1, calls)]) - for_a_call
    store.close()
    return for_a_call, for_a_key / quotas


# --- accuracy of reservations ---------------------------------------------------------------------


def overshoot(reserve: Reserved, taught: int, answer: int, cap: int | None) -> tuple[int, int]:
    """Run concurrent callers against a quota of `TOKENS`.

    Returns:
        How many were refused, and by how much the quota was passed when all had answered.
    """
    held, store = quota(1, amount=TOKENS, reserve=reserve), MemoryStore()
    process = Process([held], InlineExecutor(store, lambda _: None))

    async def run() -> int:
        for _ in range(TAUGHT):
            invocation, _ = await process.ask(cap)
            await process.end(invocation, taught)
            store.change(held.count(key, time.time()), Reset())
        asked = [await process.ask(cap) for _ in range(CALLERS)]
        for invocation, verdict in asked:
            if verdict is None:
                await process.end(invocation, answer)
        return sum(verdict is not None for _, verdict in asked)

    key = held.key.key(held.name, lambda _: None)
    refused = asyncio.run(run())
    process.engine.close()  # stops its lease timer
    used = [event.used for event in process.events if isinstance(event, QuotaUse)][-1]
    return refused, max(0, int(used) - TOKENS)


def overshoot_rows() -> list[tuple[str, ...]]:
    """Return a row for each size of answers and reservation mode, after long or short answers."""
    rows = []
    for answer in ANSWERS:
        cells = []
        for reserve, cap in WAYS:
            for taught in (answer, ANSWERS[0]):
                refused, passed = overshoot(reserve, taught, answer, cap)
                cells.append(f"{refused} / {passed:,}")
        rows.append((f"{answer:,}", *cells))
    return rows


def pin(server: Server) -> None:
    """Run the server and this process on separate cores, if there are two."""
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        first, second, *_ = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(server.client.info("server")["process_id"], {first})
        os.sched_setaffinity(0, {second})


def measure() -> list[tuple[str, float, str, float | None]]:
    """Measure on a server; return each title, value, format and bound."""
    server = Server(Path(tempfile.mkdtemp(prefix="quotas-")))
    server.start()
    try:
        pin(server)
        admission = one_admission(server)
        refused, slowest = many_agents(server, 10)
        one, four = server_seconds(server)
        for_a_call, for_a_key = kept(server, 1)
        for_a_call_of_four, _ = kept(server, 4)
    finally:
        server.stop()
    return [
        ("one admission alone, over one bare `EVALSHA`", admission, ".1f", 3),
        (f"{AGENTS} concurrent agents in one process, ten times: refused", refused, "d", 0),
        ("the slowest of them, in seconds", slowest, ".3f", TIMEOUT),
        ("CPU of the server for a call with 1 quota, in µs", 1e6 * one, ".0f", None),
        ("with 4 quotas, over that with 1", four, ".1f", 2),
        ("bytes kept for a call for an hour, 1 quota", for_a_call, ".0f", 120),
        ("the same with 4 quotas", for_a_call_of_four, ".0f", 120),
        ("bytes kept for a key of a quota", for_a_key, ".0f", None),
    ]


def main() -> int:
    """Measure everything and print the tables. Return 1 if a bound is exceeded."""
    measured = measure()
    rows = [
        (what, format(value, shown), "" if bar is None else f"≤ {bar:g}")
        for what, value, shown, bar in measured
    ]
    sys.stdout.write(markdown(("measured", "is", "bar"), rows) + "\n\n")
    header = (
        "tokens of an answer",
        "worst_case, cap, as before",
        "worst_case, cap, short before",
        "worst_case, no cap, as before",
        "worst_case, no cap, short before",
        "expected, as before",
        "expected, short before",
    )
    sys.stdout.write(markdown(header, overshoot_rows()) + "\n")
    missed = [what for what, value, _, bar in measured if bar is not None and value > bar]
    for what in missed:
        sys.stderr.write(f"The bar is missed: {what}.\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
