"""The requests that models send, by `Model.stream` and `Model.structured_output`."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace

from otel_limits.bindings.model_call import (
    LEFT,
    UNKNOWN_MODEL,
    enclosing_request,
    follow_async,
    follow_parts_async,
)
from otel_limits.bindings.span_writer import write_stated_cost
from otel_limits.bindings.strands.agent_hooks import attach, has_stages
from otel_limits.bindings.strands.halting import end_quietly
from otel_limits.bindings.strands.invocations import STATES, StrandsInvocation
from otel_limits.bindings.strands.loop_requests import LoopRequest, StrandsRequest
from otel_limits.bindings.strands.readers import (
    model_id,
    note_chunk,
    note_failed_output,
    note_output,
    schema_of,
    span_of_call,
)
from otel_limits.bindings.strands.requests import call_by_context, call_to, redescribe
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.bindings.waits import InvocationEndedError
from otel_limits.core.halt_texts import no_last_answer
from otel_limits.core.internal_errors import report_suppressed, suppress_errors
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.current import current_scope
from otel_limits.runs.run import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from otel_limits.bindings.admission import Refusal
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.run import Run

FURTHER_REQUEST: Final = no_last_answer("a middleware has sent a further request for a response")

# --- wrappers of models ---------------------------------------------------------------------------


def track_stream(original: Any) -> Any:
    """Wrap a model's `stream`."""
    return follow_parts_async(_streamed)(_as_function(original))


def track_structured_output(original: Any) -> Any:
    """Wrap a model's `structured_output`.

    Three providers call their own `stream` for it, which is the same call. The others use a
    separate API and do not expose the reported usage.
    """
    # A coroutine function is that of a model that breaks the protocol.
    is_coroutine = inspect.iscoroutinefunction(original)
    follow = follow_async if is_coroutine else follow_parts_async
    return follow(_structured)(_as_function(original))


SENT: Final = frozenset(
    ("messages", "prompt", "system_prompt", "system_prompt_content", "tool_specs")
)
"""Arguments of `stream` and `structured_output` that are sent to the provider."""


def _streamed(model: Any, *args: Any, **options: Any) -> SentRequest | None:
    content = [*args, *(each for name, each in options.items() if name in SENT)]
    return _request(model, args, options, content, note_chunk)


def _structured(model: Any, *args: Any, **options: Any) -> SentRequest | None:
    output_model = args[0] if args else options.get("output_model")
    content = [*args[1:], *(each for name, each in options.items() if name in SENT)]
    return _request(model, args, options, [content, schema_of(output_model)], note_output)


def _request(
    model: Any,
    args: Sequence[Any],
    options: Mapping[str, Any],
    content: object,
    note: Callable[[InFlightCall, Any], None],
) -> SentRequest | None:
    """Describe a request when the stream is requested; `None` if it belongs to no invocation.

    An application may pass the stream to another task, whose context does not have the invocation.
    """
    if (run := _run_of_task(model)) is None:
        return None
    outer: Any = enclosing_request(run)
    return SentRequest(
        run,
        None if outer is None else outer.invocation,
        [],
        model=model,
        outer=outer,
        stage=outer if isinstance(outer, LoopRequest) else getattr(outer, "stage", None),
        args=args,
        options=options,
        content=content,
        add=note,
    )


def _as_function(method: Any) -> Callable[..., Any]:
    """Return a function that takes the model first, for any kind of method."""
    # Not always a function: another instrumentation may have replaced it by an object.
    if isinstance(method, FunctionType):
        return method
    bind = getattr(method, "__get__", lambda _, __: method)

    @functools.wraps(method)
    def call(model: Any, *args: Any, **options: Any) -> Any:
        return bind(model, type(model))(*args, **options)

    return call


@suppress_errors("binding")
def _run_of_task(model: Any) -> Run | None:
    """Return the invocation that a request of the current task counts for, if any."""
    owner, host = current_scope()[0], STRANDS.host
    if isinstance(owner, Group):  # a node that is not an agent calls a model
        if host is None or not host.is_on:
            return None
        owner = host.runs.run_of(owner, model_id(model))
    return None if owner is None or owner.released else owner


# --- one request ----------------------------------------------------------------------------------


