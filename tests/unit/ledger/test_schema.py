"""Ledgers of another schema version are refused and left as they are."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from otel_limits.ledger import database
from otel_limits.ledger.database import Database
from otel_limits.ledger.reading import is_damaged
from otel_limits.ledger.schema import CURRENT, UNRELEASED
from tests.ledger.book import DAY, NINE, Book, Call, Entry, write
from tests.ledger.fixtures import LedgerFile
from tests.price_list import listed

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

TABLES = ("invocations", "attributes", "model_calls", "tool_calls", "quota_changes")

SPEND = ("spend", "--by", "agent,model,day")

ENTRIES = [
    Entry(
        agent=f"agent-{n % 3}",
        calls=[
            Call(input=n, output=1, cached=n // 2, price="0.01" if n % 2 else None),
            Call(input=7, output=7, kind="unmeasured", estimated=bool(n % 2), model="other"),
            Call(input=0, output=0, kind="zero_token", model="other"),
        ],
        attributes={"tenant.id": f"t{n % 2}"},
        tools=["search", "search!"],
        at=NINE + n * DAY / 4,
    )
    for n in range(1, 30)
]


def answer(capsys: pytest.CaptureFixture[str], *query: str) -> Any:
    """Run a query and parse its answer."""
    capsys.readouterr()
    assert main(["audit", *query, "--format", "json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def truth(ledger: LedgerFile, capsys: pytest.CaptureFixture[str]) -> Any:
    """The answer of `audit spend` for the entries in a ledger of this version."""
    write(ledger.address, *ENTRIES)
    return answer(capsys, *SPEND)


def schema(ledger: LedgerFile) -> dict[str, str]:
    """The statements that create the tables and indexes, without white space."""
    with closing(sqlite3.connect(ledger.path)) as connection:
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        return {name: "".join(sql.split()) for name, sql in found}


def version(ledger: LedgerFile) -> int:
    """The schema version of a ledger."""
    with closing(sqlite3.connect(ledger.path)) as connection:
        ((found,),) = connection.execute("SELECT version FROM otel_limits_schema").fetchall()
        return int(found)


def contents(ledger: LedgerFile) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, without null columns."""
    return {
        table: [
            {name: value for name, value in row.items() if value is not None}
            for row in ledger.rows(table)
        ]
        for table in TABLES
    }


