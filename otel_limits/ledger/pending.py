"""A buffer of rows that are not durable yet, and how many of all rows are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from otel_limits.ledger.rows import Rows

MAX_KEPT: Final = 100_000
"""Rows kept in memory when even the spill file fails. Beyond this, the oldest are lost and
counted."""


class PendingRows:
    """Ordered buffer of rows not yet durable.

    Rows become durable in order, so a single count shows whether a given row is.

    Attributes:
        changed: Held during any change here; notified of it.
        waiting: Rows that are not being written yet.
        is_wanted: A caller waits for rows to be durable.
        is_stuck: A caller has waited in vain; until a write succeeds, no other caller waits.
        dropped_rows: Rows lost for lack of space.
        spills: How often rows went to a spill file.
    """

    def __init__(self) -> None:
        """Create an empty buffer."""
        self.changed = threading.Condition()
        self.waiting: Rows = []
        self.is_wanted = False
        self.is_stuck = False
        self.dropped_rows = 0
        self.spills = 0
        self._taken_back = 0
        # Kept until durable: a caller that spills while the database hangs writes these, too.
        self._in_flight: Rows = []
        self._added = 0
        self._durable = 0

    def add(self, rows: Rows, enough: int) -> int:
        """Add `rows`; notify at the first row and at `enough` rows. Returns how many wait."""
        with self.changed:
            was_empty = not self.waiting
            self.waiting.extend(rows)
            self._added += len(rows)
            # Not for each row: waking the thread costs more than appending to the list.
            if was_empty or len(self.waiting) >= enough:
                self.changed.notify_all()
            return len(self.waiting)

    def claim(self) -> tuple[Rows, int]:
        """Take the waiting rows to write them; they are kept here as in flight until durable.

        Returns:
            The rows, and their mark: how many rows are durable once these are.
        """
        with self.changed:
            self._in_flight, self.waiting = self.waiting, []
            return self._in_flight, self._added

    def claim_all(self) -> tuple[Rows, int]:
        """Take waiting and in-flight rows to write them elsewhere; with their mark."""
        with self.changed:
            rows = self._in_flight + self.waiting
            self._in_flight, self.waiting = [], []
            return rows, self._added

    def put_back(self, rows: Rows) -> None:
        """Put back rows that could not be written, up to a bound."""
        # In front: newer rows may have come, and the oldest are dropped first.
        with self.changed:
            self.waiting[:0] = rows
            excess = len(self.waiting) - MAX_KEPT
            if excess > 0:
                del self.waiting[:excess]
                self.dropped_rows += excess

    def mark_durable(self, mark: int) -> None:
        """Mark the rows up to `mark` as durable."""
        with self.changed:
            # A spill may have overtaken the write of older rows, whose mark is lower.
            self._durable = max(self._durable, mark)
            self.changed.notify_all()

    def mark_persisted(self, mark: int) -> None:
        """Mark in-flight rows as written to the database."""
        with self.changed:
            self._in_flight = []
            self.is_stuck = False
            self.mark_durable(mark)

    def wait_until_durable(self, seconds: float) -> bool:
        """Wait until all rows added before are durable; False on timeout."""
        with self.changed:
            added = self._added
            self.is_wanted = True
            self.changed.notify_all()
            if not self.is_stuck:
                self.changed.wait_for(lambda: self._durable >= added, seconds)
            if self._durable >= added:
                return True
            # Until a write succeeds, no other caller waits in vain.
            self.is_stuck = True
            return False

    def mark_restored(self, spills: int) -> None:
        """Mark the first `spills` spills as restored to the database."""
        with self.changed:
            self._taken_back = spills
            self.changed.notify_all()

    def wait_until_restored(self, seconds: float) -> None:
        """Wait until spilled rows are in the database, at most `seconds`."""
        with self.changed:
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._taken_back >= self.spills, seconds)

    def give_up(self) -> int:
        """Drop the waiting rows, and return how many rows were lost in total."""
        with self.changed:
            self.dropped_rows += len(self.waiting)
            self.waiting = []
            return self.dropped_rows
