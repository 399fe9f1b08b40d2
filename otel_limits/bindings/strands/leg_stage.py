"""The middleware for legs, which answers instead of the model, and sets stop reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from otel_limits.bindings.admission import (
    halt_from_error,
    is_halted_by_vendor,
    limits_run,
    note_refusal,
)
from otel_limits.bindings.gateways import chain_of
from otel_limits.bindings.strands.halting import (
    RefusedError,
    apply_halt_if_due,
    end_quietly,
    halt_message,
    open_after,
    with_text,
)
from otel_limits.bindings.strands.invocations import StrandsInvocation, invocation_of, is_of_another
from otel_limits.bindings.strands.marks import put_stop
from otel_limits.bindings.strands.private import (
    EventLoopStopEvent,
    ModelStreamChunkEvent,
    StartEventLoopEvent,
    StructuredOutputEvent,
    append_message,
)
from otel_limits.bindings.waits import InvocationEndedError, PendingWaits, Wait
from otel_limits.core.errors import LimitReachedError, limit_reached
from otel_limits.core.halt_texts import not_run_note
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.run import Group, Run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from strands.agent.agent import Agent
    from strands.middleware import MiddlewareNext
    from strands.types.content import Message

    Next = MiddlewareNext[Any, Any]
    Events = AsyncGenerator[Any, None]

# Events of a leg that show its progress.
MILESTONES: Final = frozenset((StartEventLoopEvent, StructuredOutputEvent, EventLoopStopEvent))


class LegWait(Wait):
    """A wait for the events of a whole leg, which still has to end when the invocation does.

    It is only interrupted while a response is requested, as tools are not.
    """

    # Interrupting the wait within it ends the leg more cleanly.
    grace_seconds = 0.02

    def may_begin_late(self) -> bool:
        """Interrupt it from within."""
        self.interrupt()
        return True

    def may_be_cut(self, waits: PendingWaits) -> bool:
        """Return whether a response is requested."""
        return waits.is_requesting

    def is_innermost(self, waits: PendingWaits) -> bool:
        """Return whether no wait within it can be interrupted."""
        return not any(each.is_waiting for each in waits.open if each is not self)


def agent_stage(context: Any, next_fn: Next) -> Events:
    """Track a leg of an invocation in progress. Pass anything else through."""
    invocation = invocation_of(context.agent)
    if invocation is None or invocation.leg.is_followed:
        return next_fn(context)
    # Deep copies of middleware may have our handlers twice.
    agent = cast("Agent", context.agent)
    return _follow_leg(agent, invocation, next_fn, context)


async def _follow_leg(
    agent: Agent, followed: StrandsInvocation, next_fn: Next, context: Any
) -> Events:
    """Replace the framework's stop reason by ours, and raise if that is the action."""
    leg, halted = followed.leg, False
    leg.is_followed = True
    open_parts: tuple[str, ...] = ()
    events, wait = next_fn(context), LegWait()
    wait.join(followed.waits)
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
            is_halted = leg.message is not None
            for each in with_text(event, followed, open_parts) if is_halted else (event,):
                yield each
    except Exception as error:
        invocation = invocation_of(agent)
        if invocation is None or not (
            _is_refused(invocation, error) or is_halted_by_vendor(invocation, error)
        ):
            followed.run.freeze_outcome()  # hooks that still run change nothing
            raise
        halted = True
        stop = await _answer_for_model(agent, invocation, context, error)
        for each in with_text(stop, followed, open_parts):
            yield each
    finally:
        # Now, as a hook may resume before anything else runs.
        leg.is_followed = followed.waits.is_requesting = False
        wait.close()
        await events.aclose()
    # Last, as the generator would otherwise end in another context.
    if halted and (raised := _raised(agent)) is not None:
        raise raised


@suppress_errors("binding")
def _raised(agent: Agent) -> LimitReachedError | None:
    """Return the error that the halt of a leg raises, if any; a hook may have resumed the leg."""
    invocation = invocation_of(agent)
    run = invocation and invocation.run
    if run and run.verdict and (run.raised or refused_to_loop(run) or _fails_node(run)):
        return limit_reached(run.verdict, run.stop(run.verdict.reason))
    return None


def _fails_node(run: Run) -> bool:
    """Return whether a halted node of a graph or swarm fails; its last answer would not."""
    is_halted = run.action in ("halted", "killed")
    return is_halted and run.policy.halted_node == "fail" and isinstance(run.parent, Group)


