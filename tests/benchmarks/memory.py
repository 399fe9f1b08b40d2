"""Memory of active and finished invocations: `python -m tests.benchmarks.memory 10000 100000`."""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from typing import TYPE_CHECKING

from otel_limits.core.limits import Limits
from otel_limits.core.policy import Policy
from otel_limits.core.usage import Usage, measured
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.registry import LIVE
from tests.benchmarks.loops import UNREACHED, enable

if TYPE_CHECKING:
    from otel_limits.runs.run import Run

NAMES = 300
"""Agents until further names become `_other`. Their memory is not counted."""

POLICY = Policy(limits=Limits(max_turns=UNREACHED, max_token_budget=UNREACHED))


def invoke(number: int) -> Run:
    """Start an invocation of a new agent and leave it in its second model call."""
    agent, cycle = 2 * number + 1, 2 * number + 2
    LIVE.spans.register_span(agent)
    run = LIVE.start(f"agent {number}", POLICY, trace_id=number + 1, span_id=agent)
    LIVE.spans.begin(cycle, run, parent=agent)
    call = run.calls.open(InFlightCall("scripted", 10))
    call.span_id = f"{cycle:016x}"
    run.calls.settle(call, measured(Usage(input=10, output=5)))
    run.count_turn()
    run.calls.open(InFlightCall("scripted", 25))
    return run


def traced() -> int:
    """Return the bytes allocated since tracing started and not freed."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def per_live_invocation(live: int) -> float:
    """Return the bytes per invocation with `live` active ones."""
    before = traced()
    runs = [invoke(number) for number in range(live)]
    weight = (traced() - before) / live
    for run in runs:
        run.finish("end_turn")
    return weight


def growth(finished: int) -> int:
    """Return the growth of the process over the last 90% of `finished` invocations."""
    first = finished // 10
    for number in range(first):
        invoke(number).finish("end_turn")
    before = traced()
    for number in range(first, finished):
        invoke(number).finish("end_turn")
    return traced() - before


def measure(live: int, finished: int) -> dict[str, float]:
    """Print both."""
    enable()
    for number in range(NAMES):  # not traced: tracing the price list's import takes a minute
        invoke(number).finish("end_turn")
    tracemalloc.start()
    return {"live": per_live_invocation(live), "growth": growth(finished)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))) + "\n")
