"""Metrics derived from events, identical over Prometheus and OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from random import Random
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from otel_limits.bindings import known
from otel_limits.core.events import (
    ActionTaken,
    Cycle,
    Enforcing,
    Event,
    Halt,
    InternalError,
    Invocation,
    LimitWarning,
    ModelCall,
    ObserverDropped,
    ObserverLag,
    PolicyRead,
    QuotaDecision,
    QuotaUse,
    QuotaWait,
    Started,
    Stop,
    TaskLost,
    ToolCall,
    Turn,
)
from otel_limits.core.labels import MAX_AGENTS
from otel_limits.core.limits import Breach, Level, Limits
from otel_limits.core.usage import Usage
from otel_limits.observers.counting import Service, service_of
from otel_limits.observers.metrics import METRICS, QUOTA_DECISIONS, MetricSpec
from otel_limits.observers.otlp_observer import OtlpObserver
from otel_limits.observers.prometheus import PrometheusObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_limits.observers.counting import CountingObserver

Samples: TypeAlias = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Way:
    """One way out of the process, with its far end."""

    observer: CountingObserver
    registry: CollectorRegistry

    def publish(self, *events: Event) -> None:
        """Pass events to the observer as it subscribed to them."""
        for event in events:
            self.observer(event)

    def samples(self) -> Samples:
        """The samples that a Prometheus would scrape."""
        return dict(read(self.registry))

    def value(self, name: str, **labels: str) -> float | None:
        """One sample, `None` where there is none."""
        return self.samples().get((name, frozenset(labels.items())))


def read(registry: CollectorRegistry) -> Iterator[tuple[Any, float]]:
    """Yield every otel-limits sample, with the bounds of buckets as numbers.

    An empty label is no label, to Prometheus.
    """
    text = generate_latest(registry).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: text for name, text in sample.labels.items() if text}
            if "le" in labels:
                labels["le"] = repr(float(labels["le"]))
            yield (sample.name, frozenset(labels.items())), sample.value


def through_prometheus(max_agents: int = MAX_AGENTS) -> Way:
    """Count in prometheus_client."""
    registry = CollectorRegistry()
    return Way(PrometheusObserver(registry, max_agents), registry)


def through_opentelemetry(max_agents: int = MAX_AGENTS) -> Way:
    """Count in the OpenTelemetry SDK, read back through its own translation to Prometheus."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(
        disable_target_info=True, scope_info_enabled=False, registry=registry
    )
    provider = MeterProvider([reader], resource=Resource.get_empty())
    return Way(OtlpObserver(provider.get_meter("otel_limits"), max_agents), registry)


@pytest.fixture(
    params=[through_prometheus, through_opentelemetry],
    ids=["prometheus", "otlp"],
)
def way(request: pytest.FixtureRequest) -> Way:
    """Each way out of the process."""
    make: Callable[[], Way] = request.param
    return make()


