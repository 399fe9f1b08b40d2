"""Attributes of an invocation's span at its end: cost and would-be halt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from strands import tool

from otel_limits import Limits, enable
from otel_limits.testing import ScriptedModel, endless, fails, says, uses

if TYPE_CHECKING:
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.conftest import MakeAgent

COST = "otel_limits.cost_usd"
UNPRICED = "otel_limits.unpriced_calls"


@pytest.fixture
def _priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "limits.yaml"
    policy.write_text(
        "models:\n"
        "  priced: {price: {input: 1000, output: 2000}}\n"
        "  free: {price: {input: 0, output: 0}}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))


def of_agents(spans: InMemorySpanExporter) -> dict[str, dict[str, Any]]:
    """Our attributes on the spans of invocations, by agent."""
    return {
        span.name.removeprefix("invoke_agent "): {
            name: value
            for name, value in (span.attributes or {}).items()
            if name.startswith("otel_limits.")
        }
        for span in spans.get_finished_spans()
        if span.name.startswith("invoke_agent")
    }


def test_would_be_halt_is_on_the_span(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """Reason, limit and action of the would-be halt; the stop reason is the framework's."""
    enable(Limits(max_turns=2), action="observe")
    result = make_agent(ScriptedModel([*[uses("search")] * 3, says("done")]))("go")

    assert result.stop_reason == "end_turn"
    found = of_agents(spans)["tester"]
    assert str(found.pop("otel_limits.stop.message")).startswith(
        "Agent 'tester' would have been halted by max_turns: 2 of 2 turns used. "
    )
    assert found == {
        "otel_limits.stop.would_be": "max_turns",
        "otel_limits.stop.action": "observed",
        "otel_limits.limit.name": "max_turns",
        "otel_limits.limit.value": 2,
        "otel_limits.limit.consumed": 2,
    }


def test_real_halt_is_not_a_would_be_halt(
    make_agent: MakeAgent, spans: InMemorySpanExporter
) -> None:
    """Dashboards that count both must not count it twice."""
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")

    attributes = of_agents(spans)["tester"]
    assert attributes["otel_limits.stop.reason"] == "max_turns"
    assert "otel_limits.stop.would_be" not in attributes


@pytest.mark.usefixtures("_priced")
def test_cost_is_on_the_span(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """Two calls of 10 and 5 tokens at 1,000 and 2,000 USD per million, with no unpriced call."""
    enable()
    make_agent(ScriptedModel([uses("search"), says("done")], model_id="priced"))("go")

    assert of_agents(spans)["tester"] == {COST: pytest.approx(0.04)}


@pytest.mark.usefixtures("_priced")
def test_free_model_costs_zero(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """A price of 0 is a price."""
    enable()
    make_agent(ScriptedModel([says("done")], model_id="free"))("go")

    assert of_agents(spans)["tester"] == {COST: 0.0}


@pytest.mark.usefixtures("_priced")
def test_unknown_price_leaves_cost_unset(
    make_agent: MakeAgent, spans: InMemorySpanExporter
) -> None:
    """Never 0, which would mean free."""
    enable()
    make_agent(ScriptedModel([says("done")], model_id="unheard-of"))("go")

    assert of_agents(spans)["tester"] == {}


@pytest.mark.usefixtures("_priced")
def test_partial_cost_is_marked_as_partial(
    make_agent: MakeAgent, spans: InMemorySpanExporter
) -> None:
    """An agent that switches models has calls with and without a price."""
    enable()
    second = ScriptedModel([says("done")], model_id="unheard-of")

    @tool
    def switch() -> str:
        """Change the model."""
        agent.model = second
        return "done"

    agent = make_agent(ScriptedModel([uses("switch")], model_id="priced"), tools=[switch])
    agent("go")

    assert of_agents(spans)["tester"] == {COST: pytest.approx(0.02), UNPRICED: 1}


@pytest.mark.usefixtures("_priced")
def test_failed_invocation_has_a_cost(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """The calls before the failure were billed."""
    enable()
    script = [uses("search"), fails(ConnectionError("gone"))]
    with pytest.raises(Exception, match="gone"):
        make_agent(ScriptedModel(script, model_id="priced"))("go")

    assert of_agents(spans)["tester"] == {COST: pytest.approx(0.02)}


@pytest.mark.usefixtures("_priced")
def test_nested_agent_has_its_own_cost(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """Span costs can be added up: none includes that of another."""
    enable()

    @tool
    def ask() -> str:
        """Call another agent."""
        return str(make_agent(ScriptedModel([says("yes")], model_id="priced"), name="inner")("go"))

    outer = ScriptedModel([uses("ask"), says("done")], model_id="priced")
    make_agent(outer, tools=[ask], name="outer")("go")

    found = of_agents(spans)
    assert found["outer"] == {COST: pytest.approx(0.04)}
    assert found["inner"] == {COST: pytest.approx(0.02)}
