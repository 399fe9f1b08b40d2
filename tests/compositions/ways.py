"""The code of a program's tools, in any framework."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tests.compositions.program import Tool, Way
    from tests.compositions.run import Run


Builder: TypeAlias = "Callable[[Run, Sequence[Callee], Tool], Functions]"
"""Builds the code of a tool."""


class Callee(Protocol):
    """An agent or a model that a tool can call, each time with the same question."""

    name: str

    def now(self) -> Any:
        """Call it, and block."""

    async def later(self) -> Any:
        """Call it in a task."""

    def stream(self) -> Any:
        """Return an asynchronous generator of its events."""


class Functions(NamedTuple):
    """The code of a tool: a function, a coroutine function, or both."""

    now: Callable[[], str] | None
    later: Callable[[], Awaitable[str]] | None


def nothing() -> str:
    """Do nothing."""
    return "nothing"


async def nothing_later() -> str:
    """Do nothing, after other tasks have run."""
    await asyncio.sleep(0)
    return "nothing"


def outcome_now(callee: Callee) -> str:
    """Call an agent that may fail, or be busy with another question."""
    try:
        return type(callee.now()).__name__
    except Exception as error:  # noqa: BLE001  whatever it is, the tool answers
        return type(error).__name__


async def outcome(callee: Callee) -> str:
    """Do the same in a task."""
    try:
        return type(await callee.later()).__name__
    except Exception as error:  # noqa: BLE001
        return type(error).__name__


def one(run: Run, callees: Sequence[Callee], _: Tool) -> Functions:
    """Call one agent or model."""
    (callee,) = callees

    def now() -> str:
        with run.work():
            return outcome_now(callee)

    async def later() -> str:
        with run.work():
            return await outcome(callee)

    return Functions(now, later)


def in_turn(run: Run, callees: Sequence[Callee], _: Tool) -> Functions:
    """Call agents one after another, in a thread that cannot be canceled."""

    def now() -> str:
        with run.work():
            return str([outcome_now(each) for each in callees])

    return Functions(now, None)


def in_tasks(run: Run, callees: Sequence[Callee], _: Tool) -> Functions:
    """Call agents concurrently, in tasks."""

    async def later() -> str:
        with run.work():
            return str(await asyncio.gather(*map(outcome, callees)))

    return Functions(None, later)


def abandoning(run: Run, callees: Sequence[Callee], asked: Tool) -> Functions:
    """Read an agent's stream for a while, call another one, and perhaps close the stream."""
    first, second = callees

    async def later() -> str:
        stream = first.stream()
        async with aclosing(stream) if asked.is_closed else nullcontext():
            if not asked.is_closed:
                run.left.append(stream)
            with run.work(), suppress(Exception):
                await run.read_a_little(first.name, stream, asked.events)
                return await outcome(second)
        return "failed"

    return Functions(None, later)


# --- threads --------------------------------------------------------------------------------------


def in_plain_threads(calls: Sequence[Callable[[], Any]]) -> None:
    """Use plain threads."""
    threads = [threading.Thread(target=each) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_timers(calls: Sequence[Callable[[], Any]]) -> None:
    """Use the threads of timers."""
    timers = [threading.Timer(0, each) for each in calls]
    for timer in timers:
        timer.start()
    for timer in timers:
        timer.join()


def in_a_pool(calls: Sequence[Callable[[], Any]]) -> None:
    """Use a pool that begins and ends here."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for job in [pool.submit(each) for each in calls]:
            job.result()


def in_contexts(calls: Sequence[Callable[[], Any]]) -> None:
    """Use such a pool, with the context of the tool."""
    with ThreadPoolExecutor(len(calls)) as pool:
        jobs = [pool.submit(contextvars.copy_context().run, each) for each in calls]
        for job in jobs:
            job.result()


OLD_POOL: Final = ThreadPoolExecutor(4)
for _ready in [OLD_POOL.submit(int) for _ in range(4)]:
    _ready.result()


def in_an_old_pool(calls: Sequence[Callable[[], Any]]) -> None:
    """Use a pool whose threads are older than any agent.

    A tool that such a thread runs waits for another one, so there may be too few: then go on.
    """
    jobs = [OLD_POOL.submit(each) for each in calls]
    for job in jobs:
        job.result()


def in_threads(start: Callable[[Sequence[Callable[[], Any]]], None]) -> Builder:
    """Call agents concurrently in threads of some kind."""

    def build(run: Run, callees: Sequence[Callee], _: Tool) -> Functions:
        def now() -> str:
            with run.work():
                start([lambda each=each: outcome_now(each) for each in callees])  # type: ignore[misc]
            return "asked"

        return Functions(now, None)

    return build


def in_loops(run: Run, callees: Sequence[Callee], asked: Tool) -> Functions:
    """Call agents concurrently in two threads, each with its own event loop."""
    halves = [each for each in (callees[::2], callees[1::2]) if each]
    tasks = [in_tasks(run, half, asked).later for half in halves]

    def now() -> str:
        with run.work():
            in_contexts([lambda each=each: asyncio.run(each()) for each in tasks])  # type: ignore[misc]
        return "asked"

    return Functions(now, None)


BUILDERS: Final[Mapping[Way, Builder]] = {
    "look": lambda *_: Functions(nothing, nothing_later),
    "be": one,
    "ask": in_turn,
    "gather": in_tasks,
    "pool": in_threads(in_contexts),
    "threads": in_threads(in_plain_threads),
    "timers": in_threads(in_timers),
    "own pool": in_threads(in_a_pool),
    "old pool": in_threads(in_an_old_pool),
    "loops": in_loops,
    "abandon": abandoning,
}
