"""A read-only view of a ledger, after rows that wait in spill files were taken in."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError, LedgerMovedError
from otel_limits.ledger.database import BUSY_SECONDS, make_engine
from otel_limits.ledger.schema import create_tables, has_tables
from otel_limits.ledger.spill import SpillFiles
from otel_limits.ledger.waiting_rows import WaitingRows, restore_waiting_rows

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address


# --- opening a ledger -----------------------------------------------------------------------------

MAGIC: Final = b"SQLite format 3\x00"


@contextlib.contextmanager
def open_for_query(address: Address) -> Iterator[tuple[sa.Connection, WaitingRows]]:
    """Open a ledger for queries, all of which see the same state, and say which rows they lack.

    Raises:
        LedgerError: There is none, or its schema version is not this program's.
    """
    waiting = WaitingRows()
    if SpillFiles(address).files():
        # Check its version before rows are written to it. If it moved, a process of this version
        # has opened it.
        with contextlib.suppress(LedgerMovedError), contextlib.ExitStack() as stack:
            has_tables(_connection(address, stack, has_spilled=True))
        waiting = restore_waiting_rows(address)
    with contextlib.ExitStack() as stack:
        connection = _connection(address, stack, has_spilled=bool(waiting.files))
        if waiting.files and not has_tables(connection):
            # The spill files prove that it is a ledger whose tables could not be created yet.
            connection = _connected(_empty_engine(), stack)
        require_tables(connection, address)
        yield connection, waiting


def _connection(
    address: Address, stack: contextlib.ExitStack, *, has_spilled: bool
) -> sa.Connection:
    """Open a database that may be a ledger, without writing to it."""
    file = address.file
    if file is None:
        # All statements see the same rows, as in SQLite: otherwise an invocation that ends between
        # two of them has calls in one and no total in the other.
        server = make_engine(address).execution_options(isolation_level="REPEATABLE READ")
        return _connected(server, stack)
    # A full disk leaves an empty file of a new ledger.
    if (not file.exists() or not file.stat().st_size) and has_spilled:
        return _connected(_empty_engine(), stack)
    _require_ledger_file(file, address)
    connect = _open_strategy(file, stack)
    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.pool.QueuePool)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return _connected(engine, stack)


def _connected(engine: sa.Engine, stack: contextlib.ExitStack) -> sa.Connection:
    stack.callback(engine.dispose)
    return stack.enter_context(engine.connect())


def _empty_engine() -> sa.Engine:
    """Create an in-memory ledger without rows."""
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
    with engine.begin() as connection:
        create_tables(connection)
    return engine


def _require_ledger_file(file: Path, address: Address) -> None:
    """Check that a file exists and is a database.

    Raises:
        LedgerError: There is none.
    """
    if not file.exists():
        raise LedgerError(
            f"No ledger found at {address}. A program under otel-limits run creates one. Name "
            "another with --ledger or OTEL_LIMITS_LEDGER."
        )
    if file.is_dir():
        raise LedgerError(f"{address} is a directory. Use a file in it, e.g. {file / 'ledger.db'}")
    with file.open("rb") as opened:
        # Before SQLite opens it, which would turn an empty file into a database.
        if opened.read(len(MAGIC)) != MAGIC:
            raise LedgerError(
                f"{address} is not a ledger, or its header was overwritten. To recover one, run: "
                f"{address.recovery} (see: otel-limits docs ledger)"
            )


def is_damaged(address: Address) -> bool:
    """Return whether a file fails SQLite's integrity check."""
    if address.file is None or not address.file.exists():
        return False
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(contextlib.closing(_open_strategy(address.file, stack)()))
            return bool(file.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok")
    except (sqlite3.Error, UnicodeDecodeError):  # even the error message is damaged
        return True


def require_ledger(address: Address) -> None:
    """Check that there is a ledger, before anything changes it.

    Raises:
        LedgerError: There is none.
    """
    # Another process may open it at the same time, which does not change its version.
    with contextlib.suppress(LedgerMovedError), contextlib.ExitStack() as stack:
        require_tables(_connection(address, stack, has_spilled=False), address)


def require_tables(connection: sa.Connection, address: Address) -> None:
    """Check that there is a ledger of this schema version.

    Raises:
        LedgerError: There is none.
    """
    if not has_tables(connection):
        # An empty database may belong to another application, and a query must not create tables in
        # it.
        raise LedgerError(f"The database {address} contains no ledger.")


# --- read-only SQLite -----------------------------------------------------------------------------

LOG_HEADER_BYTES: Final = 32
MOVED: Final = "The ledger changed during the query. Try again."


def _open_strategy(file: Path, stack: contextlib.ExitStack) -> Any:
    """Choose how to open a file: with a write-ahead log, SQLite needs auxiliary files."""

    def opened(path: Path, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{path.as_uri()}?{mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            check_same_thread=False,
            isolation_level=None,
        )
        try:
            connection.execute("PRAGMA case_sensitive_like = ON")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except BaseException:
            connection.close()
            raise
        return connection

    log, index = (file.with_name(file.name + suffix) for suffix in ("-wal", "-shm"))
    if not log.exists():
        # The file is complete and not open elsewhere. Only in this mode does SQLite create no
        # files, and work in read-only directories.
        stack.callback(_require_unmoved, file, log, file.stat().st_mtime_ns)
        return lambda: opened(file, "immutable=1")
    if index.exists():
        try:
            opened(file, "mode=ro").close()
        except sqlite3.OperationalError as error:
            if "malformed" in str(error) or "locked" in str(error):
                raise
        else:
            return lambda: opened(file, "mode=ro")
    # A copy: SQLite would create the index of the log and leave it there, and cannot in a
    # read-only directory.
    copy = _copied(file, log, stack)
    return lambda: opened(copy, "mode=rw")


def _copied(file: Path, log: Path, stack: contextlib.ExitStack) -> Path:
    """Copy a database with its write-ahead log, consistently.

    Raises:
        LedgerMovedError: They changed during the copy.
    """
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="otel-limits-")))
    copy, copied_log = directory / "ledger.db", directory / "ledger.db-wal"
    try:
        before = _generation(log)
        shutil.copyfile(file, copy)
        shutil.copyfile(log, copied_log)
    except FileNotFoundError:  # its last user closed it
        raise LedgerMovedError(MOVED) from None
    # The log is moved into the database before it restarts: such a copy would miss its content.
    if _generation(copied_log) != before:
        raise LedgerMovedError(MOVED)
    return copy


def _generation(log: Path) -> bytes:
    """Return the header of a write-ahead log, which changes whenever the log restarts.

    Its last 16 bytes are new salts and a checksum: https://www.sqlite.org/walformat.html.
    """
    with log.open("rb") as opened:
        return opened.read(LOG_HEADER_BYTES)


def _require_unmoved(file: Path, log: Path, modified: int) -> None:
    """Raise if the ledger was opened for writing during the query."""
    if log.exists() or file.stat().st_mtime_ns != modified:
        raise LedgerMovedError(MOVED)
