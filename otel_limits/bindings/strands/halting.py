"""Applies halts to an agent's conversation and span."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from opentelemetry import trace
from strands.interrupt import Interrupt, InterruptException

from otel_limits.bindings.span_writer import write_halt
from otel_limits.bindings.strands.answers import is_ours
from otel_limits.bindings.strands.marks import SPANS, mark
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.otel.semconv import MODEL_CALL_PREFIXES as CALL_PREFIXES

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.types.content import Message

    from otel_limits.bindings.strands.invocations import StrandsInvocation
    from otel_limits.core.events import ActionTaken
    from otel_limits.core.policy import Verdict


class RefusedError(InterruptException):
    """Carries a halt from the model stage to the agent stage.

    It is an interrupt because those pass through the loop without being wrapped or logged, and
    without an `AfterModelCallEvent`: no model was called.
    """

    def __init__(self) -> None:
        """Create an interrupt with placeholder values."""
        super().__init__(Interrupt(id="otel_limits", name="otel_limits"))


@suppress_errors("span")
def end_quietly(span: trace.Span | None) -> None:
    """End the span of a refused call with status OK, before Strands ends it as an error."""
    if span is None or not span.is_recording():
        return
    name = getattr(span, "name", "")
    if name == SPANS.cycle or name.startswith(CALL_PREFIXES):
        # OpenTelemetry ignores any status after OK, and any end after the first, so the error that
        # Strands writes for the refusal has no effect.
        span.set_status(trace.StatusCode.OK)
        span.end()


def apply_halt(
    agent: Agent,
    invocation: StrandsInvocation,
    message: Message,
    verdict: Verdict,
    action: ActionTaken,
) -> None:
    """Publish the halt and annotate its message and span."""
    # First, as the stop in the message reads action and verdict from the run.
    invocation.run.halt(verdict, action)
    invocation.run.note_halt(invocation.run.sentence, verdict)
    invocation.leg.message = message
    stop = invocation.run.stop(verdict.reason)
    synthetic = is_ours(message, invocation, verdict)
    mark(cast("Any", message), stop, synthetic=synthetic)
    write_halt(agent.trace_span, verdict, invocation.run, synthetic=synthetic)


@suppress_errors("binding")
def apply_halt_if_due(agent: Agent, invocation: StrandsInvocation, message: Message) -> None:
    """Apply a pending halt if this is its message and it is not applied yet."""
    if invocation.leg.message is not None or invocation.verdict is None:
        return
    if is_ours(message, invocation, invocation.verdict):
        action = invocation.verdict.action or invocation.run.policy.action
        taken: ActionTaken = "raised" if action == "raise" else "halted"
        apply_halt(agent, invocation, message, invocation.verdict, taken)
