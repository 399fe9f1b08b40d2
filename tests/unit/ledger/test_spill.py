"""Rows in spill files: where the files are, and how a reader takes their rows into the ledger."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import sqlalchemy as sa

from otel_limits.cli import main
from otel_limits.core.errors import LedgerError, LedgerMovedError
from otel_limits.core.events import ModelCall
from otel_limits.ledger import files as files_module
from otel_limits.ledger import spill as spill_module
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from otel_limits.ledger.maintenance import damages, pruned_row
from otel_limits.ledger.quota_usage import charges_between
from otel_limits.ledger.reading import open_for_query
from otel_limits.ledger.rows import INVOCATIONS, LOST, MAINTENANCE
from otel_limits.ledger.schema import INVOCATION_TABLE, TABLES, VERSIONS
from otel_limits.ledger.spill import OWNER, SpillFiles, find_orphans, restore_spilled
from otel_limits.observers.ledger import LedgerObserver
from tests.ledger.book import DAY, NINE, Book, Call, Entry, write
from tests.ledger.fixtures import eventually
from tests.ledger.size import one

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.rows import Rows
    from tests.ledger.fixtures import LedgerFile


LATE: Final = 3
"""Rows of a call after the end of its invocation: its invocation, itself, and a recount."""


def content(address: Address) -> tuple[dict[str, list[str]], int]:
    """Every row as a query sees it, without the database's own numbers; and how many wait."""
    with open_for_query(address) as (connection, waiting):
        assert not waiting.reason
        rows = {}
        for table in TABLES:
            columns = [each for each in table.c if each is not table.autoincrement_column]
            rows[table.name] = sorted(map(repr, connection.execute(sa.select(*columns))))
            if table.autoincrement_column is not None:
                numbers = connection.scalars(sa.select(table.autoincrement_column)).all()
                assert len(set(numbers)) == len(numbers)
        return rows, waiting.rows


def recorded_rows(address: Address) -> list[Rows]:
    """Rows of invocations with late and renumbered calls, by event."""
    rows: list[Rows] = []
    observer = LedgerObserver(address)
    observer.writer.put = rows.append  # type: ignore[method-assign, assignment]
    observer.writer.wait_until_durable = lambda *_: None  # type: ignore[method-assign]
    book = Book(address)
    events: list[Any] = []
    book._observer = events.append  # type: ignore[assignment]
    for number in range(12):
        calls = [Call(price="0.01", tools=["search"]), Call(cached=9, model="n"), Call(side=True)]
        tenant = {"tenant.id": f"t{number % 2}"}
        book.write(Entry(calls=calls, at=NINE + number * DAY, attributes=tenant))
    for event in events:
        observer(event)
    made = [event for event in events if isinstance(event, ModelCall)]
    observer(replace(made[0], number=4, at=NINE + 99))  # after the end
    observer(replace(made[4], at=NINE + 77))  # another call of the same number
    rows += [[(MAINTENANCE, pruned_row(address, number))] for number in (5, 9, 7)]
    observer.close()
    return rows


def check_equivalence(address: Address, seed: int) -> None:
    """Record some rows, spill others, and some twice; a reader leaves what restoring leaves.

    Two of the files belong to running processes, which restore them later.
    """
    chance = random.Random(seed)  # noqa: S311
    events = recorded_rows(address)

    late = [row for rows in events if len(rows) == LATE for row in rows]

    def some() -> Rows:
        return [row for rows in events if chance.random() < 0.5 for row in rows if row not in late]

    ends = [each for ((name, each), *_) in events if name == INVOCATIONS and each["reason"]]
    with closing(Database(address)) as database:
        # Operators end invocations in the database itself.
        lost = [(INVOCATIONS, {**end, "reason": LOST, "action": LOST}) for end in ends[:4]]
        database.write([*some(), *lost])
        ended, *running = (SpillFiles(address) for _ in range(3))
        for spill in (ended, *running):
            # Late calls come last, as each recounts what its invocation has until then.
            spill.append([*some(), *late], to_disk=False)
        ended.seal()
        taken, left = content(address)
        assert left == 0
        assert len(ended.files()) == len(running)
        for spill in running:
            for _ in spill.restore_own(database):
                pass
    assert not ended.files()
    assert content(address) == (taken, 0)


