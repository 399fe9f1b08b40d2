"""Spans of invocations and model calls, for frameworks that make none.

They follow the semantic conventions of OpenTelemetry for generative AI
(<https://opentelemetry.io/docs/specs/semconv/gen-ai/>). Without a tracer provider they cost nothing
and lead nowhere.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.price import OWN_COST, OWN_COST_BY
from otel_limits.otel import semconv
from otel_limits.otel.kinds import OWN_SPANS

if TYPE_CHECKING:
    from otel_limits.runs.calls import InFlightCall


@suppress_errors("span")
def start_agent_span(agent: str, conversation: str | None = None) -> trace.Span:
    """Start the span of an invocation, below the current one."""
    attributes = {semconv.OPERATION: OWN_SPANS.agent, semconv.AGENT_NAME: agent}
    if conversation is not None:
        attributes[semconv.CONVERSATION_ID] = conversation
    tracer = trace.get_tracer(OWN_SPANS.scope)
    return tracer.start_span(f"{OWN_SPANS.agent} {agent}", attributes=attributes)


@suppress_errors("span")
def end_span(span: trace.Span, error: BaseException | None = None) -> None:
    """End a span; with the status ERROR if an exception ended what it shows."""
    if error is not None:
        span.set_attribute(semconv.ERROR_TYPE, type(error).__qualname__)
        span.set_status(trace.StatusCode.ERROR, str(error))
    span.end()


@suppress_errors("span")
def write_stated_cost(span: trace.Span, call: InFlightCall) -> None:
    """Write the cost that a response states to the span of its call."""
    span.set_attributes(stated_cost_attributes(call))


def stated_cost_attributes(call: InFlightCall) -> dict[str, str]:
    """Return the cost that a response states, in digits, and the vendor; empty if it has none."""
    record = call.record
    stated = call.billable(record.usage).stated if record.billing else None
    if stated is None or stated.refused:
        return {}
    return {OWN_COST: f"{stated.amount:f}", OWN_COST_BY: stated.by}


@suppress_errors("span")
def write_call_span(
    parent: trace.Span, call: InFlightCall, seconds: float, error: BaseException | None = None
) -> None:
    """Write the span of a model call that has just ended.

    Not while it runs: another instrumentation may make one, of the framework or of the vendor's
    client, and two spans of one call would count its tokens twice at every reader.
    """
    if call.is_traced or not parent.is_recording():
        return
    usage = call.record.usage
    attributes: dict[str, Any] = {
        semconv.OPERATION: semconv.CHAT,
        semconv.REQUEST_MODEL: call.model,
        semconv.PROVIDER: call.provider,
    }
    if call.record.has_input:
        attributes[semconv.INPUT_TOKENS] = usage.input
    if call.record.has_output:
        attributes[semconv.OUTPUT_TOKENS] = usage.output
    attributes |= stated_cost_attributes(call)
    now = time.time_ns()
    span = trace.get_tracer(OWN_SPANS.scope).start_span(
        f"{semconv.CHAT} {call.model}",
        context=trace.set_span_in_context(parent),
        kind=trace.SpanKind.CLIENT,
        attributes=attributes,
        start_time=now - int(seconds * 1e9),
    )
    context = span.get_span_context()
    call.span_id = call.span_id or trace.format_span_id(context.span_id)
    end_span(span, error)
