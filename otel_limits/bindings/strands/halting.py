"""What a halt does: whether a call may go out, and what the agent is left with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from opentelemetry import trace
from strands.interrupt import Interrupt, InterruptException

from otel_limits.bindings.strands.asking import can_be_extended, question
from otel_limits.bindings.strands.framework import STRANDS
from otel_limits.bindings.strands.spans import end_quietly, write_halt
from otel_limits.core.faults import never_raises, note
from otel_limits.core.limits import KILLED_STOP_REASON, LIMITS, MAX_DURATION_STOP_REASON
from otel_limits.core.messages import halt_text
from otel_limits.core.policy import Verdict, verdict_of

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.middleware import InvokeModelContext
    from strands.types.content import Message

    from otel_limits.bindings.strands.invocations import Live
    from otel_limits.core.facts import ActionTaken

AT_ONCE: Final = (MAX_DURATION_STOP_REASON, KILLED_STOP_REASON)
"""Reasons that leave no time for a last answer or a question."""


class Refused(InterruptException):
    """Carries a halt from the model stage to the agent stage.

    It is an interrupt because those pass through the loop unwrapped and unlogged and without an
    `AfterModelCallEvent`: no model was called.
    """

    def __init__(self) -> None:
        """Fill in what the base class wants; nobody reads it."""
        super().__init__(Interrupt(id="otel_limits", name="otel_limits"))


def let_out(live: Live, context: InvokeModelContext | None) -> None:
    """Raise what keeps a model call from going out, if anything does.

    Args:
        live: The invocation whose loop asks.
        context: What its stage knows of the call; `None` for a further call within the stage,
            which has no room for a last answer.
    """
    try:
        refusal = _refusal(live, context)
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        note("binding", error)
        return
    if refusal is not None:
        end_quietly(trace.get_current_span())
        raise refusal


def _refusal(live: Live, context: InvokeModelContext | None) -> InterruptException | None:
    """Return what a limit or a quota does to this call, or `None`."""
    verdict = live.verdict
    if verdict is None and (judged := live.run.judge()) is not None:
        forces_output = context is not None and context.structured_output_model is not None
        verdict = _unless_yielding(judged) if forces_output else judged
    against, live.against = live.against, None
    for each in (verdict, against):
        refusal = _objection(live, each, context) if each is not None else None
        if refusal is not None:
            return refusal
    return None


def _objection(
    live: Live, verdict: Verdict, context: InvokeModelContext | None
) -> InterruptException | None:
    """Return what a verdict does to this call."""
    action = verdict.action or live.run.policy.action
    if action == "observe" and verdict.reason != KILLED_STOP_REASON:
        live.run.halt(verdict, "observed")
        return None
    if live.verdict is None and verdict.reason not in AT_ONCE and context is not None:
        if action == "ask" and can_be_extended(verdict):
            return question(verdict)
        if action == "wrap_up" and not live.run.wrapped_up and not context.tool_choice:
            live.wrapping = live.wrapping or verdict
            return None
    # From here on every call of this leg is refused, whatever a middleware tries.
    live.verdict, live.wrapping = verdict, None
    return Refused()


def _unless_yielding(verdict: Verdict) -> Verdict | None:
    """Drop the limits that yield to a call that only forces structured output."""
    return verdict_of(
        tuple(
            breach
            for breach in verdict.breaches
            if breach.limit not in LIMITS or not LIMITS[breach.limit].yields_to_output
        )
    )


def perform(
    agent: Agent, live: Live, message: Message, verdict: Verdict, action: ActionTaken
) -> None:
    """The halt is a fact now: tell it, mark its message and the live span."""
    live.run.halt(verdict, action)
    live.marked = message
    stop = live.run.stop(verdict.reason)
    synthetic = action != "wrapped_up"
    STRANDS.mark(cast("Any", message), stop, synthetic=synthetic)
    write_halt(agent.trace_span, verdict, live.run, synthetic=synthetic)


@never_raises("binding")
def perform_if_due(agent: Agent, live: Live, message: Message) -> None:
    """Perform the halt under way when this is its message, unless that was done."""
    if live.marked is not None or live.verdict is None:
        return
    # Strands makes the message out of our text; nothing else connects the two.
    if message["content"] == [{"text": halt_text(live.verdict)}]:
        action = live.verdict.action or live.run.policy.action
        taken: ActionTaken = "raised" if action == "raise" else "halted"
        perform(agent, live, message, live.verdict, taken)


def ends_loop(live: Live, verdict: Verdict) -> bool:
    """Tell whether a verdict ends the loop after tools, or waits for the next model call."""
    action = verdict.action or live.run.policy.action
    if action == "observe" and verdict.reason != KILLED_STOP_REASON:
        live.run.halt(verdict, "observed")
        return False
    if live.wrapping is not None or verdict.reason in AT_ONCE:
        return True
    return action != "ask" and not (action == "wrap_up" and not live.wrapped_up)
