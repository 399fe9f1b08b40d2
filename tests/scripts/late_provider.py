"""A program that sets a tracer provider with its own exporter between two agent calls."""

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from strands import Agent, tool

from otel_limits.testing import ScriptedModel, endless, uses


@tool
def search(query: str = "") -> str:
    """Search for a query."""
    return f"nothing about {query!r}"


def run_away() -> None:
    """Run an agent into its limit."""
    model = ScriptedModel(endless(uses("search")))
    Agent(model=model, tools=[search], name="researcher", callback_handler=None)("Find it.")


run_away()
provider = TracerProvider(resource=Resource.create({"service.name": "own"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
run_away()
