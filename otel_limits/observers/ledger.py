"""Records invocations, calls, policy versions and quota changes in the spend ledger."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import ModelCall, PolicyRead, QuotaGrant, Started, Stop, ToolCall
from otel_limits.ledger import rows
from otel_limits.observers.protocol import BaseObserver

if TYPE_CHECKING:
    from datetime import timedelta

    from otel_limits.ledger.address import Address
    from otel_limits.ledger.options import LedgerSync
    from otel_limits.ledger.writer import Writer

FLUSH_SECONDS: Final = 1.0
"""How long a flush waits for the database before rows are spilled."""


class LedgerObserver(BaseObserver):
    """Converts events to rows, and writes them in the background.

    Args:
        address: The address of the ledger.
        sync: When rows are durable: at the end of the `invocation`, of each model `call`, or
            shortly afterwards in the `background`.
        retention: Age at which finished budget trees are deleted; `None` for never.
    """

    component = "ledger"

    def __init__(
        self,
        address: Address,
        sync: LedgerSync = "invocation",
        retention: timedelta | None = None,
    ) -> None:
        """Open nothing before the first event."""
        self.address = address
        self.sync = sync
        self._retention = retention
        self._writer: Writer | None = None
        self._lock = threading.RLock()
        self._live: dict[str, Started] = {}
        self._policies: dict[str, rows.Row] = {}
        self.subscribes_to = {
            Started: self._started,
            ModelCall: self._model_call,
            ToolCall: self._tool_call,
            Stop: self._stop,
            QuotaGrant: self._quota_changed,
            PolicyRead: self._policy_read,
        }

    @property
    def writer(self) -> Writer:
        """The writer, created at the first call: many programs import a framework in vain."""
        with self._lock:
            if self._writer is None:
                self._writer = self._make_writer()
            return self._writer

    def _make_writer(self) -> Writer:
        # SQLAlchemy takes longer to import than otel-limits.
        from otel_limits.ledger.database import Database
        from otel_limits.ledger.spill import SpillFiles
        from otel_limits.ledger.writer import Writer

        return Writer(Database(self.address), SpillFiles(self.address), self._retention)

    def import_packages(self) -> None:
        """Import what the first event needs, and open nothing yet."""
        _ = self.writer

    def after_fork(self) -> None:
        """Reset: the parent's invocations continue in the parent."""
        self._live.clear()
        self._lock = threading.RLock()
        if self._writer is not None:
            self._writer.after_fork()

    def flush(self) -> None:
        """Wait until all rows are in the database, or spilled on timeout."""
        if self._writer is not None:
            self._writer.wait_until_persisted(FLUSH_SECONDS)

    def close(self) -> None:
        """Write the remaining rows."""
        if self._writer is not None:
            self._writer.close()

    def _started(self, event: Started) -> None:
        # Kept until the end, whose event does not repeat it.
        self._live[event.invocation.id] = event
        policies, self._policies = self._policies, {}
        read = [(rows.POLICIES, row) for row in policies.values()]
        self.writer.put([*read, *rows.started_rows(event)])

    def _model_call(self, event: ModelCall) -> None:
        recorded = [(rows.MODEL_CALLS, rows.model_call_row(event))]
        if event.invocation.id not in self._live:
            # It has ended, or started before recording did: create its row, or recount it.
            recorded = [(rows.INVOCATIONS, rows.called_row(event)), *recorded, rows.recount(event)]
        self.writer.put(recorded)
        if self.sync == "call":
            self.writer.wait_until_durable()

    def _tool_call(self, event: ToolCall) -> None:
        self.writer.put([(rows.TOOL_CALLS, rows.tool_call_row(event))])

    def _stop(self, event: Stop) -> None:
        started = self._live.pop(event.invocation_id, None)
        row = rows.invocation_row(started, event) if started else rows.stopped_row(event)
        self.writer.put([(rows.INVOCATIONS, row)])
        from otel_limits.ledger.writer import is_child_of_multiprocessing

        if self.sync != "background" or is_child_of_multiprocessing():
            self.writer.wait_until_durable()

    def _policy_read(self, event: PolicyRead) -> None:
        # Written with the next invocation: most processes that read the file start no agent.
        row = rows.policy_row(event, socket.gethostname())
        self._policies[row["id"]] = row

    def _quota_changed(self, event: QuotaGrant) -> None:
        # Always awaited: a lost change by an operator would not be repeated.
        self.writer.put([(rows.QUOTA_CHANGES, rows.quota_change_row(event))])
        self.writer.wait_until_durable()
