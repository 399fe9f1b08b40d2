"""Records every invocation, model call, tool call and change of a quota in the spend ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from otel_limits.core.events import ModelCall, QuotaGrant, Started, Stop, ToolCall
from otel_limits.ledger import rows
from otel_limits.ledger.database import Database
from otel_limits.ledger.spill import SpillFiles
from otel_limits.ledger.writer import Writer, is_child_of_multiprocessing
from otel_limits.observers.protocol import BaseObserver

if TYPE_CHECKING:
    from datetime import timedelta

    from otel_limits.ledger.address import Address
    from otel_limits.ledger.words import LedgerSync

FLUSH_SECONDS: Final = 1.0
"""How long the database has before the spill file takes the rows, where nobody else waits."""


class LedgerObserver(BaseObserver):
    """Turns facts into rows and has them written in the background.

    Args:
        address: Where the ledger is.
        sync: When rows are durable: at the end of the `invocation`, of each model `call`, or a
            moment later in the `background`.
        retention: Age at which budget trees that have ended are deleted; `None` for never.
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
        self.writer = Writer(Database(address), SpillFiles(address), retention)
        self.sync = sync
        self._live: dict[str, Started] = {}
        self.subscribes_to = {
            Started: self._started,
            ModelCall: self._model_call,
            ToolCall: self._tool_call,
            Stop: self._stop,
            QuotaGrant: self._quota_changed,
        }

    def after_fork(self) -> None:
        """Start afresh: the parent's invocations go on in the parent."""
        self._live.clear()
        self.writer.after_fork()

    def flush(self) -> None:
        """Have every row in the database, or in the spill file where that takes too long."""
        self.writer.wait_until_landed(FLUSH_SECONDS)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()

    def _started(self, event: Started) -> None:
        # Kept until its end, which does not say again what it began with.
        self._live[event.invocation.id] = event
        self.writer.put(rows.started_rows(event))

    def _model_call(self, event: ModelCall) -> None:
        told = [(rows.MODEL_CALLS, rows.model_call_row(event))]
        if event.invocation.id not in self._live:
            # It is over, or began before recording did: its row is made, or counts this call too.
            told = [(rows.INVOCATIONS, rows.called_row(event)), *told, rows.recount(event)]
        self.writer.put(told)
        if self.sync == "call":
            self.writer.wait_until_durable()

    def _tool_call(self, event: ToolCall) -> None:
        self.writer.put([(rows.TOOL_CALLS, rows.tool_call_row(event))])

    def _stop(self, event: Stop) -> None:
        started = self._live.pop(event.invocation_id, None)
        row = rows.invocation_row(started, event) if started else rows.stopped_row(event)
        self.writer.put([(rows.INVOCATIONS, row)])
        if self.sync != "background" or is_child_of_multiprocessing():
            self.writer.wait_until_durable()

    def _quota_changed(self, event: QuotaGrant) -> None:
        # Waited for always: it is what an operator did, and nobody does it again if it is lost.
        self.writer.put([(rows.QUOTA_CHANGES, rows.quota_change_row(event))])
        self.writer.wait_until_durable()
