"""Since when a counter counts, for a Prometheus that begins it at 0 then."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from otel_limits import Limits, enable
from otel_limits.observers.instruments import METRICS
from otel_limits.testing import ScriptedModel, endless, uses

if TYPE_CHECKING:
    import pytest

    from tests.conftest import MakeAgent

COUNTED = {spec.name for spec in METRICS if spec.kind in ("counter", "histogram")}


def samples() -> dict[str, list[Any]]:
    """Every otel-limits sample in the default registry, in OpenMetrics, by name."""
    found: dict[str, list[Any]] = {}
    page: str = generate_latest(REGISTRY).decode()  # type: ignore[no-untyped-call]
    for family in text_string_to_metric_families(page):  # type: ignore[no-untyped-call]
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
