"""Every query, rule and picture, from a real Prometheus that scraped real agents."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from otel_limits.cli import main
from otel_limits.dashboards.exported_files import directory
from tests.dashboards import panels
from tests.dashboards.draw import draw_all
from tests.dashboards.servers import RULES, until
from tests.dashboards.truth import ONE, Expected, expectations, total
from tests.dashboards.units import written
from tests.dashboards.workload import ACTORS

if TYPE_CHECKING:
    from tests.dashboards.panels import Panel, Target
    from tests.dashboards.prometheus import Line
    from tests.dashboards.servers import Scene

DASHBOARDS = panels.read_all(directory())
PANELS = [
    pytest.param(dashboard.name, panel, id=f"{dashboard.name}: {panel.title}")
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    if panel.targets
]
TURNS = panels.Target(
    'sum(increase(otel_limits_turns_total{agent!="patient"}[$__range]))',
    ONE,
    instant=True,
    exemplars=False,
)
"""A number that is known exactly, which shows the factor of the extrapolation."""

PROJECTED = "Projected cost, rest of month"
"""Needs a day of data."""

RECORDED = [
    rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "record" in rule
]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (999.4, "short", "999"),
        (999.7, "short", "1 K"),
        (1_432.0, "locale", "1,432"),
        (1_432.0, "suffix:invocations", "1432 invocations"),
        (14_320_000.0, "count:tokens", "14.3M tokens"),
        (999_999.0, "short", "1 Mil"),
        (9.997, "percentunit", "1 K %"),
        (59.97, "s", "1 min"),
        (3_599.9, "s", "1 h"),
    ],
)
def test_value_is_rounded_before_its_unit_is_chosen(value: float, unit: str, text: str) -> None:
    """No panel shows 1e+03 or 60 s."""
    assert written(value, unit) == text


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_panel_shows_scripted_values(played: Scene, dashboard: str, panel: Panel) -> None:
    """Each query is evaluated once, over the whole window."""
    expected = expectations(played)[dashboard, panel.title]

    assert len(expected) == len(panel.targets)
    for target, each in zip(panel.targets, expected, strict=True):
        compare(answer(played, target), each, extrapolation(played))


def answer(played: Scene, target: Target) -> dict[str, float]:
    """Evaluate a query once, with every interval as long as the window."""
    expr = played.window.fill(target.expr, whole(played))
    # A step of a graph begins at its point.
    is_ahead = "offset -" in expr
    lines = played.prometheus.query(expr, played.window.start if is_ahead else played.window.end)
    return {line.named(target.legend): line.last for line in lines}


def extrapolation(played: Scene) -> float:
    """Return the largest factor by which Prometheus extrapolates increases of this window."""
    return answer(played, TURNS)[ONE] / (played.rounds * total(lambda produces: produces.turns))


def compare(found: dict[str, float], expected: Expected, factor: float) -> None:
    """Assert equal legends, and equal values except for extrapolation."""
    assert set(found) == set(expected.values)
    assert 1 <= factor < 1.5
    for name, value in expected.values.items():
        if expected.loose:
            assert found[name] >= 0
        elif expected.exact:
            assert found[name] == pytest.approx(value)
        else:
            assert value * 0.999 <= found[name] <= value * factor * 1.001, name


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_panel_has_data_over_time(played: Scene, dashboard: str, panel: Panel) -> None:
    """Every query returns data in the steps of its panel."""
    window = played.window.for_panel(panel)
    for target in panel.targets:
        found = played.prometheus.answer(target, window)
        assert bool(found) is (panel.title != PROJECTED), (dashboard, target.expr)


def whole(played: Scene) -> dict[str, str]:
    """Make every interval as long as the window."""
    milliseconds = f"{played.window.range * 1000:.0f}"
    return {
        "__interval": f"{milliseconds}ms",
        "__interval_ms": milliseconds,
        "__rate_interval": f"{milliseconds}ms",
    }


BOARD = json.loads((directory() / "grafana/dashboards/agent-limits.json").read_text("utf-8"))
MARKS = {each["name"]: each for each in BOARD["annotations"]["list"]}


def marks(played: Scene, name: str, end: float | None = None) -> set[str]:
    """Return the marks of an annotation, at the end of the window or at another time."""
    mark = MARKS[name]
    lines = played.prometheus.query(
        played.window.fill(mark["expr"], whole(played)), end or played.window.end
    )
    return {line.named(mark["titleFormat"]) for line in lines}


def test_halts_are_marked_with_agent_and_reason(played: Scene) -> None:
    """Halts on graphs are labeled when that annotation is on."""
    assert {"research: max_turns", "coder: max_iterations"} < marks(played, "Halts")


def test_deployment_is_marked_once(played: Scene) -> None:
    """Only in the window in which it started."""
    mark = f"agents: version 1.2.3, otel-limits {played.version}"
    born = played.prometheus.query(
        "min_over_time(timestamp(otel_limits_build_info)[1h:1s])", played.window.end
    )[0].last
    assert marks(played, "Deployments", born + 1) == {mark}
    assert marks(played, "Deployments", born + played.window.range + 2) == set()


def test_first_policy_file_is_not_marked(played: Scene) -> None:
    """It is not a change; and no agent was killed."""
    assert marks(played, "Kills") == marks(played, "Policy files") == set()


def panel_of(dashboard: str, title: str) -> Panel:
    """Find a panel."""
    return next(
        panel
        for each in DASHBOARDS
        if each.name == dashboard
        for panel in each.panels
        if panel.title == title
    )


@pytest.mark.parametrize("rule", RECORDED, ids=lambda rule: rule["record"])
def test_recording_rule_matches_its_expression(played: Scene, rule: dict[str, Any]) -> None:
    """The recorded series has the labels and values of the expression."""

    def values(expr: str, at: float) -> dict[Any, float]:
        return {
            frozenset(item for item in line.labels.items() if item[0] != "__name__"): line.last
            for line in played.prometheus.query(expr, at)
        }

    def agree() -> bool:
        """Compare at the time of the last evaluation, since results change over time."""
        evaluated = max(values(f"timestamp({rule['record']})", time.time()).values(), default=0.0)
        computed = values(rule["expr"], evaluated)
        recorded = values(rule["record"], evaluated)
        return bool(computed) and recorded == pytest.approx(computed, rel=0.01)

    assert until(agree, "the rule records its expression")


ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
MANAGED = {
    rule["title"]: rule["data"][0]["model"]["expr"]
    for rule in yaml.safe_load(
        (directory() / "grafana/provisioning/alerting/otel-limits.yaml").read_text("utf-8")
    )["groups"][0]["rules"]
}


def test_grafana_alerts_fire_like_prometheus_alerts(played: Scene) -> None:
    """Without recorded series, for the same agents."""

    def firing(exprs: dict[str, str]) -> dict[str, set[frozenset[tuple[str, str]]]]:
        found = {name: played.prometheus.query(each, time.time()) for name, each in exprs.items()}
        return {
            name: {frozenset(set(line.labels.items()) - recorded(line)) for line in lines}
            for name, lines in found.items()
            if lines
        }

    def recorded(line: Line) -> set[tuple[str, str]]:
        return {item for item in line.labels.items() if item[0] == "__name__"}

    def agree() -> bool:
        by_rules = firing(ALERTS)
        names = ("HaltedRepeatedly", "UnpricedTokens")
        return by_rules.keys() >= {f"OtelLimits{n}" for n in names} and firing(MANAGED) == by_rules

    assert until(agree, "both fire alike")


def test_max_turns_alert_fires(played: Scene) -> None:
    """The notification contains the agent, the job, the count and the runbook."""

    def firing() -> dict[str, Any] | None:
        alerts = played.prometheus.get("alerts")["alerts"]
        return next(
            (
                alert
                for alert in alerts
                if alert["labels"]["alertname"] == "OtelLimitsHaltedRepeatedly"
                and alert["labels"]["reason"] == "max_turns"
                and alert["state"] == "firing"
            ),
            None,
        )

    alert = until(firing, "the alert fires")
    assert alert["labels"]["agent"] == "research"
    assert alert["labels"]["job"] == "agents"
    assert alert["labels"]["severity"] == "warning"
    assert "halted by max_turns" in alert["annotations"]["description"]
    assert "Section OtelLimitsHaltedRepeatedly of README.md" in alert["annotations"]["runbook"]


def test_exemplar_has_trace_id_of_halt(played: Scene) -> None:
    """The diamond in the graph opens the trace of the halted invocation."""
    panel = panel_of("agent-limits", "Halts by agent and reason")
    (target,) = (target for target in panel.targets if target.exemplars)
    found = played.prometheus.get(
        "query_exemplars",
        query=played.window.fill(target.expr),
        start=f"{played.window.start:.3f}",
        end=f"{time.time():.3f}",
    )
    traces = {
        exemplar["labels"]["trace_id"]
        for series in found
        if series["seriesLabels"]["agent"] == "research"
        for exemplar in series["exemplars"]
    }
    assert played.traces["research"] in traces


def test_pictures_show_every_panel(played: Scene, tmp_path: Path) -> None:
    """Each part of each dashboard in light and dark, in the size of a slide, with data."""
    without_data = draw_all(played.prometheus, played.window, tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}-{part}{look}.png"
        for name, parts in (("agent-limits", 3), ("token-spend", 3), ("health", 2))
        for part in range(1, parts + 1)
        for look in ("", "-dark")
    )
    for path in tmp_path.iterdir():
        # Width and height in the header of a PNG (ISO/IEC 15948, 11.2.2)
        assert struct.unpack(">II", path.read_bytes()[16:24]) == (1920, 1080)
    assert without_data == [PROJECTED]


@pytest.mark.parametrize("option", ["--prometheus", "--scrape"])
def test_top_shows_the_same_halts(
    played: Scene, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`otel-limits top` counts from the start of a process that is younger than an hour."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    address = {"--prometheus": played.url, "--scrape": f"127.0.0.1:{played.port}"}[option]
    assert main(["top", "--once", "--json", option, address]) == 0
    fleet = json.loads(capsys.readouterr().out)
    query = 'otel_limits_stops_total{action=~"halted|wrapped_up|raised"} > 0'
    expected: dict[str, dict[str, float]] = {}
    for line in played.prometheus.query(query, time.time()):
        reasons = expected.setdefault(line.labels["agent"], {})
        reason = line.labels["reason"]
        reasons[reason] = reasons.get(reason, 0) + line.last

    assert expected
    assert {row["agent"]: row["halts"] for row in fleet["agents"] if row["halts"]} == expected
    assert fleet["feeds"][0]["error"] is None


def test_workload_covers_actions_and_call_kinds() -> None:
    """Otherwise some panels would be tested without data."""
    assert {actor.produces.action for actor in ACTORS} >= {"none", "observed", "halted", "raised"}
    assert {kind for actor in ACTORS for kind in actor.produces.calls} == {
        "measured",
        "zero_token",
        "unmeasured",
        "failed",
    }
