"""The metrics of OpenTelemetry's GenAI conventions, where they are asked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from strands import tool

from otel_limits import Limits, MaxTurnsReachedException, enable
from otel_limits.core.usage import Usage
from otel_limits.observers.conventions import CONVENTIONAL
from otel_limits.observers.otlp_observer import OtlpObserver
from otel_limits.observers.prometheus import PrometheusObserver
from otel_limits.testing import ScriptedModel, endless, fails, says, uses
from tests.unit.observers.test_counting import (
    CALL,
    INVOCATION,
    STARTED,
    STOP,
    TOOL_CALL,
    read,
    translated,
)

if TYPE_CHECKING:
    from otel_limits.observers.metrics import MetricSpec
    from tests.conftest import MakeAgent, Metric

TOKENS = "gen_ai_client_token_usage"
CALLS = "gen_ai_client_operation_duration_seconds"
AGENTS = "gen_ai_invoke_agent_duration_seconds"
INFERENCES = "gen_ai_invoke_agent_inference_calls"
TOOL_CALLS = "gen_ai_invoke_agent_tool_calls"
TOOLS = "gen_ai_execute_tool_duration_seconds"

OF_CALLS = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "testing",
    "gen_ai_request_model": "scripted",
}

STORY = (
    STARTED,
    replace(CALL, provider="bedrock", reported=CALL.usage),
    replace(CALL, kind="failed", usage=Usage(), price=None, provider="openai"),
    replace(TOOL_CALL, seconds=0.3),
    replace(TOOL_CALL, seconds=0.2, status="success"),
    replace(TOOL_CALL, status="refused"),
    replace(STOP, invocation=INVOCATION, model_calls=2, tool_calls=2),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for them."""
    monkeypatch.setenv("OTEL_LIMITS_GENAI_METRICS", "true")


def names() -> set[str]:
    """Those that are in the default registry."""
    return {family.name for family in REGISTRY.collect() if family.name.startswith("gen_ai_")}


@pytest.mark.parametrize("spec", CONVENTIONAL, ids=lambda spec: spec.convention)
def test_the_name_in_prometheus_follows_from_that_of_the_convention(spec: MetricSpec) -> None:
    """By the rules of the standard, so that dashboards for either find them."""
    assert translated(spec.otel_name, spec.unit, spec.kind) == spec.name


def test_they_are_not_there_unless_they_are_asked_for(make_agent: MakeAgent) -> None:
    """Other instrumentations emit the first two, and both would count everything twice."""
    enable()
    make_agent(ScriptedModel([says("done")]))("go")
    assert names() == set()


@pytest.mark.usefixtures("asked")
def test_an_invocation_is_in_each(make_agent: MakeAgent, metric: Metric) -> None:
    """Two model calls of 10 and 5 tokens, a tool, and how long all of it took."""
    enable()
    make_agent(ScriptedModel([uses("search"), says("done")]))("go")

    agent = {"gen_ai_agent_name": "tester"}
    of_agent = {**agent, "gen_ai_request_model": "scripted", "error_type": ""}
    tool_ = {**agent, "gen_ai_tool_name": "search", "gen_ai_tool_type": "function"}
    provider = provider_of_the_script()
    of_calls = {**OF_CALLS, "gen_ai_provider_name": provider}
    read_, written = ({**of_calls, "gen_ai_token_type": kind} for kind in ("input", "output"))
    assert metric(f"{TOKENS}_sum", **read_) == 20
    assert metric(f"{TOKENS}_sum", **written) == 10
    assert metric(f"{TOKENS}_count", **read_) == 2
    assert metric(f"{CALLS}_count", **of_calls, error_type="") == 2
    assert metric(f"{AGENTS}_count", **of_agent) == 1
    assert metric(f"{INFERENCES}_sum", **agent) == 2
    assert metric(f"{TOOL_CALLS}_sum", **agent) == 1
    assert metric(f"{TOOLS}_count", **tool_, error_type="") == 1


def provider_of_the_script() -> str:
    """A provider name outside Strands."""
    (labels,) = {
        sample.labels["gen_ai_provider_name"]
        for family in REGISTRY.collect()
        if family.name == TOKENS
        for sample in family.samples
    }
    return labels


@pytest.mark.usefixtures("asked")
def test_unreported_usage_is_not_recorded(make_agent: MakeAgent) -> None:
    """The conventions forbid to report an estimate unless it was asked for."""
    enable()
    make_agent(ScriptedModel([says("done", usage=None)]))("go")
    (family,) = (each for each in REGISTRY.collect() if each.name == TOKENS)
    assert family.samples == []


