"""Tracks every call to `Model.stream` and `Model.structured_output`."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace

from otel_limits.bindings.admission import admit_side_call, settle_call
from otel_limits.bindings.pending_waits import InvocationEndedError, Wait
from otel_limits.bindings.strands.attach import attach, has_stages
from otel_limits.bindings.strands.halting import admit_call
from otel_limits.bindings.strands.invocations import STATES, LiveInvocation
from otel_limits.bindings.strands.marks import HOST
from otel_limits.bindings.strands.readers import (
    model_id,
    note_chunk,
    note_failed_output,
    note_output,
    provider_of,
    schema_of,
    span_of_call,
)
from otel_limits.bindings.strands.request_terms import terms_of
from otel_limits.bindings.strands.requests import call_by_context, call_to
from otel_limits.bindings.strands.stages import PASS, note_failure
from otel_limits.core.errors import limit_reached
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.current import ENCLOSING_CALL, EnclosingCall, current_scope
from otel_limits.runs.run import Group

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from otel_limits.bindings.strands.stages import ModelPass
    from otel_limits.runs.run import Run

# --- wrappers of models ---------------------------------------------------------------------------


def track_stream(original: Any) -> Any:
    """Wrap a model's `stream`."""
    call = _as_function(original)

    @functools.wraps(original)
    def stream(model: Any, *args: Any, **kwargs: Any) -> Any:
        # Determined when the stream is requested: an application may pass the generator to another
        # task, whose context does not have this invocation.
        ask = functools.partial(call, model, *args, **kwargs)
        run, model_pass = _run_of_task(model), PASS.get()
        if run is None:
            return ask()
        if model_pass is not None and model_pass.live.run is not run:
            model_pass = None
        content = [*args, *(each for name, each in kwargs.items() if name in SENT)]
        passage = _tracked(run, model, content, note_chunk, model_pass)
        return ask() if passage is None else _follow(passage, ask)

    return stream


def track_structured_output(original: Any) -> Any:
    """Wrap a model's `structured_output`.

    Three providers call their own `stream` for it, which is the same call. The others use a
    separate API and do not expose the reported usage.
    """
    call = _as_function(original)
    is_coroutine = inspect.iscoroutinefunction(original)  # of a model that breaks the protocol

    @functools.wraps(original)
    def structured_output(model: Any, *args: Any, **kwargs: Any) -> Any:
        ask = functools.partial(call, model, *args, **kwargs)
        run = _run_of_task(model)
        if run is None:
            return ask()
        output_model = args[0] if args else kwargs.get("output_model")
        content = [*args[1:], *(each for name, each in kwargs.items() if name in SENT)]
        passage = _tracked(run, model, [content, schema_of(output_model)], note_output)
        if passage is None:
            return ask()
        if is_coroutine:
            return _result_of(_follow(passage, functools.partial(_only, ask)))
        return _follow(passage, ask)

    return structured_output


SENT: Final = frozenset(
    ("messages", "prompt", "system_prompt", "system_prompt_content", "tool_specs")
)
"""Arguments of `stream` and `structured_output` that are sent to the provider."""


async def _only(ask: Callable[[], Any]) -> AsyncGenerator[Any, None]:
    yield await ask()


async def _result_of(events: AsyncGenerator[Any, None]) -> Any:
    return [event async for event in events][-1]


def _as_function(method: Any) -> Callable[..., Any]:
    """Return a function that takes the model first, for any kind of method."""
    # Not always a function: another instrumentation may have replaced it by an object.
    if isinstance(method, FunctionType):
        return method
    bind = getattr(method, "__get__", lambda _, __: method)
    return lambda model, *args, **kwargs: bind(model, type(model))(*args, **kwargs)


