"""Every query, rule and picture, over a real Prometheus that watched real agents."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from otel_limits.cli import main
from otel_limits.cli.top import command
from otel_limits.dashboards import panels
from otel_limits.dashboards.files import directory
from otel_limits.dashboards.units import written
from tests.dashboards.servers import RULES, until
from tests.dashboards.truth import ONE, Expected, expectations, total
from tests.dashboards.workload import ACTORS

if TYPE_CHECKING:
    from otel_limits.dashboards.api import Line
    from otel_limits.dashboards.panels import Panel, Target
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
"""A number that is known exactly: by how much it is too large is the extrapolation."""

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
        (999_999.0, "short", "1 Mil"),
        (9.997, "percentunit", "1 K %"),
        (59.97, "s", "1 min"),
        (3_599.9, "s", "1 h"),
    ],
)
def test_a_value_is_rounded_before_its_unit_is_chosen(value: float, unit: str, text: str) -> None:
    """No panel says 1e+03, or 60 s, of what is all but one of the next unit."""
    assert written(value, unit) == text


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_a_panel_shows_what_the_agents_produced(
    played: Scene, dashboard: str, panel: Panel
) -> None:
    """Each query is evaluated over the whole scene, and has the values that were scripted."""
    expected = expectations(played)[dashboard, panel.title]

    assert len(expected) == len(panel.targets)
    for target, each in zip(panel.targets, expected, strict=True):
        compare(answer(played, target), each, extrapolation(played))


def answer(played: Scene, target: Target) -> dict[str, float]:
    """Evaluate a query once, with every interval as long as the scene."""
    expr = played.window.fill(target.expr, whole(played))
    lines = played.prometheus.query(expr, played.window.end)
    return {line.named(target.legend): line.last for line in lines}


def extrapolation(played: Scene) -> float:
    """By how much Prometheus stretches an increase of this scene, at most."""
    return answer(played, TURNS)[ONE] / (played.rounds * total(lambda produces: produces.turns))


def compare(found: dict[str, float], expected: Expected, factor: float) -> None:
    """Names must be equal; values too, but for what Prometheus extrapolates."""
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
def test_a_panel_has_something_to_draw(played: Scene, dashboard: str, panel: Panel) -> None:
    """Asked over time, in steps as long as the panel wants them, every query returns data."""
    window = played.window.for_panel(panel)
    for target in panel.targets:
        assert played.prometheus.answer(target, window), (dashboard, target.expr)


@pytest.mark.parametrize(("environment", "seen"), [("stage", 1), ("production", 0)])
def test_an_environment_that_is_chosen_is_all_that_is_shown(
    played: Scene, environment: str, seen: int
) -> None:
    """It is known of the process alone, and holds for counters and gauges of it."""
    for title in ("Invocations finished", "Invocations are in progress"):
        (target,) = panel_of("agent-limits", title).targets
        expr = played.window.fill(target.expr, {"environment": environment, **whole(played)})
        (line,) = played.prometheus.query(expr, played.window.end)
        assert bool(line.last) == bool(seen)


def whole(played: Scene) -> dict[str, str]:
    """Every interval as long as the scene."""
    milliseconds = f"{played.window.range * 1000:.0f}"
    return {"__interval": f"{milliseconds}ms", "__interval_ms": milliseconds}


BOARD = json.loads((directory() / "grafana/dashboards/agent-limits.json").read_text("utf-8"))
MARKS = {each["name"]: each for each in BOARD["annotations"]["list"]}


def marks(played: Scene, name: str, end: float | None = None) -> set[str]:
    """What an annotation says, at the end of the scene or at another time."""
    mark = MARKS[name]
    lines = played.prometheus.query(
        played.window.fill(mark["expr"], whole(played)), end or played.window.end
    )
    return {line.named(mark["titleFormat"]) for line in lines}


def test_halts_are_marked_with_agent_and_reason(played: Scene) -> None:
    """On every panel over time, when that annotation is switched on."""
    assert {"research: max_turns", "coder: max_iterations"} < marks(played, "Halts")


def test_a_deployment_is_marked_when_its_version_is_first_seen(played: Scene) -> None:
    """In the window in which it began, and not any more in the one after it."""
    said = f"agents: version 1.2.3, otel-limits {played.version}"
    born = played.prometheus.query(
        "min_over_time(timestamp(otel_limits_build_info)[1h:1s])", played.window.end
    )[0].last
    assert marks(played, "Deployments", born + 1) == {said}
    assert marks(played, "Deployments", born + played.window.range + 2) == set()


def test_what_did_not_happen_is_not_marked(played: Scene) -> None:
    """Nobody was killed, and the policy file that a process begins with is not news."""
    assert marks(played, "Kills") == marks(played, "Policy files") == set()


def test_the_forecast_goes_on_at_the_pace_of_the_scene(played: Scene) -> None:
    """What is left of the month, at what was spent per second."""
    spent, forecast = (
        panel_of("token-spend", title)
        for title in ("Agents used these tokens", "The month will still use")
    )
    moment = time.gmtime(played.window.end)
    days = played.prometheus.query("days_in_month()", played.window.end)[0].last
    left = (days - moment.tm_mday) * 86400 + (24 - moment.tm_hour) * 3600 - moment.tm_min * 60

    pace = answer(played, spent.targets[0])[ONE] / round(played.window.range)
    assert answer(played, forecast.targets[0])[ONE] == pytest.approx(pace * left)


def test_only_the_call_under_way_has_something_reserved(played: Scene) -> None:
    """Everybody else's calls are settled."""
    (target,) = panel_of("token-spend", "Calls under way have reserved this share").targets
    reserved = answer(played, target)
    assert [name for name, share in reserved.items() if share > 0] == ["waiting: (all)"]


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
def test_a_recording_rule_records_what_its_expression_says(
    played: Scene, rule: dict[str, Any]
) -> None:
    """The expression returns data, and the recorded series has the same labels and values."""

    def values(expr: str, at: float) -> dict[Any, float]:
        return {
            frozenset(item for item in line.labels.items() if item[0] != "__name__"): line.last
            for line in played.prometheus.query(expr, at)
        }

    def agree() -> bool:
        """Compare at the moment of the last evaluation: a window that grows changes its answer."""
        evaluated = max(values(f"timestamp({rule['record']})", time.time()).values(), default=0.0)
        asked = values(rule["expr"], evaluated)
        return bool(asked) and values(rule["record"], evaluated) == pytest.approx(asked, rel=0.01)

    assert until(agree, "the rule records what its expression says")


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


