"""Times each span callback alone: `python -m tests.benchmarks.callbacks 10000` live invocations."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.trace import Span

from otel_limits.bindings.known import span_names
from otel_limits.bindings.strands.marks import SPANS
from otel_limits.core.limits import Limits
from otel_limits.core.policy import Policy
from otel_limits.otel import semconv
from otel_limits.otel.processor import LimitsSpanProcessor
from otel_limits.runs.registry import LIVE
from tests.benchmarks.loops import UNREACHED, enable, set_provider

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context

CALLS = 2_000


def begin(name: str, scope: str = SPANS.scope, under: Span | None = None) -> Span:
    """Start a span through the provider that is set, and so through our processor."""
    context: Context | None = trace.set_span_in_context(under) if under is not None else None
    span = trace.get_tracer(scope).start_span(name, context)
    assert isinstance(span, Span)
    return span


def invoke() -> Span:
    """Begin an invocation that stays live; returns its span."""
    span = begin("invoke_agent benchmark")
    ids = span.get_span_context()
    LIVE.start("benchmark", Policy(limits=Limits(max_turns=UNREACHED)), ids.trace_id, ids.span_id)
    return span


def chat(cycle: Span) -> Span:
    """Make a chat span with usage of another instrumentation: the one kind that is booked."""
    span = begin("chat", scope="a.model.client", under=cycle)
    span.set_attributes(
        {
            semconv.REQUEST_MODEL: "scripted",
            "gen_ai.usage.input_tokens": 10,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.usage.cache_read.input_tokens": 3,
        }
    )
    return span


def microseconds(*calls: Callable[[], None]) -> list[float]:
    """Median duration of each of `calls`, which are made in turn."""
    times: list[list[int]] = [[] for _ in calls]
    for _ in range(CALLS):
        for number, call in enumerate(calls):
            start = time.perf_counter_ns()
            call()
            times[number].append(time.perf_counter_ns() - start)
    return [statistics.median(each) / 1_000 for each in times]


def measure(live: int) -> dict[str, float]:
    """Time every kind of callback while `live` invocations are live."""
    set_provider()
    enable()
    agents = [invoke() for _ in range(live)]
    processor = LimitsSpanProcessor(LIVE, span_names())
    agent = agents[live // 2]
    cycle = begin("execute_event_loop_cycle", under=agent)
    call, other = chat(cycle), begin("GET", scope="some.library")
    booked = microseconds(lambda: processor.on_end(call))
    cycles = microseconds(lambda: processor.on_start(cycle), lambda: processor.on_end(cycle))
    rest = microseconds(lambda: processor.on_start(agent), lambda: processor.on_end(other))
    names = (
        "chat end of another instrumentation",
        "cycle start",
        "cycle end",
        "agent start",
        "another library's span",
    )
    return dict(zip(names, (*booked, *cycles, *rest), strict=True))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]))) + "\n")
