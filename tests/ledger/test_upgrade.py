"""Ledgers that an earlier version wrote: opened, brought up to date in place, nothing lost."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from otel_limits.ledger import database as database_module
from otel_limits.ledger.database import Database
from otel_limits.ledger.upgrades import UPGRADES
from tests.ledger.book import DAY, NINE, Call, Entry, write

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from otel_limits.ledger.address import Address
    from tests.ledger.conftest import LedgerFile

CURRENT = len(UPGRADES) + 1
VERSION_1 = Path(__file__).with_name("version_1.sql")

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


def answer(capsys: pytest.CaptureFixture[str], *question: str) -> Any:
    """Ask, and read the answer."""
    capsys.readouterr()
    assert main(["audit", *question, "--format", "json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def truth(ledger: LedgerFile, capsys: pytest.CaptureFixture[str]) -> Any:
    """What `audit spend` says of the entries in a ledger that this version made."""
    write(ledger.address, *ENTRIES)
    return answer(capsys, *SPEND)


@pytest.fixture(params=range(1, CURRENT))
def old(ledger: LedgerFile, truth: Any, request: pytest.FixtureRequest) -> LedgerFile:
    """A ledger with the same rows, whose tables an earlier version made: every one of them."""
    current = ledger.path.rename(ledger.path.with_name("current.db"))
    with closing(sqlite3.connect(ledger.path)) as connection:
        connection.executescript(VERSION_1.read_text(encoding="utf-8"))
    bring_to(ledger.address, request.param)
    with closing(sqlite3.connect(ledger.path)) as connection:
        connection.execute("ATTACH ? AS current", (str(current),))
        for table in TABLES:
            copy(connection, f"otel_limits_{table}")
        connection.commit()
    return ledger


def bring_to(address: Address, wanted: int) -> None:
    """Upgrade a ledger to a version before this one, by what leads there."""
    database = Database(address, UPGRADES[: wanted - 1])
    database.engine()
    database.close()


def copy(connection: sqlite3.Connection, table: str) -> None:
    """Copy the rows of a table as earlier versions had them, but for what the database fills in."""
    found = [row[1] for row in connection.execute(f"PRAGMA main.table_info({table})")]
    names = ", ".join(f'"{name}"' for name in found)
    values = names
    if table.endswith("_calls"):
        trace = "(SELECT trace_id FROM current.otel_limits_invocations WHERE id = invocation_id)"
        values = values.replace('"root_id"', "coalesce(root_id, invocation_id)")
        values = values.replace('"trace_id"', trace)
    connection.execute(f"INSERT INTO main.{table} ({names}) SELECT {values} FROM current.{table}")  # noqa: S608


def schema(ledger: LedgerFile) -> dict[str, str]:
    """The statements by which tables and indexes would be made, without their white space."""
    with closing(sqlite3.connect(ledger.path)) as connection:
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        return {name: "".join(sql.split()) for name, sql in found}


def version(ledger: LedgerFile) -> list[tuple[int]]:
    """What the ledger says its version is."""
    with closing(sqlite3.connect(ledger.path)) as connection:
        return connection.execute("SELECT version FROM otel_limits_schema").fetchall()


def contents(ledger: LedgerFile) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, without the columns that are empty in all of them."""
    return {table: [filled(row) for row in ledger.rows(table)] for table in TABLES}


def filled(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says."""
    kept = {name: value for name, value in row.items() if value is not None}
    if kept.get("root_id") == kept.get("invocation_id"):
        kept.pop("root_id", None)  # since version 4 it is left out where it says nothing
    return kept


def test_an_old_ledger_answers_as_before(
    old: LedgerFile, truth: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once upgraded it has every row, and gives the same answer to the last digit."""
    before = contents(old)
    assert len(before["model_calls"]) == 3 * len(ENTRIES)
    upgrade(old)
    assert answer(capsys, *SPEND) == truth
    assert (contents(old), version(old)) == (before, [(CURRENT,)])


def upgrade(ledger: LedgerFile) -> None:
    """Open it as a program does that records."""
    bring_to(ledger.address, CURRENT)


def test_an_upgraded_ledger_is_like_a_new_one(old: LedgerFile, tmp_path: Path) -> None:
    """Its tables and indexes are those that this version makes, so that it is as fast."""
    write(old.address, Entry(), first=100)
    path, old.path = old.path, old.path.with_name("new.db")
    write(old.address, Entry())
    new = schema(old)
    old.path = path
    assert schema(old) == new


def test_recording_goes_on_in_an_old_ledger(
    old: LedgerFile, truth: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that records brings it up to date, and its rows join those that were there."""
    write(old.address, Entry(), first=100)
    assert version(old) == [(CURRENT,)]
    assert len(old.invocations()) == len(ENTRIES) + 1
    totals = answer(capsys, *SPEND)["totals"]["spend"]
    assert totals["tokens"] == truth["totals"]["spend"]["tokens"] + 120


DIES = """
import os, signal, sys
from pathlib import Path
from otel_limits.ledger.address import parse
from otel_limits.ledger.upgrades import UPGRADES
from otel_limits.ledger.database import Database

def die(connection):
    UPGRADES[-1](connection)
    os.kill(os.getpid(), signal.SIGKILL)

Database(parse("test", sys.argv[1], Path("/nowhere")), [*UPGRADES[:-1], die]).engine()
"""


def test_a_killed_upgrade_has_changed_nothing(
    old: LedgerFile, truth: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """After SIGKILL between its statements the ledger is as it was, and the next one upgrades."""
    before = schema(old)
    killed = subprocess.run([sys.executable, "-c", DIES, str(old.path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert schema(old) == before
    assert version(old) != [(CURRENT,)]
    upgrade(old)
    assert answer(capsys, *SPEND) == truth


def test_two_that_open_it_at_once_upgrade_it_once(
    old: LedgerFile, truth: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen the old version before either begins; the second finds the work done."""
    both_have_looked = threading.Barrier(2)
    writing = database_module.writing
    done: list[str] = []

    @contextmanager
    def together(engine: Engine) -> Iterator[Any]:
        both_have_looked.wait(30)
        with writing(engine) as connection:
            yield connection

    def last(connection: Any) -> None:
        done.append("once")
        UPGRADES[-1](connection)

    def open_it() -> None:
        database = Database(old.address, [*UPGRADES[:-1], last])
        database.engine()
        database.close()
        done.append("opened")

    with monkeypatch.context() as patch:
        patch.setattr(database_module, "writing", together)
        threads = [threading.Thread(target=open_it) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(done) == ["once", "opened", "opened"]
    assert (version(old), answer(capsys, *SPEND)) == ([(CURRENT,)], truth)


def test_a_newer_ledger_is_refused_and_left_as_it_is(
    ledger: LedgerFile, truth: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence says which versions are known, and what to install."""
    with closing(sqlite3.connect(ledger.path)) as connection:
        connection.execute("UPDATE otel_limits_schema SET version = version + 1")
        connection.commit()
    before = schema(ledger), contents(ledger)
    assert main(["audit", *SPEND]) == 2
    assert capsys.readouterr().err == (
        f"otel-limits: The ledger has schema version {CURRENT + 1}, and this otel-limits knows "
        f"versions up to {CURRENT}. Install the otel-limits that wrote it, or a later one.\n"
    )
    assert (schema(ledger), contents(ledger)) == before


def test_each_index_answers_its_part_of_spend(ledger: LedgerFile, truth: Any) -> None:
    """SQLite reads the sums from one index, and the calls of unknown size from the other."""
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
