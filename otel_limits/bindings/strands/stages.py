"""Middleware stages for legs, which set stop reasons, and for model calls."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from opentelemetry import trace
from strands.types.events import ModelStopReason
from strands.types.exceptions import ContextWindowOverflowException

from otel_limits.bindings.admission import halt_from_error
from otel_limits.bindings.gateways import chain_of
from otel_limits.bindings.pending_waits import InvocationEndedError, Wait
from otel_limits.bindings.strands.answers import (
    as_cut,
    cancelled_answer,
    ending_as_last,
    halt_message,
    open_after,
    with_text,
)
from otel_limits.bindings.strands.halting import (
    RefusedError,
    admit_call,
    apply_halt_if_due,
    end_quietly,
)
from otel_limits.bindings.strands.invocations import STATES, LiveInvocation, is_of_another, live_of
from otel_limits.bindings.strands.marks import put_stop
from otel_limits.bindings.strands.notes import with_note, without_tools
from otel_limits.bindings.strands.private import (
    EventLoopStopEvent,
    ModelStreamChunkEvent,
    StartEventLoopEvent,
    StructuredOutputEvent,
    append_message,
)
from otel_limits.bindings.strands.readers import note_answer
from otel_limits.bindings.strands.requests import call_by_context
from otel_limits.bindings.strands.side import refused_to_loop, results_for
from otel_limits.bindings.vendor_budgets import is_halted_by_vendor
from otel_limits.core.errors import LimitReachedError, limit_reached
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.texts import budget_note, failed_remark, not_run_note, wrap_up_note
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.run import Group, Run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from strands.agent.agent import Agent
    from strands.middleware import InvokeModelContext, MiddlewareNext

    Next = MiddlewareNext[Any, Any]
    Events = AsyncGenerator[Any, None]

# Events of a leg that show its progress.
MILESTONES: Final = frozenset((StartEventLoopEvent, StructuredOutputEvent, EventLoopStopEvent))


# --- a leg ----------------------------------------------------------------------------------------


def agent_stage(context: Any, next_fn: Next) -> Events:
    """Track a leg of an invocation in progress. Pass anything else through."""
    live = live_of(context.agent)
    if live is None or live.staged:
        return next_fn(context)
    # Deep copies of middleware may have our handlers twice.
    agent = cast("Agent", context.agent)
    return _follow_leg(agent, live, next_fn, context)


async def _follow_leg(
    agent: Agent, followed: LiveInvocation, next_fn: Next, context: Any
) -> Events:
    """Replace the framework's stop reason by ours, and raise if that is the action."""
    followed.staged, halted = True, False
    open_parts: tuple[str, ...] = ()
    events, wait = next_fn(context), Wait()
    wait.join(followed.waits, is_leg=True)
    try:
        while True:
            try:
                event = await wait.next_of(events)
            except StopAsyncIteration:
                break
            # By type, because this runs for each token of a stream.
            if type(event) is ModelStreamChunkEvent:
                open_parts = open_after(event["event"]) or ()
            elif type(event) in MILESTONES:
                halted = bool(_track_progress(agent, event))
            is_halted = followed.marked is not None
            for each in with_text(event, followed, open_parts) if is_halted else (event,):
                yield each
    except Exception as error:
        live = live_of(agent)
        if live is None or not (_is_refused(live, error) or is_halted_by_vendor(live, error)):
            followed.run.freeze_outcome()  # hooks that still run change nothing
            raise
        halted = True
        stop = await _answer_for_model(agent, live, context, error)
        for each in with_text(stop, followed, open_parts):
            yield each
    finally:
        # Now, as a hook may resume before anything else runs.
        followed.staged = followed.waits.is_asking = False
        wait.close()
        await events.aclose()
    # Last, as the generator would otherwise end in another context.
    if halted and (raised := _raised(agent)) is not None:
        raise raised


@suppress_errors("binding")
def _raised(agent: Agent) -> LimitReachedError | None:
    """Return the error that the halt of a leg raises, if any; a hook may have resumed the leg."""
    live = live_of(agent)
    run = live and live.run
    if run and run.verdict and (run.raised or refused_to_loop(run) or _fails_node(run)):
        return limit_reached(run.verdict, run.stop(run.verdict.reason))
    return None


