"""Spend from before the installation: exported spans become rows, by the same rules as live ones.

Model calls are counted where they were made, never again in the sums of the spans above them; a
model call within another is that same call, seen by another instrumentation; and what the ledger
recorded itself is left as it is.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.core.price import OF_NO_CALL
from otel_limits.core.terms import DEFAULT_TERMS, billable_call
from otel_limits.core.wording import pluralize
from otel_limits.ledger.otlp import (
    AGENT_SPANS,
    SESSIONS,
    TOOL_NAME,
    TOOL_STATUS,
    Span,
    SpanKey,
    spans_in,
)
from otel_limits.ledger.rows import (
    ATTRIBUTES,
    ENDING,
    FORMER_PRICE,
    INVOCATIONS,
    MICROSECONDS,
    MODEL_CALLS,
    RECOUNTS,
    SAME_CALL_MICROSECONDS,
    TOOL_CALLS,
    Row,
    attribute_rows,
    name,
    picodollars,
    portions,
    signed_picodollars,
    tokens,
)
from otel_limits.ledger.schema import CALLS, INVOCATION_TABLE, RUNS
from otel_limits.otel import semconv
from otel_limits.otel.kinds import AGENT_NAMES, RESPONSE_IDS, model_of, provider_of, tier_of
from otel_limits.runs.responses import SeenResponses

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from otel_limits.core.pricing import Prices
    from otel_limits.core.wording import ProgressBar
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.rows import State

PORTION: Final = 2_000
SHOWN: Final = 20
"""Bad lines that are named; all are counted."""
SHOWN_CHARACTERS: Final = 200
NO_AGENT: Final = "(no agent)"


NO_CALL: Final = (
    "{} read, none is a model call. A model call is known by gen_ai.operation.name, "
    "openinference.span.kind, llm.request.type or langfuse.observation.type, or by two of these: "
    "a model, usage, and a name like `chat`. Metrics and logs have none."
)


@dataclass(slots=True)
class Imported:
    """What came of an import."""

    calls: int = 0
    invocations: int = 0
    tools: int = 0
    known_calls: int = 0
    spans: int = 0
    """Spans of any kind that were read."""
    bad: list[str] = field(default_factory=list)
    """Where a line could not be read, and why."""

    @property
    def has_no_call(self) -> bool:
        """True where nothing of what was read is a model call: it is not what was meant."""
        return bool(self.spans or self.bad) and not (self.calls or self.known_calls)

    def __str__(self) -> str:
        """In words."""
        others = (
            f"{pluralize(self.invocations, 'invocation')} and {pluralize(self.tools, 'tool call')}."
        )
        parts = [f"Imported {pluralize(self.calls, 'model call')}, {others}"]
        if self.spans and self.has_no_call:
            parts = [NO_CALL.format(pluralize(self.spans, "span was", "spans were"))]
        if self.known_calls:
            known = pluralize(self.known_calls, "model call was", "model calls were")
            parts.append(f"{known} in the ledger already.")
        if not self.bad:
            return " ".join(parts)
        bad = pluralize(
            len(self.bad), "line is not OTLP JSON and was", "lines are not OTLP JSON and were"
        )
        parts.append(f"{bad} left out:")
        more = [f"and {len(self.bad) - SHOWN:,} more"] if len(self.bad) > SHOWN else []
        return "\n  ".join([" ".join(parts), *self.bad[:SHOWN], *more])


@dataclass(slots=True)
class Traces:
    """Spans of the files: those that become rows, and where every span hangs."""

    parents: dict[SpanKey, SpanKey | None] = field(default_factory=dict)
    spans: dict[SpanKey, Span] = field(default_factory=dict)
    boundaries: set[SpanKey] = field(default_factory=set)
    """What asks models by itself, such as a tool, whoever shows it."""
    bad: list[str] = field(default_factory=list)
    """Where a line could not be read, and why."""

    def times(self) -> dict[SpanKey, int]:
        """When invocations began, and model calls ended: what a ledger has of both."""
        return {
            key: span.start_us if span.is_agent else span.end_us
            for key, span in self.spans.items()
            if span.is_agent or span.is_model_call
        }

    def above(self, span: Span) -> Iterator[Span]:
        """The spans above one that become rows, the nearest first."""
        return (self.spans[key] for key in self._keys_above(span) if key in self.spans)

    def _keys_above(self, span: Span) -> Iterable[SpanKey]:
        above: dict[SpanKey, None] = {}
        key = span.parent
        # Files may be broken: a span that is its own ancestor must not be followed for ever.
        while key is not None and key not in above and key != span.key:
            above[key] = None
            key = self.parents.get(key)
        # Of calls in a ring each would be within another, and none would count.
        return () if key == span.key else above

    def _calls_around(self, span: Span) -> Iterator[Span]:
        """The spans around a model call that show the same one: up to a tool or an agent."""
        for key in self._keys_above(span):
            if key in self.boundaries:
                return
            if key in self.spans and self.spans[key].is_model_call:
                yield self.spans[key]

    def calls(self) -> Iterator[tuple[Span, list[Span]]]:
        """Every model call that counts, with the invocations that it belongs to.

        Of a call within a call the outer one counts, unless only the inner one knows its tokens.
        """
        within: dict[SpanKey, list[Span]] = {}
        counted = []
        for span in self.spans.values():
            if span.is_model_call:
                around = list(self._calls_around(span))
                for each in around:
                    within.setdefault(each.key, []).append(span)
                # The outermost that knows its tokens: an instrumentation of the framework sees the
                # whole call, one of the client a part of it.
                if not any(map(_tokens, around)) and (_tokens(span) or not around):
                    counted.append(span)
        counted.sort(key=_tokens, reverse=True)  # who knows them is to speak for the others
        shown: dict[str, SeenResponses] = {}
        for span in counted:
            inner = within.get(span.key, [])
            is_told_within = not _tokens(span) and any(map(_tokens, inner))
            responses = shown.setdefault(span.trace_id, SeenResponses())
            if not is_told_within and _is_new([span, *inner], responses):
                yield span, [each for each in self.above(span) if each.is_agent]


def _is_new(spans: Sequence[Span], responses: SeenResponses) -> bool:
    """Tell whether nobody else has shown the call of these spans, by the id of its response."""
    told = [
        (response, each.scope, _tokens(each))
        for each in spans
        if (response := each.first(RESPONSE_IDS)) is not None
    ]
    # All are asked before any is added: the spans of one call may carry the same id.
    is_known = any(responses.has(*each) for each in told)
    for each in told:
        responses.add(*each)
    return not is_known


def import_files(
    database: Database, files: Sequence[str], keys: Sequence[str], prices: Prices, work: ProgressBar
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
    recorded = _recorded(database, traces.times())
    done = Imported(bad=traces.bad, spans=len(traces.parents))
    # In portions, each a transaction of its own: a live process that records waits for one at most.
    for portion in portions(_rows(traces, recorded, keys, prices, done), PORTION):
        ids = {row["id" if table == INVOCATIONS else "invocation_id"] for table, row in portion}
        # In the same transaction, so that whoever asks meanwhile, or after an import that was
        # broken off, finds totals that agree with the calls.
        totals = [(RECOUNTS, {"id": each}) for each in sorted(ids)]
        changed = database.write([*portion, *totals])
        sent = sum(table == MODEL_CALLS for table, _ in portion)
        done.calls += changed.get(MODEL_CALLS, 0)
        # What was sent and not changed was there already, of an earlier import of the same file.
        done.known_calls += sent - changed.get(MODEL_CALLS, 0)
        done.invocations += changed.get(INVOCATIONS, 0)
        done.tools += changed.get(TOOL_CALLS, 0)
    return done


def _read(path: Path, keys: Sequence[str], traces: Traces, work: ProgressBar) -> None:
    """Read a file; what cannot be read of it costs nothing else."""
    try:
        file = _opened(path)
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}.") from None
    number = 0
    with file:
        try:
            for number, line in enumerate(work.through(file), start=1):
                _take(line, keys, traces, f"{path}, line {number}")
        except (OSError, EOFError, zlib.error) as error:
            # What was read by then stays: half of a file is better than none, and the rest is
            # named.
            traces.bad.append(f"{path}, from line {number + 1} on: {error}")


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _take(line: bytes, keys: Sequence[str], traces: Traces, place: str) -> None:
    if not line.strip():
        return
    try:
        # Windows puts a mark in front of a file. All of a line, or nothing.
        for span in list(spans_in(line.decode("utf-8-sig"), keys)):
            # Of every span: what becomes a row may hang under others that do not.
            traces.parents[span.key] = span.parent
            if span.is_boundary:
                traces.boundaries.add(span.key)
            if span.is_agent or span.is_model_call or span.is_tool:
                traces.spans[span.key] = span
    except ValueError as error:  # text that is not UTF-8 too
        traces.bad.append(f"{place}: {str(error)[:SHOWN_CHARACTERS]}")


def _recorded(database: Database, wanted: Mapping[SpanKey, int]) -> set[SpanKey]:
    """Which invocations and model calls the ledger has seen itself, of some with their times."""
    found: set[SpanKey] = set()
    traces = sorted({trace_id for trace_id, _ in wanted})
    with database.reading() as connection:
        # SQLite permits 32,766 parameters in a statement, PostgreSQL 65,535.
        for start in range(0, len(traces), PORTION):
            in_part = RUNS.trace_id.in_(traces[start : start + PORTION]) & (RUNS.source == "live")
            runs = sa.select(RUNS.trace_id, RUNS.span_id, RUNS.started_us).where(in_part)
            calls = (
                sa.select(RUNS.trace_id, CALLS.span_id, CALLS.at_us)
                .join(INVOCATION_TABLE, RUNS.id == CALLS.invocation_id)
                .where(in_part)
            )
            for statement in (runs, calls):
                for trace_id, span_id, at_us in connection.execute(statement):
                    at = wanted.get((trace_id, span_id))
                    if at is not None and abs(at - at_us) <= SAME_CALL_MICROSECONDS:
                        found.add((trace_id, span_id))
    return found


def _rows(
    traces: Traces, recorded: set[SpanKey], keys: Sequence[str], prices: Prices, done: Imported
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
    # Together, as each portion adds up the invocations that it has calls of.
    for span, around in sorted(traces.calls(), key=_place):
        # A live invocation has counted its calls itself, also those that its spans show otherwise.
        if span.key in recorded or (around and around[0].key in recorded):
            done.known_calls += 1
        else:
            # Its trace stands in for an invocation: otherwise no sum over invocations had it.
            if not around:
                yield INVOCATIONS, _trace_row(span)
            yield MODEL_CALLS, _call_row(span, around, prices)


def _place(call: tuple[Span, Sequence[Span]]) -> tuple[int, str, int]:
    """Where a call stands among all: by the beginning of its invocation, and then by its end."""
    span, around = call
    first = around[0] if around else span
    return first.start_us, _id(first), span.end_us


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
        "root_id": _id(around[-1]) if len(around) > 1 else None,
        "number": None,
        "agent": _agent_name(around[0]) if around else NO_AGENT,
        "source": "import",
    }


def _agent_name(span: Span) -> str:
    known = span.first(AGENT_NAMES)
    if known is not None:
        return name(known)
    # The names of agent spans begin with what they do: `invoke_agent researcher`.
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
        "halt": _text(found.get(semconv.STOP_MESSAGE)),
    }


def _trace_row(span: Span) -> Row:
    """The row that calls without an agent belong to: every question adds up invocations."""
    return {
        **dict.fromkeys(ENDING),
        **dict.fromkeys(("parent_id", "session_id", "span_id", "limits")),
        "id": span.trace_id,
        "root_id": span.trace_id,
        "agent": NO_AGENT,
        "trace_id": span.trace_id,
        "source": "import",
        "blind": False,
        "started_us": span.start_us,
        "ended_us": span.end_us,
        "reason": "unknown",
        "action": "none",
    }


def _text(value: object) -> str | None:
    return None if value is None else name(str(value))


def _call_row(span: Span, around: Sequence[Span], prices: Prices) -> Row:
    record, usage = span.record, span.usage
    model, provider = model_of(span.attributes), provider_of(span.attributes)
    tier = tier_of(span.attributes, record.tier)
    sale = billable_call(model, provider, usage, tier, DEFAULT_TERMS)
    when = datetime.fromtimestamp(span.end_us / MICROSECONDS, timezone.utc)
    # Without tokens there is nothing to be priced, and no price that could be missing.
    quote = prices.quote(sale, when) if usage.total else OF_NO_CALL
    return {
        **_owner(span, around),
        "at_us": span.end_us,
        "duration_us": span.end_us - span.start_us,
        "model": name(model),
        "provider": name(provider),
        "turn": None,
        "iteration": None,
        **tokens(usage),
        **tokens(record.reported, "reported_"),
        "reported_total_tokens": record.total,
        "state": _state(span),
        "estimated": record.sure != "measured" and usage.total > 0,
        "price_pico": picodollars(quote.price),
        "cache_saved_pico": signed_picodollars(quote.cache_saved),
        "price_source": quote.source,
        "price_version": quote.version,
        "price_basis": sale.basis,
        "tier": name(sale.tier),
        "cache_write_1h_tokens": usage.cache_write_1h,
        **dict.fromkeys(("quota_operation", "quota_charges", "side", "after_tools", *FORMER_PRICE)),
    }


def _state(span: Span) -> State:
    """How much is known of a call, in the words of a live one."""
    # A call that failed may have been billed, and says so by its tokens.
    if span.is_error and not span.record.usage.total:
        return "failed"
    if span.record.sure == "measured":
        return "measured" if span.usage.total else "zero"
    return "estimated" if span.usage.total else "unmeasured"


def _tokens(span: Span) -> int:
    """Tokens that a span knows of."""
    return span.record.usage.total


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
        "turn": None,
    }
