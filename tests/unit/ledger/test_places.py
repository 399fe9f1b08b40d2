"""Places for spill files: next to the ledger, in the data directory, or in the temporary one."""

from __future__ import annotations

import errno
import io
import json
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from otel_limits.ledger import files as files_module
from otel_limits.ledger import spill as spill_module
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from otel_limits.ledger.spill import OWNER, SpillFiles, find_orphans, restore_spilled
from otel_limits.observers.ledger import LedgerObserver
from tests.ledger.book import Book, Entry, write
from tests.ledger.fixtures import eventually

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address
    from tests.ledger.fixtures import LedgerFile


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
