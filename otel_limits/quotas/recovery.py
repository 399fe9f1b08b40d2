"""Settles for workers killed between the end of a model call and its settlement.

The ledger records the charges of each model call, and the store notes reservations that expired
unsettled. Any process that finds such a settlement in its ledger sends it. It counts once, because
an operation ID is applied once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from otel_limits.core.errors import LedgerError
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.quotas.rebuilding import rebuild_counts
from otel_limits.quotas.recorded_calls import CallRecords, decode_charges
from otel_limits.quotas.store import (
    NotesExpired,
    Restores,
    Settle,
    SharedStore,
    StoreError,
)
from otel_limits.quotas.store_thread import StoreThread

if TYPE_CHECKING:
    from otel_limits.quotas.quota import Quota

MOST: Final = 1_000
"""Reservations per page."""

INTERVAL_SECONDS: Final = 60.0
"""How often a process checks for expired reservations."""

# A ledger receives calls within a second.
REBUILD_SECONDS: Final = 2.0
"""How often a process checks whether counts have to be rebuilt."""

FindSettlements: TypeAlias = Callable[[Sequence[str]], Iterable[tuple[str, str]]]
"""Reservation IDs → (ID, settlement text) of those recorded in a ledger."""


def settle_expired(store: NotesExpired, find: FindSettlements) -> int:
    """Send the settlements that `find` returns; return their number.

    Raises:
        StoreError: The store is unavailable.
    """
    settled = unknown = 0
    # Start from the store, because most calls of a ledger are settled. Skip those that are in no
    # ledger: they stay in the store.
    while expired := store.expired(unknown, MOST):
        found = [Settle(each, decode_charges(text)) for each, text in find(expired)]
        if found:
            # Mark them last: if this worker dies in between, they are sent again, which is
            # idempotent.
            store.run(found)
            store.mark_settled([each.id for each in found])
        settled += len(found)
        unknown += len(set(expired) - {each.id for each in found})
    return settled


def forget_expired(store: NotesExpired) -> None:
    """Drop reservations that are too old to be settled, and report their number.

    Raises:
        StoreError: The store is unavailable.
    """
    forgotten = store.forget_expired()
    if forgotten:
        sentence = (
            f"{forgotten} model calls of killed workers were not settled and are not counted: "
            "no ledger of this fleet contains them"
        )
        INTERNAL_ERRORS.report("quotas", StoreError(sentence), sentence)


class Recovery(StoreThread):
    """Restores from a ledger what killed workers did not settle, and what a store lost.

    Args:
        store: The shared store.
        records: The calls in the ledger of this process.
        quotas: Returns the current quotas.
    """

    name = "otel-limits-recovery"

    def __init__(
        self, store: SharedStore, records: CallRecords, quotas: Callable[[], Sequence[Quota]]
    ) -> None:
        """Start the thread."""
        self._records = records
        self._quotas = quotas
        self._is_rebuilt = False
        super().__init__(store)

    def rebuild(self) -> None:
        """Rebuild lost counts soon: the store restarted, or this process has just started."""
        self._is_rebuilt = False

    def work(self, closing: threading.Event) -> None:
        """Check once a minute, also in a child: its parent may end first."""
        due = time.monotonic() + INTERVAL_SECONDS
        while not closing.wait(REBUILD_SECONDS):
            if not self._is_rebuilt:
                self._rebuild()
            if time.monotonic() >= due:
                due = time.monotonic() + INTERVAL_SECONDS
                self._look()

    @suppress_errors("quotas")
    def _rebuild(self) -> None:
        # Before, because another restart can be reported in the meantime.
        self._is_rebuilt = True
        with contextlib.suppress(StoreError, LedgerError):
            if not self._records.source or not isinstance(self._store, Restores):
                return
            self._is_rebuilt = rebuild_counts(self._store, self._quotas(), self._records)
            return
        # Tried again: the store or the ledger is unavailable.
        self._is_rebuilt = False

    @suppress_errors("quotas")
    def _look(self) -> None:
        if not isinstance(self._store, NotesExpired):
            return
        with contextlib.suppress(StoreError):  # the store worker logs outages
            settle_expired(self._store, self._records.charges_of)
            forget_expired(self._store)
