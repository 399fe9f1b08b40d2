"""Takes rows back from spill files into the database of a ledger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from otel_limits.ledger.database import complete
from otel_limits.ledger.spill import claimed, rows_in

if TYPE_CHECKING:
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.spill import SpillFiles

logger = logging.getLogger("otel_limits")


def taking_back(database: Database, spill: SpillFiles) -> Iterator[int]:
    """Move the rows of every spill file that nobody appends to into the database.

    Yields:
        Rows moved, after each portion of them.
    """
    for path in spill.files():
        damaged: list[bytes] = []
        with claimed(path) as mine:
            if not mine:
                continue
            # A row that is in the database already changes nothing there, so that whoever dies
            # between the last portion and the deletion has done no harm.
            for rows in rows_in(path, damaged):
                database.write([(table, complete(table, row)) for table, row in rows])
                yield len(rows)
            if damaged:
                path.replace(path.with_suffix(".damaged"))
            else:
                path.unlink(missing_ok=True)
        if damaged:
            logger.error(
                "otel-limits: %d lines of the spill file %s are not rows. The others are in the "
                "ledger; the file is kept as %s.",
                len(damaged),
                path,
                path.with_suffix(".damaged").name,
            )


def reason_of(error: Exception) -> str:
    """What the driver or the system says, in one line."""
    said = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
    return str(said).strip().partition("\n")[0].rstrip(".") or type(error).__name__
