"""The database of a ledger, as a process opens it, writes to it and closes it."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Final

from otel_limits.ledger import files
from otel_limits.ledger.engines import make_engine, prepare, writing
from otel_limits.ledger.insertion import write_rows
from otel_limits.ledger.schema_version import require_version

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import sqlalchemy as sa

    from otel_limits.ledger.address import Address
    from otel_limits.ledger.rows import Rows

ABANDONED: Final[list[sa.Engine]] = []
"""Engines of the parent process, never closed: that could damage the parent's connections."""


class Database:
    """A ledger's database. Not thread-safe.

    Args:
        address: Where it is.
    """

    def __init__(self, address: Address) -> None:
        """Import what opening needs, so that no fork can happen during that; open nothing yet."""
        # A child forked while another thread imports would wait forever for the import lock. Only
        # the required dialect: each takes 50 ms.
        dialect = "sqlite" if address.file else "postgresql"
        importlib.import_module(f"sqlalchemy.dialects.{dialect}")
        if address.file is None:
            importlib.import_module("psycopg")
        self.address = address
        self._engine: sa.Engine | None = None
        self._identity: tuple[int, ...] | None = None

    def write(self, rows: Rows) -> dict[str, int]:
        """Write `rows` in one transaction. Existing rows are unchanged.

        Returns:
            Number of changed rows, by table.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: The database failed, and nothing was written.
            OSError: Its file vanished or cannot be created.
            LedgerError: Its schema version is not this program's.
        """
        try:
            changed = self._write(rows)
            # The file may have been replaced during the write to the old one.
            if self._has_moved():
                changed = self._write(rows)
        except BaseException:
            # The connection itself may be broken: the next attempt opens a new one.
            self.close()
            raise
        return changed

    def _write(self, rows: Rows) -> dict[str, int]:
        if self._has_moved():
            self.close()
        with self.changing() as connection:
            require_version(connection)
            return write_rows(connection, rows)

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """Open a connection for queries."""
        return self.engine().connect()

    def changing(self) -> AbstractContextManager[sa.Connection]:
        """Open a transaction, committed at the end."""
        return writing(self.engine())

    def engine(self) -> sa.Engine:
        """Return the engine, opened on first use, with its tables."""
        if self._engine is None:
            engine = make_engine(self.address)
            try:
                prepare(engine)
            except BaseException:
                engine.dispose()
                raise
            self._engine = engine
            self._share()
            self._identity = self._file_identity()
        return self._engine

    def _share(self) -> None:
        """Let the group read SQLite's auxiliary files, which only inherit the mode."""
        file, group = self.address.file, self.address.group
        if file is None or group is None:
            return
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(OSError):
                files.share(file.with_name(file.name + suffix), group)

    def close(self) -> None:
        """Close the connections. The next use opens new ones."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()

    def abandon(self) -> None:
        """Forget the parent's connections in a forked child."""
        engine, self._engine = self._engine, None
        if engine is not None:
            ABANDONED.append(engine)

    def _has_moved(self) -> bool:
        """Return whether the open file is no longer at its path: its rows would be lost."""
        return self._engine is not None and self._identity != self._file_identity()

    def _file_identity(self) -> tuple[int, ...] | None:
        if self.address.file is None:
            return None
        # SQLite resolves links when it opens a file, and keeps its log next to the target.
        file = os.path.realpath(self.address.file)
        # The log as well: if the directory was deleted and the file recreated, the open log has no
        # name.
        return (*identity(file), *identity(f"{file}-wal"))


def identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return an identity that no other file has, not even a replacement; zeros if there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116  on the path of every commit
    except OSError:
        return (0, 0)
    return (status.st_dev, status.st_ino)
