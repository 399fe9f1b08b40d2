"""Halts Strands agents, tags what they are left with, and follows them where spans are blind.

What is private in Strands and used here, each held by `tests/test_strands_private.py`:

- `Agent._start_agent_trace_span`, `Agent._end_agent_trace_span`: begin and end of an invocation.
- `Agent._append_messages`: adds a message and tells the hooks.
- `Agent._deferred_cancel`, `Agent._checkpointing`: the loop is going to end by itself.
- `HookRegistry._registered_callbacks`, `MiddlewareRegistry._handlers`: to undo a binding.
- `strands.middleware._agent_stream.AgentStreamStage`: the only place to change a stop reason.
- `strands.types._events`: the events that pass there.
- `strands.telemetry.metrics._total_prompt_tokens`: how Strands counts cached tokens as input.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from opentelemetry import baggage, trace
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    HookOrder,
    MessageAddedEvent,
)
from strands.interrupt import Interrupt, InterruptException
from strands.middleware import InvokeModelStage
from strands.middleware._agent_stream import AgentStreamContext, AgentStreamStage
from strands.telemetry.metrics import _total_prompt_tokens
from strands.types._events import EventLoopStopEvent, ModelStreamChunkEvent, StructuredOutputEvent
from strands.types.exceptions import ContextWindowOverflowException

from otel_limits import semconv
from otel_limits.errors import LimitReachedError, limit_reached
from otel_limits.faults import unfelt
from otel_limits.limits import KIND, Breach, Policy, Usage
from otel_limits.messages import halt_message, halt_text, mark
from otel_limits.processor import token_count
from otel_limits.runs import CHARACTERS_PER_TOKEN, OpenCall, Run, Runs

if TYPE_CHECKING:
    from strands.agent import AgentResult
    from strands.agent.agent import Agent
    from strands.middleware import InvokeModelContext, MiddlewareNext
    from strands.types.content import Message

    Next: TypeAlias = MiddlewareNext[Any, Any]

VERY_LAST: Final = HookOrder.SDK_LAST + 1
"""After every other hook, so that what the others decided is known."""


class Refused(InterruptException):
    """Carries a halt from the model stage to the agent stage.

    It is an interrupt because those pass through the loop unwrapped and unlogged and without an
    `AfterModelCallEvent`: no model was called.
    """

    def __init__(self) -> None:
        """Fill in what the base class wants; nobody reads it."""
        super().__init__(Interrupt(id="otel_limits", name="otel_limits"))


class Binding:
    """Everything that is attached to one agent.

    Args:
        runs: Where its invocations are followed.
        policy: What applies to it, asked for at the start of each invocation.
    """

    def __init__(self, runs: Runs, policy: Callable[[], Policy]) -> None:
        """Attach nothing yet."""
        self._runs = runs
        self._policy = policy
        self._live: list[Run] = []
        self._halting: tuple[Breach, ...] = ()
        self._has_output = False
        self._leg_refused = False
        self._cycle_seen = False

    @property
    def run(self) -> Run | None:
        """The live invocation; the newest one where an agent is used re-entrantly."""
        return self._live[-1] if self._live else None

    # --- what is attached ---------------------------------------------------------------------

    def _hooks(self) -> tuple[tuple[type, Callable[[Any], None], float], ...]:
        return (
            (BeforeInvocationEvent, self._before_leg, HookOrder.SDK_FIRST),
            (AfterModelCallEvent, self._after_model_call, HookOrder.SDK_FIRST),
            (MessageAddedEvent, self._message_added, HookOrder.SDK_FIRST),
            (AfterToolsEvent, self._after_tools, VERY_LAST),
            (AfterInvocationEvent, self._after_leg, VERY_LAST),
        )

    def attach(self, agent: Agent) -> None:
        """Add the hooks and the two stages to `agent`."""
        for event, callback, order in self._hooks():
            agent.hooks.add_callback(cast("Any", event), callback, order=order)
        agent.add_middleware(AgentStreamStage, self._agent_stage)
        agent.add_middleware(InvokeModelStage, self._model_stage)

    def detach(self, agent: Agent) -> None:
        """Take away what `attach` added, and nothing else."""
        callbacks = [callback for _, callback, _ in self._hooks()]
        for entries in agent.hooks._registered_callbacks.values():
            entries[:] = [entry for entry in entries if entry.callback not in callbacks]
        stages = [self._agent_stage, self._model_stage]
        for handlers in agent._middleware_registry._handlers.values():
            handlers[:] = [tagged for tagged in handlers if tagged.handler not in stages]

    # --- begin and end of an invocation ---------------------------------------------------------

    @unfelt("binding")
    def begin(self, agent: Agent, span: trace.Span) -> None:
        """An invocation begins under `span`."""
        context = span.get_span_context()
        self._halting, self._has_output, self._leg_refused = (), False, False
        self._live.append(
            self._runs.start(
                agent.name,
                self._policy(),
                context.trace_id,
                context.span_id,
                session_id=agent.session_id,
                attributes=_audit_attributes(agent, self._runs.audit_keys),
            )
        )

    @unfelt("binding")
    def end(
        self,
        response: AgentResult | None,
        error: Exception | None,
        cancellation: BaseException | None,
    ) -> None:
        """The newest invocation is over, with a result, an exception, or nobody waiting for it."""
        if not self._live:
            return
        run = self._live.pop()
        if response is not None:
            run.finish(response.stop_reason)
        elif isinstance(error, LimitReachedError) and run.breach is not None:
            run.finish(run.breach.reason)
        elif cancellation is not None:
            run.finish(run.reason or "aborted")
        else:
            run.finish("error" if error is not None else "aborted")

    # --- hooks ------------------------------------------------------------------------------------

    @unfelt("binding")
    def _before_leg(self, event: BeforeInvocationEvent) -> None:  # noqa: ARG002
        if self.run is not None:
            self.run.leg()
            self._halting, self._has_output = (), False
            self._cycle_seen = False

    @unfelt("binding")
    def _after_leg(self, event: AfterInvocationEvent) -> None:
        """A refused leg is not resumed again: nothing would ever come of it."""
        if self._leg_refused:
            event.resume = None

    @unfelt("binding")
    def _after_model_call(self, event: AfterModelCallEvent) -> None:
        """Book the call, unless its span did."""
        run = self.run
        if run is None:
            return
        if isinstance(event.exception, ContextWindowOverflowException):
            run.recover()
            self._cycle_seen = False
        if run.call is None:
            return
        if event.stop_response is None:
            run.settle(None, failed=True)
        else:
            message = event.stop_response.message
            run.settle(_usage_of(message), output_estimate=_estimate(message["content"]))

    @unfelt("binding")
    def _message_added(self, event: MessageAddedEvent) -> None:
        """Count a turn, or tag the message that a halt left."""
        run, message = self.run, event.message
        if run is None or message["role"] != "assistant":
            return
        if "usage" in message.get("metadata", ()):
            run.turn()
            if not any("toolUse" in block for block in message["content"]):
                self._cycle_seen = False  # the cycle ends here
        elif self._is_ours(message):
            self._perform(event.agent, run, message)

    @unfelt("binding")
    def _after_tools(self, event: AfterToolsEvent) -> None:
        """End the loop when a limit was reached and the loop would go on."""
        run = self.run
        if run is None:
            return
        if run.blind and not self._cycle_seen:
            run.cycle()  # a replayed tool batch: a cycle without a model call
        self._cycle_seen = False
        breaches = run.breached()
        if not breaches or self._ends_anyway(event):
            return
        if run.policy.action == "observe":
            run.halt(breaches)
            return
        self._halting = breaches
        event.end_turn = halt_text(breaches[0])

    def _ends_anyway(self, event: AfterToolsEvent) -> bool:
        """Tell whether the loop stops after these tools without us: the natural end wins."""
        agent = event.agent
        return bool(
            event.end_turn
            or self._has_output
            or agent._deferred_cancel
            or agent._checkpointing
            or agent.cancel_signal.is_set()
            or event.invocation_state.get("request_state", {}).get("stop_event_loop")
        )

    # --- stages -----------------------------------------------------------------------------------

    async def _agent_stage(
        self, context: AgentStreamContext, next_fn: Next
    ) -> AsyncGenerator[Any, None]:
        """Put our stop reason in place of the framework's, and raise where that is the action."""
        halted: bool | None = False
        try:
            async for event in next_fn(context):
                kind = type(event)
                if kind is ModelStreamChunkEvent:
                    self._chunk(event)
                elif kind is StructuredOutputEvent:
                    self._has_output = True
                elif kind is EventLoopStopEvent:
                    halted = self._stop(event)
                yield event
        except Refused:
            halted = True
            yield await self._refusal(context)
        run = self.run
        if halted and run is not None and run.action == "raised" and run.breach is not None:
            raise limit_reached(run.breach, run.stop(run.breach.reason))

    @unfelt("binding")
    def _chunk(self, event: ModelStreamChunkEvent) -> None:
        run = self.run
        if run is not None and run.call is not None:
            if not run.call.streamed:
                run.call.streamed = True
                _note_chat_span(run, run.call)
            if "metadata" in event.chunk and event.chunk["metadata"].get("usage") is not None:
                _note_usage(run.call, event.chunk["metadata"]["usage"])

    @unfelt("binding")
    def _stop(self, event: EventLoopStopEvent) -> bool:
        """Note how the leg ended; True when it was our halt."""
        run = self.run
        if run is None:
            return False
        reason, message, *rest = event["stop"]
        halted = self._is_ours(message)
        if halted:
            reason = self._halting[0].reason
            event["stop"] = (reason, message, *rest)
        run.reason = reason
        return halted

    async def _refusal(self, context: AgentStreamContext) -> EventLoopStopEvent:
        """Answer in the model's place and end the leg."""
        agent = cast("Agent", context.agent)
        breach = self._halting[0]
        message = cast("Message", halt_message(breach))
        await agent._append_messages(message)
        stop = EventLoopStopEvent(
            cast("Any", breach.reason),  # Strands' type lists only its own reasons
            message,
            agent.event_loop_metrics,
            context.invocation_state.get("request_state", {}),
        )
        self._stop(stop)
        self._leg_refused = True
        return stop

    def _model_stage(self, context: InvokeModelContext, next_fn: Next) -> AsyncGenerator[Any, None]:
        """Let a model call out, or refuse it before it costs anything.

        A plain function that returns the next stage's generator adds no generator of its own.
        """
        run = self.run
        if run is not None and self._refuses(run, context):
            _end_cycle_span(trace.get_current_span())
            raise Refused
        if run is not None:
            self._open_call(run, context)
        return next_fn(context)

    @unfelt("binding")
    def _refuses(self, run: Run, context: InvokeModelContext) -> bool:
        breaches = run.breached()
        if context.structured_output_model is not None:
            breaches = tuple(b for b in breaches if not KIND[b.limit].yields_to_output)
        if not breaches:
            return False
        if run.policy.action == "observe":
            run.halt(breaches)
            return False
        self._halting = breaches
        return True

    @unfelt("binding")
    def _open_call(self, run: Run, context: InvokeModelContext) -> None:
        projected = context.projected_input_tokens
        run.open_call(
            _model_id(context.model),
            _estimate(context.messages) if projected is None else projected,
            _provider(context.model),
        )
        if run.blind and not self._cycle_seen:
            run.cycle()
        self._cycle_seen = True

    # --- the halt itself --------------------------------------------------------------------------

    def _is_ours(self, message: Mapping[str, Any]) -> bool:
        """Tell whether the message is the one that the halt under way leaves."""
        return bool(self._halting) and message["content"] == [{"text": halt_text(self._halting[0])}]

    def _perform(self, agent: Agent, run: Run, message: Message) -> None:
        """The halt is a fact now: tell it, mark its message and the live span."""
        run.halt(self._halting)
        stop = run.stop(self._halting[0].reason)
        mark(cast("dict[str, Any]", message), stop)
        _write_to_span(agent.trace_span, self._halting[0], run)


