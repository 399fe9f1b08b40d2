"""Rows that are not durable yet, and how many of all rows are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from otel_limits.ledger.rows import Rows

MAX_KEPT: Final = 100_000
"""Rows in memory when even the spill file refuses them; beyond, the oldest are lost and counted."""


class PendingRows:
    """Rows on their way from agents to the disk, in their order.

    Rows become durable in the order in which they came, so that one number, how many are, tells
    whether any of them is.

    Attributes:
        changed: Held by whoever changes anything here; notified of it.
        waiting: Rows that nobody writes yet.
        is_wanted: Somebody waits for rows to be durable.
        is_stuck: Somebody has waited in vain; until rows land again nobody waits.
        lost: Rows that had no room.
        spills: How often rows went to a spill file.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.changed = threading.Condition()
        self.waiting: Rows = []
        self.is_wanted = False
        self.is_stuck = False
        self.lost = 0
        self.spills = 0
        self._taken_back = 0
        # Kept until they are durable: whoever spills while the database hangs writes these, too.
        self._in_flight: Rows = []
        self._added = 0
        self._durable = 0

    def add(self, rows: Rows, enough: int) -> int:
        """Add `rows`, and notify of the first and of `enough` of them; returns how many wait."""
        with self.changed:
            was_empty = not self.waiting
            self.waiting.extend(rows)
            self._added += len(rows)
            # Not for each row: waking the thread costs more than adding to the list.
            if was_empty or len(self.waiting) >= enough:
                self.changed.notify_all()
            return len(self.waiting)

    def take(self) -> tuple[Rows, int]:
        """Take what waits to write it; it stays here as in flight until it is durable.

        Returns:
            The rows, and their mark: how many rows are durable once these are.
        """
        with self.changed:
            self._in_flight, self.waiting = self.waiting, []
            return self._in_flight, self._added

    def take_all(self) -> tuple[Rows, int]:
        """Take what waits and what is in flight, to write it elsewhere; with its mark."""
        with self.changed:
            rows = self._in_flight + self.waiting
            self._in_flight, self.waiting = [], []
            return rows, self._added

    def put_back(self, rows: Rows) -> None:
        """Keep what nothing took, up to a bound."""
        # In front: rows that came meanwhile are younger, and the oldest are the first to be lost.
        with self.changed:
            self.waiting[:0] = rows
            excess = len(self.waiting) - MAX_KEPT
            if excess > 0:
                del self.waiting[:excess]
                self.lost += excess

    def written(self, mark: int) -> None:
        """Note that the rows up to `mark` are durable."""
        with self.changed:
            # A spill may have overtaken the write of older rows, whose mark is lower.
            self._durable = max(self._durable, mark)
            self.changed.notify_all()

    def landed(self, mark: int) -> None:
        """Note that what was in flight has arrived."""
        with self.changed:
            self._in_flight = []
            self.is_stuck = False
            self.written(mark)

    def wait_until_durable(self, seconds: float) -> bool:
        """Wait until everything added so far is durable; False when it takes longer."""
        with self.changed:
            added = self._added
            self.is_wanted = True
            self.changed.notify_all()
            if not self.is_stuck:
                self.changed.wait_for(lambda: self._durable >= added, seconds)
            if self._durable >= added:
                return True
            # From here on nobody waits in vain again: one agent has paid for what all have learned.
            self.is_stuck = True
            return False

    def taken_back(self, spills: int) -> None:
        """Note that what spilled in the first so many times is in the database."""
        with self.changed:
            self._taken_back = spills
            self.changed.notify_all()

    def wait_until_landed(self, seconds: float) -> None:
        """Wait until what spilled is in the database; no longer than so."""
        with self.changed:
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._taken_back >= self.spills, seconds)

    def give_up(self) -> int:
        """Drop what still waits, and return how many rows are lost in all."""
        with self.changed:
            self.lost += len(self.waiting)
            self.waiting = []
            return self.lost
