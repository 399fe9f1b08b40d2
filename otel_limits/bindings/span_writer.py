"""Writes halts and warnings to live spans, and makes spans where a framework has none."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, cast

from opentelemetry import trace

from otel_limits.core.errors import limit_reached
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.price import OWN_COST, OWN_COST_BY
from otel_limits.otel import semconv
from otel_limits.otel.kinds import OWN_SPANS

if TYPE_CHECKING:
    from otel_limits.core.events import LimitWarning
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.run import Run


@suppress_errors("span")
def write_halt(span: trace.Span | None, verdict: Verdict, run: Run) -> None:
    """Write the halt to the live agent span: attributes are frozen once it ends."""
    if span is None or not span.is_recording():
        return
    attributes: dict[str, Any] = {
        semconv.STOP_REASON: verdict.reason,
        semconv.STOP_ACTION: run.action,
        semconv.STOP_MESSAGE: run.sentence,
        semconv.MESSAGE_SYNTHETIC: run.synthetic,
        **limit_of(verdict),
    }
    # As attributes and as an event: backends filter spans by attributes and show events on a
    # timeline.
    span.set_attributes(attributes)
    span.add_event(semconv.HALT_EVENT, attributes)
    if run.raised:
        error = limit_reached(verdict, run.stop(verdict.reason))
        span.set_attribute(semconv.ERROR_TYPE, type(error).__qualname__)


@suppress_errors("span")
def write_end(span: trace.Span | None, run: Run, *, is_interrupted: bool = False) -> None:
    """Write the cost of an invocation, and its would-be halt, to its live span.

    Args:
        span: Its span.
        run: The invocation.
        is_interrupted: It ends with interrupts, whose answers continue its task.
    """
    if span is None or not span.is_recording():
        return
    attributes = cost_of(run)
    if is_interrupted or run.task.resumes:
        attributes[semconv.TASK_ID] = run.task.id
    if run.action == "observed" and run.verdict is not None:
        # Not as the stop reason, which is the framework's.
        attributes[semconv.STOP_WOULD_BE] = run.verdict.reason
        attributes[semconv.STOP_ACTION] = run.action
        attributes[semconv.STOP_MESSAGE] = run.sentence
        attributes |= limit_of(run.verdict)
    if attributes:
        span.set_attributes(attributes)


def limit_of(verdict: Verdict) -> dict[str, Any]:
    """Return attributes of the limit behind a verdict, if any."""
    if verdict.breach is None:
        return {}
    refusal = verdict.breach.quota
    quota = {} if refusal is None else dataclasses.asdict(refusal)
    return {
        semconv.LIMIT_NAME: verdict.breach.limit,
        semconv.LIMIT_VALUE: json_value(verdict.breach.cap),
        semconv.LIMIT_CONSUMED: json_value(verdict.breach.observed),
        **{semconv.QUOTA_PREFIX + name: json_value(each) for name, each in quota.items()},
    }


def cost_of(run: Run) -> dict[str, Any]:
    """Return attributes with the cost of model calls with a known price."""
    tally = run.part
    # Without a known price there is no cost: 0 would mean free.
    if not tally.cost and (tally.unpriced_calls or not tally.tokens):
        return {}
    attributes: dict[str, Any] = {semconv.COST: float(tally.cost)}
    if tally.unpriced_calls:  # the cost is incomplete
        attributes[semconv.UNPRICED_CALLS] = tally.unpriced_calls
    return attributes


@suppress_errors("span")
def write_warnings(span: trace.Span | None, warnings: tuple[LimitWarning, ...]) -> None:
    """Write each exceeded soft threshold to the live agent span."""
    for warning in warnings:
        if span is not None and span.is_recording():
            span.add_event(
                semconv.WARNING_EVENT,
                {
                    semconv.LIMIT_NAME: warning.level.limit,
                    semconv.LIMIT_VALUE: cast("Any", json_value(warning.level.cap)),
                    semconv.LIMIT_CONSUMED: cast("Any", json_value(warning.level.observed)),
                    semconv.WARNING_THRESHOLD: warning.threshold,
                },
            )


def json_value(value: object) -> object:
    """Return a JSON-compatible value."""
    # Money is a Decimal, which neither JSON nor spans support: as text it stays exact.
    return value if isinstance(value, (int, float)) else str(value)


# --- spans for frameworks that make none ----------------------------------------------------------
# They follow the semantic conventions of OpenTelemetry for generative AI
# (<https://opentelemetry.io/docs/specs/semconv/gen-ai/>). Without a tracer provider they cost
# nothing and lead nowhere.


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
