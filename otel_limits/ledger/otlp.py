"""Spans from OTLP JSON, or made from logs, reduced to what a ledger may record."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.known import span_names
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
from otel_limits.otel.semconv import OPERATION

if TYPE_CHECKING:
    from otel_limits.ledger.documents import JsonDocument

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
EXECUTE_TOOL: Final = "execute_tool"
"""An operation of the conventions."""

TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_STATUS: Final = "gen_ai.tool.status"
SESSIONS: Final = ("session.id", "gen_ai.conversation.id")
CHOICE_EVENT: Final = "gen_ai.choice"
FINISH_REASON: Final = "finish_reason"

KEPT: Final = frozenset(
    {
        *AGENT_NAMES,
        TOOL_NAME,
        TOOL_STATUS,
        *SESSIONS,
        semconv.TASK_ID,
        semconv.STOP_REASON,
        semconv.STOP_ACTION,
        semconv.STOP_MESSAGE,
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
    """Whether it is a tool call of an agent."""
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
        # Only by the framework: other instrumentations may show a tool call again.
        is_tool=scope in SCOPES and attributes.get(OPERATION) == EXECUTE_TOOL,
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
        raise ValueError(f"{nanoseconds!r} is not a time in nanoseconds since 1970.")
    return found


def _identity(text: str, size: int) -> str:
    """Return an ID in hexadecimal; some exporters write base64, as in other OTLP fields."""
    if re.fullmatch(rf"[0-9a-fA-F]{{{2 * size}}}", text):
        return text.lower()
    with contextlib.suppress(binascii.Error):
        raw = base64.b64decode(text, validate=True)
        if len(raw) == size:
            return raw.hex()
    raise ValueError(f"{text!r} is not an ID of {size} bytes.")


def _finish_reason(events: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """Return how the agent loop ended, from an event of the agent's span."""
    reasons = (said.get(FINISH_REASON) for name, said in events if name == CHOICE_EVENT)
    return next((each for each in reasons if isinstance(each, str)), None)
