"""Durability: acknowledged rows survive any failure of process and database."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from strands import tool

from otel_limits import Limits, ModelCall, disable, enable
from otel_limits.cli import main
from otel_limits.core.internal_errors import LOG_INTERVAL_SECONDS
from otel_limits.core.usage import Usage
from otel_limits.ledger import database as database_module
from otel_limits.ledger import files
from otel_limits.ledger.spill import MARK, SpillFiles, restore_spilled
from otel_limits.ledger.writer import RETRY_SECONDS, Writer
from otel_limits.observers.ledger import LedgerObserver
from otel_limits.runs.clock import CLOCK
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.ledger.book import Book, Entry
from tests.ledger.fixtures import eventually, waiting_for_locks

if TYPE_CHECKING:
    from strands import Agent

    from otel_limits.ledger.rows import Rows
    from otel_limits.testing import FakeTime
    from tests.conftest import MakeAgent, Metric
    from tests.ledger.fixtures import LedgerFile


@pytest.fixture
def impatient() -> Iterator[None]:
    """Wait briefly for a lock, so that a test need not wait."""
    with waiting_for_locks(0.05):
        yield


@pytest.fixture
def worker(make_agent: MakeAgent) -> Agent:
    """An agent that takes two model calls per invocation."""

    def script() -> Any:
        while True:
            yield uses("search")
            yield says("x")

    return make_agent(ScriptedModel(script()))


def whole(ledger: LedgerFile) -> int:
    """How many invocations are recorded with their end and all their calls."""
    ended = [row for row in ledger.invocations() if row["ended_us"] is not None]
    calls = [call["invocation_id"] for call in ledger.calls()]
    return sum(calls.count(row["id"]) == row["model_calls"] for row in ended)


def restore(ledger: LedgerFile) -> None:
    """Restore rows from spill files, as the next program does."""
    database = database_module.Database(ledger.address)
    for _ in restore_spilled(database, SpillFiles(ledger.address)):
        pass
    database.close()


def await_restored(ledger: LedgerFile, fake_time: FakeTime) -> None:
    """Let time pass until no row waits in a spill file."""

    def are_restored() -> bool:
        fake_time.advance(RETRY_SECONDS)
        return not ledger.spills()

    eventually(are_restored)


def has_tables(ledger: LedgerFile) -> bool:
    """Return whether the file is complete, not only started."""
    if not ledger.path.exists():
        return False
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection:
        return bool(connection.execute("SELECT 1 FROM sqlite_master").fetchall())


def test_unannounced_fork_is_detected(ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """UWSGI forks without Python's hooks: the process ID reveals it."""
    observer = LedgerObserver(ledger.address)
    writer = observer.writer
    writer.put([("otel_limits_attributes", {"invocation_id": "i", "key": "k", "value": "parent"})])
    writer.wait_until_durable()  # a child has no thread of its parent, but this process has
    monkeypatch.setattr(os, "getpid", lambda: 2**22)
    writer.put([("otel_limits_attributes", {"invocation_id": "j", "key": "k", "value": "child"})])
    writer.wait_until_durable()
    writer.close()
    assert ("j", "k") in ledger.attributes()


# --- the database does not take rows --------------------------------------------------------------


