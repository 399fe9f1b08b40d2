"""How every panel looks: the defaults, once."""

from __future__ import annotations

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
        timeseries,
    )

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

DATASOURCE: Final = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

COLORS: Final = {
    "max_turns": "red",
    "max_iterations": "orange",
    "loop_detected": "purple",
    "end_turn": "green",
}
"""A reason has one colour wherever it is shown."""

SHORT, SHARE, USD, SECONDS = "short", "percentunit", "currencyUSD", "s"


SHORTEST_STEP: Final = "2m"
"""Two scrapes of a Prometheus that is left at its one per minute: no step can do with less."""


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
        .line_width(1.0)
        .fill_opacity(70.0)
        .stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        .interval(SHORTEST_STEP)
        .decimals(0)
    )
    return _over_time(panel, Words(title, description, unit), targets, **layout)


def number(title: str, description: str, unit: str, query: str) -> Any:
    """Show one number for the time range, in a small panel: six of them are a row."""
    panel = (
        _counting(stat.Panel(), unit)
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(_last_value())
        .thresholds(_one_colour("blue"))
    )
    words = Words(title, description, unit)
    return _finish(panel, words, _queries([Target(query)], "instant"), width=4, height=4)


def ranking(title: str, description: str, unit: str, target: Target, **layout: Any) -> Any:
    """Show the largest values of the time range."""
    panel = (
        _counting(bargauge.Panel(), unit)
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .reduce_options(_last_value())
        .min(0)
        .thresholds(_one_colour("blue"))
    )
    return _finish(panel, Words(title, description, unit), _queries([target], "instant"), **layout)


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
    )
    return _finish(panel, Words(title, description, SHORT), _queries([target], "heatmap"), **layout)


def listing(title: str, description: str, unit: str, target: Target, **layout: Any) -> Any:
    """Show labels and values as a table."""
    hidden = {"Time": True, "job": True, "instance": True}
    panel = table.Panel().with_transformation(
        models.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
    )
    return _finish(panel, Words(title, description, unit), _queries([target], "table"), **layout)


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
    )
    for name, colour in COLORS.items():
        panel = panel.override_by_name(
            name,
            [models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})],
        )
    return _finish(panel, words, _queries(targets, "range"), **layout)


def _finish(
    panel: Any, words: Words, queries: list[Any], *, width: int = 12, height: int = 8
) -> Any:
    """Give a panel its words, queries and size; 12 of 24 columns are half a row."""
    return (
        panel.title(words.title)
        .description(words.description)
        .unit(words.unit)
        .datasource(DATASOURCE)
        .targets(queries)
        .span(width)
        .height(height)
    )


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


def _one_colour(colour: str) -> Any:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=None, color=colour)])
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


def variable(name: str, metric: str, description: str) -> Any:
    """Offer the values of a label."""
    query = f"label_values({metric}, {name})"
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .description(description)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name, "qryType": 1})
        .multi(True)  # noqa: FBT003  the SDK's signature
        .include_all(True)  # noqa: FBT003  the SDK's signature
        .all_value(".+")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
