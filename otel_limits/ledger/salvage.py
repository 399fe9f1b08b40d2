"""Recovers the readable rows of a damaged SQLite ledger into a new one.

A damaged page hides its own rows only: each table is read by ranges of row numbers, and an
unreadable range is halved until only the unreadable rows are left out.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_limits.core.errors import LedgerError
from otel_limits.core.wording import pluralize
from otel_limits.ledger.database import complete
from otel_limits.ledger.schema import TABLES

if TYPE_CHECKING:
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.rows import Rows

PORTION: Final = 2_000
"""Rows that are read together."""

MAX_ROW: Final = 2**40
"""An upper bound, where the search starts if the last row cannot be found."""

UNREADABLE: Final = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of reading: a damaged error message cannot be decoded."""


@dataclass(slots=True)
class Salvaged:
    """The result of a recovery."""

    rows: int = 0
    rows_lost: int = 0
    """Row numbers that cannot be read. Some may not be rows: pruned rows leave their numbers."""
    ends_lost: int = 0
    """Tables whose number of rows is unknown."""
    tables_lost: int = 0

    def __str__(self) -> str:
        """Summarize it."""
        parts = [pluralize(self.rows, "row was recovered", "rows were recovered")]
        if self.rows_lost:
            parts.append(f"up to {pluralize(self.rows_lost, 'row')} could not be read")
        if self.ends_lost:
            tables = pluralize(self.ends_lost, "table has", "tables have")
            parts.append(f"{tables} an unreadable end with an unknown number of rows")
        if self.tables_lost:
            parts.append(pluralize(self.tables_lost, "table is missing", "tables are missing"))
        return "; ".join(parts) + "."

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return not (self.rows_lost or self.ends_lost or self.tables_lost)


def salvage(damaged: Path, database: Database) -> Salvaged:
    """Copy every readable row of a damaged file into a ledger.

    Raises:
        LedgerError: The file is not an SQLite database.
    """
    done = Salvaged()
    # SQLite reads its write-ahead log, too, if there is one, and writes to neither. Without one, it
    # must not create it.
    mode = "mode=ro" if Path(f"{damaged}-wal").exists() else "immutable=1"
    connection = sqlite3.connect(f"{damaged.absolute().as_uri()}?{mode}", uri=True)
    connection.row_factory = sqlite3.Row
    # Damaged text gets replacement characters: one name must not end the recovery.
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    # This writes nothing. It makes the first statement fail on a damaged schema, and later ones see
    # the readable part of it: otherwise one damaged name would hide every table.
    connection.execute("PRAGMA writable_schema = ON")
    with contextlib.suppress(*UNREADABLE):
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    try:
        for table in TABLES:
            for rows in _readable(connection, table.name, done):
                done.rows += sum(database.write(rows).values())
    except UNREADABLE as error:
        raise LedgerError(f"{damaged} cannot be read: {error}.") from None
    finally:
        connection.close()
    return done


def _readable(connection: sqlite3.Connection, table: str, done: Salvaged) -> Iterator[Rows]:
    """Read a table, portion by portion."""
    try:
        connection.execute(f"SELECT 1 FROM {table} LIMIT 0")  # noqa: S608
    except UNREADABLE as error:
        if "not a database" in str(error):
            raise
        done.tables_lost += 1
        return
    last = _last_row(connection, table)
    is_known = last is not None
    if last is None:
        last = _search(connection, table)
    first = 1
    while first <= last:
        yield from _range(connection, table, first, min(last, first + PORTION - 1), done)
        first = _next_row(connection, table, first + PORTION)  # skips what prune has deleted
    if not is_known:
        done.ends_lost += 1
        # A later page may be readable. Unreadable numbers here need not have been rows.
        yield from _range(connection, table, last + 1, last + PORTION, Salvaged())


def _range(
    connection: sqlite3.Connection, table: str, first: int, last: int, done: Salvaged
) -> Iterator[Rows]:
    """Read a range of rows, halving it while it is unreadable."""
    query = f"SELECT * FROM {table} WHERE rowid BETWEEN ? AND ?"  # noqa: S608
    try:
        found = [complete(table, dict(row)) for row in connection.execute(query, (first, last))]
    except UNREADABLE:
        if first == last:
            done.rows_lost += 1
            return
        middle = (first + last) // 2
        yield from _range(connection, table, first, middle, done)
        yield from _range(connection, table, middle + 1, last, done)
        return
    whole = [(table, row) for row in found if row is not None]
    done.rows_lost += len(found) - len(whole)
    if whole:
        yield whole


def _last_row(connection: sqlite3.Connection, table: str) -> int | None:
    try:
        found = connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0]  # noqa: S608
    except UNREADABLE:
        known = list(_last_in_indexes(connection, table))
        return max(known, default=None)
    return int(found or 0)


def _last_in_indexes(connection: sqlite3.Connection, table: str) -> Iterator[int]:
    """Find the last row in each index; partial indexes do not contain all rows."""
    names = connection.execute(f"PRAGMA index_list({table})").fetchall()
    for _, name, _, _, is_partial in names:
        query = f"SELECT max(rowid) FROM {table} INDEXED BY {name}"  # noqa: S608
        try:
            if not is_partial:
                yield int(connection.execute(query).fetchone()[0] or 0)
        except UNREADABLE:
            continue


def _search(connection: sqlite3.Connection, table: str) -> int:
    """Find the last readable row, if the end of the table is not."""
    readable, beyond = 0, MAX_ROW
    while beyond - readable > 1:
        middle = (readable + beyond) // 2
        if _has(connection, table, middle):
            readable = middle
        else:
            beyond = middle
    return readable


def _has(connection: sqlite3.Connection, table: str, row: int) -> bool:
    """Return whether there is a readable row at or after this one."""
    query = f"SELECT 1 FROM {table} WHERE rowid >= ? LIMIT 1"  # noqa: S608
    try:
        return connection.execute(query, (row,)).fetchone() is not None
    except UNREADABLE:
        return False


def _next_row(connection: sqlite3.Connection, table: str, row: int) -> int:
    """Return the next row at or after this one; the same if unreadable."""
    query = f"SELECT rowid FROM {table} WHERE rowid >= ? ORDER BY rowid LIMIT 1"  # noqa: S608
    try:
        found = connection.execute(query, (row,)).fetchone()
    except UNREADABLE:
        return row
    return MAX_ROW if found is None else int(found[0])
