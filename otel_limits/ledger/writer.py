"""The one background thread that writes a ledger, and what is promised about its rows.

A row is queued by the agent, written in a batch by the thread, and durable when the transaction is
committed or when the row stands in the spill file. Whoever needs durability waits for it, but not
for long: after `PATIENCE_SECONDS` it appends what is not written yet to the spill file itself.
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
from otel_limits.ledger import retention
from otel_limits.ledger.database import Database, reason_of
from otel_limits.ledger.pending import MAX_KEPT, PendingRows
from otel_limits.ledger.rows import microseconds
from otel_limits.ledger.spill import MARK, SpillFiles, taking_back

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from otel_limits.ledger.rows import Rows

logger = logging.getLogger("otel_limits")

# What is left of 20 ms is for the spill file, which is written where the database was not in time.
PATIENCE_SECONDS: Final = 0.015
"""How long an agent waits for the database when an invocation ends."""

GATHER_SECONDS: Final = 1.0
"""How long rows that nobody waits for are gathered: what a crash can lose of them."""

MANY: Final = 200
"""Rows that are not gathered any longer."""

RETRY_SECONDS: Final = 1.0
"""How long a database that failed is left alone."""

TAKE_BACK_SECONDS: Final = 10.0
"""How long spill files that cannot be taken back are left alone."""

PRUNE_SECONDS: Final = 60 * 60.0
"""How often what is too old is looked for."""

CLOSE_SECONDS: Final = 5.0
"""How long the end of the process waits for the last rows."""

MAX_QUEUED: Final = 1_000
"""Rows in memory; beyond, they go to the spill file whether the thread has time or not."""

SPILL: Final = "ledger_spill"
"""What fails when no spill file takes rows: a component of its own, with a log of its own."""

LOST: Final = (
    "otel-limits: %d rows of the ledger %s are lost: neither the database nor a spill file took "
    "them."
)


class Writer:
    """Writes rows in the background, and never fails its caller.

    Args:
        database: Where rows go.
        spill: Where they go while the database does not take them.
        retention: Age at which what has ended is deleted; `None` for never.
    """

    def __init__(
        self, database: Database, spill: SpillFiles, retention: timedelta | None = None
    ) -> None:
        """Start no thread before the first row."""
        self._database = database
        self._max_age = retention
        self._spill = spill
        self._begin()
        # The thread is a daemon, which Python cuts off at the end, with whatever is still queued.
        atexit.register(self.close)

    def _begin(self) -> None:
        """Begin with nothing queued, in a new process."""
        # Locks and conditions are new as well: a thread of the parent may have held the old ones.
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._pending = PendingRows()
        self._spilling = threading.RLock()
        self._is_closing = False
        self._retry_at = 0.0
        self._take_back_at = 0.0
        self._prune_at = math.inf if self._max_age is None else 0.0

    def after_fork(self) -> None:
        """Start afresh in a forked child: what the parent queued, the parent writes."""
        self._database.abandon()
        self._spill.abandon()
        self._begin()

    @property
    def lost(self) -> int:
        """Rows that neither the database nor a spill file took."""
        return self._pending.lost

    # --- the agent's side -------------------------------------------------------------------------

    def put(self, rows: Rows) -> None:
        """Queue `rows`."""
        # Some servers fork behind Python's back, so that `after_fork` is not called.
        if self._pid != os.getpid():
            self.after_fork()
        waiting = self._pending.add(rows, MANY)
        if self._is_closing:  # a thread was about to tell us when another one switched us off
            self._end(to_disk=False)
            return
        if self._thread is None:
            self._start()
        # The agent's own thread does it: nobody else is left who could keep memory bounded.
        if waiting > MAX_QUEUED:
            self._spill_everything(to_disk=False)

    def wait_until_durable(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Return when all that is queued is durable: after so long and an append at the latest."""
        if self._pid != os.getpid():
            return
        if not self._pending.wait_until_durable(seconds):
            # The operating system has them then, and outlives the process. A sync to the disk would
            # keep the agent waiting for as long as the database did.
            self._spill_everything(to_disk=False)

    def wait_until_landed(self, seconds: float) -> None:
        """Return when all is in the database; after so long, when it is in a file at least."""
        deadline = time.monotonic() + seconds
        self.wait_until_durable(seconds)
        if self._thread is not None and self._pid == os.getpid():
            self._pending.wait_until_landed(deadline - time.monotonic())

    def close(self) -> None:
        """Write what is left and end the thread; a dead database costs `CLOSE_SECONDS`."""
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
        # A thread that hangs in the database still uses its connection.
        if thread is None or not thread.is_alive():
            self._database.close()

    def _start(self) -> None:
        with self._pending.changed:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="otel-limits-ledger", daemon=True)
            # Under the lock: whoever closes us now would join a thread that has not begun.
            with contextlib.suppress(RuntimeError):  # the interpreter ends and permits no new one
                thread.start()
                self._thread = thread
        if self._thread is None:
            self._flush()
        else:
            _close_with_child(self.close)

    def _end(self, *, to_disk: bool) -> None:
        """Put what nobody writes any more into a file that others take back, and count the rest."""
        self._spill_everything(to_disk=to_disk)
        self._spill.seal()
        lost = self._pending.give_up()
        if lost:
            INTERNAL_ERRORS.publish(SPILL)
            logger.error(LOST, lost, self._database.address)

    # --- the spill file ---------------------------------------------------------------------------

    def _spill_everything(self, *, to_disk: bool) -> bool:
        """Append what is queued and what is being written.

        Returns:
            False when no file took it, so that it stays in memory.
        """
        # What is being written is appended too, since nobody knows whether the database will take
        # it. If it does, the row is there twice, and the second one changes nothing.
        with self._spilling:
            rows, mark = self._pending.take_all()
            if not self._append(rows, to_disk=to_disk):
                self._pending.put_back(rows)
                return False
            self._pending.written(mark)
            return True

    def _append(self, rows: Rows, *, to_disk: bool) -> bool:
        if not rows:
            return True
        try:
            self._spill.append(rows, to_disk=to_disk)
        except OSError as error:
            INTERNAL_ERRORS.report(
                SPILL,
                error,
                f"no spill file of the ledger {self._database.address} takes rows "
                f"({reason_of(error)}); they are kept in memory, {MAX_KEPT} at most, and lost when "
                f"the process ends first",
            )
            return False
        self._pending.spills += 1
        self._take_back_at = 0.0
        return True

    # --- the thread's side ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            self._await_work()
            self._flush()
            self._take_back()
            self._prune()
        self._flush()
        if self._pending.waiting:  # no spill file took it either: the database may be back
            self._retry_at = 0.0
            self._flush()
        # What a slow moment left in a file of this process nobody else would take for a while.
        self._take_back(only_own=True)

    def _await_work(self) -> None:
        """Wait for rows, then gather more of them unless somebody waits; or for spill files."""
        pending = self._pending
        with pending.changed:
            # With nothing to take back either it sleeps until it is told: nothing is polled.
            while not (pending.waiting or self._is_closing):
                due = min(self._take_back_at, self._prune_at)
                seconds = max(due, self._retry_at) - time.monotonic()
                if seconds <= 0:
                    return
                pending.changed.wait(None if seconds == math.inf else seconds)
            # One transaction for many rows: what a commit costs is bringing it to the disk,
            # whatever is in it.
            pending.changed.wait_for(self._has_gathered_enough, GATHER_SECONDS)
            pending.is_wanted = False

    def _has_gathered_enough(self) -> bool:
        return self._pending.is_wanted or self._is_closing or len(self._pending.waiting) >= MANY

    def _flush(self) -> None:
        """Write what is queued: to the database, otherwise to the spill file."""
        # Not while somebody spills: the mark of later rows would count theirs as durable too.
        with self._spilling:
            rows, mark = self._pending.take()
        if not rows:
            return
        # Straight to the file: each attempt at a dead database costs a timeout, during which
        # rows pile up.
        if time.monotonic() < self._retry_at:
            self._spill_everything(to_disk=True)
        elif self._write(rows):
            self._pending.landed(mark)

    def _write(self, rows: Rows) -> bool:
        """Write to the database, otherwise to a spill file; a failure is left alone for a while."""
        try:
            self._database.write(rows)
        except Exception as error:  # noqa: BLE001  whatever it is, no row may be lost by it
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._pending.is_stuck = False
            self._tell_outage(error, spilled=self._spill_everything(to_disk=True))
            return False
        return True

    def _tell_outage(self, error: Exception, *, spilled: bool) -> None:
        """Say what is wrong with the database, and where the rows are."""
        place = (
            f"go to {self._spill.place}{MARK}* and are taken back later"
            if spilled
            else f"stay in memory, {MAX_KEPT} at most"
        )
        ledger = f"the ledger {self._database.address} cannot be written ({reason_of(error)})"
        INTERNAL_ERRORS.report("ledger", error, f"{ledger}; its rows {place}")

    def _take_back(self, *, only_own: bool = False) -> None:
        """Move rows from spill files to the database, new rows first."""
        if time.monotonic() < max(self._take_back_at, self._retry_at):
            return
        self._take_back_at = math.inf
        spills = self._pending.spills
        try:
            for _ in self._spill.taking_own(self._database):
                self._flush()
            self._pending.taken_back(spills)
            for _ in () if only_own else taking_back(self._database, self._spill):
                self._flush()
        except Exception as error:  # noqa: BLE001  the rows stay where they are
            self._take_back_at = time.monotonic() + TAKE_BACK_SECONDS
            self._tell_outage(error, spilled=True)

    def _prune(self) -> None:
        """Delete what is too old, in steps so small that nobody waits for one."""
        if self._max_age is None or time.monotonic() < max(self._prune_at, self._retry_at):
            return
        self._prune_at = time.monotonic() + PRUNE_SECONDS
        before = time.time() - self._max_age.total_seconds()
        try:
            for _ in retention.prune(self._database, microseconds(before), retention.SMALL_PORTION):
                self._flush()
                if self._is_closing:
                    return
        except Exception as error:  # noqa: BLE001  it is tried again, and nothing else stops
            ledger = f"the ledger {self._database.address} cannot be pruned ({reason_of(error)})"
            INTERNAL_ERRORS.report(
                "ledger_retention", error, f"{ledger}; what is too old stays for now"
            )


def is_child_of_multiprocessing() -> bool:
    """Tell whether this process was started by `multiprocessing`, or is a worker of a pool.

    Such a process ends without `atexit`, and a pool ends its workers with a signal: what it has
    done has to be durable when its task is.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _close_with_child(close: Callable[[], None]) -> None:
    """Have a writer closed where `multiprocessing` ends the process."""
    if is_child_of_multiprocessing():
        from multiprocessing.util import Finalize

        Finalize(None, close, exitpriority=0)
