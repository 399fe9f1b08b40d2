"""Each alert stays silent on an ordinary day on which it could have fired.

A day has two processes, a rolling deployment in the morning, and one in the evening that replaces
both at the same time.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.exposition import generate_latest
from strands.hooks import BeforeModelCallEvent

import otel_limits
from otel_limits.dashboards.exported_files import directory
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.dashboards.panels import TimeRange
from tests.dashboards.prometheus import Prometheus
from tests.dashboards.servers import MINUTE, RULES, SCRAPES, past, program, remembering
from tests.servers.dashboards.test_exported_files import run
from tests.unit.dashboards.test_exported_files import ALERTS, DASHBOARDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.testing import FakeTime
    from tests.conftest import MakeAgent


Minutely: TypeAlias = "Callable[[int], float]"
Line: TypeAlias = "dict[str, str]"

HOUR: Final = 60
DAY: Final = 24 * HOUR

LIVES: Final = {
    "a1": (0, 600),
    "b1": (0, 605),
    "a2": (602, 1020),
    "b2": (607, 1020),
    "a3": (1024, DAY),
    "b3": (1024, DAY),
}
"""First and last minute of each process."""


def series(name: str, values: Sequence[float | None], **labels: str) -> Line:
    """Write one series for promtool: its samples from minute 0 on, `None` without one."""
    shown = ",".join(f'{label}="{value}"' for label, value in ({"job": "agents"} | labels).items())
    runs = [(value, len(list(each))) for value, each in itertools.groupby(values)]
    # `_xN` is N samples, but `VxN` is N+1.
    words = [f"_x{count}" if value is None else f"{value:g}x{count - 1}" for value, count in runs]
    return {"series": f"{name}{{{shown}}}", "values": " ".join([*words, "stale"])}


def gauge(name: str, at: Minutely, *, late: int = 0, **labels: str) -> list[Line]:
    """Write a value by the minute of the day, for each process from its minute `late` on."""
    return [
        series(
            name,
            [*[None] * (first + late), *map(at, range(first + late, last))],
            **labels,
            instance=each,
        )
        for each, (first, last) in LIVES.items()
    ]


def counter(name: str, per_minute: Minutely, *, before: float = 0, **labels: str) -> list[Line]:
    """Write a counter that each process begins at 0.

    Args:
        name: The metric.
        per_minute: Its increase in a minute of the day.
        before: The count of the first processes at midnight.
        labels: Its labels.
    """
    lines = []
    for each, (first, last) in LIVES.items():
        start = before if first == 0 else 0
        counts = itertools.accumulate(map(per_minute, range(first, last - 1)), initial=start)
        lines.append(series(name, [*[None] * first, *counts], **labels, instance=each))
    return lines


def traffic(minute: int) -> float:
    """Return the invocations of a process in a minute: one in an hour at night, two at noon."""
    hour = minute % DAY / HOUR
    return 2 - abs(hour - 13) / 4 if 7 <= hour < 19 else float(minute % 60 == 20)


def at_night(minute: int) -> bool:
    """Return whether it is night."""
    return traffic(minute) in (0, 1) and not 7 <= minute % DAY / HOUR < 19


def stops(per_minute: Minutely, reason: str, action: str, **more: float) -> list[Line]:
    """Write finished invocations."""
    labels = {"agent": "research", "reason": reason, "action": action}
    return counter("otel_limits_stops_total", per_minute, **labels, **more)  # type: ignore[arg-type]


class OrdinaryDay(NamedTuple):
    """A day, the alerts that could fire on it, and proof that they could."""

    alerts: tuple[str, ...]
    lines: list[list[Line]]
    risks: tuple[str, ...]
    """Expressions that are true once in the day."""


def highest(expression: str) -> str:
    """Return an expression for the highest value from 02:00 on."""
    return f"max(max_over_time(({expression})[22h:5m]))"


LIMITS: Final = ("max_turns", "max_iterations", "loop_detected")

HALTS: Final = OrdinaryDay(
    ("Halted", "HaltedRepeatedly", "StopRateHigh"),
    [
        stops(traffic, "end_turn", "none"),
        # Those of yesterday, would-be ones, and kills.
        *(stops(lambda _: 0, limit, "halted", before=3) for limit in LIMITS),
        *(stops(lambda minute: 0.1 * traffic(minute), limit, "observed") for limit in LIMITS),
        stops(lambda minute: 5 * (minute == 720), "killed", "killed"),
    ],
    ('sum(max_over_time(otel_limits_stops_total{action="halted",reason="max_turns"}[22h])) == 6',),
)

SPEND: Final = OrdinaryDay(
    ("CostBurnRateHigh", "TokenBurnRateHigh"),
    [
        # Five busy minutes in each hour, also while a deployment replaces the processes.
        counter(
            "otel_limits_cost_usd_total",
            lambda minute: 1.4 if minute % HOUR < 5 else 0.02 * traffic(minute),
            agent="research",
            model="m",
        ),
        counter(
            "otel_limits_tokens_total",
            lambda minute: 350_000 if minute % HOUR < 5 else 5_000 * traffic(minute),
            agent="research",
            model="m",
            type="input",
        ),
    ],
    (
        highest("12 * job_agent:otel_limits_cost_usd:increase5m") + " > 20",
        highest("job_agent:otel_limits_cost_usd:increase1h") + " > 14",
        highest("12 * job_agent:otel_limits_tokens:increase5m") + " > 5e6",
        highest("job_agent:otel_limits_tokens:increase1h") + " > 3.5e6",
    ),
)


def used(up_to: str, share: Minutely) -> list[Line]:
    """Write the invocations that used at most a share of their limit; all without `up_to`."""
    write = functools.partial(
        counter,
        f"otel_limits_budget_used_ratio_{'bucket' if up_to else 'count'}",
        lambda minute: share(minute) * traffic(minute),
        agent="research",
        limit="max_turns",
    )
    return write(le=up_to) if up_to else write()


UTILIZATION: Final = OrdinaryDay(
    ("BudgetNearlyExhausted",),
    [
        # The few of the night use all of it, as do some of the day.
        used("0.5", lambda minute: 0 if at_night(minute) else 0.8),
        used("0.8", lambda minute: 0 if at_night(minute) else 0.97),
        used("1.0", lambda _: 1),
        used("+Inf", lambda _: 1),
        used("", lambda _: 1),
    ],
    (highest("job_agent_limit:otel_limits_budget_used:p95_30m") + " >= 0.9",),
)

PRICES: Final = OrdinaryDay(
    ("UnpricedTokens",),
    [
        counter("otel_limits_cost_usd_total", lambda _: 0.01, agent="research", model="known"),
        counter("otel_limits_unpriced_tokens_total", lambda _: 0, model="known"),
        # A job that uses no prices.
        counter("otel_limits_unpriced_tokens_total", traffic, job="local", model="own"),
        counter(
            "otel_limits_cost_usd_total", lambda _: 0, job="local", agent="research", model="own"
        ),
        gauge("otel_limits_limit", lambda _: 30, job="local", agent="research", limit="max_turns"),
    ],
    ('sum(max_over_time(otel_limits_unpriced_tokens_total{job="local"}[22h])) > 100',),
)


def counted(name: str, **labels: str) -> list[Line]:
    """Write yesterday's count, with an hour in which Prometheus was down."""
    lines = counter(name, lambda _: 0, before=4, **labels)
    for line in lines[:2]:
        line["values"] = "4x299 _x60 4x239 stale"
    return lines


