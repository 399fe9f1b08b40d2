"""A power failure: files are truncated within the last write, at every byte of it.

The readable rows are checked after every cut. The audit commands run when these rows change, and
at some other cuts, because their output depends on nothing else.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from otel_limits.ledger.spill import rows_in
from tests.drills.checking import ask
from tests.drills.load import Place, start
from tests.ledger.size import CALLS, one

WHOLE = (
    "SELECT (SELECT count(*) FROM otel_limits_invocations WHERE ended_us IS NOT NULL),"
    " (SELECT count(*) FROM otel_limits_tool_calls), count(*) FROM otel_limits_model_calls"
)


def spill_file(directory: Path, size: int) -> str:
    """The last record of a spill file: all other rows are readable, and half a row is ignored."""
    place = Place(directory / "written")
    path = killed_while_locked(place)
    text = path.read_bytes()
    # the last record of an invocation that had ended: its end
    ends = [
        n
        for n, line in enumerate(text.splitlines())
        if b'"model_calls": 2' in line or b'"model_calls":2' in line
    ]
    lines = text.splitlines(keepends=True)[: ends[-1] + 1]
    whole, last = b"".join(lines[:-1]), lines[-1]
    seen: set[int] = set()
    for cut in range(len(last) + 1):
        path.write_bytes(whole + last[:cut])
        rows = read_back(path)
        # A record without its line break is complete.
        assert rows == len(lines) - 1 - (cut < len(last) - 1), cut
        if rows not in seen or cut % max(1, len(last) // size) == 0:
            prove_spilled(place, cut, rows, is_whole=cut >= len(last) - 1, text=whole)
        seen.add(rows)
    return f"{len(last) + 1} cuts of {len(last)} bytes"


def killed_while_locked(place: Place) -> Path:
    """Make a process record while the database is locked; return its spill file."""
    with closing(sqlite3.connect(place.ledger, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        worker = start(place)
        worker.await_more(3)
        worker.end(kill=True)
        connection.execute("ROLLBACK")
    (path,) = place.ledger.parent.glob("*.spill-*.jsonl")
    return path


def read_back(path: Path) -> int:
    """Return the number of readable rows; no line may count as damaged."""
    damaged: list[bytes] = []
    with path.open("rb") as file:
        rows = sum(len(portion) for portion in rows_in(file, damaged.append))
    assert damaged == []
    return rows


def prove_spilled(place: Place, cut: int, rows: int, *, is_whole: bool, text: bytes) -> None:
    """Prove that verification reports the readable rows."""
    status, answer = ask(place, "verify", "--stale", "1d")
    found = {each["check"]: each["found"] for each in answer["verify"]}
    assert status == 0, (cut, answer)
    assert found["Invocations without an end"] == (not is_whole), (cut, answer)
    # an invocation that began and ended has two rows there, and one in the ledger
    assert found["Rows pending in spill files"] <= rows, (cut, answer)
    _, spent = ask(place, "spend")
    assert spent["totals"]["spend"]["calls"] == text.count(b"otel_limits_model_calls"), cut


def log_of_the_database(directory: Path, size: int) -> str:
    """The last frames of SQLite's log: their transaction is there completely, or not at all."""
    place, log, begin = written_log(directory)
    text, shared = log.read_bytes(), log.with_name("ledger.db-shm")
    # https://www.sqlite.org/fileformat2.html#walformat
    frame = 24 + int.from_bytes(text[8:12], "big")
    begin = max(begin, len(text) - size * frame)
    seen: set[tuple[Any, ...]] = set()
    # From the end to the beginning, so that a cut is one system call.
    for cut in range(len(text), begin - 1, -1):
        with log.open("r+b") as file:
            file.truncate(cut)
        shared.unlink(missing_ok=True)  # which is only in memory
        whole = look(place)
        kept = 3 if cut == len(text) else 2
        assert whole == (kept, kept * CALLS, kept * CALLS), (cut, whole)
        if whole not in seen or (len(text) - cut) % frame == 0:
            status, answer = ask(place, "verify", "--stale", "1d")
            assert status == 0, (cut, answer)
            _, spent = ask(place, "spend")
            assert spent["totals"]["spend"]["calls"] == kept * CALLS, (cut, spent)
        seen.add(whole)
    assert len(seen) == 2, seen
    return f"{len(text) + 1 - begin} cuts of {len(text) - begin} bytes"


def written_log(directory: Path) -> tuple[Place, Path, int]:
    """Write three invocations; return the log at that time, and where the third one begins."""
    place, written = Place(directory), Place(directory / "written")
    log = written.ledger.with_name("ledger.db-wal")
    with closing(Database(parse("drill", written.address, written.data))) as database:
        for number in range(3):
            begin = log.stat().st_size if log.exists() else 0
            database.write(one(round(time.time()) - 60 + number))
        # Not after closing, which moves the log into the file.
        for each in (written.ledger, log):
            shutil.copyfile(each, place.ledger.with_name(each.name))
    return place, place.ledger.with_name(log.name), begin


def look(place: Place) -> tuple[Any, ...]:
    """Return the ledger's contents: invocations with an end, tool calls and model calls."""
    with closing(sqlite3.connect(f"{place.ledger.as_uri()}?mode=ro", uri=True)) as connection:
        return tuple(connection.execute(WHOLE).fetchone())
