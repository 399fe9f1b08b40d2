"""An application's `/metrics`: its content, its address, and since when a counter counts."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families
from strands import tool

import otel_limits
from otel_limits import Limits, enable
from otel_limits.core.labels import clean
from otel_limits.core.policy import Action, Policy
from otel_limits.core.usage import measured
from otel_limits.observers.metrics import METRICS, MODEL_CALLS
from otel_limits.observers.prometheus import PrometheusObserver
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, fails, says, uses
from tests.processes import free_port

if TYPE_CHECKING:
    from strands import Agent

    from otel_limits.observers.metrics import MetricSpec, Series
    from tests.conftest import MakeAgent, Metric


LABELS = {
    "otel_limits_stops_total": {"agent", "reason", "action"},
    "otel_limits_turns_total": {"agent"},
    "otel_limits_cycles_total": {"agent"},
    "otel_limits_model_calls_total": {"agent", "model", "kind"},
    "otel_limits_synthetic_messages_total": {"agent", "reason"},
    "otel_limits_tokens_total": {"agent", "model", "type"},
    "otel_limits_unsampled_invocations_total": {"agent"},
    "otel_limits_internal_errors_total": {"component"},
}
"""The names and labels that dashboards and alerts are written against."""


def exposed() -> dict[str, list[dict[str, str]]]:
    """Labels of every otel-limits sample in the default registry, as a scrape parses them."""
    samples: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(generate_latest().decode()):
        for sample in family.samples:
            if sample.name.startswith("otel_limits_"):
                samples.setdefault(sample.name, []).append(dict(sample.labels))
    return samples


def halted(make_agent: MakeAgent, **arguments: str) -> Agent:
    """An agent that was halted at two turns."""
    agent = make_agent(ScriptedModel(endless(uses("search")), model_id="m-1"), **arguments)
    agent("go")
    return agent


def test_names_and_labels(make_agent: MakeAgent) -> None:
    """Each metric has exactly its labels, and none of them is a run or a trace."""
    enable(Limits(max_turns=2))
    halted(make_agent)
    LIVE.observers.publish_internal_error("processor")
    samples = exposed()
    assert {name: set(samples[name][0]) for name in LABELS} == LABELS
    assert all(set(labels) == LABELS[name] for name in LABELS for labels in samples[name])


def test_build_info_is_a_constant(make_agent: MakeAgent, metric: Metric) -> None:
    """The version is a label of a constant 1."""
    enable()
    make_agent(ScriptedModel([says("done")]))("go")
    (labels,) = exposed()["otel_limits_build_info"]
    assert metric("otel_limits_build_info", **labels) == 1
    assert labels["version"]


@pytest.mark.usefixtures("source")
def test_a_halted_invocation(make_agent: MakeAgent, metric: Metric) -> None:
    """Two turns of 15 tokens and a halt are exactly that in every metric."""
    enable(Limits(max_turns=2))
    halted(make_agent)
    agent, model = {"agent": "tester"}, {"agent": "tester", "model": "m-1"}
    reason = {"agent": "tester", "reason": "max_turns"}
    assert metric("otel_limits_stops_total", **reason, action="halted") == 1
    assert metric("otel_limits_synthetic_messages_total", **reason) == 1
    assert metric("otel_limits_turns_total", **agent) == 2
    assert metric("otel_limits_cycles_total", **agent) == 2
    assert metric("otel_limits_tokens_total", **model, type="input") == 20
    assert metric("otel_limits_tokens_total", **model, type="output") == 10
    kinds = ("measured", "zero_token", "estimated", "unmeasured", "failed")
    counted = [metric("otel_limits_model_calls_total", **model, kind=kind) for kind in kinds]
    assert counted == [2, 0, 0, 0, 0]


@pytest.mark.usefixtures("source")
def test_a_scrape_sees_the_turn_under_way(make_agent: MakeAgent, metric: Metric) -> None:
    """Queued events are counted before any value is read."""
    enable()
    seen = []

    @tool
    def look() -> str:
        """Ask for the numbers in the middle of a turn."""
        seen.append(
            (
                metric("otel_limits_turns_total", agent="tester"),
                metric("otel_limits_cycles_total", agent="tester"),
                metric("otel_limits_tokens_total", agent="tester", model="m", type="input"),
            )
        )
        return "seen"

    model = ScriptedModel([uses("look"), uses("look"), says("done")], model_id="m")
    make_agent(model, tools=[look])("go")
    assert seen == [(1, 1, 10), (2, 2, 20)]


def test_an_evicted_invocation_that_goes_on_is_counted(metric: Metric) -> None:
    """It is not active after a scrape or at its end."""
    enable()
    run = LIVE.start("a", Policy())
    run.count_turn()
    run.finish("evicted")
    run.count_turn()
    assert metric("otel_limits_turns_total", agent="a") == 2
    run.count_turn()
    run.finish("end_turn")
    assert metric("otel_limits_turns_total", agent="a") == 3


def test_events_before_counting_are_not_counted_later(metric: Metric) -> None:
    """A later counter must not include events before it."""
    enable()
    run = LIVE.start("a", Policy())
    run.count_turn()
    former = LIVE.observers.all
    LIVE.observers.set_observers(())
    run.count_turn()
    LIVE.observers.set_observers(former)
    run.count_turn()
    run.finish("end_turn")
    assert metric("otel_limits_turns_total", agent="a") == 2


@pytest.mark.usefixtures("faulty")
def test_uncountable_event_counts_as_dropped(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later events still count, and the number of lost ones is visible."""
    failures = iter([RuntimeError("thrown while calls are counted")])
    make = PrometheusObserver.make_series

    def fail_once(observer: PrometheusObserver, spec: MetricSpec, labels: Any) -> Series:
        series = make(observer, spec, labels)

        def update(*what: Any) -> None:
            for failure in failures:
                raise failure
            series(*what)

        return update if spec is MODEL_CALLS else series

    monkeypatch.setattr(PrometheusObserver, "make_series", fail_once)
    enable(Limits(max_turns=3))
    agent = make_agent(ScriptedModel(endless(uses("search"))))
    agent("go")
    calls = {"agent": "tester", "model": "scripted", "kind": "measured"}
    assert metric("otel_limits_model_calls_total", **calls) == 2
    assert metric("otel_limits_cycles_total", agent="tester") == 3
    assert metric("otel_limits_observer_dropped_events_total", observer="prometheus") == 1
    assert metric("otel_limits_internal_errors_total", component="prometheus") == 1
    agent("go")
    assert metric("otel_limits_model_calls_total", **calls) == 5


