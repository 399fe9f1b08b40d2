"""Answers as self-contained HTML pages with SVG charts, without network access."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import NUMBERS, column_texts, exact, money, written
from otel_limits.core.wording import abbreviated, pluralize

if TYPE_CHECKING:
    from otel_limits.audit.answer import Answer, CellKind, Chart, ChartSeries, Column, Mark, Table


# --- the page -------------------------------------------------------------------------------------

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
"""The browser must not fetch anything."""

MOST_ROWS: Final = 5_000
"""Rows of a table on a page; longer ones are better exported."""


def as_page(answer: Answer) -> str:
    """Format an answer as a page."""
    style, script = _asset("page.css"), _asset("page.js")
    body = "".join(
        (
            f"<header><div><h1>{escape(answer.title)}</h1><p>{escape(answer.about)}</p>",
            f'<p id="made">{escape(answer.made)}</p><p id="complete">{escape(answer.complete)}</p>',
            '</div><button type="button" id="theme">Dark</button></header>',
            f'<p id="summary">{escape(answer.summary)}</p>' if answer.summary else "",
            _totals(answer.totals),
            hatches() if answer.charts else "",
            f'<div class="charts">{"".join(map(_figure, answer.charts))}</div>',
            *map(_table, answer.tables),
            f"<pre>{escape(answer.text)}</pre>" if answer.text else "",
            f'<p id="forecast">{escape(answer.forecast.sentence)}</p>' if answer.forecast else "",
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(answer.title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("otel_limits.cli.show").joinpath(name).read_text(encoding="utf-8")


def _totals(totals: Sequence[tuple[str, CellKind, Any]]) -> str:
    if not totals:
        return ""
    amounts = iter(column_texts([value for _, kind, value in totals if kind == "money"], "money"))
    tiles = "".join(
        f"<div><dt>{escape(title)}</dt>"
        f'<dd data-total="{escape(title)}" data-value="{_value(value, kind)}">'
        f"{escape(next(amounts) if kind == 'money' else written(value, kind))}</dd></div>"
        for title, kind, value in totals
    )
    many, few = _even(len(totals), (7, 6, 5)), _even(len(totals), (5, 4, 3))
    return f'<dl class="totals" style="--many: {many}; --few: {few}">{tiles}</dl>'


def _even(count: int, columns: Sequence[int]) -> int:
    """Return the number of columns that leaves the fewest places of the last row empty."""
    return min(columns, key=lambda each: -count % each)


def _figure(chart: Chart) -> str:
    legend = "".join(
        f'<li><svg><rect class="{colour(number, series)}"/></svg>{escape(series.name)}</li>'
        for number, series in enumerate(chart.series)
        if any(series.values)
    )
    shown = f'<ul class="legend">{legend}</ul>' if len(chart.series) > 1 else ""
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    wide = ' class="wide"' if chart.wide else ""
    return (
        f'<figure id="chart-{chart.name}"{wide}><figcaption>{escape(chart.title)}</figcaption>'
        f'{shown}<div class="scroll">{draw(chart)}</div>{note}</figure>'
    )


def _table(table: Table) -> str:
    heads = "".join(_head(column) for column in table.columns)
    # A total below a tree has no level.
    levels = [*table.levels, *(0 for _ in range(len(table.rows) - len(table.levels)))]
    shown = [*table.rows[:MOST_ROWS], *([] if table.total is None else [table.total])]
    columns = [
        column_texts(values, column.kind)
        for column, values in zip(table.columns, zip(*shown, strict=True), strict=False)
    ]
    lines = [
        _row(table.columns, row, texts, level)
        for row, texts, level in zip(
            shown, zip(*columns, strict=True), [*levels[:MOST_ROWS], 0], strict=False
        )
    ]
    foot = lines.pop() if table.total is not None else ""
    # Headings of no rows would look like an answer that was cut off.
    nothing = f'<td class="empty" colspan="{len(table.columns)}">{escape(table.empty)}</td>'
    rows = "".join(lines) or f"<tr>{nothing}</tr>"
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="scroll">'
        f'<table id="table-{table.name}"{" data-tree" if table.levels else ""}>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody><tfoot>{foot}</tfoot></table></div>"
        f"{_note(table)}</section>"
    )


def _note(table: Table) -> str:
    left_out = len(table.rows) - MOST_ROWS
    notes = [note] if (note := table.note_with(table.columns)) else []
    if left_out > 0:
        rows = pluralize(left_out, "more row", "more rows")
        notes.append(f"{rows} not shown; --format csv has all of them.")
    return f'<p class="note">{escape(" ".join(notes))}</p>' if notes else ""


def _head(column: Column) -> str:
    kind = "number" if column.kind in NUMBERS else "text"
    return f'<th scope="col" class="{kind}"><button type="button">{escape(column.title)}</button>'


def _row(columns: Sequence[Column], row: Sequence[Any], texts: Sequence[str], level: int) -> str:
    cells = "".join(
        _cell(column, value, text, level if index == 0 else 0)
        for index, (column, value, text) in enumerate(zip(columns, row, texts, strict=True))
    )
    return f"<tr>{cells}</tr>"


def _cell(column: Column, value: Any, text: str, level: int) -> str:
    text = escape(text)
    if column.kind not in NUMBERS:
        style = f' style="padding-left: {0.75 + 1.5 * level}rem"' if level else ""
        is_code = ' class="id"' if column.kind in ("id", "command") else ""
        return f"<td{is_code}{style}>{text}</td>"
    # The exact value next to the rounded text, for sorting.
    return f'<td class="number" data-value="{_value(value, column.kind)}">{text}</td>'


def _value(value: Any, kind: CellKind) -> str:
    return "" if value is None else escape(str(exact(value, kind)))


# --- SVG charts, in the colors of the page around them --------------------------------------------

WIDTH: Final = 640
WIDE: Final = 1300
HEIGHT: Final = 260
CENT: Final = 0.01
LEFT: Final = 64
RIGHT: Final = 20
TOP: Final = 24
BOTTOM: Final = 40
ROW: Final = 42
"""Height of a horizontal bar with its name."""
NAME: Final = 20
THICK: Final = 16
LONGEST_BAR: Final = 82.0
"""Percent of the width, so that its value fits next to it."""
BAR: Final = 0.72
"""Fraction of its slot that a bar fills."""
WIDEST_BAR: Final = 56.0
LABEL_ROOM: Final = 84.0
NAME_LENGTH: Final = 44
MOST_TICKS: Final = 6
COLOURS: Final = 6

HATCHES: Final = {
    "c1": "M0 8L8 0",
    "c2": "M3 4h2",
    "c3": "M0 4h8",
    "c4": "M0 0L8 8",
    "c5": "M4 0v8",
    "halted": "M0 0L8 8M0 8L8 0",
    "killed": "M0 2h8M0 6h8M2 0v8",
}
"""Patterns over the colors of series, as 8 by 8 tiles, so that no series is identified by color
alone; the first is plain."""

THOUSAND: Final = 1_000


def draw(chart: Chart) -> str:
    """Draw a chart; an empty one is a sentence."""
    if not chart.labels:
        return '<p class="empty">No data.</p>'
    # For screen readers; the tables have every number.
    described = escape(f"{chart.title}: {', '.join(each.name for each in chart.series)}")
    size = f'viewBox="0 0 {_width(chart)} {HEIGHT}"'
    if chart.horizontal:
        size = f'class="bars" style="height: {ROW * len(chart.labels)}px"'
    parts = _bars(chart) if chart.horizontal else _columns(chart)
    return f'<svg {size} role="img" aria-label="{described}">{"".join(parts)}</svg>'


def hatches() -> str:
    """Draw the pattern tiles of the style sheet, once per page."""
    tiles = "".join(
        f'<pattern id="hatch-{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<path d="M0 0h8v8h-8z" fill="var(--{name})"/><path class="hatch" d="{path}"/></pattern>'
        for name, path in HATCHES.items()
    )
    # Not `display: none`, which disables the fill in some browsers.
    return f'<svg class="hatches" aria-hidden="true"><defs>{tiles}</defs></svg>'


def scale_of(highest: float, *, whole: bool) -> tuple[float, int]:
    """Return a round step, and how many of them, at most `MOST_TICKS`, reach `highest`."""
    if highest <= 0:
        return 1.0, 1
    least = highest / MOST_TICKS
    unit = 10.0 ** math.floor(math.log10(least))
    steps = [unit * each for each in (1, 2, 2.5, 5, 10)]
    # Ticks at fractions of an invocation make no sense.
    step = next(each for each in steps if each >= least and not (whole and each % 1))
    return step, math.ceil(highest / step)


def tick(value: float, step: float, kind: CellKind) -> str:
    """Format a value of an axis: USD all with the decimal places of its step."""
    if kind != "money" or value >= THOUSAND:
        return short(value, kind)
    places = max(0, -int(Decimal(f"{step:g}").normalize().as_tuple().exponent))
    return f"${value:.{max(places, 2) if places else 0}f}"


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
    step, ticks = scale_of(max(_stacked(chart)), whole=chart.kind == "count")
    top = step * ticks
    right = _width(chart) - RIGHT
    width, height = right - LEFT, HEIGHT - TOP - BOTTOM
    slot = width / count
    bar = min(slot * BAR, WIDEST_BAR)
    for number in range(ticks + 1):
        y = TOP + height * (1 - number / ticks)
        yield _line(LEFT, y, right, y, "grid")
        yield _text(LEFT - 8, y + 4, tick(step * number, step, chart.kind), "end")
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
            if value:  # an empty rectangle would still have its stroke
                style = colour(number, series)
                yield _rect(f"{x:.2f}", base, f"{bar:.2f}", tall, style, hint)
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
    """Draw stacked horizontal bars below their names, with the value at the end of each.

    Their lengths are in percent, so that they fit a telephone with text of the same size.
    """
    sums = _stacked(chart)
    # The maximum may be zero.
    scale = LONGEST_BAR / (max(sums) or 1)
    for index, label in enumerate(chart.labels):
        y = ROW * index + NAME
        name = label if len(label) <= NAME_LENGTH else label[: NAME_LENGTH - 1] + "…"
        yield _text(0, y - 5, name, "start", hint=label)
        x: float = 0
        for number, series in enumerate(chart.series):
            value = series.values[index]
            hint = f"{label} · {series.name}: {_hint(value, chart.kind)}"
            if value:
                style, width = colour(number, series), f"{value * scale:.2f}%"
                yield _rect(f"{x:.2f}%", y, width, THICK, style, hint)
            x += value * scale
        total = escape(short(sums[index], chart.kind))
        yield f'<text class="value" x="{x:.2f}%" dx="6" y="{y + 12}">{total}</text>'


def _stacked(chart: Chart) -> list[float]:
    return [
        sum(series.values[index] for series in chart.series) for index in range(len(chart.labels))
    ]


def _hint(value: float, kind: CellKind) -> str:
    return money(Decimal(str(value))) if kind == "money" else written(round(value), kind)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(x: str, y: float, width: str, height: float, style: str, hint: str) -> str:
    return (
        f'<rect class="{style}" x="{x}" y="{y:.2f}" width="{width}" '
        f'height="{height:.2f}"><title>{escape(hint)}</title></rect>'
    )


def _text(x: float, y: float, text: str, anchor: str, style: str = "", hint: str = "") -> str:
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{title}{escape(text)}</text>"
    )
