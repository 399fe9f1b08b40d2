"""Answers as self-contained HTML pages, without network access or other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import NUMBERS, column_texts, exact, written
from otel_limits.cli.show.svg_charts import colour, draw, hatches
from otel_limits.core.wording import pluralize

if TYPE_CHECKING:
    from otel_limits.audit.answer import Answer, CellKind, Chart, Column, Table

POLICY: Final = (
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
            f'<div class="charts">{"".join(map(_chart, answer.charts))}</div>',
            *map(_table, answer.tables),
            f"<pre>{escape(answer.text)}</pre>" if answer.text else "",
            f'<p id="forecast">{escape(answer.forecast.sentence)}</p>' if answer.forecast else "",
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
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


def _chart(chart: Chart) -> str:
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
    rows = "".join(lines) or f'<tr><td class="empty" colspan="{len(table.columns)}">None.</td></tr>'
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="scroll">'
        f'<table id="table-{table.name}"{" data-tree" if table.levels else ""}>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody><tfoot>{foot}</tfoot></table></div>"
        f"{_note(table)}</section>"
    )


def _note(table: Table) -> str:
    left_out = len(table.rows) - MOST_ROWS
    notes = [table.note] if table.note else []
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