def test_each_kind_of_model_call(make_agent: MakeAgent, metric: Metric) -> None:
    """Reported zeros, missing usage and failures are distinguished."""
    enable()
    zero = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
    script = [
        says("", usage=zero),
        uses("search"),
        uses("search", usage=None),
        fails(ConnectionError("gone")),
    ]
    agent = make_agent(ScriptedModel(script))
    agent("go")
    with pytest.raises(Exception, match="gone"):
        agent("go")
    labels = {"agent": "tester", "model": "scripted"}
    kinds = ("measured", "zero_token", "estimated", "unmeasured", "failed")
    counted = [metric("otel_limits_model_calls_total", **labels, kind=kind) for kind in kinds]
    assert counted == [1, 1, 1, 0, 1]
    stops = {"agent": "tester", "reason": "error", "action": "none"}
    assert metric("otel_limits_stops_total", **stops) == 1


def test_a_natural_end_is_counted(make_agent: MakeAgent, metric: Metric) -> None:
    """Every finished invocation is a stop, so that the halt rate can be computed."""
    enable()
    make_agent(ScriptedModel([says("done")]))("go")
    stops = {"agent": "tester", "reason": "end_turn", "action": "none"}
    assert metric("otel_limits_stops_total", **stops) == 1


@pytest.mark.parametrize(
    ("action", "taken"), [("observe", "observed"), ("halt", "halted"), ("raise", "raised")]
)
def test_every_possible_reason_is_there_before_it_happens(
    action: Action, taken: str, make_agent: MakeAgent
) -> None:
    """An agent that was seen once has a zero for each, or the first alert is missed."""
    limits = Limits(max_turns=9, max_iterations=9, max_token_budget=99)
    enable(limits, action=action, tree=Limits(max_model_calls=50))
    make_agent(ScriptedModel([says("done")]))("go")
    stops = exposed()["otel_limits_stops_total"]
    ours = {labels["reason"] for labels in stops if labels["action"] == taken}
    possible = {"max_turns", "max_iterations", "max_token_budget", "max_model_calls"}
    assert ours - {"killed"} == possible
    others = {labels["reason"] for labels in stops if labels["action"] == "none"}
    assert {"end_turn", "cancelled", "interrupt", "max_tokens", "error", "aborted"} <= others


def test_invented_stop_reason_keeps_its_label(make_agent: MakeAgent, metric: Metric) -> None:
    """A provider's invented stop reason is needed for debugging."""
    enable()
    make_agent(ScriptedModel([says("done", stop_reason="made up")]))("go")
    stops = {"agent": "tester", "reason": "made up", "action": "none"}
    assert metric("otel_limits_stops_total", **stops) == 1