INVOCATION = Invocation(
    agent="research", id="i1", root_id="i1", trace_id="ab" * 16, span_id="cd" * 8, sampled=True
)
STARTED = Started(
    invocation=INVOCATION,
    limits=Limits(max_turns=4, max_token_budget=100, max_cost_usd=Decimal("0.5")),
    action="halted",
    unsampled=True,
    model="m1",
)
CALL = ModelCall(
    invocation=INVOCATION,
    number=1,
    model="m1",
    kind="measured",
    usage=Usage(input=90, output=30, cache_read=40, cache_write=20),
    estimated=False,
    span_id="ef" * 8,
    seconds=1.5,
    price=Decimal("0.25"),
)
TOOL_CALL = ToolCall(
    invocation=INVOCATION, number=1, tool="search", status="error", seconds=None, fingerprint=None
)
BREACH = Breach("max_token_budget", 100, 120, "max_token_budget", "tokens")
HALT = Halt(invocation=INVOCATION, reason="max_token_budget", breaches=(BREACH,), action="halted")
STOP = Stop(
    reason="max_token_budget",
    action="halted",
    breach=BREACH,
    breaches=(BREACH,),
    turns=1,
    usage=CALL.usage,
    agent="research",
    invocation_id="i1",
    seconds=2.0,
    synthetic=True,
    levels=(Level("max_turns", 4, 1), Level("max_token_budget", 100, 120)),
)
OBSERVED = replace(STOP, action="observed", synthetic=False)
QUOTA_USE = QuotaUse(
    quota="users",
    key="#1f2e",
    unit="tokens",
    used=500,
    reserved=90,
    limit=Decimal("800.5"),
    resets=7200.0,
)
QUOTA_DECISION = QuotaDecision(
    invocation=INVOCATION,
    quota="users",
    key="#1f2e",
    decision="degraded_local_admitted",
    wanted=90,
    unit="tokens",
)
QUOTA_WAIT = QuotaWait(invocation=INVOCATION, quota="users", key="#1f2e", seconds=None)
MAX_SERIES = 7_700
"""The most series that a flood of names may create: 50 agents, 50 models, 250 tools, and the stop
reasons of all frameworks."""

STORY = (
    Enforcing(source="code", framework="strands", in_force=True),
    PolicyRead(path="policy.yaml", valid=True),
    STARTED,
    Cycle(invocation=INVOCATION),
    CALL,
    replace(CALL, number=2, kind="zero_token", usage=Usage(), price=None),
    replace(CALL, number=3, model="m2", kind="unmeasured", usage=Usage(input=7), price=None),
    replace(CALL, number=4, model="m2", unknown_usage=("new_tokens",)),
    replace(CALL, number=5, model="m2", stated_cost=Decimal(102), listed_price=Decimal(100)),
    replace(CALL, number=6, model="m2", stated_by="openrouter", stated_refused="negative"),
    TOOL_CALL,
    replace(TOOL_CALL, number=2, status="refused", limit="max_calls_per_tool"),
    replace(TOOL_CALL, number=3, tool="fetch", status="success", limit="tree_max_tool_calls"),
    Turn(invocation=INVOCATION, number=1),
    LimitWarning(invocation=INVOCATION, threshold=0.8, level=Level("max_token_budget", 100, 90)),
    HALT,
    STOP,
    TaskLost(cause="forgotten", interrupts=2),
    InternalError(component="clock"),
    ObserverDropped(observer="ledger", events=3),
    ObserverLag(observer="ledger", seconds=0.02),
    QUOTA_USE,
    QUOTA_DECISION,
    QUOTA_WAIT,
    replace(QUOTA_WAIT, seconds=2.5),
)
"""At least one event of every kind."""


def test_names_labels_and_values_are_identical_both_ways() -> None:
    """A dashboard shows the same whether a process is scraped or sends OTLP."""
    scraped, sent = through_prometheus(), through_opentelemetry()
    for one in (scraped, sent):
        one.observer.info("1.2.3")
        one.publish(*STORY)

    assert scraped.samples() == sent.samples()


def test_service_labels_are_exported_both_ways(way: Way) -> None:
    """By today's name of the environment or the previous one, and absent if unset."""
    said = {"service.version": "7", "deployment.environment": "prod", "service.name": "x"}
    way.observer.info("1.2.3", service_of(said))
    labels = {"version": "1.2.3", "service_version": "7", "deployment_environment": "prod"}

    assert way.value("otel_limits_build_info", **labels) == 1
    assert service_of({"deployment.environment.name": "a", "deployment.environment": "b"}) == (
        Service(environment="a")
    )


def test_every_metric_of_the_table_arrives(way: Way) -> None:
    """No metric is only a name."""
    way.observer.info("1.2.3")
    way.publish(*STORY)
    arrived = {name for name, _ in way.samples()}

    for spec in METRICS:
        assert (f"{spec.name}_bucket" if spec.kind == "histogram" else spec.name) in arrived


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_prometheus_translates_the_opentelemetry_name(spec: MetricSpec) -> None:
    """The name of each instrument becomes the name of the table, by the rules of the standard."""
    assert translated(spec.otel_name, spec.unit, spec.kind) == spec.name


