"""Spans of an import: which are model calls, and which sums show calls without a span."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from otel_limits.ledger.otlp import TOOL_CALL_ID, Span, SpanKey, read_spans
from otel_limits.ledger.rows import portions
from otel_limits.ledger.schema import (
    CALLS,
    INVOCATION_TABLE,
    IS_IMPORTED,
    IS_TOTAL,
    MODEL_CALL_TABLE,
    RUNS,
    UNCOUNTED_TABLE,
)
from otel_limits.runs.spans import SeenResponses

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from otel_limits.ledger.database import Database
    from otel_limits.ledger.otlp import JsonDocument
    from otel_limits.otel.kinds import ShownCall


SHOWN_CHARACTERS: Final = 200
LARGE_BYTES: Final = 64 * 1024**2
"""Documents are read as a whole, with some four times their size in memory."""


@dataclass(slots=True)
class Traces:
    """Spans of the files: those that become rows, and the parent of every span."""

    parents: dict[SpanKey, SpanKey | None] = field(default_factory=dict)
    spans: dict[SpanKey, Span] = field(default_factory=dict)
    boundaries: set[SpanKey] = field(default_factory=set)
    """Spans that request model calls, such as a tool's, of any instrumentation."""
    documents: int = 0
    """Documents that were read."""
    bad: list[str] = field(default_factory=list)
    """Parts that could not be read, and why."""

    large: list[str] = field(default_factory=list)
    """The places of large documents."""
    unfinished: int = 0
    """Spans without an end, which are left out."""

    def add(self, document: JsonDocument, keys: Sequence[str], place: str) -> None:
        """Add the spans of a document."""
        try:
            found = read_spans(document, keys)
        except ValueError as error:
            self.bad.append(f"{place}: {str(error)[:SHOWN_CHARACTERS]}")
            return
        self.documents += 1
        if len(document.text) > LARGE_BYTES:
            self.large.append(f"{place} ({len(document.text) / 1024**2:,.0f} MB)")
        self.unfinished += found.unfinished
        for span in found.spans:
            # Of every span: rows may hang under spans that do not become rows.
            self.parents[span.key] = span.parent
            if span.is_boundary:
                self.boundaries.add(span.key)
            if span.is_agent or span.call is not None or span.is_tool or span.is_use:
                self.spans[span.key] = _widened(span, self.spans.get(span.key))

    def times(self) -> dict[SpanKey, int]:
        """Return start times of invocations and end times of model calls, as in a ledger."""
        return {
            key: span.start_us if span.is_agent else span.end_us
            for key, span in self.spans.items()
            if span.is_agent or span.call is not None
        }

    def above(self, span: Span) -> Iterator[Span]:
        """Iterate over the spans above one that become rows, the nearest first."""
        return (self.spans[key] for key in self.keys_above(span.key) if key in self.spans)

    def keys_above(self, of: SpanKey) -> Collection[SpanKey]:
        """Return the spans above one as far as they are known, the nearest first."""
        above: dict[SpanKey, None] = {}
        key = self.parents.get(of)
        # Files may be broken: a span that is its own ancestor must not loop forever.
        while key is not None and key not in above and key != of:
            above[key] = None
            key = self.parents.get(key)
        # In a ring each call would be within another, and none would count.
        return () if key == of else above

    def _calls_around(self, span: Span) -> Iterator[Span]:
        """Iterate over the enclosing spans of the same model call: up to a tool or an agent."""
        for key in self.keys_above(span.key):
            if key in self.boundaries:
                return
            if key in self.spans and self.spans[key].call is not None:
                yield self.spans[key]

    def calls(self) -> Iterator[tuple[Span, ShownCall, list[Span]]]:
        """Iterate over every model call that counts, with the invocations that contain it.

        Of nested calls the outer one counts, unless only the inner one has its tokens. Live, the
        inner one counts: it ends first, and limits cannot wait for the outer one.
        """
        within: dict[SpanKey, list[Span]] = {}
        candidates = []
        for span in self.spans.values():
            if span.call is not None:
                around = list(self._calls_around(span))
                for each in around:
                    within.setdefault(each.key, []).append(span)
                # The outermost with tokens: a framework's instrumentation sees the whole call, a
                # client's only a part of it.
                calls = [each for each in around if not each.is_possible_call]
                if not any(each.tokens for each in calls) and (span.tokens or not around):
                    candidates.append((span, span.call))
        # Spans with tokens take precedence.
        candidates.sort(key=lambda each: each[1].tokens, reverse=True)
        shown: dict[str, SeenResponses] = {}
        elsewhere: dict[tuple[Any, ...], list[Span]] = {}
        for span, call in candidates:
            inner = within.get(span.key, [])
            is_weaker = not call.tokens or span.is_possible_call
            has_inner_tokens = is_weaker and any(each.tokens for each in inner)
            responses = shown.setdefault(span.trace_id, SeenResponses())
            if has_inner_tokens or not _is_new([span, *inner], responses):
                continue
            if not _is_in_another_trace(span, call, elsewhere):
                yield span, call, [each for each in self.above(span) if each.is_agent]

    def tools(self) -> Iterator[Span]:
        """Iterate over every tool call, once.

        A tool within another one is a part of it, or shows it again, unless an agent between them
        calls it.
        """
        shown: defaultdict[tuple[Any, ...], list[Span]] = defaultdict(list)
        for span in self.spans.values():
            if span.is_tool:
                callers = (each for each in self.above(span) if each.is_agent or each.is_tool)
                caller = next(callers, None)
                is_outer = caller is None or caller.is_agent
                if is_outer and _is_first_of_tool(span, shown):
                    yield span


