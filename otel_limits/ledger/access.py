"""Checks whether a ledger is writable, without writing to it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from otel_limits.ledger.engines import DatabaseError, make_engine, reason_of
from otel_limits.ledger.schema import INVOCATION_TABLE

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.ledger.address import Address

BUSY_SECONDS: Final = 2.0

RIGHTS: Final = sa.text(
    "SELECT CASE WHEN to_regclass(:name) IS NULL "
    "THEN has_schema_privilege(current_schema(), 'CREATE') "
    "ELSE has_table_privilege(to_regclass(:name), 'INSERT, UPDATE') END"
)
"""Whether the tables can be created, or written if they exist."""


def write_error(address: Address) -> str | None:
    """Return why a ledger is not writable; `None` if it is."""
    if address.file is not None:
        return _file_write_error(address.file)
    engine = make_engine(address)
    try:
        with engine.connect() as connection:
            permitted = connection.execute(RIGHTS, {"name": INVOCATION_TABLE.name}).scalar()
    except DatabaseError as error:
        return reason_of(error)
    finally:
        engine.dispose()
    return None if permitted else "this user may not write its tables"


def _file_write_error(file: Path) -> str | None:
    # The nearest existing directory: those below it can be created.
    directory = next(parent for parent in file.parents if parent.exists())
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} cannot be written"
    if not file.exists():
        return None if directory.is_dir() else f"{directory} is not a directory"
    if file.is_dir():
        return f"{file} is a directory"
    # First: SQLite would create auxiliary files that the owner of this one cannot write.
    if not os.access(file, os.W_OK):
        return f"{file} cannot be written"
    try:
        opened = sqlite3.connect(f"{file.as_uri()}?mode=rw", timeout=BUSY_SECONDS, uri=True)
        with contextlib.closing(opened) as connection:
            # A transaction that may write, and writes nothing.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("SELECT count(*) FROM sqlite_master")
            connection.rollback()
    except sqlite3.Error as error:
        return str(error)
    return None
