"""The database of a ledger: opened, migrated, and written to exactly once."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa

from otel_limits.core.secrets import redact_error, redact_secrets, secrets_in
from otel_limits.ledger import files
from otel_limits.ledger.rows import (
    ENDING,
    INVOCATIONS,
    LOST,
    MAINTENANCE,
    MAX_INTEGER,
    MODEL_CALLS,
    RECOUNTS,
    TOOL_CALLS,
    Row,
    Rows,
)
from otel_limits.ledger.schema import (
    INVOCATION_TABLE,
    MAINTENANCE_TABLE,
    METADATA,
    MODEL_CALL_TABLE,
    RUNS,
    TABLES,
    TOOL_CALL_TABLE,
)
from otel_limits.ledger.totals import recount
from otel_limits.ledger.upgrades import (
    UPGRADES,
    Upgrade,
    migrate,
    refuse_newer,
    require_version,
    version_of,
)

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.sql.compiler import SQLCompiler

    from otel_limits.ledger.address import Address

BUSY_SECONDS: Final = 5.0
"""How long a write waits for another process's write. Only the writer thread waits."""

SERVER_SECONDS: Final = 10
"""Timeout of a PostgreSQL server: for connecting, and for each statement."""

WRITES: Final = "otel_limits_writes"
"""Execution option of a connection that will write."""

NUMBERED: Final = (MODEL_CALL_TABLE, TOOL_CALL_TABLE)
"""Tables whose rows are numbered within their invocation."""

CHANGEABLE: Final = (INVOCATION_TABLE, MAINTENANCE_TABLE)
"""Tables whose rows a later insertion may change."""

MANY: Final = 500
"""Rows from which on columns without values are left out of a statement: SQLite's driver takes
longer to bind a null than all else."""

DIALECTS: Final = "sqlalchemy.dialects"
"""Each takes 50 ms to import, so only the required one is."""

DatabaseError = sa.exc.SQLAlchemyError
"""Base class of database errors."""

ABANDONED: Final[list[sa.Engine]] = []
"""Engines of the parent process, never closed: that could damage the parent's connections."""


