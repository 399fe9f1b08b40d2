"""How long an agent waits for its ledger when an invocation ends: `python -m tests.ledger.waits`.

Each invocation has a new ledger, which is not yet known to be slow.
"""

from __future__ import annotations

import functools
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from otel_limits.ledger.address import Address, parse
from otel_limits.ledger.spill import candidates
from otel_limits.observers.ledger import LedgerObserver
from tests.ledger.book import Book, Entry
from tests.ledger.fixtures import eventually

INVOCATIONS: Final = 200


@contextmanager
def in_order(_: Path) -> Iterator[None]:
    """No other process uses it."""
    yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process writes for longer than the agent waits."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


STATES: Final[dict[str, Callable[[Path], Any]]] = {"in order": in_order, "locked": locked}


def waits(directory: Path, state: str, invocations: int) -> list[float]:
    """Seconds that the end of each of some invocations took, in a ledger that was in use before."""
    took = []
    for number in range(invocations):
        path = directory / f"{state} {number}.db"
        address = parse("waits", str(path), directory / "data")
        told: list[Any] = []
        book = Book(address)
        book._observer = told.append  # type: ignore[assignment]
        book.write(Entry())
        book.write(Entry())
        observer = LedgerObserver(address)
        half = len(told) // 2
        for event in told[:half]:
            observer(event)
        # The first one creates the tables without making its caller wait: its rows spill to a file.
        eventually(functools.partial(is_made, address))
        with STATES[state](path):
            for event in told[half:-1]:
                observer(event)
            began = time.perf_counter()
            observer(told[-1])
            took.append(time.perf_counter() - began)
        observer.close()
    return took


def is_made(address: Address) -> bool:
    """Return whether a ledger exists, and nothing waits for it."""
    return address.file is not None and address.file.exists() and not candidates(address)


def main() -> None:
    """Print the median and the longest wait of each state."""
    for state in STATES:
        with tempfile.TemporaryDirectory() as directory:
            took = waits(Path(directory), state, INVOCATIONS)
        of_hundred = statistics.quantiles(took, n=100)
        sys.stdout.write(
            f"{state}: median {statistics.median(took) * 1000:.1f} ms, 99 of 100 within "
            f"{of_hundred[-1] * 1000:.1f} ms\n"
        )


if __name__ == "__main__":
    main()
