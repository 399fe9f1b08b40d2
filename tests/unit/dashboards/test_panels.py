"""The rules of Grafana's dashboard-linter, and our own, without exclusions."""

from __future__ import annotations

import colorsys
import json
import re
from typing import Any, Final

import pytest
import yaml

from otel_limits.core.limits import (
    KILLED_STOP_REASON,
    LIMITS,
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
)
from otel_limits.observers.metrics import METRICS
from tests.dashboards.servers import RULES
from tests.paths import ROOT
from tests.rules import over

COMMITTED = ROOT / "dashboards/grafana/dashboards"
BOARDS = {path.stem: json.loads(path.read_text("utf-8")) for path in COMMITTED.glob("*.json")}
PANELS = {
    f"{name}: {panel['title']}": panel
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] not in {"row", "text"}
}
QUERIES = {
    f"{name}: {panel['title']}: {target['refId']}": target
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", ())
}
MARKS = {
    f"{name}: {each['name']}": each["expr"]
    for name, board in BOARDS.items()
    for each in board["annotations"]["list"]
}
EXPRESSIONS = {
    **MARKS,
    **{name: target["expr"] for name, target in QUERIES.items()},
    **{
        rule.get("record") or rule["alert"]: rule["expr"]
        for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"]
        for rule in group["rules"]
    },
}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

UNITS = {
    *("short", "locale", "percentunit", "currencyUSD", "s"),
    *("suffix:invocations", "count:tokens"),
}
"""Grafana units in use: known ones, and two custom ones."""

SUFFIXES = ("", "_bucket", "_sum", "_count")
SERIES = {
    f"{spec.name}{suffix}": spec
    for spec in METRICS
    for suffix in (SUFFIXES[1:] if spec.kind == "histogram" else SUFFIXES[:1])
}
TARGET_LABELS = {"cluster", "namespace", "job", "instance"}
"""Labels of a scrape target."""

BATCH: Final = "batch"
"""A label that users add to the targets of batch jobs."""

PLAIN = r"otel_limits_\w+(?:{[^}]*})?"
SELECTOR = re.compile(r"(otel_limits_\w+)(?:{([^}]*)})?(?:\[([^\]]+)\])?")


@over(BOARDS, "board")
def test_dashboard_can_be_provisioned(board: dict[str, Any]) -> None:
    """It has a UID but no ID, is read-only in Grafana and uses the classic schema."""
    assert re.fullmatch(r"otel-limits-[a-z]+", board["uid"])
    assert board.get("id") is None
    assert board["editable"] is False
    assert board["schemaVersion"] == 42
    assert board["tags"] == ["otel-limits"]


def test_dashboard_uids_are_unique() -> None:
    """One would replace the other."""
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS) == 3


@over(BOARDS, "board")
def test_panels_do_not_share_number_or_position(board: dict[str, Any]) -> None:
    """Links refer to panels by number, and panels must not overlap."""
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@over(BOARDS, "board")
def test_data_source_is_a_variable(board: dict[str, Any]) -> None:
    """template-datasource-rule."""
    variable = variables(board)["datasource"]
    assert variable["type"] == "datasource"
    assert variable["query"] == "prometheus"
    assert variable["label"] == "Data source"


def variables(board: dict[str, Any]) -> dict[str, Any]:
    """Variables of a dashboard by name."""
    return {each["name"]: each for each in board["templating"]["list"]}


@pytest.mark.parametrize("name", ["cluster", "namespace", "job", "instance", "agent"])
@over(BOARDS, "board")
def test_label_is_a_variable(board: dict[str, Any], name: str) -> None:
    """template-job-rule, template-instance-rule, template-on-time-change-reload-rule."""
    variable = variables(board)[name]
    assert variable["type"] == "query"
    assert variable["datasource"] == DATASOURCE
    assert variable["label"] == name.capitalize()
    assert variable["multi"]
    assert variable["includeAll"]
    # "All" includes processes without a target label.
    assert variable["allValue"] == (".+" if name == "agent" else ".*")
    assert variable["refresh"] == 2


@over(BOARDS, "board")
def test_variables_are_used_and_defined(board: dict[str, Any]) -> None:
    """Each is used by a panel or another variable, and none is missing."""
    text = json.dumps([board["panels"], board["templating"], board["annotations"]])
    known = set(variables(board))
    assert known - {"datasource"} <= set(re.findall(r"\$\{?(\w+)", text))
    queries = json.dumps([each.get("targets") for each in board["panels"]])
    assert set(re.findall(r"\$(?!__)([a-z]\w+)", queries)) <= known


@over(BOARDS, "board")
def test_variable_uses_an_existing_label(board: dict[str, Any]) -> None:
    """template-label-promql-rule; `job` and `instance` come from the scrape."""
    for variable in variables(board).values():
        if variable["type"] == "query":
            found = re.fullmatch(
                r"label_values\((\w+)(?:{.*})?, (\w+)\)", variable["query"]["query"]
            )
            assert found is not None
            assert found[2] in {*TARGET_LABELS, *SERIES[found[1]].labels}


