"""An application that receives SIGTERM while it waits, after its agent was halted.

Arguments: `--own-handler` handles SIGTERM itself, `--asyncio` waits in an event loop,
`--own-export` sets the provider of traces itself.
"""

import asyncio
import os
import signal
import sys
import time

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from strands import Agent, tool

from otel_limits.testing import ScriptedModel, endless, uses


@tool
def search(query: str = "") -> str:
    """Search for a query."""
    return f"nothing about {query!r}"


def end(*_: object) -> None:
    """End as a server does that handles the signal itself."""
    import otel_limits

    # Not with `print`, which cannot be called from within itself.
    os.write(1, f"{otel_limits.flush()}\n".encode())
    os._exit(3)


if "--own-handler" in sys.argv:
    signal.signal(signal.SIGTERM, end)
if "--own-export" in sys.argv:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

agent = Agent(
    model=ScriptedModel(endless(uses("search"))),
    tools=[search],
    name="researcher",
    callback_handler=None,
)
print(agent("Find it.").stop_reason, flush=True)  # noqa: T201  the test reads it
if "--asyncio" in sys.argv:
    asyncio.run(asyncio.sleep(60))
time.sleep(60)
