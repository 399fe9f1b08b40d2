"""Compares the output of `otel-limits audit verify` with the ledger's contents."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from otel_limits.cli import main
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from otel_limits.ledger.schema import INVOCATION_TABLE, MODEL_CALL_TABLE
from otel_limits.ledger.spill import SpillFiles, restore_spilled
from tests.drills.load import CALLS, TOKENS, Place


@dataclass(frozen=True)
class Verification:
    """The result of verifying a ledger."""

    status: int
    calls: int
    tokens: int
    states: dict[str, tuple[int, str]]
    """Found and state, by check."""

    @property
    def waiting(self) -> int:
        """Rows in spill files."""
        return self.states["Rows pending in spill files"][0]

    @property
    def open(self) -> int:
        """Invocations without an end."""
        return self.states["Invocations without an end"][0]


def ask(place: Place, *question: str) -> tuple[int, Any]:
    """Run an audit query."""
    place.enter()
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        status = main(["audit", *question, "--format", "json", "--ledger", place.address])
    assert out.getvalue(), said.getvalue()
    return status, json.loads(out.getvalue())


def verify(place: Place) -> Verification:
    """Run `audit verify`."""
    status, answer = ask(place, "verify")
    states = {each["check"]: (each["found"], each["state"]) for each in answer["verify"]}
    whys = {each["check"]: each["why"] for each in answer["verify"]}
    sums = whys["Invocation totals match the sums of their calls"]
    totals = re.findall(r"([\d,]+) (?:calls|tokens)", sums)
    calls, tokens = (int(each.replace(",", "")) for each in totals) if totals else (-1, -1)
    return Verification(status, calls, tokens, states)


def prove(place: Place, returned: int) -> Verification:
    """Prove that every returned invocation is in the ledger, complete and once.

    The totals reported with pending rows must match the contents after these are restored.
    """
    before = verify(place)
    assert before.status == 0, before
    for question in ("spend", "stops"):
        _, answer = ask(place, question)
        assert answer["totals"][question]["tokens"] == before.tokens, (question, answer, before)
    assert before.calls >= returned * CALLS, (before, returned)
    with opened(place) as database:
        for _ in restore_spilled(database, SpillFiles(database.address)):
            pass
        ended, calls, tokens = counted(database)
    assert (before.calls, before.tokens) == (calls, tokens), (before, calls, tokens)
    assert tokens == calls * TOKENS
    assert ended >= returned, f"{returned - ended} invocations that had returned are lost"
    after = verify(place)
    assert (after.status, after.waiting, after.calls) == (0, 0, calls), after
    return before


@contextlib.contextmanager
def opened(place: Place) -> Iterator[Database]:
    """Open the ledger as the next process does."""
    place.enter()
    with closing(Database(parse("drill", place.address, place.data))) as database:
        yield database


def counted(database: Database) -> tuple[int, int, int]:
    """Count the complete invocations, the calls and the tokens."""
    runs, calls = INVOCATION_TABLE.c, MODEL_CALL_TABLE.c
    own = sa.select(sa.func.count()).where(calls.invocation_id == runs.id).scalar_subquery()
    is_whole = runs.ended_us.is_not(None) & (runs.model_calls == own) & (own == CALLS)
    tokens = sa.func.coalesce(sa.func.sum(calls.input_tokens + calls.output_tokens), 0)
    with database.reading() as connection:
        ended = connection.execute(sa.select(sa.func.count()).where(is_whole)).scalar_one()
        found, spent = connection.execute(sa.select(sa.func.count(), tokens)).one()
    return int(ended), int(found), int(spent)
