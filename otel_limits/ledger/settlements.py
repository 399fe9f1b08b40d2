"""Looks up what quotas count of model calls, for whoever settles for a killed worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from otel_limits.core.errors import LedgerError
from otel_limits.ledger.queries import charges_of
from otel_limits.ledger.store import DatabaseError, Store

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address


def charges_in(address: Address, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Return those of `operations` that a ledger has, with what quotas count of them.

    A ledger that cannot be read has none: it is asked again later.
    """
    store = Store(address)
    with contextlib.closing(store), contextlib.suppress(LedgerError, DatabaseError, OSError):
        store.require()
        with store.reading() as connection:
            return charges_of(connection, operations).items()
    return ()
