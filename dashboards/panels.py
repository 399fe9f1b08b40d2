"""Panel types, variables and annotations, with their defaults."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

with warnings.catch_warnings():  # the SDK prefers schema v2, which few Grafana releases read
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import (
        bargauge,
        dashboard,
        stat,
        table,
        text,
        timeseries,
    )

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models
from grafana_foundation_sdk.models import text as text_models

DATASOURCE: Final = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

SHARED: Final = "(tree_|conversation_)?"
"""Prefix of a limit that several invocations share: it has the same reason."""

COLOURS: Final = {
    "max_turns": "#2f6fd6",
    "max_iterations": "#5b57d1",
    r"(loop_detected|max_(consecutive|identical|repeated|no_progress)_\w+)": "#a352cc",
    "max_token_budget": "#0f8f94",
    "max_input_tokens": "#2bb3c0",
    "max_output_tokens": "#7fd6de",
    "max_cost_usd": "#c93c9d",
    "max_duration(_seconds)?": "#a07855",
    "max_model_calls": "#6b4fa0",
    "max_tool_calls": "#c3a5e8",
    "quota_exceeded": "#d9b400",
    "quota_unavailable": "#8f7a00",
    "killed": "#f08fc0",
    "end_turn": "#56a64b",
    "error": "#6e7687",
    "aborted": "#b0b0b8",
    "evicted": "#a89f91",
}
"""A stop reason, or its limit, has the same color on every panel: natural ends are green or grey.

Orange and red only mean that a value is above a threshold.
"""

BAR_TIMES: Final = (
    "Bars begin at full steps: the first may begin before the selected range, and the last of a "
    "past range may end after it."
)

ESTIMATED: Final = "Estimated within the buckets of a histogram."

MARKED: Final = {" refused": "#a9b4c4", " would-be": "#8fb3a0"}
"""Of tool calls that a limit refused, and of halts that the action observe left out, by the end of
their names.
"""

SHORT, SHARE, USD, SECONDS = "short", "percentunit", "currencyUSD", "s"
COUNT: Final = "locale"
"""Of whole events: all digits, as neighboring panels must show the same number."""
INVOCATIONS, TOKENS = "suffix:invocations", "count:tokens"

MIN_STEP: Final = "5m"
"""Five scrapes at the default scrape interval of Prometheus, one minute."""
LONG_STEP: Final = "15m"
"""For percentiles and shares, which need some invocations in each step."""

HASHED_KEYS: Final = (
    "A key such as #1a2b3c is the hash of a name: `otel-limits audit whois NAME` shows the hashes "
    "of a name."
)

AGENTS, SPEND, HEALTH = "otel-limits-agents", "otel-limits-spend", "otel-limits-health"
"""UIDs of the dashboards."""

LINKS: Final = {
    "agent": ((AGENTS, "Limits of this agent"), (SPEND, "Spend of this agent")),
    "reason": ((AGENTS, "Halts with this reason"),),
    "model": ((SPEND, "Spend of this model"),),
    "quota": ((SPEND, "This quota"),),
}
"""Links from the value of a label to dashboards filtered by it."""

KEPT: Final = ("datasource", "cluster", "namespace", "job", "instance")
"""Variables that a link preserves."""

Steps: TypeAlias = tuple[tuple[float | None, str], ...]
"""Thresholds and their colours; the first has no value."""

PLAIN: Final[Steps] = ((None, "blue"),)


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel."""

    query: str
    legend: str = ""
    exemplars: bool = False


Form: TypeAlias = Literal["range", "instant", "table"]
"""Kind of query, and the format of its result."""


class Heading(NamedTuple):
    """Title, description and unit of a panel."""

    title: str
    description: str
    unit: str


def lines(
    title: str,
    description: str,
    unit: str,
    *targets: Target,
    axis: str = "",
    step: str = MIN_STEP,
    is_whole: bool = False,
    **layout: Any,
) -> Any:
    """Make a graph of values over time; `axis` says what a plain number counts."""
    panel = (
        timeseries.Panel()
        .draw_style(common.GraphDrawStyle.LINE)
        .line_width(1.0)
        .fill_opacity(8.0)
        .show_points(common.VisibilityMode.AUTO)
        .span_nulls(False)  # noqa: FBT003  the SDK's signature
        .axis_label(axis)
        .interval(step)
    )
    if is_whole:
        panel = panel.decimals(0)
    calcs = ["lastNotNull", "max"]
    return _over_time(panel, Heading(title, description, unit), targets, calcs, **layout)


