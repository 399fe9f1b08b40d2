"""Graphs whose calls another instrumentation traces: `traced_graphs.py INSTRUMENTATION`.

Prints, as JSON, the requests that reached the models, the calls that were counted, and the names of
the spans that showed them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_limits
from otel_limits.testing import ScriptedChatModel, endless, says, uses

CONFIG: Any = {"recursion_limit": 60}
ASK: Any = {"messages": [("user", "go")]}

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
module, name = sys.argv[1].split(":")
getattr(import_module(module), name)().instrument(tracer_provider=provider)

counted: list[str] = []


def observe(event: otel_limits.Event) -> None:
    """Note each call that is counted."""
    if isinstance(event, otel_limits.ModelCall):
        counted.append(event.invocation.agent)


otel_limits.enable(tree=otel_limits.Limits(max_turns=7), observers=[observe])
inner = ScriptedChatModel(endless(says("a summary")))
model = ScriptedChatModel(endless(uses("summarize")))


@tool
def summarize() -> str:
    """Call another model."""
    return inner.invoke("text").text


helper: Any = create_agent(model, [summarize], name="helper")


def work(_: MessagesState) -> dict[str, Any]:
    """Call an agent in a branch."""
    return {"messages": [AIMessage(helper.invoke(ASK, CONFIG)["messages"][-1].text)]}


async def work_async(_: MessagesState) -> dict[str, Any]:
    """Call an agent in a branch."""
    return {"messages": [AIMessage((await helper.ainvoke(ASK, CONFIG))["messages"][-1].text)]}


def branching(node: Any) -> Any:
    """Build a graph that runs a node four times in parallel."""
    graph = StateGraph(MessagesState)
    graph.add_node("work", node)
    graph.add_conditional_edges(START, lambda state: [Send("work", state)] * 4, ["work"])
    return graph.compile(name="branching")


branching(work).invoke(ASK, CONFIG)
asyncio.run(branching(work_async).ainvoke(ASK, CONFIG))
otel_limits.disable()
seen = {
    "turns": model.calls,
    "requests": model.calls + inner.calls,
    "counted": counted,
    "spans": [each.name for each in exporter.get_finished_spans()],
}
sys.stdout.write(json.dumps(seen) + "\n")
