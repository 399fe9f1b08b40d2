"""The one background thread that writes a ledger, and what is promised about its rows.

A row is queued by the agent, written in a batch by the thread, and durable when the transaction is
committed or when the row stands in the spill file. Whoever needs durability waits for it, but not
for long: after `PATIENCE_SECONDS` it appends what is not written yet to the spill file itself.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from otel_limits.core.faults import FAULTS
from otel_limits.ledger.spill import MARK
from otel_limits.ledger.takeback import reason_of, taking_back

if TYPE_CHECKING:
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.rows import Rows
    from otel_limits.ledger.spill import SpillFiles

logger = logging.getLogger("otel_limits")

PATIENCE_SECONDS: Final = 0.02
"""How long an agent waits for the database. Far below the 50 ms that it may be kept waiting."""

GATHER_SECONDS: Final = 1.0
"""How long rows that nobody waits for are gathered: what a crash can lose of them."""

MANY: Final = 200
"""Rows that are not gathered any longer."""

RETRY_SECONDS: Final = 1.0
"""How long a database that failed is left alone."""

TAKE_BACK_SECONDS: Final = 10.0
"""How long spill files that cannot be taken back are left alone."""

CLOSE_SECONDS: Final = 5.0
"""How long the end of the process waits for the last rows."""

MAX_QUEUED: Final = 1_000
"""Rows in memory; beyond, they go to the spill file whether the thread has time or not."""

MAX_KEPT: Final = 100_000
"""Rows in memory when even the spill file refuses them; beyond, the oldest are lost and counted."""


SPILL: Final = "ledger_spill"
"""What fails when no spill file takes rows: a component of its own, with a log of its own."""


class Writer:
    """Writes rows in the background, and never fails its caller.

    Attributes:
        lost: Rows that neither the database nor a spill file took.
    """

    def __init__(self, database: Database, spill: SpillFiles) -> None:
        """Start no thread before the first row."""
        self._database = database
        self._spill = spill
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        """Begin with nothing queued, in a new process."""
        self.lost = 0
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._spilling = threading.RLock()
        self._queue: Rows = []
        self._in_flight: Rows = []
        self._queued = 0
        self._durable = 0
        self._is_wanted = False
        self._is_stuck = False
        self._is_closing = False
        self._retry_at = 0.0
        self._take_back_at = 0.0

    def after_fork(self) -> None:
        """Start afresh in a forked child: what the parent queued, the parent writes."""
        self._database.abandon()
        self._spill.abandon()
        self._begin()

    # --- the agent's side -------------------------------------------------------------------------

    def put(self, rows: Rows) -> None:
        """Queue `rows`."""
        if self._pid != os.getpid():
            self.after_fork()
        with self._changed:
            was_empty = not self._queue
            self._queue.extend(rows)
            self._queued += len(rows)
            if was_empty or len(self._queue) >= MANY:
                self._changed.notify_all()
            overflows = len(self._queue) > MAX_QUEUED
        if self._thread is None:
            self._start()
        if overflows:
            self._spill_everything(to_disk=False)

    def wait_until_durable(self) -> None:
        """Return when everything queued so far is durable, after 50 ms at the latest."""
        if self._pid != os.getpid():
            return
        with self._changed:
            wanted = self._queued
            self._is_wanted = True
            self._changed.notify_all()
            if not self._is_stuck:
                self._changed.wait_for(lambda: self._durable >= wanted, PATIENCE_SECONDS)
            if self._durable >= wanted:
                return
            self._is_stuck = True
        self._spill_everything(to_disk=False)

    def close(self) -> None:
        """Write what is left and end the thread; a dead database costs `CLOSE_SECONDS`."""
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return
        thread = self._thread
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if thread is not None:
            thread.join(CLOSE_SECONDS)
        self._spill_everything(to_disk=True)
        self._spill.seal()
        self._give_up()
        if thread is None or not thread.is_alive():
            self._database.close()

    def _start(self) -> None:
        with self._changed:
            if self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._run, name="otel-limits-ledger", daemon=True
            )
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is about to end and permits no new thread
            self._thread = None
            self._flush()

    def _give_up(self) -> None:
        """Count what is still in memory at the end as lost, and say how much that is."""
        with self._changed:
            self.lost += len(self._queue)
            self._queue = []
        if self.lost:
            FAULTS.publish(SPILL)
            logger.error(
                "otel-limits: %d rows of the ledger %s are lost: neither the database nor a spill "
                "file took them.",
                self.lost,
                self._database.address,
            )

    # --- the spill file ---------------------------------------------------------------------------

    def _spill_everything(self, *, to_disk: bool) -> bool:
        """Append what is queued and what is being written; a row written twice counts once.

        Returns:
            False when no file took it, so that it stays in memory.
        """
        with self._spilling:
            with self._changed:
                rows = self._in_flight + self._queue
                mark = self._queued
                self._queue, self._in_flight = [], []
            if not self._append(rows, to_disk=to_disk):
                self._keep(rows)
                return False
            with self._changed:
                self._durable = max(self._durable, mark)
                self._changed.notify_all()
            return True

    def _append(self, rows: Rows, *, to_disk: bool) -> bool:
        if not rows:
            return True
        try:
            self._spill.append(rows, to_disk=to_disk)
        except OSError as error:
            FAULTS.report(
                SPILL,
                error,
                f"no spill file of the ledger {self._database.address} takes rows "
                f"({reason_of(error)}); they are kept in memory, {MAX_KEPT} at most, and lost when "
                f"the process ends first",
            )
            return False
        self._take_back_at = 0.0
        return True

    def _keep(self, rows: Rows) -> None:
        """Keep in memory what nothing takes, up to a bound."""
        with self._changed:
            self._queue[:0] = rows
            excess = len(self._queue) - MAX_KEPT
            if excess > 0:
                del self._queue[:excess]
                self.lost += excess

    # --- the thread's side ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            self._await_work()
            self._flush()
            self._take_back()
        self._flush()
        if self._queue:  # no spill file took it either: the database may be back
            self._retry_at = 0.0
            self._flush()

    def _await_work(self) -> None:
        """Wait for rows, then gather more of them unless somebody waits; or for spill files."""
        with self._changed:
            while not (self._queue or self._is_closing):
                seconds = max(self._take_back_at, self._retry_at) - time.monotonic()
                if seconds <= 0:
                    return
                self._changed.wait(None if seconds == math.inf else seconds)
            self._changed.wait_for(self._gathered_enough, GATHER_SECONDS)
            self._is_wanted = False

    def _gathered_enough(self) -> bool:
        return self._is_wanted or self._is_closing or len(self._queue) >= MANY

    def _flush(self) -> None:
        """Write what is queued, to the database or else to the spill file."""
        with self._spilling, self._changed:
            rows, self._queue = self._queue, []
            self._in_flight = rows
            mark = self._queued
        if not rows:
            return
        if self._is_broken():
            self._spill_everything(to_disk=True)
        elif self._write(rows):
            with self._changed:
                self._in_flight = []
                self._durable = max(self._durable, mark)
                self._is_stuck = False
                self._changed.notify_all()

    def _write(self, rows: Rows) -> bool:
        """Write to the database, or else to a spill file; what fails is left alone for a while."""
        try:
            self._database.write(rows)
        except Exception as error:  # noqa: BLE001  whatever it is, no row may be lost by it
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._is_stuck = False
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
        FAULTS.report("ledger", error, f"{ledger}; its rows {place}")

    def _is_broken(self) -> bool:
        return time.monotonic() < self._retry_at

    def _take_back(self) -> None:
        """Move rows from spill files to the database, new rows first."""
        if time.monotonic() < max(self._take_back_at, self._retry_at):
            return
        self._take_back_at = math.inf
        try:
            self._spill.seal()
            for _ in taking_back(self._database, self._spill):
                self._flush()
        except Exception as error:  # noqa: BLE001  the rows stay where they are
            self._take_back_at = time.monotonic() + TAKE_BACK_SECONDS
            self._tell_outage(error, spilled=True)