@pytest.mark.parametrize("seed", range(6))
def test_waiting_rows_are_seen_as_if_restored(ledger: LedgerFile, seed: int) -> None:
    """Replays, ends of recorded invocations, late and renumbered calls, and losses."""
    check_equivalence(ledger.address, seed)


@pytest.mark.parametrize("order", [1, -1])
def test_real_end_wins_over_an_assumed_one_in_the_same_batch(
    ledger: LedgerFile, order: int
) -> None:
    """In any order: an operator only assumes that a process has vanished."""
    ((_, end),) = [each for each in one(0) if each[0] == INVOCATIONS and each[1]["reason"]]
    lost = {**end, "reason": LOST, "action": LOST}
    start = {**end, "ended_us": None, "reason": None, "action": None}
    rows: Rows = [(INVOCATIONS, each) for each in (lost, end)[::order]]
    with closing(Database(ledger.address)) as database:
        database.write([(INVOCATIONS, start), *rows, (INVOCATIONS, start)])
    assert [row["reason"] for row in ledger.invocations()] == ["end_turn"]


def spilled(ledger: LedgerFile, *numbers: int) -> SpillFiles:
    """Make a process spill some invocations and go on running."""
    spill = SpillFiles(ledger.address)
    for number in numbers:
        spill.append(one(number), to_disk=False)
    return spill


@pytest.fixture
def unreadable(ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spill file that another user has left: tests may run as root, who reads every file."""
    with closing(Database(ledger.address)) as database:
        database.write(one(0))
    spill = spilled(ledger, 1)
    (path,) = spill.files()
    spill.seal()
    open_file = os.open

    def refused(name: Any, *arguments: Any, **more: Any) -> int:
        if name == path:
            raise PermissionError
        return open_file(name, *arguments, **more)

    monkeypatch.setattr(os, "open", refused)
    return path


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("audit", "spend"), 0),
        (("audit", "stops"), 0),
        (("ledger", "export", "--format", "csv"), 0),
        (("ledger", "close", "--until", "2026-01-01"), 2),
        (("ledger", "merge", "LEDGER", "--into", "all.db"), 2),
    ],
    ids=lambda each: each[1] if isinstance(each, tuple) else str(each),
)
def test_command_names_spill_file_of_another_user(
    ledger: LedgerFile,
    unreadable: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    status: int,
) -> None:
    """Its rows are not included, and how many there are is unknown."""
    monkeypatch.chdir(ledger.path.parent)
    words = [str(ledger.path) if word == "LEDGER" else word for word in command]
    assert main(words) == status
    expected = f"1 spill file is unreadable for this user and is not included: {unreadable}"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("days", "status"), [(0, 0), (9, 1)])
def test_verify_fails_once_spill_file_of_another_user_is_old(
    unreadable: Path, capsys: pytest.CaptureFixture[str], days: int, status: int
) -> None:
    """A new one may be restored by its process."""
    written = time.time() - days * DAY
    os.utime(unreadable, (written, written))
    assert main(["audit", "verify"]) == status
    assert f"unreadable for this user: {unreadable}" in " ".join(capsys.readouterr().out.split())


def test_adopt_of_unreadable_file_names_the_reason(
    unreadable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may well be a spill file."""
    assert main(["ledger", "adopt", str(unreadable)]) == 2
    assert f"{unreadable} cannot be read by this user" in capsys.readouterr().err


def test_file_of_a_running_process_stays(ledger: LedgerFile) -> None:
    """Its rows are taken in, also those that it appends later; restoring them adds nothing."""
    spill = spilled(ledger, 1)
    (path,) = spill.files()
    for number in (2, 3):
        assert open_rows(ledger) == (number - 1, 0)
        spill.append(one(number), to_disk=False)
    with closing(Database(ledger.address)) as database:
        assert sum(spill.restore_own(database)) == 3 * len(one(1))
    assert not path.exists()
    assert open_rows(ledger) == (3, 0)


def open_rows(ledger: LedgerFile) -> tuple[int, int]:
    """How many invocations an answer has, and how many rows it lacks."""
    with open_for_query(ledger.address) as (connection, waiting):
        (found,) = connection.execute(
            sa.select(sa.func.count()).select_from(INVOCATION_TABLE)
        ).one()
        return found, waiting.rows


def test_line_that_is_being_written_is_not_damaged(ledger: LedgerFile) -> None:
    """A process appends while its file is read, and has half a line there."""
    spill = spilled(ledger, 1)
    (path,) = spill.files()
    with path.open("ab") as file:
        file.write(b'["otel_limits_invocations",{"id"')
    with open_for_query(ledger.address) as (_, waiting):
        assert (waiting.rows, waiting.damaged) == (0, 0)
    assert path.exists()
    spill.seal()


def test_readers_at_the_same_time_count_rows_once(ledger: LedgerFile) -> None:
    """One of them claims the file, and the others copy what it has."""
    for number in range(40):
        spilled(ledger, number).seal()
    begin = threading.Barrier(3)

    def ask() -> tuple[int, int]:
        begin.wait()
        while True:
            with contextlib.suppress(LedgerMovedError):
                return open_rows(ledger)

    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask) for _ in range(3)]
    assert [each.result() for each in asked] == [(40, 0)] * 3
    assert not ledger.spills()
    assert len(ledger.invocations()) == 40


