"""Middleware for legs, which sets stop reasons, and for the responses that they request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from opentelemetry import trace
from strands.types.events import ModelStopReason
from strands.types.exceptions import ContextWindowOverflowException

from otel_limits.bindings.admission import (
    halt_from_error,
    is_halted_by_vendor,
    limits_run,
    note_refusal,
    settle_call,
)
from otel_limits.bindings.gateways import chain_of
from otel_limits.bindings.model_call import ModelCallInProgress, enclosing_request
from otel_limits.bindings.strands.halting import (
    RefusedError,
    apply_halt_if_due,
    cancelled_answer,
    end_quietly,
    ending_as_last,
    halt_message,
    open_after,
    with_text,
)
from otel_limits.bindings.strands.invocations import (
    STATES,
    StrandsInvocation,
    invocation_of,
    is_of_another,
    question,
)
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
from otel_limits.bindings.strands.requests import call_by_context, redescribe
from otel_limits.bindings.waits import InvocationEndedError, PendingWaits, Wait
from otel_limits.core.errors import LimitReachedError, limit_reached
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.texts import not_run_note
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.registry import ENCLOSING_CALL, EnclosingCall
from otel_limits.runs.run import Group, Run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from strands.agent.agent import Agent
    from strands.middleware import InvokeModelContext, MiddlewareNext
    from strands.types.content import Message

    from otel_limits.core.policy import Verdict

    Next = MiddlewareNext[Any, Any]
    Events = AsyncGenerator[Any, None]


# --- a leg ----------------------------------------------------------------------------------------

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
        return waits.is_asking

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
        leg.is_followed = followed.waits.is_asking = False
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


# --- requests -------------------------------------------------------------------------------------

UNKNOWN: Final = "unknown"


@dataclass(eq=False)
class StrandsRequest(ModelCallInProgress):
    """A request of a loop or of a model."""

    invocation: StrandsInvocation | None
    content: object = field(default=None, kw_only=True)
    """The content of the request, to estimate its tokens."""
    inner: StrandsRequest | None = field(default=None, kw_only=True)
    """The request within this one that is its call."""
    is_shared: bool = field(default=False, kw_only=True)
    """True if there are further requests within, each a separate call."""

    def gives_call_to(self, request: StrandsRequest) -> bool:
        """Return whether a request within this one is its call, and describe that by it.

        Usage has the format of the inner model's vendor. The ID of the outer model is kept, as the
        policy file may have a price for it.
        """
        if self.inner is not None:
            self.is_shared = True
            if self.inner.has_ended:
                settle_call(self.run, self.calls[0])
            return False
        self.inner = request
        if request.model is not self.model:
            self._redescribe(request)
        return True

    @suppress_errors("binding")
    def _redescribe(self, request: StrandsRequest) -> None:
        redescribe(self.calls[0], request.model, request.content)

    def count_turn(self, number: int, call: InFlightCall, error: BaseException | None) -> None:
        """Do nothing: a hook counts a response that is added to the conversation."""

    def text_of(self, answer: ModelStopReason) -> str:
        """Return the text of a response."""
        return "".join(block.get("text", "") for block in answer.message["content"])

    def tools_of(self, answer: ModelStopReason) -> Iterable[tuple[str, str, object]]:
        """Return the tools that a response requests."""
        for block in answer.message["content"]:
            if (use := block.get("toolUse")) is not None:
                yield use["toolUseId"], use["name"], use["input"]

    def halted(self, verdict: Verdict, cause: BaseException | None) -> NoReturn:
        """Leave the loop with our exception: the agent's stage answers for the model."""
        invocation = self.invocation
        assert invocation is not None  # side calls are never halted
        invocation.verdict, invocation.wrapping = verdict, None
        end_quietly(trace.get_current_span())
        raise RefusedError from cause

    def asked(self, verdict: Verdict) -> NoReturn:
        """Leave the loop with an interrupt of Strands."""
        end_quietly(trace.get_current_span())
        raise question(verdict, self.run.invocation)


# --- a model call ---------------------------------------------------------------------------------


