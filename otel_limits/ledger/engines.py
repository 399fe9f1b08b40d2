"""Engines for the databases of ledgers, SQLite and PostgreSQL, with their settings and tables."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.secrets import redact_error, redact_secrets, secrets_in
from otel_limits.ledger import files
from otel_limits.ledger.schema_version import create_tables, has_tables

if TYPE_CHECKING:
    import psycopg

    from otel_limits.ledger.address import Address

BUSY_SECONDS: Final = 5.0
"""How long a write waits for another process's write. Only the writer thread waits."""

SERVER_SECONDS: Final = 10
"""Timeout of a PostgreSQL server: for connecting, and for each statement."""

WRITES: Final = "otel_limits_writes"
"""Execution option of a connection that will write."""

DatabaseError = sa.exc.SQLAlchemyError
"""Base class of database errors."""


def reason_of(error: Exception) -> str:
    """Return the message of the driver or the system, as one line."""
    said = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
    return str(said).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def make_engine(address: Address) -> sa.Engine:
    """Create the engine for an address. It keeps one connection open, for one thread."""
    if address.file is None:
        engine = sa.create_engine(
            address.url,
            hide_parameters=True,
            pool_size=1,
            max_overflow=0,
            # A connection closed by a restart or an idle timeout is replaced.
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": SERVER_SECONDS,
                "application_name": "otel-limits",
                # A pooler such as PgBouncer runs each transaction in any session of the server,
                # which may lack a statement prepared in another, or have one of the same name.
                "prepare_threshold": None,
                # Overrides the role's setting. From an SQL_ASCII database it would return bytes, as
                # their encoding is unknown.
                "client_encoding": "UTF8",
            },
        )
        sa.event.listen(engine, "connect", _set_up_postgresql)
        sa.event.listen(engine, "handle_error", _redact_errors(address.url))
        return engine
    file = address.file
    files.make_directory(file.parent, address.group)
    with contextlib.suppress(FileExistsError):
        files.create(file, address.group).close()
    engine = sa.create_engine(
        "sqlite://",  # an address would be read, and a path can hold anything
        hide_parameters=True,
        poolclass=sa.pool.QueuePool,
        pool_size=1,
        creator=lambda: sqlite3.connect(
            file,
            timeout=BUSY_SECONDS,
            check_same_thread=False,
            isolation_level=None,  # the driver's own transactions begin too late
        ),
    )
    sa.event.listen(engine, "connect", _set_up_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


@contextlib.contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Begin a transaction that queues with the other writers before it reads anything."""
    with engine.connect().execution_options(**{WRITES: True}) as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            # For this transaction only: a query may take any time.
            connection.execute(sa.text(f"SET LOCAL statement_timeout = {SERVER_SECONDS * 1000}"))
        yield connection


def prepare(engine: sa.Engine) -> None:
    """Create the tables if there are none.

    Raises:
        LedgerError: They are of another version. Then the database is unchanged.
    """
    # There nearly always are, and reading takes no lock.
    with engine.connect() as connection:
        is_new = not has_tables(connection)
    if engine.dialect.name == "sqlite":
        _set_up_file(engine)
    if is_new:
        with writing(engine) as connection:
            create_tables(connection)


def _redact_errors(url: str) -> Callable[[sa.engine.ExceptionContext], None]:
    """Redact the secrets of an address in the errors of its server, which may repeat them."""
    secrets = secrets_in(url)

    def redact(context: sa.engine.ExceptionContext) -> None:
        for error in (context.original_exception, context.sqlalchemy_exception):
            if error is not None:
                redact_error(error, lambda text: redact_secrets(text, secrets))

    return redact


def _set_up_postgresql(connection: psycopg.Connection[Any], _: object) -> None:
    """Write names in the encoding of the database, which may lack some of their characters."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding in (None, "UTF8", "SQL_ASCII"):
        return
    # In UTF-8 the server would reject such a name, and every other row of its transaction, forever.
    from psycopg.types.string import StrDumper

    class Escaping(StrDumper):
        """Escapes the characters that the encoding lacks."""

        def dump(self, text: str) -> bytes:
            return text.encode(connection.info.encoding, "backslashreplace")

    connection.execute(f"SET client_encoding TO {encoding}")
    connection.commit()
    connection.adapters.register_dumper(str, Escaping)


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(WRITES)
    # A transaction that reads first and then writes fails immediately in SQLite if another one
    # wrote in between. IMMEDIATE queues instead, for up to `timeout`.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _set_up_sqlite(connection: Any, _: object) -> None:
    try:
        # With a write-ahead log, only FULL syncs each commit. NORMAL, the default of some builds,
        # keeps the file consistent in a power failure, but loses the last commits.
        connection.execute("PRAGMA synchronous = FULL")
        # 64 MiB: the log is truncated to this after a larger transaction, such as an import.
        connection.execute("PRAGMA journal_size_limit = 67108864")
        # As in PostgreSQL, so patterns mean the same in both.
        connection.execute("PRAGMA case_sensitive_like = ON")
    except BaseException:
        # SQLAlchemy would only drop it, and Python warn.
        connection.close()
        raise


def _set_up_file(engine: sa.Engine) -> None:
    """Configure the file itself, of this version or new: another one is left as it is."""
    # By the driver, as SQLite changes this outside transactions only.
    with contextlib.closing(engine.raw_connection()) as connection:
        driver: Any = connection.driver_connection
        driver.execute("PRAGMA auto_vacuum = INCREMENTAL")  # affects new files only
        _use_write_ahead_log(driver)


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Enable concurrent readers, where the file system supports it."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            # Another process may be doing the same right now, and SQLite does not queue for this.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(BUSY_SECONDS / 100)
