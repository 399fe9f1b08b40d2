"""Charges calls that killed workers did not settle, and rebuilds counts that a store lost.

Both come from a ledger.

The ledger records the charges of each model call, and the store notes reservations that expired
unsettled. Any process that finds such a settlement in its ledger sends it. It counts once, because
an operation ID is applied once.

If a store loses counts, processes restore what they saw. Usage that no living process saw, because
the others were killed, is only in a shared ledger. It is read off the path of calls, once in each
run of the store. Calls are then added up, and not settled one by one: what processes restored
includes them without their IDs, which stores remember for an hour only. The greater of the two
counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from otel_limits.core.errors import LedgerError
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.quotas.store import (
    LOOKED_AT,
    REMEMBERED_SECONDS,
    Charge,
    Count,
    KnownCount,
    NotesExpired,
    Restores,
    Settle,
    SharedStore,
    StoreError,
)
from otel_limits.quotas.store_worker import StoreThread
from otel_limits.quotas.windows import Window

if TYPE_CHECKING:
    from otel_limits.ledger.quota_usage import ChargedCall, QuotaReset
    from otel_limits.quotas.quota import Quota

MOST: Final = 1_000
"""Reservations per page."""

INTERVAL_SECONDS: Final = 60.0
"""How often a process checks for expired reservations."""

# A ledger receives calls within a second.
REBUILD_SECONDS: Final = 2.0
"""How often a process checks whether counts have to be rebuilt."""


# --- the thread -----------------------------------------------------------------------------------


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
        if not self._records.source or not isinstance(self._store, Restores):
            return
        is_done = False
        # The store or the ledger is unavailable: tried again.
        with contextlib.suppress(StoreError, LedgerError):
            is_done = rebuild_counts(self._store, self._quotas(), self._records)
        if not is_done:
            self._is_rebuilt = False

    @suppress_errors("quotas")
    def _look(self) -> None:
        if not isinstance(self._store, NotesExpired):
            return
        with contextlib.suppress(StoreError):  # the store worker logs outages
            settle_expired(self._store, self._records.charges_of)
            forget_expired(self._store)


# --- settlements of killed workers ----------------------------------------------------------------


def settle_expired(
    store: NotesExpired, find: Callable[[Sequence[str]], Iterable[tuple[str, str]]]
) -> int:
    """Settle expired reservations whose calls are recorded; return their number.

    Args:
        store: The store.
        find: Returns which of these reservations are recorded, as `CallRecords.charges_of`.

    Raises:
        StoreError: The store is unavailable.
    """
    settled = unknown = 0
    # Start from the store, because most calls of a ledger are settled. Skip those that are in no
    # ledger: they stay in the store.
    while expired := store.expired(unknown, MOST):
        charges: dict[str, Counter[Count]] = defaultdict(Counter)
        for operation, text in find(expired):
            for each in decode_charges(text):
                charges[operation][each.count] += each.amount
        found = [
            Settle(each, tuple(Charge(count=count, amount=charged[count]) for count in charged))
            for each, charged in charges.items()
        ]
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


# --- counts that a store lost ---------------------------------------------------------------------


def rebuild_counts(store: Restores, quotas: Sequence[Quota], records: CallRecords) -> bool:
    """Restore what calls in a ledger used before the current run of the store.

    Returns:
        False if it is too early, because processes have yet to restore what they know.

    Raises:
        StoreError: The store is unavailable.
        LedgerError: The ledger is not readable.
    """
    begun = store.begin_rebuilding(records.source)
    if not begun:
        return begun is not None
    counted = [quota for quota in quotas if quota.unit != "concurrency"]
    if counted:
        usage = RecordedUsage(store, records, counted, begun)
        resets = {(each.quota, each.shown): each.at for each in records.resets_since(usage.since)}
        used = usage.add_up(resets)
        counts = list(used)
        # A reset may be known to the store only: what was used before it does not count.
        states = store.look([(count, 0) for count in counts])
        later = {
            (count.quota, count.shown): int(state.reset.partition(".")[0]) / 1000
            for count, state in zip(counts, states, strict=True)
            if state.reset
        }
        if later:
            used = usage.add_up(resets | later)
        known = [
            KnownCount(count, used[count], state.reset)
            for count, state in zip(counts, states, strict=True)
            if used[count]
        ]
        store.restore(known)
    store.end_rebuilding()
    return True


class RecordedUsage:
    """Usage in the current windows before the current run of a store, as a ledger records it.

    Args:
        store: The store.
        records: The calls in the ledger.
        quotas: The current quotas, without those of concurrency.
        begun: When the run began, in seconds since the epoch.
    """

    def __init__(
        self, store: Restores, records: CallRecords, quotas: Sequence[Quota], begun: float
    ) -> None:
        """Read nothing yet."""
        self._store = store
        self._records = records
        self._quotas = {quota.name: quota for quota in quotas}
        self._begun = begun
        self._now = store.now()
        # An edited rule continues the count of a window that begins at the same time.
        self._windows = {
            (quota.name, window.start): window
            for quota in quotas
            for window in (quota.window_at(self._now),)
        }
        self.since = min(
            begun - quota.refill.seconds if quota.refill else quota.windows.at(self._now).start
            for quota in quotas
        )
        """When the first of the windows began."""

    def add_up(self, resets: Mapping[tuple[str, str], float]) -> Counter[Count]:
        """Return what was used of each count since its last reset.

        Args:
            resets: Quota and displayed key → the last reset, in seconds since the epoch.

        Raises:
            StoreError: The store is unavailable.
            LedgerError: The ledger is not readable.
        """
        used: Counter[Count] = Counter()
        paced: dict[Count, Counter[int]] = defaultdict(Counter)
        for call in self._calls():
            for charge in decode_charges(call.charges):
                count, amount = charge.count, charge.amount
                window = self._windows.setdefault((count.quota, count.window.start), count.window)
                reset_at = resets.get((count.quota, count.shown), 0.0)
                if self._now not in window or call.at < reset_at:
                    continue
                count = replace(count, window=window)
                if window.start:
                    used[count] += amount
                    continue
                quota = self._quotas.get(count.quota)
                refill = quota.refill if quota is not None and quota.unit == count.unit else None
                if refill is not None and call.at >= self._begun - refill.seconds:
                    # By the second, because calls are in no order. Rounded up, so that no more
                    # flows back than did.
                    paced[replace(count, refill=refill)][math.ceil(call.at)] += amount
        for count, seconds in paced.items():
            used[count] = self._level(count, seconds)
        return used

    def _calls(self) -> Iterator[ChargedCall]:
        """Iterate over the calls that were not counted in this run."""
        calls = iter(self._records.charges_between(self.since, self._begun))
        while page := list(islice(calls, LOOKED_AT)):
            # A process that was suspended or disconnected may settle these only now.
            late = [each for each in page if each.at > self._begun - REMEMBERED_SECONDS]
            counted = self._store.count_from_ledger([each.operation for each in late])
            yield from (each for each in page if each.operation not in counted)

    def _level(self, count: Count, seconds: Mapping[int, int]) -> int:
        """Return the level of a token bucket when the run began.

        Usage before the last window is left out: the bucket's promise is about such a time.
        """
        quota, refill = self._quotas[count.quota], count.refill
        assert refill is not None
        # The ledger does not have the plans of calls.
        amount = quota.keys.get(count.key, max((quota.amount, *quota.plans.values())))
        pace, level, last = amount / refill.seconds, 0.0, 0
        for at, used in sorted(seconds.items()):
            level = max(0.0, level - pace * (at - last)) + used
            last = at
        return max(0, math.ceil(level - pace * max(0.0, self._begun - last)))


# --- charges in a ledger --------------------------------------------------------------------------


def encode_charges(charges: Iterable[Charge]) -> str:
    """Encode charges for the ledger, with hashed keys."""
    return json.dumps(
        [
            (
                count.quota,
                count.key,
                count.window.start,
                count.window.end,
                each.amount,
                count.unit,
                count.shown,
            )
            for each in charges
            for count in (each.count,)
        ],
        separators=(",", ":"),
    )


def decode_charges(text: str) -> tuple[Charge, ...]:
    """Decode the output of `encode_charges`."""
    return tuple(
        Charge(count=Count(quota, key, Window(start, end), unit, shown), amount=amount)
        for quota, key, start, end, amount, unit, shown in json.loads(text)
    )


class CallRecords(Protocol):
    """The calls in a ledger."""

    @property
    def source(self) -> str:
        """The name of the ledger, empty if there is none."""

    def charges_of(self, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
        """Return those of `operations` that are recorded, with their charges."""

    def charges_between(self, since: float, until: float) -> Iterable[ChargedCall]:
        """Iterate over the charges of calls between two times.

        Raises:
            LedgerError: The ledger is not readable.
        """

    def resets_since(self, since: float) -> Sequence[QuotaReset]:
        """Return the resets of quota keys since a time.

        Raises:
            LedgerError: The ledger is not readable.
        """