# --- helpers without state ------------------------------------------------------------------------


def _usage_of(message: Mapping[str, Any]) -> Usage | None:
    """What the provider reported for this message, in the sense of `Usage`."""
    usage = message.get("metadata", {}).get("usage")
    if usage is None:
        return None
    counted = token_count(_total_prompt_tokens(usage)), token_count(usage.get("outputTokens"))
    if counted[0] is None or counted[1] is None:
        return None
    return Usage(
        input=counted[0],
        output=counted[1],
        cache_read=token_count(usage.get("cacheReadInputTokens", 0)) or 0,
        cache_write=token_count(usage.get("cacheWriteInputTokens", 0)) or 0,
    )


def _estimate(content: object) -> int:
    """Tokens that `content` has, about: never 0."""
    characters = len(json.dumps(content, default=str, ensure_ascii=False))
    return max(1, characters // CHARACTERS_PER_TOKEN)


def _model_id(model: object) -> str:
    config = getattr(model, "config", None)
    model_id = config.get("model_id") if isinstance(config, Mapping) else None
    return model_id if isinstance(model_id, str) else "unknown"


def _provider(model: object) -> str:
    """Who serves `model`: Strands names the module of each model class after its provider."""
    package, _, module = type(model).__module__.rpartition(".")
    return module if package == "strands.models" else type(model).__qualname__


def _audit_attributes(agent: Agent, keys: tuple[str, ...]) -> dict[str, str]:
    """What `keys` are set to on the agent, or in the baggage of whoever called it."""
    if not keys:
        return {}
    found = {**baggage.get_all(), **agent.trace_attributes}
    return {key: str(found[key]) for key in keys if key in found}


def _note_usage(call: OpenCall, usage: Mapping[str, Any]) -> None:
    """Keep what the provider sent, so that a wrong rule of counting can be undone later."""
    call.reported = True
    call.usage = Usage(
        input=token_count(usage.get("inputTokens")) or 0,
        output=token_count(usage.get("outputTokens")) or 0,
        cache_read=token_count(usage.get("cacheReadInputTokens")) or 0,
        cache_write=token_count(usage.get("cacheWriteInputTokens")) or 0,
    )
    call.usage_total = token_count(usage.get("totalTokens"))


def _note_chat_span(run: Run, call: OpenCall) -> None:
    """Learn the id of a `chat` span that no processor saw: it is current while its chunks come.

    Where no tracer makes spans, what is current is the span around the agent, not the call's own.
    """
    context = trace.get_current_span().get_span_context()
    span_id = trace.format_span_id(context.span_id)
    if run.blind and context.is_valid and span_id != run.invocation.span_id:
        call.span_id = span_id


def _end_cycle_span(span: trace.Span) -> None:
    """End the cycle that a refusal leaves, or Strands ends it as an error, which it is not."""
    if span.is_recording() and getattr(span, "name", None) == semconv.CYCLE_SPAN:
        span.set_status(trace.StatusCode.OK)
        span.end()


@unfelt("span")
def _write_to_span(span: trace.Span | None, breach: Breach, run: Run) -> None:
    """Write the halt to the live agent span: attributes are frozen once it ends."""
    if span is None or not span.is_recording():
        return
    attributes: dict[str, str | bool | int] = {
        semconv.STOP_REASON: breach.reason,
        semconv.STOP_ACTION: run.action,
        semconv.LIMIT_NAME: breach.limit,
        semconv.LIMIT_VALUE: breach.cap,
        semconv.LIMIT_CONSUMED: breach.observed,
        semconv.MESSAGE_SYNTHETIC: True,
    }
    span.set_attributes(attributes)
    span.add_event(semconv.HALT_EVENT, attributes)
    if run.action == "raised":
        error = limit_reached(breach, run.stop(breach.reason))
        span.set_attribute(semconv.ERROR_TYPE, type(error).__qualname__)
