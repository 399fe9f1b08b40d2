"""The rows of a bill, and the protocol of a reader of exports."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, tzinfo
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

Kind: TypeAlias = Literal["fresh", "cache_read", "cache_write", "output"]
KINDS: Final[tuple[Kind, ...]] = ("fresh", "cache_read", "cache_write", "output")
"""Kinds of tokens that vendors price apart. Together the first three are the input."""

ExportedObject: TypeAlias = Mapping[str, Any]
"""An object of a JSON file, or a row of a CSV file by its columns."""


class BilledTokens(NamedTuple):
    """Tokens by kind; a cache is `None` if the export does not separate it from the input."""

    fresh: int = 0
    cache_read: int | None = None
    cache_write: int | None = None
    output: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BillRow:
    """Use of one model on one day, its cost, or both."""

    identity: Hashable
    """Rows with the same identity are the same row, exported twice."""
    day: date
    """In the time zone of the bill."""
    models: tuple[str, ...] = ()
    """The names of the model; none if the export is not divided by model."""
    tokens: BilledTokens | None = None
    """`None` in a row that has only a cost."""
    requests: int | None = None
    cost: Decimal | None = None
    """USD, exactly; `None` in a row that has only tokens."""
    kind: Kind | None = None
    """The tokens that the cost is for, if the export is divided by them."""
    owner: str = ""
    """The key, project or user, as the vendor names it."""
    is_call: bool = False
    """Whether the row is a single call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BillPage:
    """A part of an export: a page, or a whole file."""

    file: str
    report: str
    """Which of the vendor's reports it belongs to."""
    rows: Sequence[BillRow]
    buckets: Sequence[tuple[datetime, datetime]] = ()
    """The times that it covers, also without rows."""
    grouping: frozenset[str] = frozenset()
    """How its rows divide a day: reports that divide it differently contain the same use twice."""
    next_page: str | None = None
    """How to request the rest, if there is more."""
    number: tuple[int, int] | None = None
    """Number of the page, and how many there are."""


class BillReader(Protocol):
    """Reads one form of export."""

    @property
    def vendor(self) -> str:
        """The vendor's name in the ledger."""

    @property
    def title(self) -> str:
        """The vendor's name for readers."""

    @property
    def vendors(self) -> frozenset[str]:
        """The vendors in the ledger whose calls are on this bill."""

    @property
    def passes_on(self) -> bool:
        """Whether the ledger may have its calls under other vendors, as with a gateway."""

    def reads(self, first: ExportedObject) -> bool:
        """Return whether the first object of a file has this form."""

    def pages(self, objects: Sequence[ExportedObject], file: str) -> Iterator[BillPage]:
        """Read the objects of a file.

        Raises:
            LedgerError: A value is not of the documented form, or an amount is not in USD.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """All exports of one vendor, each row once."""

    reader: BillReader
    files: Sequence[str]
    zone: tzinfo
    """The time zone of its days."""
    rows: Sequence[BillRow]
    used_days: frozenset[date]
    """Days of which it has the tokens, also those without any."""
    cost_days: frozenset[date]
    """Days of which it has the costs."""
    has_calls: bool = field(default=False)
    """Whether each of its rows is a single call."""