def locked(ledger: LedgerFile, _request: object = None) -> Callable[[], None]:
    """Another program holds the write lock."""
    connection = sqlite3.connect(ledger.path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    return connection.close


def vanished_for_good(ledger: LedgerFile, _request: pytest.FixtureRequest) -> Callable[[], None]:
    """The file was replaced by a link to nowhere."""
    aside = ledger.path.with_name("aside.db")
    ledger.path.rename(aside)
    ledger.path.symlink_to(aside.with_name("nowhere") / "ledger.db")
    # In one step: rows of an attempt in between would go into a file that is replaced.

    def repair() -> None:
        aside.replace(ledger.path)

    return repair


def unreadable(ledger: LedgerFile, _request: pytest.FixtureRequest) -> Callable[[], None]:
    """The file was replaced by something else."""
    content = content_of(ledger)
    replace(ledger, b"this is no database at all" * 100)
    return lambda: replace(ledger, content)


def newer(ledger: LedgerFile, _request: pytest.FixtureRequest) -> Callable[[], None]:
    """A newer otel-limits has taken the ledger over."""

    def make_newer_by(versions: int) -> None:
        connection = sqlite3.connect(ledger.path)
        connection.execute("UPDATE otel_limits_schema SET version = version + ?", (versions,))
        connection.commit()
        connection.close()

    make_newer_by(99)
    replace(ledger, content_of(ledger))
    return lambda: make_newer_by(-99)


def full(_ledger: LedgerFile, request: pytest.FixtureRequest) -> Callable[[], None]:
    """The database has no room for another page: SQLite's own error."""
    is_full = True

    def limit(connection: Any, *_: object) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages if is_full else 2**30}")

    def repair() -> None:
        nonlocal is_full
        is_full = False

    sa.event.listen(sa.pool.Pool, "checkout", limit)
    request.addfinalizer(lambda: sa.event.remove(sa.pool.Pool, "checkout", limit))
    return repair


