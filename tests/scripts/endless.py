"""A program whose agent calls its tool forever. It prints the outcome as JSON.

It knows nothing of limits: `otel_limits.testing` only scripts the model. Arguments make it what
programs in the wild are: `--own-provider` sets a tracer provider before the agent is made, as
`StrandsTelemetry()` does, `--late-provider` sets one afterwards,
`--enable` limits agents in code, `--wait` has a tool that waits, `--stay` continues until standard
input is closed.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

from opentelemetry import trace
from opentelemetry.instrumentation.threading import ThreadingInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import REGISTRY
from strands import Agent, tool

from otel_limits.testing import ScriptedModel, uses

INSTRUMENTED_FROM_OUTSIDE = ThreadingInstrumentor().is_instrumented_by_opentelemetry
"""Strands instruments threads itself when the first agent is made, so this is asked before."""

MOST_CALLS = 40
"""A limit that does not hold must end in a failed test, not in a recursion error."""


@tool
def search() -> str:
    """Search."""
    if "--wait" in sys.argv:
        print("waiting", flush=True)  # noqa: T201  its output
        time.sleep(0.2)
    return "nothing found"


def run() -> dict[str, object]:
    """Run the agent, and return what there is to know afterwards."""
    if "--own-provider" in sys.argv:
        trace.set_tracer_provider(TracerProvider())
    model = ScriptedModel([uses("search")] * MOST_CALLS)
    agent = Agent(model=model, tools=[search], name="endless", callback_handler=None)
    if "--late-provider" in sys.argv:
        trace.set_tracer_provider(TracerProvider(resource=None))
    try:
        stop_reason = str(agent("go").stop_reason)
    except Exception as error:  # noqa: BLE001  the script has run out
        stop_reason = repr(error)
    return {
        "stop_reason": stop_reason,
        "model_calls": model.calls,
        "provider": type(trace.get_tracer_provider()).__name__,
        "threads_instrumented": INSTRUMENTED_FROM_OUTSIDE,
        "samples": samples(),
    }


def samples() -> dict[str, float]:
    """Collect every nonzero otel-limits sample, by name and label values."""
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("otel_limits") and sample.value
    }


if __name__ == "__main__":
    warnings.simplefilter("error")
    if "--enable" in sys.argv:
        import otel_limits

        otel_limits.enable(otel_limits.Limits(max_turns=2))
    print(json.dumps(run()), flush=True)  # noqa: T201  its output
    if "--stay" in sys.argv:
        sys.stdin.read()
