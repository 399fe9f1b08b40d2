"""Records the demo's example fleet in a ledger: `otel-limits demo --record DIR`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterable
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Final

from otel_limits.core.events import Event, ModelCall, QuotaGrant, Started, Stop, ToolCall
from otel_limits.demo.sample_fleet import history
from otel_limits.ledger import rows

FILE: Final = "ledger.db"
PORTION: Final = 10_000
BAD_ARGUMENT: Final = 2

QUESTIONS: Final = (
    ("spend --by agent", "who spends what"),
    ("stops", "why invocations ended, and what halted ones cost"),
    ("loops", "who repeats itself to no effect"),
    ("anomalies", "on which days something was not as usual"),
    ("suggest", "limits from what successful invocations needed"),
    ("backtest --max-turns 20", "what a limit would have halted"),
    ("verify", "whether the ledger is complete"),
)


def record(directory: str) -> int:
    """Write the example ledger into a directory, and say what it can be asked.

    Returns:
        The exit status: 2 where there is a ledger already, or none can be written.
    """
    path = Path(directory).expanduser() / FILE
    if path.exists():
        # Never written over: it may be the ledger of somebody who chose the wrong directory.
        return _refuse(f"{path} is there already. Delete it, or name another directory.")
    today = datetime.fromtimestamp(time.time(), timezone.utc).date()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        seen = write_ledger(path, today)
    except OSError as error:
        return _refuse(f"{path} cannot be written: {error.strerror or error}.")
    sys.stdout.write(
        f"Recorded four weeks of an example fleet in {path}: {seen['agents']} agents, "
        # An invocation is told twice: when it begins, and when it has ended.
        f"{seen[rows.INVOCATIONS] // 2} invocations,\n"
        f"{seen[rows.MODEL_CALLS]:,} model calls, {seen[rows.TOOL_CALLS]:,} tool calls. "
        "All of it is made up; the prices are those of the vendors.\n\n"
        f"export OTEL_LIMITS_LEDGER={path}\n"
    )
    width = max(len(question) for question, _ in QUESTIONS)
    for question, meaning in QUESTIONS:
        sys.stdout.write(f"otel-limits audit {question:<{width}}   # {meaning}\n")
    return 0


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"otel-limits demo: {sentence}\n")
    return BAD_ARGUMENT


def write_ledger(path: Path, today: date) -> Counter[str]:
    """Write what the fleet did before a day into a new ledger.

    Returns:
        How many rows of each table were written, and how many `agents` there are.

    Raises:
        OSError: The file cannot be written.
    """
    from otel_limits.ledger.address import parse
    from otel_limits.ledger.database import Database, DatabaseError, reason_of

    told = list(rows_of(history(today)))
    seen = Counter(table for table, _ in told)
    seen["agents"] = len({row["agent"] for table, row in told if table == rows.INVOCATIONS})
    try:
        with contextlib.closing(Database(parse("--record", str(path), path.parent))) as database:
            for portion in rows.portions(told, PORTION):
                database.write(portion)
    except DatabaseError as error:
        raise OSError(reason_of(error)) from None
    return seen


def rows_of(facts: Iterable[Event]) -> Iterable[tuple[str, rows.Row]]:
    """Turn facts into rows, as the ledger's observer does."""
    started: dict[str, Started] = {}
    for event in facts:
        if isinstance(event, Started):
            started[event.invocation.id] = event
            yield from rows.started_rows(event)
        elif isinstance(event, ModelCall):
            yield rows.MODEL_CALLS, rows.model_call_row(event)
        elif isinstance(event, ToolCall):
            yield rows.TOOL_CALLS, rows.tool_call_row(event)
        elif isinstance(event, Stop):
            begun = started.pop(event.invocation_id)
            yield rows.INVOCATIONS, rows.invocation_row(begun, event)
        elif isinstance(event, QuotaGrant):
            yield rows.QUOTA_CHANGES, rows.quota_change_row(event)