ERRORS: Final = OrdinaryDay(
    ("SpansMissing", "InternalErrors", "LedgerRowsLost"),
    [
        counted("otel_limits_unsampled_invocations_total", agent="research"),
        counted("otel_limits_internal_errors_total", component="prometheus"),
        counted("otel_limits_internal_errors_total", component="ledger_spill"),
    ],
    (
        "sum(max_over_time(otel_limits_unsampled_invocations_total[22h])) == 8",
        "sum(max_over_time(otel_limits_internal_errors_total[22h])) == 16",
    ),
)


def quota(
    name: str, usage: Minutely, limit: float, resets: Minutely, reserved: float
) -> list[Line]:
    """Write the state of a quota."""
    write = functools.partial(gauge, quota=name, key="all")
    return [
        *write("otel_limits_quota_used", usage),
        *write("otel_limits_quota_reserved", lambda _: reserved),
        *write("otel_limits_quota_limit", lambda _: limit),
        *write("otel_limits_quota_resets_timestamp_seconds", resets),
    ]


def decisions(name: str, decision: str, per_minute: Minutely, before: float = 0) -> list[Line]:
    """Write decisions on calls."""
    labels = {"quota": name, "decision": decision}
    return counter("otel_limits_quota_decisions_total", per_minute, before=before, **labels)


