"""How many names the labels of metrics tell apart, and which."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from otel_limits.core.events import ObserverLag
from otel_limits.core.labels import Names
from otel_limits.core.limits import Limits
from otel_limits.observers.prometheus import PrometheusObserver
from tests.unit.observers.test_counting import (
    CALL,
    QUOTA_USE,
    STARTED,
    STOP,
    Way,
    finish_invocations,
    through_opentelemetry,
    through_prometheus,
)

FAR = 4e9
"""A time at which no window of these tests has ended."""


def agents_of(way: Way) -> set[str]:
    """Agents that have finished."""
    counted = "otel_limits_invocation_turns_count"
    return {dict(labels)["agent"] for name, labels in way.samples() if name == counted}


def keys_of(way: Way, quota: str = "users") -> set[str]:
    """Keys of a quota that a panel would show: those whose window has not ended."""
    return {
        dict(labels)["key"]
        for (name, labels), value in way.samples().items()
        if name == "otel_limits_quota_resets_timestamp_seconds"
        and dict(labels)["quota"] == quota
        and value
    }


def folded(way: Way, label: str) -> float:
    """How often a name of a label was counted as another one."""
    return way.value("otel_limits_label_overflows_total", label=label) or 0


@pytest.mark.parametrize("make", [through_prometheus, through_opentelemetry])
def test_fifty_agents_keep_their_labels(make: object) -> None:
    """That is what ships; the 51st is the first that is not."""
    way = make()  # type: ignore[operator]
    finish_invocations(way, 50)
    assert folded(way, "agent") == 0
    finish_invocations(way, 51)

    assert agents_of(way) == {f"agent-{number}" for number in range(50)} | {"_other"}
    assert folded(way, "agent") == 4  # as often as it is counted under it


def test_agents_of_the_policy_are_kept_before_others() -> None:
    """Late agents named in the policy file keep their label, and displace none."""
    names = Names(agents=frozenset({"agent-7"}))
    registry = CollectorRegistry()
    way = Way(PrometheusObserver(registry, 2, lambda: names), registry)
    finish_invocations(way, 9)

    assert agents_of(way) == {"agent-0", "agent-1", "agent-7", "_other"}


def test_replicas_that_meet_agents_in_another_order_agree() -> None:
    """The sum over two processes is right for those that the policy file names."""
    names = Names(agents=frozenset({"agent-3", "agent-4"}))
    shown = []
    for order in (range(6), reversed(range(6))):
        registry = CollectorRegistry()
        way = Way(PrometheusObserver(registry, 2, lambda: names), registry)
        for number in order:
            way.publish(replace(STOP, agent=f"agent-{number}", invocation_id=str(number)))
        shown.append(agents_of(way))

    assert shown[0] & shown[1] == {"agent-3", "agent-4", "_other"}


def test_models_are_capped_for_themselves() -> None:
    """Fifty agents that all use the same two models leave two models, and none is another one."""
    way = through_prometheus()
    for number in range(50):
        agent = replace(STARTED.invocation, agent=f"agent-{number}")
        way.publish(*(replace(CALL, invocation=agent, model=f"m{model}") for model in range(2)))

    models = {
        dict(labels)["model"]
        for name, labels in way.samples()
        if name == "otel_limits_model_calls_total"
    }
    assert models == {"m0", "m1"}


def test_limits_and_quotas_are_never_folded() -> None:
    """They are finite: two limits that are one would overwrite each other."""
    way = through_prometheus(max_agents=2)
    way.publish(*(replace(QUOTA_USE, quota=f"quota-{number}", resets=FAR) for number in range(60)))
    caps = {"max_turns": 1, "max_token_budget": 2, "max_tool_calls": 3, "max_output_tokens": 4}
    way.publish(replace(STARTED, limits=Limits(**caps)))  # type: ignore[arg-type]

    assert all(keys_of(way, f"quota-{number}") == {"#1f2e"} for number in range(60))
    for name, cap in caps.items():
        assert way.value("otel_limits_limit", agent="research", limit=name) == cap


@pytest.mark.parametrize("make", [through_prometheus, through_opentelemetry])
def test_the_keys_that_are_nearest_to_their_end_are_shown(make: object) -> None:
    """Fifty of a quota: one that fills up takes the place of the emptiest."""
    way = make()  # type: ignore[operator]
    for number in range(80):
        use = replace(QUOTA_USE, key=f"#{number}", used=number, reserved=0, limit=100, resets=FAR)
        way.publish(use)

    assert keys_of(way) == {f"#{number}" for number in range(30, 80)}


def test_a_key_whose_window_is_over_goes_first() -> None:
    """Yesterday's usage is not reported today."""
    way = through_prometheus()
    way.publish(replace(QUOTA_USE, key="#old", used=100, reserved=0, limit=100, resets=1.0))
    for number in range(50):
        way.publish(replace(QUOTA_USE, key=f"#{number}", used=number + 1, limit=100, resets=FAR))

    assert keys_of(way) == {f"#{number}" for number in range(50)}


def test_keys_are_taken_back_where_that_can_be_done() -> None:
    """A thousand users leave fifty series, not a thousand."""
    way = through_prometheus()
    for number in range(2000):
        way.publish(replace(QUOTA_USE, key=f"#{number}", used=number, limit=10_000, resets=FAR))

    series = [name for name, _ in way.samples() if name == "otel_limits_quota_used"]
    assert len(series) == 50


def test_keys_that_cannot_be_taken_back_are_bounded() -> None:
    """OpenTelemetry keeps every series: no more than a thousand of a quota are made."""
    way = through_opentelemetry()
    for number in range(2000):
        way.publish(replace(QUOTA_USE, key=f"#{number}", used=number, limit=10_000, resets=FAR))

    series = [name for name, _ in way.samples() if name == "otel_limits_quota_used"]
    assert len(series) == 1000


def test_a_flood_of_observers_is_folded() -> None:
    """Observers can have any names, too."""
    way = through_prometheus()
    way.publish(*(ObserverLag(observer=str(number), seconds=1.0) for number in range(107)))

    assert way.value("otel_limits_observer_lag_seconds_count", observer="_other") == 7
    assert folded(way, "observer") == 7


def test_folding_is_one_warning_for_a_label(caplog: pytest.LogCaptureFixture) -> None:
    """A user who misses an agent in a dashboard learns what to do."""
    with caplog.at_level(logging.WARNING, "otel_limits"):
        finish_invocations(through_prometheus(max_agents=2), 5)

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "otel-limits: more than 2 names for the label agent; metrics count the rest as _other. "
        "Use stable agent names, list important names in the policy file, or raise "
        "OTEL_LIMITS_METRICS_MAX_AGENTS (now 2)."
    )