@over(PANELS, "panel")
def test_panel_has_title_description_unit_and_query(panel: dict[str, Any]) -> None:
    """panel-title-description-rule, panel-units-rule, panel-datasource-rule, panel-no-targets."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == DATASOURCE
    assert panel["targets"]


@over(PANELS, "panel")
def test_panel_without_data_shows_0_or_none(panel: dict[str, Any]) -> None:
    """The default, "No data", would look like a failure."""
    no_value = panel["fieldConfig"]["defaults"]["noValue"]
    if panel["title"].startswith("Projected"):
        assert no_value == "Needs a day of data"
        return
    assert no_value == ("None" if panel["type"] in {"bargauge", "table"} else "0")


@over(PANELS, "panel")
def test_names_in_panels_link_to_filtered_dashboards(panel: dict[str, Any]) -> None:
    """Every agent, reason, model and quota is a link to a dashboard with that variable."""
    urls = [link["url"] for link in panel["fieldConfig"]["defaults"].get("links", ())]
    legends = "".join(target["legendFormat"] for target in panel["targets"])
    named = {name for name in LINKED if f"{{{{{name}}}}}" in legends}
    linked = {
        name
        for name in LINKED
        for url in urls
        # This format escapes the `&` of an agent named R&D.
        if re.search(rf"&var-{name}=\$\{{__[\w.]+\.{name}:percentencode\}}$", url)
    }
    assert named <= linked
    for url in urls:
        (board,) = (each for each in BOARDS.values() if f"/d/{each['uid']}?" in url)
        assert "${__url_time_range}" in url
        for name in re.findall(r"var-(\w+)=|\${(\w+):queryparam}", url):
            assert set(name) - {""} <= set(variables(board))


LINKED = ("agent", "reason", "model", "quota")


def test_reason_has_the_same_colour_on_every_panel() -> None:
    """Each reason for a halt has a colour, no two share one, and none looks like a threshold."""
    found = {
        (override["matcher"]["options"], each["value"]["fixedColor"])
        for board in BOARDS.values()
        for panel in board["panels"]
        for override in panel.get("fieldConfig", {}).get("overrides", ())
        for each in override["properties"]
    }
    colours = dict(found)
    assert len(colours) == len(found) == len(set(colours.values()))
    assert not [colour for colour in colours.values() if is_red_or_orange(colour)]
    for reason in {*HALTS, *(set(LIMITS) - PER_TOOL)}:
        assert sum(bool(re.search(name.strip("/"), f"agent: {reason}")) for name in colours) == 1


def is_red_or_orange(colour: str) -> bool:
    """Return whether a color is vivid and between red and orange."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, saturation, _ = colorsys.rgb_to_hsv(red, green, blue)
    return saturation > 0.6 and not 40 / 360 < hue < 325 / 360


@over(PANELS, "panel")
def test_plain_numbers_on_an_axis_have_a_name(panel: dict[str, Any]) -> None:
    """Percent, USD and seconds are units; a plain number counts something."""
    defaults = panel["fieldConfig"]["defaults"]
    if panel["type"] == "timeseries" and defaults["unit"] in {"short", "locale"}:
        assert defaults["custom"]["axisLabel"]


@over(PANELS, "panel")
def test_reason_of_several_series_has_shades(panel: dict[str, Any]) -> None:
    """Two series of one color would look alike."""
    legends = {target["legendFormat"] for target in panel["targets"]}
    modes = {
        each["value"]["mode"]
        for override in panel["fieldConfig"].get("overrides", ())
        for each in override["properties"]
    }
    is_fixed = all(legend.startswith("{{reason}}") for legend in legends)
    assert modes <= ({"fixed"} if is_fixed else {"shades"})


PER_TOOL: Final = {"max_calls_per_tool"}
"""Limits without a utilization, as they refuse calls."""

HALTS = {
    *(limit.reason for limit in LIMITS.values()),
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    KILLED_STOP_REASON,
}


@over(BOARDS, "board")
def test_dashboard_has_annotations(board: dict[str, Any]) -> None:
    """Halts are off on the dashboard whose panels show them."""
    marks = {each["name"]: each for each in board["annotations"]["list"]}
    assert set(marks) == {"Deployments", "Policy files", "Kills", "Halts"}
    assert all(each["datasource"] == DATASOURCE for each in marks.values())
    off = [name for name, each in marks.items() if not each["enable"]]
    assert off == (["Halts"] if board["uid"] == "otel-limits-agents" else [])


