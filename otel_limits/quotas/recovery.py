"""Settles for workers killed between the end of a model call and its settlement.

The ledger records the charges of each model call, and the store notes reservations that expired
unsettled. Any process that finds such a settlement in its ledger sends it. It counts once, because
an operation ID is applied once.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.quotas.store import Charge, Count, Settle, SharedStore, StoreError
from otel_limits.quotas.store_thread import StoreThread
from otel_limits.quotas.windows import Window

MOST: Final = 1_000
"""Reservations that are looked up at a time."""

INTERVAL_SECONDS: Final = 60.0
"""How often a process looks."""

FindSettlements: TypeAlias = Callable[[Sequence[str]], Iterable[tuple[str, str]]]
"""Ids of reservations → those of them whose settlement a ledger has, with its text."""


def as_text(charges: Iterable[Charge]) -> str:
    """Write charges for the ledger, which gets hashes of keys and not the keys."""
    return json.dumps(
        [
            # Without `shown`, which names the key for people: the store has it
            # since the reservation.
            (
                count.quota,
                count.key,
                count.window.start,
                count.window.end,
                each.amount,
                count.unit,
            )
            for each in charges
            for count in (each.count,)
        ],
        separators=(",", ":"),
    )


def from_text(identity: str, text: str) -> Settle:
    """Read what `as_text` wrote."""
    return Settle(
        identity,
        tuple(
            Charge(count=Count(quota, key, Window(start, end), unit), amount=amount)
            for quota, key, start, end, amount, unit in json.loads(text)
        ),
    )


def settle_expired(store: SharedStore, find: FindSettlements) -> int:
    """Send the settlements that `find` has; returns how many.

    Raises:
        StoreError: The store does not answer.
    """
    settled = unknown = 0
    # The store says which, and not the ledger: most calls of a ledger were settled long ago. Page
    # by page, since those that no ledger knows stay where they are.
    while expired := store.expired(unknown, MOST):
        found = [from_text(*each) for each in find(expired)]
        if found:
            # Done before they are noted as done: a worker that dies between the two sends them
            # once more, which changes nothing.
            store.run(found)
            store.mark_settled([each.id for each in found])
        settled += len(found)
        unknown += len(set(expired) - {each.id for each in found})
    return settled


def forget_expired(store: SharedStore) -> None:
    """Drop what nobody settled in time, and say how many there were.

    Raises:
        StoreError: The store does not answer.
    """
    forgotten = store.forget_expired()
    if forgotten:
        sentence = (
            f"{forgotten} model calls of killed workers were not settled and are not counted: "
            "they are in no ledger that this fleet reads"
        )
        INTERNAL_ERRORS.report("quotas", StoreError(sentence), sentence)


class Recovery(StoreThread):
    """Checks once a minute whether there is something to settle.

    Args:
        store: Where quotas are counted.
        find: Looks into the ledger of this process.
    """

    name = "otel-limits-recovery"

    def __init__(self, store: SharedStore, find: FindSettlements) -> None:
        """Start the thread."""
        self._find = find
        super().__init__(store)

    def work(self, closing: threading.Event) -> None:
        """Look once a minute, in a child as well: its parent may end before it."""
        while not closing.wait(INTERVAL_SECONDS):
            self._look()

    @suppress_errors("quotas")
    def _look(self) -> None:
        with contextlib.suppress(StoreError):  # the store worker logs outages
            settle_expired(self._store, self._find)
            forget_expired(self._store)
