"""OpenTelemetry contexts from span IDs."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context


def context_of(ids: Mapping[str, str], *, sampled: bool = True) -> Context:
    """Return a context whose current span has this `trace_id` and `span_id`."""
    span = SpanContext(
        trace_id=int(ids["trace_id"], 16),
        span_id=int(ids["span_id"], 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT),
    )
    return set_span_in_context(NonRecordingSpan(span), Context())
