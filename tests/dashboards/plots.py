"""Draws what is within a panel, by its kind."""

from __future__ import annotations

import datetime as dt
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from matplotlib import ticker
from matplotlib.transforms import Bbox

from tests.dashboards.prometheus import Line
from tests.dashboards.theme import NAMED, PALETTE, Theme, shade
from tests.dashboards.units import written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tests.dashboards.panels import Panel, TimeRange

Named: TypeAlias = Sequence[tuple[str, Line]]
"""Series with the names that the legend gives them."""

MAX_LEGEND: Final = 10
LEGEND_LETTERS: Final = 34
"""Space for a name and its value to the right of a graph."""

ROW_INCHES: Final = 0.36
"""Height needed for a name above a bar; in lower rows the name is to the left of the bar."""

TABLE_ROW_INCHES: Final = 0.19

STAT_POINTS: Final = 60
"""Font size of one letter in a panel that is one column wide; Grafana lets numbers fit, too."""

MINUTE, DAY, MAX_TICKS, MAX_VALUE_TICKS = 60.0, 86400.0, 7, 6
TICK_SECONDS: Final = (
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 432000),
)


@dataclass(frozen=True, slots=True)
class Plot:
    """A panel that is drawn."""

    axes: Axes
    panel: Panel
    lines: Named
    window: TimeRange
    theme: Theme

    def colours(self) -> dict[str, str]:
        """Give every series a colour: its own, a shade of it, or the next of the palette."""
        own = {name: self.panel.colour_of(name) for name, _ in self.lines}
        if self.panel.shaded:
            own = {
                name: shade(colour, at) if colour else None
                for at, (name, colour) in enumerate(own.items())
            }
        # What another series has for its own is left out: otherwise two of them would look alike.
        left = itertools.cycle(sorted(set(PALETTE) - set(own.values()), key=PALETTE.index))
        return {name: colour or next(left) for name, colour in own.items()}

    def write(self, value: float) -> str:
        """Write a value in the unit of the panel."""
        return written(value, self.panel.unit, self.panel.decimals)


def timeseries(plot: Plot) -> None:
    """Draw lines, or bars on top of each other."""
    axes, colours = plot.axes, plot.colours()
    if plot.panel.stacked:
        _stack(plot, colours)
    else:
        for name, line in plot.lines:
            marker = "o" if len(line.times) == 1 else None  # a line of one point is invisible
            axes.plot(
                line.times,
                line.values,
                label=name,
                marker=marker,
                color=colours[name],
                clip_on=marker is None,  # a point on an axis is whole
            )
    _value_axis(plot)
    _legend(plot)


def _value_axis(plot: Plot) -> None:
    axes, unit = plot.axes, plot.panel.unit
    is_flat = not any(value for _, line in plot.lines for value in line.values)
    # From 0, or a counter that hardly moves looks like a mountain; a little above, or the highest
    # line lies on the frame. Where all is 0 there is no scale but 1.
    axes.set_ylim(0, 1.08 * (1 if is_flat else axes.get_ylim()[1]))
    axes.grid(axis="y")
    if plot.panel.axis:
        axes.set_ylabel(plot.panel.axis)
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: written(value, unit)))
    axes.yaxis.set_major_locator(_value_ticks(unit, axes.get_ylim()[1], is_flat=is_flat))


def _value_ticks(unit: str, highest: float, *, is_flat: bool) -> ticker.Locator:
    """Place ticks at whole counts and at round durations."""
    if unit == "s" and highest >= TICK_SECONDS[0]:
        step = next((each for each in TICK_SECONDS if highest / each <= MAX_VALUE_TICKS), DAY)
        return ticker.MultipleLocator(step)
    return ticker.MaxNLocator(5, integer=is_flat or unit in {"short", "locale"})


def _stack(plot: Plot, colours: Mapping[str, str]) -> None:
    times = sorted({time for _, line in plot.lines for time in line.times})
    step = plot.window.for_panel(plot.panel).step
    below = dict.fromkeys(times, 0.0)
    for name, line in plot.lines:
        floor = [below[time] for time in line.times]
        middles = [time + step / 2 for time in line.times]  # it counts what came after its time
        # The edge keeps two agents apart that were stopped for the same reason.
        plot.axes.bar(
            middles,
            line.values,
            0.85 * step,
            bottom=floor,
            label=name,
            color=colours[name],
            edgecolor=plot.theme.panel,
            linewidth=0.8,
        )
        for time, value in zip(line.times, line.values, strict=True):
            below[time] += value


def _legend(plot: Plot) -> None:
    handles, names = plot.axes.get_legend_handles_labels()
    stacked = plot.panel.stacked
    peaks = {name: sum(line.values) if stacked else max(line.values) for name, line in plot.lines}
    values = [plot.write(peaks[name]) for name in names]
    labels = [
        f"{_cut(name, LEGEND_LETTERS - len(value))}  {value}"
        for name, value in zip(names, values, strict=True)
    ]
    shown = list(zip(handles, labels, names, strict=True))
    if not stacked:  # bars keep the order in which they lie on each other
        shown.sort(key=lambda each: -peaks[each[2]])
    more = len(shown) - MAX_LEGEND
    legend = plot.axes.legend(
        [handle for handle, _, _ in shown[:MAX_LEGEND]],
        [label for _, label, _ in shown[:MAX_LEGEND]],
        title=f"name and {'total' if stacked else 'maximum'}"
        + (f", {more} more" if more > 0 else ""),
        loc="upper left",
        bbox_to_anchor=(1.01, 1.04),
        handlelength=1,
        alignment="left",
        borderaxespad=0,
    )
    legend.get_title().set_color(plot.theme.faint)


