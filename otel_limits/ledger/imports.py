"""Import of past spend: exported spans become rows, by the same rules as live ones.

Model calls are counted once, not again in the sums of the spans above them. A model call within
another is the same call, seen by another instrumentation, and so is one in another trace that shows
the same response at the same time. Calls that the ledger recorded live are unchanged.

The functions that live recording uses decide the kind of a span, the call that it shows and the
meaning of its usage: `otel/kinds.py` and `usage/normaliser.py`. Deliberate differences: the outer
of nested calls counts, as all have ended; a span without an invocation counts under its trace;
responses are compared within a trace, not an invocation; unreported tokens are always estimated,
as no policy applies; a price is that of the time at which the span ended.
"""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.core.labels import clean
from otel_limits.core.limits import kind_of
from otel_limits.core.price import NO_QUOTE
from otel_limits.core.secrets import redact_value
from otel_limits.core.terms import billable_call
from otel_limits.core.wording import pluralize
from otel_limits.ledger.duplicate_calls import recorded_elsewhere
from otel_limits.ledger.otlp import (
    AGENT_SPANS,
    SESSIONS,
    TOOL_NAMES,
    TOOL_SPAN,
    TOOL_STATUS,
    Span,
    SpanKey,
    documents_in,
    opened,
)
from otel_limits.ledger.rows import (
    ATTRIBUTES,
    ENDING,
    FORMER_PRICE,
    IN_FORCE,
    INVOCATIONS,
    MODEL_CALLS,
    NOT_KNOWN,
    RECOUNTS,
    SAME_CALL_MICROSECONDS,
    SUPERSEDED,
    TOOL_CALLS,
    UNCOUNTED,
    Row,
    attribute_rows,
    is_estimate,
    name,
    picodollars,
    portions,
    signed_picodollars,
    state_of,
    time_of,
    tokens,
)
from otel_limits.ledger.schema import CALLS, INVOCATION_TABLE, RUNS
from otel_limits.ledger.traces import Traces, settle, stored_traces
from otel_limits.otel import semconv
from otel_limits.otel.kinds import AGENT_NAMES
from otel_limits.runs.conversations import conversation_hash
from otel_limits.usage.normaliser import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from otel_limits.core.price_lookup import Prices
    from otel_limits.core.wording import ProgressBar
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.traces import LeftOut, StoredTraces
    from otel_limits.otel.kinds import ShownCall

PORTION: Final = 2_000
SHOWN: Final = 3
"""Bad parts that are quoted; all are counted."""
DIVIDED: Final = (
    "jq -c '.resourceSpans[].scopeSpans[] as $each | $each.spans[] | "
    "{resourceSpans: [{scopeSpans: [$each + {spans: [.]}]}]}'"
)
"""A command that writes a document for each span."""
NO_AGENT: Final = "(no agent)"

NO_CALL_FOUND: Final = (
    "No model calls found in {}. A span is a model call if it has gen_ai.operation.name, "
    "openinference.span.kind, llm.request.type, langfuse.observation.type, mlflow.spanType or "
    "genkit:metadata:subtype, or two of these: a model, usage, and a name like `chat`. Metrics "
    "contain none, and logs those of Claude Code, Codex, Gemini CLI and LiteLLM."
)


