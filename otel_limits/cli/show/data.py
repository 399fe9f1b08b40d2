"""Answers for programs: JSON with every table, or CSV with one."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from otel_limits.audit.answer import NUMBERS, exact
from otel_limits.cli.show.answer_schema import AMOUNTS, schema_name
from otel_limits.core.labels import escape_formula

if TYPE_CHECKING:
    from otel_limits.audit.answer import Answer, CellKind, Forecast, Table


def as_json(answer: Answer) -> str:
    """Format every table, with money as exact text and times in ISO 8601."""
    document: dict[str, Any] = {
        "schema": schema_name(answer.question),
        "question": answer.question,
        "about": answer.about,
        **{table.name: _rows(table) for table in answer.tables},
        "totals": {
            table.name: _named(table, table.total)
            for table in answer.tables
            if table.total is not None
        },
    }
    # Omitted if empty: an empty text would look like an answer.
    if answer.summary:
        document["summary"] = answer.summary
    if answer.forecast is not None:
        document["forecast"] = _forecast(answer.forecast)
    if answer.passed is not None:
        document["passed"] = answer.passed
    if answer.complete:
        document["complete"] = answer.complete
    if answer.text:
        document["text"] = answer.text
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _forecast(forecast: Forecast) -> dict[str, Any]:
    kind: CellKind = "money" if forecast.unit == "usd" else "count"
    periods = [
        {
            "period": each.period,
            "until": exact(each.until_us, "time"),
            **{name: exact(getattr(each, name), kind) for name in AMOUNTS},
        }
        for each in forecast.periods
    ]
    return {
        "sentence": forecast.sentence,
        "unit": forecast.unit,
        "days": forecast.days,
        "periods": periods,
    }


def _rows(table: Table) -> list[dict[str, Any]]:
    rows = [_named(table, row) for row in table.rows]
    # Only trees have levels.
    for row, level in zip(rows, table.levels, strict=False):
        row["level"] = level
    return rows


def _named(table: Table, row: Sequence[Any]) -> dict[str, Any]:
    return {
        column.name: exact(value, column.kind)
        for column, value in zip(table.columns, row, strict=True)
    }


def additional_lines(answer: Answer) -> list[str]:
    """List the lines that complete an answer, in addition to its tables."""
    forecast = answer.forecast.sentence if answer.forecast is not None else ""
    return [line for line in (answer.summary, forecast, answer.complete) if line]


def as_csv(answer: Answer) -> str:
    """Format one table, without its total, which a reader would add in."""
    # Text answers, such as a policy file, have no table.
    if not answer.tables:
        return answer.text
    table = answer.csv or answer.tables[0]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    for row in table.rows:
        # Negative numbers start like a formula, but are none.
        writer.writerow(
            [
                value if column.kind in NUMBERS else escape_formula(value)
                for column, value in zip(table.columns, _named(table, row).values(), strict=True)
            ]
        )
    return out.getvalue()
