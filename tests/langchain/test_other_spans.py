"""Model calls count once, and have one span, with every instrumentation of LangChain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.tools import tool
from openinference.instrumentation.langchain import LangChainInstrumentor

from otel_limits import Event, ModelCall, enable
from otel_limits.testing import ScriptedChatModel, endless, says, uses
from tests.langchain.graphs import CALLS, agent

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTRUMENTORS = {"OpenInference": LangChainInstrumentor}


@pytest.fixture(params=[*INSTRUMENTORS.values()], ids=[*INSTRUMENTORS])
def _instrumented(request: pytest.FixtureRequest, exporter: object) -> Iterator[None]:
    """An instrumentation that makes a span of each model call."""
    del exporter  # its provider is the global one from now on
    instrumentor: Any = request.param()
    instrumentor.instrument()
    yield
    instrumentor.uninstrument()


@pytest.mark.usefixtures("_instrumented")
@pytest.mark.parametrize("how", ["invoke", "ainvoke", "astream"])
def test_traced_calls_count_once(how: str, events: list[Event], spans: Any) -> None:
    """Two counts of one call would halve every budget of a traced program."""
    enable(max_turns=3, observers=[events.append])
    inner = ScriptedChatModel(endless(says("a summary")), model="inner")

    @tool
    def summarize() -> str:
        """Call another model."""
        return inner.invoke("text").text

    CALLS[how](agent(ScriptedChatModel(endless(uses("summarize"))), summarize))
    called = [each for each in events if isinstance(each, ModelCall)]
    assert [(each.model, each.usage.total) for each in called] == [
        ("scripted", 15),
        ("inner", 15),
    ] * 3
    names = [each.name for each in spans.get_finished_spans()]
    assert not any(name.startswith("chat ") for name in names)
    assert sum("ScriptedChatModel" in name for name in names) == 6
