"""Append-only files that hold rows while the database of a ledger is unavailable.

A row in one of them is durable. Each process has its own file, so appending needs no coordination
and no process deletes a file that may still grow. Its first line names its ledger; no other ledger
restores its rows.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import importlib.util
import json
import logging
import operator
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.wording import pluralize
from otel_limits.ledger import files
from otel_limits.ledger.address import database_of
from otel_limits.ledger.database import Database, identity
from otel_limits.ledger.maintenance import damaged_row
from otel_limits.ledger.rows import MAINTENANCE, MAX_INTEGER, RECOUNTS, portions
from otel_limits.ledger.schema import METADATA, insertable_columns

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.rows import Row, Rows

fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None
"""Missing on Windows, which never deletes an open file: as good as a lock."""

logger = logging.getLogger("otel_limits")

SUFFIX: Final = ".jsonl"
MARK: Final = ".spill-"
ATTEMPTS: Final = 5
OWNER: Final = "otel_limits_ledger"
"""Key of the ledger's address in the first line of a spill file."""


class SpillFiles:
    """The spill file of this process, and those that other processes left behind.

    A file belongs to the process that holds its lock, and the lock ends with the process. So no
    process appends to a file that can be locked.

    Attributes:
        place: Path prefix of the file that was written last.
    """

    def __init__(self, address: Address) -> None:
        """Create no file yet."""
        self.address = address
        self.place = address.spills[0]
        self._lock = threading.RLock()
        self._open: dict[Path, SpillFile] = {}
        """One file per place that worked; earlier places were full, or had vanished."""

    def append(self, rows: Rows, *, to_disk: bool) -> None:
        """Append `rows` at the first place that works. They survive the process from then on.

        Args:
            rows: The rows.
            to_disk: Sync them, so that they survive the machine too.

        Raises:
            OSError: Every place failed. None of the rows counts as written.
        """
        lines = b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
        with self._lock:
            *others, last = self.address.spills
            for place in others:
                with contextlib.suppress(OSError):
                    return self._append_at(place, lines, to_disk=to_disk)
            return self._append_at(last, lines, to_disk=to_disk)

    def seal(self) -> None:
        """Close the files of this process; later rows go to new ones."""
        with self._lock:
            opened, self._open = self._open, {}
            for file in opened.values():
                file.close()

    def restore_own(self, database: Database) -> Iterator[int]:
        """Move this process's own spilled rows into the database; keep its files open on failure.

        Yields:
            Rows moved, after each portion.
        """
        with self._lock:  # concurrent appends go to new files
            mine, self._open = self._open, {}
        try:
            for place in list(mine):
                yield from mine[place].move_to(database)
                mine.pop(place).close()
        finally:
            with self._lock:
                for place, file in mine.items():
                    if self._open.setdefault(place, file) is not file:
                        file.close()

    def files(self) -> list[Path]:
        """List every spill file of this ledger, of all processes."""
        return [path for path in candidates(self.address) if belongs(path, self.address)]

    def abandon(self) -> None:
        """Leave the parent's files to the parent, in a forked child."""
        # A thread of the parent may have held the old lock, which would never be released here.
        # Closing a file unlocks nothing, since the parent still has it open.
        self._lock = threading.RLock()
        self.seal()

    def _append_at(self, place: Path, lines: bytes, *, to_disk: bool) -> None:
        while True:
            if place not in self._open:
                self._open[place] = self._create(place)
            file = self._open[place]
            try:
                file.append(lines, to_disk=to_disk)
            except OSError:
                if not file.is_usable():
                    del self._open[place]
                raise
            if file.exists():
                break
            # Deleted or moved, e.g. with its directory: rows written to it would be lost.
            self._open.pop(place).close()
        self.place = place

    def _create(self, place: Path) -> SpillFile:
        """Create a locked file whose first line names the ledger."""
        if place.parent == files.temporary_directory():
            files.make_directory(place.parent)
            if not files.is_own_directory(place.parent):
                raise PermissionError(f"{place.parent} is not private to this user.")
        files.make_directory(place.parent, self.address.group)
        for _ in range(ATTEMPTS):
            name = f"{place.name}{MARK}{os.getpid()}-{uuid.uuid4().hex[:12]}{SUFFIX}"
            path = place.with_name(name)
            file = files.create(path, self.address.group)
            # Between creation and lock, another process may restore and delete it.
            with contextlib.suppress(BlockingIOError):
                _lock(path, file)
                if path.exists():
                    return SpillFile(path, file, {OWNER: self.address.name})
            file.close()
        raise BlockingIOError(f"No spill file could be locked next to {place}.")


