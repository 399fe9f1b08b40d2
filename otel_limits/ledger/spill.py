"""Append-only files that hold rows while the database of a ledger cannot take them.

A row is durable as soon as it stands in one of them. Each process has a file of its own, so that
appending needs no agreement with others, and nobody deletes a file that may still grow.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from otel_limits.ledger.database import Database, complete

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.rows import Rows

fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None
"""Missing on Windows, which never deletes a file that somebody has open: as good as a lock."""

logger = logging.getLogger("otel_limits")

SUFFIX: Final = ".jsonl"
MARK: Final = ".spill-"
ATTEMPTS: Final = 5


class SpillFiles:
    """The file of this process beside a ledger, and those that other processes left there.

    A file belongs to whoever holds its lock, and the lock ends with its process. So a file that
    can be locked has nobody left who appends to it.

    Attributes:
        place: Beginning of the path of the file that rows went to last.
    """

    def __init__(self, address: Address) -> None:
        """Write nothing yet."""
        self._prefixes = address.spills
        self.place = address.spills[0]
        self._lock = threading.RLock()
        self._file: IO[bytes] | None = None
        self._has_unsynced = False

    def append(self, rows: Rows, *, to_disk: bool) -> None:
        """Append `rows`; they survive the process from here on.

        Args:
            rows: What is appended.
            to_disk: They are to survive the machine too, which takes longer.

        Raises:
            OSError: No place takes them. None of them counts as written.
        """
        lines = b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
        with self._lock:
            if self._file is None:
                self._file = self._create()
            self._write(self._file, lines)
            self._has_unsynced = True
            if to_disk:
                self.sync()

    def seal(self) -> None:
        """End the file of this process: what comes later goes to a new one."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def sync(self) -> None:
        """Bring to the disk what was appended without waiting for it."""
        with self._lock:
            if self._file is not None and self._has_unsynced:
                os.fsync(self._file.fileno())
                self._has_unsynced = False

    def files(self) -> list[Path]:
        """Every spill file of this ledger, whoever wrote it."""
        return sorted(
            path
            for prefix in self._prefixes
            for path in prefix.parent.glob(f"{glob.escape(prefix.name)}{MARK}*{SUFFIX}")
        )

    def abandon(self) -> None:
        """Leave, in a forked child, the parent's file to the parent."""
        # A thread of the parent may have held the old lock: here nobody would ever release it.
        # Closing the file unlocks nothing, since the parent still has it open.
        self._lock = threading.RLock()
        self.seal()

    def _create(self) -> IO[bytes]:
        """Create and lock a file at the first place that permits it."""
        *others, last = self._prefixes
        for prefix in others:
            with contextlib.suppress(OSError):
                return self._create_at(prefix)
        return self._create_at(last)

    def _create_at(self, prefix: Path) -> IO[bytes]:
        """Create a file that is locked and still there."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(ATTEMPTS):
            path = prefix.with_name(f"{prefix.name}{MARK}{uuid.uuid4().hex[:12]}{SUFFIX}")
            file = path.open("xb", buffering=0)
            # Between the creation and the lock another process may take it for one left behind.
            with contextlib.suppress(BlockingIOError):
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists():
                    self.place = prefix
                    return file
            file.close()
        raise BlockingIOError(f"No spill file could be kept beside {prefix}.")

    def _write(self, file: IO[bytes], lines: bytes) -> None:
        """Append all of `lines`, or leave half a line at most, at the very end of the file."""
        end = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(lines):
                written += file.write(lines[written:]) or 0
        except OSError:
            # Readers take half a line for the last words of a process: nothing may follow it.
            with contextlib.suppress(OSError):
                file.truncate(end)
            self.seal()
            raise


def taking_back(database: Database, spill: SpillFiles) -> Iterator[int]:
    """Move the rows of every spill file that nobody appends to into the database.

    Yields:
        Rows moved, after each portion of them.
    """
    for path in spill.files():
        damaged: list[bytes] = []
        with claimed(path) as mine:
            if not mine:
                continue
            # A row that is in the database already changes nothing there, so that whoever dies
            # between the last portion and the deletion has done no harm.
            for rows in rows_in(path, damaged):
                database.write([(table, complete(table, row)) for table, row in rows])
                yield len(rows)
            if damaged:
                path.replace(path.with_suffix(".damaged"))
            else:
                path.unlink(missing_ok=True)
        if damaged:
            logger.error(
                "otel-limits: %d lines of the spill file %s are not rows. The others are in the "
                "ledger; the file is kept as %s.",
                len(damaged),
                path,
                path.with_suffix(".damaged").name,
            )


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Keep everybody else from `path`; False when a live process appends to it or takes it."""
    file = _locked(path)
    try:
        yield file is not None or fcntl is None
    finally:
        if file is not None:
            file.close()


def _locked(path: Path) -> IO[bytes] | None:
    if fcntl is None:
        return None
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    # The lock is on the file, not on its path: whoever had it may have deleted the path meanwhile.
    if not path.exists():
        file.close()
        return None
    return file


def rows_in(path: Path, damaged: list[bytes], size: int = 2_000) -> Iterator[Rows]:
    """Read a spill file in portions of `size` rows.

    A last line without its end was never acknowledged, because its process died while it wrote.
    Any other line that is not a row is appended to `damaged`.
    """
    portion: Rows = []
    with path.open("rb") as file:
        for line in file:
            try:
                table, row = json.loads(line)
                portion.append((str(table), dict(row)))
            except (ValueError, TypeError):
                if line.endswith(b"\n"):
                    damaged.append(line)
            if len(portion) >= size:
                yield portion
                portion = []
    if portion:
        yield portion