def translated(name: str, unit: str, kind: str) -> str:
    """Name a metric as Prometheus' own OTLP receiver and the Collector do."""
    name = name.replace(".", "_")
    words = {"s": "seconds", "By": "bytes", "1": "ratio" if kind == "gauge" else ""}
    suffix = "" if unit.startswith("{") else words.get(unit, unit)
    if suffix and not name.endswith(f"_{suffix}"):
        name += f"_{suffix}"
    return f"{name}_total" if kind == "counter" else name


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("stops_total", {"reason": "max_token_budget", "action": "halted"}, 1),
        ("turns_total", {}, 1),
        ("cycles_total", {}, 1),
        ("model_calls_total", {"model": "m1", "kind": "measured"}, 1),
        ("model_calls_total", {"model": "m1", "kind": "zero_token"}, 1),
        ("model_calls_total", {"model": "m2", "kind": "unmeasured"}, 1),
        ("tool_calls_total", {"tool": "search", "status": "error"}, 1),
        ("tool_calls_total", {"tool": "search", "status": "success"}, 0),
        ("tool_calls_total", {"tool": "search", "status": "refused"}, 1),
        (
            "tool_refusals_total",
            {"tool": "search", "limit": "max_calls_per_tool", "action": "refused"},
            1,
        ),
        (
            "tool_refusals_total",
            {"tool": "fetch", "limit": "tree_max_tool_calls", "action": "observed"},
            1,
        ),
        ("synthetic_messages_total", {"reason": "max_token_budget"}, 1),
        ("tokens_total", {"model": "m1", "type": "input"}, 90),
        ("tokens_total", {"model": "m1", "type": "output"}, 30),
        ("cached_tokens_total", {"model": "m1", "kind": "read"}, 40),
        ("cached_tokens_total", {"model": "m1", "kind": "write"}, 20),
        ("cost_usd_total", {"model": "m1"}, 0.25),
        ("invocations_in_progress", {}, 0),
        ("invocation_turns_sum", {}, 1),
        ("invocation_tokens_sum", {}, 120),
        ("invocation_duration_seconds_sum", {}, 2),
        ("budget_used_ratio_sum", {"limit": "max_turns"}, 0.25),
        ("budget_used_ratio_sum", {"limit": "max_token_budget"}, 1.2),
        ("limit", {"limit": "max_turns"}, 4),
        ("limit", {"limit": "max_cost_usd"}, 0.5),
        ("overshoot_tokens_sum", {"limit": "max_token_budget"}, 20),
        ("warnings_total", {"limit": "max_token_budget", "threshold": "0.8"}, 1),
        ("unsampled_invocations_total", {}, 1),
    ],
)
def test_a_fact_becomes_this_value(
    way: Way, name: str, labels: dict[str, str], expected: float
) -> None:
    """Each number of an invocation is found under its name and labels."""
    way.publish(*STORY)

    assert way.value(f"otel_limits_{name}", agent="research", **labels) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("used", 500), ("reserved", 90), ("limit", 800.5), ("resets_timestamp_seconds", 7200)],
)
def test_a_key_of_a_quota_stands_as_the_store_last_said(
    way: Way, name: str, expected: float
) -> None:
    """A new value replaces the previous one; it is not added."""
    way.publish(replace(QUOTA_USE, used=1, reserved=1, limit=1, resets=1.0), QUOTA_USE)
    assert way.value(f"otel_limits_quota_{name}", quota="users", key="#1f2e") == expected