@pytest.mark.usefixtures("asked")
def test_errors_have_a_type_and_halts_have_none(make_agent: MakeAgent, metric: Metric) -> None:
    """A halt that returns is a success; one that is raised, and a failure, are errors."""
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    enable(Limits(max_turns=2), action="raise")
    with pytest.raises(MaxTurnsReachedException):
        make_agent(ScriptedModel(endless(uses("search"))))("go")
    with pytest.raises(Exception, match="gone"):
        make_agent(ScriptedModel([fails(ConnectionError("gone"))]))("go")

    agent = {"gen_ai_agent_name": "tester", "gen_ai_request_model": "scripted"}
    kinds = ("", "MaxTurnsReachedException", "_OTHER")
    assert [metric(f"{AGENTS}_count", **agent, error_type=kind) for kind in kinds] == [1, 1, 1]


@pytest.mark.usefixtures("asked")
def test_calls_of_an_agent_within_another_are_its_own(
    make_agent: MakeAgent, metric: Metric
) -> None:
    """Every model call is in one invocation only."""
    enable()

    @tool
    def ask() -> str:
        """Ask another agent."""
        inner = make_agent(ScriptedModel([uses("search"), says("yes")]), name="inner")
        return str(inner("go"))

    make_agent(ScriptedModel([uses("ask"), says("done")]), tools=[ask], name="outer")("go")
    assert metric(f"{INFERENCES}_sum", gen_ai_agent_name="outer") == 2
    assert metric(f"{INFERENCES}_sum", gen_ai_agent_name="inner") == 2
    assert metric(f"{TOOL_CALLS}_sum", gen_ai_agent_name="outer") == 1


def test_both_ways_are_identical() -> None:
    """Scraped and over OTLP, read back through OpenTelemetry's own translation."""
    scraped, sent = CollectorRegistry(), CollectorRegistry()
    reader = PrometheusMetricReader(
        disable_target_info=True, scope_info_enabled=False, registry=sent
    )
    meter = MeterProvider([reader], resource=Resource.get_empty()).get_meter("otel_limits")
    for observer in (
        PrometheusObserver(scraped, conventions=True),
        OtlpObserver(meter, conventions=True),
    ):
        observer.info("1.2.3")
        for event in STORY:
            observer(event)
    assert dict(read(scraped)) == dict(read(sent))
    assert any(name.startswith("gen_ai_") for name, _ in dict(read(scraped)))


def points(name: str) -> list[Any]:
    """Data points of one metric that the story leaves, over OTLP."""
    reader = InMemoryMetricReader()
    observer = OtlpObserver(MeterProvider([reader]).get_meter("otel_limits"), conventions=True)
    for event in STORY:
        observer(event)
    data: Any = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    (found,) = (each for each in metrics if each.name == name)
    return list(found.data.data_points)


def test_attributes_are_those_of_the_conventions() -> None:
    """With their dots, the names that they have for providers, and none that says nothing."""
    attributes = [dict(each.attributes) for each in points("gen_ai.client.operation.duration")]
    assert attributes == [
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "aws.bedrock",
            "gen_ai.request.model": "m1",
        },
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "m1",
            "error.type": "_OTHER",
        },
    ]


@pytest.mark.parametrize(
    ("name", "first", "last", "number"),
    [
        ("gen_ai.client.token.usage", 1, 67_108_864, 14),
        ("gen_ai.client.operation.duration", 0.01, 81.92, 14),
        ("gen_ai.invoke_agent.duration", 0.1, 409.6, 13),
        ("gen_ai.invoke_agent.inference_calls", 1, 128, 8),
        ("gen_ai.invoke_agent.tool_calls", 1, 128, 8),
        ("gen_ai.execute_tool.duration", 0.01, 81.92, 14),
    ],
)
def test_buckets_are_those_of_the_conventions(
    name: str, first: float, last: float, number: int
) -> None:
    """Each is twice or four times the one before."""
    bounds = list(points(name)[0].explicit_bounds)
    assert (bounds[0], bounds[-1], len(bounds)) == (first, last, number)
    assert {round(bound / before, 9) for before, bound in pairwise(bounds)} <= {2, 4}


@pytest.mark.usefixtures("asked", "faulty")
def test_a_registry_that_has_them_loses_none_of_ours(
    make_agent: MakeAgent, metric: Metric, caplog: pytest.LogCaptureFixture
) -> None:
    """Another instrumentation was first: theirs stay, ours are counted, and it is said."""
    theirs = Histogram(TOKENS, "Of another instrumentation.")
    try:
        enable(Limits(max_turns=2))
        make_agent(ScriptedModel(endless(uses("search"))))("go")
        assert names() == {TOKENS}
        assert metric("otel_limits_turns_total", agent="tester") == 2
        assert "another instrumentation" in caplog.text
    finally:
        prometheus_client.REGISTRY.unregister(theirs)