def test_concurrent_openers_create_the_tables_once(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no tables before either creates them; the second finds the work done."""
    both_have_looked = threading.Barrier(2)
    writing = database.writing

    @contextmanager
    def together(engine: Engine) -> Iterator[Any]:
        both_have_looked.wait(30)
        with writing(engine) as connection:
            yield connection

    def open_it() -> None:
        with closing(Database(ledger.address)) as database:
            database.engine()
            opened.append(ledger.path)

    opened: list[Path] = []
    monkeypatch.setattr(database, "writing", together)
    threads = [threading.Thread(target=open_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 2
    assert version(ledger) == CURRENT


def test_newer_ledger_is_refused_and_left_unchanged(
    ledger: LedgerFile, truth: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names both versions and what to install."""
    with closing(sqlite3.connect(ledger.path)) as connection, connection:
        as_later(connection)
    before = schema(ledger), contents(ledger)
    assert main(["audit", *SPEND]) == 2
    assert capsys.readouterr().err == (
        f"otel-limits: The ledger has schema version {CURRENT + 1}, and this otel-limits supports "
        f"versions up to {CURRENT}. Install the otel-limits that wrote it, or a later one.\n"
    )
    assert (schema(ledger), contents(ledger)) == before


@pytest.fixture(params=range(1, 6))
def unreleased(ledger: LedgerFile, truth: Any, request: pytest.FixtureRequest) -> LedgerFile:
    """A ledger of one of the five schemas that no release ever wrote."""
    with closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("ALTER TABLE otel_limits_schema DROP COLUMN written_by")
        connection.execute("UPDATE otel_limits_schema SET version = ?", (request.param,))
    return ledger


@listed
def test_unreleased_ledger_is_refused_and_left_unchanged(
    unreleased: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its numbers are the same as those of releases to come, and mean something else."""
    before = schema(unreleased), contents(unreleased)
    for command in (
        ["audit", *SPEND],
        ["ledger", "end-lost", "--older-than", "1d"],
        ["ledger", "reprice"],
    ):
        assert main(command) == 2
        assert capsys.readouterr().err == f"otel-limits: {UNRELEASED}\n"
    assert (schema(unreleased), contents(unreleased)) == before


def test_rows_recorded_beside_an_unreleased_ledger_reach_the_new_one(
    faulty: None, unreleased: LedgerFile
) -> None:
    """Following the message loses nothing: new rows are spilled, and then restored."""
    write(unreleased.address, Entry(), first=100)
    assert unreleased.spills()
    assert version(unreleased) in range(1, 6)
    unreleased.path.rename(unreleased.path.with_name("old.db"))
    write(unreleased.address, Entry(), first=200)
    assert len(unreleased.invocations()) == 2


def files(ledger: LedgerFile) -> dict[str, bytes]:
    """Every file next to a ledger, except spill files."""
    found = (path for path in ledger.path.parent.iterdir() if path.is_file())
    return {path.name: path.read_bytes() for path in found if path not in ledger.spills()}


def as_later(connection: sqlite3.Connection) -> None:
    """A ledger of a later release."""
    connection.execute("UPDATE otel_limits_schema SET version = ?", (CURRENT + 1,))


def as_unreleased(connection: sqlite3.Connection) -> None:
    """A ledger of a development version."""
    connection.execute("ALTER TABLE otel_limits_schema DROP COLUMN written_by")


def as_version(version: object) -> Callable[[sqlite3.Connection], None]:
    """A ledger of a version that never was, as SQLite stores values of any type."""

    def alter(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE otel_limits_schema SET version = ?", (version,))

    return alter


IMPOSSIBLE = (-1, 0, 1.5, "x", "", b"\x01")

CHANGES = (
    ("ledger", "reprice"), ("ledger", "prune", "--older-than", "1d"),
    ("ledger", "end-lost", "--older-than", "1d"), ("audit", "verify"), ("audit", *SPEND),
    ("ledger", "export", "--format", "csv"), ("ledger", "close", "--month", "2025-10"),
)  # fmt: skip


@pytest.mark.parametrize(
    "alter", [as_later, as_unreleased, as_version(-1), as_version("x")],
    ids=["later", "unreleased", "-1", "x"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_file_of_another_schema_keeps_every_byte(
    faulty: None, ledger: LedgerFile, alter: Callable[[sqlite3.Connection], None], mode: str
) -> None:
    """Recording in it, and every command, only reads its version; new rows are spilled."""
    write(ledger.address, Entry())
    with closing(sqlite3.connect(ledger.path)) as connection:
        alter(connection)
        connection.commit()
        connection.execute(f"PRAGMA journal_mode = {mode}")
    before = files(ledger)
    write(ledger.address, Entry(), first=100)
    assert ledger.spills()
    assert files(ledger) == before
    for command in CHANGES:
        assert main([*command]) == 2
    assert files(ledger) == before


@listed
@pytest.mark.parametrize("version", IMPOSSIBLE)
def test_impossible_version_is_that_of_a_development_version(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], version: object
) -> None:
    """The same line as for any other schema that was never released."""
    write(ledger.address, Entry())
    with closing(sqlite3.connect(ledger.path)) as connection:
        as_version(version)(connection)
        connection.commit()
    capsys.readouterr()
    for command in (("audit", "spend"), ("audit", "verify"), ("ledger", "reprice")):
        assert main([*command]) == 2
        assert capsys.readouterr().err == f"otel-limits: {UNRELEASED}\n"


@pytest.mark.parametrize("suffixes", [["", "-wal"], [""]])
def test_queries_leave_no_file_next_to_a_ledger(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffixes: list[str]
) -> None:
    """SQLite would create the index of a copied log, and keep it."""
    book = Book(ledger.address)
    book.write(Entry())
    book._observer.flush()
    copied = LedgerFile(tmp_path / "copy" / "ledger.db")
    copied.path.parent.mkdir()
    if "-wal" not in suffixes:
        book.close()
    for suffix in suffixes:
        shutil.copy(f"{ledger.path}{suffix}", f"{copied.path}{suffix}")
    book.close()
    before = files(copied)
    for command in (
        ["audit", "verify"], ["audit", *SPEND], ["ledger", "export", "--format", "csv"],
    ):  # fmt: skip
        assert main([*command, "--ledger", str(copied.path)]) == 0
    assert is_damaged(copied.address) is False
    assert files(copied) == before
    capsys.readouterr()
    assert main(["audit", *SPEND, "--ledger", str(copied.path), "--format", "csv"]) == 0
    assert "worker" in capsys.readouterr().out


def test_spend_is_answered_from_indexes(ledger: LedgerFile, truth: Any) -> None:
    """SQLite reads the sums from one index, and the calls of unknown size from another."""
    from otel_limits.ledger.selection import Selection
    from otel_limits.ledger.spending import BY_INDEX, from_indexes

    database = Database(ledger.address)
    statement = from_indexes(BY_INDEX, Selection())
    with database.reading() as connection:
        text = str(statement.compile(connection.engine, compile_kwargs={"literal_binds": True}))
        plan = str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}").all())
    database.close()
    assert "USING INDEX ix_otel_limits_model_calls_sums" in plan
    assert "USING INDEX ix_otel_limits_model_calls_unknown_size" in plan
    assert "B-TREE" not in plan
