"""A query sees rows that wait in spill files exactly as it sees them once they are restored."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
import sqlalchemy as sa

from otel_limits.core.events import ModelCall
from otel_limits.ledger import overlay
from otel_limits.ledger.database import Database
from otel_limits.ledger.maintenance import pruned_row
from otel_limits.ledger.reading import open_for_query
from otel_limits.ledger.rows import INVOCATIONS, LOST, MAINTENANCE
from otel_limits.ledger.schema import TABLES
from otel_limits.ledger.spill import SpillFiles, restore_spilled
from otel_limits.observers.ledger import LedgerObserver
from tests.ledger.book import DAY, NINE, Book, Call, Entry
from tests.ledger.size import one

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.ledger.address import Address
    from otel_limits.ledger.rows import Rows
    from tests.ledger.fixtures import LedgerFile

LATE: Final = 3
"""Rows of a call after the end of its invocation: its invocation, itself, and a recount."""


def content(address: Address) -> tuple[dict[str, list[str]], int]:
    """Every row as a query sees it, without the database's own numbers; and how many wait."""
    with open_for_query(address) as (connection, waiting):
        assert not waiting.unseen
        rows = {}
        for table in TABLES:
            columns = [each for each in table.c if each is not table.autoincrement_column]
            rows[table.name] = sorted(map(repr, connection.execute(sa.select(*columns))))
            if table.autoincrement_column is not None:
                numbers = connection.scalars(sa.select(table.autoincrement_column)).all()
                assert len(set(numbers)) == len(numbers)
        return rows, waiting.rows


def recorded_rows(address: Address) -> list[Rows]:
    """Rows of invocations with late and renumbered calls, by event."""
    rows: list[Rows] = []
    observer = LedgerObserver(address)
    observer.writer.put = rows.append  # type: ignore[method-assign, assignment]
    observer.writer.wait_until_durable = lambda *_: None  # type: ignore[method-assign]
    book = Book(address)
    events: list[Any] = []
    book._observer = events.append  # type: ignore[assignment]
    for number in range(12):
        calls = [Call(price="0.01", tools=["search"]), Call(cached=9, model="n"), Call(side=True)]
        tenant = {"tenant.id": f"t{number % 2}"}
        book.write(Entry(calls=calls, at=NINE + number * DAY, attributes=tenant))
    for event in events:
        observer(event)
    made = [event for event in events if isinstance(event, ModelCall)]
    observer(replace(made[0], number=4, at=NINE + 99))  # after the end
    observer(replace(made[4], at=NINE + 77))  # another call of the same number
    rows += [[(MAINTENANCE, pruned_row(address, number))] for number in (5, 9, 7)]
    observer.close()
    return rows


def check_equivalence(address: Address, seed: int) -> None:
    """Record some rows, spill others, and some twice; compare before and after restoring."""
    chance = random.Random(seed)  # noqa: S311
    events = recorded_rows(address)

    late = [row for rows in events if len(rows) == LATE for row in rows]

    def some() -> Rows:
        return [row for rows in events if chance.random() < 0.5 for row in rows if row not in late]

    ends = [each for ((name, each), *_) in events if name == INVOCATIONS and each["reason"]]
    with closing(Database(address)) as database:
        # Operators end invocations in the database itself.
        lost = [(INVOCATIONS, {**end, "reason": LOST, "action": LOST}) for end in ends[:4]]
        database.write([*some(), *lost])
        for _ in range(3):
            spill = SpillFiles(address)
            # Late calls come last, as each recounts what its invocation has until then.
            spill.append([*some(), *late], to_disk=False)
            spill.seal()
        waiting, number = content(address)
        assert number > 0
        for _ in restore_spilled(database, SpillFiles(address)):
            pass
    assert content(address) == (waiting, 0)


@pytest.mark.parametrize("seed", range(6))
def test_waiting_rows_are_seen_as_if_restored(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Across portions: replays, ends of recorded invocations, late and renumbered calls, losses."""
    monkeypatch.setattr(overlay, "PORTION", 7)
    check_equivalence(ledger.address, seed)


@pytest.mark.parametrize("order", [1, -1])
def test_real_end_wins_over_an_assumed_one_in_the_same_batch(
    ledger: LedgerFile, order: int
) -> None:
    """In any order: an operator only assumes that a process has vanished."""
    ((_, end),) = [each for each in one(0) if each[0] == INVOCATIONS and each[1]["reason"]]
    lost = {**end, "reason": LOST, "action": LOST}
    start = {**end, "ended_us": None, "reason": None, "action": None}
    rows: Rows = [(INVOCATIONS, each) for each in (lost, end)[::order]]
    with closing(Database(ledger.address)) as database:
        database.write([(INVOCATIONS, start), *rows, (INVOCATIONS, start)])
    assert [row["reason"] for row in ledger.invocations()] == ["end_turn"]


def test_spilled_rows_are_counted_without_space_for_a_copy(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A disk is often full when rows wait: the answer is without them, and says how many."""
    with closing(Database(ledger.address)) as database:
        database.write(one(0))
    spill = SpillFiles(ledger.address)
    spill.append(one(1), to_disk=False)
    spill.seal()
    monkeypatch.setattr(overlay, "SPOOLED_BYTES", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with open_for_query(ledger.address) as (_, waiting):
        assert (waiting.rows, waiting.unseen) == (len(one(1)), "No such file or directory")
