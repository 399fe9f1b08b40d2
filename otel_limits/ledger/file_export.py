"""Writes a ledger to a file for other programs: CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, TypeAlias

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.core.labels import escape_formula
from otel_limits.ledger.options import KEY_PREFIX
from otel_limits.ledger.rows import dollar_text, time_of
from otel_limits.ledger.schema import (
    INVOCATION_TABLE,
    MODEL_CALL_TABLE,
    TOOL_CALL_TABLE,
    UNCOUNTED_TABLE,
    insertable_columns,
)
from otel_limits.ledger.selection import Joins, Selection, audit_keys

if TYPE_CHECKING:
    from otel_limits.core.wording import ProgressBar


Portion: TypeAlias = Sequence[Sequence[Any]]
"""Rows that are in memory together."""

What = Literal["calls", "invocations", "tools", "uncounted"]
TABLES: Final = {
    "calls": MODEL_CALL_TABLE,
    "invocations": INVOCATION_TABLE,
    "tools": TOOL_CALL_TABLE,
    "uncounted": UNCOUNTED_TABLE,
}

PORTION: Final = 1_000
"""Rows that are in memory together, and in the cache of a processor."""


@dataclass(frozen=True, slots=True)
class Export:
    """What to write, and where."""

    what: What
    form: Literal["csv", "jsonl"]
    output: str | None
    """A file; `None` for standard output."""


@dataclass(frozen=True, slots=True)
class ExportedColumn:
    """One column of the file."""

    name: str
    kind: Literal["text", "integer", "boolean", "time", "money", "midnight", "decimal"]
    column: Any


def write(
    connection: sa.Connection, selection: Selection, chosen: Export, work: ProgressBar
) -> int:
    """Write the rows of a selection, in the order in which they were recorded; return their number.

    Raises:
        LedgerError: The file cannot be written.
    """
    table = TABLES[chosen.what]
    joins = Joins(table)
    # Audit keys are columns as well, though the ledger stores them in a separate table.
    fields = fields_of(joins, table, audit_keys(connection))
    # Explicit, since PostgreSQL joins in any order.
    order = [table.c.started_us, table.c.id] if table is INVOCATION_TABLE else [table.c.id]
    statement = joins.select(selection, *(each.column for each in fields)).order_by(*order)
    rows = connection.execute(statement, execution_options={"yield_per": PORTION})
    return write_rows(fields, work.through(rows.partitions()), chosen)


def write_rows(fields: Sequence[ExportedColumn], rows: Iterable[Portion], chosen: Export) -> int:
    """Write portions of rows in the chosen form; return the number of rows.

    Raises:
        LedgerError: The file cannot be written.
    """
    write_as = write_csv if chosen.form == "csv" else write_json_lines
    written = 0

    def counted() -> Iterator[Portion]:
        nonlocal written
        for portion in rows:
            yield portion
            written += len(portion)

    try:
        write_as(fields, counted(), chosen.output)
    # A disk may also fill up while rows are written.
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe: not an error
            raise
        output = chosen.output or "output"
        raise LedgerError(f"Cannot write {output}: {error.strerror}.") from None
    return written


def fields_of(joins: Joins, table: sa.Table, keys: Iterable[str]) -> list[ExportedColumn]:
    """List the columns of a table, and one per audit key."""
    own = [field_of(table.c[name], joins) for name in insertable_columns(table)]
    taken = {each.name for each in own}
    audited = [
        ExportedColumn(
            KEY_PREFIX + key if key in taken else key, "text", joins.column(KEY_PREFIX + key)
        )
        for key in keys
    ]
    return own + audited


def field_of(column: Any, joins: Joins) -> ExportedColumn:
    """Describe how a column is written: times and money under a name without their stored unit.

    What a call leaves to its invocation is written in full.
    """
    if column.name in ("trace_id", "root_id"):
        return ExportedColumn(column.name, "text", joins.column(column.name.removesuffix("_id")))
    if column.name in ("at_us", "started_us", "ended_us"):
        return ExportedColumn(column.name.removesuffix("_us"), "time", column)
    if column.name.endswith("_pico"):
        return ExportedColumn(column.name.replace("_pico", "_usd"), "money", column)
    if isinstance(column.type, sa.Boolean):
        return ExportedColumn(column.name, "boolean", column)
    is_text = isinstance(column.type, sa.Text)
    return ExportedColumn(column.name, "text" if is_text else "integer", column)


def columns_of(fields: Sequence[ExportedColumn], rows: Portion) -> Iterator[Sequence[Any]]:
    """Format rows for text files, column by column: value by value takes twice as long."""
    for field, values in zip(fields, zip(*rows, strict=True), strict=True):
        format_value = FORMATS.get(field.kind)
        if format_value is None:
            yield values
        else:
            # Each value once: columns have few distinct ones, or cost little more.
            texts = {each: None if each is None else format_value(each) for each in set(values)}
            yield list(map(texts.__getitem__, values))


FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "time": lambda value: time_of(value).isoformat(),
    "midnight": "{}T00:00:00Z".format,
    # Never in scientific notation, which spreadsheets read as text.
    "money": dollar_text,
    "decimal": "{:f}".format,
}
"""Formats of values that text files cannot hold: ISO 8601 in UTC, and exact decimals."""


def write_csv(
    fields: Sequence[ExportedColumn], rows: Iterable[Portion], output: str | None
) -> None:
    """Write comma-separated values; nulls are empty."""
    with _opened(output) as file:
        # Not the `\r\n` of RFC 4180, which Unix tools read as part of the last column.
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields])
        for portion in rows:
            columns = (
                # Only names, which come from models and callers, can be formulas.
                _escaped(column) if field.kind == "text" else column
                for field, column in zip(fields, columns_of(fields, portion), strict=True)
            )
            writer.writerows(zip(*columns, strict=True))


def _escaped(column: Sequence[Any]) -> Sequence[Any]:
    # Most values are the same few names.
    escaped = {value: escape_formula(value) for value in set(column)}
    return list(map(escaped.__getitem__, column))


def write_json_lines(
    fields: Sequence[ExportedColumn], rows: Iterable[Portion], output: str | None
) -> None:
    """Write one JSON object per line."""
    names = [field.name for field in fields]
    # Line by line: readers may not be able to hold years of rows either.
    with _opened(output) as file:
        for portion in rows:
            for values in zip(*columns_of(fields, portion), strict=True):
                row = dict(zip(names, values, strict=True))
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextmanager
def _opened(output: str | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    with _replacing(Path(output)) as path, path.open("w", encoding="utf-8", newline="") as file:
        yield file


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Write next to the file, and replace it once complete."""
    # A pipe, a device such as /dev/stdout, or the target of a link is written to directly:
    # replacing it would take it away from its other users.
    if path.exists() and (path.is_symlink() or not path.is_file()):
        yield path
        return
    # Readers never see half a file, and an older one survives a failure.
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