def _is_first_of_tool(span: Span, shown: dict[tuple[Any, ...], list[Span]]) -> bool:
    """Return whether no other instrumentation has shown a tool call, and add it to `shown`."""
    identity = span.attributes.get(TOOL_CALL_ID)
    if identity is None:
        return True
    # Some servers repeat IDs, so the times decide, too.
    others = shown[span.trace_id, identity]
    is_again = any(each.scope != span.scope and _overlap(each, span) for each in others)
    others.append(span)
    return not is_again


def _overlap(one: Span, other: Span) -> bool:
    return one.start_us <= other.end_us and other.start_us <= one.end_us


def _widened(span: Span, known: Span | None) -> Span:
    """Return a span with the time of an earlier part: each call of a session shows the session."""
    if known is None:
        return span
    start, end = min(span.start_us, known.start_us), max(span.end_us, known.end_us)
    return replace(span, start_us=start, end_us=end)


def _is_new(spans: Sequence[Span], responses: SeenResponses) -> bool:
    """Return whether no other span has shown this call, by its response ID."""
    shown = [
        (each.call.response_id, each.scope, each.tokens)
        for each in spans
        if each.call is not None and each.call.response_id is not None
    ]
    # All are checked before any is added: the spans of one call may share an ID.
    is_known = any(responses.has(*each) for each in shown)
    for each in shown:
        responses.add(*each)
    return not is_known


def _is_in_another_trace(
    span: Span, call: ShownCall, shown: dict[tuple[Any, ...], list[Span]]
) -> bool:
    """Return whether a span of another trace has shown this call, and add the span to `shown`.

    A client and a gateway that are not connected by a trace show one response during the same time.
    """
    if call.response_id is None:
        return False
    others = shown.setdefault((call.response_id, call.model, call.tokens), [])
    others.append(span)
    return any(each.trace_id != span.trace_id and _overlap(each, span) for each in others)


# --- rows of these traces in a ledger -------------------------------------------------------------

PORTION: Final = 2_000
"""Traces in a statement: SQLite allows 32,766 parameters, PostgreSQL 65,535."""


class Times:
    """The times of some calls of a trace, of which those within or around another are found."""

    def __init__(self, calls: Iterable[Span | Stored]) -> None:
        """Sort them: a trace may have thousands of calls, and of spans with tokens."""
        times = sorted((each.start_us, each.end_us) for each in calls)
        self._starts = [start for start, _ in times]
        ends = [end for _, end in times]
        self._last_ends = list(itertools.accumulate(ends, max))
        self._first_ends = [*itertools.accumulate(reversed(ends), min)][::-1]

    def has_within(self, span: Span | Stored) -> bool:
        """Return whether a span encloses one of them."""
        place = bisect.bisect_left(self._starts, span.start_us)
        return place < len(self._starts) and self._first_ends[place] <= span.end_us

    def has_around(self, span: Span | Stored) -> bool:
        """Return whether one of them encloses a span."""
        place = bisect.bisect_right(self._starts, span.start_us)
        return place > 0 and self._last_ends[place - 1] >= span.end_us


