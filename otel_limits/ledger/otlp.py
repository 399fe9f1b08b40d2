"""Spans from OTLP JSON lines, reduced to what a ledger may know of them."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.core.usage import NO_USAGE, NOTHING_REPORTED, Usage, UsageRecord
from otel_limits.otel import kinds, semconv
from otel_limits.otel.kinds import BOUNDARIES, OPERATION, first_text, kind_of
from otel_limits.usage.fields import is_usage
from otel_limits.usage.normaliser import completed, record_of_span
from otel_limits.usage.span_texts import MAX_DEPTH, estimates_of_span

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8
# Whole numbers are apart, as protobuf's JSON writes them as text.
LAST_MICROSECOND: Final = 253_402_300_800_000_000
"""The year 10000 begins."""
SIGNALS: Final = ("resourceSpans", "resourceMetrics", "resourceLogs", "resourceProfiles")
"""One of them is in every line of a file exporter."""

SCALARS: Final = ("stringValue", "doubleValue", "boolValue")
# OTLP JSON has numbers for enums; exporters built on protobuf's own JSON write their names.
ERROR_CODES: Final = (2, "STATUS_CODE_ERROR")

SCOPES: Final = frozenset(framework.spans.scope for framework in FRAMEWORKS)
AGENT_SPANS: Final = tuple(framework.spans.agent for framework in FRAMEWORKS)
"""How the names of their spans of invocations begin."""
EXECUTE_TOOL: Final = "execute_tool"
"""An operation as the conventions name it."""

TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_STATUS: Final = "gen_ai.tool.status"
SESSIONS: Final = ("session.id", "gen_ai.conversation.id")
CHOICE_EVENT: Final = "gen_ai.choice"
FINISH_REASON: Final = "finish_reason"

KEPT: Final = frozenset(
    {
        *kinds.KEPT,
        TOOL_NAME,
        TOOL_STATUS,
        *SESSIONS,
        semconv.STOP_REASON,
        semconv.STOP_ACTION,
        semconv.STOP_MESSAGE,
        semconv.LIMIT_NAME,
        semconv.LIMIT_VALUE,
        semconv.LIMIT_CONSUMED,
    }
)
"""Attributes that are looked at, with those about usage. Prompts, arguments and results are in
others."""

SpanKey = tuple[str, str]
"""Trace id and span id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What is kept of a span."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    scope: str
    """The instrumentation that made it."""
    start_us: int
    end_us: int
    is_error: bool
    attributes: Mapping[str, Any]
    finish_reason: str | None
    record: UsageRecord = NOTHING_REPORTED
    """What it says that a model call used."""
    usage: Usage = NO_USAGE
    """Tokens as they count, with estimates of what it does not say where it has the texts."""

    @property
    def key(self) -> SpanKey:
        """What identifies it."""
        return (self.trace_id, self.span_id)

    @property
    def parent(self) -> SpanKey | None:
        """What identifies the span that it is under."""
        return (self.trace_id, self.parent_id) if self.parent_id is not None else None

    @property
    def is_of_framework(self) -> bool:
        """False for the spans of other instrumentations, which may show a tool call again."""
        return self.scope in SCOPES

    @property
    def is_agent(self) -> bool:
        """Tell whether it is an invocation."""
        is_named = self.name.startswith(AGENT_SPANS)
        return is_named or kind_of(self.attributes, self.name) == "agent"

    @property
    def is_boundary(self) -> bool:
        """Tell whether it asks models by itself: what is around it is not the same call."""
        return self.is_agent or kind_of(self.attributes, self.name) in BOUNDARIES

    @property
    def is_model_call(self) -> bool:
        """Tell whether it is a request to a provider, whoever saw it."""
        return not self.is_agent and kind_of(self.attributes, self.name) == "model call"

    @property
    def is_tool(self) -> bool:
        """Tell whether it is a tool call of an agent."""
        return self.is_of_framework and self.attributes.get(OPERATION) == EXECUTE_TOOL

    def first(self, names: Sequence[str]) -> str | None:
        """The first of some attributes that is text."""
        return first_text(self.attributes, names)


