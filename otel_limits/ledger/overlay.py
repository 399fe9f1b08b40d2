"""Shows rows that wait in spill files to the queries of a connection, as if in the tables.

They are written as a process would write them, into temporary tables: SQLite and PostgreSQL resolve
temporary names first. The rows of the database that they may repeat or change are copied there
before. At the end, temporary views with the names of the tables show both.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import sqlalchemy as sa

from otel_limits.ledger import files
from otel_limits.ledger.database import CHANGEABLE, NUMBERED, reason_of, write_rows
from otel_limits.ledger.rows import RECOUNTS, Rows
from otel_limits.ledger.schema import PARTIAL_INDEXES, PROOF_INDEX, RUNS, SPEND_INDEX, TABLES
from otel_limits.ledger.spill import rows_in
from otel_limits.ledger.totals import SUMMED

OVERLAID: Final = "otel_limits_overlaid"
"""Marks a connection that sees more than the database contains; another one would not."""

SPOOLED_BYTES: Final = 16 * 2**20
"""Spilled rows that are kept in memory; more are copied to the temporary directory."""
BLOCK_BYTES: Final = 2**18
PORTION: Final = 3_000
"""Rows that are written together: fewer take longer, and more need more memory."""

UNUSED: Final = (SPEND_INDEX.name, PROOF_INDEX.name)
"""Indexes that contain what a query sums, which takes a table instead if it is in a view."""

TOTALS: Final = (*SUMMED, "turns", "cycles", "tool_calls")
"""Columns of an invocation that depend on its calls."""

TOUCHED: Final = sa.Table("otel_limits_touched", sa.MetaData(), sa.Column("id", sa.Text()))
"""Invocations and other records of the rows that are written next; a temporary table."""


@dataclass(slots=True)
class PendingSpill:
    """Rows in spill files, not yet in the database."""

    files: list[Path] = field(default_factory=list)
    rows: int = 0
    """Rows that the database does not have."""
    damaged: int = 0
    """Lines that are not rows."""
    oldest_us: int | None = None
    unseen: str = ""
    """Why the answer is without them, if it is."""


@contextlib.contextmanager
def spooled(waiting: PendingSpill) -> Iterator[IO[bytes] | None]:
    """Copy spill files, as writers delete them once the database has their rows.

    To one file, since a process can open fewer files than a fleet leaves behind. `None` if there
    are none, or if the copy failed, e.g. on a full disk.
    """
    with tempfile.SpooledTemporaryFile(SPOOLED_BYTES) as spool:
        try:
            for lines in _whole_lines(waiting.files):
                spool.write(lines)
        except OSError as error:
            waiting.unseen = reason_of(error)
            for lines in _whole_lines(waiting.files):
                for _ in _described(lines.splitlines(keepends=True), waiting):
                    pass
        spool.seek(0)
        yield None if waiting.unseen or not waiting.files else spool


def _whole_lines(paths: Iterable[Path]) -> Iterator[bytes]:
    """Read files in blocks of lines, without half a row at the end of a file.

    Such a row was never acknowledged, as its process was killed during the write.
    """
    for path in paths:
        file = files.open_existing(path)
        if file is None:
            continue
        with file:
            rest = b""
            while block := file.read(BLOCK_BYTES):
                lines, newline, rest = (rest + block).rpartition(b"\n")
                yield lines + newline
            if any(rows_in([rest], lambda _: None)):  # only its newline is missing
                yield rest + b"\n"


def overlay(connection: sa.Connection, waiting: PendingSpill, spool: IO[bytes]) -> None:
    """Show spilled rows to every query of a connection, and describe them in `waiting`."""
    portions = _described(spool, waiting)
    first = next(portions, None)
    # Most queries meet no pending rows, and should not pay for temporary tables.
    if first is None:
        return
    try:
        shown = _show(connection, itertools.chain([first], portions))
    except sa.exc.SQLAlchemyError as error:
        # The error aborts PostgreSQL's transaction; the answer continues without the pending rows,
        # and reports that.
        connection.rollback()
        waiting.unseen = reason_of(error)
        for _ in portions:  # counts the others
            pass
    else:
        waiting.rows = shown
    connection.info[OVERLAID] = True


def _described(lines: Iterable[bytes], waiting: PendingSpill) -> Iterator[Rows]:
    """Read rows in portions, and count them."""

    def count_damaged(_: bytes) -> None:
        waiting.damaged += 1

    for rows in rows_in(lines, count_damaged, PORTION):
        waiting.rows += sum(name != RECOUNTS for name, _ in rows)
        times = [row.get("at_us") or row.get("started_us") for _, row in rows]
        oldest = min((time for time in times if time), default=None)
        if oldest is not None:
            waiting.oldest_us = min(oldest, waiting.oldest_us or oldest)
        yield rows


def _show(connection: sa.Connection, portions: Iterator[Rows]) -> int:
    """Write rows to temporary tables and show these; returns how many the database lacks."""
    if connection.dialect.name == "sqlite":
        home, temporary = "main", "temp"
        # 32 MiB: the keys of waiting rows are random.
        connection.exec_driver_sql("PRAGMA temp.cache_size = -32768")
    else:
        home = str(connection.execute(sa.select(sa.func.current_schema())).scalar())
        temporary = "pg_temp"
    stored = {
        table.name: table.to_metadata(sa.MetaData(), schema=home).alias("stored")
        for table in TABLES
    }
    _create(connection, temporary, stored)
    touched = sa.select(TOUCHED.c.id)
    copies = [
        _copy(table, source, source.c[_owner(table)].in_(touched))
        for table, source in zip(TABLES, stored.values(), strict=True)
    ]
    for rows in portions:
        _copy_for(connection, copies, rows)
        write_rows(connection, rows)
    return sum(_combine(connection, table, stored[table.name], home) for table in TABLES)


def _create(connection: sa.Connection, temporary: str, stored: Mapping[str, sa.FromClause]) -> None:
    """Create temporary tables with all indexes; new rows get numbers that no other row has."""
    metadata = sa.MetaData()
    for table in TABLES:
        created = table.to_metadata(metadata, schema=temporary)
        created.indexes -= {each for each in created.indexes if each.name in UNUSED}
    TOUCHED.to_metadata(metadata, schema=temporary)
    metadata.create_all(connection, checkfirst=False)
    for statement in PARTIAL_INDEXES:
        connection.exec_driver_sql(statement)
    for table in NUMBERED:
        number = stored[table.name].c.id
        last = connection.execute(sa.select(sa.func.max(number))).scalar()
        if last is not None and connection.dialect.name == "sqlite":
            # The next number follows the largest of the table.
            connection.execute(_copy(table, stored[table.name], number == last))
        elif last is not None:
            sequence = sa.func.pg_get_serial_sequence(f"{temporary}.{table.name}", "id")
            connection.execute(sa.select(sa.func.setval(sequence, last)))


def _copy_for(connection: sa.Connection, copies: Sequence[sa.Insert], rows: Rows) -> None:
    """Copy what the database has of the invocations and other records of some rows."""
    ids = {row.get("invocation_id") or row["id"] for _, row in rows}
    connection.execute(TOUCHED.insert(), [{"id": each} for each in ids])
    # Only once: an invocation may have any number of calls.
    connection.execute(TOUCHED.delete().where(TOUCHED.c.id.in_(sa.select(RUNS.id))))
    for copy in copies:
        connection.execute(copy)
    connection.execute(TOUCHED.delete())


def _copy(table: sa.Table, source: sa.FromClause, which: sa.ColumnElement[bool]) -> sa.Insert:
    """Copy those rows of the database that are not in the temporary table yet."""
    copied = table.alias()
    has_copy = sa.exists().where(*(copied.c[name] == source.c[name] for name in _key(table)))
    names = [column.name for column in table.columns if column.computed is None]
    chosen = sa.select(*(source.c[name] for name in names)).where(which, ~has_copy)
    return table.insert().from_select(names, chosen)


def _combine(connection: sa.Connection, table: sa.Table, source: sa.FromClause, home: str) -> int:
    """Show a table and its temporary one under its name; returns how many rows are new."""
    connection.execute(table.delete().where(_is_stored(table, source)))
    rows = sa.select(sa.func.count()).select_from(table)
    # The temporary table, which is found first.
    if not connection.execute(rows).scalar():
        connection.exec_driver_sql(f"DROP TABLE {table.name}")
        return 0
    # Calls that wait change the totals of an invocation, whose own row may not wait.
    added = connection.execute(rows.where(~_is_stored(table, source, *TOTALS))).scalar()
    kept = f"{table.name}_waiting"
    connection.exec_driver_sql(f"ALTER TABLE {table.name} RENAME TO {kept}")
    names = ", ".join(column.name for column in table.columns)
    # Rows of other tables never change, and their number is never used again.
    hidden = f" WHERE id NOT IN (SELECT id FROM {kept})" if table in CHANGEABLE else ""  # noqa: S608
    connection.exec_driver_sql(
        f"CREATE TEMP VIEW {table.name} AS SELECT {names} FROM {home}.{table.name}{hidden} "  # noqa: S608
        f"UNION ALL SELECT {names} FROM {kept}"
    )
    return int(added or 0)


def _is_stored(table: sa.Table, source: sa.FromClause, *ignored: str) -> sa.ColumnElement[bool]:
    """Whether the database has the same row."""
    key = _key(table)
    others = [each for each in table.columns if each.name not in {*key, *ignored}]
    return sa.exists().where(
        *(source.c[name] == table.c[name] for name in key),
        *(source.c[each.name].is_not_distinct_from(each) for each in others),
    )


def _owner(table: sa.Table) -> str:
    return "invocation_id" if "invocation_id" in table.c else "id"


def _key(table: sa.Table) -> list[str]:
    return [column.name for column in table.primary_key]
