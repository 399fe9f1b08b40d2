"""The part of `verify` that compares a ledger with closes kept elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from otel_limits.audit.answer import Column, Table
from otel_limits.audit.findings import command_on

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
    Column("command", "Command", "command", is_key=True),
)

TITLE: Final = "Closed rows are unchanged"
CHAIN: Final = "Each close follows the one before it"
ORIGINAL: Final = "Each close is as it was written"
EDITED: Final = "differs from its digest"
LACKS_FORM: Final = "is not a close, although its digest is right,"

LOOKS: Final = {
    "calls": "audit spend --by agent,model --where day={} --time-zone UTC",
    "invocations": "audit stops --where day={} --time-zone UTC",
    "attributes": "ledger export --format csv --where day={}",
    "uncounted": "ledger export --format csv --what uncounted --where day={}",
    "tools": "audit spend --by tool --where day={} --time-zone UTC",
    "grants": "audit grants --since {} --time-zone UTC",
    "maintenance": "audit verify",
    "sums": "audit spend --by agent,model --where day={} --time-zone UTC",
}
"""Commands that show what a table has of a day. Days are closed in UTC."""


class Closes:
    """The differences between a ledger and some closes."""

    def __init__(self, inquiry: AuditQuery, files: Sequence[Path]) -> None:
        """Compare.

        Raises:
            LedgerError: A file is not a close.
        """
        # Here, as most commands of `otel-limits` need no database.
        import sqlite3

        from otel_limits.ledger.closing import broken_links, compare, read_close
        from otel_limits.ledger.database import DatabaseError, reason_of

        closes = [read_close(path) for path in files]
        self.files = files
        self.names = [close.path.name for close in closes]
        self.broken = broken_links(closes)
        self.edited = [
            f"{close.path} {LACKS_FORM if close.is_original else EDITED} and was not compared"
            for close in closes
            if not close.is_comparable
        ]
        self._inquiry = inquiry
        self._found: list[tuple[str, Difference]] = []
        self.errors: list[str] = []
        """Why rows cannot be compared: SQLite stores values of any type."""
        try:
            for close in (each for each in closes if each.is_comparable):
                differences = compare(inquiry.connection, close)
                self._found += [(close.path.name, each) for each in differences]
        except (DatabaseError, sqlite3.Error) as error:
            self.errors.append(reason_of(error))

    @property
    def failures(self) -> int:
        """Days and tables with rows that are missing or changed."""
        from otel_limits.ledger.closing import FAILING

        return sum(bool({*FAILING} & {*each.counts}) for _, each in self._found)

    @property
    def details(self) -> str:
        """Summarize the differences in one line."""
        days = Counter(kind for _, difference in self._found for kind in difference.counts)
        counts = ", ".join(f"{kind} on {number}" for kind, number in sorted(days.items()))
        return f"{counts} (days and tables)" if counts else ", ".join(self.names)

    def table(self) -> Table:
        """Build a table with a row per close, day, table and kind of difference."""
        return Table(
            name="closed_days",
            title="Differences from the closes",
            columns=CLOSED_DAYS,
            rows=[row for name, each in self._found for row in self._rows(name, each)],
            note="Missing and changed rows fail. Retention prunes, reprice changes prices, and "
            "imports or spill files of other hosts add rows late.",
        )

    def _rows(self, name: str, difference: Difference) -> Iterator[tuple[str | int | None, ...]]:
        day = difference.day
        command = command_on(self._inquiry, LOOKS[difference.table].format(day))
        for kind, rows in difference.counts.items():
            yield (name, day, difference.table, kind, rows or None, command)