def test_every_decision_of_a_quota_begins_at_0(way: Way) -> None:
    """Or the first degraded one, which an alert waits for, is missed."""
    way.publish(replace(QUOTA_DECISION, decision="admitted"), QUOTA_DECISION, QUOTA_DECISION)
    counted = {
        decision: way.value("otel_limits_quota_decisions_total", quota="users", decision=decision)
        for decision in QUOTA_DECISIONS.values
    }
    assert counted == dict.fromkeys(QUOTA_DECISIONS.values, 0) | {
        "admitted": 1,
        "degraded_local_admitted": 2,
    }


def test_a_call_that_waits_for_a_quota_is_shown_until_it_does_so_no_more(way: Way) -> None:
    """And its duration; a wait that started before counting began is not subtracted."""
    other = replace(QUOTA_WAIT, invocation=replace(INVOCATION, id="another"))
    way.publish(QUOTA_WAIT, other, replace(other, quota="early", seconds=4.0))
    assert way.value("otel_limits_quota_waiting", quota="users") == 2
    assert way.value("otel_limits_quota_waiting", quota="early") == 0
    way.publish(replace(other, seconds=2.5))
    assert way.value("otel_limits_quota_waiting", quota="users") == 1
    assert way.value("otel_limits_quota_wait_seconds_count", quota="users") == 1
    assert way.value("otel_limits_quota_wait_seconds_sum", quota="users") == 2.5


def test_tokens_without_a_price_are_counted_by_model(way: Way) -> None:
    """Usage missing from the cost is counted, and is never 0 USD."""
    way.publish(*STORY)

    assert way.value("otel_limits_unpriced_tokens_total", agent="research", model="m2") == 7
    assert way.value("otel_limits_unpriced_tokens_total", agent="research", model="m1") == 0


@pytest.mark.parametrize("price", [Decimal("NaN"), Decimal(-1), Decimal("Infinity")])
def test_an_impossible_price_counts_as_none(way: Way, price: Decimal) -> None:
    """NaN would poison the counter forever."""
    way.publish(STARTED, replace(CALL, price=price))

    assert way.value("otel_limits_cost_usd_total", agent="research", model="m1") == 0
    assert way.value("otel_limits_unpriced_tokens_total", agent="research", model="m1") == 120


def test_observer_drops_and_delays_are_counted(way: Way) -> None:
    """A ledger that cannot keep up is seen."""
    way.publish(*STORY)

    assert way.value("otel_limits_observer_dropped_events_total", observer="ledger") == 3
    assert way.value("otel_limits_observer_lag_seconds_sum", observer="ledger") == 0.02
    assert way.value("otel_limits_internal_errors_total", component="clock") == 1


def stops(way: Way, name: str = "otel_limits_stops_total") -> dict[tuple[str, str], float]:
    """The value of a counter, by reason and action."""
    return {
        (dict(labels)["reason"], dict(labels).get("action", "")): value
        for (sample, labels), value in way.samples().items()
        if sample == name
    }


def halts(way: Way) -> set[tuple[str, str]]:
    """Halts that there are series of, which are all at 0."""
    found = stops(way)
    assert set(found.values()) == {0}
    return {key for key in found if key[1] != "none"}


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ({}, {"max_turns", "max_token_budget", "max_cost_usd", "killed"}),
        ({"limits": Limits()}, {"killed"}),
        ({"limits": Limits(max_identical_tool_calls=0, max_turns=2)}, {"max_turns", "killed"}),
        ({"limits": Limits(max_calls_per_tool={"a": 1})}, {"max_tool_calls", "killed"}),
        ({"limits": Limits(max_repeated_tool_cycles=3)}, {"loop_detected", "killed"}),
        ({"limits": Limits(), "tree": {"tree_max_model_calls": 9}}, {"max_model_calls", "killed"}),
        (
            {"limits": Limits(), "has_quotas": True},
            {"quota_exceeded", "quota_unavailable", "killed"},
        ),
    ],
    ids=["limits", "none", "switched off", "one tool", "loops", "tree", "quotas"],
)
def test_only_possible_halts_are_there_at_0(
    way: Way, started: dict[str, Any], expected: set[str]
) -> None:
    """A counter that is born at 1 has no increase; one that always stays 0 is clutter."""
    way.publish(replace(STARTED, **started))

    assert halts(way) == {
        (reason, "killed" if reason == "killed" else "halted") for reason in expected
    }
    assert {reason for reason, _ in stops(way, "otel_limits_synthetic_messages_total")} == expected


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("observed", {("max_turns", "observed"), ("killed", "killed")}),
        ("raised", {("max_turns", "raised"), ("killed", "killed")}),
        (
            "wrapped_up",
            {("max_turns", "wrapped_up"), ("max_turns", "halted"), ("killed", "killed")},
        ),
    ],
)
def test_halts_are_there_by_what_would_be_done(
    way: Way, action: ActionTaken, expected: set[tuple[str, str]]
) -> None:
    """Kills are counted as killed under every action; a final answer is not always possible."""
    way.publish(replace(STARTED, limits=Limits(max_turns=2), action=action))

    assert halts(way) == expected


