"""JSON Schemas of answers, built from the columns of their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from otel_limits.audit.answer import CellKind, Column
    from otel_limits.audit.question import Question

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
VERSION: Final = 1
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
    return f"otel-limits/audit.{question}/{VERSION}"


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