@suppress_errors("binding")
def _run_of_task(model: Any) -> Run | None:
    """Return the invocation that a request of the current task counts for, if any."""
    scope, host = current_scope()[0], HOST.host
    if isinstance(scope, Group):  # a node that is not an agent calls a model
        if host is None or not host.is_on:
            return None
        scope = host.runs.run_of(scope, model_id(model))
    return None if scope is None or scope.released else scope


# --- one request ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request through a model's method. Such requests may be nested.

    A class that calls its parent's `stream`, or a model that calls another one, is one request.
    Further calls of such a model are separate requests.
    """

    run: Run
    model: Any
    content: object
    """The content of the request, to estimate its tokens."""
    note: Callable[[InFlightCall, Any], None]
    """Adds an event to the call."""
    model_pass: ModelPass | None = None
    """The pass of the agent's loop that makes the request, if any."""
    within: EnclosingCall = field(default_factory=EnclosingCall)
    around: EnclosingCall | None = None
    """The outer request that this one is part of."""
    is_whole: bool = False
    """True once the answer is complete, even if the stream is not."""

    def begin(self) -> EnclosingCall:
        """Admit and open the call, or join the outer one."""
        self.within.run, self.within.model = self.run, self.model
        around = ENCLOSING_CALL.get()
        if around is not None and around.call in self.run.calls.in_flight:
            if not around.is_carried:
                self._carry(around)
                return self.within
            self._share(around)
        call = self._describe() or InFlightCall("unknown")
        # Outside of every guard: its refusal must reach the caller.
        self._admit(call)
        # Repeated after an internal error: a call that is not opened is not counted.
        self.within.call = self._open(call) or self._open(call)
        return self.within

    @suppress_errors("binding")
    def _describe(self) -> InFlightCall | None:
        """Return the call that the stage has admitted, or describe a new one."""
        model, model_pass = self.model, self.model_pass
        if model_pass is None:
            return call_to(model, self.content)
        call, model_pass.admitted = model_pass.admitted, None
        call = call or call_by_context(
            model_pass.context, STATES.of(model_pass.context.agent).tokens
        )
        # A middleware may have chosen another model.
        if call is not None and model is not model_pass.context.model:
            call.model = "unknown"
            self._redescribe(call)
        return call

    def _redescribe(self, call: InFlightCall) -> None:
        """Update a call with the inner model, which sends the request.

        Usage has that vendor's format. The outer model's ID is kept, as the policy file may have a
        price for it.
        """
        if call.model == "unknown":
            call.model = model_id(self.model)
        call.provider = provider_of(self.model.__class__)
        call.terms = terms_of(self.model, self.content)

    @suppress_errors("binding")
    def _carry(self, around: EnclosingCall) -> None:
        around.is_carried = True
        self.around, self.within.call = around, around.call
        if around.call is not None and self.model is not around.model:  # a model that wraps another
            self._redescribe(around.call)

    @suppress_errors("binding")
    def _share(self, around: EnclosingCall) -> None:
        """Note a second request within an outer one, whose further events belong to both."""
        around.is_shared = True
        if around.is_over:
            settle_call(self.run, around.call)

    def _admit(self, call: InFlightCall) -> None:
        """Reserve usage for the call, or raise its refusal."""
        model_pass, live = self.model_pass, self.run.state
        if model_pass is not None:
            _attach_again(model_pass.live)
            if call.reservation is None:  # a repeated call of a middleware
                admit_call(model_pass.live, call, None)
        elif not self.run.finished and isinstance(live, LiveInvocation) and _attach_again(live):
            # Our stage is no longer in the agent's registry: this call is its loop's.
            live.asked = True
            admit_call(live, call, None)
        else:
            admit_side_call(self.run, call)

    @suppress_errors("binding")
    def _open(self, call: InFlightCall) -> InFlightCall:
        self.run.calls.open(call)
        if self.model_pass is not None:
            # The current span of a side call is that of a tool or of the calling code.
            call.span_id = span_of_call(self.run)
            self.model_pass.calls.append(call)
        else:
            context = trace.get_current_span().get_span_context()
            self.run.spans.mark_counted_within(context.span_id)
        return call

    @suppress_errors("binding")
    def note_event(self, event: Any) -> None:
        """Add an event to the call; an inner request has added the texts already."""
        within = self.within
        self.is_whole = self.is_whole or "messageStop" in event
        if within.call is None:
            return
        within.call.is_paused = True
        if within.is_shared:
            return
        if not within.is_carried or "metadata" in event:
            self.note(within.call, event)

    @suppress_errors("binding")
    def resume_reading(self) -> None:
        """Resume counting when the stream is read again."""
        if self.within.call is not None and self.within.call.is_paused:
            self.run.calls.resume(self.within.call)

    @suppress_errors("binding")
    def join(self, wait: Wait) -> None:
        """Add a wait to those of the invocation, which ends them."""
        live = self.run.state
        if self.around is None and isinstance(live, LiveInvocation) and not self.run.finished:
            wait.join(live.waits)

    def raise_if_ended(self, cut: InvocationEndedError) -> None:
        """Raise the halt reason to callers outside the agent loop.

        For the agent's loop the stream just ends, and its stage answers if it is incomplete.
        """
        if self.model_pass is not None:
            self.model_pass.live.is_cut = not self.is_whole
        else:
            verdict = self.run.state.verdict
            raise limit_reached(verdict, self.run.stop(verdict.reason)) from cut

    @suppress_errors("binding")
    def fail(self, error: Exception) -> None:
        """Settle a failed call: a middleware may repeat it without raising the error."""
        call = self.within.call
        if isinstance(error, NotImplementedError) and call is not None and not call.answered:
            self.run.calls.release(call)  # nothing was sent
        elif self.note is note_output and call is not None:
            note_failed_output(call, error)
        settle_call(self.run, call, error)
        if self.around is None:
            note_failure(self.model_pass, error)

    @suppress_errors("binding")
    def finish(self, *, answered: bool) -> None:
        """Settle the call, unless an outer request or the stage does."""
        call = self.within.call
        if self.around is not None:
            self.around.is_over = True
            if self.around.is_shared:
                settle_call(self.run, call)
        elif answered or self.model_pass is None:  # else the stage settles it
            settle_call(self.run, call)