class Database:
    """A ledger's database. Not thread-safe.

    Args:
        address: Where it is.
        upgrades: The upgrades from each schema version to the next.
    """

    def __init__(self, address: Address, upgrades: Sequence[Upgrade] = UPGRADES) -> None:
        """Import what opening needs, so that no fork can happen during that; open nothing yet."""
        # A child forked while another thread imports would wait forever for the import lock.
        importlib.import_module(f"{DIALECTS}.{'sqlite' if address.file else 'postgresql'}")
        if address.file is None:
            importlib.import_module("psycopg")
        self.address = address
        self._upgrades = upgrades
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
            require_version(connection, self._upgrades)
            return write_rows(connection, rows)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a connection for queries."""
        with self.engine().connect() as connection:
            yield connection

    @contextlib.contextmanager
    def changing(self) -> Iterator[sa.Connection]:
        """Open a transaction, committed at the end."""
        with writing(self.engine()) as connection:
            yield connection

    def engine(self) -> sa.Engine:
        """Return the engine, opened and migrated on first use."""
        if self._engine is None:
            engine = make_engine(self.address)
            try:
                prepare(engine, self._upgrades)
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


def write_rows(connection: sa.Connection, rows: Rows) -> dict[str, int]:
    """Insert rows, and recount the invocations that they change; returns changes by table."""
    # Table by table rather than row by row: one statement for many rows is many times faster.
    of_table: defaultdict[str, list[Row]] = defaultdict(list)
    for name, row in rows:
        of_table[name].append(row)
    of_table[INVOCATIONS] = latest(of_table[INVOCATIONS])
    of_table[MAINTENANCE] = furthest(of_table[MAINTENANCE])
    changed = {
        table.name: insert(connection, table, of_table[table.name])
        for table in TABLES
        if of_table[table.name]
    }
    recount(connection, [row["id"] for row in of_table[RECOUNTS]])
    # Invocations that were ended as lost may still make calls.
    ids = {row["invocation_id"] for name in (MODEL_CALLS, TOOL_CALLS) for row in of_table[name]}
    is_lost = (RUNS.action == LOST) & RUNS.id.in_(ids)
    recount(connection, list(connection.scalars(sa.select(RUNS.id).where(is_lost))))
    return changed


def latest(rows: list[Row]) -> list[Row]:
    """Keep one row per invocation: the first with its end, or else with an assumed one, or any.

    PostgreSQL rejects a statement that changes a row twice.
    """
    kept: dict[str, Row] = {}
    for row in rows:
        before = kept.get(row["id"])
        if (
            before is None
            or before["ended_us"] is None
            or (before["action"] == LOST and row["ended_us"] is not None and row["action"] != LOST)
        ):
            kept[row["id"]] = row
    return list(kept.values())


def furthest(rows: list[Row]) -> list[Row]:
    """Keep one row per intervention, that of retention with the latest time, as `latest` does."""
    kept: dict[str, Row] = {}
    for row in rows:
        before = kept.get(row["id"])
        if before is None or (row["until_us"] or 0) > (before["until_us"] or 0):
            kept[row["id"]] = row
    return list(kept.values())


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
    maker: Any = importlib.import_module(f"{DIALECTS}.{dialect.name}")
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


def complete(table_name: str, row: Row) -> Row | None:
    """Complete a row that was read from a file with exactly the columns of this version.

    Returns:
        The row; `None` if a required value is missing or has another type. A database would
        reject such a row, and with it the whole transaction.
    """
    if table_name == RECOUNTS:
        return row if isinstance(row.get("id"), str) else None
    names, values_of = _columns(table_name)
    try:
        values = values_of(row)
    except KeyError:  # of another version, or damaged
        row = {name: row.get(name) for name in names}
        values = values_of(row)
    places = _integers(table_name, tuple(map(type, values)))
    if places is None:
        return None
    integers = [values[place] for place in places]
    if integers and (max(integers) > MAX_INTEGER or min(integers) < -MAX_INTEGER):
        return None
    return row if len(row) == len(names) else dict(zip(names, values, strict=True))


@functools.lru_cache
def _columns(table_name: str) -> tuple[list[str], Callable[[Row], tuple[Any, ...]]]:
    """Return the columns of a row, and a function that returns their values."""
    names = insertable_columns(METADATA.tables[table_name])
    return names, operator.itemgetter(*names)


# Cached, since a million rows have few combinations of types.
@functools.lru_cache(maxsize=1_000)
def _integers(table_name: str, types: tuple[type, ...]) -> tuple[int, ...] | None:
    """Return the places of integers among values of these types; `None` if a type does not fit.

    Checked here, because SQLite stores any type in any column.
    """
    table, names = METADATA.tables[table_name], _columns(table_name)[0]
    places = []
    for place, (name, found) in enumerate(zip(names, types, strict=True)):
        column = table.columns[name]
        is_text = isinstance(column.type, sa.Text)
        if found is type(None):
            fits = bool(column.nullable)
        else:
            fits = found is str if is_text else issubclass(found, int)
            if not is_text:
                places.append(place)
        if not fits:
            return None
    return tuple(places)


def insertable_columns(table: sa.Table) -> list[str]:
    """Columns that a row provides. The database fills in the others."""
    return [
        column.name
        for column in table.columns
        if column.computed is None and column is not table.autoincrement_column
    ]


def reason_of(error: Exception) -> str:
    """Return the message of the driver or the system, as one line."""
    said = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
    return str(said).strip().partition("\n")[0].rstrip(".") or type(error).__name__


# --- engines --------------------------------------------------------------------------------------


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
    sa.event.listen(engine, "connect", _set_up_or_close)
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


def prepare(engine: sa.Engine, upgrades: Sequence[Upgrade]) -> None:
    """Migrate the tables unless they are current.

    Raises:
        LedgerError: They are of another version. Then the database is unchanged.
    """
    # They nearly always are current, and reading takes no lock.
    with engine.connect() as connection:
        found = version_of(connection)
    refuse_newer(found, len(upgrades) + 1)
    if engine.dialect.name == "sqlite":
        _set_up_file(engine)
    if found == len(upgrades) + 1:
        return
    with writing(engine) as connection:
        migrate(connection, upgrades)


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


def _set_up_or_close(connection: Any, record: object) -> None:
    """Set up a new connection. SQLAlchemy would only drop one that cannot be, and Python warn."""
    try:
        _set_up_sqlite(connection, record)
    except BaseException:
        connection.close()
        raise


def _set_up_sqlite(connection: Any, _: object) -> None:
    # With a write-ahead log, only FULL syncs each commit. NORMAL, the default of some builds, keeps
    # the file consistent in a power failure, but loses the last commits.
    connection.execute("PRAGMA synchronous = FULL")
    # 64 MiB: the log is truncated to this after a larger transaction, such as an import.
    connection.execute("PRAGMA journal_size_limit = 67108864")
    # As in PostgreSQL, so patterns mean the same in both.
    connection.execute("PRAGMA case_sensitive_like = ON")


def _set_up_file(engine: sa.Engine) -> None:
    """Configure the file itself, of this version or new: another one is left as it is."""
    # By the driver, as SQLite changes this outside transactions only.
    with contextlib.closing(engine.raw_connection()) as connection:
        driver: Any = connection.driver_connection
        driver.execute("PRAGMA auto_vacuum = INCREMENTAL")  # affects new files only
        _use_write_ahead_log(driver)


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Enable concurrent readers. Another process may be doing the same right now."""
    deadline = time.monotonic() + BUSY_SECONDS
    while not _has_write_ahead_log(connection):
        if time.monotonic() > deadline:
            raise sqlite3.OperationalError("write-ahead logging cannot be enabled")
        time.sleep(BUSY_SECONDS / 100)


def _has_write_ahead_log(connection: sqlite3.Connection) -> bool:
    """Enable it. SQLite does not queue for this, and a file system may not support it."""
    try:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            return False
        raise
    return True