def test_how_frameworks_end_is_there_at_0(way: Way) -> None:
    """Shares are of all invocations, however they ended."""
    way.publish(STARTED)

    assert {("end_turn", "none"), ("error", "none"), ("aborted", "none")} <= set(stops(way))


def test_a_new_policy_makes_new_halts_possible(way: Way) -> None:
    """The next invocation begins with zeros for them."""
    way.publish(replace(STARTED, limits=Limits(max_turns=2)))
    again = replace(INVOCATION, id="i2")
    way.publish(replace(STARTED, invocation=again, limits=Limits(max_tool_calls=5)))

    assert ("max_tool_calls", "halted") in halts(way)


def test_an_invocation_is_in_progress_until_it_ends(way: Way) -> None:
    """The gauge goes up and down."""
    way.publish(STARTED, replace(STARTED, invocation=replace(INVOCATION, id="i2")))
    assert way.value("otel_limits_invocations_in_progress", agent="research") == 2

    way.publish(STOP)
    assert way.value("otel_limits_invocations_in_progress", agent="research") == 1


def test_a_stop_whose_start_was_not_seen_takes_nothing_away(way: Way) -> None:
    """An observer that came late never shows less than nothing."""
    way.publish(STOP)

    assert way.value("otel_limits_invocations_in_progress", agent="research") is None


def test_a_limit_that_is_gone_is_0(way: Way) -> None:
    """A policy that was changed is not shown as it was before."""
    way.publish(STARTED, replace(STARTED, limits=Limits(max_turns=9)))

    assert way.value("otel_limits_limit", agent="research", limit="max_turns") == 9
    assert way.value("otel_limits_limit", agent="research", limit="max_token_budget") == 0


def test_an_observed_breach_is_no_overshoot_and_no_synthetic_message(way: Way) -> None:
    """Only enforced limits show how well enforcement works."""
    way.publish(STARTED, replace(HALT, action="observed"), OBSERVED)

    labels = {"agent": "research", "limit": "max_token_budget"}
    assert way.value("otel_limits_overshoot_tokens_sum", **labels) is None
    reason = {"agent": "research", "reason": "max_token_budget"}
    assert way.value("otel_limits_synthetic_messages_total", **reason) == 0
    assert way.value("otel_limits_stops_total", **reason, action="observed") == 1


def test_reasons_that_providers_make_up_cannot_flood(way: Way) -> None:
    """The first hundred are separate, then they are one; ours and the framework's always are."""
    surprise = replace(STOP, action="none", breach=None, breaches=())
    way.publish(*(replace(surprise, reason=f"surprise {number}") for number in range(103)))
    way.publish(replace(surprise, reason="max_turns"), replace(surprise, reason="limit_turns"))

    stops = {
        dict(labels)["reason"]: value
        for (name, labels), value in way.samples().items()
        if name == "otel_limits_stops_total"
    }
    assert {reason: stops.get(reason) for reason in ("surprise 99", "surprise 100", "_other")} == {
        "surprise 99": 1,
        "surprise 100": None,
        "_other": 3,
    }
    assert stops["max_turns"] == stops["limit_turns"] == 1


