"""The middleware for the responses that an agent's loop requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from opentelemetry import trace
from strands.types.events import ModelStopReason
from strands.types.exceptions import ContextWindowOverflowException

from otel_limits.bindings.admission import settle_call
from otel_limits.bindings.extensions import log_question
from otel_limits.bindings.gateways import chain_of
from otel_limits.bindings.model_call import UNKNOWN_MODEL, ModelCallInProgress, enclosing_request
from otel_limits.bindings.strands.halting import (
    RefusedError,
    cancelled_answer,
    end_quietly,
    ending_as_last,
)
from otel_limits.bindings.strands.invocations import (
    STATES,
    StrandsInvocation,
    invocation_of,
    question,
)
from otel_limits.bindings.strands.notes import with_note, without_tools
from otel_limits.bindings.strands.private import ModelStreamChunkEvent
from otel_limits.bindings.strands.readers import note_answer
from otel_limits.bindings.strands.requests import call_by_context, redescribe
from otel_limits.bindings.waits import InvocationEndedError
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.current import ENCLOSING_CALL, EnclosingCall

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from strands.middleware import InvokeModelContext, MiddlewareNext

    from otel_limits.core.policy import Verdict

    Next = MiddlewareNext[Any, Any]
    Events = AsyncGenerator[Any, None]


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

    def accept_or_reject(
        self, number: int, call: InFlightCall, error: BaseException | None
    ) -> None:
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
        log_question(verdict, self.run.invocation)
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
        if self._was_cancelled():
            return _cancelled()  # which Strands would still send
        events = method(self.context)
        return events if invocation.wrapping is None else ending_as_last(events, invocation)

    @suppress_errors("binding")
    def _was_cancelled(self) -> bool:
        """Return whether the application has cancelled the agent while the call waited."""
        own = self.invocation
        return own is not None and own.gate is not None and not own.verdict and own.is_cancelled

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
            self.calls[0].model = UNKNOWN_MODEL
        return StrandsRequest.gives_call_to(self, request)

    def note_answer(self, answer: ModelStopReason) -> None:
        """Note the response for the hook that sees it added to the conversation."""
        invocation = self.invocation
        assert invocation is not None
        invocation.leg.response, invocation.leg.has_overflowed, invocation.waits.is_requesting = (
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
    call = call_by_context(context, STATES.of(context.agent).tokens) or InFlightCall(UNKNOWN_MODEL)
    call.forces_output = invocation.only_forces(context)
    call.is_traced = True  # by Strands
    request = LoopRequest(
        invocation.run, invocation, [call], model=context.model, can_ask=True, context=context
    )
    # Without the call: spans of middleware show other calls, such as those of its clients.
    request.within = within = EnclosingCall()
    within.run, within.model, within.request = invocation.run, context.model, request
    return request
