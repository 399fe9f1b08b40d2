"""The background thread that writes a ledger, and its rows that are not durable yet.

A row is queued by the agent, written in a batch by the thread (with `write_rows` of `database.py`),
and durable once the transaction is committed or the row is in the spill file. A caller that needs
durability waits for it, but not for long: after `PATIENCE_SECONDS` it appends the unwritten rows to
the spill file itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.internal_errors import INTERNAL_ERRORS
from otel_limits.core.wording import pluralize
from otel_limits.ledger import maintenance
from otel_limits.ledger.database import reason_of
from otel_limits.ledger.maintenance import dropped_row
from otel_limits.ledger.rows import MAINTENANCE, microseconds
from otel_limits.ledger.spill import MARK, SpillFiles, restore_spilled
from otel_limits.runs.clock import CLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from otel_limits.ledger.database import Database
    from otel_limits.ledger.rows import Rows


# --- the writer -----------------------------------------------------------------------------------

logger = logging.getLogger("otel_limits")

# The rest of 20 ms is for the spill file, which is written if the database is not in time.
PATIENCE_SECONDS: Final = 0.015
"""How long an agent waits for the database when an invocation ends."""

GATHER_SECONDS: Final = 1.0
"""How long rows are collected into a batch: what a crash can lose of them."""

BATCH_ROWS: Final = 200
"""Rows at which a batch is written immediately."""

RETRY_SECONDS: Final = 1.0
"""Pause after a database failure."""

RESTORE_SECONDS: Final = 10.0
"""Pause after spill files could not be restored."""

PRUNE_SECONDS: Final = 60 * 60.0
"""How often old rows are pruned."""

CLOSE_SECONDS: Final = 5.0
"""How long the end of the process waits for the last rows."""

MAX_QUEUED: Final = 1_000
"""Rows in memory; beyond this, callers write them to the spill file themselves."""

SPILL: Final = "ledger_spill"
"""Component of internal errors in spill files, which has its own log line."""

ROWS_LOST: Final = "otel-limits: %s lost from ledger %s: database and spill file both failed."


class Writer:
    """Writes rows in the background, and never fails its caller.

    Args:
        database: Where rows go.
        spill: Where they go while the database is unavailable.
        retention: Age at which finished budget trees are deleted; `None` for never.
    """

    def __init__(
        self, database: Database, spill: SpillFiles, retention: timedelta | None = None
    ) -> None:
        """Start no thread before the first row."""
        self._database = database
        self._max_age = retention
        self._spill = spill
        self._begin()
        # Python kills daemon threads at exit, with whatever is still queued.
        atexit.register(self.close)

    def _begin(self) -> None:
        """Start with an empty queue, in a new process."""
        # New locks and conditions as well: a thread of the parent may have held the old ones.
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._pending = PendingRows()
        self._spilling = threading.RLock()
        self._is_closing = False
        self._retry_at = 0.0
        self._restore_at = 0.0
        self._prune_at = math.inf if self._max_age is None else 0.0

    def after_fork(self) -> None:
        """Reset in a forked child: the parent writes what the parent queued."""
        self._database.abandon()
        self._spill.abandon()
        self._begin()

    @property
    def dropped_rows(self) -> int:
        """Rows that neither the database nor a spill file accepted."""
        return self._pending.dropped_rows

    @property
    def has_spilled(self) -> bool:
        """Whether rows are in a spill file, because the database did not accept them."""
        return self._pending.has_spilled

    # --- called by agents ------------------------------------------------------------------------

    def put(self, rows: Rows) -> None:
        """Queue `rows`."""
        # Some servers fork without Python's fork hooks, so `after_fork` was not called.
        if self._pid != os.getpid():
            self.after_fork()
        waiting = self._pending.add(rows, BATCH_ROWS)
        if self._is_closing:  # a concurrent event, while another thread switches otel-limits off
            self._end(to_disk=False)
            return
        if self._thread is None:
            self._start()
        # On the agent's own thread: otherwise memory would not be bounded.
        if waiting > MAX_QUEUED:
            self._spill_everything(to_disk=False)

    def wait_until_durable(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until all queued rows are durable: at most `seconds`, and then one append."""
        if self._pid != os.getpid():
            return
        if not self._pending.wait_until_durable(seconds):
            # The operating system then has them, and outlives the process. A sync to disk would
            # delay the agent by as much as the database did.
            self._spill_everything(to_disk=False)

    def wait_until_persisted(self, seconds: float) -> None:
        """Wait until all rows are in the database; after `seconds`, in a file at least."""
        deadline = time.monotonic() + seconds
        self.wait_until_durable(seconds)
        if self._thread is not None and self._pid == os.getpid():
            self._pending.wait_until_restored(deadline - time.monotonic())

    def close(self) -> None:
        """Write the remaining rows and end the thread; a dead database costs `CLOSE_SECONDS`."""
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return
        with self._pending.changed:
            thread = self._thread
            self._is_closing = True
            self._pending.changed.notify_all()
        if thread is not None:
            thread.join(CLOSE_SECONDS)
        self._end(to_disk=True)
        if thread is None:
            self._database.close()

    def _start(self) -> None:
        with self._pending.changed:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="otel-limits-ledger", daemon=True)
            # Under the lock: a concurrent `close` would join a thread that has not started.
            with contextlib.suppress(RuntimeError):  # no new threads during interpreter shutdown
                thread.start()
                self._thread = thread
        if self._thread is None:
            self._flush()
        else:
            _close_with_child(self.close)

    def _end(self, *, to_disk: bool) -> None:
        """Spill the remaining rows for other processes to restore, and count what is lost."""
        # Rows that another thread adds afterwards are spilled by that thread: none is given up
        # here that was not tried.
        if not self._spill_everything(to_disk=to_disk):
            self._pending.give_up()
        self._spill.seal()
        lost = self._pending.count_unreported_losses()
        if lost:
            INTERNAL_ERRORS.publish(SPILL)
            logger.error(ROWS_LOST, pluralize(lost, "row"), self._database.address)

    # --- the spill file ---------------------------------------------------------------------------

    def _spill_everything(self, *, to_disk: bool) -> bool:
        """Append queued and in-flight rows to the spill file.

        Returns:
            False if no file accepted them, so that they stay in memory.
        """
        # In-flight rows too, since the database may not commit them. If it does, the second copy
        # changes nothing.
        with self._spilling:
            rows, mark = self._pending.claim_all()
            if not self._append(rows, to_disk=to_disk):
                self._pending.put_back(rows)
                return False
            self._pending.mark_durable(mark)
            return True

    def _append(self, rows: Rows, *, to_disk: bool) -> bool:
        if not rows:
            return True
        try:
            self._with_losses(rows, lambda each: self._spill.append(each, to_disk=to_disk))
        except OSError as error:
            INTERNAL_ERRORS.report(
                SPILL,
                error,
                f"no spill file accepts rows of the ledger {self._database.address} "
                f"({reason_of(error)}); up to {MAX_KEPT} rows are kept in memory and are lost if "
                "the process ends",
            )
            return False
        self._pending.spills += 1
        self._restore_at = 0.0
        return True

    def _with_losses(self, rows: Rows, write: Callable[[Rows], object]) -> None:
        """Write rows, and with them how many others were dropped before: nothing else shows it."""
        with self._pending.unrecorded_losses() as lost:
            write([*rows, (MAINTENANCE, dropped_row(lost))] if lost else rows)

    # --- run by the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            self._await_work()
            self._flush()
            self._restore()
            self._prune()
        self._flush()
        if self._pending.waiting:  # spilling failed too; the database may have recovered
            self._retry_at = 0.0
            self._flush()
        # Restore this process's own spill files now; no other process would for a while.
        self._restore(only_own=True)
        # Not by `close`, which does not wait for a thread that hangs in the database.
        self._database.close()

    def _await_work(self) -> None:
        """Wait for rows and collect a batch of them, or until spill files or pruning are due."""
        pending = self._pending
        with pending.changed:
            # Without anything to restore it sleeps until notified: nothing is polled.
            while not (pending.waiting or self._is_closing):
                due = max(min(self._restore_at, self._prune_at), self._retry_at)
                if due <= CLOCK.now():
                    return
                CLOCK.wait_for_notice(pending.changed, due)
            # One transaction for many rows: a commit costs a sync to disk, whatever its size.
            pending.changed.wait_for(
                lambda: pending.is_wanted or self._is_closing or len(pending.waiting) >= BATCH_ROWS,
                GATHER_SECONDS,
            )
            pending.is_wanted = False

    def _flush(self) -> None:
        """Write queued rows: to the database, or to the spill file."""
        # Not during a spill: the mark of later rows would cover its rows too.
        with self._spilling:
            rows, mark = self._pending.claim()
        if not rows:
            return
        # Straight to the file: each attempt at a dead database costs a timeout, during which rows
        # pile up.
        if CLOCK.now() < self._retry_at:
            self._spill_everything(to_disk=True)
        elif self._write(rows):
            self._pending.mark_persisted(mark)

    def _write(self, rows: Rows) -> bool:
        """Write to the database, or to a spill file; pause after a failure."""
        try:
            self._with_losses(rows, self._database.write)
        except Exception as error:  # noqa: BLE001  no error may lose a row
            self._retry_at = CLOCK.now() + RETRY_SECONDS
            self._pending.is_stuck = False
            self._report_outage(error, spilled=self._spill_everything(to_disk=True))
            return False
        return True

    def _report_outage(self, error: Exception, *, spilled: bool) -> None:
        """Report what is wrong with the database, and where the rows are."""
        place = (
            f"rows spilled to {self._spill.place}{MARK}* and restored later"
            if spilled
            else f"up to {MAX_KEPT} rows kept in memory"
        )
        ledger = f"ledger {self._database.address} unavailable ({reason_of(error)})"
        INTERNAL_ERRORS.report("ledger", error, f"{ledger}; {place}")

    def _restore(self, *, only_own: bool = False) -> None:
        """Move rows from spill files to the database, new rows first."""
        if CLOCK.now() < max(self._restore_at, self._retry_at):
            return
        self._restore_at = math.inf
        spills = self._pending.spills
        try:
            for _ in self._spill.restore_own(self._database):
                self._flush()
            self._pending.mark_restored(spills)
            for _ in () if only_own else restore_spilled(self._database, self._spill):
                self._flush()
        except Exception as error:  # noqa: BLE001  the rows stay where they are
            self._restore_at = CLOCK.now() + RESTORE_SECONDS
            self._report_outage(error, spilled=True)

    def _prune(self) -> None:
        """Delete what is too old, in steps so small that rows hardly wait."""
        if self._max_age is None or CLOCK.now() < max(self._prune_at, self._retry_at):
            return
        self._prune_at = CLOCK.now() + PRUNE_SECONDS
        before = time.time() - self._max_age.total_seconds()
        try:
            for _ in maintenance.prune(
                self._database, microseconds(before), maintenance.SMALL_PORTION
            ):
                self._flush()
                if self._is_closing:
                    return
        except Exception as error:  # noqa: BLE001  it is retried, and nothing else stops
            ledger = f"the ledger {self._database.address} cannot be pruned ({reason_of(error)})"
            INTERNAL_ERRORS.report(
                "ledger_retention", error, f"{ledger}; old rows are kept for now"
            )


