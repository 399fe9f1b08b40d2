"""A program that ends pools of workers, as `with Pool()` does: with SIGTERM, and waits for them.

Arguments: the number of pools, and `agents` if the workers call one.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from strands import Agent

from otel_limits.testing import ScriptedModel, endless, uses


def work(_number: int) -> Any:
    """Call an agent that loops."""
    if "agents" not in sys.argv:
        return None
    return Agent(model=ScriptedModel(endless(uses("search"))), callback_handler=None)("go")


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    for number in range(int(sys.argv[1])):
        with context.Pool(2) as pool:
            # Every other pool is ended while its workers are starting.
            if number % 2:
                pool.map(work, range(2))
    print("ended")  # noqa: T201  its output