def bars(title: str, description: str, counted: str, *targets: Target, **layout: Any) -> Any:
    """Make a graph of stacked counts over time; `counted` is the label of its axis."""
    panel = (
        timeseries.Panel()
        .draw_style(common.GraphDrawStyle.BARS)
        .bar_alignment(common.BarAlignment.AFTER)  # a bar counts the events after its time
        .line_width(1.0)
        .fill_opacity(70.0)
        .stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        .axis_label(counted)
        .interval(MIN_STEP)
        .decimals(0)
    )
    heading = Heading(title, f"{description} {BAR_TIMES}", COUNT)
    return _over_time(panel, heading, targets, ["sum"], **layout)


def number(
    title: str,
    description: str,
    unit: str,
    query: str,
    *,
    steps: Steps = PLAIN,
    nothing: str = "0",
    **layout: Any,
) -> Any:
    """Make a small panel with one number; `nothing` replaces one that does not exist."""
    panel = (
        _counting(stat.Panel(), unit)
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(steps))
        .no_value(nothing)
    )
    if unit == INVOCATIONS:
        panel = panel.mappings(_texts({"1": "1 invocation"}))
    heading = Heading(title, description, unit)
    return _finish(panel, heading, [Target(query)], "instant", **{"width": 4, "height": 4} | layout)


def ranking(
    title: str,
    description: str,
    unit: str,
    target: Target,
    *,
    steps: Steps = PLAIN,
    **layout: Any,
) -> Any:
    """Make horizontal bars of the largest values."""
    panel = (
        _counting(bargauge.Panel(), unit)
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .min(0)
        .thresholds(_thresholds(steps))
        .no_value("None")
    )
    heading = Heading(title, description, unit)
    return _finish(_coloured(panel, target), heading, [target], "instant", **layout)


def listing(
    title: str,
    description: str,
    unit: str,
    target: Target,
    *,
    value: str,
    shown: Mapping[str, str] | None = None,
    **layout: Any,
) -> Any:
    """Make a table of labels and values.

    Args:
        title: Its title.
        description: Its description.
        unit: Unit of the values.
        target: Its query.
        value: Header of the values.
        shown: Text of a label → text that is shown instead.
        layout: Width and height.
    """
    hidden = {"Time": True, "job": True, "instance": True}
    panel = (
        table.Panel()
        .with_transformation(
            models.DataTransformerConfig(
                id_val="organize",
                options={"excludeByName": hidden, "renameByName": {"Value": value}},
            )
        )
        .no_value("None")
    )
    if shown:
        panel = panel.mappings(_texts(shown))
    return _finish(panel, Heading(title, description, unit), [target], "table", **layout)


def note(title: str, description: str, content: str, *, width: int = 24, height: int = 4) -> Any:
    """Make a text panel; Grafana fills in its variables."""
    return (
        text.Panel()
        .title(title)
        .description(description)
        .mode(text_models.TextMode.MARKDOWN)
        .content(content)
        .span(width)
        .height(height)
    )


def _texts(shown: Mapping[str, str]) -> list[Any]:
    """Map values to texts that are shown instead."""
    texts = {text: models.ValueMappingResult(text=other) for text, other in shown.items()}
    return [models.ValueMap(options=texts)]


def row(title: str) -> Any:
    """Make a row of panels."""
    return dashboard.Row(title)


def _over_time(
    panel: Any, heading: Heading, targets: Sequence[Target], calcs: list[str], **layout: Any
) -> Any:
    panel = (
        panel.legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.RIGHT)
            .show_legend(True)  # noqa: FBT003  the SDK's signature
            .calcs(calcs)
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .min(0)
        .no_value("0")
    )
    return _finish(_coloured(panel, *targets), heading, targets, "range", **layout)