def content_of(ledger: LedgerFile) -> bytes:
    """Return the whole database, with what SQLite has only in its log."""
    connection = sqlite3.connect(ledger.path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return ledger.path.read_bytes()


def replace(ledger: LedgerFile, content: bytes) -> None:
    """Replace the file, so that the next write opens the new one.

    Atomically: an empty file would be taken for a new ledger.
    """
    other = ledger.path.with_name("other.db")
    other.write_bytes(content)
    for name in ("-wal", "-shm"):
        Path(f"{ledger.path}{name}").unlink(missing_ok=True)
    other.replace(ledger.path)


OUTAGES = (locked, vanished_for_good, unreadable, newer, full)

# Outages can leave a connection open, which Python 3.13 reports when it is collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*sqlite3.Connection:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Collect such connections here, not in a test of another file."""
    yield
    gc.collect()


@pytest.mark.parametrize("breakage", OUTAGES)
def test_an_outage_loses_nothing(  # noqa: PLR0913, PLR0917  fixtures
    faulty: None,
    impatient: None,
    fake_time: FakeTime,
    ledger: LedgerFile,
    worker: Agent,
    metric: Metric,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    breakage: Callable[..., Callable[[], None]],
) -> None:
    """The agent feels nothing, rows wait in a spill file and are taken back, exactly once."""
    began = time.monotonic()
    enable()
    worker("go")
    eventually(lambda: not ledger.spills())
    repair = breakage(ledger, request)

    def failures() -> float:
        return metric("otel_limits_internal_errors_total", component="ledger")

    # A full disk fails once its free pages are filled. A spill file does not prove it: a slow
    # write causes one as well.
    results: list[str] = []
    before = failures()
    while failures() < before + 3 and len(results) < 1_000:
        fake_time.advance(RETRY_SECONDS)
        results.append(worker("go").stop_reason)
    count = len(results)
    assert results == ["end_turn"] * count
    assert failures() >= before + 3
    assert ledger.spills()
    repair()
    await_restored(ledger, fake_time)
    worker("go")
    await_restored(ledger, fake_time)  # a slow write causes a spill file
    assert (len(ledger.invocations()), whole(ledger)) == (count + 2, count + 2)
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    minutes = int((time.monotonic() - began) / LOG_INTERVAL_SECONDS)  # none but on a slow machine
    assert 1 <= len([text for text in told if "rows spilled to" in text]) <= 1 + minutes


def test_spill_files_are_left_alone_for_ten_seconds_after_a_failure(
    faulty: None,
    ledger: LedgerFile,
    worker: Agent,
    fake_time: FakeTime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt at a dead database costs a timeout."""
    attempts: list[float] = []

    def fail(*_: object) -> Any:
        attempts.append(CLOCK.now())
        return open_nothing()

    enable()
    with monkeypatch.context() as outage:
        outage.setattr(database_module.Database, "write", fail)
        worker("go")
        eventually(lambda: len(attempts) == 1)
        fake_time.advance(RETRY_SECONDS)  # until then, not even new rows are written
        eventually(lambda: len(attempts) == 2)
    fake_time.advance(9.9)
    assert ledger.spills()
    fake_time.advance(0.1)
    eventually(lambda: not ledger.spills())
    assert whole(ledger) == 1
    assert len(attempts) == 2


def test_a_file_that_vanishes_is_made_anew(
    ledger: LedgerFile, worker: Agent, tmp_path: Path
) -> None:
    """Rows must not go into a file without a name."""
    enable()
    worker("go")
    eventually(lambda: not ledger.spills())
    for path in tmp_path.glob("ledger.db*"):
        path.unlink()
    worker("go")
    assert whole(ledger) == 1


def test_a_file_that_vanishes_takes_no_later_row_with_it(
    ledger: LedgerFile, make_agent: MakeAgent, tmp_path: Path
) -> None:
    """Of an active invocation, rows after the deletion are in the new file.

    So is what came before it, where the writer was not done with that yet.
    """

    @tool
    def delete() -> str:
        """Delete the ledger once it has a call."""
        if not deleted:
            eventually(lambda: has_tables(ledger))
            eventually(lambda: len(ledger.calls()) == 1)
            for path in tmp_path.glob("ledger.db*"):
                path.unlink()
                deleted.append(path)
        return "deleted"

    deleted: list[Path] = []
    enable(Limits(max_turns=3))
    make_agent(ScriptedModel(endless(uses("delete"))), tools=[delete])("go")
    (invocation,) = ledger.invocations()
    assert (invocation["reason"], invocation["model_calls"]) == ("max_turns", 3)
    assert [call["number"] for call in ledger.calls()] in ([2, 3], [1, 2, 3])


def test_a_directory_that_vanishes_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worker: Agent, ledger: LedgerFile
) -> None:
    """The same for the directory around it."""
    ledger.path = tmp_path / "deep" / "down" / "ledger.db"
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(ledger.path))
    enable()
    worker("go")
    eventually(lambda: ledger.path.exists() and not ledger.spills())
    (tmp_path / "deep").rename(tmp_path / "gone")
    worker("go")
    assert whole(ledger) == 1


def rows_of(name: str) -> Rows:
    """One small row."""
    return [("otel_limits_attributes", {"invocation_id": name, "key": "k", "value": "v"})]


@pytest.mark.usefixtures("faulty")
def test_end_that_waited_does_not_hide_a_later_call(ledger: LedgerFile) -> None:
    """A call outlived its invocation, whose end was in a spill file: totals are of both calls."""
    with ledger.locked():
        book = Book(ledger.address)
        invocation = book.write(Entry())
        book.close()
    assert ledger.spills()
    later = LedgerObserver(ledger.address, "background")
    usage = Usage(input=100, output=20)
    later(
        ModelCall(
            invocation=invocation, number=2, model="m", kind="measured", usage=usage,
            estimated=False, span_id=None, seconds=1.0,
        )
    )  # fmt: skip
    later.flush()
    (row,) = ledger.invocations()
    later.close()
    assert (row["model_calls"], row["input_tokens"], row["output_tokens"]) == (2, 200, 40)


def test_a_spill_file_that_vanishes_takes_no_later_row_with_it(ledger: LedgerFile) -> None:
    """An unlinked file can still be written to, so rows must go to a new one."""
    spill = SpillFiles(ledger.address)
    for number in range(3):
        spill.append(rows_of(f"{number}"), to_disk=False)
        (path,) = spill.files()
        if number == 0:
            path.unlink()
        else:
            shutil.move(path.parent, path.parent.with_name(f"moved-{number}"))
        spill.append(rows_of(f"{number} later"), to_disk=False)
        (path,) = spill.files()
        assert f"{number} later" in path.read_text(encoding="utf-8")
    spill.seal()


def test_a_log_that_vanishes_takes_no_later_row_with_it(ledger: LedgerFile) -> None:
    """Deleting a directory may meet recreated files, and leave some."""
    database = database_module.Database(ledger.address)
    for number in range(3):
        database.write(rows_of(f"{number}"))
        opened = database.engine()
        database.write(rows_of(f"{number} again"))
        assert database.engine() is opened
        ledger.path.with_name("ledger.db-wal").unlink()
    database.write(rows_of("last"))
    database.close()
    assert ("last", "k") in ledger.attributes()


def test_a_ledger_in_whose_place_is_a_link_takes_later_rows(
    ledger: LedgerFile, tmp_path: Path
) -> None:
    """Moving it may leave a link, while the open file's log has lost its name."""
    database = database_module.Database(ledger.address)
    database.write(rows_of("first"))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    ledger.path.rename(moved / "ledger.db")
    ledger.path.symlink_to(moved / "ledger.db")
    database.write(rows_of("later"))
    connection = sqlite3.connect(moved / "ledger.db")
    keys = connection.execute("SELECT invocation_id FROM otel_limits_attributes").fetchall()
    connection.close()
    database.close()
    assert ("later",) in keys


def test_memory_takes_what_no_file_takes(
    faulty: None,
    impatient: None,
    ledger: LedgerFile,
    worker: Agent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With neither database nor spill file rows are kept in memory, and written later."""
    broken = True
    refuse_spill_files(monkeypatch, lambda: broken)
    enable()
    worker("go")
    repair = locked(ledger)
    for _ in range(3):
        worker("go")
    assert ledger.spills() == []
    broken = False
    repair()
    worker("go")
    eventually(lambda: whole(ledger) == 5)


def test_rows_in_memory_are_written_at_exit_after_recovery(
    faulty: None,
    impatient: None,
    ledger: LedgerFile,
    worker: Agent,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A program may end before the database would have been tried again."""
    refuse_spill_files(monkeypatch, lambda: True)
    enable()
    worker("go")
    repair = locked(ledger)
    worker("go")
    eventually(lambda: "rows kept in memory" in caplog.text)
    repair()
    disable()
    assert whole(ledger) == 2


def test_rows_that_nothing_takes_are_counted_at_the_end(
    faulty: None,
    make_agent: MakeAgent,
    tmp_path: Path,
    metric: Metric,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both failures are logged with their reasons, and finally the number of lost rows."""
    file = tmp_path / "no directory"
    file.touch()
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(file / "ledger.db"))
    monkeypatch.setenv("XDG_DATA_HOME", str(file))
    monkeypatch.setattr("tempfile.tempdir", str(file))
    faults = metric("otel_limits_internal_errors_total", component="ledger_spill")
    enable()
    make_agent(ScriptedModel([says("x")]))("go")
    eventually(lambda: "rows kept in memory" in caplog.text)
    assert metric("otel_limits_internal_errors_total", component="ledger_spill") > faults
    disable()
    assert "ledger.db (Not a directory); up to " in caplog.text
    assert re.search(r": [1-9]\d* rows? lost from ledger \S.*ledger.db:", caplog.text)
    assert "rows spilled to" not in caplog.text


def test_the_log_names_the_place_where_rows_wait(
    faulty: None,
    make_agent: MakeAgent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If nothing can be written next to the ledger, that is the data directory."""
    file = tmp_path / "no directory"
    file.touch()
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(file / "ledger.db"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    enable()
    make_agent(ScriptedModel([says("x")]))("go")
    eventually(lambda: "rows spilled" in caplog.text)
    home = tmp_path / "home" / "otel-limits"
    (place,) = home.glob("ledger-*.spill-*")
    assert f"rows spilled to {str(place).partition('.spill-')[0]}.spill-*" in caplog.text


def open_nothing(*_: object) -> Any:
    """Fail as a full disk does."""
    raise OSError(28, "No space left on device")


def refuse_spill_files(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[], bool]) -> None:
    """Let no spill file be created while the disk is full."""
    create = files.create

    def created(path: Path, *group: Any) -> Any:
        return open_nothing() if MARK in path.name and is_full() else create(path, *group)

    monkeypatch.setattr(files, "create", created)


def test_hanging_database_does_not_delay_agents(
    ledger: LedgerFile, worker: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one write hangs, invocations return, and their rows are still durable."""
    enable()
    worker("go")
    eventually(lambda: whole(ledger) == 1)
    hangs = threading.Event()
    write = database_module.Database.write

    def hang(database: Any, rows: Any) -> Any:
        hangs.wait()
        return write(database, rows)

    monkeypatch.setattr(database_module.Database, "write", hang)
    for _ in range(3):
        worker("go")
    assert len(ended_in_spills(ledger)) == 3
    hangs.set()
    eventually(lambda: whole(ledger) == 4)


def test_long_lock_does_not_delay_agents(
    ledger: LedgerFile, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while the lock is held and the write still waits, and the event loop turns."""
    waits, has_ended = threading.Event(), threading.Event()
    write = database_module.Database.write

    def watched(database: Any, rows: Any) -> Any:
        waits.set()
        try:
            return write(database, rows)
        finally:
            has_ended.set()

    @tool
    async def search() -> str:
        """Go on when the write has met the lock and the loop has turned since."""
        await asyncio.to_thread(waits.wait, 60)
        for _ in range(3):
            await asyncio.sleep(0)
        return "nothing"

    def script() -> Any:
        yield from (uses("search"), says("x"), uses("search"), says("x"))

    agent = make_agent(ScriptedModel(script()), tools=[search])
    with waiting_for_locks(60.0):  # longer than any caller may wait for it
        enable()
        waits.set()
        agent("go")
        eventually(lambda: whole(ledger) == 1)
    waits.clear()
    release = locked(ledger)
    monkeypatch.setattr(database_module.Database, "write", watched)
    assert asyncio.run(agent.invoke_async("go")).stop_reason == "end_turn"
    assert (waits.is_set(), has_ended.is_set()) == (True, False)
    assert len(ended_in_spills(ledger)) == 1
    release()
    eventually(lambda: whole(ledger) == 2)
    assert (len(ledger.invocations()), len(ledger.calls())) == (2, 4)


def ended_in_spills(ledger: LedgerFile) -> set[str]:
    """Invocations whose end is in a spill file."""
    lines = [line for path in ledger.spills() for line in path.read_text().splitlines()[1:]]
    return {
        row["id"]
        for table, row in map(json.loads, lines)
        if table == "otel_limits_invocations" and row["ended_us"] is not None
    }


def test_a_spill_that_is_gone_by_now_is_nobodys(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer finished between our check and our turn."""
    spill = SpillFiles(ledger.address)
    spill.append([("otel_limits_attributes", attribute("i"))], to_disk=True)
    spill.seal()
    (path,) = ledger.spills()
    lock = fcntl.flock

    def wait_for_it(file: Any, how: int) -> None:
        path.unlink(missing_ok=True)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", wait_for_it)
    assert list(restore_spilled(database_module.Database(ledger.address), spill)) == []


def test_half_a_line_was_never_acknowledged(ledger: LedgerFile) -> None:
    """A process that died while it wrote leaves half a line, which is no row."""
    spill = SpillFiles(ledger.address)
    spill.append([("otel_limits_attributes", attribute("i"))], to_disk=True)
    spill.seal()
    (path,) = ledger.spills()
    with path.open("a") as file:
        file.write('["otel_limits_attributes",{"invocation_id":"j"')
    restore(ledger)
    assert list(ledger.attributes()) == [("i", "k")]
    assert list(path.parent.glob("*.damaged")) == []


@pytest.mark.parametrize(
    "line",
    [
        "not a row",
        '["otel_limits_attributes", {"invocation_id": "j", "kex": "k", "value": "v"}]',
        '["otel_limits_attributes", {"invocation_id": "j", "key": 7, "value": "v"}]',
        '["otel_limits_quota_changes", {"id": "q", "at_us": "soon"}]',
        '["otel_limits_tool_calls", {"invocation_id": "j", "at_us": 9223372036854775808}]',
        '["recount", {"ix": "j"}]',
    ],
)
def test_a_damaged_line_costs_no_other(faulty: None, ledger: LedgerFile, line: str) -> None:
    """A damaged line is kept for later inspection; the rest is restored."""
    spill = SpillFiles(ledger.address)
    spill.append([("otel_limits_attributes", attribute("i"))], to_disk=True)
    spill.seal()
    (path,) = ledger.spills()
    path.write_text(f"{line}\n{path.read_text()}")
    assert main(["audit", "verify"]) == 1
    restore(ledger)
    assert list(ledger.attributes()) == [("i", "k")]
    (kept,) = path.parent.glob("*.damaged")
    assert kept.read_text().splitlines()[0] == line


def attribute(identity: str) -> dict[str, str]:
    """Make a row."""
    return {"invocation_id": identity, "key": "k", "value": "v"}


def test_rows_of_an_older_version_are_completed(ledger: LedgerFile) -> None:
    """A row with a missing or a removed column is still restored."""
    spill = SpillFiles(ledger.address)
    spill.append([("otel_limits_attributes", attribute("i") | {"was": "once"})], to_disk=True)
    spill.seal()
    restore(ledger)
    assert list(ledger.attributes()) == [("i", "k")]


def test_threads_share_one_writer(ledger: LedgerFile, make_agent: MakeAgent) -> None:
    """Many threads end invocations concurrently; each finds its own rows durable."""
    enable(Limits(max_turns=2))

    def work() -> None:
        for _ in range(5):
            make_agent(ScriptedModel(endless(uses("search"))))("go")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(ledger.invocations()), whole(ledger)) == (40, 40)


def test_a_ledger_that_is_closed_while_its_thread_begins(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disabling at that moment raises no error and loses no row."""
    writer = Writer(database_module.Database(ledger.address), SpillFiles(ledger.address))
    closed: list[str] = []

    def close() -> None:
        writer.close()
        closed.append("without an error")

    closing = threading.Thread(target=close)

    class Slow(threading.Thread):
        """Close the ledger before it has started, unless that has to wait."""

        def start(self) -> None:
            """Begin late."""
            closing.start()
            closing.join(0.2)
            super().start()

    monkeypatch.setattr(threading, "Thread", Slow)
    writer.put(rows_of("only"))
    closing.join()
    assert closed == ["without an error"]
    assert ("only", "k") in ledger.attributes()


def test_a_row_that_comes_when_the_ledger_has_been_closed_is_kept(ledger: LedgerFile) -> None:
    """A thread may be telling its observers just when another one switches off."""
    writer = Writer(database_module.Database(ledger.address), SpillFiles(ledger.address))
    writer.put(rows_of("before"))
    writer.close()
    writer.put(rows_of("afterwards"))
    assert len(ledger.spills()) == 1
    restore(ledger)
    assert set(ledger.attributes()) == {("before", "k"), ("afterwards", "k")}


def test_rows_of_threads_that_outlive_the_ledger_are_kept(
    ledger: LedgerFile, caplog: pytest.LogCaptureFixture
) -> None:
    """Daemon threads still run when Python has closed the ledger, and until it ends."""
    writer = Writer(database_module.Database(ledger.address), SpillFiles(ledger.address))
    writer.put(rows_of("before"))
    writer.close()

    def put(thread: int) -> None:
        for row in range(25):
            writer.put(rows_of(f"{thread}-{row}"))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    restore(ledger)
    assert len(ledger.attributes()) == 1 + 8 * 25
    assert (writer.dropped_rows, caplog.text) == (0, "")


def test_a_ledger_that_a_later_version_upgrades_meanwhile_gets_no_row(
    faulty: None, ledger: LedgerFile, worker: Agent
) -> None:
    """Its columns may mean something else by now; the rows wait for a program that knows."""
    enable()
    worker("go")
    eventually(lambda: whole(ledger) == 1)
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("UPDATE otel_limits_schema SET version = version + 1")
    worker("go")
    disable()
    assert len(ended_in_spills(ledger)) == 1
