"""Graphs with scripted models, and every way to call one."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent

from otel_limits import Stop, stop_of
from otel_limits.testing import ScriptedChatModel, endless, uses

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = {"recursion_limit": 60}
"""A graph that is not halted ends soon."""


def search(query: str = "") -> str:
    """Search."""
    return f"nothing about {query}"


def looping(**options: Any) -> ScriptedChatModel:
    """A model that requests the same tool forever."""
    return ScriptedChatModel(endless(uses("search", arguments={"query": "x"})), **options)


def agent(model: Any, *tools: Any, name: str | None = "boss", **options: Any) -> Any:
    """An agent with the tool `search`."""
    return create_agent(model, [*tools, search] if not tools else [*tools], name=name, **options)


def config(thread: str | None = None, **more: Any) -> dict[str, Any]:
    """The configuration of a call."""
    return {**STEPS, **({"configurable": {"thread_id": thread}} if thread else {}), **more}


ASK = {"messages": [("user", "go")]}


def call_invoke(graph: Any, given: Any = ASK, options: Any = STEPS) -> Any:
    """`invoke`."""
    return graph.invoke(given, options)


def call_ainvoke(graph: Any, given: Any = ASK, options: Any = STEPS) -> Any:
    """`ainvoke`."""
    return asyncio.run(graph.ainvoke(given, options))


def call_stream(graph: Any, given: Any = ASK, options: Any = STEPS) -> Any:
    """`stream` of the values."""
    return list(graph.stream(given, options, stream_mode="values"))[-1]


def call_astream(graph: Any, given: Any = ASK, options: Any = STEPS) -> Any:
    """`astream` of several modes."""

    async def read() -> Any:
        modes = ["updates", "messages", "values"]
        chunks = [chunk async for chunk in graph.astream(given, options, stream_mode=modes)]
        return next(payload for mode, payload in reversed(chunks) if mode == "values")

    return asyncio.run(read())


def call_batch(graph: Any, given: Any = ASK, options: Any = STEPS) -> Any:
    """`batch` of one."""
    return graph.batch([given], options)[0]


def call_abatch(graph: Any, given: Any = ASK, options: Any = STEPS) -> Any:
    """`abatch` of one."""
    return asyncio.run(graph.abatch([given], options))[0]


def call_thread(graph: Any, given: Any = ASK, options: Any = STEPS) -> Any:
    """`invoke` in a plain thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(graph.invoke, given, options).result()


def call_v2(graph: Any, given: Any = ASK, options: Any = STEPS) -> Any:
    """`invoke` with LangGraph's second format of results."""
    result = graph.invoke(given, options, version="v2")
    return getattr(result, "value", result)  # ignored by releases before 1.1


AINVOKE = pytest.param(
    "ainvoke",
    marks=pytest.mark.skipif(
        sys.version_info < (3, 11), reason="LangGraph starts nodes without their context"
    ),
)
"""For behavior that needs the context of a node, which LangGraph keeps from Python 3.11 on."""

CALLS: dict[str, Callable[..., Any]] = {
    "invoke": call_invoke,
    "ainvoke": call_ainvoke,
    "stream": call_stream,
    "astream": call_astream,
    "batch": call_batch,
    "abatch": call_abatch,
    "thread": call_thread,
    "v2": call_v2,
}


def halt_of(state: Any) -> Stop:
    """The halt that a state ended with."""
    stop = stop_of(state)
    assert stop is not None
    return stop


def unanswered(messages: list[Any]) -> list[str]:
    """IDs of tool calls without a result: no vendor accepts such a conversation."""
    asked = [call["id"] for each in messages for call in getattr(each, "tool_calls", ())]
    answered = [each.tool_call_id for each in messages if each.type == "tool"]
    return [each for each in asked if each not in answered]
