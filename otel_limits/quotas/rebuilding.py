"""Rebuilds counts that a store lost from the calls in a ledger.

Processes restore what they saw. Usage that no living process saw, because the others were killed,
is only in a shared ledger. It is read off the path of calls, once in each run of the store.

Calls are added up, and not settled one by one as in `recovery`: what processes restored includes
them without their IDs, which stores remember for an hour only. The greater of the two counts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from otel_limits.quotas.recorded_calls import CallRecords, RecordedCall, decode_charges
from otel_limits.quotas.store import (
    LOOKED_AT,
    REMEMBERED_SECONDS,
    Count,
    KnownCount,
    Restores,
)

if TYPE_CHECKING:
    from otel_limits.quotas.quota import Quota


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

    def _calls(self) -> Iterator[RecordedCall]:
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