def _lock(path: Path, file: IO[bytes]) -> None:
    """Lock a new file; delete it if its file system has no locks, as some network ones."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        path.unlink(missing_ok=True)
        file.close()
        raise


class SpillFile:
    """A spill file of this process, which holds only whole lines."""

    def __init__(self, path: Path, file: IO[bytes], first: dict[str, str]) -> None:
        """Take a new locked file, and the content of its first line."""
        self._path = path
        self._file = file
        self._begin = json.dumps(first).encode() + b"\n"
        self._end = 0
        self._is_whole = True

    def append(self, lines: bytes, *, to_disk: bool) -> None:
        """Append all of `lines`, or at most half a line at the very end of the file.

        Raises:
            OSError: They could not be written, and none of them counts.
        """
        if not self._end:
            lines = self._begin + lines
        try:
            written = 0
            while written < len(lines):
                written += self._file.write(lines[written:]) or 0
            if to_disk:
                os.fsync(self._file.fileno())
        except OSError:
            # Readers treat half a line as the end of a killed process: nothing may follow it.
            try:
                self._file.truncate(self._end)
                self._file.seek(self._end)
            except OSError:
                self._is_whole = False
            raise
        self._end += len(lines)

    def exists(self) -> bool:
        """Return whether it still exists under its name, which an open file outlives."""
        found = os.fstat(self._file.fileno())
        return identity(self._path) == (found.st_dev, found.st_ino)

    def is_usable(self) -> bool:
        """Return whether it takes further lines; if not, close it, and delete it if empty."""
        if self._is_whole and self._end:
            return True
        if not self._end:
            self._path.unlink(missing_ok=True)
        self.close()
        return False

    def move_to(self, database: Database) -> Iterator[int]:
        """Move its rows into a database and delete it; yields the size of each portion."""
        file = files.open_existing(self._path)
        if file is not None:
            with file:
                yield from _moving(database, self._path, file)

    def close(self) -> None:
        """Close it, which releases its lock."""
        with contextlib.suppress(OSError):
            self._file.close()


# --- ownership -----------------------------------------------------------------------------------


def candidates(address: Address) -> list[Path]:
    """List files named like a spill file of this ledger, at every place."""
    return sorted(
        path
        for place in address.spills
        if is_trusted(place.parent)
        for path in place.parent.glob(f"{glob.escape(place.name)}{MARK}*{SUFFIX}")
    )


def is_trusted(directory: Path) -> bool:
    """Return whether only users who may write the ledger can have written to a directory."""
    return directory != files.temporary_directory() or files.is_own_directory(directory)


def belongs(path: Path, address: Address) -> bool:
    """Return whether a spill file is of this ledger, by its first line unless that is damaged."""
    named = owner_of(path)
    return named is None or named == address.name


def is_spill_file(path: Path) -> bool:
    """Return whether a file contains spilled rows, by its name and its first line."""
    file = files.open_existing(path) if MARK in path.name else None
    if file is None:
        return False
    with file:
        first = file.readline()
    return _row_of(_parsed_line(first)) is not None or owner_of(path) is not None


def owner_of(path: Path) -> str | None:
    """Return the ledger address in the first line of a spill file."""
    file = files.open_existing(path)
    if file is None:
        return None
    with file:
        try:
            first = json.loads(file.readline())
        except ValueError:
            return None
    return str(first[OWNER]) if isinstance(first, dict) and OWNER in first else None


@dataclass(frozen=True, slots=True)
class OrphanedSpillFile:
    """A spill file that no process restores automatically."""

    path: Path
    owner: str
    """The address of its ledger."""
    written: float
    """Time of its last write, in seconds since the epoch."""


def find_orphans(address: Address) -> list[OrphanedSpillFile]:
    """Find spill files whose ledger no longer exists, or is this one under another user or host.

    A person has to decide where their rows belong: `otel-limits ledger adopt`.
    """
    places = dict.fromkeys(place.parent for place in address.spills)
    found = []
    for directory in filter(is_trusted, places):
        for path in sorted(directory.glob(f"*{MARK}*{SUFFIX}")):
            owner = owner_of(path)
            if owner is not None and _is_orphan(owner, address):
                with contextlib.suppress(OSError):
                    found.append(OrphanedSpillFile(path, owner, path.stat().st_mtime))
    return found


def _is_orphan(owner: str, address: Address) -> bool:
    if owner == address.name:
        return False
    if owner.startswith("postgresql:"):
        return address.file is None and database_of(owner) == database_of(address.name)
    return not Path(owner).exists()


# --- restoring rows ------------------------------------------------------------------------------


def restore_spilled(database: Database, spill: SpillFiles) -> Iterator[int]:
    """Import all inactive spill files into the database.

    Yields:
        Rows moved, after each portion.
    """
    for path in spill.files():
        yield from restore_file(database, path)


def restore_file(database: Database, path: Path) -> Iterator[int]:
    """Import one spill file into a database, unless it is in use.

    Yields:
        Rows moved, after each portion.
    """
    with claimed(path) as file:
        if file is not None:
            yield from _moving(database, path, file)


def _moving(database: Database, path: Path, file: IO[bytes]) -> Iterator[int]:
    damaged: list[bytes] = []
    kept = path.with_suffix(".damaged")
    last: Rows = []
    # Rows that are already in the database are unchanged, so a crash between the last portion and
    # the deletion does no harm.
    for rows in rows_in(file, damaged.append):
        if last:
            database.write(last)
            yield len(last)
        last = rows
    # With the last rows: once all are restored, only this record shows that some are missing.
    record = [(MAINTENANCE, damaged_row(kept, damaged))] if damaged else []
    if last or record:
        database.write([*last, *record])
        yield len(last)
    if fcntl is None:
        file.close()  # Windows deletes no file that is open
    if not damaged:
        path.unlink(missing_ok=True)
        return
    path.replace(kept)
    logger.error(
        "otel-limits: spill file %s contains %s; the other lines were restored, and the "
        "file is kept as %s. otel-limits audit verify reports them until they are accepted.",
        path,
        pluralize(len(damaged), "damaged line"),
        kept.name,
    )


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[IO[bytes] | None]:
    """Open and lock `path`; `None` if a running process has it."""
    file = _locked(path)
    try:
        yield file
    finally:
        if file is not None:
            file.close()


def _locked(path: Path) -> IO[bytes] | None:
    file = files.open_existing(path)
    if file is None or fcntl is None:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    # The lock is on the file, not on its path: its previous owner may have deleted the path.
    if not path.exists():
        file.close()
        return None
    return file


def rows_in(
    lines: Iterable[bytes], on_damage: Callable[[bytes], object], size: int = 2_000
) -> Iterator[Rows]:
    """Read the lines of a spill file in portions of `size` rows.

    Half a row at the end was never acknowledged, as its process was killed during the write. Any
    other line that is not a row goes to `on_damage`.
    """
    for block in portions(lines, size):
        found: Rows = []
        for line, parsed in zip(block, _parsed(block), strict=True):
            row = _row_of(parsed)
            if row is not None:
                found.append(row)
            elif line.endswith(b"\n") and not line.startswith(b'{"' + OWNER.encode()):
                on_damage(line)
        if found:
            yield found


def _parsed(lines: list[bytes]) -> list[Any]:
    """Parse the JSON of some lines; `None` for one that is none."""
    try:
        # Together, as it takes a third less time if rows share the names of their columns.
        together: list[Any] = json.loads(f"[{b','.join(lines).decode()}]")
    except (ValueError, RecursionError):
        together = []
    # Two lines with half a row each are damaged.
    return together if len(together) == len(lines) else list(map(_parsed_line, lines))


def _parsed_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None


def _row_of(parsed: Any) -> tuple[str, Row] | None:
    """Return the table and row of a parsed line; `None` if it is not a valid row."""
    try:
        table, row = parsed
        is_row = isinstance(row, dict) and (table in METADATA.tables or table == RECOUNTS)
        whole = complete(table, row) if is_row else None
    except (ValueError, TypeError):
        return None
    return None if whole is None else (table, whole)


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