def spans_in(line: str, keys: Sequence[str]) -> Iterator[Span]:
    """Read the spans of one line; a line of another signal has none.

    Args:
        line: What an OTLP JSON file exporter writes at once.
        keys: Attributes chosen for audit.

    Raises:
        ValueError: It is not OTLP JSON.
    """
    wanted = KEPT.union(keys)
    try:
        document = json.loads(line)
        # Any other JSON, such as an export of the ledger, would be imported as nothing at all.
        if document.keys().isdisjoint(SIGNALS):
            raise ValueError(f"It has none of {', '.join(SIGNALS)}.")
        for resource in document.get("resourceSpans", ()):
            for scope in resource.get("scopeSpans", ()):
                name = str(scope.get("scope", {}).get("name", ""))
                for span in scope.get("spans", ()):
                    found = _span(span, wanted, name)
                    yield _with_usage(found, span) if found.is_model_call else found
    except (
        ArithmeticError, AttributeError, KeyError, TypeError, RecursionError, binascii.Error,
    ) as error:  # fmt: skip
        raise ValueError(f"This is not OTLP JSON ({type(error).__name__}).") from None


def _span(span: Mapping[str, Any], wanted: frozenset[str], scope: str) -> Span:
    # Some exporters write an empty text for a span without a parent.
    parent = span.get("parentSpanId") or None
    return Span(
        trace_id=_identity(span["traceId"], TRACE_BYTES),
        span_id=_identity(span["spanId"], SPAN_BYTES),
        parent_id=_identity(parent, SPAN_BYTES) if parent else None,
        name=str(span.get("name", "")),
        scope=scope,
        start_us=_time(span["startTimeUnixNano"]),
        end_us=_time(span["endTimeUnixNano"]),
        is_error=span.get("status", {}).get("code") in ERROR_CODES,
        attributes=_attributes(span.get("attributes", ()), wanted),
        finish_reason=_finish_reason(span.get("events", ())),
    )


def _with_usage(span: Span, document: Mapping[str, Any]) -> Span:
    """Add what a model call used."""
    record = record_of_span(span.attributes, span.scope)
    usage = record.usage
    if record.sure != "measured":
        # Here, and only as numbers: nothing that anybody has said is kept any longer.
        sent, answer = estimates_of_span(
            _all_attributes(document),
            ((str(each.get("name")), _all_attributes(each)) for each in document.get("events", ())),
            kinds.model_of(span.attributes),
        )
        # One that failed is billed where it has answered something.
        if answer or not span.is_error:
            usage = completed(record, sent, answer)
    return replace(span, record=record, usage=usage)


def _all_attributes(document: Mapping[str, Any]) -> dict[str, Any]:
    listed = document.get("attributes", ())
    return {str(each["key"]): _held(each.get("value") or {}, MAX_DEPTH) for each in listed}


def _held(value: Mapping[str, Any], depth: int) -> Any:
    """What an attribute holds, be it structured: the conventions allow that for messages."""
    if depth == 0:  # before whoever nests for ever comes to an end of the stack
        return None
    if "arrayValue" in value:
        return [_held(each, depth - 1) for each in value["arrayValue"].get("values", ())]
    if "kvlistValue" in value:
        listed = value["kvlistValue"].get("values", ())
        return {str(each["key"]): _held(each.get("value") or {}, depth - 1) for each in listed}
    return _scalar(value)


def _time(nanoseconds: Any) -> int:
    """A time in microseconds: OTLP has none before 1970, and a ledger none after 9999."""
    found = int(nanoseconds) // 1_000
    if not 0 <= found < LAST_MICROSECOND:
        raise ValueError(f"{nanoseconds!r} is not a time in nanoseconds since 1970.")
    return found


def _identity(text: str, size: int) -> str:
    """An id in hexadecimal; some exporters write base64, as other OTLP fields have it."""
    if re.fullmatch(rf"[0-9a-fA-F]{{{2 * size}}}", text):
        return text.lower()
    raw = base64.b64decode(text, validate=True)
    if len(raw) != size:
        raise ValueError(f"{text!r} is not an id of {size} bytes.")
    return raw.hex()


def _attributes(listed: Sequence[Mapping[str, Any]], wanted: frozenset[str]) -> dict[str, Any]:
    return {
        each["key"]: _scalar(each.get("value") or {})  # protobuf leaves out what is unset
        for each in listed
        if each["key"] in wanted or is_usage(each["key"])
    }


def _scalar(value: Mapping[str, Any]) -> Any:
    # The JSON of protobuf has integers of 64 bits as text.
    if "intValue" in value:
        return int(value["intValue"])
    return next((value[kind] for kind in SCALARS if kind in value), None)


def _finish_reason(events: Sequence[Mapping[str, Any]]) -> str | None:
    """How the agent loop ended, as an event of the agent's span says."""
    for event in events:
        if event.get("name") == CHOICE_EVENT:
            found = _attributes(event.get("attributes", ()), frozenset({FINISH_REASON}))
            if isinstance(reason := found.get(FINISH_REASON), str):
                return reason
    return None
