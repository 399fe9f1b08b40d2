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

from otel_limits.observers.instruments import METRICS
from tests.dashboards.servers import ROOT, RULES, program

COMMITTED = ROOT / "dashboards/grafana/dashboards"
BOARDS = {path.stem: json.loads(path.read_text("utf-8")) for path in COMMITTED.glob("*.json")}
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
QUERIES = {
    f"{name}: {panel['title']}: {target['refId']}": target
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", ())
}
TARGETS = [pytest.param(target, id=name) for name, target in QUERIES.items()]
EXPRESSIONS = [
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
SELECTOR = re.compile(r"(otel_limits_\w+)(?:{([^}]*)})?(?:\[([^\]]+)\])?")


def test_the_committed_dashboards_are_those_of_the_code(tmp_path: Path) -> None:
    """Run `python -m dashboards.build` when this fails."""
    if sys.version_info < (3, 11):
        pytest.skip("grafana-foundation-sdk needs Python 3.11.")
    command = [sys.executable, "-m", "dashboards.build", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)

    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == len(BOARDS) + 2  # rules, and the alert that Grafana manages
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
@pytest.mark.parametrize("name", ["job", "instance", "agent"])
def test_a_label_is_a_variable(board: dict[str, Any], name: str) -> None:
    """template-job-rule, template-instance-rule, template-on-time-change-reload-rule."""
    variable = variables(board)[name]
    assert variable["type"] == "query"
    assert variable["datasource"] == DATASOURCE
    assert variable["label"] == name.capitalize()
    assert variable["multi"]
    assert variable["includeAll"]
    assert variable["allValue"] == ".+"
    assert variable["refresh"] == 2


def test_models_can_be_chosen_where_money_is_spent() -> None:
    """The spend dashboard has a variable for them."""
    assert "model" in variables(BOARDS["token-spend"])


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_variable_asks_for_a_label_that_exists(board: dict[str, Any]) -> None:
    """template-label-promql-rule; `job` and `instance` come from the scrape."""
    for variable in variables(board).values():
        if variable["type"] == "query":
            found = re.fullmatch(
                r"label_values\((\w+)(?:{.*})?, (\w+)\)", variable["query"]["query"]
            )
            assert found is not None
            assert found[2] in {"job", "instance", *SERIES[found[1]].labels}


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    """panel-title-description-rule, panel-units-rule, panel-datasource-rule, panel-no-targets."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == DATASOURCE
    assert panel["targets"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_query_uses_the_data_source_and_names_what_it_draws(target: dict[str, Any]) -> None:
    """Several queries of a panel have different letters, and legends only labels that are kept."""
    assert target["datasource"] == DATASOURCE
    for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
        assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", target["expr"]), label


@pytest.mark.parametrize("target", TARGETS)
def test_a_query_selects_job_and_instance(target: dict[str, Any]) -> None:
    """target-job-rule, target-instance-rule: in each of its selectors."""
    for _, matchers, _ in SELECTOR.findall(target["expr"]):
        assert 'job=~"$job"' in matchers
        assert 'instance=~"$instance"' in matchers


@pytest.mark.parametrize("target", TARGETS)
def test_a_counter_is_only_seen_through_its_growth(target: dict[str, Any]) -> None:
    """target-counter-agg-rule, but that `last_over_time` of now and before is one more way."""
    expr = target["expr"]
    for found in SELECTOR.finditer(expr):
        if SERIES[found[1]].kind in {"counter", "histogram"}:
            assert found[3], found[0]
            assert expr[: found.start()].endswith(
                ("last_over_time(", "max_over_time(", "min_over_time(", "increase(", "resets(")
            )


@pytest.mark.parametrize("target", TARGETS)
def test_growth_is_of_the_whole_range_or_of_one_step(target: dict[str, Any]) -> None:
    """So that steps side by side add up; what was there before may have been silent for an hour."""
    for _, _, over in SELECTOR.findall(target["expr"]):
        assert over in {"", "$__range", "$__interval", "1h"}


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
            assert label in {"job", "instance", "le", *SERIES[name].labels}, (name, label)


def test_every_metric_is_shown_or_alerted_on() -> None:
    """What nobody looks at need not be exported."""
    text = "".join(path.read_text("utf-8") for path in (*COMMITTED.glob("*.json"), RULES))
    unseen = {spec.name for spec in METRICS if spec.name not in text}
    assert unseen == {"otel_limits_cycles_total"}  # an event loop's own number, for debugging


def test_promtool_can_parse_every_query(tmp_path: Path) -> None:
    """target-promql-rule: with Grafana's variables filled in, each is a rule that is valid."""
    rules = [
        {"record": f"query:{number}", "expr": filled(target["expr"])}
        for number, target in enumerate(QUERIES.values())
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}), "utf-8")
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(path)],
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
    return re.sub(r"\$(\w+)", lambda found: values.get(found[1], ".+"), expr)
