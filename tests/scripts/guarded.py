"""Two workers of which one cannot enforce its limits: a scrape while both live, and a later one.

Prints two pages, one after the other.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

import strands.agent.agent  # noqa: F401  otel-limits looks at it when it is switched on
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from otel_limits import Limits, enable
from otel_limits.runtime.runtime import RUNTIME

warnings.simplefilter("ignore", DeprecationWarning)  # about forks of multi-threaded processes


def start(work: Callable[[], object]) -> tuple[int, int]:
    """Fork a worker that has begun when this returns, and stays until its pipe is closed."""
    ready, tell = os.pipe()
    wait, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        enable(Limits(max_turns=3))
        work()
        os.write(tell, b"!")
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    return child, hold


def show() -> None:
    """Print what a scrape says."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    sys.stdout.write(generate_latest(registry).decode() + "\f")


sound = start(lambda: None)
unsound = start(lambda: RUNTIME.report_untracked_agent("strands", "lost"))
show()
os.close(unsound[1])
os.waitpid(unsound[0], 0)
mark_process_dead(unsound[0])  # type: ignore[no-untyped-call]
show()
os.close(sound[1])
os.waitpid(sound[0], 0)
