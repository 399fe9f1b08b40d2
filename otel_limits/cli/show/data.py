"""An answer for a program: JSON with every table, or CSV with the first one."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from otel_limits.audit.formatting import exact
from otel_limits.cli.show.schema import schema_name
from otel_limits.core.labels import inert

if TYPE_CHECKING:
    from otel_limits.audit.answers import Answer, Table


def as_json(answer: Answer) -> str:
    """Every table, with money as exact text and times in ISO 8601."""
    document = {
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
    if answer.complete:
        document["complete"] = answer.complete
    if answer.text:
        document["text"] = answer.text
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _rows(table: Table) -> list[dict[str, Any]]:
    rows = [_named(table, row) for row in table.rows]
    for row, level in zip(rows, table.levels, strict=False):
        row["level"] = level
    return rows


def _named(table: Table, row: Sequence[Any]) -> dict[str, Any]:
    return {
        column.name: exact(value, column.kind)
        for column, value in zip(table.columns, row, strict=True)
    }


def as_csv(answer: Answer) -> str:
    """The first table, without its total: a reader would add it in."""
    if not answer.tables:
        return answer.text
    table = answer.tables[0]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    for row in table.rows:
        writer.writerow([inert(value) for value in _named(table, row).values()])
    return out.getvalue()