@suppress_errors("binding")
def _is_refused(invocation: StrandsInvocation, error: Exception) -> bool:
    """Return whether an error is our refusal, possibly wrapped by a middleware."""
    # The last if the loop requested a summary.
    ours = (RefusedError, InvocationEndedError, LimitReachedError)
    if invocation.verdict is not None and any(isinstance(each, ours) for each in chain_of(error)):
        return True
    if (verdict := halt_from_error(invocation, error)) is None:
        return False
    invocation.verdict, invocation.wrapping = verdict, None
    return True


@suppress_errors("binding")
def _track_progress(agent: Agent, event: object) -> bool:
    """Process a milestone of a leg. Return whether it is the end, by our halt."""
    invocation = invocation_of(agent)
    if invocation is None:
        return False
    if isinstance(event, EventLoopStopEvent):
        return bool(_stop(agent, invocation, event))
    if isinstance(event, StructuredOutputEvent):
        invocation.leg.has_output = True
        return False
    if invocation.leg.has_overflowed:  # a cycle after an overflow without retry is the recovery
        invocation.leg.has_overflowed = False
        invocation.run.reset_iterations()
    if invocation.run.unsampled:
        invocation.run.cycle()
    return False


@suppress_errors("binding")
def _stop(agent: Agent, invocation: StrandsInvocation, event: Any) -> bool:
    """Note the end of a leg. Return whether it was our halt."""
    reason, message, *_ = event["stop"]
    apply_halt_if_due(agent, invocation, message)
    verdict = invocation.run.verdict if message is invocation.leg.message else None
    if verdict is not None:
        reason = verdict.reason
        put_stop(event, reason)
    invocation.run.reason, invocation.leg.ending = reason, event
    return verdict is not None


async def _answer_for_model(
    agent: Agent, invocation: StrandsInvocation, context: Any, error: Exception
) -> Any:
    """Answer instead of the model and end the leg.

    Args:
        agent: The halted agent.
        invocation: Its invocation.
        context: The context of its stage.
        error: How the leg has ended.
    """
    if isinstance(error, InvocationEndedError):
        # Strands ends its spans for errors only, not for this.
        end_quietly(context.invocation_state.get("event_loop_cycle_span"))
    assert invocation.verdict is not None  # set by every refusal
    # After a refused call, the last message is the user's, or tool results. With an answer after
    # it, every provider accepts the history when the conversation continues.
    message = halt_message(invocation, invocation.verdict)
    invocation.leg.awaits_response = False
    # If the refused call was made by a hook before the tools, they have no results.
    unanswered = results_for(agent.messages, not_run_note(invocation.verdict))
    if unanswered is not None and not is_of_another(agent, invocation, agent.messages[-1]):
        await append_message(agent, unanswered)
    await append_message(agent, message)
    request_state = context.invocation_state.get("request_state", {})
    stop = EventLoopStopEvent(
        invocation.verdict.reason, message, agent.event_loop_metrics, request_state
    )
    _stop(agent, invocation, stop)
    invocation.leg.is_refused = True
    return stop


# --- halts within another agent's loop ------------------------------------------------------------


@suppress_errors("binding")
def refused_to_loop(run: Run) -> bool:
    """Return whether another invocation's loop started a halted one, and note its refusal.

    The loop would use our message as an answer, e.g. as the summary of a conversation, so the halt
    is raised there. For a tool or the reader of a stream, the message is the agent's answer.
    """
    verdict, parent = run.verdict, getattr(run.parent, "state", None)
    if verdict is None or verdict.breach is None or not isinstance(parent, StrandsInvocation):
        return False
    if parent.run.finished or not any(each.is_waiting for each in parent.waits.open):
        return False  # its loop is idle, while other code of the application runs
    if not limits_run(verdict.breach, parent.run):
        return False
    note_refusal(parent.run, verdict)
    return parent.leg.batch is None


def results_for(messages: Sequence[Message], text: str) -> Message | None:
    """Return error results for the tools that the last message requests but that never ran."""
    ids = [
        block["toolUse"]["toolUseId"]
        for message in messages[-1:]
        if message["role"] == "assistant"
        for block in message["content"]
        if "toolUse" in block
    ]
    if not ids:
        return None
    results: Any = [
        {"toolResult": {"toolUseId": each, "status": "error", "content": [{"text": text}]}}
        for each in ids
    ]
    return {"role": "user", "content": results}