QUOTAS: Final = OrdinaryDay(
    (
        "QuotaNearlyUsed",
        "QuotaExceeded",
        "QuotaExceededRepeatedly",
        "QuotaStoreDown",
        "QuotaOutageRefusals",
    ),
    [
        # Nearly used up at midnight, and each hour; reservations exceed the rest.
        quota("daily", lambda minute: minute / DAY * 870, 1000, lambda _: 60 * DAY, 300),
        quota(
            "hourly", lambda minute: minute % 60 * 14, 1000, lambda at: 3600 * (at // 60 + 1), 300
        ),
        quota("slots", lambda _: 0, 4, lambda _: 2 * 60 * DAY, 4),
        decisions("daily", "admitted", traffic),
        decisions("hourly", "admitted", traffic),
        decisions("hourly", "observed", lambda minute: 0.1 * traffic(minute)),
        decisions("slots", "admitted", traffic),
        decisions("slots", "waited", lambda minute: 3 * traffic(minute)),
        # Of yesterday, and of an outage of yesterday.
        decisions("daily", "refused", lambda _: 0, 9),
        decisions("daily", "gave_up", lambda _: 0, 9),
        decisions("daily", "degraded_grace_admitted", lambda _: 0, 9),
        decisions("daily", "degraded_denied", lambda _: 0, 9),
    ],
    (
        highest('job_quota_key:otel_limits_quota_used:ratio{quota="daily"}') + " > 0.86",
        highest('job_quota_key:otel_limits_quota_used:ratio{quota="hourly"}') + " > 0.75",
        'sum(max_over_time(otel_limits_quota_decisions_total{decision=~"degraded.*"}[22h])) == 36',
    ),
)

BATCH: Final = [*[None] * 120, *[1] * 20]


def reports(late: int) -> list[list[Line]]:
    """Write the processes that report, from the minute `late` after their start on."""
    return [
        gauge("up", lambda _: 1),
        gauge("otel_limits_build_info", lambda _: 1, late=late, version="1"),
        gauge("otel_limits_enforcing", lambda _: 1, late=late, source="run"),
    ]


PRESENCE: Final = OrdinaryDay(
    ("NotEnforcing", "EnforcingAbsent", "TelemetryAbsent"),
    [
        # Imports its agents three minutes after its start.
        *reports(late=3),
        [
            series("up", BATCH, job="nightly", instance="n"),
            series("otel_limits_enforcing", BATCH, job="nightly", instance="n", source="run"),
            series("otel_limits_build_info", BATCH, job="nightly", instance="n", batch="true"),
        ],
    ],
    tuple(
        f'count_over_time(ALERTS{{alertname="OtelLimits{name}",alertstate="pending"}}[22h]) > 0'
        for name in ("EnforcingAbsent", "TelemetryAbsent")
    ),
)

DAYS: Final = (HALTS, SPEND, UTILIZATION, PRICES, ERRORS, QUOTAS, PRESENCE)
ELSEWHERE: Final = {"TokenSpendAnomaly"}
"""Has an ordinary week in `tests_of_weeks.yaml`: weekdays, a quiet Sunday, and deployments."""


@pytest.mark.parametrize("day", DAYS, ids=lambda day: day.alerts[0])
def test_alerts_stay_silent_on_an_ordinary_day(day: OrdinaryDay, tmp_path: Path) -> None:
    """All of them, although their metrics come close."""
    presence = [] if day is PRESENCE else reports(late=0)
    silent: dict[str, object] = {
        "expr": 'count_over_time(ALERTS{alertstate="firing"}[22h])',
        "exp_samples": [],
    }
    risky: list[dict[str, object]] = [
        {"expr": f"count({expr})", "exp_samples": [{"labels": "{}", "value": 1}]}
        for expr in day.risks
    ]
    group = {
        "interval": "1m",
        "input_series": [line for lines in presence + day.lines for line in lines],
        "promql_expr_test": [{**each, "eval_time": "24h"} for each in (silent, *risky)],
    }
    rules = [str(RULES), str(DASHBOARDS / "prometheus/thresholds.yaml")]
    path = tmp_path / "day.yaml"  # JSON is YAML
    path.write_text(
        json.dumps({"rule_files": rules, "evaluation_interval": "5m", "tests": [group]})
    )
    run(program("promtool"), "test", "rules", str(path))


def test_each_alert_has_an_ordinary_day() -> None:
    """An alert that fires for nothing is soon ignored."""
    names = {f"OtelLimits{name}" for day in DAYS for name in day.alerts} | {
        f"OtelLimits{name}" for name in ELSEWHERE
    }
    assert names == {alert["alert"] for alert in ALERTS}


# --- annotations ----------------------------------------------------------------------------------

STEP = MINUTE * SCRAPES

MARKS_BY_EVENT: dict[str, set[str]] = {
    "started": {"Deployments: agents: version 1.2.3"},
    "changed": {"Policy files: Policy file accepted"},
    "invalid": {"Policy files: Policy file refused"},
    "fixed": {"Policy files: Policy file accepted"},
    "killed": {"Kills: worker was killed"},
    "halted": {"Halts: worker: max_turns"},
    "quiet": set(),
}
"""Events between two scrapes, and their marks."""


@pytest.mark.usefixtures("faulty")
def test_events_are_marked_in_their_step_only(
    make_agent: MakeAgent, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Deployments, new policy files, kills and halts, on every dashboard."""
    program("promtool")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.version=1.2.3")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(tmp_path / "limits.yaml"))
    events = cause_events(make_agent, fake_time, tmp_path / "limits.yaml")
    scrapes = [served() for _ in events]
    end = time.time() // STEP * STEP
    with remembering(tmp_path, past(scrapes, end)) as url:
        for board in (directory() / "grafana/dashboards").glob("*.json"):
            annotations = json.loads(board.read_text("utf-8"))["annotations"]["list"]
            found = {
                event: set(marked(Prometheus(url), annotations, end - STEP * ago))
                for ago, event in enumerate(reversed(MARKS_BY_EVENT))
            }
            assert found == MARKS_BY_EVENT


def served() -> str:
    """Return the page that a scrape would get."""
    text: bytes = generate_latest(REGISTRY)  # type: ignore[no-untyped-call]
    return text.decode()


def cause_events(make_agent: MakeAgent, fake_time: FakeTime, policy: Path) -> Iterator[None]:
    """Cause each event in turn."""
    policy.write_text("defaults: {limits: {max_turns: 9}}")
    otel_limits.enable()
    finish(make_agent)
    yield
    for text in ("limits: {max_turns: 8}", "action: stop", "limits: {max_turns: 1}"):
        policy.write_text(f"defaults: {{{text}}}")
        # The file is checked at most once a second, when an invocation starts.
        fake_time.advance(1)
        finish(make_agent)
        yield
    killed = make_agent(ScriptedModel([says("done")]), name="worker")
    killed.hooks.add_callback(BeforeModelCallEvent, kill)
    assert killed("go").stop_reason == "killed"
    yield
    runaway = make_agent(ScriptedModel(endless(uses("search"))), name="worker")
    assert runaway("go").stop_reason == "max_turns"
    yield
    yield


def kill(event: BeforeModelCallEvent) -> None:
    """Kill the agent."""
    assert otel_limits.kill(agent=event.agent.name) == 1


def finish(make_agent: MakeAgent) -> None:
    """Run an agent to its natural end."""
    assert make_agent(ScriptedModel([says("done")]), name="worker")("go").stop_reason == "end_turn"


def marked(prometheus: Prometheus, annotations: list[dict[str, Any]], when: float) -> Iterator[str]:
    """Yield the marks of the step that ends then."""
    step = TimeRange(start=when - STEP, end=when, step=STEP, scrape_interval=MINUTE / 2)
    for each in annotations:
        for line in prometheus.query(step.fill(each["expr"]), when):
            # Without the version of otel-limits, which changes with each release
            mark = line.named(each["titleFormat"]).partition(", otel-limits")[0]
            yield f"{each['name']}: {mark}"
