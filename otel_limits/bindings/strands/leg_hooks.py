"""Hooks for legs, model calls and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from otel_limits.bindings.span_writer import write_warnings
from otel_limits.bindings.strands.answers import is_ours
from otel_limits.bindings.strands.approval import (
    is_unanswered,
    keep_task,
)
from otel_limits.bindings.strands.halting import apply_halt, apply_halt_if_due
from otel_limits.bindings.strands.invocations import StrandsInvocation, invocation_of, is_direct
from otel_limits.bindings.strands.marks import put_stop
from otel_limits.bindings.strands.nested_stops import put_delegated
from otel_limits.core.errors import limit_reached
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.policy import KILLED

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.hooks import (
        AfterInvocationEvent,
        BeforeInvocationEvent,
        BeforeModelCallEvent,
        MessageAddedEvent,
    )
    from strands.types.content import Message

    from otel_limits.core.errors import LimitReachedError
    from otel_limits.core.events import ActionTaken


@suppress_errors("binding")
def before_leg(event: BeforeInvocationEvent) -> None:
    """Begin a leg; the first one keeps what the invocation began with."""
    invocation, agent = invocation_of(event.agent), event.agent
    # `structured_output_async` (1.62) fires both events of an invocation without running the loop.
    # Inside a tool, the current invocation is that of the surrounding loop.
    if invocation is None or is_direct(agent):
        return
    # Strands fires the same event for each leg; for the first one `invocation` is already complete.
    if not invocation.run.part.cycles:
        return
    invocation.run.leg()
    invocation.begin_leg()


@suppress_errors("binding")
def keep_task_of_leg(event: AfterInvocationEvent) -> None:
    """Keep the task of a leg that ends with interrupts."""
    invocation = invocation_of(event.agent)
    if (
        invocation is not None
        and event.result is not None
        and event.result.stop_reason == "interrupt"
    ):
        invocation.run.measure_time()
        invocation.run.task.handoffs = invocation.run.handoffs.count
        keep_task(event.agent, invocation.run.task)


def after_leg(event: AfterInvocationEvent) -> None:
    """End a leg, and with the last one the invocation."""
    if (error := _end_leg(event)) is not None:
        raise error


@suppress_errors("binding")
def _end_leg(event: AfterInvocationEvent) -> LimitReachedError | None:
    """End a leg. One that was refused, or has an open question, is not resumed.

    Returns:
        The error to raise, if that is the action.
    """
    invocation = invocation_of(event.agent)
    if invocation is None or is_direct(event.agent):
        return None
    invocation.leg.batch = None
    invocation.drop_turns()  # a hook interrupted the turn before any tool ran
    invocation.run.calls.release_unused()
    # Otherwise a hook could resume forever: each further leg would be refused, too. It would also
    # replace the last answer of an invocation that was wrapped up.
    is_over = invocation.leg.is_refused or invocation.run.budget.wrapped_up
    if is_over or (event.resume is not None and is_unanswered(event)):
        event.resume = None
    if event.resume is None and invocation.run.freeze_outcome() and invocation.leg.message is None:
        return _report_late_kill(event, invocation)
    return None


def _report_late_kill(
    event: AfterInvocationEvent, invocation: StrandsInvocation
) -> LimitReachedError | None:
    """Report a kill that came after the answer, which stays unchanged."""
    result, run = event.result, invocation.run
    if result is None or invocation.leg.ending is None:
        return None
    action: ActionTaken = "raised" if run.policy.action == "raise" else "halted"
    apply_halt(event.agent, invocation, result.message, KILLED, action)
    put_stop(invocation.leg.ending, KILLED.reason)
    run.reason, result.stop_reason = KILLED.reason, cast("Any", KILLED.reason)
    return limit_reached(KILLED, run.stop(KILLED.reason)) if action == "raised" else None


@suppress_errors("binding")
def before_model(event: BeforeModelCallEvent) -> None:
    """Note that a response is requested, from the model or from a middleware."""
    invocation = invocation_of(event.agent)
    if invocation is not None and not event.cancel:
        invocation.leg.awaits_response = invocation.waits.is_asking = True


@suppress_errors("binding")
def message_added(event: MessageAddedEvent) -> None:
    """Count a turn, or tag the message that a halt left."""
    invocation, message = invocation_of(event.agent), event.message
    if invocation is None or message["role"] != "assistant":
        return
    # Other assistant messages are earlier responses, denials or halts.
    if not (invocation.leg.awaits_response and _is_response(invocation, message)):
        put_delegated(invocation, cast("Any", message))
        apply_halt_if_due(event.agent, invocation, message)
        return
    invocation.leg.awaits_response = invocation.waits.is_asking = False
    invocation.leg.response, invocation.leg.last_response = None, message
    run = invocation.run
    run.turn()
    if run.policy.warn_at or run.loops is not None or invocation.wrapping is not None:
        _look_at_turn(event.agent, invocation, message)


def _is_response(invocation: StrandsInvocation, message: Message) -> bool:
    """Return whether a message is a model's response.

    Strands writes metadata into each response; a hook may remove it from the object that the model
    stage passed on.
    """
    response = invocation.leg.response
    if "metadata" in message:
        return True
    if response is None or response.stop_reason == "cancelled":
        return False
    return message is response.message or response.stop_reason == "max_tokens"


def _look_at_turn(agent: Agent, invocation: StrandsInvocation, message: Message) -> None:
    """Apply limits that need each response added to the conversation."""
    if invocation.run.policy.warn_at:
        write_warnings(agent.trace_span, invocation.run.warn())
    if invocation.run.loops is not None:
        invocation.leg.text = "".join(block.get("text", "") for block in message["content"])
    if invocation.wrapping is not None and not any(
        "toolUse" in each for each in message["content"]
    ):
        is_halt = is_ours(message, invocation, invocation.wrapping)
        taken: ActionTaken = "halted" if is_halt else "wrapped_up"
        apply_halt(agent, invocation, message, invocation.wrapping, taken)