def _fails_node(run: Run) -> bool:
    """Return whether a halted node of a graph or swarm fails; its last answer would not."""
    is_halted = run.action in ("halted", "killed")
    return is_halted and run.policy.halted_node == "fail" and isinstance(run.parent, Group)


def _is_refused(live: LiveInvocation, error: Exception) -> bool:
    """Return whether an error is our refusal, possibly wrapped by a middleware."""
    # The last if the loop requested a summary.
    ours = (RefusedError, InvocationEndedError, LimitReachedError)
    if live.verdict is not None and any(isinstance(each, ours) for each in chain_of(error)):
        return True
    if (verdict := halt_from_error(live, error)) is None:
        return False
    live.verdict, live.wrapping = verdict, None
    return True


@suppress_errors("binding")
def _track_progress(agent: Agent, event: object) -> bool:
    """Process a milestone of a leg. Return whether it is the end, by our halt."""
    live = live_of(agent)
    if live is None:
        return False
    if isinstance(event, EventLoopStopEvent):
        return bool(_stop(agent, live, event))
    if isinstance(event, StructuredOutputEvent):
        live.has_output = True
        return False
    if live.overflowed:  # a cycle after an overflow without retry is the recovery
        live.overflowed = False
        live.run.reset_iterations()
    if live.run.unsampled:
        live.run.cycle()
    return False


@suppress_errors("binding")
def _stop(agent: Agent, live: LiveInvocation, event: Any) -> bool:
    """Note the end of a leg. Return whether it was our halt."""
    reason, message, *_ = event["stop"]
    apply_halt_if_due(agent, live, message)
    verdict = live.run.verdict if message is live.marked else None
    if verdict is not None:
        reason = verdict.reason
        put_stop(event, reason)
    live.run.reason, live.ending = reason, event
    return verdict is not None


async def _answer_for_model(
    agent: Agent, live: LiveInvocation, context: Any, error: Exception
) -> Any:
    """Answer instead of the model and end the leg.

    Args:
        agent: The halted agent.
        live: Its invocation.
        context: The context of its stage.
        error: How the leg has ended.
    """
    if isinstance(error, InvocationEndedError):
        # Strands ends its spans for errors only, not for this.
        end_quietly(context.invocation_state.get("event_loop_cycle_span"))
    assert live.verdict is not None  # set by every refusal
    # After a refused call, the last message is the user's, or tool results. With an answer after
    # it, every provider accepts the history when the conversation continues.
    message = halt_message(live, live.verdict)
    live.asked = False
    # If the refused call was made by a hook before the tools, they have no results.
    unanswered = results_for(agent.messages, not_run_note(live.verdict))
    if unanswered is not None and not is_of_another(agent, live, agent.messages[-1]):
        await append_message(agent, unanswered)
    await append_message(agent, message)
    request_state = context.invocation_state.get("request_state", {})
    stop = EventLoopStopEvent(live.verdict.reason, message, agent.event_loop_metrics, request_state)
    _stop(agent, live, stop)
    live.refused = True
    return stop


# --- a model call ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ModelPass:
    """One pass through the model stage, in which inner middleware may call models repeatedly."""

    live: LiveInvocation
    context: InvokeModelContext
    admitted: InFlightCall | None
    """The call that the stage has admitted, until it is sent."""
    calls: list[InFlightCall] = field(default_factory=list)
    failure: Exception | None = None
    """The error of the last failed call."""
    has_streamed: bool = False
    """True if any model streamed a response."""

    @suppress_errors("binding")
    def close(self, answer: ModelStopReason | None) -> None:
        """Settle open calls: a cancelled stream may be left without being closed."""
        calls, answered = self.live.run.calls, answer is not None
        admitted, self.admitted = self.admitted, None
        if admitted is not None and not self.calls and self.has_streamed:
            # By a class that is not patched, such as a proxy or a mock: only its answer is known.
            call = calls.open(admitted)
            if answer is not None:
                note_answer(call, answer.usage, answer.message)
            calls.settle(call, failed=not answered)
        elif admitted is not None:
            # Without a call and without a stream, a middleware answered, e.g. from a cache: no
            # model call is counted.
            calls.release(admitted)
        for call in self.calls:
            if call.is_open:
                calls.settle(call, failed=not answered, aborted=not answered)