def _coloured(panel: Any, *targets: Target) -> Any:
    """Give each stop reason its color, and shades of it if several series have the same."""
    legends = [target.legend for target in targets]
    if not any(legend.endswith(("{{reason}}", "{{limit}}")) for legend in legends):
        return panel
    mode = "fixed" if all(legend.startswith("{{reason}}") for legend in legends) else "shades"
    colours = {f"/(^|: ){SHARED}{name}$/": colour for name, colour in COLOURS.items()}
    for end, colour in MARKED.items():
        if any(legend.endswith(end) for legend in legends):
            colours[f"/{end}$/"] = colour
    for pattern, colour in colours.items():
        own = models.DynamicConfigValue("color", {"mode": mode, "fixedColor": colour})
        panel = panel.override_by_regexp(pattern, [own])
    return panel


def _finish(
    panel: Any,
    heading: Heading,
    targets: Sequence[Target],
    form: Form,
    *,
    width: int = 12,
    height: int = 8,
) -> Any:
    """Set what all panels have: heading, queries, links and size (in 24 columns)."""
    links = _links(targets, form)
    panel = panel.data_links(links) if links else panel
    return (
        panel.title(heading.title)
        .description(heading.description)
        .unit(heading.unit)
        .datasource(DATASOURCE)
        .targets(
            [_query(ref_id, target, form) for ref_id, target in zip("AB", targets, strict=False)]
        )
        .span(width)
        .height(height)
    )


def _links(targets: Sequence[Target], form: Form) -> list[Any]:
    """Link each agent, reason, model and quota to the dashboards filtered by it."""
    # A table has no legend: its columns are the labels its query keeps.
    shown = " ".join(target.legend or target.query.partition("(")[2][:40] for target in targets)
    labels = [label for label in LINKS if re.search(rf"\b{label}\b", shown)]
    value = "__data.fields" if form == "table" else "__field.labels"
    kept = "&".join(f"${{{name}:queryparam}}" for name in KEPT)
    # Without a format, Grafana does not escape `&` and `+` in a name.
    return [
        dashboard.DashboardLink(title).url(
            f"/d/{uid}?${{__url_time_range}}&{kept}&var-{label}=${{{value}.{label}:percentencode}}"
        )
        for label in labels
        for uid, title in LINKS[label]
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
    if form == "table":
        query = query.format(prometheus_models.PromQueryFormat.TABLE)
    return query.exemplar(True) if target.exemplars else query  # noqa: FBT003  the SDK's signature


def _counting(panel: Any, unit: str) -> Any:
    """Round counts: Prometheus extrapolates the increases of a process that restarted."""
    return panel.decimals(0) if unit in (COUNT, INVOCATIONS) else panel


def _thresholds(steps: Steps) -> Any:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in steps])
    )


def make_dashboard(uid: str, title: str, description: str, *variables: Any) -> Any:
    """Make an empty dashboard with its variables and links to the other dashboards."""
    links = (
        dashboard.DashboardLink("otel-limits")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["otel-limits"])
        .include_vars(True)  # noqa: FBT003  the SDK's signature
        .keep_time(True)  # noqa: FBT003  the SDK's signature
    )
    data_source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
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
        .variables([data_source, *variables])
    )


def variable(name: str, series: str, description: str, *, is_optional: bool = False) -> Any:
    """Make a variable with the values of a label.

    Args:
        name: The label.
        series: Selector of the series that have it.
        description: Its tooltip.
        is_optional: Whether "All" includes series without the label.
    """
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .description(description)
        .datasource(DATASOURCE)
        .query({"query": f"label_values({series}, {name})", "refId": name, "qryType": 1})
        .multi(True)  # noqa: FBT003  the SDK's signature
        .include_all(True)  # noqa: FBT003  the SDK's signature
        .all_value(".*" if is_optional else ".+")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def annotation(name: str, colour: str, expr: str, title: str, *, shown: bool = True) -> Any:
    """Mark moments on every graph."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(shown)
        .icon_color(colour)
        .expr(expr)
        .step(MIN_STEP)
        .title_format(title)
    )
