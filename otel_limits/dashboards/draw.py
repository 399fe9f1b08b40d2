"""Draws a dashboard into one picture: every panel from the answers to its own queries."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib import gridspec, ticker
from matplotlib.figure import Figure

from otel_limits.dashboards.api import Line
from otel_limits.dashboards.panels import Dashboard, Panel, Target, TimeRange

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Answers = Mapping[Target, Sequence[Line]]
Named = Sequence[tuple[str, Line]]
"""Series with the names that the legend gives them."""

COLUMNS: Final = 24
WIDTH_INCHES: Final = 18.0
ROW_INCHES: Final = 0.42
MAX_LEGEND: Final = 10
LEGEND_WIDTH: Final = 0.135
"""Of the figure: legends stand at the right of a panel, as in Grafana."""
DPI: Final = 80

OVER_TIME: Final = ("timeseries", "heatmap")
"""Kinds of panels with a time axis."""
MINUTE, DAY, MAX_TICKS = 60.0, 86400.0, 7
TICK_SECONDS: Final = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10800, 21600, 86400, 432000)

COLOURS: Final = {
    "max_turns": "#c4162a",
    "max_iterations": "#ff780a",
    "loop_detected": "#8f3bb8",
    "end_turn": "#73bf69",
}
"""As in Grafana, a reason has one colour wherever it is drawn."""

PALETTE: Final = (
    "#3274d9", "#56a64b", "#f2cc0c", "#8ab8ff", "#b877d9",
    "#19a2a8", "#a16f50", "#e5a8e2", "#6e7687", "#96d98d",
)  # fmt: skip

STYLE: Final[dict[Any, Any]] = {
    "axes.edgecolor": "#b0b0b8",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler(color={list(PALETTE)})",
    "font.size": 8,
    "grid.color": "#e4e4ea",
    "legend.fontsize": 8,
    "legend.frameon": False,
}

THOUSAND: Final = 1000.0
CENT: Final = 0.01
DURATIONS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (0.001, "ms"))


def draw(dashboard: Dashboard, answers: Answers, window: TimeRange, path: Path) -> list[str]:
    """Draw `dashboard` into `path`; return the titles of panels that had nothing to show."""
    bottom = max(panel.top + panel.height for panel in dashboard.panels)
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(WIDTH_INCHES, bottom * ROW_INCHES + 1), dpi=DPI)
        grid = gridspec.GridSpec(bottom, COLUMNS, figure, 0.03, 0.02, 0.97, 0.97, 0, 0)
        figure.suptitle(dashboard.title, x=0.03, ha="left", fontsize=14, fontweight="bold")
        figure.text(0.97, 0.98, _span_of(window), ha="right", va="top", color="#55555f")
        for title, top in dashboard.rows:
            _draw_row(figure, grid, title, top)
        empty = [
            panel.title
            for panel in dashboard.panels
            if not _draw_panel(figure, grid, panel, answers, window)
        ]
        figure.savefig(path)
    return empty


def _draw_row(figure: Figure, grid: Any, title: str, top: int) -> None:
    axes = figure.add_subplot(grid[top, :])
    axes.axis("off")
    axes.text(0, 0.2, title, fontsize=11, fontweight="bold", color="#55555f")
    axes.axhline(0.05, color="#c8c8d0", linewidth=1)


def _draw_panel(
    figure: Figure, grid: Any, panel: Panel, answers: Answers, window: TimeRange
) -> bool:
    """Draw one panel; False when it had nothing to show."""
    area = grid[panel.top : panel.top + panel.height, panel.left : panel.left + panel.width]
    frame = figure.add_subplot(area)
    frame.set_xticks([])
    frame.set_yticks([])
    # The frame goes around title and legend as in Grafana; what is drawn has axes of its own
    # within.
    frame.patch.set_alpha(0)
    frame.spines[:].set_visible(True)
    frame.spines[:].set_color("#e4e4ea")
    box = area.get_position(figure)
    axes = figure.add_axes(_inside(box, panel))
    frame.annotate(
        panel.title,
        (0, 1),
        (8, -8),
        "axes fraction",
        "offset points",
        va="top",
        weight="bold",
        fontsize=10,
    )
    lines = [
        (line.named(target.legend), line) for target in panel.targets for line in answers[target]
    ]
    if not lines:
        axes.axis("off")
        axes.text(0.5, 0.5, "No data", ha="center", va="center", fontsize=12, color="#9090a0")
        return False
    DRAWINGS[panel.kind](axes, panel, lines)
    if panel.kind in OVER_TIME:
        _time_axis(axes, window.start, window.end)
    return True


def _inside(box: Any, panel: Panel) -> tuple[float, float, float, float]:
    """Leave room within a panel's frame for title, axis and legend."""
    unit = (box.y1 - box.y0) / panel.height
    left = 0.012 if panel.kind in ("stat", "table") else 0.04
    if panel.kind == "bargauge":
        left = 0.1
    bottom = unit * (0.3 if panel.kind in ("stat", "table", "bargauge") else 1.0)
    width = box.x1 - box.x0 - left - 0.012
    if panel.kind == "timeseries":
        width -= LEGEND_WIDTH
    return box.x0 + left, box.y0 + bottom, width, box.y1 - box.y0 - bottom - unit * 1.3


