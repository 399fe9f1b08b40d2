"""Rebuilds counts that a store lost from the calls in a ledger.

Processes restore what they saw. Usage that no living process saw, because the others were killed,
is only in a shared ledger. It is read off the path of calls, once in each run of the store.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from otel_limits.quotas.store import LOOKED_AT, Count, KnownCount, SharedStore
from otel_limits.quotas.windows import Window

if TYPE_CHECKING:
    from otel_limits.quotas.quota import Quota


class RecordedReset(Protocol):
    """An operator's reset of a key."""

    @property
    def quota(self) -> str:
        """The quota's name."""

    @property
    def shown(self) -> str:
        """The key as displayed."""

    @property
    def at(self) -> float:
        """Its time, in seconds since the epoch."""


class CallRecords(Protocol):
    """The calls in a ledger."""

    @property
    def source(self) -> str:
        """The name of the ledger, empty if there is none."""

    def charges_of(self, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
        """Return those of `operations` that are recorded, with their charges."""

    def charges_between(self, since: float, until: float) -> Iterable[tuple[float, str]]:
        """Iterate over the time and charges of calls between two times.

        Raises:
            LedgerError: The ledger is not readable.
        """

    def resets_since(self, since: float) -> Sequence[RecordedReset]:
        """Return the resets of quota keys since a time.

        Raises:
            LedgerError: The ledger is not readable.
        """


def rebuild_counts(store: SharedStore, quotas: Sequence[Quota], records: CallRecords) -> bool:
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
    now = store.now()
    # Token buckets have flowed back.
    windows = [
        quota.windows.at(now)
        for quota in quotas
        if quota.unit != "concurrency" and quota.refill is None
    ]
    if windows:
        since = min(window.start for window in windows)
        resets = {(each.quota, each.shown): each.at for each in records.resets_since(since)}
        used = _used(records, since, begun, now, resets)
        counts = list(used)
        # A reset may be known to the store only: what was used before it does not count.
        states = store.look([(count, 0) for count in counts])
        later = {
            (count.quota, count.shown): int(state.reset.partition(".")[0]) / 1000
            for count, state in zip(counts, states, strict=True)
            if state.reset
        }
        if later:
            used = _used(records, since, begun, now, resets | later)
        known = [
            KnownCount(count, used[count], state.reset)
            for count, state in zip(counts, states, strict=True)
            if used[count]
        ]
        for first in range(0, len(known), LOOKED_AT):
            store.restore(known[first : first + LOOKED_AT])
    store.end_rebuilding()
    return True


def _used(
    records: CallRecords,
    since: float,
    until: float,
    now: float,
    resets: Mapping[tuple[str, str], float],
) -> Counter[Count]:
    """Add up what was used of counts whose window contains `now`, since their last reset."""
    used: Counter[Count] = Counter()
    for at, text in records.charges_between(since, until):
        for quota, key, start, end, amount, unit, shown in json.loads(text):
            window = Window(start, end)
            if (
                unit != "concurrency"
                and start
                and now in window
                and at >= resets.get((quota, shown), 0.0)
            ):
                used[Count(quota, key, window, unit, shown)] += amount
    return used