def agents_exposed() -> set[str]:
    """Agents that a scrape knows."""
    return {labels["agent"] for labels in exposed()["otel_limits_turns_total"]}


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("a\x00\x1b[31m\nb", "a\ufffd\ufffd[31m\ufffdb"),
        ("x" * 200, "x" * 128),
        ('quoted "\\" name', 'quoted "\\" name'),
        ("日本語 é", "日本語 é"),
    ],
    ids=["surrogate", "control", "long", "quotes", "unicode"],
)
def test_label_values_are_cleaned(name: str, label: str, make_agent: MakeAgent) -> None:
    """A name with a surrogate, a control character or no end cannot break a scrape."""
    enable()
    make_agent(ScriptedModel([says("done")], model_id=name), name=name)("go")
    assert agents_exposed() == {label}
    models = {labels["model"] for labels in exposed()["otel_limits_tokens_total"]}
    assert models == {label}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    names=st.lists(st.text(st.characters(), max_size=200), min_size=1, max_size=5),
    model=st.text(st.characters(), max_size=200),
)
def test_any_name_can_be_scraped(names: list[str], model: str) -> None:
    """With any names of agents and models, the page is rendered and can be parsed."""
    enable()
    for name in names:
        run = LIVE.start(name, Policy())
        run.calls.settle(
            run.calls.open(InFlightCall(model, 1)), measured(otel_limits.Usage(input=1))
        )
        run.finish("end_turn")
    samples = exposed()
    counted = samples["otel_limits_tokens_total"]
    # Of each agent input and output; names that are equal once they are cleaned are one agent.
    assert len(counted) == 2 * len(set(map(clean, names)))
    for labels in counted:
        assert all(len(value) <= 128 and value.isprintable() for value in labels.values())
    otel_limits.disable()


def test_a_flood_of_names_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand agents and models cost a bounded number of series, and nothing is lost."""
    enable()
    # The price list is rebuilt for each unknown model.
    monkeypatch.setattr(LIVE, "prices", None)
    for number in range(1000):
        run = LIVE.start(f"agent-{number}", Policy())
        call = run.calls.open(InFlightCall(f"model-{number}", 1))
        run.calls.settle(call, measured(otel_limits.Usage(input=1)))
        run.finish("end_turn")
    (tokens,) = (each for each in REGISTRY.collect() if each.name == "otel_limits_tokens")
    counted = [sample for sample in tokens.samples if sample.name.endswith("_total")]
    assert sum(sample.value for sample in counted) == 1000
    assert len(counted) <= 1000
    assert len(agents_exposed()) <= 101
    assert "_other" in agents_exposed()


def test_unused_metrics_leave_no_files() -> None:
    """`disable()` before the first invocation leaves the registry and the observers empty."""
    enable()
    otel_limits.disable()
    LIVE.observers.publish_internal_error("processor")
    assert LIVE.observers.all == ()
    assert b"otel_limits" not in generate_latest(REGISTRY)


def test_the_default_registry_has_them_and_loses_them(make_agent: MakeAgent) -> None:
    """An application that serves `/metrics` already has ours, until they are switched off."""
    enable(Limits(max_turns=2))
    halted(make_agent)
    assert b'otel_limits_turns_total{agent="tester"} 2.0' in generate_latest(REGISTRY)
    otel_limits.disable()
    assert b"otel_limits" not in generate_latest(REGISTRY)


@pytest.fixture
def port() -> int:
    """A TCP port that is free."""
    return free_port()


def scrape(port: int, host: str = "127.0.0.1") -> str:
    """Read the page that is served."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as page:
        text: str = page.read().decode()
        return text


# --- since when a counter counts ------------------------------------------------------------------

COUNTED = {spec.name for spec in METRICS if spec.kind in ("counter", "histogram")}


def samples() -> dict[str, list[Any]]:
    """Every otel-limits sample in the default registry, in OpenMetrics, by name."""
    found: dict[str, list[Any]] = {}
    page: str = exposition.generate_latest(REGISTRY).decode()  # type: ignore[no-untyped-call]
    for family in parser.text_string_to_metric_families(page):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            if sample.name.startswith("otel_limits_"):
                found.setdefault(sample.name, []).append(sample)
    return found


def test_nothing_is_said_unless_it_is_asked_for(make_agent: MakeAgent) -> None:
    """To any other Prometheus these are separate series, as many as there are counters."""
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")

    assert [name for name in samples() if name.endswith("_created")] == []


def test_every_counter_has_a_created_series(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each series of a counter or a histogram, from before its first event on."""
    monkeypatch.setenv("OTEL_LIMITS_METRICS_CREATED", "true")
    begin = time.time()
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    found = samples()

    told = {name for name in found if name.endswith("_created")}
    assert told <= {f"{name.removesuffix('_total')}_created" for name in COUNTED}
    for name in told:
        counter = name.removesuffix("_created")
        counted = found.get(f"{counter}_total") or found[f"{counter}_count"]
        labels = [sample.labels for sample in counted]
        assert sorted(map(str, labels)) == sorted(str(each.labels) for each in found[name])
        assert all(begin <= each.value <= time.time() for each in found[name])
    (halt,) = (
        each for each in found["otel_limits_stops_created"] if each.labels["reason"] == "max_turns"
    )
    assert halt.labels["action"] == "halted"


def test_restarted_process_has_a_new_created_time(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 1, 1 of three processes are three events if their start times are known."""
    monkeypatch.setenv("OTEL_LIMITS_METRICS_CREATED", "true")
    times = []
    for _ in range(2):
        enable(Limits(max_turns=2))
        make_agent(ScriptedModel(endless(uses("search"))))("go")
        times += [each.value for each in samples()["otel_limits_turns_created"]]
        import otel_limits

        otel_limits.disable()
    assert times[0] < times[1]
