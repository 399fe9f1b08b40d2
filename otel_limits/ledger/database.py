"""The database of a ledger: opened, migrated, and written to exactly once."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa

from otel_limits.ledger import files
from otel_limits.ledger.rows import ENDING, MAX_INTEGER, RECOUNTS, Row, Rows
from otel_limits.ledger.schema import (
    INVOCATION_TABLE,
    METADATA,
    MODEL_CALL_TABLE,
    TABLES,
    TOOL_CALL_TABLE,
)
from otel_limits.ledger.totals import recount
from otel_limits.ledger.upgrades import UPGRADES, Upgrade, migrate, require_version, version_of

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.sql.compiler import SQLCompiler

    from otel_limits.ledger.address import Address

BUSY_SECONDS: Final = 5.0
"""How long a write waits for another process's write. Nobody but the writer's thread waits."""

SERVER_SECONDS: Final = 10
"""After which a PostgreSQL server is given up: connecting, and each statement."""

WRITES: Final = "otel_limits_writes"
"""Execution option of a connection that is going to write."""

NUMBERED: Final = (MODEL_CALL_TABLE, TOOL_CALL_TABLE)
"""Tables whose rows an invocation counts."""

DIALECTS: Final = "sqlalchemy.dialects"
"""Each takes a twentieth of a second to import: only the one that a ledger needs is."""

DatabaseError = sa.exc.SQLAlchemyError
"""Whatever a database refuses with."""

ABANDONED: Final[list[sa.Engine]] = []
"""Engines of a parent process. They are never closed: that could do harm to the parent's."""


class Database:
    """A ledger's database. Only one thread at a time may use it.

    Args:
        address: Where it is.
        upgrades: What leads from one version of the tables to the next.
    """

    def __init__(self, address: Address, upgrades: Sequence[Upgrade] = UPGRADES) -> None:
        """Open nothing yet; but import what opening needs, before any fork can fall into that."""
        # A child that is forked while another thread imports waits for an import lock
        # that nobody holds.
        importlib.import_module(f"{DIALECTS}.{'sqlite' if address.file else 'postgresql'}")
        if address.file is None:
            importlib.import_module("psycopg")
        self.address = address
        self._upgrades = upgrades
        self._engine: sa.Engine | None = None
        self._identity: tuple[int, ...] | None = None

    def write(self, rows: Rows) -> dict[str, int]:
        """Write `rows` in one transaction; one that is there already changes nothing.

        Returns:
            How many rows changed each table.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: The database refused, and nothing was written.
            OSError: Its file vanished or cannot be made.
            NewerLedgerError: A newer program wrote it.
        """
        try:
            changed = self._write(rows)
            # The file may have been replaced while they were written to the old one.
            if self._has_moved():
                changed = self._write(rows)
        except BaseException:
            # What is wrong may be the connection itself: the next attempt begins with a new one.
            self.close()
            raise
        return changed

    def _write(self, rows: Rows) -> dict[str, int]:
        if self._has_moved():
            self.close()
        changed = {}
        with self.changing() as connection:
            require_version(connection, self._upgrades)
            for table in TABLES:
                # Table by table and not row by row: a statement for many rows takes a fraction
                # of the time.
                chosen = [row for name, row in rows if name == table.name]
                if table is INVOCATION_TABLE:
                    chosen = latest(chosen)
                if chosen:
                    changed[table.name] = insert(connection, table, chosen)
            recount(connection, [row["id"] for name, row in rows if name == RECOUNTS])
        return changed

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection to ask questions with."""
        with self.engine().connect() as connection:
            yield connection

    @contextlib.contextmanager
    def changing(self) -> Iterator[sa.Connection]:
        """A connection in a transaction of its own, committed at the end."""
        with writing(self.engine()) as connection:
            yield connection

    def engine(self) -> sa.Engine:
        """The engine, opened and migrated on first use."""
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
        """Let the group read what SQLite keeps beside its file: it takes over only the mode."""
        file, group = self.address.file, self.address.group
        if file is None or group is None:
            return
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(OSError):
                files.share(file.with_name(file.name + suffix), group)

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()

    def abandon(self) -> None:
        """Forget, in a forked child, the connections that belong to the parent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            ABANDONED.append(engine)

    def _has_moved(self) -> bool:
        """Tell whether the open file is no longer the one at its path: rows in it would be lost."""
        return self._engine is not None and self._identity != self._file_identity()

    def _file_identity(self) -> tuple[int, ...] | None:
        if self.address.file is None:
            return None
        # SQLite follows a link when it opens, and its log is beside what the link led to then.
        file = os.path.realpath(self.address.file)
        # Its log as well: who deletes a directory may meet a file that was made anew meanwhile,
        # and its log would be written to without a name.
        return (*identity(file), *identity(f"{file}-wal"))


def identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    """What no other file has, not even one that took its name; zeros where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116  on the path of every commit
    except OSError:
        return (0, 0)
    return (status.st_dev, status.st_ino)


def latest(rows: list[Row]) -> list[Row]:
    """Keep one row per invocation, that of its end: beginning and end often come together."""
    kept: dict[str, Row] = {}
    for row in rows:
        before = kept.get(row["id"])
        # PostgreSQL refuses a statement that would change one row twice.
        if before is None or before["ended_us"] is None:
            kept[row["id"]] = row
    return list(kept.values())


def insert(connection: sa.Connection, table: sa.Table, rows: list[Row]) -> int:
    """Insert the rows that are not there yet; an invocation that has ended ends its row."""
    inserted = execute(connection, table, rows)
    if table in NUMBERED and inserted < len(rows):
        # Only where some were not inserted, which is rare: it asks for each row by itself.
        again = namesakes(connection, table, rows)
        if again:
            inserted += execute(connection, table, again)
    return inserted


def execute(connection: sa.Connection, table: sa.Table, rows: list[Row]) -> int:
    """Run the insertion of a table, and return how many rows it changed.

    The driver is called with the compiled statement: SQLAlchemy's own handling of parameters costs
    ten times what SQLite takes to insert them.
    """
    compiled = insertion(table, connection.dialect)
    names = compiled.positiontup
    # By place for SQLite and by name for PostgreSQL, as their drivers want them.
    values: Any = [tuple(map(row.__getitem__, names)) for row in rows] if names else rows
    return connection.exec_driver_sql(compiled.string, values).rowcount


@functools.lru_cache
def insertion(table: sa.Table, dialect: sa.Dialect) -> SQLCompiler:
    """The insertion into a table: what is there already stays as it is."""
    columns = insertable_columns(table)
    maker: Any = importlib.import_module(f"{DIALECTS}.{dialect.name}")
    values = maker.insert(table).values({column: sa.bindparam(column) for column in columns})
    if table is INVOCATION_TABLE:
        statement = values.on_conflict_do_update(
            index_elements=["id"],
            set_={column: values.excluded[column] for column in ENDING},
            # Only once: an end that is there already is the true one, whoever brings another.
            where=values.excluded.ended_us.is_not(None) & table.c.ended_us.is_(None),
        )
    else:
        # What a spill file brings a second time changes nothing, whoever brings it.
        statement = values.on_conflict_do_nothing()
    return cast("SQLCompiler", statement.compile(dialect=dialect))


def namesakes(connection: sa.Connection, table: sa.Table, rows: list[Row]) -> list[Row]:
    """Find live rows that only look like replays, and free them of their number.

    A replay is the same row again. One with the number of another and a time of its own is not: it
    is kept, and an audit tells of it.
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
    """Give a row that was read from a file exactly the columns that this version has.

    Returns:
        The row; `None` where something is missing that must be there, or is of another type. A
        database would refuse such a row, and with it all that are written in one transaction.
    """
    if table_name == RECOUNTS:
        return row if isinstance(row.get("id"), str) else None
    table = METADATA.tables[table_name]
    completed = {column: row.get(column) for column in insertable_columns(table)}
    is_whole = all(_fits(value, table.columns[column]) for column, value in completed.items())
    return completed if is_whole else None


