"""Gives quotas access to the calls in the ledger of this process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.quota_usage import ChargedCall, QuotaReset


class LedgerRecords:
    """Calls and operators' changes in a ledger; empty without one.

    Args:
        address: Returns the address of the current ledger.
    """

    def __init__(self, address: Callable[[], Address | None]) -> None:
        """Open nothing yet."""
        self._address = address

    @property
    def source(self) -> str:
        """The name of the ledger; files of several hosts are different ledgers."""
        address = self._address()
        if address is None:
            return ""
        return address.name if address.file is None else f"{socket.gethostname()}:{address.name}"

    def charges_of(self, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
        """Return those of `operations` that are recorded, with their charges."""
        address = self._address()
        if address is None:
            return ()
        # Imported here, because most processes never query their ledger.
        from otel_limits.ledger.quota_usage import charges_in

        return charges_in(address, operations)

    def charges_between(self, since: float, until: float) -> Iterable[ChargedCall]:
        """Iterate over the charges of calls between two times.

        Raises:
            LedgerError: The ledger is not readable.
        """
        address = self._address()
        if address is None:
            return ()
        from otel_limits.ledger.quota_usage import charges_between

        return charges_between(address, since, until)

    def resets_since(self, since: float) -> Sequence[QuotaReset]:
        """Return the resets of quota keys since a time.

        Raises:
            LedgerError: The ledger is not readable.
        """
        address = self._address()
        if address is None:
            return ()
        from otel_limits.ledger.quota_usage import resets_since

        return resets_since(address, since)
