"""Admits model calls, and applies halts to an agent's conversation and span."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from opentelemetry import trace
from strands.interrupt import Interrupt, InterruptException

from otel_limits.bindings.strands.answers import is_ours
from otel_limits.bindings.strands.approval import can_be_extended, question
from otel_limits.bindings.strands.marks import mark
from otel_limits.bindings.strands.span_writer import end_quietly, write_halt
from otel_limits.core.internal_errors import report_suppressed, suppress_errors
from otel_limits.core.limits import KILLED_STOP_REASON, MAX_DURATION_STOP_REASON

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.middleware import InvokeModelContext
    from strands.types.content import Message

    from otel_limits.bindings.strands.invocations import LiveInvocation
    from otel_limits.core.events import ActionTaken
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.calls import InFlightCall

IMMEDIATE: Final = (MAX_DURATION_STOP_REASON, KILLED_STOP_REASON)
"""Reasons that halt immediately, without a last answer or a question."""


class RefusedError(InterruptException):
    """Carries a halt from the model stage to the agent stage.

    It is an interrupt because those pass through the loop without being wrapped or logged, and
    without an `AfterModelCallEvent`: no model was called.
    """

    def __init__(self) -> None:
        """Create an interrupt with placeholder values."""
        super().__init__(Interrupt(id="otel_limits", name="otel_limits"))


def admit_call(
    live: LiveInvocation, call: InFlightCall, context: InvokeModelContext | None
) -> None:
    """Reserve usage for a model call of the loop, or raise its refusal.

    Args:
        live: The invocation of the loop.
        call: The call.
        context: The context of the model stage; `None` for a further call within the stage, which
            cannot be a last answer.
    """
    try:
        refusal = _refusal(live, call, context)
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)
        return
    # Raised outside of the guard above, which would suppress it as an internal error.
    if refusal is not None:
        if (
            call.reservation is not None
        ):  # refused by a quota, which is checked after our own limits
            live.run.calls.release(call)
        end_quietly(trace.get_current_span())
        raise refusal
    live.side_verdict = None  # the loop continued despite a refused side call


def _refusal(
    live: LiveInvocation, call: InFlightCall, context: InvokeModelContext | None
) -> InterruptException | None:
    """Return the exception for a call that a limit or a quota refuses, else `None`."""
    # Used once: the hook that checks the quotas runs for each response of the loop, not for each
    # call that a middleware makes for it.
    against, live.against = live.against, None
    verdict = live.verdict or live.wrapping
    if verdict is not None:  # middleware and hooks get no further call after the last answer
        return _refused(live, verdict)
    may_be_last = context is not None and not live.run.budget.wrapped_up
    forces_output = context is not None and live.only_forces(context)
    verdict = live.run.calls.admit(call, turn=True, forces_output=forces_output, last=may_be_last)
    may_be_last = may_be_last and call.reservation is not None
    for each in (verdict, against):
        if each is not None:
            refusal = _refusal_reason(
                live, each, may_ask=context is not None, may_be_last=may_be_last
            )
            if refusal is not None:
                return refusal
    return None


def _refusal_reason(
    live: LiveInvocation, verdict: Verdict, *, may_ask: bool, may_be_last: bool
) -> InterruptException | None:
    """Return the exception for a verdict on a call that is not sent yet, by its action."""
    action = verdict.action or live.run.policy.action
    if action == "observe" and verdict.reason != KILLED_STOP_REASON:
        live.run.halt(verdict, "observed")
        return None
    # A time limit or a kill waits neither for a last answer nor for a human.
    if verdict.reason not in IMMEDIATE:
        if action == "ask" and may_ask and can_be_extended(verdict):
            return question(verdict, live.run.invocation)
        if action == "wrap_up" and may_be_last:
            live.wrapping = live.wrapping or verdict
            live.run.budget.wrapped_up = True
            return None
    return _refused(live, verdict)


def _refused(live: LiveInvocation, verdict: Verdict) -> RefusedError:
    """Refuse this call and all later ones of this leg."""
    live.verdict, live.wrapping = verdict, None
    return RefusedError()


def apply_halt(
    agent: Agent, live: LiveInvocation, message: Message, verdict: Verdict, action: ActionTaken
) -> None:
    """Publish the halt and annotate its message and span."""
    # First, as the stop in the message reads action and verdict from the run.
    live.run.halt(verdict, action)
    live.run.note_halt(live.run.sentence, verdict)
    live.marked = message
    stop = live.run.stop(verdict.reason)
    synthetic = is_ours(message, live, verdict)
    mark(cast("Any", message), stop, synthetic=synthetic)
    write_halt(agent.trace_span, verdict, live.run, synthetic=synthetic)


@suppress_errors("binding")
def apply_halt_if_due(agent: Agent, live: LiveInvocation, message: Message) -> None:
    """Apply a pending halt if this is its message and it is not applied yet."""
    if live.marked is not None or live.verdict is None:
        return
    if is_ours(message, live, live.verdict):
        action = live.verdict.action or live.run.policy.action
        taken: ActionTaken = "raised" if action == "raise" else "halted"
        apply_halt(agent, live, message, live.verdict, taken)


def ends_loop(live: LiveInvocation, verdict: Verdict) -> bool:
    """Return whether a verdict ends the loop after tools, not at the next model call."""
    action = verdict.action or live.run.policy.action
    if action == "observe" and verdict.reason != KILLED_STOP_REASON:
        live.run.halt(verdict, "observed")
        return False
    if live.wrapping is not None or verdict.reason in IMMEDIATE:
        return True
    # Both need the stage of the next model call, where a question can be raised, and a call can be
    # sent without tools.
    return action != "ask" and not (action == "wrap_up" and not live.wrapped_up)
