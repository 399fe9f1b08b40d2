"""Quota charges of model calls as a ledger records them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Protocol

from otel_limits.quotas.store import Charge, Count
from otel_limits.quotas.windows import Window


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


class RecordedCall(Protocol):
    """Quota charges of a model call."""

    @property
    def at(self) -> float:
        """Its end, in seconds since the epoch."""

    @property
    def operation(self) -> str:
        """The ID of its reservation and settlement."""

    @property
    def charges(self) -> str:
        """Its charges, as `encode_charges` encodes them."""


class CallRecords(Protocol):
    """The calls in a ledger."""

    @property
    def source(self) -> str:
        """The name of the ledger, empty if there is none."""

    def charges_of(self, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
        """Return those of `operations` that are recorded, with their charges."""

    def charges_between(self, since: float, until: float) -> Iterable[RecordedCall]:
        """Iterate over the charges of calls between two times.

        Raises:
            LedgerError: The ledger is not readable.
        """

    def resets_since(self, since: float) -> Sequence[RecordedReset]:
        """Return the resets of quota keys since a time.

        Raises:
            LedgerError: The ledger is not readable.
        """