def test_framework_stop_reasons_are_preserved(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second framework's reasons are labels as well, at 0 from the beginning."""
    monkeypatch.setattr(known, "FRAMEWORKS", (SimpleNamespace(stop_reasons=("answered",)),))
    way.publish(STARTED)
    labels = {"agent": "research", "reason": "answered", "action": "none"}
    assert way.value("otel_limits_stops_total", **labels) == 0

    way.publish(replace(STOP, reason="answered", action="none", breach=None, breaches=()))
    assert way.value("otel_limits_stops_total", **labels) == 1


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "\x00", 'quo"te\\', "x" * 10_000, "ünïcode"])
def test_any_name_can_be_scraped(way: Way, name: str) -> None:
    """One lone surrogate would make every scrape fail."""
    way.publish(replace(STARTED, invocation=replace(INVOCATION, agent=name)))

    agents = {dict(labels).get("agent") for _, labels in way.samples()}
    assert len(max(agents - {None}, key=len)) <= 128  # type: ignore[arg-type]


def exposed(way: Way) -> str:
    """The output that a Prometheus with OpenMetrics support scrapes."""
    text: bytes = openmetrics(way.registry)  # type: ignore[no-untyped-call]
    return text.decode()


def test_exemplars_name_the_trace_of_the_stop_and_the_span_of_the_call() -> None:
    """A point in a graph leads to the trace behind it."""
    way = through_prometheus()
    way.publish(*STORY)
    lines = exposed(way).splitlines()

    trace = "ab" * 16
    stop = next(line for line in lines if 'reason="max_token_budget"' in line and "stops" in line)
    call = next(line for line in lines if 'kind="measured",model="m1"' in line)
    assert f'# {{span_id="{"cd" * 8}",trace_id="{trace}"}} 1.0' in stop
    assert f'# {{span_id="{"ef" * 8}",trace_id="{trace}"}} 1.0' in call


def test_a_trace_that_is_not_exported_is_no_exemplar() -> None:
    """A link that leads nowhere is not drawn."""
    way = through_prometheus()
    unsampled = replace(INVOCATION, sampled=False)
    way.publish(replace(STARTED, invocation=unsampled), replace(CALL, invocation=unsampled), STOP)

    assert "trace_id" not in exposed(way)


def test_a_flood_of_names_is_folded() -> None:
    """Made-up names of agents, models and tools leave bounded series and memory."""
    way = through_prometheus()
    finish_invocations(way, 500)
    flood(way, 5_000)
    series, peak = len(way.samples()), getrusage(RUSAGE_SELF).ru_maxrss
    flood(way, 15_000)

    assert len(way.samples()) == series <= MAX_SERIES
    assert getrusage(RUSAGE_SELF).ru_maxrss - peak < 1024  # KiB
    assert way.value("otel_limits_invocation_turns_count", agent="_other") == 500 - MAX_AGENTS


def finish_invocations(way: Way, agents: int) -> None:
    """Publish one whole invocation of each of many agents."""
    for number in range(agents):
        name = f"agent-{number}"
        invocation = Invocation(agent=name, id=name, root_id=name)
        way.publish(
            *(replace(event, invocation=invocation) for event in (STARTED, CALL, TOOL_CALL))
        )
        way.publish(replace(STOP, agent=name, invocation_id=name))


def flood(way: Way, names: int) -> None:
    """Publish events with new names."""
    random = Random(names)  # noqa: S311  no secret
    observer = way.observer
    for _ in range(names // 3):
        agent, model, tool = (f"{random.getrandbits(64):x}" for _ in range(3))
        observer(Cycle(invocation=Invocation(agent=agent, id=agent, root_id=agent)))
        observer(replace(CALL, model=model, price=None))
        observer(replace(TOOL_CALL, tool=tool))