def note_failure(model_pass: ModelPass | None, error: Exception) -> None:
    """Remember the error of a call, to distinguish it from errors of middleware."""
    if model_pass is not None:
        model_pass.failure = error


PASS: Final[contextvars.ContextVar[ModelPass | None]] = contextvars.ContextVar(
    "otel_limits_pass", default=None
)
"""The current task's pass through the model stage."""


def model_stage(context: Any, next_fn: Next) -> Events:
    """Track a model call of an invocation in progress. Pass anything else through."""
    # A deep copy of the agent's middleware has this handler twice; only the outer pass is active.
    live, within = live_of(context.agent), PASS.get()
    if live is None or (within is not None and within.live is live):
        return next_fn(context)
    return _answer_cancelled(live) if live.is_cancelled else _follow_call(live, next_fn, context)


async def _answer_cancelled(live: LiveInvocation) -> Events:
    """Answer a call that was cancelled while it waited: Strands would still send it."""
    live.asked, live.is_cancelled, live.waits.is_asking = True, False, False
    live.response = answer = cancelled_answer()
    yield answer


async def _follow_call(live: LiveInvocation, next_fn: Next, context: InvokeModelContext) -> Events:
    """Admit a model call, or refuse it before it costs anything.

    This happens when the response is read: a middleware may prepare several calls and make none.
    The call itself is counted when it is sent to the provider.
    """
    live.asked = True
    call = call_by_context(context, STATES.of(context.agent).tokens) or InFlightCall("unknown")
    admit_call(live, call, context)
    model_pass, answer = ModelPass(live, context, call), None
    events = next_fn(_with_notes(live, context) or context)
    if live.wrapping is not None:
        events = ending_as_last(events, live)
    try:
        while True:
            # Set only while the inner part runs: between events, the reader's code runs.
            token = PASS.set(model_pass)
            try:
                event = await anext(events)
            except StopAsyncIteration:
                break
            finally:
                PASS.reset(token)
            if type(event) is ModelStreamChunkEvent:
                model_pass.has_streamed = True
            elif type(event) is ModelStopReason:
                answer = live.response = event = (live.is_cut and as_cut(event, live)) or event
            yield event
    except Exception as error:
        if not _is_halt(model_pass, error):
            raise
        end_quietly(trace.get_current_span())
        raise RefusedError from error
    finally:  # also if the reader stops early: later steps of the loop may depend on it
        if answer is not None:
            live.overflowed = live.waits.is_asking = False
        model_pass.close(answer)
        await events.aclose()


@suppress_errors("binding")
def _with_notes(live: LiveInvocation, context: InvokeModelContext) -> InvokeModelContext | None:
    """Add notes for the model, which are not stored in the conversation."""
    if live.wrapping is not None:
        told = with_note(without_tools(context.messages), wrap_up_note(live.wrapping))
        return replace(
            context, messages=told, tool_specs=[], tool_choice=None, structured_output_model=None
        )
    if live.run.policy.budget_hints and (levels := live.run.levels()):
        return context.replace(messages=with_note(context.messages, budget_note(levels)))
    return None


@suppress_errors("binding")
def _is_halt(model_pass: ModelPass, error: Exception) -> bool:
    """Return whether a failed call is a halt, because it was the last.

    Errors of inner middleware are not: they may be a question to a human, or a bug.
    """
    live = model_pass.live
    live.overflowed = isinstance(error, ContextWindowOverflowException)
    if live.wrapping is None or all(each is not model_pass.failure for each in chain_of(error)):
        return False
    live.verdict = replace(live.wrapping, remark=failed_remark(error))
    live.wrapping = None
    return True
