"""Spans of the SDK as the OTLP JSON lines that a collector's file exporter writes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


def line(spans: Iterable[ReadableSpan], *, ids: str = "hex") -> str:
    """Return one line with all of `spans`."""
    scopes: dict[str, list[Any]] = {}
    for span in spans:
        scope = span.instrumentation_scope
        scopes.setdefault(scope.name if scope else "", []).append(document(span, ids))
    listed = [{"scope": {"name": name}, "spans": each} for name, each in scopes.items()]
    return json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": listed}]}) + "\n"


def document(span: ReadableSpan, ids: str) -> dict[str, Any]:
    """One span."""
    context = span.get_span_context()
    assert context is not None
    return {
        "traceId": identity(context.trace_id, 16, ids),
        "spanId": identity(context.span_id, 8, ids),
        "parentSpanId": identity(span.parent.span_id, 8, ids) if span.parent else "",
        "name": span.name,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": attributes(span.attributes or {}),
        "events": [
            {"name": event.name, "attributes": attributes(event.attributes or {})}
            for event in span.events
        ],
        "status": {"code": span.status.status_code.value},
    }


def identity(number: int, size: int, ids: str) -> str:
    """An id as most exporters write it, or as some do."""
    raw = number.to_bytes(size, "big")
    return raw.hex() if ids == "hex" else base64.b64encode(raw).decode()


def attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes with their types."""
    return [{"key": key, "value": value(each)} for key, each in values.items()]


def value(each: Any) -> dict[str, Any]:
    """One typed value; none of any type for what is unset."""
    if each is None:
        return {}
    if isinstance(each, bool):
        return {"boolValue": each}
    if isinstance(each, int):
        return {"intValue": str(each)}
    if isinstance(each, float):
        return {"doubleValue": each}
    if isinstance(each, str):
        return {"stringValue": each}
    return {"arrayValue": {"values": [value(one) for one in each]}}
