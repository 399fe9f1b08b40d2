"""Rows in spill files: written to their ledger before a query, or counted as missing in it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_limits.core.wording import pluralize
from otel_limits.ledger import files
from otel_limits.ledger.database import Database, DatabaseError, reason_of, write_error
from otel_limits.ledger.rows import RECOUNTS
from otel_limits.ledger.spill import SpillFiles, restore_spilled, rows_in

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.rows import Rows

MAX_NAMED: Final = 3
"""Files that a sentence names."""


@dataclass(slots=True)
class WaitingRows:
    """Rows in spill files that could not be taken in."""

    files: list[Path] = field(default_factory=list)
    """All spill files that are left, also of running processes, whose rows have been taken in."""
    unreadable: list[Path] = field(default_factory=list)
    """Those of them that belong to another user; how many rows they have is unknown."""
    rows: int = 0
    damaged: int = 0
    """Lines that are not rows."""
    oldest_us: int | None = None
    reason: str = ""

    @property
    def is_partial(self) -> bool:
        """Whether a query lacks rows, or may lack some."""
        return self.rows > 0 or bool(self.unreadable)

    @property
    def places(self) -> str:
        """The readable files, or the first of them."""
        return _named([path for path in self.files if path not in self.unreadable])

    @property
    def unreadable_places(self) -> str:
        """The files of other users, or the first of them."""
        return _named(self.unreadable)

    def __str__(self) -> str:
        """Say how many, where, and why."""
        parts = []
        if self.rows:
            wait, are = ("row waits", "is") if self.rows == 1 else ("rows wait", "are")
            parts.append(
                f"{self.rows:,} {wait} in {self.places} and {are} not included ({self.reason})"
            )
        if self.unreadable:
            one = "spill file is unreadable for this user and is"
            several = "spill files are unreadable for this user and are"
            count = pluralize(len(self.unreadable), one, several)
            parts.append(f"{count} not included: {self.unreadable_places}")
        return "; ".join(parts)


def _named(paths: list[Path]) -> str:
    named = ", ".join(map(str, paths[:MAX_NAMED]))
    more = len(paths) - MAX_NAMED
    return f"{named} and {pluralize(more, 'other file')}" if more > 0 else named


def restore_waiting_rows(address: Address) -> WaitingRows:
    """Write the rows of all spill files to a ledger, if this user may; otherwise count them.

    Rows that the ledger has are unchanged: each counts once, also if another process restores it
    now or later.

    Raises:
        LedgerError: The ledger is of another schema version.
    """
    spill = SpillFiles(address)
    waiting = WaitingRows(reason=write_error(address) or "")
    if not waiting.reason:
        try:
            with contextlib.closing(Database(address)) as database:
                for _ in restore_spilled(database, spill):
                    pass
                # Running processes delete their files themselves.
                waiting.files = spill.files()
                for rows in _all_rows(waiting):
                    database.write(rows)
        except (DatabaseError, OSError) as error:
            waiting.reason = reason_of(error)
    waiting.files = spill.files()
    waiting.unreadable = list(filter(files.is_forbidden, waiting.files))
    if waiting.reason:
        waiting.damaged = 0
        for rows in _all_rows(waiting):
            _count(rows, waiting)
    return waiting


def _all_rows(waiting: WaitingRows) -> Iterator[Rows]:
    """Read the rows in files, to which processes may be appending, and count damaged lines."""

    def count_damaged(_: bytes) -> None:
        waiting.damaged += 1

    for path in waiting.files:
        file = files.open_existing(path)
        if file is not None:
            with file:
                # Up to a line that is being written.
                whole = itertools.takewhile(lambda line: line.endswith(b"\n"), file)
                yield from rows_in(whole, count_damaged)


def _count(rows: Rows, waiting: WaitingRows) -> None:
    waiting.rows += sum(name != RECOUNTS for name, _ in rows)
    times = [row.get("at_us") or row.get("started_us") for _, row in rows]
    oldest = min((time for time in times if time), default=None)
    if oldest is not None:
        waiting.oldest_us = min(oldest, waiting.oldest_us or oldest)
