"""How every panel looks: the defaults, once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

with warnings.catch_warnings():  # the SDK prefers the next schema, which few Grafanas read yet
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import (
        bargauge,
        dashboard,
        heatmap,
        stat,
        table,
        text,
        timeseries,
    )

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models
from grafana_foundation_sdk.models import text as text_models

DATASOURCE: Final = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

COLOURS: Final = {
    "max_turns": "#c4162a",
    "max_iterations": "#ff780a",
    "loop_detected": "#a352cc",
    "max_token_budget": "#3274d9",
    "max_input_tokens": "#5794f2",
    "max_output_tokens": "#8ab8ff",
    "max_cost_usd": "#e0226e",
    "max_duration": "#b07a4f",
    "max_model_calls": "#19a2a8",
    "max_tool_calls": "#6ed0e0",
    "quota_exceeded": "#f2cc0c",
    "quota_unavailable": "#8f7a00",
    "killed": "#e02f44",
    "end_turn": "#56a64b",
    "success": "#73bf69",
    "error": "#6e7687",
    "aborted": "#b0b0b8",
}
"""A reason has one colour wherever it is shown: what ends by itself is green or grey. So has how a
tool call ends."""

SHORT, SHARE, USD, SECONDS = "short", "percentunit", "currencyUSD", "s"


SHORTEST_STEP: Final = "2m"
"""Two scrapes of a Prometheus that is left at its one per minute: no step can do with less."""


AGENTS, SPEND, HEALTH = "otel-limits-agents", "otel-limits-spend", "otel-limits-health"
"""What Grafana knows the dashboards by."""

LINKS: Final = {
    "agent": ((AGENTS, "Limits of this agent"), (SPEND, "Spend of this agent")),
    "reason": ((AGENTS, "Halts of this reason"),),
    "model": ((SPEND, "Spend of this model"),),
    "quota": ((SPEND, "This quota"),),
}
"""Where a label leads to: the dashboard with nothing else in it."""

KEPT: Final = ("datasource", "environment", "cluster", "namespace", "job", "instance")
"""Variables that a link takes along."""

Steps: TypeAlias = tuple[tuple[float | None, str], ...]
"""From which value on there is which colour; the first has none and begins below all."""

PLAIN: Final[Steps] = ((None, "blue"),)


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel."""

    query: str
    legend: str = ""
    exemplars: bool = False


Form: TypeAlias = Literal["range", "instant", "heatmap", "table"]
"""How Prometheus is asked, and how Grafana reads the answer."""


class Words(NamedTuple):
    """What a panel says about itself."""

    title: str
    description: str
    unit: str


def lines(title: str, description: str, unit: str, *targets: Target, **layout: Any) -> Any:
    """Draw values over time."""
    panel = (
        timeseries.Panel()
        .draw_style(common.GraphDrawStyle.LINE)
        .line_width(1.0)
        .fill_opacity(8.0)
        .show_points(common.VisibilityMode.AUTO)
        .span_nulls(False)  # noqa: FBT003  the SDK's signature
        .interval(SHORTEST_STEP)
    )
    return _over_time(panel, Words(title, description, unit), targets, **layout)


def bars(title: str, description: str, unit: str, *targets: Target, **layout: Any) -> Any:
    """Draw counts over time, on top of each other."""
    panel = (
        timeseries.Panel()
        .draw_style(common.GraphDrawStyle.BARS)
        .bar_alignment(common.BarAlignment.BEFORE)  # each counts what came before its time
        .line_width(1.0)
        .fill_opacity(70.0)
        .stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        .interval(SHORTEST_STEP)
        .decimals(0)
    )
    return _over_time(panel, Words(title, description, unit), targets, **layout)


def number(
    title: str,
    description: str,
    unit: str,
    query: str,
    *,
    steps: Steps = PLAIN,
    width: int = 4,
) -> Any:
    """Show one number in a small panel: six of them are a row."""
    panel = (
        _counting(stat.Panel(), unit)
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(_last_value())
        .thresholds(_thresholds(steps))
        .no_value("0")
    )
    words = Words(title, description, unit)
    return _finish(panel, words, [Target(query)], "instant", width=width, height=4)


def ranking(
    title: str,
    description: str,
    unit: str,
    target: Target,
    *,
    steps: Steps = PLAIN,
    **layout: Any,
) -> Any:
    """Show the largest values, or the ones nearest to where the colour changes."""
    panel = (
        _counting(bargauge.Panel(), unit)
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .reduce_options(_last_value())
        .min(0)
        .thresholds(_thresholds(steps))
        .no_value("None")
    )
    words = Words(title, description, unit)
    return _finish(_coloured(panel, target), words, [target], "instant", **layout)


def spread(title: str, description: str, unit: str, target: Target, **layout: Any) -> Any:
    """Show the buckets of a histogram over time."""
    panel = (
        heatmap.Panel()
        .calculate(False)  # noqa: FBT003  the SDK's signature
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
        )
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_gap(1)
        .interval(SHORTEST_STEP)
        .no_value("None")
    )
    return _finish(panel, Words(title, description, SHORT), [target], "heatmap", **layout)


def listing(title: str, description: str, unit: str, target: Target, **layout: Any) -> Any:
    """Show labels and values as a table."""
    hidden = {"Time": True, "job": True, "instance": True}
    panel = (
        table.Panel()
        .with_transformation(
            models.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
        )
        .no_value("None")
    )
    return _finish(panel, Words(title, description, unit), [target], "table", **layout)


