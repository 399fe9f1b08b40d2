"""The forms in which tools write spans: each becomes resource spans of OTLP.

They get OTLP's fields here; what the fields mean is read in `otlp.py` alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias

from otel_limits.ledger.rows import EPOCH
from otel_limits.usage.span_texts import MAX_DEPTH

Node: TypeAlias = Mapping[str, Any]

SIGNALS: Final = ("resourceSpans", "resourceMetrics", "resourceLogs", "resourceProfiles")
"""Every document of OTLP has one of them."""
WRAPPERS: Final = ("trace", "result")
"""The fields around OTLP in answers of Tempo's second and Jaeger's third version."""

LOG_LINES: Final = ("log", "message")
"""The fields with a line of a program in the logs of Docker and Fluent Bit."""

OTHER_NAMES: Final = re.compile(r'"(?:resource|scope|instrumentation_library)_|"instrumentationLib')
"""Found in documents with former field names, or with those of the protocol's definition."""
FORMER_NAMES: Final = {
    "instrumentationLibrarySpans": "scopeSpans",
    "instrumentationLibrary": "scope",
}
"""Field names of the first versions of OTLP."""

SCALARS: Final = ("stringValue", "doubleValue", "boolValue")
"""Not integers: protobuf's JSON writes them as text."""
TRACE_DIGITS: Final = 32
MICROSECOND: Final = 1_000