_try_to_track = suppress_errors("binding")(TrackedRequest)


def _tracked(*known: Any) -> TrackedRequest | None:
    """Create a tracked request; repeated after an internal error."""
    return _try_to_track(*known) or _try_to_track(*known)


async def _follow(passage: TrackedRequest, ask: Callable[[], Any]) -> AsyncGenerator[Any, None]:
    """Admit a call, pass on its events, and settle it at the end."""
    within = passage.begin()
    answered, events, wait = False, None, Wait()
    passage.join(wait)
    try:
        # After admission, as a provider's `stream` may be a function that sends immediately.
        events = ask()
        chunks = aiter(events)
        while True:
            passage.resume_reading()
            token = ENCLOSING_CALL.set(within)
            try:
                chunk = await wait.next_of(chunks)
            except StopAsyncIteration:
                answered = True
                break
            except InvocationEndedError as cut:
                passage.raise_if_ended(cut)
                break
            finally:
                ENCLOSING_CALL.reset(token)
            passage.note_event(chunk)
            yield chunk
    except Exception as error:
        passage.fail(error)
        raise
    finally:
        wait.close()
        passage.finish(answered=answered)
        if (close := getattr(events, "aclose", None)) is not None:
            await close()


@suppress_errors("binding")
def _attach_again(live: LiveInvocation) -> bool:
    """Attach again if an application has replaced a registry. Return whether stages were lost."""
    agent = live.agent()
    if agent is None or (agent.hooks is live.hooks and has_stages(agent)):
        return False
    was_staged = has_stages(agent)
    attach(agent)
    live.hooks = agent.hooks
    return not was_staged