def stat(plot: Plot) -> None:
    """Write one number, in the colour of its threshold."""
    plot.axes.axis("off")
    value = plot.lines[0][1].last
    text = plot.write(value)
    plot.axes.text(
        0.5,
        0.42,
        text,
        ha="center",
        va="center",
        fontsize=min(30, STAT_POINTS * plot.panel.width / len(text)),
        fontweight="bold",
        color=NAMED[plot.panel.colour_at(value)],
    )


def bargauge(plot: Plot) -> None:
    """Draw the largest values as bars, each with its name and value above or next to it."""
    axes, panel = plot.axes, plot.panel
    axes.axis("off")
    colours = plot.colours()
    ordered = sorted(plot.lines, key=lambda each: -each[1].last)
    # A share is measured against 100 %, and not against the largest one.
    longest = max(ordered[0][1].last, 1.0 if panel.unit == "percentunit" else 0.0)
    # A single bar would otherwise fill the panel.
    rows = max(len(ordered), 5)
    is_beside = axes.bbox.height / axes.figure.dpi / rows < ROW_INCHES
    # In low rows the name is to the left of a bar and the value to its right; else both above.
    left, right, above = (-0.55, 1.25, 0.0) if is_beside else (0.0, 1.0, 0.27)
    place, thick, room = ("center", 0.5, 22) if is_beside else ("bottom", 0.34, 40)
    for at, (name, line) in enumerate(ordered):
        colour = colours[name] if panel.colour_of(name) else NAMED[panel.colour_at(line.last)]
        axes.barh(at, longest, color=plot.theme.line, height=thick)
        axes.barh(at, line.last, color=colour, height=thick)
        axes.text(left * longest, at - above, _cut(name, room), va=place, fontsize=10)
        value = plot.write(line.last)
        axes.text(right * longest, at - above, value, va=place, ha="right", fontweight="bold")
    axes.set_xlim(left * longest, right * longest)
    axes.set_ylim(rows - 0.6, -0.75 if above else -0.6)


def table(plot: Plot) -> None:
    """Draw labels and values, as many rows as fit."""
    axes, shown_as = plot.axes, plot.panel.shown
    axes.axis("off")
    names = sorted({name for _, line in plot.lines for name in line.labels})
    texts = [[line.labels.get(name, "") for name in names] for _, line in plot.lines]
    rows = sorted(
        [*(shown_as.get(text, text) for text in each), written(line.last, plot.panel.unit)]
        for each, (_, line) in zip(texts, plot.lines, strict=True)
    )
    row_height = TABLE_ROW_INCHES * axes.figure.dpi / axes.bbox.height
    shown = rows[: int(1 / row_height) - 1]
    height = (len(shown) + 1) * row_height
    drawn = axes.table(
        [*shown],
        colLabels=[*names, plot.panel.value_name],
        cellLoc="left",
        # As wide as the panel has room for.
        bbox=Bbox.from_bounds(0, 1 - height, 1, height),
    )
    drawn.auto_set_font_size(False)  # noqa: FBT003  its signature
    drawn.set_fontsize(9)
    for (row, _), cell in drawn.get_celld().items():
        cell.set_edgecolor(plot.theme.line)
        cell.set_facecolor(plot.theme.panel)
        cell.get_text().set_color(plot.theme.text if row else plot.theme.faint)


def text(plot: Plot) -> None:
    """Write a text panel, its variables filled in as Grafana does where everything is selected."""
    plot.axes.axis("off")
    start, end = (_utc(time).strftime("%Y-%m-%dT%H:%M:%S.000Z") for time in _span(plot.window))
    times = {"__from:date:iso": start, "__to:date:iso": end}
    known = re.sub(r"\$\{(__[\w:]+)\}", lambda found: times[found[1]], plot.panel.content)
    filled = re.sub(r"\$\{(\w+):queryparam\}", r"var-\1=$__all", known)
    code = "\n".join(line for line in filled.splitlines() if not line.startswith("```"))
    shown = plot.axes.text(0, 0.85, code, va="top", family="monospace", fontsize=11)
    shown.set_linespacing(1.7)
    # The dollar sign of a variable does not begin a formula.
    shown.set_parse_math(False)


Drawing: TypeAlias = Callable[[Plot], None]

DRAWINGS: Final[Mapping[str, Drawing]] = {
    "timeseries": timeseries,
    "stat": stat,
    "bargauge": bargauge,
    "table": table,
    "text": text,
}


def time_axis(plot: Plot) -> None:
    """Label the time that is shown."""
    # The first and the last bar may begin before the window and end after it.
    start, end = _span(plot.window)
    axes = plot.axes
    axes.set_xlim(start, end)
    step = next((each for each in TICK_SECONDS if (end - start) / each <= MAX_TICKS), end - start)
    axes.xaxis.set_major_locator(ticker.MultipleLocator(step))
    shape = "%d %b" if step >= DAY else "%H:%M" if step >= MINUTE else "%H:%M:%S"
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda time, _: _utc(time).strftime(shape)))


def _span(window: TimeRange) -> tuple[float, float]:
    return window.start, window.end


def _utc(time: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(time, dt.timezone.utc)


def _cut(name: str, length: int) -> str:
    """Shorten a name in its middle: similar names often differ at their ends."""
    end = length // 2 - 1
    return name if len(name) <= length else f"{name[: length - end - 1]}…{name[-end:]}"
