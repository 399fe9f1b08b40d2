"""Processes of a fleet: `python worker.py TASK ARGUMENTS-AS-JSON [PROCESSES]`.

Each is limited from the environment alone, as a user's program is, prints "ready", and its result
as JSON after a line "go" on stdin. With PROCESSES, they are forks of one that has imported all
packages, which prints their exit statuses at last.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import select
import sys
import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from opentelemetry import baggage, context
from strands import Agent, tool

import otel_limits
from otel_limits.core.events import QuotaWait
from otel_limits.core.price_lookup import Prices
from otel_limits.quotas import client, needs
from otel_limits.quotas.store import Operation, Reply, Settle
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, says, uses
from tests.quotas.waiters import DecisionRecorder, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterator
    from concurrent.futures import Future

    from otel_limits.core.events import Event
    from otel_limits.testing import Answer


NEEDED = (
    "otel_limits.bindings.strands.realtime",
    "otel_limits.bindings.strands.sent_requests",
    "otel_limits.ledger.database",
    "otel_limits.ledger.writer",
    "otel_limits.observers.otlp_observer",
    "otel_limits.observers.ledger",
    "otel_limits.observers.prometheus",
    "otel_limits.quotas.redis_store",
    "otel_limits.quotas.section",
    "otel_limits.quotas.setup",
    "otel_limits.runtime.enable",
    "sqlalchemy.dialects.sqlite",
)
"""Imports of every limited process: a parent loads them for all of its children."""


def enable() -> None:
    """Limit this process from the environment."""
    otel_limits.enable()


@tool
def search(query: str = "") -> str:
    """Search for a query."""
    return "nothing found"


def usage(output: int) -> dict[str, int]:
    """Report 10 input tokens, fewer than any projection, and `output`."""
    return {"inputTokens": 10, "outputTokens": output, "totalTokens": 10 + output}


def make_agent(script: Iterator[Answer], cap: int | None = None) -> Agent:
    """Make a silent agent."""
    model = ScriptedModel(script)
    if cap is not None:
        model.update_config(max_tokens=cap)
    return Agent(model=model, tools=[search], name="worker", callback_handler=None)


def ask_once(count: int) -> dict[str, int]:
    """Let `count` agents ask their model once, all at the same time."""

    async def run() -> list[Any]:
        agents = [make_agent(iter([says("done")])) for _ in range(count)]
        return await asyncio.gather(*(agent.invoke_async("go") for agent in agents))

    return dict(Counter(result.stop_reason for result in asyncio.run(run())))


def spend(agents: int, low: int, high: int, cap: int | None) -> dict[str, int]:
    """Let agents loop, each answer with `low` to `high` output tokens, until they are halted."""
    randomly = Random(os.getpid())  # noqa: S311  nothing here is secret

    def script() -> Iterator[Answer]:
        while True:
            yield uses("search", usage=usage(randomly.randint(low, high)))

    async def run() -> list[Any]:
        made = [make_agent(script(), cap) for _ in range(agents)]
        return await asyncio.gather(*(agent.invoke_async("go") for agent in made))

    return dict(Counter(result.stop_reason for result in asyncio.run(run())))


def chat(name: str, number: int) -> dict[str, int]:
    """Send messages in a conversation, one after the other."""
    agent = make_agent(iter([says("done")] * number))
    token = context.attach(baggage.set_baggage("chat.id", name))
    results = [agent("go") for _ in range(number)]
    context.detach(token)
    return dict(Counter(result.stop_reason for result in results))


class Streaming(ScriptedModel):
    """A model that streams words until an event is set."""

    def __init__(self, enough: asyncio.Event) -> None:
        super().__init__([])
        self.began = asyncio.Event()
        self._enough = enough

    async def stream(self, *_: Any, **__: Any) -> AsyncIterable[Any]:
        """Send words."""
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {}}}
        self.began.set()
        while not self._enough.is_set():
            yield {"contentBlockDelta": {"delta": {"text": "word "}}}
            await asyncio.sleep(0.01)
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn"}}


def stream(names: list[str], last: str) -> dict[str, int]:
    """Let agents stream until they are killed from outside; then let `last` finish."""

    async def run() -> dict[str, int]:
        enough, never = asyncio.Event(), asyncio.Event()
        models = {name: Streaming(enough if name == last else never) for name in (*names, last)}
        tasks = {
            name: asyncio.create_task(
                Agent(model=model, name=name, callback_handler=None).invoke_async("go")
            )
            for name, model in models.items()
        }
        for model in models.values():
            await model.began.wait()
        sys.stdout.write("began\n")
        sys.stdout.flush()
        await asyncio.gather(*(tasks[name] for name in names))
        enough.set()
        return {f"{name}: {(await task).stop_reason}": 1 for name, task in tasks.items()}

    return asyncio.run(run())


class Slow(ScriptedModel):
    """A model that announces each call and answers after a while."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__([says("done")])
        self._name, self._seconds = name, seconds

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[Any]:
        """Take the given time."""
        announce(f"asked {self._name}")
        await asyncio.sleep(self._seconds)
        async for event in super().stream(*arguments, **named):
            yield event


