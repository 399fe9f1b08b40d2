"""Processes that run real agents and report each finished invocation."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strands import Agent, tool

import otel_limits
from otel_limits import Limits
from otel_limits.testing import ScriptedModel, says, uses
from tests.drills import clock

CALLS = 2
"""Model calls per invocation: a tool call and an answer."""
TOKENS = 15
"""Tokens per call, as reported by the scripted model."""


@dataclass
class Place:
    """The location of a ledger, and its fallback directories."""

    directory: Path
    address: str = ""

    def __post_init__(self) -> None:
        """Create its directories."""
        self.address = self.address or str(self.ledger)
        for each in (self.ledger.parent, self.temporary):
            each.mkdir(parents=True, exist_ok=True)

    @property
    def ledger(self) -> Path:
        """The database file, if it is one."""
        return self.directory / "home" / "ledger.db"

    @property
    def data(self) -> Path:
        """The user's data directory."""
        return self.directory / "share" / "otel-limits"

    @property
    def temporary(self) -> Path:
        """The directory for temporary files."""
        return self.directory / "tmp"

    def enter(self) -> None:
        """Make this process use the ledger."""
        os.environ["OTEL_LIMITS_LEDGER"] = self.address
        os.environ["XDG_DATA_HOME"] = str(self.directory / "share")
        tempfile.tempdir = str(self.temporary)


@dataclass
class Worker:
    """One process."""

    pid: int
    said: int
    """Pipe with one line per returned invocation."""
    returned: list[float] = field(default_factory=list)
    """The time of each return."""
    unread: bytes = b""

    def read(self) -> bool:
        """Read its output; return False at the end."""
        text = os.read(self.said, 65536)
        *lines, self.unread = (self.unread + text).split(b"\n")
        self.returned += map(float, lines)
        return bool(text)

    def drain(self) -> None:
        """Read its output so far."""
        while select.select([self.said], [], [], 0)[0] and self.read():
            pass

    def await_more(self, number: int, seconds: float = 60.0) -> None:
        """Wait until this many further invocations have returned."""
        self.drain()
        wanted, deadline = len(self.returned) + number, time.monotonic() + seconds
        while len(self.returned) < wanted:
            assert time.monotonic() < deadline, "A worker hangs."
            if select.select([self.said], [], [], 0.5)[0]:
                assert self.read(), "A worker has died."

    def end(self, *, kill: bool = False) -> int:
        """End it, normally or by a kill, and read the rest of its output; return its status."""
        if not (kill or self.returned):
            self.await_more(1)  # its signal handler is installed before
        os.kill(self.pid, signal.SIGKILL if kill else signal.SIGUSR1)
        while self.read():
            pass
        os.close(self.said)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start(place: Place, sync: str = "invocation", shift: float = 0.0) -> Worker:
    """Start a process that runs agents until it receives a signal.

    Args:
        place: The location of its ledger.
        sync: When rows are durable.
        shift: Seconds by which its clock jumps back and forth at every fifth invocation.
    """
    said, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Worker(pid, said)
    os.close(said)
    status = 1
    try:
        place.enter()
        os.environ["OTEL_LIMITS_LEDGER_SYNC"] = sync
        _run(writing, shift)
        status = 0
    except BaseException:  # noqa: BLE001  a fork must never return into the caller's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run(said: int, shift: float) -> None:
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    otel_limits.enable(Limits(max_turns=5))
    for number in itertools.count():
        clock.offset[0] = -shift if number // 5 % 2 else 0.0
        agent()("go")
        os.write(said, b"%f\n" % time.monotonic())
        if signals:
            break
    otel_limits.disable()


@tool
def look() -> str:
    """Look."""
    return "nothing"


def agent() -> Any:
    """An agent that calls a tool and then answers."""
    model = ScriptedModel([uses("look"), says("x")])
    return Agent(model=model, tools=[look], callback_handler=None, name=f"agent-{os.getpid()}")


@contextlib.contextmanager
def working(
    place: Place, number: int, sync: str = "invocation", **more: Any
) -> Iterator[list[Worker]]:
    """Run several workers, which end normally after the block; none outlives it."""
    workers = [start(place, sync, **more) for _ in range(number)]
    try:
        yield workers
        for worker in workers:
            assert worker.end() == 0, "A worker did not end normally."
        workers.clear()
    finally:
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.end(kill=True)
