"""The database of a ledger: opened, checked, and written so that each row counts once."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa

from otel_limits.core.secrets import redact_error, redact_secrets, secrets_in
from otel_limits.ledger import files
from otel_limits.ledger.recorded_live import delete_recorded_live
from otel_limits.ledger.rows import (
    ENDING,
    INVOCATIONS,
    LOST,
    MAINTENANCE,
    MODEL_CALLS,
    RECORDED_LIVE,
    RECOUNTS,
    SUPERSEDED,
    TOOL_CALLS,
    Row,
    Rows,
)
from otel_limits.ledger.schema import (
    CALLS,
    INVOCATION_TABLE,
    IS_IMPORTED,
    IS_TOTAL,
    MAINTENANCE_TABLE,
    MODEL_CALL_TABLE,
    RUNS,
    TABLES,
    TOOL_CALL_TABLE,
    UNCOUNTED_TABLE,
    create_tables,
    has_tables,
    insertable_columns,
    require_version,
)
from otel_limits.ledger.totals import recount, with_later_calls

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import psycopg
    from sqlalchemy.sql.compiler import SQLCompiler

    from otel_limits.ledger.address import Address


# --- the database of a ledger ---------------------------------------------------------------------

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


# --- inserting each row once ----------------------------------------------------------------------

NUMBERED: Final = (MODEL_CALL_TABLE, TOOL_CALL_TABLE)
"""Tables whose rows are numbered within their invocation."""

MANY: Final = 500
"""Rows from which on columns without values are left out of a statement: SQLite's driver takes
longer to bind a null than all else."""


def write_rows(connection: sa.Connection, rows: Rows) -> dict[str, int]:
    """Insert rows, and recount the invocations that they change; returns changes by table."""
    # Table by table rather than row by row: one statement for many rows is many times faster.
    of_table: defaultdict[str, list[Row]] = defaultdict(list)
    for name, row in rows:
        of_table[name].append(row)
    # PostgreSQL rejects a statement that changes a row twice.
    of_table[INVOCATIONS] = _one_per_id(of_table[INVOCATIONS], _replaces_end)
    of_table[MAINTENANCE] = _one_per_id(of_table[MAINTENANCE], _is_later)
    for row in of_table[SUPERSEDED]:
        _delete_superseded(connection, row)
    changed = {
        table.name: insert(connection, table, of_table[table.name])
        for table in TABLES
        if of_table[table.name]
    }
    recount(connection, _delete_totals(connection, of_table[MODEL_CALLS]))
    recount(connection, [row["id"] for row in of_table[RECOUNTS]])
    ended = [row["id"] for row in of_table[INVOCATIONS] if row["ended_us"] is not None]
    recount(connection, with_later_calls(connection, ended))
    # Invocations that were ended as lost may still make calls.
    ids = {row["invocation_id"] for name in (MODEL_CALLS, TOOL_CALLS) for row in of_table[name]}
    is_lost = (RUNS.action == LOST) & RUNS.id.in_(ids)
    recount(connection, list(connection.scalars(sa.select(RUNS.id).where(is_lost))))
    deleted = delete_recorded_live(connection, of_table)
    new = {table: changed[table] - deleted[table] for table in changed}
    return {**new, RECORDED_LIVE: deleted[RECORDED_LIVE]}


def _delete_superseded(connection: sa.Connection, row: Row) -> None:
    """Delete what a ledger has of a span that is now known to be the sum of other calls."""
    for table in (MODEL_CALL_TABLE, UNCOUNTED_TABLE):
        is_it = (table.c.trace_id == row["trace_id"]) & (table.c.span_id == row["span_id"])
        is_it &= IS_IMPORTED if table is MODEL_CALL_TABLE else sa.true()
        connection.execute(table.delete().where(is_it))


def _delete_totals(connection: sa.Connection, calls: list[Row]) -> list[str]:
    """Delete the totals of agents that have calls now, e.g. after a merge; return their IDs."""
    ids = {row["invocation_id"] for row in calls if row["source"] == "import"}
    if not ids:
        return []
    other = MODEL_CALL_TABLE.alias().c
    is_other = (other.invocation_id == CALLS.invocation_id) & (other.span_id != CALLS.span_id)
    is_replaced = IS_TOTAL & CALLS.invocation_id.in_(ids) & sa.exists().where(is_other)
    found = list(connection.scalars(sa.select(CALLS.invocation_id).where(is_replaced)))
    if found:
        is_total = IS_TOTAL & CALLS.invocation_id.in_(found)
        connection.execute(MODEL_CALL_TABLE.delete().where(is_total))
    return found


def _one_per_id(rows: list[Row], replaces: Callable[[Row, Row], bool]) -> list[Row]:
    """Keep the first row of each ID, unless a later one replaces it."""
    kept: dict[str, Row] = {}
    for row in rows:
        before = kept.get(row["id"])
        if before is None or replaces(row, before):
            kept[row["id"]] = row
    return list(kept.values())


def _replaces_end(row: Row, before: Row) -> bool:
    """Return whether an invocation had no end before, or only an assumed one."""
    is_real = row["ended_us"] is not None and row["action"] != LOST
    return before["ended_us"] is None or (before["action"] == LOST and is_real)


def _is_later(row: Row, before: Row) -> bool:
    """Return whether retention deleted up to a later time; other records have none."""
    return bool((row["until_us"] or 0) > (before["until_us"] or 0))


def insert(connection: sa.Connection, table: sa.Table, rows: list[Row]) -> int:
    """Insert new rows. The end of an invocation updates its row."""
    if table in NUMBERED:
        # No index identifies a live row without a number.
        rows = [
            row
            for row in rows
            if row["number"] is not None
            or row["source"] != "live"
            or not _is_known(connection, table, row)
        ]
    inserted = execute(connection, table, rows)
    if table in NUMBERED and inserted < len(rows):
        # Rarely: it queries each row separately.
        again = find_conflicts(connection, table, rows)
        if again:
            inserted += execute(connection, table, again)
    return inserted


def execute(connection: sa.Connection, table: sa.Table, rows: list[Row]) -> int:
    """Insert rows, and return how many rows changed.

    The driver is called with the compiled statement: SQLAlchemy's parameter handling takes ten
    times as long as SQLite's insertion.
    """
    columns = insertable_columns(table)
    if len(rows) >= MANY:
        columns = [name for name in columns if any(row[name] is not None for row in rows)]
    compiled = insertion(table, connection.dialect, tuple(columns))
    values: Any
    if connection.dialect.name == "sqlite":
        values = list(map(operator.itemgetter(*cast("list[str]", compiled.positiontup)), rows))
    else:
        values = {name: [row[name] for row in rows] for name in columns}
    return connection.exec_driver_sql(compiled.string, values).rowcount


@functools.lru_cache
def insertion(table: sa.Table, dialect: sa.Dialect, columns: tuple[str, ...]) -> SQLCompiler:
    """Compile the insertion into a table, which leaves existing rows unchanged.

    Its parameters are the values of one row for SQLite, and an array per column for PostgreSQL: one
    statement for all rows, which no server has to parse again for each.
    """
    maker: Any = importlib.import_module(f"sqlalchemy.dialects.{dialect.name}")
    values = maker.insert(table)
    if dialect.name == "sqlite":
        values = values.values({name: sa.bindparam(name) for name in columns})
    else:
        arrays = (sa.bindparam(name, type_=sa.ARRAY(table.c[name].type)) for name in columns)
        rows = sa.func.unnest(*arrays).table_valued(*columns).render_derived(name="new")
        values = values.from_select(list(columns), sa.select(*rows.c))
    if table is INVOCATION_TABLE:
        lost: Any = sa.literal_column(f"'{LOST}'")  # no parameter: rows have a value for each
        statement = values.on_conflict_do_update(
            index_elements=["id"],
            set_={column: values.excluded[column] for column in ENDING},
            # Only once: the first recorded end is the true one, unless an operator only assumed it.
            where=values.excluded.ended_us.is_not(None)
            & (
                table.c.ended_us.is_(None)
                | ((table.c.action == lost) & (values.excluded.action != lost))
            ),
        )
    elif table is MAINTENANCE_TABLE:
        statement = values.on_conflict_do_update(
            index_elements=["id"],
            set_={column: values.excluded[column] for column in ("at_us", "until_us")},
            # Retention deletes up to a later time each time.
            where=values.excluded.until_us > table.c.until_us,
        )
    else:
        # A spill file that is restored twice changes nothing.
        statement = values.on_conflict_do_nothing()
    return cast("SQLCompiler", statement.compile(dialect=dialect))


def _is_known(connection: sa.Connection, table: sa.Table, row: Row) -> bool:
    """Whether there is a row of the same invocation and time."""
    same = sa.exists().where(
        table.c.invocation_id == row["invocation_id"], table.c.at_us == row["at_us"]
    )
    return bool(connection.execute(sa.select(same)).scalar())


def find_conflicts(connection: sa.Connection, table: sa.Table, rows: list[Row]) -> list[Row]:
    """Find live rows that only look like replays, and clear their number.

    A replay is the same row again. A row with the same number at another time is not: it is kept,
    and an audit reports it.
    """
    numbered = [row for row in rows if row["number"] is not None]
    query = sa.select(table.c.at_us).where(
        table.c.invocation_id == sa.bindparam("invocation"), table.c.number == sa.bindparam("place")
    )
    unnumbered = sa.select(sa.func.count()).where(
        table.c.invocation_id == sa.bindparam("invocation"),
        table.c.number.is_(None),
        table.c.at_us == sa.bindparam("time"),
    )
    again: dict[tuple[str, int], Row] = {}
    for row in numbered:
        place = {"invocation": row["invocation_id"], "place": row["number"]}
        if connection.execute(query, place).scalar() == row["at_us"]:
            continue
        there = {"invocation": row["invocation_id"], "time": row["at_us"]}
        if not connection.execute(unnumbered, there).scalar():
            again[row["invocation_id"], row["at_us"]] = {**row, "number": None}
    return list(again.values())


# --- engines and transactions ---------------------------------------------------------------------

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


# --- checking whether it is writable --------------------------------------------------------------

CHECK_SECONDS: Final = 2.0

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
        opened = sqlite3.connect(f"{file.as_uri()}?mode=rw", timeout=CHECK_SECONDS, uri=True)
        with contextlib.closing(opened) as connection:
            # A transaction that may write, and writes nothing.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("SELECT count(*) FROM sqlite_master")
            connection.rollback()
    except sqlite3.Error as error:
        return str(error)
    return None