def _timeseries(axes: Axes, panel: Panel, lines: Named) -> None:
    if panel.stacked:
        _stack(axes, lines)
    else:
        for name, line in lines:
            marker = "o" if len(line.times) == 1 else None  # a line of one point is invisible
            axes.plot(line.times, line.values, label=name, marker=marker, color=COLOURS.get(name))
    # From 0, or a counter that hardly moves looks like a mountain; a little above, or the highest
    # line lies on the frame.
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.grid(axis="y")
    axes.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda value, _: written(value, panel.unit))
    )
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
    _legend(axes, panel, lines)


def _stack(axes: Axes, lines: Named) -> None:
    times = sorted({time for _, line in lines for time in line.times})
    # Bars touch at the shortest step, so that a gap in the data shows as a gap.
    width = 0.85 * min((after - before for before, after in pairwise(times)), default=60.0)
    below = dict.fromkeys(times, 0.0)
    for name, line in lines:
        floor = [below[time] for time in line.times]
        axes.bar(line.times, line.values, width, bottom=floor, label=name, color=COLOURS.get(name))
        for time, value in zip(line.times, line.values, strict=True):
            below[time] += value


def _legend(axes: Axes, panel: Panel, lines: Named) -> None:
    handles, names = axes.get_legend_handles_labels()
    peaks = {name: max(line.values) for name, line in lines}
    labels = [f"{_cut(name)}  {written(peaks[name], panel.unit, panel.decimals)}" for name in names]
    shown = list(zip(handles, labels, names, strict=True))
    if not panel.stacked:  # bars keep the order in which they lie on each other
        shown.sort(key=lambda each: -peaks[each[2]])
    axes.legend(
        [handle for handle, _, _ in shown[:MAX_LEGEND]],
        [label for _, label, _ in shown[:MAX_LEGEND]],
        title="name  (max)" + (f", {len(shown) - MAX_LEGEND} more" * (len(shown) > MAX_LEGEND)),
        loc="upper left",
        bbox_to_anchor=(1.005, 1.05),
        handlelength=1,
        alignment="left",
    )


def _stat(axes: Axes, panel: Panel, lines: Named) -> None:
    axes.axis("off")
    text = written(lines[0][1].last, panel.unit, panel.decimals)
    axes.text(0.5, 0.42, text, ha="center", va="center", fontsize=20, color="#1f60c4")


def _bargauge(axes: Axes, panel: Panel, lines: Named) -> None:
    ordered = sorted(lines, key=lambda each: each[1].last)
    values = [line.last for _, line in ordered]
    bars = axes.barh([_cut(name, 30) for name, _ in ordered], values, color="#5794f2", height=0.6)
    axes.bar_label(bars, [f" {written(value, panel.unit, panel.decimals)}" for value in values])
    axes.set_xlim(0, max(values) * 1.25)
    axes.set_ylim(min(0, len(ordered) - 5) - 0.6, len(ordered) - 0.4)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)


