"""A power failure: files end in the middle of what was written last, at every byte of it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from tests.drills.checking import ask
from tests.drills.load import Place, start
from tests.ledger.size import CALLS, one


def spill_file(directory: Path, size: int) -> str:
    """The last record of a spill file: every other row is there, and half a row is none."""
    place = Place(directory / "written")
    with closing(sqlite3.connect(place.ledger, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")  # nothing gets into the database
        worker = start(place)
        worker.await_more(3)
        worker.end(kill=True)
        connection.execute("ROLLBACK")
    (path,) = place.ledger.parent.glob("*.spill-*.jsonl")
    text = path.read_bytes()
    # the last record of an invocation that had ended: its end
    ends = [
        n
        for n, line in enumerate(text.splitlines())
        if b'"model_calls": 2' in line or b'"model_calls":2' in line
    ]
    lines = text.splitlines(keepends=True)[: ends[-1] + 1]
    whole, last = b"".join(lines[:-1]), lines[-1]
    cuts = range(0, len(last) + 1, max(1, len(last) // size))
    for cut in cuts:
        path.write_bytes(whole + last[:cut])
        status, answer = ask(place, "verify", "--stale", "1d")
        found = {each["check"]: each["found"] for each in answer["verify"]}
        rows = [json.loads(line) for line in lines[1:-1]] + [last] * (cut == len(last))
        # an invocation that began and ended has two rows there, and one in the ledger
        assert status == 0, (cut, answer)
        # all of it but the end of its line is all of it, too
        assert found["Invocations without an end"] == (cut < len(last) - 1), (cut, answer)
        assert found["Rows that wait in spill files"] <= len(rows), (cut, answer)
        _, spent = ask(place, "spend")
        assert spent["totals"]["spend"]["calls"] == whole.count(b"otel_limits_model_calls"), cut
    return f"{len(cuts)} cuts of {len(last)} bytes"


def log_of_the_database(directory: Path, size: int) -> str:
    """The last frame of SQLite's log: its transaction is there as a whole, or not at all."""
    place = Place(directory)
    written = Place(directory / "written")
    with closing(Database(parse("drill", written.address, written.data))) as database:
        for number in range(3):
            database.write(one(round(time.time()) - 60 + number))
        log = written.ledger.with_name("ledger.db-wal").read_bytes()
        base = written.ledger.read_bytes()
    frame = 24 + int.from_bytes(
        log[8:12], "big"
    )  # https://www.sqlite.org/fileformat2.html#walformat
    cuts = [*range(len(log) - frame, len(log), max(1, frame // size)), len(log)]
    seen = set()
    for cut in cuts:
        shutil.rmtree(place.ledger.parent, ignore_errors=True)
        place.ledger.parent.mkdir()
        place.ledger.write_bytes(base)
        place.ledger.with_name("ledger.db-wal").write_bytes(log[:cut])
        status, answer = ask(place, "verify", "--stale", "1d")
        assert status == 0, (cut, answer)
        _, spent = ask(place, "spend")
        calls = spent["totals"]["spend"]["calls"]
        assert calls == CALLS * (3 if cut == len(log) else 2), (cut, spent)
        seen.add(calls)
    assert len(seen) == 2, seen
    return f"{len(cuts)} cuts of {frame} bytes"
