"""Spend from before the installation: exported spans become rows, by the same rules as live ones.

Model calls are counted where they were made, never again in the sums of the spans above them; a
model call within another is that same call, seen by another instrumentation; and what the ledger
recorded itself is left as it is.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.core.usage import Usage
from otel_limits.ledger.otlp import (
    AGENT_NAME,
    AGENT_SPANS,
    PROVIDERS,
    SESSIONS,
    TOOL_NAME,
    TOOL_STATUS,
    Key,
    Span,
    spans_in,
)
from otel_limits.ledger.rows import (
    ATTRIBUTES,
    ENDING,
    INVOCATIONS,
    MICROSECONDS,
    MODEL_CALLS,
    TOOL_CALLS,
    Row,
    attribute_rows,
    name,
    picodollars,
    portions,
    tokens,
)
from otel_limits.ledger.schema import INVOCATION_TABLE, MODEL_CALL_TABLE, TOOL_CALL_TABLE
from otel_limits.otel import semconv
from otel_limits.otel.processor import usage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from otel_limits.core.pricing import Prices
    from otel_limits.core.work import Work
    from otel_limits.ledger.database import Database

PORTION: Final = 2_000
NO_AGENT: Final = "(no agent)"
TOKEN_COLUMNS: Final = tuple(tokens(None))

RUNS: Final = INVOCATION_TABLE.c
CALLS: Final = MODEL_CALL_TABLE.c


@dataclass(slots=True)
class Imported:
    """What came of an import."""

    calls: int = 0
    invocations: int = 0
    tools: int = 0
    known_calls: int = 0
    unreadable_lines: int = 0

    def __str__(self) -> str:
        """In words."""
        others = f"{self.invocations:,} invocations and {self.tools:,} tool calls."
        parts = [f"Imported {self.calls:,} model calls, {others}"]
        if self.known_calls:
            parts.append(f"{self.known_calls:,} model calls were in the ledger already.")
        if self.unreadable_lines:
            parts.append(f"{self.unreadable_lines:,} lines are not OTLP JSON and were left out.")
        return " ".join(parts)


@dataclass(slots=True)
class Traces:
    """Spans of the files: those that become rows, and where every span hangs."""

    parents: dict[Key, Key | None] = field(default_factory=dict)
    spans: dict[Key, Span] = field(default_factory=dict)
    unreadable_lines: int = 0

    def above(self, span: Span) -> Iterator[Span]:
        """The spans above one that become rows, the nearest first."""
        seen = {span.key}
        key = span.parent
        while key is not None and key not in seen:
            seen.add(key)
            if key in self.spans:
                yield self.spans[key]
            key = self.parents.get(key)

    def calls(self) -> Iterator[tuple[Span, list[Span]]]:
        """Every model call that counts, with the invocations that it belongs to.

        Of a call within a call the outer one counts, unless only the inner one knows its tokens.
        """
        within: dict[Key, list[Span]] = {}
        outer: dict[Key, Key] = {}
        for span in self.spans.values():
            if span.is_model_call:
                around = next((each for each in self.above(span) if not each.is_tool), None)
                if around is not None and around.is_model_call:
                    outer[span.key] = around.key
                    within.setdefault(around.key, []).append(span)
        for span in self.spans.values():
            if span.is_model_call and self._counts(span, outer, within):
                yield span, [each for each in self.above(span) if each.is_agent]

    def _counts(self, span: Span, outer: dict[Key, Key], within: dict[Key, list[Span]]) -> bool:
        around = outer.get(span.key)
        if around is not None and _has_tokens(self.spans[around]):
            return False
        if around is not None:
            return _has_tokens(span)
        inner = within.get(span.key, ())
        return _has_tokens(span) or not any(_has_tokens(each) for each in inner)


def import_files(
    database: Database, files: Sequence[str], keys: Sequence[str], prices: Prices, work: Work
) -> Imported:
    """Import the spans of some files; doing it again changes nothing.

    Args:
        database: Where to.
        files: OTLP JSON lines, gzipped if their name says so.
        keys: Attributes chosen for audit.
        prices: What the calls cost at their time.
        work: Told how far it has got.

    Raises:
        LedgerError: A file cannot be read.
    """
    traces = Traces()
    for path in files:
        _read(Path(path), keys, traces, work)
    recorded = _recorded(database, (span.key for span in traces.spans.values() if span.is_agent))
    done = Imported(unreadable_lines=traces.unreadable_lines)
    touched: set[str] = set()
    # In portions, each a transaction of its own: a live process that records waits for one at most.
    for portion in portions(_rows(traces, recorded, keys, prices, done), PORTION):
        changed = database.write(portion)
        sent = sum(table == MODEL_CALLS for table, _ in portion)
        done.calls += changed.get(MODEL_CALLS, 0)
        done.known_calls += sent - changed.get(MODEL_CALLS, 0)
        done.invocations += changed.get(INVOCATIONS, 0)
        done.tools += changed.get(TOOL_CALLS, 0)
        touched.update(row["id"] for table, row in portion if table == INVOCATIONS)
    _sum_up(database, sorted(touched))
    return done


def _read(path: Path, keys: Sequence[str], traces: Traces, work: Work) -> None:
    try:
        with _opened(path) as file:
            for line in work.through(file):
                _take(line, keys, traces)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise LedgerError(f"{path} cannot be read: {reason}.") from None


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _take(line: str, keys: Sequence[str], traces: Traces) -> None:
    if not line.strip():
        return
    try:
        for span in spans_in(line, keys):
            traces.parents[span.key] = span.parent
            if span.is_agent or span.is_model_call or span.is_tool:
                traces.spans[span.key] = span
    except ValueError:
        traces.unreadable_lines += 1


def _recorded(database: Database, keys: Iterable[Key]) -> set[Key]:
    """Which invocations the ledger has seen itself."""
    found: set[Key] = set()
    wanted = set(keys)
    traces = sorted({trace_id for trace_id, _ in wanted})
    with database.reading() as connection:
        for start in range(0, len(traces), PORTION):
            statement = sa.select(RUNS.trace_id, RUNS.span_id).where(
                RUNS.trace_id.in_(traces[start : start + PORTION]), RUNS.source == "live"
            )
            found.update((row.trace_id, row.span_id) for row in connection.execute(statement))
    return found & wanted


def _rows(
    traces: Traces, recorded: set[Key], keys: Sequence[str], prices: Prices, done: Imported
) -> Iterator[tuple[str, Row]]:
    for span in traces.spans.values():
        if span.is_agent and span.key not in recorded:
            around = [each for each in traces.above(span) if each.is_agent]
            yield INVOCATIONS, _invocation_row(span, around)
            chosen = {key: str(span.attributes[key]) for key in keys if key in span.attributes}
            yield from ((ATTRIBUTES, row) for row in attribute_rows(_id(span), chosen))
        elif span.is_tool:
            around = [each for each in traces.above(span) if each.is_agent]
            if not around or around[0].key not in recorded:
                yield TOOL_CALLS, _tool_row(span, around)
    for span, around in traces.calls():
        if around and around[0].key in recorded:
            done.known_calls += 1
        else:
            yield MODEL_CALLS, _call_row(span, around, prices)


def _id(span: Span) -> str:
    """The id of an imported invocation: the same whenever it is imported."""
    return span.trace_id + span.span_id


def _owner(span: Span, around: Sequence[Span]) -> Row:
    """What ties a call to its invocation; one without an agent belongs to its trace."""
    # Without a number, which only a live invocation gives: the ids of the span are what is unique.
    return {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "invocation_id": _id(around[0]) if around else span.trace_id,
        "root_id": _id(around[-1]) if around else span.trace_id,
        "number": None,
        "agent": _agent_name(around[0]) if around else NO_AGENT,
        "source": "import",
    }


def _agent_name(span: Span) -> str:
    known = span.attributes.get(AGENT_NAME)
    if isinstance(known, str):
        return name(known)
    prefix = next((each for each in AGENT_SPANS if span.name.startswith(each)), "")
    return name(span.name.removeprefix(prefix).strip() or NO_AGENT)


def _invocation_row(span: Span, around: Sequence[Span]) -> Row:
    found = span.attributes
    session = span.first(SESSIONS)
    reason = found.get(semconv.STOP_REASON) or span.finish_reason
    cap, observed = found.get(semconv.LIMIT_VALUE), found.get(semconv.LIMIT_CONSUMED)
    return {
        **dict.fromkeys(ENDING),
        "id": _id(span),
        "root_id": _id(around[-1]) if around else _id(span),
        "parent_id": _id(around[0]) if around else None,
        "agent": _agent_name(span),
        "session_id": name(session) if session is not None else None,
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "source": "import",
        "blind": False,
        "limits": None,
        "started_us": span.start_us,
        "ended_us": span.end_us,
        "reason": name(str(reason or ("error" if span.is_error else "unknown"))),
        "action": name(str(found.get(semconv.STOP_ACTION, "none"))),
        "breach_limit": _text(found.get(semconv.LIMIT_NAME)),
        "breach_cap": _text(cap),
        "breach_observed": _text(observed),
    }


def _text(value: object) -> str | None:
    return None if value is None else name(str(value))


def _call_row(span: Span, around: Sequence[Span], prices: Prices) -> Row:
    usage = usage_of(span.attributes)
    model = str(span.attributes.get(semconv.REQUEST_MODEL) or "unknown")
    when = datetime.fromtimestamp(span.end_us / MICROSECONDS, timezone.utc)
    price = prices.price(model, usage, when) if usage is not None and usage.total else None
    return {
        **_owner(span, around),
        "at_us": span.end_us,
        "duration_us": span.end_us - span.start_us,
        "model": name(model),
        "provider": name(span.first(PROVIDERS) or "unknown"),
        "turn": None,
        "iteration": None,
        **tokens(usage or Usage()),
        **tokens(usage, "reported_"),
        "reported_total_tokens": None,
        "state": _state(span, usage),
        "estimated": False,
        "price_pico": picodollars(price),
        "price_source": prices.source if price is not None else None,
        "price_version": prices.version if price is not None else None,
        **dict.fromkeys(("quota_operation", "quota_charges")),
    }


def _state(span: Span, usage: Usage | None) -> str:
    if usage is not None and usage.total:
        return "measured"
    return "failed" if span.is_error else "unmeasured"


def _has_tokens(span: Span) -> bool:
    usage = usage_of(span.attributes)
    return usage is not None and usage.total > 0


def _tool_row(span: Span, around: Sequence[Span]) -> Row:
    status = span.attributes.get(TOOL_STATUS)
    failed = span.is_error or status not in (None, "success")
    return {
        **_owner(span, around),
        "at_us": span.end_us,
        "duration_us": span.end_us - span.start_us,
        "tool": name(str(span.attributes.get(TOOL_NAME) or "unknown")),
        "status": "error" if failed else "success",
        "fingerprint": None,
    }


def _sum_up(database: Database, ids: Sequence[str]) -> None:
    """Write the totals of imported invocations, from their calls: files may come one by one."""
    of_run = CALLS.invocation_id == RUNS.id
    answered = sa.case((CALLS.state != "failed", 1), else_=0)
    is_unpriced = CALLS.price_pico.is_(None) & (CALLS.input_tokens + CALLS.output_tokens > 0)
    summed: dict[str, Any] = {
        "turns": answered,
        "cycles": answered,
        "model_calls": 1,
        **{column: CALLS[column] for column in (*TOKEN_COLUMNS, "price_pico")},
        "unpriced_calls": sa.case((is_unpriced, 1), else_=0),
    }
    values = {
        column: sa.select(sa.func.coalesce(sa.func.sum(each), 0)).where(of_run).scalar_subquery()
        for column, each in summed.items()
    }
    tools = TOOL_CALL_TABLE.c
    values["tool_calls"] = (
        sa.select(sa.func.count()).where(tools.invocation_id == RUNS.id).scalar_subquery()
    )
    for start in range(0, len(ids), PORTION):
        chosen = RUNS.id.in_(ids[start : start + PORTION])
        with database.changing() as connection:
            connection.execute(INVOCATION_TABLE.update().where(chosen).values(values))