def _heatmap(axes: Axes, panel: Panel, lines: Named) -> None:
    """Buckets count what is below them, so that each is drawn without the one beneath."""
    ordered = sorted((float(line.labels["le"]), line) for _, line in lines)
    times = sorted({time for _, line in ordered for time in line.times})
    counted = [dict(zip(line.times, line.values, strict=True)) for _, line in ordered]
    cells = [
        [max(0.0, upper.get(time, 0) - lower.get(time, 0)) for time in times]
        for lower, upper in zip([{}, *counted], counted, strict=False)
    ]
    step = times[1] - times[0] if len(times) > 1 else 60.0
    edges = [*(time - step / 2 for time in times), times[-1] + step / 2]
    mesh = axes.pcolormesh(edges, range(len(cells) + 1), cells, cmap="Oranges", vmin=0)
    axes.figure.colorbar(mesh, ax=axes, pad=0.01, fraction=0.04, label="invocations")
    axes.set_yticks(
        [number + 0.5 for number in range(len(cells))],
        [
            f"≤ {written(bound, panel.unit)}" if math.isfinite(bound) else "more"
            for bound, _ in ordered
        ],
    )


def _table(axes: Axes, panel: Panel, lines: Named) -> None:
    axes.axis("off")
    names = sorted({name for _, line in lines for name in line.labels})
    rows = sorted(
        [*(line.labels.get(name, "") for name in names), written(line.last, panel.unit)]
        for _, line in lines
    )
    # What Grafana shows of such a table without scrolling.
    shown = rows[: (panel.height - 2) * 2]
    table = axes.table([*shown], colLabels=[*names, "value"], loc="upper left", cellLoc="left")
    table.auto_set_font_size(False)  # noqa: FBT003  its signature
    table.set_fontsize(8)
    for cell in table.get_celld().values():
        cell.set_edgecolor("#e4e4ea")


DRAWINGS: Final = {
    "timeseries": _timeseries,
    "stat": _stat,
    "bargauge": _bargauge,
    "heatmap": _heatmap,
    "table": _table,
}


def _span_of(window: TimeRange) -> str:
    """Write which time is shown."""
    first, last = (
        dt.datetime.fromtimestamp(time, dt.timezone.utc) for time in (window.start, window.end)
    )
    return f"{first:%d %B %Y, %H:%M} to {last:%H:%M} UTC"


def _time_axis(axes: Axes, start: float, end: float) -> None:
    axes.set_xlim(start, end)
    step = next((each for each in TICK_SECONDS if (end - start) / each <= MAX_TICKS), end - start)
    axes.xaxis.set_major_locator(ticker.MultipleLocator(step))
    shape = "%d %b" if step >= DAY else "%H:%M" if step >= MINUTE else "%H:%M:%S"
    axes.xaxis.set_major_formatter(
        ticker.FuncFormatter(
            lambda time, _: dt.datetime.fromtimestamp(time, dt.timezone.utc).strftime(shape)
        )
    )


def _cut(name: str, length: int = 24) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


# --- numbers as a panel of a certain unit has them ---


def written(value: float, unit: str, decimals: int | None = None) -> str:
    """Write `value` as Grafana's `unit` does, about."""
    if unit == "short" and decimals is not None and abs(value) < THOUSAND:
        return f"{value:.{decimals}f}"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "currencyUSD":
        return _dollars(value)
    if unit == "s":
        return _duration(value)
    return _short(value)


def _dollars(value: float) -> str:
    if value == 0 or abs(value) >= THOUSAND:
        return f"${_short(value)}"
    return f"${value:.2f}" if abs(value) >= CENT else f"${value:.2g}"


def _short(value: float) -> str:
    for suffix in ("", "K", "Mil", "Bil"):
        if abs(value) < THOUSAND:
            return f"{value:.3g}{' ' if suffix else ''}{suffix}"
        value /= THOUSAND
    return f"{value:.3g} Tri"


def _duration(seconds: float) -> str:
    for length, name in DURATIONS:
        if abs(seconds) >= length:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"