def _fits(value: object, column: sa.Column[Any]) -> bool:
    # Not left to the database: SQLite keeps any type in any column.
    if value is None:
        return bool(column.nullable)
    if isinstance(column.type, sa.Text):
        return isinstance(value, str)
    return isinstance(value, int) and abs(value) <= MAX_INTEGER


def insertable_columns(table: sa.Table) -> list[str]:
    """Columns that a row brings; the database fills in the others."""
    return [
        column.name
        for column in table.columns
        if column.computed is None and column is not table.autoincrement_column
    ]


def reason_of(error: Exception) -> str:
    """What the driver or the system says, in one line."""
    said = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
    return str(said).strip().partition("\n")[0].rstrip(".") or type(error).__name__


# --- engines --------------------------------------------------------------------------------------


def make_engine(address: Address) -> sa.Engine:
    """Make the engine for an address; it keeps one connection open, enough for one thread."""
    if address.file is None:
        engine = sa.create_engine(
            address.url,
            hide_parameters=True,
            pool_size=1,
            max_overflow=0,
            # A server that was restarted, or that ends idle sessions, has not lost anything.
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": SERVER_SECONDS,
                "application_name": "otel-limits",
                # Whatever a role has set. A database in SQL_ASCII would give back bytes, as nobody
                # knows what encoding its texts are in.
                "client_encoding": "UTF8",
            },
        )
        sa.event.listen(engine, "connect", _set_up_postgresql)
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
    """A transaction that takes its place in the queue of writers before it reads anything."""
    with engine.connect().execution_options(**{WRITES: True}) as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            # In this transaction alone: a question may take as long as it needs.
            connection.execute(sa.text(f"SET LOCAL statement_timeout = {SERVER_SECONDS * 1000}"))
        yield connection


def prepare(engine: sa.Engine, upgrades: Sequence[Upgrade]) -> None:
    """Migrate the tables, unless they are current."""
    # Nearly always they are: looking takes no lock, and nobody has to wait.
    with engine.connect() as connection:
        if version_of(connection) == len(upgrades) + 1:
            return
    with writing(engine) as connection:
        migrate(connection, upgrades)


def _set_up_postgresql(connection: psycopg.Connection[Any], _: object) -> None:
    """Write names in the encoding of the database, which may not have all of their characters."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding in (None, "UTF8", "SQL_ASCII"):
        return
    # In ours the server would refuse such a name, and every row beside it for ever.
    from psycopg.types.string import StrDumper

    class Escaping(StrDumper):
        """Writes the number of a character that the encoding does not have."""

        def dump(self, text: str) -> bytes:
            return text.encode(connection.info.encoding, "backslashreplace")

    connection.execute(f"SET client_encoding TO {encoding}")
    connection.commit()
    connection.adapters.register_dumper(str, Escaping)


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(WRITES)
    # A transaction that begins by reading and then writes is refused at once by SQLite when another
    # one wrote in between; IMMEDIATE waits for its turn instead, for as long as `timeout` says.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of use to a new file alone
    _use_write_ahead_log(connection)
    # With a write-ahead log only FULL brings each commit to the disk. NORMAL, the default of some
    # builds, keeps the file whole in a power failure, but forgets the last commits.
    connection.execute("PRAGMA synchronous = FULL")
    # 64 MiB: the log is cut back to it after one transaction that was bigger, such as an import.
    connection.execute("PRAGMA journal_size_limit = 67108864")
    # As in PostgreSQL: a pattern means the same in either database.
    connection.execute("PRAGMA case_sensitive_like = ON")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Let readers and the writer work at once; another process may be doing the same just now."""
    deadline = time.monotonic() + BUSY_SECONDS
    while not _has_write_ahead_log(connection):
        if time.monotonic() > deadline:
            raise sqlite3.OperationalError("the write-ahead log cannot be switched on")
        time.sleep(BUSY_SECONDS / 100)


def _has_write_ahead_log(connection: sqlite3.Connection) -> bool:
    """Switch it on; SQLite does not wait for its turn here. A file system may not have it."""
    try:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            return False
        raise
    return True
