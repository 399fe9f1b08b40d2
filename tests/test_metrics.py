"""Metrics: names, labels, zeros from the start, clean label values, and the endpoint."""

from __future__ import annotations

import socket
import urllib.request
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from otel_limits import Limits, enable
from otel_limits.facts import Fault, Invocation, ModelCall, Started, Stop
from otel_limits.limits import NO_LIMITS, STOP_REASONS, Usage
from otel_limits.observers.prometheus import FRAMEWORK_REASONS, PrometheusObserver
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from tests.conftest import MakeAgent, Metric

LABELS = {
    "otel_limits_stops_total": {"agent", "reason", "action"},
    "otel_limits_turns_total": {"agent"},
    "otel_limits_cycles_total": {"agent"},
    "otel_limits_model_calls_total": {"agent", "model", "kind"},
    "otel_limits_synthetic_messages_total": {"agent", "reason"},
    "otel_limits_tokens_total": {"agent", "model", "type"},
    "otel_limits_blind_invocations_total": {"agent"},
    "otel_limits_internal_errors_total": {"component"},
    "otel_limits_build_info": {"version"},
}


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of this test alone."""
    return CollectorRegistry()


@pytest.fixture
def observer(registry: CollectorRegistry) -> PrometheusObserver:
    """Metrics in the registry of this test."""
    return PrometheusObserver(registry)


def invocation(agent: str) -> Invocation:
    """Make an invocation."""
    return Invocation(agent=agent, id="1", root_id="1")


def started(agent: str, *, blind: bool = False) -> Started:
    """Make the fact that an agent began."""
    return Started(invocation=invocation(agent), limits=NO_LIMITS, action="halted", blind=blind)


def called(agent: str, model: str) -> ModelCall:
    """Make the fact of a measured call of 10 and 5 tokens."""
    return ModelCall(
        invocation=invocation(agent),
        number=1,
        model=model,
        kind="measured",
        usage=Usage(input=10, output=5),
        estimated=False,
        span_id=None,
        seconds=None,
    )


def samples(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
    """Scrape a registry as Prometheus does, and parse it back."""
    text = generate_latest(registry).decode()
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


@pytest.mark.parametrize("name", LABELS)
def test_names_and_labels_are_those_of_the_documentation(make_agent: MakeAgent, name: str) -> None:
    """Each metric is in the default registry, with exactly its labels."""
    enable(Limits(max_turns=1))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    if name == "otel_limits_internal_errors_total":
        from otel_limits.runs import LIVE

        LIVE.tell(Fault(component="test"))
    found = [labels for sample, labels, _ in samples(REGISTRY) if sample == name]
    assert found
    assert all(set(labels) == LABELS[name] for labels in found)


@pytest.mark.parametrize("reason", [*STOP_REASONS, *FRAMEWORK_REASONS])
def test_every_reason_is_there_at_zero(
    registry: CollectorRegistry, observer: PrometheusObserver, reason: str
) -> None:
    """Before an agent has stopped for the first time, or its first alert would be missed."""
    observer(started("new"))
    action = "halted" if reason in STOP_REASONS else "none"
    labels = {"agent": "new", "reason": reason, "action": action}
    assert registry.get_sample_value("otel_limits_stops_total", labels) == 0


def test_a_natural_end_is_a_stop(make_agent: MakeAgent, source: str, metric: Metric) -> None:
    """Every finished invocation is counted, once."""
    enable()
    make_agent(ScriptedModel([says("done")]))("go")
    labels = {"agent": "tester", "reason": "end_turn", "action": "none"}
    assert metric("otel_limits_stops_total", **labels) == 1


@pytest.mark.parametrize(
    ("usage", "kind"),
    [
        ({"inputTokens": 1, "outputTokens": 1, "totalTokens": 2}, "measured"),
        ({"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}, "zero_token"),
        (None, "unmeasured"),
    ],
)
def test_zero_and_nothing_are_different(
    make_agent: MakeAgent, source: str, metric: Metric, usage: dict[str, int] | None, kind: str
) -> None:
    """A provider that reports zero is told from one that reports nothing."""
    enable()
    make_agent(ScriptedModel([says("done", usage=usage)]))("go")
    labels = {"agent": "tester", "model": "scripted"}
    counted = {
        each: metric("otel_limits_model_calls_total", **labels, kind=each)
        for each in ("measured", "zero_token", "unmeasured", "failed")
    }
    assert counted == {**dict.fromkeys(counted, 0), kind: 1}


def test_a_halt_is_no_model_call(make_agent: MakeAgent, source: str, metric: Metric) -> None:
    """Only what reached the model is counted as a call."""
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    labels = {"agent": "tester", "model": "scripted"}
    assert metric("otel_limits_model_calls_total", **labels, kind="measured") == 2
    assert metric("otel_limits_tokens_total", **labels, type="input") == 20
    assert metric("otel_limits_tokens_total", **labels, type="output") == 10


def test_a_reason_that_nobody_defined_is_folded(
    registry: CollectorRegistry, observer: PrometheusObserver
) -> None:
    """A stop reason is no place for arbitrary text."""
    observer(Stop(reason="whatever a plugin says", action="none", breach=None, agent="a"))
    labels = {"agent": "a", "reason": "_other", "action": "none"}
    assert registry.get_sample_value("otel_limits_stops_total", labels) == 1


@given(agent=st.text(st.characters(), max_size=200), model=st.text(st.characters(), max_size=200))
def test_any_name_can_be_scraped(agent: str, model: str) -> None:
    """Surrogates, control characters and long names never break a scrape, nor lose a count."""
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    observer(started(agent))
    observer(called(agent, model))
    tokens = [value for name, _, value in samples(registry) if name == "otel_limits_tokens_total"]
    assert sum(tokens) == 15
    assert all(len(text) <= 128 for _, labels, _ in samples(registry) for text in labels.values())


def test_a_flood_of_names_is_folded(
    registry: CollectorRegistry, observer: PrometheusObserver
) -> None:
    """Names that a user or a model made up don't become series without end; no count is lost."""
    for number in range(2_000):
        observer(started(f"agent {number}"))
        observer(called(f"agent {number}", f"model {number}"))
    found = samples(registry)
    calls = [each for each in found if each[0] == "otel_limits_model_calls_total"]
    assert sum(value for *_, value in calls) == 2_000
    assert any(labels["agent"] == "_other" for _, labels, _ in calls)
    assert len(found) < 10_000


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_the_endpoint_is_on_loopback(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """Unless told otherwise it is reached from this machine alone, and holds the counts."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(free_port))
    enable(Limits(max_turns=1))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'otel_limits_stops_total{action="halted",agent="tester",reason="max_turns"} 1.0' in text
    with socket.socket() as other:  # all other addresses of the port are still free
        other.bind(("127.0.0.2", free_port))


def test_a_taken_port_is_not_fatal(
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    metric: Metric,
    faulty: None,
) -> None:
    """It is logged with what to do, counted, and the cap holds."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(taken.getsockname()[1]))
        enable(Limits(max_turns=1))
    model = ScriptedModel(endless(uses("search")))
    assert make_agent(model)("go").stop_reason == "max_turns"
    assert "Set OTEL_LIMITS_PROMETHEUS_PORT to a free port" in caplog.text
    assert metric("otel_limits_internal_errors_total", component="prometheus") == 1