def note(title: str, description: str, content: str, *, width: int = 24, height: int = 4) -> Any:
    """Show a text, with what the variables say in their places."""
    return (
        text.Panel()
        .title(title)
        .description(description)
        .mode(text_models.TextMode.MARKDOWN)
        .content(content)
        .span(width)
        .height(height)
    )


def row(title: str) -> Any:
    """Begin a row of panels."""
    return dashboard.Row(title)


def _over_time(panel: Any, words: Words, targets: Sequence[Target], **layout: Any) -> Any:
    panel = (
        panel.legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.RIGHT)
            .show_legend(True)  # noqa: FBT003  the SDK's signature
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .min(0)
        .no_value("0")
    )
    for target in targets:
        panel = _coloured(panel, target)
    return _finish(panel, words, targets, "range", **layout)


def _coloured(panel: Any, target: Target) -> Any:
    """Give each end its colour, also where it stands behind the name of an agent."""
    if not re.search(r"{{(reason|limit|status)}}$", target.legend) and target.legend not in COLOURS:
        return panel
    for name, colour in COLOURS.items():
        fixed = models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
        panel = panel.override_by_regexp(f"/(^|: ){name}$/", [fixed])
    return panel


def _finish(
    panel: Any,
    words: Words,
    targets: Sequence[Target],
    form: Form,
    *,
    width: int = 12,
    height: int = 8,
) -> Any:
    """Give a panel its words, queries and size; 12 of 24 columns are half a row."""
    links = _links(targets, form)
    panel = panel.data_links(links) if links else panel
    return (
        panel.title(words.title)
        .description(words.description)
        .unit(words.unit)
        .datasource(DATASOURCE)
        .targets(_queries(targets, form))
        .span(width)
        .height(height)
    )


def _links(targets: Sequence[Target], form: Form) -> list[Any]:
    """Lead from each agent, reason, model and quota to the dashboard of it alone."""
    # A table has no legend: its columns are what its query keeps.
    shown = " ".join(target.legend or target.query.partition("(")[2][:40] for target in targets)
    labels = [label for label in LINKS if re.search(rf"\b{label}\b", shown)]
    value = "__data.fields" if form == "table" else "__field.labels"
    kept = "&".join(f"${{{name}:queryparam}}" for name in KEPT)
    # Where no format is named, Grafana leaves the `&` of a name as it is, and its `+`, a blank.
    return [
        dashboard.DashboardLink(title).url(
            f"/d/{uid}?${{__url_time_range}}&{kept}&var-{label}=${{{value}.{label}:percentencode}}"
        )
        for label in labels
        for uid, title in LINKS[label]
    ]


def _queries(targets: Sequence[Target], form: Form) -> list[Any]:
    return [
        _query(ref_id, target, form) for ref_id, target in zip("ABCDEFGH", targets, strict=False)
    ]


def _query(ref_id: str, target: Target, form: Form) -> Any:
    query = (
        prometheus.Dataquery()
        .ref_id(ref_id)
        .datasource(DATASOURCE)
        .expr(target.query)
        .legend_format(target.legend or "__auto")
        .editor_mode(prometheus_models.QueryEditorMode.CODE)
    )
    query = query.instant() if form in ("instant", "table") else query.range()
    if form in ("heatmap", "table"):
        query = query.format(prometheus_models.PromQueryFormat(form))
    return query.exemplar(True) if target.exemplars else query  # noqa: FBT003  the SDK's signature


def _counting(panel: Any, unit: str) -> Any:
    """Show counts whole: Prometheus extrapolates increases to fractions."""
    return panel.decimals(0) if unit == SHORT else panel


def _last_value() -> Any:
    return common_builders.ReduceDataOptions().calcs(["lastNotNull"])


def _thresholds(steps: Steps) -> Any:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in steps])
    )


def make_dashboard(uid: str, title: str, description: str, *variables: Any) -> Any:
    """Begin a dashboard that has the variables of all, and links to the others."""
    links = (
        dashboard.DashboardLink("otel-limits")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["otel-limits"])
        .include_vars(True)  # noqa: FBT003  the SDK's signature
        .keep_time(True)  # noqa: FBT003  the SDK's signature
    )
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["otel-limits"])
        .readonly()
        .time("now-6h", "now")
        .refresh("1m")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(links)
        .variables([_datasource_variable(), *variables])
    )


def _datasource_variable() -> Any:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def variable(name: str, metric: str, description: str, *, absent: bool = False) -> Any:
    """Offer the values of a label.

    Args:
        name: The label.
        metric: Where its values are looked up.
        description: What it says.
        absent: True for a label that a process may not have.
    """
    query = f"label_values({metric}, {name})"
    return (
        dashboard.QueryVariable(VARIABLES.get(name, name))
        .label(VARIABLES.get(name, name).capitalize())
        .description(description)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name, "qryType": 1})
        .multi(True)  # noqa: FBT003  the SDK's signature
        .include_all(True)  # noqa: FBT003  the SDK's signature
        .all_value(".*" if absent else ".+")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


VARIABLES: Final = {"deployment_environment": "environment"}
"""Variables that are called by a shorter name than their label."""


def annotation(name: str, colour: str, expr: str, title: str, *, shown: bool = True) -> Any:
    """Mark moments on every panel over time."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(shown)
        .icon_color(colour)
        .expr(expr)
        .step(SHORTEST_STEP)
        .title_format(title)
    )
