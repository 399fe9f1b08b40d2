"""Spans from files of OTLP JSON, or made from logs, reduced to what a ledger may record."""

from __future__ import annotations

import base64
import binascii
import contextlib
import csv
import gzip
import io
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.known import span_names
from otel_limits.core.secrets import quote_value
from otel_limits.core.usage import NOTHING_REPORTED
from otel_limits.ledger.coding_agents import LOGGED, CallInLog, spans_of_logs
from otel_limits.ledger.litellm_logs import is_spend_log, spans_of_spend_log
from otel_limits.ledger.shapes import plain_attributes, present_names, resource_spans
from otel_limits.otel import semconv
from otel_limits.otel.kinds import (
    AGENT_NAMES,
    BOUNDARIES,
    MODEL_CALLS,
    OperationKind,
    ShownCall,
    first_text,
    kind_of,
    provider_of,
    shown_call,
    stated_usage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


# --- JSON documents in a file ---------------------------------------------------------------------
# One per line, printed over lines, in an array, or within log lines. A row of a CSV file is a
# document, too: an object with the names of the columns.

GZIP_MAGIC: Final = b"\x1f\x8b"
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""Windows may add it."""
UTF_16: Final = b"\xff\xfe"
"""Begins a file that PowerShell has written."""
TOKEN: Final = re.compile(rb'"(?:[^"\\]+|\\.)*"?|[{}]')
"""Braces, and strings, which may contain others. A string never spans lines."""
HEADER: Final = re.compile(rb'(?:\xef\xbb\xbf)?"?\w+"?(?:,"?\w+"?)+\r?\n?')
"""The first line of a CSV file: names without anything else, unlike JSON and logs."""
MAX_FIELD: Final = 2**31 - 1
"""Characters of a field of a CSV file, which may be a whole prompt."""
AROUND: Final = BYTE_ORDER_MARK + b"[], \t\r\n"
"""Characters that may separate objects."""


@dataclass(frozen=True, slots=True)
class JsonDocument:
    """A JSON object of a file, or a line without one."""

    line: int
    """The number of the line on which it begins."""
    text: str
    value: Any
    problem: str | None = None
    """Why it is no JSON object."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Iterable[bytes]]:
    """Open a file, which may be compressed whatever its name, or in UTF-16.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        begin = file.peek(2)[:2]  # without reading, since a pipe has no way back
        if begin == GZIP_MAGIC:
            with gzip.open(file, "rb") as unpacked:
                yield unpacked
        elif begin == UTF_16:
            text = io.TextIOWrapper(file, "utf-16", errors="replace")
            yield (line.encode() for line in text)
        else:
            yield file


def documents_in(lines: Iterable[bytes]) -> Iterator[JsonDocument]:
    """Find the JSON objects in lines.

    An array of objects is the objects, and the prefix of a logger is ignored. An
    object that is cut off ends where a line has a whole one. The rows of a CSV file are objects.
    """
    every = iter(lines)
    first = list(itertools.islice(every, 1))
    if first and HEADER.fullmatch(first[0]):
        yield from _rows_in(itertools.chain(first, every))
    else:
        yield from _objects_in(itertools.chain(first, every))


def _rows_in(lines: Iterable[bytes]) -> Iterator[JsonDocument]:
    """Read the rows of a CSV file, whose fields may have several lines."""
    csv.field_size_limit(MAX_FIELD)
    text = (line.decode("utf-8-sig", "replace") for line in lines)
    rows = csv.DictReader(text, restkey="(more)", strict=True)
    try:
        for row in rows:
            if None in row.values() or "(more)" in row:
                problem = f"It does not have {len(rows.fieldnames or ())} fields."
                yield JsonDocument(rows.line_num, "", None, problem)
            else:
                yield JsonDocument(rows.line_num, "", row)
    except csv.Error as error:
        yield JsonDocument(rows.line_num, "", None, str(error))


def _objects_in(lines: Iterable[bytes]) -> Iterator[JsonDocument]:
    held = Held()
    for number, line in enumerate(lines, start=1):
        whole = _whole(number, line)
        if whole is None:
            yield from held.added(number, line)
            continue
        if held.depth:
            yield held.rest()
        yield whole
    if held.depth:
        yield held.rest()


def _whole(number: int, line: bytes) -> JsonDocument | None:
    """Return a line that is an object by itself; in one that is printed over lines, none is."""
    if not line.startswith((b"{", BYTE_ORDER_MARK)):
        return None
    try:
        text = line.decode("utf-8-sig")
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # An empty object may be a part of a document that is printed without indentation.
    return JsonDocument(number, text, value) if value and isinstance(value, dict) else None


class Held:
    """The part of an object that has been read."""

    def __init__(self) -> None:
        """Begin between two objects."""
        self.depth = 0
        """Objects that are open."""
        self._line = 0
        self._parts: list[bytes] = []

    def rest(self) -> JsonDocument:
        """Give up what has been read: a whole object, or one without an end."""
        held = b"".join(self._parts)
        self.depth, self._parts = 0, []
        try:
            text = held.decode()
            return JsonDocument(self._line, text, json.loads(text))
        except (ValueError, RecursionError) as error:
            return JsonDocument(self._line, "", None, str(error))

    def added(self, number: int, line: bytes) -> Iterator[JsonDocument]:
        """Add a line, and yield the objects that end on it."""
        at, has_object = 0, self.depth > 0
        while self.depth or (at := line.find(b"{", at)) >= 0:
            if not self.depth:
                has_object, self._line = True, number
            end = self._end(line, at)
            self._parts.append(line[at:end])
            if self.depth:
                return
            yield self.rest()
            at = end
        if not has_object and line.strip(AROUND):
            yield JsonDocument(number, "", None, "There is no JSON object on it.")

    def _end(self, line: bytes, at: int) -> int:
        """Return where the open object ends on a line, or the end of the line."""
        for token in TOKEN.finditer(line, at):
            if token[0] == b"{":
                self.depth += 1
            elif token[0] == b"}":
                self.depth -= 1
                if not self.depth:
                    return token.end()
        return len(line)


# --- spans in a document --------------------------------------------------------------------------

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8
LAST_MICROSECOND: Final = 253_402_300_800_000_000
"""Start of the year 10000."""
# OTLP JSON has numbers for enums; exporters built on protobuf's JSON write their names.
ERROR_CODES: Final = (2, "STATUS_CODE_ERROR")

SCOPES: Final = frozenset(names.scope for names in span_names())
AGENT_SPANS: Final = tuple({prefix for names in span_names() for prefix in names.invocations})
"""Prefixes of the names of their invocation spans."""
LIFETIME_SUMS: Final = ("strands-agents",)
"""Providers in spans of frameworks that write the sums of an agent's whole life, as collectors may
drop the scope."""
TOOL_SPAN: Final = "execute_tool "
"""The beginning of the name of a tool's span: https://opentelemetry.io/docs/specs/semconv/gen-ai/,
read in November 2026."""

TOOL_NAMES: Final = ("gen_ai.tool.name", "tool.name", "traceloop.entity.name")
"""Of the conventions, of OpenInference and of OpenLLMetry."""
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_STATUS: Final = "gen_ai.tool.status"
SESSIONS: Final = ("session.id", "gen_ai.conversation.id")
CHOICE_EVENT: Final = "gen_ai.choice"
FINISH_REASON: Final = "finish_reason"

KEPT: Final = frozenset(
    {
        *AGENT_NAMES,
        *TOOL_NAMES,
        TOOL_CALL_ID,
        TOOL_STATUS,
        *SESSIONS,
        semconv.TASK_ID,
        semconv.STOP_REASON,
        semconv.STOP_ACTION,
        semconv.STOP_MESSAGE,
        semconv.MESSAGE_SYNTHETIC,
        semconv.LIMIT_NAME,
        semconv.LIMIT_VALUE,
        semconv.LIMIT_CONSUMED,
    }
)
"""Attributes that are kept. Prompts, arguments and results are in others."""

SpanKey = tuple[str, str]
"""Trace ID and span ID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The parts of a span that are kept."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    scope: str
    """The instrumentation that created it."""
    start_us: int
    end_us: int
    is_error: bool
    attributes: Mapping[str, Any]
    finish_reason: str | None
    kind: OperationKind
    is_tool: bool
    """Whether it shows a tool call."""
    call: ShownCall | None
    """The request to a provider that it shows, by any instrumentation."""
    total: ShownCall | None
    """The total of an agent, as a request. `None` if it may be that of its whole life."""
    stated: int
    """Tokens that it reports although it shows no request, such as the sum of an application."""
    unclear: Sequence[str]
    """The names of those tokens, if the meaning of all of them is unknown."""
    logged: CallInLog | None
    """The call in a log that it was made from."""

    @property
    def key(self) -> SpanKey:
        """Its identity."""
        return (self.trace_id, self.span_id)

    @property
    def parent(self) -> SpanKey | None:
        """The identity of its parent."""
        return (self.trace_id, self.parent_id) if self.parent_id is not None else None

    @property
    def is_agent(self) -> bool:
        """Whether it is an invocation."""
        return self.kind == "agent"

    @property
    def is_boundary(self) -> bool:
        """Whether it may request model calls, so that its enclosing spans are not the same call."""
        return self.kind in BOUNDARIES

    @property
    def is_possible_call(self) -> bool:
        """Whether it is a model call only if there is none within it."""
        return self.kind == "possible call"

    @property
    def is_use(self) -> bool:
        """Whether it shows no request, but tokens or a cost."""
        is_charged = self.logged is not None and self.logged.is_charged and self.call is None
        return self.stated > 0 or is_charged

    @property
    def tokens(self) -> int:
        """Tokens that it reports of its model call."""
        return 0 if self.call is None else self.call.tokens

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first of some attributes that is text."""
        return first_text(self.attributes, names)


@dataclass(frozen=True, slots=True)
class DocumentSpans:
    """The spans of one document."""

    spans: Sequence[Span]
    unfinished: int
    """Spans without an end, which are left out."""


def read_spans(document: JsonDocument, keys: Sequence[str]) -> DocumentSpans:
    """Read the spans of a document. Those of other signals have none.

    Args:
        document: A JSON object in a known form.
        keys: Attributes chosen for audit.

    Raises:
        ValueError: It is not in a known form. It counts completely or not at all.
    """
    if document.problem is not None:
        raise ValueError(document.problem)
    wanted = KEPT.union(keys)
    spans: list[Span] = []
    unfinished = 0
    try:
        found = present_names(document.value, document.text)
        resources = (
            spans_of_spend_log(found)
            if is_spend_log(found)
            else (*resource_spans(found), *spans_of_logs(found))
        )
        for resource in resources:
            for scope in _list_in(resource, "scopeSpans"):
                name = str((scope.get("scope") or {}).get("name", ""))
                for span in _list_in(scope, "spans"):
                    # Protobuf writes a time that is unset as 0, if at all.
                    if int(span.get("endTimeUnixNano") or 0):
                        spans.append(_span(span, wanted, name))
                    else:
                        unfinished += 1
    except (
        ArithmeticError, AttributeError, KeyError, TypeError, RecursionError,
    ) as error:  # fmt: skip
        raise ValueError(f"This is in no known form ({type(error).__name__}).") from None
    return DocumentSpans(spans, unfinished)


def _list_in(node: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return a list, which may be empty or absent.

    Raises:
        ValueError: It has other fields instead, whose spans would be imported as nothing.
    """
    others = node.keys() - {"resource", "scope", "schemaUrl"}
    if name not in node and others:
        raise ValueError(f"It has {', '.join(sorted(others))} instead of {name}.")
    found: Sequence[Any] = node.get(name, ())
    return found


def _span(span: Mapping[str, Any], wanted: frozenset[str], scope: str) -> Span:
    # Some exporters write an empty string for a span without a parent.
    parent = span.get("parentSpanId") or None
    logged = span.get(LOGGED)
    name, is_error = str(span.get("name", "")), span.get("status", {}).get("code") in ERROR_CODES
    attributes = plain_attributes(span.get("attributes", ()))
    events = [
        (str(each.get("name")), plain_attributes(each.get("attributes", ())))
        for each in span.get("events", ())
    ]
    # By name in any scope: collectors may drop or rename scopes.
    kind = "agent" if name.startswith(AGENT_SPANS) else kind_of(attributes, name)
    is_call = kind in MODEL_CALLS
    states = not is_call and scope not in SCOPES and provider_of(attributes) not in LIFETIME_SUMS
    usage = stated_usage(attributes, scope) if states else NOTHING_REPORTED
    unplaced, tokens = usage.unplaced, usage.usage.total
    is_total = kind == "agent" and tokens > 0
    return Span(
        trace_id=_identity(span["traceId"], TRACE_BYTES),
        span_id=_identity(span["spanId"], SPAN_BYTES),
        parent_id=_identity(parent, SPAN_BYTES) if parent else None,
        name=name,
        scope=scope,
        start_us=_time(span["startTimeUnixNano"]),
        end_us=_time(span["endTimeUnixNano"]),
        is_error=is_error,
        attributes={key: each for key, each in attributes.items() if key in wanted},
        finish_reason=_finish_reason(events),
        kind=kind,
        is_tool=kind == "tool",
        # Texts are read here only, and only as numbers; nothing of them is kept.
        call=shown_call(attributes, scope, events, is_error=is_error) if is_call else None,
        total=shown_call(attributes, scope, (), is_error=is_error) if is_total else None,
        stated=tokens or (0 if unplaced is None else unplaced.more_input + unplaced.more_output),
        unclear=() if tokens or unplaced is None else unplaced.names,
        # A field of this name in a file is something else.
        logged=logged if isinstance(logged, CallInLog) else None,
    )


def _time(nanoseconds: Any) -> int:
    """Return a time in microseconds: OTLP has none before 1970, and a ledger none after 9999."""
    found = int(nanoseconds) // 1_000
    if not 0 <= found < LAST_MICROSECOND:
        raise ValueError(f"{quote_value(nanoseconds)} is not a time in nanoseconds since 1970.")
    return found


def _identity(text: str, size: int) -> str:
    """Return an ID in hexadecimal; some exporters write base64, as in other OTLP fields."""
    if re.fullmatch(rf"[0-9a-fA-F]{{{2 * size}}}", text):
        return text.lower()
    with contextlib.suppress(binascii.Error):
        raw = base64.b64decode(text, validate=True)
        if len(raw) == size:
            return raw.hex()
    raise ValueError(f"{quote_value(text)} is not an ID of {size} bytes.")


def _finish_reason(events: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """Return how the agent loop ended, from an event of the agent's span."""
    reasons = (said.get(FINISH_REASON) for name, said in events if name == CHOICE_EVENT)
    return next((each for each in reasons if isinstance(each, str)), None)