def test_rows_wait_while_the_ledger_is_locked(ledger: LedgerFile) -> None:
    """The answer says how many, in which files, and why; later they are in it."""
    with closing(Database(ledger.address)) as database:
        database.write(one(0))
    for number in range(1, 6):
        spilled(ledger, number).seal()
    with ledger.locked():
        assert open_rows(ledger) == (1, 5 * len(one(1)))
        with open_for_query(ledger.address) as (_, waiting):
            first, second, third, *others = ledger.spills()
            named = f"{first}, {second}, {third} and {len(others)} other files"
            assert str(waiting) == (
                f"{5 * len(one(1))} rows wait in {named} and are not included (database is locked)"
            )
    assert open_rows(ledger) == (6, 0)


def test_reader_of_a_file_without_write_access_creates_no_files(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's file, in a directory where this user may create some."""
    with closing(Database(ledger.address)) as database:
        database.write(one(0))
    spilled(ledger, 1).seal()
    before = sorted(ledger.path.parent.iterdir())
    monkeypatch.setattr("os.access", lambda path, _: os.path.isdir(path))  # noqa: PTH112
    with open_for_query(ledger.address) as (_, waiting):
        assert waiting.rows == len(one(1))
        assert waiting.reason == f"{ledger.path} cannot be written"
    assert sorted(ledger.path.parent.iterdir()) == before


def test_failing_write_leaves_the_rows_where_they_are(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E.g. on a full disk; the answer is without them."""
    with closing(Database(ledger.address)) as database:
        database.write(one(0))
    spilled(ledger, 1).seal()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Database, "write", fail)
    with open_for_query(ledger.address) as (_, waiting):
        assert (waiting.rows, waiting.reason) == (len(one(1)), "No space left on device")
        assert waiting.files == ledger.spills()


def test_rows_of_a_ledger_of_another_version_wait(ledger: LedgerFile) -> None:
    """Its columns may mean something else, so a query takes in no rows."""
    with closing(Database(ledger.address)) as database, database.changing() as connection:
        connection.execute(VERSIONS.update().values(version=2))
    spilled(ledger, 1).seal()
    with (
        pytest.raises(LedgerError, match="has schema version 2"),
        open_for_query(ledger.address),
    ):
        pass
    assert len(ledger.spills()) == 1


def test_quotas_are_not_rebuilt_without_waiting_rows(ledger: LedgerFile) -> None:
    """Usage that waits would be missing for good: it is tried again."""
    with closing(Database(ledger.address)) as database:
        database.write(one(0))
    spilled(ledger, 1).seal()
    with ledger.locked(), pytest.raises(LedgerError, match="are not included"):
        list(charges_between(ledger.address, 0, time.time()))
    assert list(charges_between(ledger.address, 0, time.time())) == []


def test_damaged_lines_of_an_ended_process_are_recorded(faulty: None, ledger: LedgerFile) -> None:
    """As by a writer, which keeps the file for an audit."""
    spill = spilled(ledger, 1)
    spill.seal()
    (path,) = spill.files()
    with path.open("ab") as file:
        file.write(b"torn\n")
    with open_for_query(ledger.address) as (connection, waiting):
        assert (waiting.rows, waiting.damaged) == (0, 0)
        assert [each.lines for each in damages(connection)] == [1]
    assert path.with_suffix(".damaged").exists()


# --- places of spill files ------------------------------------------------------------------------


def row(number: int) -> tuple[str, dict[str, str]]:
    """A small row."""
    return ("otel_limits_attributes", {"invocation_id": f"{number}", "key": "k", "value": "v"})


class FullFile(io.FileIO):
    """A file on a full disk: it can be made, and takes half a line."""

    def write(self, data: Any) -> int:
        """Take a few bytes, then none."""
        if self.tell():
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(data)[:5]) or 0


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Directories whose disk is full."""
    create, found = files_module.create, set[Path]()

    def created(path: Path, group: int | None = None) -> Any:
        file = create(path, group)
        if path.parent not in found:
            return file
        file.close()
        return FullFile(path, "r+")

    monkeypatch.setattr(files_module, "create", created)
    return found


def places(address: Address) -> list[Path]:
    """The directories in which rows may wait, in their order."""
    return [place.parent for place in address.spills]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_full_disk_leads_to_the_next_place(
    ledger: LedgerFile, full: set[Path], number: int
) -> None:
    """Nothing is left where nothing fits, and every row is taken back from where it is."""
    full.update(places(ledger.address)[:number])
    spill = SpillFiles(ledger.address)
    for each in range(50):
        spill.append([row(each)], to_disk=True)
    spill.seal()
    (path,) = spill.files()
    assert path.parent == places(ledger.address)[number]
    with closing(Database(ledger.address)) as database:
        assert sum(restore_spilled(database, spill)) == 50
    assert spill.files() == []


def test_no_place_is_an_error_and_leaves_nothing(ledger: LedgerFile, full: set[Path]) -> None:
    """Memory is what is left then."""
    full.update(places(ledger.address))
    spill = SpillFiles(ledger.address)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            spill.append([row(1)], to_disk=True)
    assert spill.files() == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_leads_to_the_next_place(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As some over a network are; no empty file is left there."""
    beside, lock = places(ledger.address)[0], spill_module.fcntl.flock

    def locked(file: Any, how: int) -> None:
        if Path(f"/proc/self/fd/{file.fileno()}").readlink().parent == beside:
            raise OSError(number, os.strerror(number))
        lock(file, how)

    monkeypatch.setattr(spill_module.fcntl, "flock", locked)
    spill = SpillFiles(ledger.address)
    for each in range(3):
        spill.append([row(each)], to_disk=True)
    spill.seal()
    assert [path.parent for path in spill.files()] == places(ledger.address)[1:2]
    with closing(Database(ledger.address)) as database:
        assert sum(restore_spilled(database, spill)) == 3


def test_a_process_has_one_file(ledger: LedgerFile) -> None:
    """Also when it tries again and again to have its rows taken back by a database that is gone."""
    spill = SpillFiles(ledger.address)
    ledger.path.parent.mkdir(exist_ok=True)

    class Gone:
        """Refuses everything."""

        def write(self, _: object) -> None:
            """Refuse."""
            raise OSError(errno.EIO, "gone")

    for number in range(10):
        spill.append([row(number)], to_disk=False)
        with pytest.raises(OSError, match="gone"):
            list(spill.restore_own(Gone()))  # type: ignore[arg-type]
    assert len(spill.files()) == 1
    with closing(Database(ledger.address)) as database:
        assert sum(spill.restore_own(database)) == 10
    assert spill.files() == []


def test_ledgers_of_one_name_do_not_share_a_place(tmp_path: Path, full: set[Path]) -> None:
    """Two customers have a `ledger.db` each, and one data directory: each gets its own rows."""
    acme, globex = (
        parse("t", str(tmp_path / n / "ledger.db"), tmp_path) for n in ("acme", "globex")
    )
    full.update({tmp_path / "acme", tmp_path / "globex"})
    spill = SpillFiles(acme)
    spill.append([row(1)], to_disk=True)
    spill.seal()
    assert SpillFiles(globex).files() == []
    (path,) = spill.files()
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0]) == {OWNER: acme.name}


def test_a_password_is_no_part_of_a_name(tmp_path: Path) -> None:
    """A rotated password leaves nothing behind; another user or host does, and it is listed."""
    pytest.importorskip("psycopg")
    old, new, other = (
        parse("t", f"postgresql://{user}@{host}/spend", tmp_path)
        for user, host in (("a:one", "db"), ("a:two", "db"), ("b:two", "db.internal"))
    )
    spill = SpillFiles(old)
    spill.append([row(1)], to_disk=True)
    spill.seal()
    (path,) = SpillFiles(new).files()
    assert "one" not in path.read_text(encoding="utf-8")
    assert (find_orphans(new), SpillFiles(other).files()) == ([], [])
    assert [each.path for each in find_orphans(other)] == [path]


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="the system has no links")
def test_no_link_is_followed(ledger: LedgerFile, temporary: Path, tmp_path: Path) -> None:
    """Another user's directory or file in the temporary directory is not touched."""
    trap = tmp_path / "trap"
    trap.mkdir(mode=0o700)
    (temporary / f"otel-limits-{os.geteuid()}").symlink_to(trap)
    last = ledger.address.spills[-1]
    with pytest.raises(PermissionError):
        SpillFiles(replace(ledger.address, spills=(last,))).append([row(1)], to_disk=False)
    (trap / f"{last.name}.spill-x.jsonl").write_text('["otel_limits_attributes",{}]\n')
    assert SpillFiles(ledger.address).files() == []
    assert find_orphans(ledger.address) == []


def test_a_directory_that_others_can_enter_is_not_ours(ledger: LedgerFile, temporary: Path) -> None:
    """Whichever user created it first in the temporary directory could write into it."""
    place = temporary / f"otel-limits-{os.geteuid()}"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    spill = SpillFiles(replace(ledger.address, spills=ledger.address.spills[-1:]))
    with pytest.raises(PermissionError):
        spill.append([row(1)], to_disk=False)


@pytest.mark.parametrize("cut", range(2, 60, 7))
def test_a_cut_last_line_costs_no_other(ledger: LedgerFile, cut: int) -> None:
    """Power failed while it was written: it was never acknowledged, all before it were."""
    spill = SpillFiles(ledger.address)
    spill.append([row(1), row(2), row(3)], to_disk=True)
    spill.seal()
    (path,) = spill.files()
    os.truncate(path, path.stat().st_size - cut)
    with closing(Database(ledger.address)) as database:
        assert sum(restore_spilled(database, spill)) == 2
    assert spill.files() == []


# --- retention ------------------------------------------------------------------------------------


def test_old_trees_are_deleted_in_the_background(ledger: LedgerFile) -> None:
    """While a program records, and nothing that is younger."""
    write(ledger.address, *(Entry() for _ in range(120)))
    book = Book(ledger.address, first=500)
    book._observer = LedgerObserver(ledger.address, retention=timedelta(days=90))
    book.write(Entry(at=time.time() - 60))
    eventually(lambda: len(ledger.invocations()) == 1)
    assert len(ledger.calls()) == 1
    book.close()


def test_pruning_gives_back_the_space_of_a_restored_file(ledger: LedgerFile) -> None:
    """A file that was made from a dump cannot shrink by itself: it is rebuilt."""
    write(ledger.address, *(Entry() for _ in range(400)))
    with closing(sqlite3.connect(ledger.path)) as connection:
        dump = "\n".join(connection.iterdump())
    ledger.path = ledger.path.with_name("restored.db")
    with closing(sqlite3.connect(ledger.path)) as connection:
        connection.executescript(dump)
    before = ledger.path.stat().st_size
    assert main(["ledger", "prune", "--older-than", "1d", "--ledger", str(ledger.path)]) == 0
    assert ledger.path.stat().st_size < before / 2


# --- permissions ----------------------------------------------------------------------------------


def test_a_group_can_read(ledger: LedgerFile, tmp_path: Path) -> None:
    """0640 in directories of 0750, also SQLite's own files next to it."""
    group = os.getgroups()[-1] if os.getgroups() else os.getegid()
    ledger.path = tmp_path / "shared" / "ledger.db"
    address = replace(ledger.address, group=group)
    book = Book(address)
    book.write(Entry())
    log = ledger.path.with_name("ledger.db-wal")
    eventually(lambda: log.exists() and log.stat().st_mode & 0o777 == 0o640)
    found = [(path.stat().st_mode & 0o777, path.stat().st_gid) for path in (ledger.path, log)]
    assert found == [(0o640, group)] * 2
    assert ledger.path.parent.stat().st_mode & 0o777 == 0o750
    book.close()


def test_an_unknown_group_is_refused() -> None:
    """With the name, the value and where to look."""
    with pytest.raises(ValueError, match="must be a group of this system, got 'no such one'"):
        files_module.group_id("OTEL_LIMITS_LEDGER_GROUP", "no such one")