@dataclass(eq=False)
class LoopRequest(StrandsRequest):
    """A response that an agent's loop requests, through our stage.

    Middleware within the stage may send several requests for it, or none. Each is a `SentRequest`,
    the first of which is this call.
    """

    context: InvokeModelContext = field(kw_only=True)
    failure: Exception | None = field(default=None, kw_only=True)
    """The error of the last request that has failed."""
    has_streamed: bool = field(default=False, kw_only=True)
    """True if any model streamed a response."""

    def send(self, method: Any) -> Any:
        """Call what is within the stage, unless the agent was cancelled while the call waited."""
        invocation = self.invocation
        assert invocation is not None  # it is of a loop
        if invocation.gate is not None and invocation.verdict is None and invocation.is_cancelled:
            return _cancelled()  # which Strands would still send
        events = method(self.context)
        return events if invocation.wrapping is None else ending_as_last(events, invocation)

    def add_note(self, note: str) -> None:
        """Add a sentence to the messages, in a copy that is sent only."""
        self.context = self.context.replace(messages=with_note(self.context.messages, note))

    def remove_tools(self, note: str) -> None:
        """Declare no tools, and write earlier calls as texts."""
        messages = with_note(without_tools(self.context.messages), note)
        self.context = replace(
            self.context,
            messages=messages,
            tool_specs=[],
            tool_choice=None,
            structured_output_model=None,
        )

    def note_sent(self) -> None:
        """Do nothing: each request within notes that, and the loop shows its cycles itself."""

    def gives_call_to(self, request: StrandsRequest) -> bool:
        """Give the call to a request within, possibly of a model that a middleware has chosen."""
        if request.model is not self.model and self.inner is None:
            self.calls[0].model = UNKNOWN
        return StrandsRequest.gives_call_to(self, request)

    def note_answer(self, answer: ModelStopReason) -> None:
        """Note the response for the hook that sees it added to the conversation."""
        invocation = self.invocation
        assert invocation is not None
        invocation.leg.response, invocation.leg.has_overflowed, invocation.waits.is_asking = (
            answer,
            False,
            False,
        )
        if self.inner is None and self.has_streamed:
            # By a class that is not patched, such as a proxy or a mock: only its answer is known.
            note_answer(self.calls[0], answer.usage, answer.message)

    def note_failure(self, error: BaseException) -> None:
        """Note an overflow, from which the loop may recover."""
        if self.invocation is not None:
            self.invocation.leg.has_overflowed = isinstance(error, ContextWindowOverflowException)

    async def settle(self, error: BaseException | None = None) -> None:
        """Count calls that are still open: a cancelled stream may be left without being closed."""
        if not (self.has_ended or self.inner or self.has_streamed):
            # A middleware answered, e.g. from a cache, or failed.
            self.unsent.append(self.calls[0])
        await StrandsRequest.settle(self, error)

    @suppress_errors("binding")
    def verdict_after(self, error: BaseException) -> Verdict | None:
        """Return the halt if the calls were ended, or were the last ones and failed.

        An error of inner middleware is different: it may be a question to a human, or a bug.
        """
        is_ours = isinstance(error, InvocationEndedError)
        if not is_ours and all(each is not self.failure for each in chain_of(error)):
            return None
        return StrandsRequest.verdict_after(self, error)


async def _cancelled() -> Events:
    yield cancelled_answer()


def model_stage(context: Any, next_fn: Next) -> Events:
    """Track a model call of an invocation in progress. Pass anything else through."""
    request = _requested(context)
    return next_fn(context) if request is None else _follow_response(request, next_fn)


async def _follow_response(request: LoopRequest, next_fn: Next) -> Events:
    """Follow a response from its admission to its end, as `model_call.streamed` does.

    Not by that, as nothing is sent here: the requests within end with a deadline or a kill, and
    most events only pass, each token of a stream among them.
    """
    if (refusal := await request.admit()) is not None:
        request.refused(refusal)
    events: Any = None
    error: BaseException | None = None
    try:
        events = request.send(next_fn)
        while True:
            # Set only while the inner part runs: between events, the reader's code runs.
            token = ENCLOSING_CALL.set(request.within)
            try:
                event = await anext(events)
            except StopAsyncIteration:
                break
            finally:
                ENCLOSING_CALL.reset(token)
            if type(event) is ModelStreamChunkEvent:
                request.has_streamed = True
            elif type(event) is ModelStopReason:
                request.read_answer(event)
            yield event
    except BaseException as failure:
        error = failure
        await request.settle(error)
        if (verdict := request.verdict_after(error)) is not None:
            request.end_by(verdict, error)
        raise
    finally:  # also if the reader stops early: later steps of the loop may depend on it
        try:
            if events is not None:
                await events.aclose()
        finally:
            await request.settle(error)


@suppress_errors("binding")
def _requested(context: InvokeModelContext) -> LoopRequest | None:
    """Describe the response that a loop requests.

    Its call is admitted when the response is read, as a middleware may prepare several and read
    none, and counted when it is sent.
    """
    invocation = invocation_of(context.agent)
    # A deep copy of the agent's middleware has this handler twice; only the outer one is active.
    if invocation is None or isinstance(enclosing_request(invocation.run), LoopRequest):
        return None
    invocation.leg.awaits_response = True
    call = call_by_context(context, STATES.of(context.agent).tokens) or InFlightCall(UNKNOWN)
    call.forces_output = invocation.only_forces(context)
    call.is_traced = True  # by Strands
    request = LoopRequest(
        invocation.run, invocation, [call], model=context.model, can_ask=True, context=context
    )
    # Without the call: spans of middleware show other calls, such as those of its clients.
    request.within = within = EnclosingCall()
    within.run, within.model, within.request = invocation.run, context.model, request
    return request


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