def test_grafana_asks_what_the_rules_of_prometheus_ask(played: Scene) -> None:
    """Without a recorded series it finds the same to be wrong, of the same agents."""

    def wrong(exprs: dict[str, str]) -> dict[str, set[frozenset[tuple[str, str]]]]:
        found = {name: played.prometheus.query(each, time.time()) for name, each in exprs.items()}
        return {
            name: {frozenset(set(line.labels.items()) - recorded(line)) for line in lines}
            for name, lines in found.items()
            if lines
        }

    def recorded(line: Line) -> set[tuple[str, str]]:
        return {item for item in line.labels.items() if item[0] == "__name__"}

    def agree() -> bool:
        by_rules = wrong(ALERTS)
        names = ("MaxTurnsStops", "LoopDetected", "BudgetNearlyExhausted", "UnpricedTokens")
        return by_rules.keys() >= {f"OtelLimits{n}" for n in names} and wrong(MANAGED) == by_rules

    assert until(agree, "both find the same")


def test_the_max_turns_alert_fires(played: Scene) -> None:
    """Whoever is paged learns which agent of which job it is, how often, and where to read on."""

    def firing() -> dict[str, Any] | None:
        alerts = played.prometheus.get("alerts")["alerts"]
        return next(
            (
                alert
                for alert in alerts
                if alert["labels"]["alertname"] == "OtelLimitsMaxTurnsStops"
                and alert["state"] == "firing"
            ),
            None,
        )

    alert = until(firing, "the alert fires")
    assert alert["labels"]["agent"] == "research"
    assert alert["labels"]["job"] == "agents"
    assert alert["labels"]["severity"] == "critical"
    assert "reached max_turns" in alert["annotations"]["description"]
    assert alert["annotations"]["runbook_url"].endswith("#otellimitsmaxturnsstops")


def test_an_exemplar_leads_to_the_trace_of_the_halt(played: Scene) -> None:
    """The diamond in the graph has the trace id that the agent's result has."""
    panel = panel_of("agent-limits", "Limits halted these agents; a diamond leads to the trace")
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


def test_the_preview_draws_every_panel(
    played: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part of each dashboard light and dark, fit for a slide, and no panel without data."""
    status = main(["dashboards", "preview", "--prometheus", played.url, "--out", str(tmp_path)])
    said = capsys.readouterr()

    assert (status, said.err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}-{part}{look}.png"
        for name, parts in (("agent-limits", 4), ("token-spend", 4), ("health", 2))
        for part in range(1, parts + 1)
        for look in ("", "-dark")
    )
    for path in tmp_path.iterdir():
        # The size stands at the begin of a PNG (ISO/IEC 15948, 11.2.2).
        assert struct.unpack(">II", path.read_bytes()[16:24]) == (1920, 1080)
    assert "no data" not in said.out


@pytest.mark.parametrize("way", ["--prometheus", "--scrape"])
def test_top_tells_the_same_halts(
    played: Scene, way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`otel-limits top` knows all of a process that is younger than an hour, whomever it asks."""
    monkeypatch.setattr(command, "ONCE_SECONDS", 0.0)
    address = {"--prometheus": played.url, "--scrape": f"127.0.0.1:{played.port}"}[way]
    assert main(["top", "--once", "--json", way, address]) == 0
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


def test_every_actor_has_its_own_reason_to_be_there() -> None:
    """Nothing of what a dashboard shows is missing from the workload."""
    assert {actor.produces.action for actor in ACTORS} >= {"none", "observed", "halted", "raised"}
    assert {kind for actor in ACTORS for kind in actor.produces.calls} == {
        "measured",
        "zero_token",
        "unmeasured",
        "failed",
    }
