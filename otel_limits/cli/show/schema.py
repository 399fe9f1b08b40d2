"""The JSON Schema of an answer, made from the columns of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from otel_limits.audit.answers import CellKind, Column
    from otel_limits.audit.question import Question

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
VERSION: Final = 1
"""Of what every answer has; it rises when a field is taken away or means something else."""

STRING: Final[Mapping[str, Any]] = {"type": ["string", "null"]}
NUMBER: Final[Mapping[str, Any]] = {"type": ["number", "null"]}
VALUES: Final[Mapping[CellKind, Mapping[str, Any]]] = {
    "text": STRING,
    "sentence": STRING,
    "date": STRING,
    "id": STRING,
    "count": {"type": ["integer", "null"]},
    # As text, since a float would round it.
    "money": {**STRING, "pattern": r"^-?[0-9]+(\.[0-9]+)?$", "description": "USD"},
    "share": {**NUMBER, "description": "a part of 1"},
    "time": {"type": ["string", "null"], "format": "date-time"},
    "seconds": NUMBER,
    "number": NUMBER,
}


AMOUNT: Final[Mapping[str, Any]] = {
    # USD as text, as in every row; tokens as a whole number.
    "anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}]
}
AMOUNTS: Final = ("so_far", "expected", "low", "high")
FORECAST: Final[Mapping[str, Any]] = {
    "type": "object",
    "description": "what is going to be spent, with its 95 % interval, or why nobody can say",
    "properties": {
        "sentence": {"type": "string"},
        "unit": {"enum": ["usd", "tokens", None]},
        "days": {"type": "integer", "description": "whole days that it is made from"},
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
    """What the JSON of an answer calls its schema."""
    return f"otel-limits/audit.{question}/{VERSION}"


def schema_of(question: Question) -> dict[str, Any]:
    """What `--format json` gives for a question; readers have to permit fields that are new."""
    rows = {
        name: _row(columns, question.more.get(name, ()))
        for name, columns in question.tables.items()
    }
    # The others depend on options, and a reader must not count on them.
    always = [name for name in rows if name not in question.optional]
    text = {"type": "string"}
    forecast = {"forecast": FORECAST} if question.has_forecast else {}
    return {
        "$schema": DIALECT,
        "$id": schema_name(question.name),
        "title": question.help,
        "type": "object",
        "properties": {
            "schema": {"const": schema_name(question.name)},
            "question": {"const": question.name},
            "about": {**text, "description": "which part of which ledger was asked"},
            **{name: {"type": "array", "items": row} for name, row in rows.items()},
            "totals": {"type": "object", "properties": rows},
            **forecast,
            "summary": {**text, "description": "what it comes to"},
            "complete": {**text, "description": "whether the ledger has all that is counted"},
            "text": text,
        },
        "required": ["schema", "question", "about", *always, "totals", "complete"],
    }


def _row(columns: Sequence[Column], more: Sequence[Column] = ()) -> dict[str, Any]:
    """A row; the properties to group by stand in it beside the columns that it always has."""
    values = {each.name: {"title": each.title, **VALUES[each.kind]} for each in (*columns, *more)}
    # In every row: whether a table is a tree does not follow from its name.
    level = {"type": "integer", "description": "how deep a row of a tree is"}
    return {
        "type": "object",
        "properties": {**values, "level": level},
        "required": [column.name for column in columns],
        "additionalProperties": STRING,
    }