class Stored(NamedTuple):
    """A row of a ledger that is a call, or tokens that are not counted."""

    key: SpanKey
    invocation_id: str
    owner: SpanKey
    """The span of the invocation; without an agent there is none."""
    start_us: int
    end_us: int


@dataclass(slots=True)
class StoredTraces:
    """The rows of a ledger that concern the traces of an import."""

    totals: list[Stored] = field(default_factory=list)
    uncounted: list[Stored] = field(default_factory=list)
    calls: set[SpanKey] = field(default_factory=set)
    """Calls of other imports and live ones, in traces in which the import has sums."""
    owners: set[SpanKey] = field(default_factory=set)
    """Their invocations, if the import has the span."""
    times: dict[str, Times] = field(default_factory=dict)
    """The times of the other ones, by trace."""


def stored_traces(database: Database, traces: Traces) -> StoredTraces:
    """Read the rows that concern the traces of an import."""
    found, others = StoredTraces(), defaultdict[str, list[Stored]](list)
    everywhere = sorted({trace_id for trace_id, _ in traces.spans})
    with_sums = sorted({key[0] for key, span in traces.spans.items() if span.is_use})
    calls, left_out = _select(MODEL_CALL_TABLE), _select(UNCOUNTED_TABLE)
    with database.reading() as connection:
        found.totals += _read(connection, calls.where(IS_TOTAL), CALLS.trace_id, everywhere)
        found.uncounted += _read(connection, left_out, UNCOUNTED_TABLE.c.trace_id, everywhere)
        for statement, trace_id in (
            (calls.where(IS_IMPORTED), CALLS.trace_id),
            (calls.where(RUNS.source == "live"), RUNS.trace_id),
        ):
            for each in _read(connection, statement, trace_id, with_sums):
                if each.key in traces.parents:
                    continue  # its parents are known
                found.calls.add(each.key)
                if each.owner in traces.parents:
                    found.owners.add(each.owner)
                else:
                    others[each.key[0]].append(each)
    found.times = {trace_id: Times(each) for trace_id, each in others.items()}
    return found


def _select(table: sa.Table) -> sa.Select[Any]:
    own = table.c
    return sa.select(
        sa.func.coalesce(own.trace_id, RUNS.trace_id),  # live calls have that of their invocation
        sa.func.coalesce(own.span_id, ""),
        own.invocation_id,
        sa.func.coalesce(RUNS.span_id, ""),
        own.at_us - sa.func.coalesce(own.duration_us, 0),
        own.at_us,
    ).select_from(table.outerjoin(INVOCATION_TABLE, RUNS.id == own.invocation_id))


def _read(
    connection: sa.Connection,
    statement: sa.Select[Any],
    trace_id: sa.ColumnElement[str],
    traces: Sequence[str],
) -> Iterator[Stored]:
    for portion in portions(traces, PORTION):
        for trace, span, invocation, owner, start_us, end_us in connection.execute(
            statement.where(trace_id.in_(portion))
        ):
            yield Stored((trace, span), invocation, (trace, owner), start_us, end_us)


# --- tokens of spans that show no call ------------------------------------------------------------
# A span that encloses model calls has their sum. Within the files of an import, its parents show
# that; for calls of other imports only the trace and the time do, as no row has the parents of a
# span. The total of an agent without any known call is one call, until its calls are imported. All
# other tokens are not counted, but listed.

NO_CALL: Final = "no attribute shows a model call"
NO_TOKENS: Final = "the gateway states a cost without tokens"
NO_MEANING: Final = "the meaning of {} is unknown"


class LeftOut(NamedTuple):
    """Tokens that are not counted."""

    span: Span
    cause: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SettledTotals:
    """The sums of an import, and those in the ledger, once their calls are known."""

    totals: Sequence[tuple[Span, ShownCall]]
    """Totals of agents that count as one call each."""
    left_out: Sequence[LeftOut]
    superseded: Sequence[Stored]
    """Totals and uncounted tokens in the ledger whose calls are known now."""