def line_up(names: list[str], seconds: float, lease: float) -> dict[str, int]:
    """Let agents call in sequence, and announce when all of them wait or are in flight.

    Args:
        names: Their names.
        seconds: The duration of each model call.
        lease: The lease of a slot, for workers that do not renew it.
    """
    for module in (client, client, needs):
        setattr(module, "SLOT_LEASE_SECONDS", lease)  # noqa: B010  mypy rejects assigning a Final
    setattr(client, "RENEW_SECONDS", lease / 3)  # noqa: B010
    recorder = DecisionRecorder()
    otel_limits.enable(observers=[recorder])

    async def run() -> list[Any]:
        tasks = []
        for name in names:
            agent = Agent(model=Slow(name, seconds), name=name, callback_handler=None)
            tasks.append(asyncio.create_task(agent.invoke_async("go", invocation_state={})))
            await until(lambda: recorder.waits + len(recorder.decisions()) >= len(tasks))
        announce("queued")
        return [(await task).stop_reason for task in tasks]

    return dict(Counter(asyncio.run(run())))


def announce(line: str) -> None:
    """Print a line for the test."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Asking(ScriptedModel):
    """A model that announces its call, and answers after a line on stdin."""

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[Any]:
        """Wait for the line; this process has no other agent."""
        announce("asked")
        sys.stdin.readline()
        async for event in super().stream(*arguments, **named):
            yield event


def serve(lease: float | None = None) -> dict[str, int]:
    """Make the calls that each line on stdin names; print how they ended, and the longest time.

    Args:
        lease: The lease of a reservation, if it is not the default.
    """
    if lease is not None:
        setattr(client, "RENEW_SECONDS", lease / 3)  # noqa: B010  mypy rejects assigning a Final
        gate: Any = LIVE.observers.gate
        gate.client.lease_seconds = lease
    for line in sys.stdin:
        told, ends, seconds = json.loads(line), list[str](), list[float]()
        kind = Asking if told.get("is_held") else ScriptedModel
        for name, output in told["calls"]:
            model = kind([says("done", usage=usage(output))])
            model.update_config(max_tokens=100)
            began = time.monotonic()
            result = Agent(model=model, name=name, callback_handler=None)("go")
            ends.append(result.stop_reason)
            seconds.append(time.monotonic() - began)
        announce(json.dumps([ends, max(seconds)]))
    return {}


def spread(cap: int, seconds: float, agents: int, calls: int) -> dict[str, int]:
    """Let agents make calls in sequence, and announce when they wait and are admitted.

    Args:
        cap: The output cap of each call.
        seconds: Its duration.
        agents: How many call concurrently.
        calls: How many each of them makes.
    """

    def announce_wait(event: Event) -> None:
        if isinstance(event, QuotaWait) and event.seconds is None:
            announce(f"waits {time.monotonic()}")

    class Timed(ScriptedModel):
        async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[Any]:
            announce(f"admitted {time.monotonic()}")
            await asyncio.sleep(named["invocation_state"]["seconds"])
            async for event in super().stream(*arguments, **named):
                yield event

    async def run(number: int) -> list[str]:
        # Calls that all end at the same time would leave room for a large one.
        state = {"seconds": seconds * (1 + number / agents)}
        ends: list[str] = []
        for _ in range(calls):
            model = Timed([says("done")])
            model.update_config(max_tokens=cap)
            agent = Agent(model=model, callback_handler=None)
            ends.append((await agent.invoke_async("go", invocation_state=dict(state))).stop_reason)
        return ends

    async def run_all() -> list[list[str]]:
        return await asyncio.gather(*map(run, range(agents)))

    otel_limits.enable(observers=[announce_wait])
    return dict(Counter(end for ends in asyncio.run(run_all()) for end in ends))


class Journal:
    """Notes each settlement in a pipe before it is sent, so that the parent sees the progress."""

    is_shared = True

    def __init__(self, executor: Any, notes: int) -> None:
        self._executor = executor
        self.worker = executor.worker
        self._notes = notes

    async def ask(self, operation: Operation, seconds: float) -> Reply | None:
        """Note a settlement, then run it."""
        self._note(operation)
        reply: Reply | None = await self._executor.ask(operation, seconds)
        return reply

    def send(self, operation: Operation) -> Future[Reply]:
        """Note a settlement, then send it."""
        self._note(operation)
        future: Future[Reply] = self._executor.send(operation)
        return future

    def close(self) -> None:
        """Send what is left."""
        self._executor.close()

    def _note(self, operation: Operation) -> None:
        if isinstance(operation, Settle):
            os.write(self._notes, b"\n")


def live_dangerously(notes: int, lease: float) -> None:
    """Spend until killed; a pipe receives a byte for each settlement."""
    enable()
    gate: Any = LIVE.observers.gate
    gate.client.lease_seconds = lease
    gate.client.executor = Journal(gate.client.executor, notes)
    randomly = Random(os.getpid())  # noqa: S311  nothing here is secret

    def script() -> Iterator[Answer]:
        while True:
            yield uses("search", usage=usage(randomly.randint(1, 100)))
            yield says("done", usage=usage(randomly.randint(1, 100)))

    agent = make_agent(script(), 100)
    while agent("go").stop_reason == "end_turn":
        agent.messages.clear()


class Fatal:
    """Kills its process with `kill -9` on the first settlement."""

    is_shared = True

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.worker = executor.worker

    async def ask(self, operation: Operation, seconds: float) -> Reply | None:
        """Run any operation but a settlement."""
        if isinstance(operation, Settle):
            os.kill(os.getpid(), 9)
        reply: Reply | None = await self._executor.ask(operation, seconds)
        return reply

    def send(self, operation: Operation) -> Future[Reply]:
        """Send anything but a settlement."""
        if isinstance(operation, Settle):
            os.kill(os.getpid(), 9)
        future: Future[Reply] = self._executor.send(operation)
        return future


def die(lease: float) -> dict[str, int]:
    """Make one call, and be killed between its end and its settlement."""
    gate: Any = LIVE.observers.gate
    gate.client.lease_seconds = lease
    gate.client.executor = Fatal(gate.client.executor)
    make_agent(iter([says("done", usage=usage(90))]), 100)("go")
    raise AssertionError("it lives")


def breed(lease: float, workers: int, rounds: int) -> dict[str, int]:
    """Keep processes that spend, and kill half of them at random, repeatedly."""
    randomly = Random(0)  # noqa: S311  nothing here is secret
    Prices().load()
    ask_once(1)
    noted, notes = os.pipe()
    children = [_fork(notes, lease) for _ in range(workers)]
    for _ in range(rounds):
        _wait_for_settlements(noted, randomly.randint(1, 4))
        for position in randomly.sample(range(workers), workers // 2):
            _kill(children[position])
            children[position] = _fork(notes, lease)
    for child in children:
        _kill(child)
    return {"killed": rounds * (workers // 2) + workers}


def _wait_for_settlements(noted: int, more: int) -> None:
    """Wait for that many more settlements."""
    while select.select([noted], [], [], 0)[0]:
        os.read(noted, 4096)  # earlier ones
    while more > 0:
        more -= len(os.read(noted, more))


def _fork(notes: int, lease: float) -> int:
    child = os.fork()
    if child == 0:
        try:
            live_dangerously(notes, lease)
        finally:
            os._exit(1)
    return child


def _kill(child: int) -> None:
    os.kill(child, 9)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == 9, "it ended by itself"


TASKS: dict[str, Callable[..., dict[str, int]]] = {
    "ask_once": ask_once,
    "spend": spend,
    "stream": stream,
    "breed": breed,
    "chat": chat,
    "die": die,
    "line_up": line_up,
    "serve": serve,
    "spread": spread,
}


def run(wait: Callable[[], object]) -> None:
    """Run the task in this process."""
    task, arguments = TASKS[sys.argv[1]], json.loads(sys.argv[2])
    if task is not breed:  # its children enable limits themselves
        enable()
    announce("ready")
    wait()
    result = task(**arguments)
    otel_limits.disable()
    announce(json.dumps(result))


def run_in_forks(processes: int) -> None:
    """Run the task in several processes, all of which begin when the pipe is closed."""
    for module in NEEDED:
        importlib.import_module(module)
    begun, begin = os.pipe()
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            os.close(begin)
            run(lambda: os.read(begun, 1))
            return
        children.append(child)
    sys.stdin.readline()
    os.close(begin)
    ended = (os.waitpid(child, 0)[1] for child in children)
    announce(json.dumps(list(map(os.waitstatus_to_exitcode, ended))))


def main() -> None:
    """Run the task."""
    if len(sys.argv) > 3:
        run_in_forks(int(sys.argv[3]))
    else:
        run(sys.stdin.readline)


if __name__ == "__main__":
    main()
