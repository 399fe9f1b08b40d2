"""Draws a dashboard in parts that fit a slide: every panel from the answers to its own queries."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from otel_limits.dashboards.exported_files import directory
from tests.dashboards.panels import Dashboard, Panel, Target, TimeRange, read_all
from tests.dashboards.plots import DRAWINGS, Plot, time_axis
from tests.dashboards.prometheus import Line, Prometheus
from tests.dashboards.theme import THEMES, Theme, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Answers: TypeAlias = Mapping[Target, Sequence[Line]]

COLUMNS: Final = 24
WIDTH_INCHES, HEIGHT_INCHES, DPI = 16.0, 9.0, 120
"""1920 by 1080 pixels."""

MAX_UNITS: Final = 26
"""Of Grafana's grid, that a part is high at most: three rows of graphs."""

EDGE, HEAD, GAP = 0.2, 0.6, 0.07
"""Inches around everything, for the title at the top, and between two panels."""

LEGEND_INCHES: Final = 3.2
"""Legends are at the right of a panel, as in Grafana."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a dashboard."""

    rows: tuple[tuple[str, int], ...]
    panels: tuple[Panel, ...]
    top: int
    bottom: int


def draw_all(prometheus: Prometheus, window: TimeRange, out: Path) -> list[str]:
    """Draw the dashboards into pictures below `out`; return the titles of panels without data."""
    without_data = []
    for dashboard in read_all(directory()):
        answers = query_panels(prometheus, dashboard, window)
        draw(dashboard, answers, window, out)
        without_data += empty(dashboard, answers)
    return without_data


def query_panels(prometheus: Prometheus, dashboard: Dashboard, window: TimeRange) -> Answers:
    """Run all queries of a dashboard."""
    return {
        # Only series over time need the panel's own range and step.
        target: prometheus.answer(target, window if target.instant else window.for_panel(panel))
        for panel in dashboard.panels
        for target in panel.targets
    }


def draw(dashboard: Dashboard, answers: Answers, window: TimeRange, out: Path) -> None:
    """Draw `dashboard` into pictures below `out`, each light and dark."""
    # Twice from the same answers: both pictures show the same moment.
    for theme in THEMES:
        with mpl.rc_context(style(theme)):
            for number, part in enumerate(parts(dashboard), start=1):
                path = out / f"{dashboard.name}-{number}{theme.suffix}.png"
                page = Page(dashboard, part, answers, window, theme)
                page.drawn().savefig(path)


def empty(dashboard: Dashboard, answers: Answers) -> list[str]:
    """Titles of panels that have no data."""
    return [
        panel.title
        for panel in dashboard.panels
        if panel.targets and not any(answers[target] for target in panel.targets)
    ]


def parts(dashboard: Dashboard) -> Iterator[Part]:
    """Put as many rows together as one picture has room for."""
    tops = [top for _, top in dashboard.rows]
    # A row ends where the next begins; the last one with its lowest panel.
    ends = [*tops[1:], max(panel.top + panel.height for panel in dashboard.panels)]
    first = 0
    for at, end in enumerate(ends):
        is_last = at == len(ends) - 1
        if is_last or ends[at + 1] - tops[first] > MAX_UNITS:
            yield Part(
                rows=dashboard.rows[first : at + 1],
                panels=tuple(each for each in dashboard.panels if tops[first] < each.top < end),
                top=tops[first],
                bottom=end,
            )
            first = at + 1


@dataclass(frozen=True, slots=True)
class Page:
    """One picture."""

    dashboard: Dashboard
    part: Part
    answers: Answers
    window: TimeRange
    theme: Theme

    def drawn(self) -> Figure:
        """Draw it."""
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DPI)
        left, top = EDGE / WIDTH_INCHES, 1 - 0.38 / HEIGHT_INCHES
        figure.text(left, top, self.dashboard.title, fontsize=18, fontweight="bold", va="center")
        faint = self.theme.faint
        figure.text(1 - left, top, _span_of(self.window), ha="right", va="center", color=faint)
        for title, row in self.part.rows:
            x, y, _, height = self._place(0, row, COLUMNS, 1)
            figure.text(x, y + height * 0.4, title, fontsize=12, va="center", color=faint)
        for panel in self.part.panels:
            self._draw(figure, panel)
        return figure

    def _place(self, left: int, top: int, width: int, height: int) -> tuple[float, ...]:
        """Turn units of Grafana's grid into parts of the figure: left, bottom, width, height."""
        column = (WIDTH_INCHES - 2 * EDGE) / COLUMNS
        unit = (HEIGHT_INCHES - HEAD - EDGE) / (self.part.bottom - self.part.top)
        # matplotlib counts from the bottom, Grafana from the top.
        bottom = HEIGHT_INCHES - HEAD - (top + height - self.part.top) * unit
        return (
            (EDGE + left * column + GAP / 2) / WIDTH_INCHES,
            (bottom + GAP / 2) / HEIGHT_INCHES,
            (width * column - GAP) / WIDTH_INCHES,
            (height * unit - GAP) / HEIGHT_INCHES,
        )

    def _draw(self, figure: Figure, panel: Panel) -> None:
        left, bottom, width, height = self._place(panel.left, panel.top, panel.width, panel.height)
        frame = Rectangle(
            (left, bottom),
            width,
            height,
            transform=figure.transFigure,
            facecolor=self.theme.panel,
            edgecolor=self.theme.line,
            zorder=-1,  # below what is drawn within
        )
        figure.add_artist(frame)
        figure.text(
            left + 0.1 / WIDTH_INCHES,
            bottom + height - 0.2 / HEIGHT_INCHES,
            panel.title,
            va="center",
            fontsize=10.5,
            fontweight="bold",
        )
        axes = figure.add_axes(_inside((left, bottom, width, height), panel))
        lines = [
            (line.named(target.legend), line)
            for target in panel.targets
            for line in self.answers[target]
        ]
        # A text panel has no queries, and always something to say.
        if panel.targets and not lines:
            self._draw_no_data(axes, panel)
            return
        plot = Plot(axes, panel, lines, self.window, self.theme)
        DRAWINGS[panel.kind](plot)
        if panel.kind == "timeseries":
            time_axis(plot)

    def _draw_no_data(self, axes: Axes, panel: Panel) -> None:
        # Text, as in Grafana: an empty frame would look like a fault.
        axes.axis("off")
        faint = self.theme.faint
        axes.text(0.5, 0.45, panel.nothing, ha="center", va="center", fontsize=16, color=faint)


def _inside(place: tuple[float, ...], panel: Panel) -> tuple[float, float, float, float]:
    """Leave room within a panel's frame for title, axis and legend."""
    left, bottom, width, height = place
    above, below, beside, right = 0.36, 0.1, 0.15, 0.15
    if panel.kind == "timeseries":
        above, below, beside, right = 0.42, 0.3, 0.85, LEGEND_INCHES
    return (
        left + beside / WIDTH_INCHES,
        bottom + below / HEIGHT_INCHES,
        width - (beside + right) / WIDTH_INCHES,
        height - (above + below) / HEIGHT_INCHES,
    )


def _span_of(window: TimeRange) -> str:
    """Write which time is shown."""
    first, last = (
        dt.datetime.fromtimestamp(time, dt.timezone.utc) for time in (window.start, window.end)
    )
    return f"{first:%d %B %Y, %H:%M} to {last:%H:%M} UTC"