def settle(traces: Traces, calls: Collection[SpanKey], stored: StoredTraces) -> SettledTotals:
    """Decide which sums count as calls, and which tokens are not counted.

    Args:
        traces: The spans of the files.
        calls: Model calls that count, and invocations that were recorded live.
        stored: The rows of the ledger.
    """
    counted = set(calls)
    # Also those of calls that another trace has shown.
    shown = {key for key, span in traces.spans.items() if span.call is not None}
    summed = {key for each in shown | counted for key in traces.keys_above(each)}
    # So are the agents of calls in the ledger, and the spans above them.
    for owner in stored.owners:
        summed.update((owner, *traces.keys_above(owner)))
    totals = []
    for span, call in _agents_with_totals(traces):
        is_known = span.key in summed or not counted.isdisjoint(_upwards(span, traces))
        if not is_known and not _has_calls_of_its_time(span, traces, stored):
            totals.append((span, call))
            counted.add(span.key)
    summed |= {key for span, _ in totals for key in traces.keys_above(span.key)}
    left_out = [
        *_sums_left_out(traces, counted, summed, stored),
        *_calls_left_out(traces.spans[key] for key in counted),
    ]
    times = _times_of_loose_calls(traces, counted) if stored.totals or stored.uncounted else {}
    kept = {each.span.key for each in left_out}
    superseded = []
    for rows, still in ((stored.totals, counted), (stored.uncounted, kept)):
        for row in rows:
            if row.key in traces.parents:
                is_superseded = row.key not in still
            else:
                of_trace = times.get(row.key[0])
                has_calls = of_trace is not None and of_trace.has_within(row)
                is_superseded = row.key in summed or has_calls
            if is_superseded:
                superseded.append(row)
    return SettledTotals(totals, left_out, superseded)


def _agents_with_totals(traces: Traces) -> list[tuple[Span, ShownCall]]:
    """Return agents with a total, the outer ones first: their totals include the inner ones."""
    found = [(span, span.total) for span in traces.spans.values() if span.total is not None]
    return sorted(found, key=lambda each: len(traces.keys_above(each[0].key)))


def _upwards(span: Span, traces: Traces) -> Iterator[SpanKey]:
    yield span.key
    yield from traces.keys_above(span.key)


def _sums_left_out(
    traces: Traces, counted: Collection[SpanKey], summed: Collection[SpanKey], stored: StoredTraces
) -> Iterator[LeftOut]:
    """Iterate over outermost spans with tokens that are neither a call, nor its sum or its part."""
    stated = {key for key, span in traces.spans.items() if span.is_use and key not in summed}
    known = stated.union(counted, stored.calls)
    for key in stated:
        span = traces.spans[key]
        is_part = not known.isdisjoint(traces.keys_above(key))
        is_known = key in counted or is_part
        if not is_known and not _has_calls_of_its_time(span, traces, stored):
            yield LeftOut(span, _cause_of(span), span.stated)


def _cause_of(span: Span) -> str:
    if not span.stated:
        return NO_TOKENS
    return NO_MEANING.format(", ".join(span.unclear)) if span.unclear else NO_CALL


def _calls_left_out(calls: Iterable[Span]) -> Iterator[LeftOut]:
    """Iterate over calls whose only tokens have an unknown meaning."""
    for span in calls:
        call = span.call
        unplaced = None if call is None else call.record.unplaced
        if call is None or unplaced is None or call.tokens or call.has_estimate:
            continue
        cause = NO_MEANING.format(", ".join(unplaced.names))
        yield LeftOut(span, cause, unplaced.more_input + unplaced.more_output)


def _has_calls_of_its_time(span: Span, traces: Traces, stored: StoredTraces) -> bool:
    """Return whether calls in the ledger are within a span or, as far as is known, around it."""
    times = stored.times.get(span.trace_id)
    if times is None:
        return False
    return times.has_within(span) or (_is_loose(span, traces) and times.has_around(span))


def _times_of_loose_calls(traces: Traces, keys: Collection[SpanKey]) -> dict[str, Times]:
    """Return the times of calls whose parents are not all in the files, by trace."""
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for key in keys:
        if _is_loose(traces.spans[key], traces):
            found[key[0]].append(traces.spans[key])
    return {trace_id: Times(calls) for trace_id, calls in found.items()}


def _is_loose(span: Span, traces: Traces) -> bool:
    """Return whether the files lack a span above it."""
    *_, last = _upwards(span, traces)
    return traces.parents.get(last, last) is not None