def present_names(document: Any, text: str) -> Node:
    """Return a JSON document with the present names of its fields, without what is around it."""
    said = document.get("attributes")
    if isinstance(said, dict) and "event.name" in said and "context" not in document:
        # As OpenTelemetry's SDK for JavaScript prints log records. Gemini CLI writes such a file:
        # packages/core/src/telemetry/file-exporters.ts.
        records = [{"attributes": attributes_of(said)}]
        return {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
    for name in LOG_LINES:
        if isinstance(line := document.get(name), str) and line.startswith("{"):
            return present_names(json.loads(line), line)
    if OTHER_NAMES.search(text):
        document = _renamed(document)
    while (inner := next((document[name] for name in WRAPPERS if name in document), None)) and (
        isinstance(inner, dict)
    ):
        document = inner
    found: Node = document
    return found


def resource_spans(document: Node) -> Sequence[Node]:
    """Return the resource spans of a document of any known form.

    Raises:
        ValueError: It has none of the known forms.
    """
    if not document.keys().isdisjoint(SIGNALS):
        found: Sequence[Node] = document.get("resourceSpans", ())
        return found
    if "batches" in document:  # Tempo's first version
        batches: Sequence[Node] = document["batches"]
        return batches
    if "scopeSpans" in document:  # Java's OtlpJsonLoggingSpanExporter
        return [document]
    held = document.get("data", document)  # answers of Jaeger and Phoenix, files of MLflow
    listed = held if isinstance(held, list) else [held]
    spans = [span for each in listed for span in each.get("spans", [each])]
    known = [_of_span(span) for span in spans]
    if known and None not in known:
        return [each for each in known if each is not None]
    raise ValueError(f"It has none of {', '.join(SIGNALS)}, but keys {', '.join(document)}.")


def _of_span(span: Node) -> Node | None:
    """Return resource spans with a span of a known form."""
    if "context" in span and "start_time" in span:
        return in_scope("", [_of_console(span)])
    if "start_time_unix_nano" in span:
        return in_scope("", [_of_mlflow(span)])
    return _of_jaeger(span) if "traceID" in span else None


def _renamed(node: Any) -> Any:
    """Give each field its present name; attributes are not fields, but pairs of key and value."""
    if isinstance(node, list):
        return [_renamed(each) for each in node]
    if not isinstance(node, dict):
        return node
    renamed: dict[str, Any] = {}
    for name, value in node.items():
        present = re.sub("_([a-z])", lambda found: found[1].upper(), name)
        present, found = FORMER_NAMES.get(present, present), _renamed(value)
        # Some exporters wrote both names.
        both = isinstance(found, list) and present in renamed
        renamed[present] = [*renamed[present], *found] if both else found
    return renamed


def _of_console(span: Node) -> Node:
    """Return a span that Python's `ConsoleSpanExporter` has written. It writes no scope.

    Those of Phoenix's API and of MLflow 2 have the same form, but for the place of the status.
    """
    context, parent = span["context"], span.get("parent_id")
    code = span.get("status", {}).get("status_code") or span.get("status_code", "UNSET")
    return {
        "traceId": context["trace_id"].removeprefix("0x"),
        "spanId": context["span_id"].removeprefix("0x"),
        "parentSpanId": parent and parent.removeprefix("0x"),
        "name": span.get("name", ""),
        "startTimeUnixNano": nanoseconds(span["start_time"]),
        "endTimeUnixNano": span.get("end_time") and nanoseconds(span["end_time"]),
        "status": {"code": f"STATUS_CODE_{code}"},
        "attributes": attributes_of(span.get("attributes") or {}),
        "events": _events_of(span),
    }


def _of_mlflow(span: Node) -> Node:
    """Return a span of MLflow 3: entities/span.py, Span.to_dict."""
    return {
        "traceId": span["trace_id"],
        "spanId": span["span_id"],
        "parentSpanId": span.get("parent_span_id"),
        "name": span.get("name", ""),
        "startTimeUnixNano": span["start_time_unix_nano"],
        "endTimeUnixNano": span.get("end_time_unix_nano"),
        "status": span.get("status") or {},
        "attributes": attributes_of(span.get("attributes") or {}),
        "events": _events_of(span),
    }


def _events_of(span: Node) -> list[Node]:
    """Return the events of a span whose attributes are plain values."""
    return [
        {**event, "attributes": attributes_of(event.get("attributes") or {})}
        for event in span.get("events") or ()
    ]


def _of_jaeger(span: Node) -> Node:
    """Return a span of an answer of Jaeger, whose times are in microseconds."""
    tags = {tag["key"]: tag.get("value") for tag in span.get("tags") or ()}
    above = [each for each in span.get("references") or () if each.get("refType") == "CHILD_OF"]
    return in_scope(
        str(tags.get("otel.scope.name", tags.get("otel.library.name", ""))),
        [
            {
                "traceId": span["traceID"].zfill(TRACE_DIGITS),
                "spanId": span["spanID"],
                "parentSpanId": above[0]["spanID"] if above else None,
                "name": span.get("operationName", ""),
                "startTimeUnixNano": span["startTime"] * MICROSECOND,
                "endTimeUnixNano": (span["startTime"] + span["duration"]) * MICROSECOND,
                "status": {"code": f"STATUS_CODE_{tags.get('otel.status_code', 'UNSET')}"},
                "attributes": attributes_of(tags),
                "events": [_of_log(log) for log in span.get("logs") or ()],
            }
        ],
    )


def _of_log(log: Node) -> Node:
    """Return an event, which Jaeger has with its name among its fields."""
    fields = {each["key"]: each.get("value") for each in log.get("fields") or ()}
    return {"name": fields.get("event", ""), "attributes": attributes_of(fields)}


def in_scope(scope: str, spans: Sequence[Node]) -> Node:
    """Return resource spans of one scope."""
    return {"scopeSpans": [{"scope": {"name": scope}, "spans": spans}]}


def plain_attributes(pairs: Iterable[Mapping[str, Any]], depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return the values of attributes of OTLP by name."""
    # Protobuf leaves out what is unset.
    return {str(each["key"]): _plain(each.get("value") or {}, depth) for each in pairs}


def _plain(value: Mapping[str, Any], depth: int) -> Any:
    """Return an attribute's value, possibly structured: the conventions allow that for messages."""
    if depth == 0:  # against unbounded recursion
        return None
    if "arrayValue" in value:
        return [_plain(each, depth - 1) for each in value["arrayValue"].get("values", ())]
    if "kvlistValue" in value:
        return plain_attributes(value["kvlistValue"].get("values", ()), depth - 1)
    # Protobuf's JSON writes 64-bit integers as text.
    if "intValue" in value:
        return int(value["intValue"])
    return next((value[kind] for kind in SCALARS if kind in value), None)


def attributes_of(values: Node) -> list[Node]:
    """Return plain values as attributes of OTLP."""
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> Node:
    """Return a plain JSON value as one of OTLP."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": value}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {} if value is None else {"stringValue": str(value)}


def nanoseconds(time: str | int) -> int:
    """Return a time in ISO 8601 as nanoseconds since 1970, in which it may be written already."""
    if isinstance(time, int):
        return time
    # Python 3.10 does not read the letter.
    since = datetime.fromisoformat(time.replace("Z", "+00:00")) - EPOCH
    microseconds = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return microseconds * MICROSECOND