@over(QUERIES, "target")
def test_legend_uses_labels_that_the_query_keeps(target: dict[str, Any]) -> None:
    """Otherwise the legend would be empty."""
    assert target["datasource"] == DATASOURCE
    for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
        assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", target["expr"]), label


@over(QUERIES, "target")
def test_query_filters_by_target_labels(target: dict[str, Any]) -> None:
    """target-job-rule, target-instance-rule, for every selector."""
    selectors = SELECTOR.findall(target["expr"])
    assert len(selectors) == len(re.findall(r"\botel_limits_\w+", target["expr"])) >= 1
    for _, matchers, _ in selectors:
        for label in TARGET_LABELS:
            assert f'{label}=~"${label}"' in matchers


COUNTERS = {name for name, spec in SERIES.items() if spec.kind in {"counter", "histogram"}}

RATE = re.compile(r"rate\((SELECTOR)\[\$__rate_interval\]\)".replace("SELECTOR", PLAIN))
TOTAL = re.compile(
    r"increase\((SELECTOR)\[(\S+)\](?P<ahead> offset -\2)?\)"
    r" and resets\(\1\[\2\](?P=ahead)?\) > 0"
    r"\s+or last_over_time\(\1\[\2\](?P=ahead)?\)"
    r" - last_over_time\(\1\[1h\](?(ahead)| offset \2)\) >= 0"
    r"\s+or last_over_time\(\1\[\2\](?P=ahead)?\)".replace("SELECTOR", PLAIN)
)


@over(EXPRESSIONS, "expr")
def test_counter_is_used_as_rate_or_total_only(expr: str) -> None:
    """target-counter-agg-rule, target-rate-interval-rule: one form for rates, one for totals."""
    others = TOTAL.sub("", RATE.sub("", expr))
    # The projected cost only checks whether there was any a day ago.
    others = re.sub(rf"count\(last_over_time\({PLAIN}\[6d\] offset 1d\)\)", "", others)
    # OtelLimitsUnpricedTokens only checks whether the job has any cost at all.
    others = others.replace("sum by (job) (otel_limits_cost_usd_total) > 0", "")
    assert not COUNTERS & set(re.findall(r"\botel_limits_\w+", others))


@over(QUERIES, "target")
def test_totals_are_of_a_range_or_of_a_step(target: dict[str, Any]) -> None:
    """A number counts up to now, and a step of a graph from its point on."""
    windows = {(window, bool(ahead)) for _, window, ahead in TOTAL.findall(target["expr"])}
    is_number = target.get("instant", False)
    ranges = {("$__range", False), ("1h", False), ("1d", False)}
    assert windows <= (ranges if is_number else {("$__interval", True)})


@over(EXPRESSIONS, "expr")
def test_query_is_short(expr: str) -> None:
    """At most two terms; besides one total each, they are at most 700 characters."""
    terms = re.split(r"\bsum\b", expr)
    assert len(terms) <= 3
    for term in terms:
        assert len(TOTAL.sub("", term)) <= 700
        assert len(TOTAL.findall(term)) <= 1


@over(PANELS, "panel")
def test_step_covers_several_scrapes(panel: dict[str, Any]) -> None:
    """Prometheus scrapes once a minute by default, and a rate needs two samples."""
    if any("[$__rate_interval]" in target["expr"] for target in panel["targets"]):
        assert panel["interval"] in {"5m", "15m"}


@pytest.mark.parametrize(
    ("name", "most"), [("agent-limits", 18), ("token-spend", 18), ("health", 12)]
)
def test_dashboard_has_few_panels(name: str, most: int) -> None:
    """Each panel answers a question its reader came with."""
    assert sum(panel["type"] != "row" for panel in BOARDS[name]["panels"]) <= most


@over(EXPRESSIONS, "expr")
def test_query_uses_existing_metrics_and_labels(expr: str) -> None:
    """Otherwise a panel is empty, or an alert never fires."""
    for name, matchers, _ in SELECTOR.findall(re.sub(r"\w+:otel_limits_[\w:]+", "recorded", expr)):
        assert name in SERIES
        for label in re.findall(r"(\w+)!?=", matchers):
            assert label in {*TARGET_LABELS, BATCH, "le", *SERIES[name].labels}, (name, label)


def test_metrics_without_a_panel_or_alert_are_known() -> None:
    """They are for custom queries."""
    text = "".join(path.read_text("utf-8") for path in (*COMMITTED.glob("*.json"), RULES))
    unused = {spec.name.removeprefix("otel_limits_") for spec in METRICS if spec.name not in text}
    assert unused == {
        "cycles_total",
        "label_overflows_total",
        "lost_tasks_total",
        "observer_lag_seconds",
        "overshoot_tokens",
        "quota_wait_seconds",
        "synthetic_messages_total",
        "unknown_usage_calls_total",
        "stated_cost_differences_total",
        "refused_stated_costs_total",
        "warnings_total",
    }