@dataclass(slots=True)
class ImportResult:
    """The result of an import."""

    calls: int = 0
    invocations: int = 0
    tools: int = 0
    known_calls: int = 0
    spans: int = 0
    """Spans of any kind that were read."""
    documents: int = 0
    """JSON documents that were read, of any signal."""
    unfinished: int = 0
    """Spans without an end, which were left out."""
    left_out: Sequence[LeftOut] = ()
    """Spans with tokens that were not counted."""
    bad: list[str] = field(default_factory=list)
    """Parts that could not be read, and why."""
    large: list[str] = field(default_factory=list)
    """The places of documents that took much memory."""

    @property
    def has_no_call(self) -> bool:
        """Whether the input contained no model call at all, so it was probably the wrong file."""
        return not (self.calls or self.known_calls)

    def __str__(self) -> str:
        """Summarize it."""
        others = (
            f"{pluralize(self.invocations, 'invocation')} and {pluralize(self.tools, 'tool call')}."
        )
        parts = [f"Imported {pluralize(self.calls, 'model call')}, {others}"]
        if self.has_no_call and (self.spans or not self.bad):
            documents = pluralize(self.documents, "JSON document")
            parts = [NO_CALL_FOUND.format(f"{pluralize(self.spans, 'span')} of {documents}")]
        if self.known_calls:
            known = pluralize(self.known_calls, "model call was", "model calls were")
            parts.append(f"{known} already in the ledger.")
        parts += self._not_counted()
        if self.unfinished:
            spans = pluralize(
                self.unfinished, "span without an end was", "spans without an end were"
            )
            parts.append(f"{spans} skipped.")
        if self.large:
            parts.append(
                f"A document is read into memory as a whole, as were {', '.join(self.large)}. With "
                f"less memory, import the output of: {DIVIDED}"
            )
        if not self.bad:
            return " ".join(parts)
        bad = pluralize(len(self.bad), "part that cannot be read", "parts that cannot be read")
        parts.append(f"Skipped {bad}:")
        more = [f"and {len(self.bad) - SHOWN:,} more"] if len(self.bad) > SHOWN else []
        return "\n  ".join([" ".join(parts), *self.bad[:SHOWN], *more])

    def _not_counted(self) -> Iterator[str]:
        """Describe what was left out, by cause."""
        causes: defaultdict[str, list[LeftOut]] = defaultdict(list)
        for each in self.left_out:
            causes[each.cause].append(each)
        largest = sorted(causes, key=lambda cause: -sum(each.tokens for each in causes[cause]))
        for cause in largest[:SHOWN]:
            names = sorted({clean(each.span.name) for each in causes[cause]})
            more = ", …" if len(names) > SHOWN else ""
            rest = f"not counted, as {cause}: {', '.join(names[:SHOWN])}{more}."
            number, found = len(causes[cause]), sum(each.tokens for each in causes[cause])
            if found:
                spans = pluralize(number, "span reports", "spans report")
                yield f"{spans} {pluralize(found, 'token')} that are {rest}"
            else:
                yield f"{pluralize(number, 'span is', 'spans are')} {rest}"
        if len(causes) > SHOWN:
            others = [each for cause in largest[SHOWN:] for each in causes[cause]]
            tokens = pluralize(sum(each.tokens for each in others), "token")
            spans = pluralize(len(others), "more span reports", "more spans report")
            yield f"{spans} {tokens} that are not counted; otel-limits audit spend lists them."


def import_files(
    database: Database,
    files: Sequence[str],
    keys: Sequence[str],
    prices: Prices,
    work: ProgressBar,
    *,
    portion: int = PORTION,
) -> ImportResult:
    """Import the spans of files. Repeating it changes nothing.

    Args:
        database: The ledger.
        files: Spans or logs, as JSON or CSV, possibly compressed with gzip.
        keys: Attributes chosen for audit.
        prices: What the calls cost at their time.
        work: Reports progress.
        portion: The most rows of a transaction.

    Raises:
        LedgerError: A file cannot be read.
    """
    traces = Traces()
    for path in files:
        _read(Path(path), keys, traces, work)
    recorded = _recorded_live(database, traces.times())
    stored = stored_traces(database, traces)
    recorded |= recorded_elsewhere(database, traces.spans.values())
    done = ImportResult(
        bad=traces.bad,
        large=traces.large,
        documents=traces.documents,
        unfinished=traces.unfinished,
        spans=len(traces.parents),
    )
    # In portions, each a transaction: live processes that record wait for one at most.
    for rows in portions(_rows(traces, recorded, stored, keys, prices, done), portion):
        ids = {row["id" if table == INVOCATIONS else "invocation_id"] for table, row in rows}
        # In the same transaction, so totals agree with the calls in concurrent queries and after an
        # interrupted import.
        totals = [(RECOUNTS, {"id": each}) for each in sorted(ids)]
        changed = database.write([*rows, *totals])
        sent = sum(table == MODEL_CALLS for table, _ in rows)
        done.calls += changed.get(MODEL_CALLS, 0)
        # Rows that changed nothing came from an earlier import of the same file.
        done.known_calls += sent - changed.get(MODEL_CALLS, 0)
        done.invocations += changed.get(INVOCATIONS, 0)
        done.tools += changed.get(TOOL_CALLS, 0)
    return done


