"""Writes halts and warnings to the live spans of an agent."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from otel_limits.core.errors import limit_reached
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.otel import semconv

if TYPE_CHECKING:
    from opentelemetry import trace

    from otel_limits.core.events import LimitWarning
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.run import Run


@suppress_errors("span")
def write_halt(span: trace.Span | None, verdict: Verdict, run: Run, *, synthetic: bool) -> None:
    """Write the halt to the live agent span: attributes are frozen once it ends."""
    if span is None or not span.is_recording():
        return
    attributes: dict[str, Any] = {
        semconv.STOP_REASON: verdict.reason,
        semconv.STOP_ACTION: run.action,
        semconv.STOP_MESSAGE: run.sentence,
        semconv.MESSAGE_SYNTHETIC: synthetic,
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