def is_child_of_multiprocessing() -> bool:
    """Return whether this process was started by `multiprocessing`, or is a pool worker.

    Such a process ends without `atexit`, and a pool kills its workers: the rows of a task must be
    durable when the task ends.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _close_with_child(close: Callable[[], None]) -> None:
    """Close a writer when `multiprocessing` ends the process."""
    if is_child_of_multiprocessing():
        from multiprocessing.util import Finalize

        Finalize(None, close, exitpriority=0)


# --- rows that are not durable yet ----------------------------------------------------------------

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
        self._recorded_losses = 0
        self._reported_losses = 0
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

    @property
    def has_spilled(self) -> bool:
        """Whether a spill is not restored to the database."""
        return self._taken_back < self.spills

    def wait_until_restored(self, seconds: float) -> None:
        """Wait until spilled rows are in the database, at most `seconds`."""
        with self.changed:
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.has_spilled, seconds)

    def give_up(self) -> None:
        """Drop the waiting rows."""
        with self.changed:
            self.dropped_rows += len(self.waiting)
            self.waiting = []

    @contextlib.contextmanager
    def unrecorded_losses(self) -> Iterator[int]:
        """Hand out how many lost rows are not recorded; if the caller fails, they still are not."""
        with self.changed:
            lost = self.dropped_rows - self._recorded_losses
            self._recorded_losses += lost
        try:
            yield lost
        except BaseException:
            with self.changed:
                self._recorded_losses -= lost
            raise

    def count_unreported_losses(self) -> int:
        """Return how many rows were lost since the last call."""
        with self.changed:
            lost = self.dropped_rows - self._reported_losses
            self._reported_losses += lost
            return lost