@dataclass(eq=False)
class SentRequest(StrandsRequest):
    """A call of a model's method, by an agent's loop or by other code.

    A class that calls its parent's `stream`, or a model that calls another one, is one call.
    Further calls of such a model are separate ones.
    """

    obstacle: str = field(
        default="Its middleware was replaced, so no final answer was requested.", kw_only=True
    )
    """Only of the loop's request outside of our stage, which alone can change a request."""
    args: Sequence[Any] = field(kw_only=True)
    options: Mapping[str, Any] = field(kw_only=True)
    add: Callable[[InFlightCall, Any], None] = field(kw_only=True)
    """Adds an event to a call."""
    stage: LoopRequest | None = field(kw_only=True)
    """The response of a loop that it is sent for, if any."""
    is_whole: bool = field(default=False, kw_only=True)
    """True once the answer is complete, even if the stream is not."""

    # --- the request ------------------------------------------------------------------------------

    def send(self, method: Any) -> Any:
        """Call the model's method."""
        return method(self.model, *self.args, **self.options)

    def add_note(self, note: str) -> None:
        """Do nothing: the stage adds notes."""

    def remove_tools(self, note: str) -> None:
        """Do nothing: only the request of a stage becomes that for a last answer."""

    async def admit(self) -> Refusal | None:
        """Admit the call, or join that of the outer request."""
        outer: Any = self.outer
        if outer is not None and outer.gives_call_to(self):
            self.calls = self.taken = [outer.calls[0]]
            self._sent()
            agent = self.invocation.agent_ref() if self.invocation is not None else None
            if (
                self.invocation is not None
                and agent is not None
                and agent.hooks is not self.invocation.hooks
            ):
                _attach_again(self.invocation)
            return None
        self.calls = [self._described() or InFlightCall(UNKNOWN_MODEL)]
        refusal: Refusal | None = None
        if self.stage is not None:
            refusal = self._refusal()
        else:
            self.invocation = self._invocation_of_loop()
            refusal = await super().admit()
        if refusal is None:
            self._sent()
        return refusal

    @suppress_errors("binding")
    def _described(self) -> InFlightCall:
        if (stage := self.stage) is None:
            return call_to(self.model, self.content)
        call = call_by_context(stage.context, STATES.of(stage.context.agent).tokens)
        call = call or InFlightCall(UNKNOWN_MODEL)
        call.is_traced = True  # by Strands, as a whole
        if self.model is not stage.model:  # a middleware may have chosen another one
            call.model = UNKNOWN_MODEL
            redescribe(call, self.model, self.content)
        return call

    @suppress_errors("binding")
    def _refusal(self) -> Refusal | None:
        """Refuse a further call for a response, for which quotas were asked already."""
        assert self.invocation is not None and self.stage is not None  # noqa: PT018
        _attach_again(self.invocation)
        refusal = self.invocation.reserve_or_refuse(
            self.calls[0], obstacle=FURTHER_REQUEST, can_ask=False
        )
        if refusal is None:
            self.stage.calls += self.calls  # counted with it, if its stream is abandoned
        return refusal

    @suppress_errors("binding")
    def _invocation_of_loop(self) -> StrandsInvocation | None:
        """Return the invocation whose loop sends it outside of our stage, which it has lost."""
        invocation = self.run.state
        if (
            not isinstance(invocation, StrandsInvocation)
            or self.run.finished
            or not _attach_again(invocation)
        ):
            return None
        invocation.leg.awaits_response = True
        self.calls[0].is_traced = True
        return invocation

    @suppress_errors("binding")
    def _sent(self) -> None:
        (call,) = self.calls
        if self.invocation is not None:
            self.run.calls.open(call)
            # The current span of a side call is that of a tool or of the calling code.
            call.span_id = span_of_call(self.run)
        elif not self.taken:
            context = trace.get_current_span().get_span_context()
            self.run.spans.mark_counted_within(context.span_id)

    def note_sent(self) -> None:
        """Do nothing: `admit` notes that."""

    # --- the answer -------------------------------------------------------------------------------

    def read_part(self, part: Any) -> bool:
        """Note an event. A request within this one, which is its call, has noted the texts."""
        # Guarded inside, not by a decorator, because it runs for each part of a stream.
        try:
            self.is_whole = self.is_whole or "messageStop" in part
            if self.inner is None or ("metadata" in part and not self.is_shared):
                self.add(self.calls[0], part)
                if "metadata" in part and self.stage is not None:
                    write_stated_cost(trace.get_current_span(), self.calls[0])
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)
        return False

    def note_answer(self, answer: Any) -> None:
        """Note what a method returns that does not stream."""
        self.add(self.calls[0], answer)

    # --- the end ----------------------------------------------------------------------------------

    def note_failure(self, error: BaseException) -> None:
        """Note an error for the stage, as a middleware may repeat the call without raising it."""
        call, stage = self.calls[0], self.stage
        if isinstance(error, NotImplementedError) and not call.answered:
            self.unsent.append(call)  # nothing was sent
        elif self.add is note_output and isinstance(error, Exception):
            note_failed_output(call, error)
        if stage is not None and self.outer is stage and isinstance(error, Exception):
            stage.failure = error
        if self.invocation is not None and isinstance(error, InvocationEndedError):
            end_quietly(trace.get_current_span())

    async def settle(self, error: BaseException | None = None) -> None:
        """Count the call, unless another request knows how it ends.

        If the stream was left, the stage knows whether the loop has an answer. The outer request of
        a model may still fail, or report other usage.
        """
        if self.is_whole and isinstance(error, InvocationEndedError):
            error = None
        outer: Any = self.outer
        if error is None and self.taken and isinstance(outer, SentRequest):
            self.has_ended = self.has_ended or not outer.is_shared
        if self.stage is None or not isinstance(error, LEFT):
            await super().settle(error)

    @suppress_errors("binding")
    def verdict_after(self, error: BaseException) -> Verdict | None:
        """Return the halt that ends the stream; a complete answer is kept."""
        if self.stage is not None and self.is_whole and isinstance(error, InvocationEndedError):
            return None if self.invocation is None else self.invocation.end
        return super().verdict_after(error)

    def halted_parts(self, verdict: Verdict, cause: BaseException | None) -> Iterable[Any]:
        """End the stream of a complete answer; else leave the loop."""
        return () if self.is_whole else super().halted_parts(verdict, cause)


@suppress_errors("binding")
def _attach_again(invocation: StrandsInvocation) -> bool:
    """Attach again if an application has replaced a registry. Return whether stages were lost."""
    agent = invocation.agent_ref()
    if agent is None or (agent.hooks is invocation.hooks and has_stages(agent)):
        return False
    was_staged = has_stages(agent)
    attach(agent)
    invocation.hooks = agent.hooks
    return not was_staged
