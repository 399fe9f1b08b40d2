"""The rules of Grafana's dashboard-linter, and some of our own, without an exclusion."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_limits.core.limits import (
    KILLED_STOP_REASON,
    LIMITS,
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
)
from otel_limits.observers.instruments import METRICS
from tests.dashboards.servers import RELEASES, ROOT, RULES, Find

COMMITTED = ROOT / "dashboards/grafana/dashboards"
BOARDS = {path.stem: json.loads(path.read_text("utf-8")) for path in COMMITTED.glob("*.json")}
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] not in {"row", "text"}
]
QUERIES = {
    f"{name}: {panel['title']}: {target['refId']}": target
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", ())
}
TARGETS = [pytest.param(target, id=name) for name, target in QUERIES.items()]
MARKS = {
    f"{name}: {each['name']}": each["expr"]
    for name, board in BOARDS.items()
    for each in board["annotations"]["list"]
}
EXPRESSIONS = [
    *(pytest.param(expr, id=name) for name, expr in MARKS.items()),
    *(pytest.param(target["expr"], id=name) for name, target in QUERIES.items()),
    *(
        pytest.param(rule["expr"], id=rule.get("record") or rule["alert"])
        for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"]
        for rule in group["rules"]
    ),
]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

UNITS = {"short", "percentunit", "currencyUSD", "s"}
"""Those of Grafana that are used here; each is one that the linter knows."""

SUFFIXES = ("", "_bucket", "_sum", "_count")
SERIES = {
    f"{spec.name}{suffix}": spec
    for spec in METRICS
    for suffix in (SUFFIXES[1:] if spec.kind == "histogram" else SUFFIXES[:1])
}
PLACE = {"cluster", "namespace", "job", "instance"}
"""Labels that come from where a process is scraped."""

SELECTOR = re.compile(r"(otel_limits_\w+)(?:{([^}]*)})?(?:\[([^\]]+)\])?")


def test_the_committed_dashboards_are_those_of_the_code(tmp_path: Path) -> None:
    """Run `python -m dashboards.build` when this fails."""
    if sys.version_info < (3, 11):
        pytest.skip("grafana-foundation-sdk needs Python 3.11.")
    command = [sys.executable, "-m", "dashboards.build", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)

    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == len(BOARDS) + 2  # rules, and the alerts that Grafana manages
    for path in made:
        committed = (ROOT / "dashboards" / path).read_text("utf-8")
        assert (tmp_path / path).read_text("utf-8") == committed, path


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_can_be_provisioned(board: dict[str, Any]) -> None:
    """It has a uid of its own and no id, is not edited in Grafana, and is of the classic schema."""
    assert re.fullmatch(r"otel-limits-[a-z]+", board["uid"])
    assert board.get("id") is None
    assert board["editable"] is False
    assert board["schemaVersion"] == 42
    assert board["tags"] == ["otel-limits"]


def test_no_two_dashboards_have_the_same_uid() -> None:
    """One would replace the other."""
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS) == 3


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_no_two_panels_have_the_same_number_or_place(board: dict[str, Any]) -> None:
    """Links name a panel by its number, and panels must not lie on each other."""
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_the_data_source_is_a_variable(board: dict[str, Any]) -> None:
    """template-datasource-rule."""
    variable = variables(board)["datasource"]
    assert variable["type"] == "datasource"
    assert variable["query"] == "prometheus"
    assert variable["label"] == "Data source"


def variables(board: dict[str, Any]) -> dict[str, Any]:
    """Variables of a dashboard by name."""
    return {each["name"]: each for each in board["templating"]["list"]}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
@pytest.mark.parametrize(
    "name", ["environment", "cluster", "namespace", "job", "instance", "agent"]
)
def test_a_label_is_a_variable(board: dict[str, Any], name: str) -> None:
    """template-job-rule, template-instance-rule, template-on-time-change-reload-rule."""
    variable = variables(board)[name]
    assert variable["type"] == "query"
    assert variable["datasource"] == DATASOURCE
    assert variable["label"] == name.capitalize()
    assert variable["multi"]
    assert variable["includeAll"]
    # A process need not have what says where it is, and one without is meant by "All" as well.
    assert variable["allValue"] == (".+" if name == "agent" else ".*")
    assert variable["refresh"] == 2


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_variable_is_of_use_and_is_there(board: dict[str, Any]) -> None:
    """Each is asked for by some panel or other variable, and none that is asked for is missing."""
    text = json.dumps([board["panels"], board["templating"], board["annotations"]])
    known = set(variables(board))
    assert known - {"datasource"} <= set(re.findall(r"\$\{?(\w+)", text))
    asked = json.dumps([each.get("targets") for each in board["panels"]])
    assert set(re.findall(r"\$(?!__)([a-z]\w+)", asked)) <= known


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_variable_asks_for_a_label_that_exists(board: dict[str, Any]) -> None:
    """template-label-promql-rule; `job` and `instance` come from the scrape."""
    for variable in variables(board).values():
        if variable["type"] == "query":
            found = re.fullmatch(
                r"label_values\((\w+)(?:{.*})?, (\w+)\)", variable["query"]["query"]
            )
            assert found is not None
            assert found[2] in {*PLACE, *SERIES[found[1]].labels}


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    """panel-title-description-rule, panel-units-rule, panel-datasource-rule, panel-no-targets."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == DATASOURCE
    assert panel["targets"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_so_where_nothing_is(panel: dict[str, Any]) -> None:
    """0 or "None": with "No data" nobody knows whether something is broken."""
    nothing = panel["fieldConfig"]["defaults"]["noValue"]
    assert nothing == ("None" if panel["type"] in {"bargauge", "heatmap", "table"} else "0")


@pytest.mark.parametrize("panel", PANELS)
def test_what_a_panel_names_leads_to_the_dashboard_of_it_alone(panel: dict[str, Any]) -> None:
    """Every agent, reason, model and quota is a link; where it leads to has such a variable."""
    urls = [link["url"] for link in panel["fieldConfig"]["defaults"].get("links", ())]
    legends = "".join(target["legendFormat"] for target in panel["targets"])
    named = {name for name in LINKED if f"{{{{{name}}}}}" in legends}
    linked = {
        name
        for name in LINKED
        for url in urls
        # In this format an agent called R&D is found.
        if re.search(rf"&var-{name}=\$\{{__[\w.]+\.{name}:percentencode\}}$", url)
    }
    assert named <= linked
    for url in urls:
        (board,) = (each for each in BOARDS.values() if f"/d/{each['uid']}?" in url)
        assert "${__url_time_range}" in url
        for name in re.findall(r"var-(\w+)=|\${(\w+):queryparam}", url):
            assert set(name) - {""} <= set(variables(board))


LINKED = ("agent", "reason", "model", "quota")


def test_a_reason_has_one_colour_on_every_panel() -> None:
    """All that otel-limits halts for have one, and no two the same."""
    found = {
        (override["matcher"]["options"], each["value"]["fixedColor"])
        for board in BOARDS.values()
        for panel in board["panels"]
        for override in panel.get("fieldConfig", {}).get("overrides", ())
        for each in override["properties"]
    }
    colours = dict(found)
    assert len(colours) == len(found) == len(set(colours.values()))
    for reason in HALTS:
        assert sum(bool(re.search(name.strip("/"), f"agent: {reason}")) for name in colours) == 1


HALTS = {
    *(limit.reason for limit in LIMITS.values()),
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    KILLED_STOP_REASON,
}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_what_happens_from_outside_is_marked(board: dict[str, Any]) -> None:
    """Halts can be switched on where they are not what the dashboard draws anyway."""
    marks = {each["name"]: each for each in board["annotations"]["list"]}
    assert set(marks) == {"Deployments", "Policy files", "Kills", "Halts"}
    assert all(each["datasource"] == DATASOURCE for each in marks.values())
    off = [name for name, each in marks.items() if not each["enable"]]
    assert off == (["Halts"] if board["uid"] == "otel-limits-agents" else [])


@pytest.mark.parametrize("target", TARGETS)
def test_a_query_uses_the_data_source_and_names_what_it_draws(target: dict[str, Any]) -> None:
    """Several queries of a panel have different letters, and legends only labels that are kept."""
    assert target["datasource"] == DATASOURCE
    for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
        assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", target["expr"]), label


@pytest.mark.parametrize("target", TARGETS)
def test_a_query_selects_where_from(target: dict[str, Any]) -> None:
    """target-job-rule, target-instance-rule: in each of its selectors, and none goes unseen."""
    selectors = SELECTOR.findall(target["expr"])
    assert len(selectors) == len(re.findall(r"\botel_limits_\w+", target["expr"])) >= 1
    for _, matchers, _ in selectors:
        for label in PLACE:
            assert f'{label}=~"${label}"' in matchers


@pytest.mark.parametrize("target", TARGETS)
def test_a_query_selects_the_environment(target: dict[str, Any]) -> None:
    """It is a label of one metric only, with which every other is matched."""
    assert 'deployment_environment=~"$environment"' in target["expr"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_counter_is_only_seen_through_its_growth(target: dict[str, Any]) -> None:
    """target-counter-agg-rule, but that `last_over_time` of now and before is one more way.

    `delta()` is taken from an increase, which leaves what the counter had when it began again.
    """
    ways = ("last_over_time", "max_over_time", "min_over_time", "increase", "resets", "delta")
    expr = target["expr"]
    for found in SELECTOR.finditer(expr):
        if SERIES[found[1]].kind in {"counter", "histogram"}:
            assert found[3], found[0]
            assert expr[: found.start()].endswith(tuple(f"{way}(" for way in ways))


@pytest.mark.parametrize("target", TARGETS)
def test_growth_is_of_the_whole_range_or_of_one_step(target: dict[str, Any]) -> None:
    """So that steps side by side add up; or of the last hour, against one of the last day."""
    for _, _, over in SELECTOR.findall(target["expr"]):
        assert over in {"", "$__range", "$__interval", "1h", "1d"}


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_nothing_asks_what_there_was_at_one_moment(expr: str) -> None:
    """`x offset 15m` is empty after a scrape that failed then: old counts look like new ones."""
    for found in SELECTOR.finditer(expr):
        assert found[3] or not expr[found.end() :].lstrip().startswith("offset"), found[0]


@pytest.mark.parametrize("panel", PANELS)
def test_a_step_is_never_shorter_than_two_scrapes(panel: dict[str, Any]) -> None:
    """Each needs a sample of its own; a Prometheus left alone scrapes once a minute."""
    if any("[$__interval]" in target["expr"] for target in panel["targets"]):
        assert panel["interval"] == "2m"


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_a_query_uses_metrics_and_labels_that_exist(expr: str) -> None:
    """What no process emits would be an empty panel, or an alert that never fires."""
    for name, matchers, _ in SELECTOR.findall(re.sub(r"\w+:otel_limits_[\w:]+", "recorded", expr)):
        assert name in SERIES
        for label in re.findall(r"(\w+)=", matchers):
            assert label in {*PLACE, "le", *SERIES[name].labels}, (name, label)


def test_every_metric_is_shown_or_alerted_on() -> None:
    """What nobody looks at need not be exported."""
    text = "".join(path.read_text("utf-8") for path in (*COMMITTED.glob("*.json"), RULES))
    unseen = {spec.name for spec in METRICS if spec.name not in text}
    assert unseen == {"otel_limits_cycles_total"}  # an event loop's own number, for debugging


@pytest.mark.parametrize("find", RELEASES)
def test_promtool_can_parse_every_query(tmp_path: Path, find: Find) -> None:
    """target-promql-rule: with Grafana's variables filled in, each is a rule that is valid."""
    rules = [
        {"record": f"query:{number}", "expr": filled(expr)}
        for number, expr in enumerate(
            [*(target["expr"] for target in QUERIES.values()), *MARKS.values()]
        )
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}), "utf-8")
    done = subprocess.run(
        [find("promtool"), "check", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def filled(expr: str) -> str:
    """Put something in the place of Grafana's variables."""
    values = {
        "__range_s": "3600",
        "__range": "1h",
        "__interval": "2m",
        "__interval_ms": "120000",
    }
    return re.sub(r"\$(\w+)", lambda found: values.get(found[1], ".*"), expr)
