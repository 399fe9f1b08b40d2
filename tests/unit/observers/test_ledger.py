"""The times and bounds of the ledger as they are shipped, which other tests shorten."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import Limits, disable, enable
from otel_limits.cli import main
from otel_limits.ledger import files
from otel_limits.ledger.database import Database
from otel_limits.observers.ledger import LedgerObserver
from otel_limits.testing import ScriptedModel, says
from tests.ledger.fixtures import eventually
from tests.ledger.waits import waits
from tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.ledger.address import Address
    from otel_limits.testing import FakeTime
    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile


def test_a_write_waits_five_seconds_for_a_lock(ledger: LedgerFile) -> None:
    """SQLite itself reports the busy timeout of our connections."""
    database = Database(ledger.address)
    with database.changing() as connection:
        waits = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    database.close()
    assert waits == 5_000


def test_an_agent_waits_fifteen_milliseconds(
    faulty: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a database that is locked, as the page says; then its rows go into a spill file."""
    page = (ROOT / "otel_limits/docs/ledger.md").read_text(encoding="utf-8")
    assert "the agent waits up to 15 ms" in page
    # What it asks for: on a busy machine, a wait ends later.
    asked: list[float] = []
    wait = threading.Condition.wait

    def noted(condition: threading.Condition, timeout: float | None = None) -> bool:
        # Without a timeout, the start of a thread waits.
        if threading.current_thread() is threading.main_thread() and timeout is not None:
            asked.append(timeout)
        return wait(condition, timeout)

    monkeypatch.setattr(threading.Condition, "wait", noted)
    waits(tmp_path, "locked", 1)
    assert max(asked) == 0.015


@pytest.mark.usefixtures("ledger")
def test_start_of_the_ledger_is_not_time_of_the_agent(
    make_agent: MakeAgent, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first agent call imports the database, before its invocation begins."""
    imported = Database.__init__

    def slow(database: Database, address: Address) -> None:
        fake_time.advance(60)
        imported(database, address)

    monkeypatch.setattr(Database, "__init__", slow)
    enable(Limits(max_duration_seconds=30))
    assert make_agent(ScriptedModel([says("done")]))("go").stop_reason == "end_turn"


def test_a_database_that_is_back_has_every_row_soon(
    faulty: None, ledger: LedgerFile, make_agent: MakeAgent
) -> None:
    """It is retried after a second, and then contains the rows of the spill file."""
    agent = make_agent(ScriptedModel([says("x"), says("y")]))
    enable()
    agent("go")
    eventually(lambda: len(ledger.calls()) == 1)
    aside = ledger.path.with_name("aside.db")
    ledger.path.rename(aside)
    ledger.path.mkdir()
    agent("go")
    eventually(lambda: ledger.spills() != [])
    ledger.path.rmdir()
    aside.rename(ledger.path)
    eventually(lambda: len(ledger.calls()) == 2)
    eventually(lambda: ledger.spills() == [])
    disable()


def test_a_hundred_thousand_rows_wait_and_no_more(
    faulty: None,
    ledger: LedgerFile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where neither the database nor a spill file takes any, the oldest of them are lost.

    The process still knows their number when the disk has room again, and `verify` reports it.
    """

    def refuse(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    rows = [{"invocation_id": f"{n}", "key": "k", "value": "v"} for n in range(100_015)]
    observer = LedgerObserver(ledger.address)
    with monkeypatch.context() as full:
        full.setattr(files, "create", refuse)
        full.setattr(Database, "write", refuse)
        observer.writer.put([("otel_limits_attributes", row) for row in rows])
        eventually(lambda: observer.writer.dropped_rows == 15)
    observer.writer.wait_until_persisted(120)  # closing waits for seconds only
    observer.close()
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection:
        query = "SELECT count(*), min(CAST(invocation_id AS int)) FROM otel_limits_attributes"
        assert connection.execute(query).fetchone() == (100_000, 15)
    assert main(["audit", "verify"]) == 1
    file = f"memory of process {os.getpid()}"
    assert f"15 lines of {file}" in " ".join(capsys.readouterr().out.split())
    assert main(["ledger", "accept", file, "--reason", "full disk"]) == 0
