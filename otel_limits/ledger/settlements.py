"""Looks up what quotas count of model calls, for whoever settles for a killed worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from otel_limits.core.errors import LedgerError
from otel_limits.ledger.database import Database, DatabaseError
from otel_limits.ledger.queries import charges_of

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address


def charges_in(address: Address, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Return those of `operations` that a ledger has, with what quotas count of them.

    A ledger that cannot be read has none: it is asked again later.
    """
    database = Database(address)
    with contextlib.closing(database), contextlib.suppress(LedgerError, DatabaseError, OSError):
        database.require_existing()
        with database.reading() as connection:
            return charges_of(connection, operations).items()
    return ()
