"""The part of `verify` that compares a ledger with closes kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from otel_limits.audit.answer import Column, Table

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.audit.question import AuditQuery
    from otel_limits.ledger.closing import Difference

CLOSED_DAYS: Final = (
    Column("close", "Close", is_key=True),
    Column("day", "Day", "date", is_key=True),
    Column("table", "Table", is_key=True),
    Column("difference", "Difference", is_key=True),
    Column("rows", "Rows", "count", is_key=True),
    Column("command", "Command", "sentence", is_key=True),
)

TITLE: Final = "Closed rows are unchanged"
CHAIN: Final = "Each close follows the one before it"


class Closes:
    """The differences between a ledger and some closes."""

    def __init__(self, inquiry: AuditQuery, files: Sequence[Path]) -> None:
        """Compare.

        Raises:
            LedgerError: A file is not a close.
        """
        from otel_limits.ledger.closing import broken_links, compare, read_close

        closes = [read_close(path) for path in files]
        self.names = [close.path.name for close in closes]
        self.broken = broken_links(closes)
        self._found = [
            (close.path.name, difference)
            for close in closes
            for difference in compare(inquiry.connection, close)
        ]

    def counts(self) -> dict[str, int]:
        """Count the days and tables that differ, by kind."""
        counts: dict[str, int] = {}
        for _, difference in self._found:
            for kind in difference.counts:
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    @property
    def failures(self) -> int:
        """Days and tables with rows that are missing or changed."""
        from otel_limits.ledger.closing import FAILING

        return sum(bool({*FAILING} & {*each.counts}) for _, each in self._found)

    @property
    def details(self) -> str:
        """Summarize the differences in one line."""
        counts = ", ".join(f"{kind} on {days}" for kind, days in sorted(self.counts().items()))
        return f"{counts} (days and tables)" if counts else ", ".join(self.names)

    def table(self) -> Table:
        """Build a table with a row per close, day, table and kind of difference."""
        return Table(
            name="closed_days",
            title="Differences from the closes",
            columns=CLOSED_DAYS,
            rows=[row for name, each in self._found for row in _rows(name, each)],
            note="Missing and changed rows fail. Retention prunes, reprice changes prices, and "
            "imports or spill files of other hosts add rows late.",
        )


def _rows(name: str, difference: Difference) -> Iterator[tuple[str | int | None, ...]]:
    day = difference.day
    command = f"otel-limits audit spend --by agent,model --where day={day}"
    if difference.table == "grants":
        command = f"otel-limits audit grants --since {day}"
    for kind, rows in difference.counts.items():
        yield (name, day, difference.table, kind, rows or None, command)
