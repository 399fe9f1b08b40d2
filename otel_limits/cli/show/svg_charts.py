"""SVG charts in the colors of the page around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from html import escape
from typing import TYPE_CHECKING, Final

from otel_limits.audit.formatting import money, written
from otel_limits.core.wording import abbreviated

if TYPE_CHECKING:
    from otel_limits.audit.answer import CellKind, Chart, ChartSeries, Mark

WIDTH: Final = 640
WIDE: Final = 1300
HEIGHT: Final = 260
CENT: Final = 0.01
LEFT: Final = 64
NAMES: Final = 190
"""Width of the names left of horizontal bars."""
RIGHT: Final = 20
TOP: Final = 24
BOTTOM: Final = 40
ROW: Final = 30
BAR: Final = 0.72
"""Fraction of its slot that a bar fills."""
WIDEST_BAR: Final = 56.0
LABEL_ROOM: Final = 84.0
NAME_LENGTH: Final = 27
TICKS: Final = 5
COLOURS: Final = 6

HATCHES: Final = {
    "c1": "M0 8L8 0",
    "c2": "M3 4h2",
    "c3": "M0 4h8",
    "c4": "M0 0L8 8",
    "c5": "M4 0v8",
    "halted": "M0 0L8 8M0 8L8 0",
}
"""Patterns over the colors of series, as 8 by 8 tiles, so that no series is identified by color
alone; the first is plain."""

THOUSAND: Final = 1_000


def draw(chart: Chart) -> str:
    """Draw a chart; an empty one is a sentence."""
    if not chart.labels:
        return '<p class="empty">No data.</p>'
    parts = _bars(chart) if chart.horizontal else _columns(chart)
    height = TOP + ROW * len(chart.labels) + BOTTOM - 24 if chart.horizontal else HEIGHT
    # For screen readers; the tables have every number.
    described = escape(f"{chart.title}: {', '.join(each.name for each in chart.series)}")
    return (
        f'<svg viewBox="0 0 {_width(chart)} {height:g}" role="img" aria-label="{described}">'
        f"{''.join(parts)}</svg>"
    )


def hatches() -> str:
    """Draw the pattern tiles of the style sheet, once per page."""
    tiles = "".join(
        f'<pattern id="hatch-{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<path d="M0 0h8v8h-8z" fill="var(--{name})"/><path class="hatch" d="{path}"/></pattern>'
        for name, path in HATCHES.items()
    )
    # Not `display: none`, which disables the fill in some browsers.
    return f'<svg class="hatches" aria-hidden="true"><defs>{tiles}</defs></svg>'


def nice_top(highest: float, *, whole: bool) -> float:
    """Return a round number not below `highest`, which `TICKS` steps divide well."""
    if highest <= 0:
        return TICKS if whole else 1.0
    step = highest / TICKS
    # The step's power of ten, rounded up to a common interval below.
    unit = 10.0 ** math.floor(math.log10(step))
    if whole:
        unit = max(1.0, unit)
    rounded = next(unit * each for each in (1, 2, 2.5, 5, 10) if unit * each >= step)
    if whole:
        # Ticks at fractions of an invocation make no sense.
        rounded = math.ceil(rounded)
    return rounded * TICKS


def short(value: float, kind: CellKind) -> str:
    """Format a value for an axis, as short as possible."""
    sign = "$" if kind == "money" else ""
    if value >= THOUSAND:
        return sign + abbreviated(value)
    if not sign:
        return f"{value:g}"
    return f"${value:.2f}" if CENT <= value != int(value) else f"${value:.3g}"


def colour(number: int, series: ChartSeries) -> str:
    """Return the CSS class of a series."""
    return series.tone or f"c{number % COLOURS}"


def _width(chart: Chart) -> int:
    return WIDE if chart.wide else WIDTH


def _columns(chart: Chart) -> Iterator[str]:
    """Draw stacked vertical bars."""
    count = len(chart.labels)
    top = nice_top(max(_stacked(chart)), whole=chart.kind == "count")
    right = _width(chart) - RIGHT
    width, height = right - LEFT, HEIGHT - TOP - BOTTOM
    slot = width / count
    bar = min(slot * BAR, WIDEST_BAR)
    for tick in range(TICKS + 1):
        y = TOP + height * (1 - tick / TICKS)
        yield _line(LEFT, y, right, y, "grid")
        yield _text(LEFT - 8, y + 4, short(top * tick / TICKS, chart.kind), "end")
    # As many labels as fit without touching.
    every = max(1, math.ceil(count / (width / LABEL_ROOM)))
    for index, label in enumerate(chart.labels):
        x = LEFT + slot * index + (slot - bar) / 2
        base: float = TOP + height
        for number, series in enumerate(chart.series):
            value = series.values[index]
            tall = height * value / top
            base -= tall
            # A tooltip identifies the series of each bar.
            hint = f"{label} · {series.name}: {_hint(value, chart.kind)}"
            yield _rect(x, base, bar, tall, colour(number, series), hint)
        if index % every == 0:
            yield _text(x + bar / 2, HEIGHT - BOTTOM + 18, label, "middle")
    yield _text(LEFT + width / 2, HEIGHT - 4, chart.axis, "middle")
    for mark in chart.marks:
        yield from _mark(mark, chart.labels, slot)


def _mark(mark: Mark, labels: Sequence[str], slot: float) -> Iterator[str]:
    """Draw a line at a number, among labels that are numbers or ranges."""
    # At the right edge of the slot that contains the number.
    lows = [float(label.split("-")[0]) for label in labels]
    x = LEFT + slot * sum(low <= mark.at for low in lows)
    # On the left if it would leave the picture.
    is_far_right = x > WIDTH * 0.75
    yield _line(x, TOP - 8, x, HEIGHT - BOTTOM, "mark")
    yield _text(x + (-6 if is_far_right else 6), TOP - 10, mark.text,
                "end" if is_far_right else "start", "marked")  # fmt: skip


def _bars(chart: Chart) -> Iterator[str]:
    """Draw stacked horizontal bars, with the value at the end of each."""
    sums = _stacked(chart)
    room = WIDTH - NAMES - RIGHT - LABEL_ROOM
    # The maximum may be zero.
    scale = room / (max(sums) or 1)
    for index, label in enumerate(chart.labels):
        y = TOP + ROW * index
        thick = ROW * BAR
        name = label if len(label) <= NAME_LENGTH else label[: NAME_LENGTH - 1] + "…"
        yield _text(NAMES - 10, y + thick / 2 + 4, name, "end", hint=label)
        x: float = NAMES
        for number, series in enumerate(chart.series):
            value = series.values[index]
            hint = f"{label} · {series.name}: {_hint(value, chart.kind)}"
            yield _rect(x, y, value * scale, thick, colour(number, series), hint)
            x += value * scale
        yield _text(x + 6, y + thick / 2 + 4, short(sums[index], chart.kind), "start", "value")


def _stacked(chart: Chart) -> list[float]:
    return [
        sum(series.values[index] for series in chart.series) for index in range(len(chart.labels))
    ]


def _hint(value: float, kind: CellKind) -> str:
    return money(Decimal(str(value))) if kind == "money" else written(round(value), kind)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(x: float, y: float, width: float, height: float, style: str, hint: str) -> str:
    # An empty rectangle would still have its stroke.
    if not width or not height:
        return ""
    return (
        f'<rect class="{style}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
        f'height="{height:.2f}"><title>{escape(hint)}</title></rect>'
    )


def _text(x: float, y: float, text: str, anchor: str, style: str = "", hint: str = "") -> str:
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{title}{escape(text)}</text>"
    )