def _read(path: Path, keys: Sequence[str], traces: Traces, work: ProgressBar) -> None:
    """Read a file; what cannot be read is skipped."""
    number = 0
    try:
        with opened(path) as file:
            for document in work.through(documents_in(file)):
                number = document.line
                traces.add(document, keys, f"{path}, line {number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        # What was read before is kept: half a file is better than none, and the rest is reported.
        traces.bad.append(f"{path}, after line {number}: {error}")
    except OSError as error:
        raise LedgerError(f"{redact_value(str(path))} cannot be read: {error.strerror}.") from None


def _recorded_live(database: Database, wanted: Mapping[SpanKey, int]) -> set[SpanKey]:
    """Return which invocations and model calls the ledger recorded live, given their times."""
    found: set[SpanKey] = set()
    traces = sorted({trace_id for trace_id, _ in wanted})
    with database.reading() as connection:
        # SQLite allows 32,766 parameters in a statement, PostgreSQL 65,535.
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


# --- rows -----------------------------------------------------------------------------------------


def _rows(
    traces: Traces,
    recorded: set[SpanKey],
    stored: StoredTraces,
    keys: Sequence[str],
    prices: Prices,
    done: ImportResult,
) -> Iterator[tuple[str, Row]]:
    shown = list(traces.calls())
    keys_shown = {span.key for span, _, _ in shown}
    settled = settle(traces, keys_shown.union(recorded.intersection(traces.spans)), stored)
    done.left_out = settled.left_out
    for each in settled.superseded:
        trace_id, span_id = each.key
        row = {"trace_id": trace_id, "span_id": span_id, "invocation_id": each.invocation_id}
        yield SUPERSEDED, row
    yield from _rows_of_agents(traces, recorded, keys)
    loose = {s.trace_id for s, _, around in shown if not around and s.key not in recorded}
    yield from _rows_of_tools(traces, recorded, loose)
    # The agent itself is the invocation of its total.
    shown += [(span, call, [span, *_agents_above(span, traces)]) for span, call in settled.totals]
    # In order, as each portion adds up the invocations of its calls.
    for span, call, around in sorted(shown, key=_place):
        # A live invocation has counted its calls, including those that its spans show differently.
        if span.key in recorded or (around and around[0].key in recorded):
            done.known_calls += 1
        else:
            # A trace takes the place of the invocation: otherwise sums over invocations would miss
            # the call.
            if not around:
                yield INVOCATIONS, _trace_row(span)
            yield MODEL_CALLS, _call_row(span, call, around, prices)
    for left_out in settled.left_out:
        yield UNCOUNTED, _uncounted_row(left_out, _agents_above(left_out.span, traces))


def _rows_of_agents(
    traces: Traces, recorded: set[SpanKey], keys: Sequence[str]
) -> Iterator[tuple[str, Row]]:
    """Iterate over invocations."""
    for span in traces.spans.values():
        if span.is_agent and span.key not in recorded:
            yield INVOCATIONS, _invocation_row(span, _agents_above(span, traces))
            chosen = {key: str(span.attributes[key]) for key in keys if key in span.attributes}
            yield from ((ATTRIBUTES, row) for row in attribute_rows(_id(span), chosen))


def _rows_of_tools(
    traces: Traces, recorded: set[SpanKey], loose: Collection[str]
) -> Iterator[tuple[str, Row]]:
    """Iterate over tool calls of agents, and of traces that have model calls without an agent.

    Other tool calls without an agent may be a server's part of a call that an agent's trace has.
    """
    for span in traces.tools():
        around = _agents_above(span, traces)
        is_known = around[0].key in recorded if around else span.trace_id not in loose
        if not is_known:
            yield TOOL_CALLS, _tool_row(span, around)


def _agents_above(span: Span, traces: Traces) -> list[Span]:
    return [each for each in traces.above(span) if each.is_agent]


def _place(shown: tuple[Span, ShownCall, Sequence[Span]]) -> tuple[int, str, int]:
    """Sort key of a call: the start of its invocation, then its end."""
    span, _, around = shown
    first = around[0] if around else span
    return first.start_us, _id(first), span.end_us


def _id(span: Span) -> str:
    """Return the ID of an imported invocation, the same on every import."""
    return span.trace_id + span.span_id


def _owner(span: Span, around: Sequence[Span]) -> Row:
    """Return what links a call to its invocation; without an agent, to its trace."""
    # Only live invocations number their calls: imported ones are identified by their span.
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
    # Names of agent spans start with the operation: `invoke_agent researcher`.
    prefix = next((each for each in AGENT_SPANS if span.name.startswith(each)), "")
    return name(span.name.removeprefix(prefix).strip() or NO_AGENT)


def _invocation_row(span: Span, around: Sequence[Span]) -> Row:
    found = span.attributes
    session = span.first(SESSIONS)
    reason = found.get(semconv.STOP_REASON) or span.finish_reason
    limit = _text(found.get(semconv.LIMIT_NAME))
    kind = None if limit is None else kind_of(limit)
    cap, observed = found.get(semconv.LIMIT_VALUE), found.get(semconv.LIMIT_CONSUMED)
    return {
        **dict.fromkeys(ENDING),
        "id": _id(span),
        "root_id": _id(around[-1]) if around else _id(span),
        "parent_id": _id(around[0]) if around else None,
        "task_id": _text(found.get(semconv.TASK_ID)) or _id(span),
        "agent": _agent_name(span),
        "session_id": name(session) if session is not None else None,
        "conversation": _conversation_of([*reversed(around), span]),
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "source": "import",
        "blind": False,
        **dict.fromkeys(IN_FORCE),
        "started_us": span.start_us,
        "ended_us": span.end_us,
        "reason": name(str(reason or ("error" if span.is_error else NOT_KNOWN))),
        "action": name(str(found.get(semconv.STOP_ACTION, "none"))),
        "breach_limit": limit,
        "breach_cap": _text(cap),
        "breach_observed": _text(observed),
        # Spans have no unit, and this version may not know the limit.
        "breach_unit": None if kind is None else kind.unit,
        "halt": _text(found.get(semconv.STOP_MESSAGE)),
        "synthetic": found.get(semconv.MESSAGE_SYNTHETIC) is True,
    }


def _conversation_of(agents: Sequence[Span]) -> str | None:
    """Return the hash of a conversation, as of live invocations: the outermost agent has it.

    Args:
        agents: The agent, after those around it.
    """
    for span in agents:
        identity = span.attributes.get(semconv.CONVERSATION_ID)
        if identity:
            return conversation_hash(_agent_name(span), str(identity))
    return None


def _trace_row(span: Span) -> Row:
    """Return the invocation of calls without an agent, as queries add up invocations."""
    return {
        **dict.fromkeys(ENDING),
        **dict.fromkeys((*IN_FORCE, "parent_id", "session_id", "conversation", "span_id")),
        "id": span.trace_id,
        "root_id": span.trace_id,
        "task_id": span.trace_id,
        "agent": NO_AGENT,
        "trace_id": span.trace_id,
        "source": "import",
        "blind": False,
        "started_us": span.start_us,
        "ended_us": span.end_us,
        "reason": NOT_KNOWN,
        "action": "none",
    }


def _text(value: object) -> str | None:
    return None if value is None else name(str(value))


def _call_row(span: Span, call: ShownCall, around: Sequence[Span], prices: Prices) -> Row:
    record = call.record
    kind, usage, estimated = counted(
        record,
        call.input_estimate,
        lambda: call.answer_estimate,
        failed=call.failed,
        billed=not call.failed or call.answered,
    )
    sale = billable_call(call.model, call.provider, usage, None, call.terms, record)
    # Without tokens nothing is priced, and no price is missing.
    quote = prices.quote(sale, time_of(span.end_us)) if usage.total else NO_QUOTE
    return {
        **_owner(span, around),
        "at_us": span.end_us,
        "duration_us": span.end_us - span.start_us,
        "model": name(call.model),
        "provider": name(call.provider),
        "turn": None,
        "iteration": None,
        **tokens(usage),
        **tokens(record.reported, "reported_"),
        "reported_total_tokens": record.total,
        "state": state_of(kind, estimated=estimated),
        "estimated": is_estimate(usage, estimated=estimated),
        "price_pico": picodollars(quote.price),
        "cache_saved_pico": signed_picodollars(quote.cache_saved),
        "stated_pico": picodollars(quote.stated),
        "listed_pico": picodollars(quote.listed),
        "price_source": quote.source,
        "price_version": quote.version,
        "price_basis": sale.basis,
        "tier": name(sale.tier),
        "cache_write_1h_tokens": usage.cache_write_1h,
        **dict.fromkeys(("quota_operation", "quota_charges", "side", "after_tools", *FORMER_PRICE)),
    }


def _tool_name(span: Span) -> str:
    return str(span.first(TOOL_NAMES) or span.name.removeprefix(TOOL_SPAN) or "unknown")


def _tool_row(span: Span, around: Sequence[Span]) -> Row:
    status = span.attributes.get(TOOL_STATUS)
    failed = span.is_error or status not in (None, "success")
    return {
        **_owner(span, around),
        "at_us": span.end_us,
        "duration_us": span.end_us - span.start_us,
        "tool": name(_tool_name(span)),
        "status": "error" if failed else "success",
        "fingerprint": None,
        "turn": None,
        "breach_limit": None,  # a call that a limit refused has no span
    }


def _uncounted_row(left_out: LeftOut, around: Sequence[Span]) -> Row:
    span = left_out.span
    owner = _owner(span, [span, *around] if span.is_agent else around)
    return {
        **{key: owner[key] for key in ("trace_id", "span_id", "invocation_id", "root_id", "agent")},
        "at_us": span.end_us,
        "duration_us": span.end_us - span.start_us,
        "span": name(span.name),
        "cause": left_out.cause,
        "tokens": left_out.tokens,
    }
