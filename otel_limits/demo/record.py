"""Writes the sample ledger of `otel-limits demo --record DIR`."""

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
BATCH_SIZE: Final = 10_000
BAD_ARGUMENT: Final = 2

QUESTIONS: Final = (
    ("spend --by agent", "cost by agent"),
    ("stops", "stop reasons and the costliest halts"),
    ("loops", "repeated tool calls and their cost"),
    ("anomalies", "days with unusual spend or turns"),
    ("suggest", "a policy file from recorded usage"),
    ("backtest --max-turns 20", "recorded invocations against other limits"),
    ("verify", "check that the ledger is complete"),
)


def record(directory: str) -> int:
    """Write the sample ledger to a directory and print example queries.

    Returns:
        The exit status: 2 if the directory has a ledger or is not writable.
    """
    path = Path(directory).expanduser() / FILE
    if path.exists():
        # It may be a real ledger.
        return _refuse(f"{path} already exists. Delete it or choose another directory.")
    today = datetime.fromtimestamp(time.time(), timezone.utc).date()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        counts = write_ledger(path, today)
    except OSError as error:
        return _refuse(f"Cannot write {path}: {error.strerror or error}.")
    sys.stdout.write(
        f"Recorded four weeks of a sample fleet in {path}: {counts['agents']} agents,\n"
        # Each invocation has a row for its start and one for its end.
        f"{counts[rows.INVOCATIONS] // 2} invocations, {counts[rows.MODEL_CALLS]:,} model calls, "
        f"{counts[rows.TOOL_CALLS]:,} tool calls. The data is simulated; the prices are real.\n\n"
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
    """Write the four weeks before `today` to a new ledger.

    Returns:
        The number of rows written to each table, and of `agents`.

    Raises:
        OSError: The file cannot be written.
    """
    from otel_limits.ledger.address import parse
    from otel_limits.ledger.database import Database, DatabaseError, reason_of

    all_rows = list(rows_of(history(today)))
    counts = Counter(table for table, _ in all_rows)
    counts["agents"] = len({row["agent"] for table, row in all_rows if table == rows.INVOCATIONS})
    try:
        with contextlib.closing(Database(parse("--record", str(path), path.parent))) as database:
            for batch in rows.portions(all_rows, BATCH_SIZE):
                database.write(batch)
    except DatabaseError as error:
        raise OSError(reason_of(error)) from None
    return counts


def rows_of(events: Iterable[Event]) -> Iterable[tuple[str, rows.Row]]:
    """Convert events to rows as the ledger's observer does."""
    started: dict[str, Started] = {}
    for event in events:
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
