"""Halts Strands agents, tags what they are left with, and follows them where spans are blind.

What is private in Strands and used here, each held by `tests/test_strands_private.py`:

- `Agent._start_agent_trace_span`, `Agent._end_agent_trace_span`: begin and end of an invocation.
- `Agent._append_messages`: adds a message and tells the hooks.
- `Agent._deferred_cancel`, `Agent._checkpointing`: the loop is going to end by itself.
- `Agent._interrupt_state`: holds the answer of the human who was asked.
- `HookRegistry._registered_callbacks`, `MiddlewareRegistry._handlers`: to undo a binding.
- `strands.middleware._agent_stream.AgentStreamStage`: the only place to change a stop reason.
- `strands.types._events`: the events that pass there.
- `strands.telemetry.metrics._total_prompt_tokens`: how Strands counts cached tokens as input.
- `strands.tools.structured_output.structured_output_tool.StructuredOutputTool`: no tool call.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from opentelemetry import trace
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookOrder,
    MessageAddedEvent,
)
from strands.interrupt import Interrupt, InterruptException
from strands.middleware import InvokeModelStage
from strands.middleware._agent_stream import AgentStreamContext, AgentStreamStage
from strands.telemetry.metrics import _total_prompt_tokens
from strands.tools.structured_output.structured_output_tool import StructuredOutputTool
from strands.types._events import EventLoopStopEvent, ModelStreamChunkEvent, StructuredOutputEvent
from strands.types.exceptions import ContextWindowOverflowException

from otel_limits import semconv
from otel_limits.bindings.gateways import budget_refusal
from otel_limits.errors import LimitReachedError, limit_reached
from otel_limits.faults import unfelt
from otel_limits.limits import (
    KILLED_STOP_REASON,
    KIND,
    MAX_DURATION_STOP_REASON,
    Breach,
    Limits,
    Policy,
    Usage,
    Verdict,
    verdict_of,
)
from otel_limits.loops import Call, fingerprint
from otel_limits.messages import (
    NUDGE_NOTE,
    budget_note,
    halt_message,
    halt_text,
    mark,
    refusal_note,
    why,
    wrap_up_note,
)
from otel_limits.processor import token_count
from otel_limits.runs import CHARACTERS_PER_TOKEN, CURRENT, Run, Runs

if TYPE_CHECKING:
    from strands.agent import AgentResult
    from strands.agent.agent import Agent
    from strands.middleware import InvokeModelContext, MiddlewareNext
    from strands.types.content import Message

    from otel_limits.facts import ActionTaken, Warned

    Next: TypeAlias = MiddlewareNext[Any, Any]

VERY_LAST: Final = HookOrder.SDK_LAST + 1
"""After every other hook, so that what the others decided is known."""

ASK_ID: Final = "v1:otel_limits:ask"
"""Id of the interrupt that asks a human for more."""

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


@dataclass(slots=True)
class Batch:
    """The tool calls of one turn, as they come and go."""

    requests: tuple[Mapping[str, Any], ...]
    """Tool uses, in the order in which the model asked."""
    refusals: dict[str, Breach]
    """By tool use id."""
    results: dict[str, AfterToolCallEvent]
    """The final attempt of each, by tool use id."""


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
        self._lock = threading.Lock()
        self._live: list[Run] = []
        self._reset()

    def _reset(self) -> None:
        """Forget what belonged to the last leg."""
        self._verdict: Verdict | None = None
        """The halt under way."""
        self._wrapping: Verdict | None = None
        """The halt before which the model gives a last answer."""
        self._marked: Message | None = None
        """The message that the halt left."""
        self._has_output = False
        self._leg_refused = False
        self._cycle_seen = False
        self._batch: Batch | None = None
        self._text = ""
        """What the model said in the turn under way."""

    @property
    def run(self) -> Run | None:
        """The live invocation; the newest one where an agent is used re-entrantly."""
        return self._live[-1] if self._live else None

    # --- what is attached -------------------------------------------------------------------------

    def _hooks(self) -> tuple[tuple[type, Callable[[Any], None], float], ...]:
        return (
            (BeforeInvocationEvent, self._before_leg, HookOrder.SDK_FIRST),
            (AfterModelCallEvent, self._after_model_call, HookOrder.SDK_FIRST),
            (MessageAddedEvent, self._message_added, HookOrder.SDK_FIRST),
            (BeforeToolsEvent, self._before_tools, VERY_LAST),
            (BeforeToolCallEvent, self._before_tool, VERY_LAST),
            (AfterToolCallEvent, self._after_tool, HookOrder.SDK_FIRST),
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

    # --- begin and end of an invocation -----------------------------------------------------------

    @unfelt("binding")
    def begin(self, agent: Agent, span: trace.Span) -> None:
        """An invocation begins under `span`."""
        context = span.get_span_context()
        answer = _answer_of(agent)
        policy = self._policy() if answer is None else extend(self._policy(), answer.response)
        run = self._runs.start(
            agent.name,
            policy,
            context.trace_id,
            context.span_id,
            sampled=context.trace_flags.sampled,
            model=_model_id(agent.model),
        )
        self._reset()
        if answer is not None and extension_of(answer.response) is None:
            self._verdict = _asked(answer)
        run.cancel = _canceller(weakref.ref(self), weakref.ref(agent), weakref.ref(run))
        self._live.append(run)
        CURRENT.set(run)
        run.limit_time()

    @unfelt("binding")
    def end(
        self,
        response: AgentResult | None,
        error: Exception | None,
        cancellation: BaseException | None,
    ) -> None:
        """The newest invocation is over, with a result, an exception, or nobody waiting for it."""
        with self._lock:  # from here on nobody may cancel: it would hit the next invocation
            run = self._live.pop() if self._live else None
        if run is None:
            return
        CURRENT.set(run.parent)
        if response is not None:
            run.finish(response.stop_reason)
        elif isinstance(error, LimitReachedError) and run.verdict is not None:
            run.finish(run.verdict.reason)
        elif cancellation is not None:
            run.finish(run.reason or "aborted")
        else:
            run.finish("error" if error is not None else "aborted")

    def cancel(self, agent: Agent, run: Run, verdict: Verdict) -> None:
        """End `run` from any thread: a response under way is broken off."""
        with self._lock:
            if self.run is run:
                self._verdict = verdict
                agent.cancel(message=halt_text(verdict))

    # --- legs, model calls and messages -----------------------------------------------------------

    @unfelt("binding")
    def _before_leg(self, event: BeforeInvocationEvent) -> None:  # noqa: ARG002
        run = self.run
        if run is None:
            return
        first, verdict = run.tally.cycles == 0, self._verdict
        self._reset()
        if first:
            self._verdict = verdict  # a human who was asked for more said no
        run.leg()

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
            self._turn(event.agent, run, message)
        elif self._verdict is not None and message["content"] == [
            {"text": halt_text(self._verdict)}
        ]:
            self._perform(event.agent, run, message, self._verdict)

    def _turn(self, agent: Agent, run: Run, message: Message) -> None:
        run.turn()
        _write_warnings(agent.trace_span, run.warn())
        self._text = "".join(block.get("text", "") for block in message["content"])
        if any("toolUse" in block for block in message["content"]):
            return
        self._cycle_seen = False  # the cycle ends here
        if self._wrapping is not None:
            self._perform(agent, run, message, self._wrapping, action="wrapped_up")

    # --- tools ------------------------------------------------------------------------------------

    @unfelt("binding")
    def _before_tools(self, event: BeforeToolsEvent) -> None:
        """Decide in request order which calls may run, before any of them does."""
        run = self.run
        if run is None:
            return
        if self._wrapping is not None:
            event.cancel = f"Not run: {why(self._wrapping)}."
        if event.cancel:
            return
        requests = tuple(
            block["toolUse"] for block in event.message["content"] if "toolUse" in block
        )
        self._batch = Batch(requests, {}, {})
        for request in requests:
            breach = (
                None
                if _is_output(event.agent, request["name"])
                else run.admit_tool(request["name"])
            )
            if breach is not None:
                self._batch.refusals[request["toolUseId"]] = breach

    @unfelt("binding")
    def _before_tool(self, event: BeforeToolCallEvent) -> None:
        """Answer in the place of a tool that has no call left."""
        breach = self._batch and self._batch.refusals.get(event.tool_use["toolUseId"])
        if breach:
            event.cancel_tool = refusal_note(breach)

    @unfelt("binding")
    def _after_tool(self, event: AfterToolCallEvent) -> None:
        """Keep the final attempt: a retry comes by here again."""
        if self._batch is not None:
            self._batch.results[event.tool_use["toolUseId"]] = event

    @unfelt("binding")
    def _after_tools(self, event: AfterToolsEvent) -> None:
        """End the loop when a limit was reached and the loop would go on."""
        run = self.run
        if run is None:
            return
        if run.blind and not self._cycle_seen:
            run.cycle()  # a replayed tool batch: a cycle without a model call
        self._cycle_seen = False
        self._close_batch(run, event)
        _write_warnings(event.agent.trace_span, run.warn())
        verdict = self._wrapping or run.judge()
        if verdict is None or self._ends_anyway(event):
            return
        if self._enforces_now(run, verdict):
            self._verdict, self._wrapping = verdict, None
            event.end_turn = halt_text(verdict)

    def _close_batch(self, run: Run, event: AfterToolsEvent) -> None:
        """Tell the calls that ran, in request order, and look for repetitions."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        calls = []
        for request in batch.requests:
            done = batch.results.get(request["toolUseId"])
            if request["toolUseId"] in batch.refusals:
                run.tool_called(request["name"], "refused", None, None)
            elif done is None or done.cancel_message is not None:
                run.return_tool(request["name"])
            else:
                call = _call(run, done)
                run.tool_called(call.tool, _status(done), done.duration, _identity(call))
                calls.append(call)
        run.repeat(calls, self._text)
        if run.nudge():
            _append_note(event.message)

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

    def _enforces_now(self, run: Run, verdict: Verdict) -> bool:
        """Tell whether a verdict ends the loop after tools, or waits for the next model call."""
        action = run.policy.action
        if self._wrapping is not None or verdict.reason in AT_ONCE:
            return True
        if action == "observe":
            run.halt(verdict, "observed")
        return action not in ("observe", "wrap_up", "ask") or (
            action == "wrap_up" and self._wrapped(run)
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
                if kind is StructuredOutputEvent:
                    self._has_output = True
                elif kind is EventLoopStopEvent:
                    halted = self._stop(event)
                yield event
        except Refused:
            halted = True
            yield await self._refusal(context)
        run = self.run
        if halted and run is not None and run.action == "raised" and run.verdict is not None:
            raise limit_reached(run.verdict, run.stop(run.verdict.reason))

    @unfelt("binding")
    def _stop(self, event: EventLoopStopEvent) -> bool:
        """Note how the leg ended; True when it was our halt."""
        run = self.run
        if run is None:
            return False
        reason, message, *rest = event["stop"]
        halted = message is self._marked and run.verdict is not None
        if halted and run.verdict is not None:
            reason = run.verdict.reason
            event["stop"] = (reason, message, *rest)
        run.reason = reason
        return halted

    async def _refusal(self, context: AgentStreamContext) -> EventLoopStopEvent:
        """Answer in the model's place and end the leg."""
        agent = cast("Agent", context.agent)
        verdict = cast("Verdict", self._verdict)
        message = cast("Message", halt_message(verdict))
        await agent._append_messages(message)
        stop = EventLoopStopEvent(
            cast("Any", verdict.reason),  # Strands' type lists only its own reasons
            message,
            agent.event_loop_metrics,
            context.invocation_state.get("request_state", {}),
        )
        self._stop(stop)
        self._leg_refused = True
        return stop

    def _model_stage(self, context: InvokeModelContext, next_fn: Next) -> AsyncGenerator[Any, None]:
        """Let a model call out, or refuse it before it costs anything."""
        run = self.run
        if run is None:
            return next_fn(context)
        question = self._decide(run, context)
        if question is not None:
            _end_cycle_span(trace.get_current_span())
            raise question
        self._open_call(run, context)
        return self._follow(run, next_fn(self._with_notes(run, context) or context))

    async def _follow(
        self, run: Run, events: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """Note what the provider sends, and take its refusal for the stop that it is."""
        try:
            async for event in events:
                if type(event) is ModelStreamChunkEvent:
                    _note_chunk(run, event)
                yield event
        except Exception as error:
            refusal = budget_refusal(error)
            if refusal is None:
                raise
            run.settle(None, failed=True)
            self._verdict = refusal
            _end_cycle_span(trace.get_current_span())
            raise Refused from error

    @unfelt("binding")
    def _decide(self, run: Run, context: InvokeModelContext) -> InterruptException | None:
        """Return what keeps this call from going out, or `None`."""
        verdict = self._verdict or _unless_forced(run.judge(), context)
        if verdict is None:
            return None
        action = run.policy.action
        if action == "observe" and verdict.reason != KILLED_STOP_REASON:
            run.halt(verdict, "observed")
            return None
        if self._verdict is None and verdict.reason not in AT_ONCE:
            if action == "ask":
                return _question(verdict)
            if action == "wrap_up" and not self._wrapped(run) and not context.tool_choice:
                self._wrapping = verdict
                return None
        self._verdict = verdict
        return Refused()

    def _wrapped(self, run: Run) -> bool:
        """Tell whether the last answer was given already: there is only one."""
        return run.wrapped_up or self._wrapping is not None

    @unfelt("binding")
    def _open_call(self, run: Run, context: InvokeModelContext) -> None:
        projected = context.projected_input_tokens
        run.open_call(
            _model_id(context.model),
            _estimate(context.messages) if projected is None else projected,
        )
        if run.blind and not self._cycle_seen:
            run.cycle()
        self._cycle_seen = True

    @unfelt("binding")
    def _with_notes(self, run: Run, context: InvokeModelContext) -> InvokeModelContext | None:
        """Tell the model what it has to know; the conversation does not keep it."""
        if self._wrapping is not None and not run.wrapped_up:
            run.wrapped_up = True
            note = wrap_up_note(self._wrapping)
            return context.replace(
                messages=_with_note(context.messages, note), tool_specs=[], tool_choice=None
            )
        if run.policy.tell_model and (levels := run.levels()):
            return context.replace(messages=_with_note(context.messages, budget_note(levels)))
        return None

    # --- the halt itself --------------------------------------------------------------------------

    def _perform(
        self,
        agent: Agent,
        run: Run,
        message: Message,
        verdict: Verdict,
        action: ActionTaken | None = None,
    ) -> None:
        """The halt is a fact now: tell it, mark its message and the live span."""
        self._marked = message
        run.halt(verdict, action or _taken(run.policy))
        stop = run.stop(verdict.reason)
        synthetic = run.action != "wrapped_up"
        mark(cast("dict[str, Any]", message), stop, synthetic=synthetic)
        _write_halt(agent.trace_span, verdict, run, synthetic=synthetic)


def _canceller(
    binding: weakref.ref[Binding], agent: weakref.ref[Agent], run: weakref.ref[Run]
) -> Callable[[Verdict], None]:
    """Make what ends an invocation from outside, without keeping any of the three alive."""

    def cancel(verdict: Verdict) -> None:
        alive = binding(), agent(), run()
        if alive[0] is not None and alive[1] is not None and alive[2] is not None:
            alive[0].cancel(alive[1], alive[2], verdict)

    return cancel


# --- asking a human -------------------------------------------------------------------------------


def _question(verdict: Verdict) -> InterruptException:
    """Make the interrupt that tells a human what was reached."""
    breach = cast("Breach", verdict.breach)
    return InterruptException(
        Interrupt(
            id=ASK_ID,
            name="otel_limits",
            reason={
                "limit": breach.limit,
                "cap": _plain(breach.cap),
                "observed": _plain(breach.observed),
                "reason": breach.reason,
                "unit": breach.unit,
                "question": f"{why(verdict)}. Answer {{'extend': {{{breach.limit!r}: …}}}} "
                "to go on, anything else to stop.",
            },
        )
    )


def _plain(value: object) -> object:
    """Return a value that JSON knows."""
    return value if isinstance(value, (int, float)) else str(value)


def _answer_of(agent: Agent) -> Interrupt | None:
    """Return our question with the human's answer, when this invocation brings one."""
    interrupt = agent._interrupt_state.interrupts.get(ASK_ID)
    return interrupt if interrupt is not None and interrupt.response is not None else None


def extension_of(response: object) -> Limits | None:
    """Read `{"extend": {"max_turns": 20}}`; `None` for anything else."""
    if not isinstance(response, Mapping) or not isinstance(response.get("extend"), Mapping):
        return None
    try:
        return Limits(**response["extend"])
    except (TypeError, ValueError):
        return None


def extend(policy: Policy, response: object) -> Policy:
    """Let the invocation use what the human gave it more."""
    extension = extension_of(response)
    if extension is None:
        return policy
    return dataclasses.replace(policy, limits=extension.over(policy.limits))


def _asked(answer: Interrupt) -> Verdict:
    """Rebuild the verdict that the human was asked about."""
    reason = answer.reason if isinstance(answer.reason, Mapping) else {}
    return Verdict(
        reason.get("reason", "max_turns"),
        (
            Breach(
                reason.get("limit", "max_turns"),
                reason.get("cap", 0),
                reason.get("observed", 0),
                reason.get("reason", "max_turns"),
                reason.get("unit", ""),
            ),
        ),
    )


# --- helpers without state ------------------------------------------------------------------------


def _taken(policy: Policy) -> ActionTaken:
    """What a halt with a synthetic message is called under this policy."""
    return "raised" if policy.action == "raise" else "halted"


def _unless_forced(verdict: Verdict | None, context: InvokeModelContext) -> Verdict | None:
    """Let the call that only forces structured output pass the limits that yield to it."""
    if verdict is None or context.structured_output_model is None:
        return verdict
    return verdict_of(
        tuple(
            breach
            for breach in verdict.breaches
            if breach.limit not in KIND or not KIND[breach.limit].yields_to_output
        )
    )


@unfelt("binding")
def _note_chunk(run: Run, event: ModelStreamChunkEvent) -> None:
    if run.call is not None:
        run.call.streamed = True
        if "metadata" in event.chunk and event.chunk["metadata"].get("usage") is not None:
            run.call.reported = True


def _is_output(agent: Agent, name: str) -> bool:
    """Tell whether a tool is the framework's own way to structured output."""
    return isinstance(agent.tool_registry.dynamic_tools.get(name), StructuredOutputTool)


def _identity(call: Call) -> str | None:
    """Return what is equal for equal calls with equal results."""
    return fingerprint(call.request, call.result) if call.request else None


def _status(done: AfterToolCallEvent) -> Any:
    return done.result.get("status", "success")


def _call(run: Run, done: AfterToolCallEvent) -> Call:
    """Make what loop detection sees of a call: hashes, where it looks at all."""
    name = done.tool_use["name"]
    if run.loops is None:
        return Call(tool=name, request="", result="", exempt=True)
    request = fingerprint(name, done.tool_use["input"])
    return Call(
        tool=name,
        request=request,
        result=fingerprint(done.result.get("status"), done.result.get("content")),
        exempt=name in run.policy.exempt_tools,
    )


def _append_note(message: Message) -> None:
    """Add the nudge to the last tool result, in a copy: the tool may keep its own."""
    result = message["content"][-1]["toolResult"]
    message["content"][-1] = {
        "toolResult": {**result, "content": [*result["content"], {"text": NUDGE_NOTE}]}
    }


def _with_note(messages: Any, note: str) -> Any:
    """Add a note at the end of what the model is sent."""
    if messages and messages[-1]["role"] == "user":
        last = {**messages[-1], "content": [*messages[-1]["content"], {"text": note}]}
        return [*messages[:-1], last]
    return [*messages, {"role": "user", "content": [{"text": note}]}]


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


def _end_cycle_span(span: trace.Span) -> None:
    """End the cycle that a refusal leaves, or Strands ends it as an error, which it is not."""
    if span.is_recording() and getattr(span, "name", None) == semconv.CYCLE_SPAN:
        span.set_status(trace.StatusCode.OK)
        span.end()


@unfelt("span")
def _write_halt(span: trace.Span | None, verdict: Verdict, run: Run, *, synthetic: bool) -> None:
    """Write the halt to the live agent span: attributes are frozen once it ends."""
    if span is None or not span.is_recording():
        return
    attributes: dict[str, Any] = {
        semconv.STOP_REASON: verdict.reason,
        semconv.STOP_ACTION: run.action,
        semconv.MESSAGE_SYNTHETIC: synthetic,
    }
    if verdict.breach is not None:
        attributes[semconv.LIMIT_NAME] = verdict.breach.limit
        attributes[semconv.LIMIT_VALUE] = _plain(verdict.breach.cap)
        attributes[semconv.LIMIT_CONSUMED] = _plain(verdict.breach.observed)
    span.set_attributes(attributes)
    span.add_event(semconv.HALT_EVENT, attributes)
    if run.action == "raised":
        error = limit_reached(verdict, run.stop(verdict.reason))
        span.set_attribute(semconv.ERROR_TYPE, type(error).__qualname__)


@unfelt("span")
def _write_warnings(span: trace.Span | None, warnings: tuple[Warned, ...]) -> None:
    """Write each soft threshold that was passed to the live agent span."""
    for warning in warnings:
        if span is not None and span.is_recording():
            span.add_event(
                semconv.WARNING_EVENT,
                {
                    semconv.LIMIT_NAME: warning.level.limit,
                    semconv.LIMIT_VALUE: cast("Any", _plain(warning.level.cap)),
                    semconv.LIMIT_CONSUMED: cast("Any", _plain(warning.level.observed)),
                    semconv.WARNING_THRESHOLD: warning.threshold,
                },
            )
