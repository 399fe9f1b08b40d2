"""Answers for programs: JSON with its schema, or CSV with one table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import NUMBERS, exact
from otel_limits.core.labels import escape_formula

if TYPE_CHECKING:
    from otel_limits.audit.answer import Answer, CellKind, Column, Forecast, Table
    from otel_limits.audit.question import Question


# --- JSON and CSV ---------------------------------------------------------------------------------


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
    if answer.pruned_us is not None:
        document["pruned_before"] = exact(answer.pruned_us, "time")
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


# --- JSON Schemas, built from the columns of tables -----------------------------------------------

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_VERSION: Final = 1
"""Of all answers; it increases when a field is removed or changes its meaning."""

STRING: Final[Mapping[str, Any]] = {"type": ["string", "null"]}
NUMBER: Final[Mapping[str, Any]] = {"type": ["number", "null"]}
VALUES: Final[Mapping[CellKind, Mapping[str, Any]]] = {
    "text": STRING,
    "sentence": STRING,
    "command": STRING,
    "date": STRING,
    "id": STRING,
    "count": {"type": ["integer", "null"]},
    "amount": STRING,
    # As text, since a float would round it.
    "money": {**STRING, "pattern": r"^-?[0-9]+(\.[0-9]+)?$", "description": "USD"},
    "share": {**NUMBER, "description": "a fraction of 1"},
    "time": {"type": ["string", "null"], "format": "date-time"},
    "seconds": NUMBER,
    "number": NUMBER,
}


AMOUNT: Final[Mapping[str, Any]] = {
    # USD as text, as in every row; tokens as an integer.
    "anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}]
}
AMOUNTS: Final = ("so_far", "expected", "low", "high")
FORECAST: Final[Mapping[str, Any]] = {
    "type": "object",
    "description": "projected spend with its 95% interval, or why there is none",
    "properties": {
        "sentence": {"type": "string"},
        "unit": {"enum": ["usd", "tokens", None]},
        "days": {"type": "integer", "description": "whole days that it is based on"},
        "periods": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "period": {"enum": ["day", "week", "month"]},
                    "until": {"type": "string", "format": "date-time"},
                    **dict.fromkeys(AMOUNTS, AMOUNT),
                },
                "required": ["period", "until", *AMOUNTS],
            },
        },
    },
    "required": ["sentence", "unit", "days", "periods"],
}


def schema_name(question: str) -> str:
    """Return the name of an answer's schema."""
    return f"otel-limits/audit.{question}/{SCHEMA_VERSION}"


def schema_of(question: Question) -> dict[str, Any]:
    """Build the schema of `--format json` for a question. Readers must accept new fields."""
    rows = {
        name: _row(columns, question.more.get(name, ()))
        for name, columns in question.tables.items()
    }
    # Optional tables cannot be required.
    always = [name for name in rows if name not in question.optional]
    text = {"type": "string"}
    forecast = {"forecast": FORECAST} if question.has_forecast else {}
    passed = {"type": "boolean", "description": "false if the exit status is 1"}
    verdict = {"passed": passed} if question.has_verdict else {}
    return {
        "$schema": DIALECT,
        "$id": schema_name(question.name),
        "title": question.help,
        "type": "object",
        "properties": {
            "schema": {"const": schema_name(question.name)},
            "question": {"const": question.name},
            "about": {**text, "description": "part of the ledger that was queried"},
            **{name: {"type": "array", "items": row} for name, row in rows.items()},
            "totals": {"type": "object", "properties": rows},
            **forecast,
            **verdict,
            "summary": {**text, "description": "the result in one sentence"},
            "complete": {**text, "description": "whether the ledger is complete"},
            "pruned_before": {
                **text,
                "format": "date-time",
                "description": "rows before it were pruned, and the query covers such a time",
            },
            "text": text,
        },
        "required": ["schema", "question", "about", *always, "totals", *verdict, "complete"],
    }


def _row(columns: Sequence[Column], more: Sequence[Column] = ()) -> dict[str, Any]:
    """Build the schema of a row, which has its grouping properties in addition to its columns."""
    values = {each.name: {"title": each.title, **VALUES[each.kind]} for each in (*columns, *more)}
    # In every row, as names do not identify trees.
    level = {"type": "integer", "description": "depth of the row in a tree"}
    return {
        "type": "object",
        "properties": {**values, "level": level},
        "required": [column.name for column in columns],
        "additionalProperties": STRING,
    }
