"""Size of a ledger with many calls, and the cost of queries on it.

`python -m tests.ledger.size 1000000` writes one model call with one tool call each, ten of them
in an invocation, through the product, then runs `VACUUM`. It prints bytes per call, and CPU
seconds and memory of each command in a process of its own, with bytecode of every module as an
installation has it. The last query is of an empty ledger with this many rows in a spill file.

Before each command it prints the CPU seconds of a fixed loop: under load, a core is slower.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import itertools
import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import otel_limits
from otel_limits.core.events import Invocation, ModelCall, Started, Stop, ToolCall
from otel_limits.core.limits import Limits
from otel_limits.core.usage import Usage
from otel_limits.ledger import rows
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from otel_limits.ledger.rows import portions
from otel_limits.ledger.spill import SpillFiles
from tests.ledger.book import NINE

CALLS: Final = 10
USAGE: Final = Usage(input=1_000, output=200, cache_read=600)
CLOSE: Final = "close.json"
COMMANDS: Final = (
    "audit spend",
    "audit stops",
    "audit verify",
    "audit anomalies",
    "audit backtest --max-turns 8",
    "ledger close --until 2026-01-01",
    f"audit verify --against {CLOSE}",
    "ledger export --format csv",
    "ledger reprice --all --dry-run",
)
"""Commands to measure. The one that closes the ledger writes the file that a later one reads."""


def one(number: int) -> rows.Rows:
    """Rows of an invocation."""
    at = NINE + number
    identity = uuid.uuid4().hex
    invocation = Invocation(
        agent=f"agent-{number % 5}",
        id=identity,
        root_id=identity,
        trace_id=uuid.uuid4().hex,
        span_id=identity[:16],
    )
    started = Started(
        invocation=invocation, limits=Limits(max_turns=20), action="halted", unsampled=False, at=at
    )
    told = rows.started_rows(started)
    price = rows.dollars(6_000_000_000)
    for place in range(1, CALLS + 1):
        call = ModelCall(
            invocation=invocation, number=place, model=f"us.anthropic.claude-{place % 3}",
            kind="measured", usage=USAGE, estimated=False, span_id=uuid.uuid4().hex[:16],
            seconds=1.5, price=price, price_source="genai-prices", price_version="0.0.30",
            provider="bedrock", reported=USAGE, reported_total=1_200, turn=place, iteration=place,
            cache_saved=rows.dollars(1_620_000_000), at=at + place,
            after_tools={"search": 1} if place > 1 else {},
        )  # fmt: skip
        tool = ToolCall(
            invocation=invocation, number=place, tool="search", status="success", seconds=0.5,
            fingerprint=uuid.uuid4().hex, turn=place, at=at + place,
        )  # fmt: skip
        told += [
            (rows.MODEL_CALLS, rows.model_call_row(call)),
            (rows.TOOL_CALLS, rows.tool_call_row(tool)),
        ]
    whole = Usage(input=CALLS * 1_000, output=CALLS * 200, cache_read=CALLS * 600)
    stop = Stop(
        reason="end_turn", action="none", breach=None, turns=CALLS, usage=whole,
        invocation_id=identity, model_calls=CALLS, tool_calls=CALLS, started=at, seconds=20.0,
        cost=price * CALLS if price else rows.dollars(0),  # type: ignore[arg-type]
    )  # fmt: skip
    return [*told, (rows.INVOCATIONS, rows.invocation_row(started, stop))]


def write(path: Path, calls: int) -> None:
    """Write a ledger."""

    def all_rows() -> Iterator[tuple[str, rows.Row]]:
        for number in range(calls // CALLS):
            yield from one(number)

    with closing(Database(parse("test", str(path), path.parent))) as database:
        for portion in portions(all_rows(), 20_000):
            database.write(portion)


def spill(path: Path, calls: int) -> None:
    """Write an empty ledger with rows that wait in a spill file."""
    address = parse("test", str(path), path.parent)
    with closing(Database(address)) as database:
        database.write([])
    files = SpillFiles(address)
    waiting = itertools.islice(itertools.chain.from_iterable(map(one, itertools.count())), calls)
    for portion in portions(waiting, 1_000):
        files.append(portion, to_disk=False)
    files.seal()


def in_child(write: Callable[[Path, int], None], path: Path, calls: int) -> None:
    """Write in a separate process: a child's peak memory starts at its parent's usage."""
    writer = multiprocessing.get_context("spawn").Process(target=write, args=(path, calls))
    writer.start()
    writer.join()


def loop_seconds() -> float:
    """Measure the CPU seconds of a fixed loop."""
    begin = time.process_time()
    for number in range(100_000):
        hashlib.sha256(json.dumps([number, "text", None]).encode()).digest()
    return time.process_time() - begin


def measure(command: str, path: Path) -> None:
    """Run a command on a ledger, and print its CPU seconds and memory."""
    # Spill files of other ledgers on this machine are none of its business.
    home = os.environ | {"XDG_DATA_HOME": str(path.parent)}
    ask = ["-m", "otel_limits.cli", *command.split(), "--ledger", str(path)]
    name = CLOSE if command.startswith("ledger close") else os.devnull
    speed = loop_seconds()
    with (path.parent / name).open("wb") as output:
        child = subprocess.Popen([sys.executable, *ask], stdout=output, env=home, cwd=path.parent)
    # Of this child alone: RUSAGE_CHILDREN would report the largest child.
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command} ended with status {child.returncode}.")
    cpu, megabytes = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    sys.stdout.write(
        f"{command}: {cpu:.2f} s of CPU, {megabytes:.0f} MB at most (loop: {speed:.2f} s)\n"
    )
    sys.stdout.flush()


def bytes_by_table(path: Path) -> dict[str, float]:
    """Bytes of each table, with its indexes, if this SQLite reports them."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM")
        sizes = (
            "SELECT tbl_name, sum(pgsize) FROM dbstat JOIN sqlite_master USING (name) GROUP BY 1"
        )
        return dict(connection.execute(sizes).fetchall())


def main() -> None:
    """Write a ledger and measure commands on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calls", type=int)
    calls = parser.parse_args().calls
    compileall.compile_dir(Path(otel_limits.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.db"
        in_child(write, path, calls)
        found = bytes_by_table(path)
        pair = sum(found.get(f"otel_limits_{name}", 0) for name in ("model_calls", "tool_calls"))
        sys.stdout.write(f"a model call with one tool call: {pair / calls:.0f} bytes\n")
        for command in COMMANDS:
            measure(command, path)
        empty = Path(directory) / "waiting" / "ledger.db"
        in_child(spill, empty, calls)
        sys.stdout.write(f"{calls:,} waiting rows, ")
        measure("audit spend", empty)


if __name__ == "__main__":
    main()
