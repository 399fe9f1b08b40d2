"""A server with forked worker processes, as in gunicorn, each with its own agents."""

from __future__ import annotations

import os
import sys
import warnings

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from strands import Agent, tool

from otel_limits import Limits, enable
from otel_limits.testing import ScriptedModel, endless, uses

warnings.simplefilter("ignore", DeprecationWarning)  # about forks of multi-threaded processes

WORKERS = 3


@tool
def search() -> str:
    """Search."""
    return "nothing"


@tool
def crash() -> str:
    """End the process abruptly, as the kernel does when memory is short."""
    os._exit(9)


def work(name: str = "search") -> None:
    """Run an agent that is halted after two turns, unless its tool ends the process."""
    model = ScriptedModel(endless(uses(name)))
    agent = Agent(model=model, tools=[search, crash], callback_handler=None, name="worker")
    assert agent("go").stop_reason == "max_turns"


def fork(name: str = "search") -> int:
    """Start a worker that serves one request and ends; return its id when it has ended."""
    child = os.fork()
    if child == 0:
        work(name)
        os._exit(0)
    os.waitpid(child, 0)
    return child


def show() -> None:
    """Print what a scrape says."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    sys.stdout.write(generate_latest(registry).decode())


enable(Limits(max_turns=2))
if "--preload" in sys.argv:
    work()
workers = [fork() for _ in range(WORKERS)]
if "--crash" in sys.argv:
    workers.append(fork("crash"))
if "--forget" not in sys.argv:
    for worker in workers:
        mark_process_dead(worker)  # type: ignore[no-untyped-call]
show()
