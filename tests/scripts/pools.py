"""A program that ends pools of workers, as `with Pool()` does: with SIGTERM, and waits for them.

Arguments: the number of pools, and `agents` if the workers call one. With `stuck START_METHOD`, it
ends a child whose main thread waits in C, and prints how that ended.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading
from typing import Any

from strands import Agent

from otel_limits.testing import ScriptedModel, endless, uses


def work(_number: int) -> Any:
    """Call an agent that loops."""
    if "agents" not in sys.argv:
        return None
    return Agent(model=ScriptedModel(endless(uses("search"))), callback_handler=None)("go")


def wait_in_c(is_waiting: Any) -> None:
    """Call an agent, and wait for a lock whose wait no signal interrupts."""
    Agent(model=ScriptedModel(endless(uses("search"))), callback_handler=None)("go")
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    threading.Timer(0.2, is_waiting.set).start()
    lock(mutex)


def end_stuck_child(method: str) -> None:
    """End a child as a pool ends its workers, and print its exit code."""
    context = multiprocessing.get_context(method)
    is_waiting = context.Event()
    child = context.Process(target=wait_in_c, args=(is_waiting,))  # type: ignore[attr-defined]  # each has it
    child.start()
    is_waiting.wait()
    child.terminate()
    child.join(30)
    print(child.exitcode)  # noqa: T201  its output
    child.kill()


if __name__ == "__main__":
    if sys.argv[1] == "stuck":
        end_stuck_child(sys.argv[2])
        sys.exit()
    context = multiprocessing.get_context("fork")
    for number in range(int(sys.argv[1])):
        with context.Pool(2) as pool:
            # Every other pool is ended while its workers are starting.
            if number % 2:
                pool.map(work, range(2))
    print("ended")  # noqa: T201  its output
