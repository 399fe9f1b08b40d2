"""What is attached to one agent: it counts, decides at each boundary, and halts."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from opentelemetry import trace
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookOrder,
    HookRegistry,
    MessageAddedEvent,
)
from strands.interrupt import Interrupt, InterruptException
from strands.middleware._registry import MiddlewareRegistry
from strands.types._events import (
    EventLoopStopEvent,
    ModelStopReason,
    ModelStreamChunkEvent,
    StartEventLoopEvent,
    StructuredOutputEvent,
)
from strands.types.exceptions import ContextWindowOverflowException

from otel_limits.bindings.gateways import budget_refusal, chain_of
from otel_limits.bindings.strands.asking import (
    answer_of,
    can_be_extended,
    declined_verdict,
    extend,
    extension_of,
    is_unanswered,
    question,
)
from otel_limits.bindings.strands.notes import append_nudge, with_note, without_tools
from otel_limits.bindings.strands.reading import (
    acceptance_of,
    audit_attributes,
    call_of,
    denial_of,
    estimate_tokens,
    identity_of,
    model_id,
    note_chat_span,
    note_usage,
    provider_of,
    request_of,
    status_of,
    text_of,
    tool_uses,
    usage_of,
)
from otel_limits.bindings.strands.registries import (
    follow_stages,
    follower_of,
    hear_hooks,
    hears,
    is_plain,
    step_back,
)
from otel_limits.bindings.strands.spans import end_cycle_span, write_halt, write_warnings
from otel_limits.core.errors import LimitReachedError, limit_reached
from otel_limits.core.faults import FAULTS, never_raises, never_raises_async, note
from otel_limits.core.limits import KILLED_STOP_REASON, LIMITS, MAX_DURATION_STOP_REASON, Breach
from otel_limits.core.messages import (
    budget_note,
    halt_message,
    halt_text,
    mark,
    refusal_note,
    why,
    wrap_up_note,
)
from otel_limits.core.names import clean
from otel_limits.core.policy import Policy, Verdict, verdict_of
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from strands.agent import AgentResult
    from strands.agent.agent import Agent
    from strands.middleware import InvokeModelContext, MiddlewareNext
    from strands.middleware._agent_stream import AgentStreamContext
    from strands.types.content import Message

    from otel_limits.bindings.strands.registries import Callbacks
    from otel_limits.core.facts import ActionTaken
    from otel_limits.runs.calls import OpenCall
    from otel_limits.runs.registry import Runs
    from otel_limits.runs.run import Run

    Next: TypeAlias = MiddlewareNext[Any, Any]
    Hooks: TypeAlias = tuple[tuple[type, Callable[[Any], Any], float], ...]
    Answered: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any], float | None]
    """A tool use, its result, and the seconds that it ran for if it did."""

VERY_LAST: Final = HookOrder.SDK_LAST + 1
"""After every other hook, so that what the others decided is known."""


MILESTONES: Final[frozenset[type]] = frozenset(
    (StartEventLoopEvent, StructuredOutputEvent, EventLoopStopEvent)
)
"""Of the many events of a leg, those that say how far it is."""

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


class Batch:
    """The tool calls of one turn, as they come and go."""

    refusals: Mapping[str, Breach] = {}
    """Those that a limit refuses, by tool use id: most turns have none."""

    def __init__(self, requests: list[Mapping[str, Any]], *, denied: bool) -> None:
        """Begin with the tool uses, in the order in which the model asked.

        When a hook denied them all, none was admitted.
        """
        self.requests = requests
        self.denied = denied
        self.results: dict[str, AfterToolCallEvent] = {}
        """The final attempt of each, by tool use id."""


@dataclass(slots=True)
class Live:
    """A live invocation of the agent, and how far its leg has got."""

    run: Run
    verdict: Verdict | None = None
    """The halt under way."""
    wrapping: Verdict | None = None
    """The halt before which the model gives a last answer."""
    answer: Interrupt | None = None
    """Our last question that was answered: Strands keeps it, and it is taken once."""
    against: Verdict | None = None
    """What a quota has against the next model call."""
    marked: Message | None = None
    """The message that the halt left."""
    has_output: bool = False
    """True when the leg has produced its structured output."""
    refused: bool = False
    """True when the leg ended because no further model call was let out."""
    overflowed: bool = False
    """True while the last model call was one that overflowed the context."""
    heard: bool = False
    """True when our hooks were called: an application may have put its own in their place."""
    asked: bool = False
    """True from when a response is asked for until it is taken into the conversation."""
    batch: Batch | None = None
    text: str = ""
    """What the model said in the turn under way."""

    @property
    def wrapped_up(self) -> bool:
        """True when the model was asked for its last answer: there is only one."""
        return self.run.wrapped_up or self.wrapping is not None


class Binding:
    """Everything that is attached to one agent.

    Args:
        runs: Where its invocations are followed.
        policy: What applies to an agent of this name, asked for at the start of each invocation.
        is_own: The agent was given it, whatever applies to all others.
    """

    def __init__(
        self, runs: Runs, policy: Callable[[str], Policy], *, is_own: bool = False
    ) -> None:
        """Attach nothing yet."""
        self.policy = policy
        self.is_own = is_own
        self._runs = runs
        self._lock = threading.Lock()
        self._live: list[Live] = []
        self.newest: Live | None = None
        """The last of the live ones: there are more where an agent is used re-entrantly."""
        self._direct: list[Run] = []
        """Requests for structured output without the loop; a tool of the agent may make some."""
        self._stands_in = False
        """True when something stands in for the agent's hooks; else ours are among them."""
        self._further: list[Hooks] = []
        """Hooks that were attached when they were needed."""

    def stands_in_for(self, agent: Agent) -> bool:
        """Tell whether what `agent` does is told here: of a copy it is, until it has its own."""
        return follower_of(agent) is self and hears(agent, self._before_leg)

    # --- what is attached -------------------------------------------------------------------------

    def _tool_hooks(self) -> Hooks:
        return ((BeforeToolCallEvent, self._before_tool, VERY_LAST),)

    def _gate_hooks(self) -> Hooks:
        return (
            (BeforeModelCallEvent, self._ask_gate, VERY_LAST),
            (AfterModelCallEvent, self._tell_gate, HookOrder.SDK_FIRST + 1),
        )

    def attach(self, agent: Agent) -> None:
        """Be told what `agent` does, and follow both of its stages."""
        self._stands_in = hear_hooks(agent, *self._callbacks())
        if not self._stands_in:
            self._attach_callbacks(agent)
        follow_stages(agent, self)

    def _attach_callbacks(self, agent: Agent) -> None:
        first, last = self._callbacks()
        self._attach_also(agent, (*_hooks_of(first, HookOrder.SDK_FIRST), *_hooks_of(last)))

    def _callbacks(self) -> tuple[Callbacks, Callbacks]:
        """Return what is called before all hooks of the agent, and after all of them."""
        return {
            BeforeInvocationEvent: self._before_leg,
            MessageAddedEvent: self._message_added,
            AfterToolCallEvent: self._after_tool,
        }, {
            BeforeToolsEvent: self._before_tools,
            AfterToolsEvent: self._after_tools,
            AfterInvocationEvent: self._after_leg,
        }

    @never_raises("binding")
    def _attach_again(self, agent: Agent) -> None:
        """Stay attached where an application has given the agent registries as Strands makes them.

        What it had before is left alone, as it may be given back.
        """
        lost = self._stands_in and not hears(agent, self._before_leg)
        if lost and hear_hooks(agent, *self._callbacks()):
            for hooks in self._further:
                _add(agent, hooks)
        if is_plain(agent._middleware_registry, MiddlewareRegistry, "invoke"):
            follow_stages(agent, self)

    def _attach_also(self, agent: Agent, hooks: Hooks) -> None:
        """Add hooks that few agents ever need: each one costs every agent that has it."""
        if hooks not in self._further:
            self._further.append(hooks)
            _add(agent, hooks)

    def detach(self, agent: Agent) -> None:
        """Take away what `attach` added, and nothing else; what is live is followed no further."""
        while (run := self._leave()) is not None:
            run.finish(run.reason or "aborted")
        while self._direct:
            self._direct.pop().finish("aborted")
        _remove(agent, [callback for hooks in self._further for _, callback, _ in hooks])
        self._further.clear()
        step_back(agent)

    # --- begin and end of an invocation -----------------------------------------------------------

    @never_raises("binding")
    def begin(self, agent: Agent, span: trace.Span) -> None:
        """An invocation begins under `span`.

        A fault must not leave it without its limits: it is begun once more, as one without a span.
        """
        live_before = len(self._live)
        try:
            self._begin(agent, span)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            FAULTS.report("binding", error)
            if len(self._live) == live_before:
                self._begin(agent, trace.INVALID_SPAN)

    def _begin(self, agent: Agent, span: trace.Span) -> None:
        self._attach_again(agent)
        answer = answer_of(agent)
        policy = self.policy(agent.name)
        if self._runs.observers.gate is not None:  # without one, no call waits
            self._attach_also(agent, self._gate_hooks())
        if answer is not None:
            policy = extend(policy, answer.response)
        declined = declined_verdict(answer)
        run = self._start(agent, span, policy)
        self.newest = Live(run, verdict=declined, answer=answer)
        self._live.append(self.newest)
        CURRENT.set(run)
        run.cancel = _canceller(weakref.ref(self), weakref.ref(agent), weakref.ref(run))
        run.limit_time()

    def _start(
        self, agent: Agent, span: trace.Span, policy: Policy, *, direct: bool = False
    ) -> Run:
        context = span.get_span_context()
        return self._runs.start(
            agent.name,
            policy,
            context.trace_id,
            context.span_id,
            sampled=context.trace_flags.sampled,
            model=model_id(agent.model),
            direct=direct,
            session_id=agent.session_id,
            attributes=audit_attributes(agent, self._runs.audit_keys),
        )

    @never_raises("binding")
    def end(
        self,
        response: AgentResult | None,
        error: Exception | None,
        cancellation: BaseException | None,
    ) -> None:
        """The newest invocation is over, with a result, an exception, or nobody waiting for it."""
        run = self._leave()
        if run is None:
            return
        if response is not None:
            run.finish(response.stop_reason)
        elif isinstance(error, LimitReachedError) and run.verdict is not None:
            run.finish(run.verdict.reason)
        elif cancellation is not None:
            run.finish(run.reason or "aborted")
        else:
            run.finish("error" if error is not None else "aborted")

    @never_raises("binding")
    def begin_direct(self, agent: Agent) -> Run:
        """A direct request for structured output begins, which asks the model without the loop.

        Nothing breaks it off: the signal would hit the next invocation.
        """
        try:
            run = self._start_direct(agent)
        except Exception as error:  # noqa: BLE001  once more, as any invocation
            FAULTS.report("binding", error)
            run = self._start_direct(agent)
        self._direct.append(run)
        CURRENT.set(run)
        return run

    def _start_direct(self, agent: Agent) -> Run:
        return self._start(agent, trace.INVALID_SPAN, self.policy(agent.name), direct=True)

    @never_raises("binding")
    def end_direct(
        self, run: Run | None, agent: Agent, prompt: object, output: object | None
    ) -> None:
        """It is over, without an output where it failed."""
        if run is None or run not in self._direct:
            return
        self._direct.remove(run)
        CURRENT.set(run.parent)
        if output is not None and not run.tally.model_calls:
            _book_unseen(run, agent, prompt, output)
        run.finish("end_turn" if output is not None else "error")

    def _leave(self) -> Run | None:
        with self._lock:  # from here on nobody may cancel: it would hit the next invocation
            live = self._live.pop() if self._live else None
            self.newest = self._live[-1] if self._live else None
        if live is None:
            return None
        CURRENT.set(live.run.parent)
        return live.run

    def cancel(self, agent: Agent, run: Run, verdict: Verdict) -> None:
        """End `run` from any thread: a response under way is broken off."""
        with self._lock:
            live = self.newest
            if live is not None and live.run is run and live.verdict is None:
                live.verdict = verdict
                agent.cancel(message=halt_text(verdict))

    # --- legs, model calls and messages -----------------------------------------------------------

    def _before_leg(self, event: BeforeInvocationEvent) -> None:
        """Begin a leg; the first one keeps what the invocation began with."""
        live = self.newest
        if live is None or self._is_direct():
            return
        live.heard = True
        live.run.leg()
        if live.run.tally.cycles:
            answer = answer_of(event.agent)  # of a hook that resumes our own question
            if answer is not None and answer is not live.answer:
                more = extension_of(answer.response)
                if more is not None:
                    live.run.extend(more)
            verdict, answer = declined_verdict(answer), answer or live.answer
            self._live[-1] = self.newest = Live(
                live.run, verdict=verdict, answer=answer, heard=True
            )

    def _after_leg(self, event: AfterInvocationEvent) -> None:
        """A leg that was refused, or asks a human, is not resumed: nothing would come of it."""
        live = self.newest
        if live is None or self._is_direct():
            return
        if live.batch is not None:  # a hook asked a human before any tool ran
            _give_back(live.run, live.batch)
            live.batch = None
        if live.refused or (event.resume is not None and is_unanswered(event)):
            event.resume = None

    def _is_direct(self) -> bool:
        """Tell whether the present task makes a direct request, which is no leg of the loop."""
        return bool(self._direct) and CURRENT.get() in self._direct

    @never_raises_async("quotas")
    async def _ask_gate(self, event: BeforeModelCallEvent) -> None:
        """Ask whether quotas let the call go out; a hook is the one place where we may wait."""
        gate, live = self._runs.observers.gate, self.newest
        if gate is None or live is None or event.cancel:
            return
        request = request_of(live.run, event)
        live.against = await gate.admit(request) if request is not None else None

    @never_raises_async("quotas")
    async def _tell_gate(self, event: AfterModelCallEvent) -> None:  # noqa: ARG002
        """Settle what was reserved; the call has been booked by now."""
        gate, live = self._runs.observers.gate, self.newest
        if gate is not None and live is not None:
            await gate.settle(live.run.invocation.id)

    def _message_added(self, event: MessageAddedEvent) -> None:
        """Count a turn, or tag the message that a halt left."""
        live, message = self.newest, event.message
        if live is None or message["role"] != "assistant":
            return
        if not self._is_response(event.agent, live, message):
            _perform_if_due(event.agent, live, message)
            return
        live.asked = False
        run = live.run
        run.turn()
        if run.policy.warn_at or run.loops is not None or live.wrapping is not None:
            _look_at_turn(event.agent, live, message)

    def _is_response(self, agent: Agent, live: Live, message: Message) -> bool:
        """Tell a response from what else an assistant says: an earlier one, a denial, a halt.

        Strands writes metadata into each response. Of a stage that does not come by us any more,
        nobody knows when a response was asked for.
        """
        if live.asked:
            return "metadata" in message
        if follower_of(agent) is self:
            return False
        return "usage" in (message.get("metadata") or ())

    # --- tools ------------------------------------------------------------------------------------

    def _before_tools(self, event: BeforeToolsEvent) -> None:
        """Decide in request order which calls may run, before any of them does."""
        live = self.newest
        if live is None:
            return
        if CURRENT.get() is not live.run:
            CURRENT.set(live.run)
        if live.wrapping is not None:
            event.cancel = f"Not run: {why(live.wrapping)}."
            return
        run, denied = live.run, bool(event.cancel)
        live.batch = batch = Batch(tool_uses(event.agent, event.message), denied=denied)
        if denied:
            return
        for request in batch.requests:
            breach = run.admit_tool(request["name"])
            if breach is not None:
                batch.refusals = {**batch.refusals, request["toolUseId"]: breach}
        if batch.refusals:
            self._attach_also(event.agent, self._tool_hooks())

    @never_raises("binding")
    def _before_tool(self, event: BeforeToolCallEvent) -> None:
        """Answer in the place of a tool that has no call left."""
        live = self.newest
        if live is not None and live.batch is not None:
            breach = live.batch.refusals.get(event.tool_use["toolUseId"])
            if breach is not None:
                event.cancel_tool = refusal_note(breach)

    def _after_tool(self, event: AfterToolCallEvent) -> None:
        """Keep the final attempt: a retry comes by here again."""
        live = self.newest
        if live is not None and live.batch is not None:
            live.batch.results[event.tool_use["toolUseId"]] = event

    def _after_tools(self, event: AfterToolsEvent) -> None:
        """End the loop when a limit was reached and the loop would go on."""
        live = self.newest
        if live is None:
            return
        run = live.run
        answered = _close_batch(live, event)
        if run.policy.warn_at:
            write_warnings(event.agent.trace_span, run.warn())
        verdict = live.wrapping or run.judge()
        if self._runs.tool_log is not None:
            _keep(run, answered, halts=verdict is not None)
        if verdict is None or _ends_anyway(live, event):
            return
        if _ends_loop(live, verdict):
            live.verdict, live.wrapping = verdict, None
            event.end_turn = halt_text(verdict)

    # --- stages -----------------------------------------------------------------------------------

    async def agent_stage(
        self, next_fn: Next, context: AgentStreamContext
    ) -> AsyncGenerator[Any, None]:
        """Put our stop reason in place of the framework's, and raise where that is the action."""
        halted = False
        agent = cast("Agent", context.agent)
        events = next_fn(context)
        try:
            async for event in events:
                if type(event) in MILESTONES:
                    try:
                        halted = self._pass(agent, event)
                    except Exception as error:  # noqa: BLE001  the agent must not feel it
                        note("binding", error)
                yield event
        except Exception as error:
            if not self._is_refused(error):
                raise
            halted = True
            yield await self._answer(context)
        finally:
            await events.aclose()
        run = self.newest and self.newest.run
        if halted and run and run.action == "raised" and run.verdict is not None:
            raise limit_reached(run.verdict, run.stop(run.verdict.reason))

    def _is_refused(self, error: Exception) -> bool:
        """Tell a refusal of ours, also where a middleware has made an error of its own of it."""
        halts = self.newest is not None and self.newest.verdict is not None
        return halts and any(isinstance(each, Refused) for each in chain_of(error))

    def _pass(self, agent: Agent, event: object) -> bool:
        """Follow the leg past one of its milestones; True when it is the end, and our halt."""
        live = self.newest
        if live is None:
            return False
        if isinstance(event, EventLoopStopEvent):
            return bool(self._stop(agent, event))
        if isinstance(event, StructuredOutputEvent):
            live.has_output = True
            return False
        if live.overflowed:  # a cycle after an overflow that nobody retried is the recovery
            live.overflowed = False
            live.run.recover()
        if live.run.blind:
            live.run.cycle()
        return False

    @never_raises("binding")
    def _stop(self, agent: Agent, event: EventLoopStopEvent) -> bool:
        """Note how the leg ended; True when it was our halt."""
        live = self.newest
        if live is None:
            return False
        reason, message, *rest = event["stop"]
        _perform_if_due(agent, live, message)
        verdict = live.run.verdict if message is live.marked else None
        if verdict is not None:
            reason = verdict.reason
            event["stop"] = (reason, message, *rest)
        live.run.reason = reason
        return verdict is not None

    async def _answer(self, context: AgentStreamContext) -> EventLoopStopEvent:
        """Answer in the model's place and end the leg."""
        agent, live = cast("Agent", context.agent), cast("Live", self.newest)
        verdict = cast("Verdict", live.verdict)
        message = cast("Message", halt_message(verdict))
        live.asked = False
        await agent._append_messages(message)
        stop = EventLoopStopEvent(
            cast("Any", verdict.reason),  # Strands' type lists only its own reasons
            message,
            agent.event_loop_metrics,
            context.invocation_state.get("request_state", {}),
        )
        self._stop(agent, stop)
        live.refused = True
        return stop

    @never_raises("binding")
    def _hear_again(self, agent: Agent, live: Live) -> None:
        """Be told again what `agent` does, where its hooks were replaced since it began."""
        self._attach_again(agent)
        if live.heard or hears(agent, self._before_leg):
            return
        live.heard, self._stands_in = True, False
        self._further.clear()
        self._attach_callbacks(agent)
        if self._runs.observers.gate is not None:
            self._attach_also(agent, self._gate_hooks())

    def model_stage(self, next_fn: Next, context: InvokeModelContext) -> AsyncGenerator[Any, None]:
        """Follow a model call of a live invocation."""
        live = self.newest
        if live is None:
            return next_fn(context)
        agent = cast("Agent", context.agent)
        if not live.heard or (self._stands_in and type(agent.hooks) is HookRegistry):
            self._hear_again(agent, live)
        return _follow(live, next_fn, context)


def _hooks_of(callbacks: Callbacks, order: float = VERY_LAST) -> Hooks:
    """Return what has to be added where nothing stands in for the registry."""
    return tuple((event, never_raises("binding")(call), order) for event, call in callbacks.items())


def _add(agent: Agent, hooks: Hooks) -> None:
    for event, callback, order in hooks:
        agent.hooks.add_callback(cast("Any", event), callback, order=order)


def _remove(agent: Agent, callbacks: Sequence[Callable[..., Any]]) -> None:
    """Take hooks out of the agent's, in copies: they may be in use at this moment."""
    registered = agent.hooks._registered_callbacks
    for event, entries in list(registered.items()):
        kept = [entry for entry in entries if entry.callback not in callbacks]
        if len(kept) == len(entries):
            continue  # none of ours: the list stays what others may be going through
        if kept:
            registered[event] = kept
        else:
            del registered[event]


@never_raises("binding")
def _book_unseen(run: Run, agent: Agent, prompt: object, output: object) -> None:
    """Book a request that a provider made by itself: of that, nothing is known but the texts."""
    asked = estimate_tokens([agent.messages, prompt])
    call = run.open_side_call(model_id(agent.model), asked, provider_of(type(agent.model)))
    run.settle(call, output_estimate=estimate_tokens(output))


def _canceller(
    binding: weakref.ref[Binding], agent: weakref.ref[Agent], run: weakref.ref[Run]
) -> Callable[[Verdict], None]:
    """Make what ends an invocation from outside, without keeping any of the three alive."""

    def cancel(verdict: Verdict) -> None:
        alive = binding(), agent(), run()
        if alive[0] is not None and alive[1] is not None and alive[2] is not None:
            alive[0].cancel(alive[1], alive[2], verdict)

    return cancel


def _look_at_turn(agent: Agent, live: Live, message: Message) -> None:
    """Do what some limits ask for after each response that was taken into the conversation."""
    if live.run.policy.warn_at:
        write_warnings(agent.trace_span, live.run.warn())
    if live.run.loops is not None:
        live.text = "".join(block.get("text", "") for block in message["content"])
    if live.wrapping is not None and not any("toolUse" in each for each in message["content"]):
        _perform(agent, live, message, live.wrapping, "wrapped_up")


def _give_back(run: Run, batch: Batch) -> None:
    """Count none of a batch that never began: its replay is admitted anew."""
    for request in batch.requests:
        if request["toolUseId"] not in batch.refusals and not batch.denied:
            run.return_tool(request["name"])


def _close_batch(live: Live, event: AfterToolsEvent) -> list[Answered]:
    """Tell the calls that were answered, in request order, and look for repetitions."""
    run, batch, live.batch = live.run, live.batch, None
    if batch is None:
        return []
    answered, calls = [], []
    for request in batch.requests:
        if batch.refusals and request["toolUseId"] in batch.refusals:
            run.tool_called(request["name"], "refused", None, None)
        elif (answer := _answer_to(request, run, batch, event)) is not None:
            use, result, seconds = answer
            answered.append(answer)
            identity = None
            if run.loops is not None:
                calls.append(call_of(run, use, result))
                identity = identity_of(calls[-1])
            run.tool_called(use["name"], status_of(result), seconds, identity)
    if run.loops is not None and event.message["content"]:  # or all of it waits for a human
        run.repeat(calls, live.text)
        if run.nudge():
            append_nudge(event.message)
    return answered


def _answer_to(
    request: Mapping[str, Any], run: Run, batch: Batch, event: AfterToolsEvent
) -> Answered | None:
    """Return what the model is told of a call that no limit refused; only those that ran count."""
    done = batch.results.get(request["toolUseId"])
    if done is not None and done.cancel_message is None:
        return done.tool_use, done.result, done.duration
    if done is None and (accepted := acceptance_of(request, event)) is not None:
        return request, accepted, None
    if not batch.denied:
        run.return_tool(request["name"])
    denial = done.result if done is not None else denial_of(request, event)
    if denial is None:
        return None
    return {**request, "name": clean(request["name"])}, denial, None  # a model may make it up


def _keep(run: Run, answered: Sequence[Answered], *, halts: bool) -> None:
    """Keep the calls of a turn in the tool log; the last one is what halts."""
    for number, (use, result, _) in enumerate(answered, start=1):
        run.keep_tool(
            use["name"],
            use["input"],
            text_of(result),
            trigger=halts and number == len(answered),
        )


def _ends_anyway(live: Live, event: AfterToolsEvent) -> bool:
    """Tell whether the loop stops after these tools without us: the natural end wins."""
    agent = event.agent
    return bool(
        event.end_turn
        or live.has_output
        or agent._deferred_cancel
        or agent._checkpointing
        or agent.cancel_signal.is_set()
        or event.invocation_state.get("request_state", {}).get("stop_event_loop")
    )


def _ends_loop(live: Live, verdict: Verdict) -> bool:
    """Tell whether a verdict ends the loop after tools, or waits for the next model call."""
    action = verdict.action or live.run.policy.action
    if action == "observe" and verdict.reason != KILLED_STOP_REASON:
        live.run.halt(verdict, "observed")
        return False
    if live.wrapping is not None or verdict.reason in AT_ONCE:
        return True
    return action != "ask" and not (action == "wrap_up" and not live.wrapped_up)


def _let_out(live: Live, context: InvokeModelContext) -> None:
    """Raise what keeps a call from going out, if anything does."""
    try:
        verdict = live.verdict
        if verdict is None and (judged := live.run.judge()) is not None:
            verdict = _unless_forced(judged, context)
        if verdict is None and live.against is None:
            return
        refusal = _refusal(live, verdict, context)
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        note("binding", error)
        return
    if refusal is not None:
        end_cycle_span(trace.get_current_span())
        raise refusal


def _refusal(
    live: Live, verdict: Verdict | None, context: InvokeModelContext
) -> InterruptException | None:
    """Return what a limit or a quota does to this call, or `None`."""
    against, live.against = live.against, None
    refusal = _objection(live, verdict, context) if verdict is not None else None
    if refusal is None and against is not None:
        refusal = _objection(live, against, context)
    return refusal


def _objection(
    live: Live, verdict: Verdict, context: InvokeModelContext
) -> InterruptException | None:
    """Return what a verdict does to this call."""
    action = verdict.action or live.run.policy.action
    if action == "observe" and verdict.reason != KILLED_STOP_REASON:
        live.run.halt(verdict, "observed")
        return None
    if live.verdict is None and verdict.reason not in AT_ONCE:
        if action == "ask" and can_be_extended(verdict):
            return question(verdict)
        if action == "wrap_up" and not live.run.wrapped_up and not context.tool_choice:
            live.wrapping = live.wrapping or verdict
            return None
    live.verdict, live.wrapping = verdict, None
    return Refused()


def _open_call(live: Live, context: InvokeModelContext) -> OpenCall | None:
    if CURRENT.get() is not live.run:
        CURRENT.set(live.run)  # one task may read the streams of several agents in turns
    try:
        model, projected = context.model, context.projected_input_tokens
        return live.run.open_call(
            model_id(model),
            estimate_tokens(context.messages) if projected is None else projected,
            provider_of(type(model)),
        )
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        note("binding", error)
        return None


@never_raises("binding")
def _with_notes(live: Live, context: InvokeModelContext) -> InvokeModelContext | None:
    """Tell the model what it has to know; the conversation does not keep it."""
    if live.wrapping is not None and not live.run.wrapped_up:
        live.run.wrapped_up = True
        told = with_note(without_tools(context.messages), wrap_up_note(live.wrapping))
        return context.replace(messages=told, tool_specs=[], tool_choice=None)
    if live.run.policy.tell_model and (levels := live.run.levels()):
        return context.replace(messages=with_note(context.messages, budget_note(levels)))
    return None


async def _follow(
    live: Live, next_fn: Next, context: InvokeModelContext
) -> AsyncGenerator[Any, None]:
    """Let a model call out and note what the provider sends, or refuse it before it costs anything.

    A refusal of the provider is taken for the stop that it is. All of it waits until somebody asks
    for the response: a middleware may prepare several calls, and make none of them.
    """
    _let_out(live, context)
    answer, call = None, _open_call(live, context)
    if live.wrapping is not None or live.run.policy.tell_model:
        context = _with_notes(live, context) or context
    events = next_fn(context)
    silent = True
    try:
        async for event in events:
            kind = type(event)
            # Of the many chunks, the first and that with the usage say all that there is to note.
            if kind is ModelStreamChunkEvent:
                if silent and call is not None:
                    silent, call.streamed = False, True
                    if live.run.blind and live.run.invocation.span_id:
                        note_chat_span(live.run)  # a call has a span where its agent has one
                if "metadata" in (chunk := event["event"]):
                    note_usage(call, chunk)
            elif kind is ModelStopReason:
                answer = event
            yield event
    except Exception as error:
        if not _gives_up(live, call, error):
            raise
        end_cycle_span(trace.get_current_span())
        raise Refused from error
    finally:  # at once, also when nobody reads on: what the loop does next may be told of it
        _book_end(live, call, answer)
        await events.aclose()


def _book_end(live: Live, call: OpenCall | None, answer: ModelStopReason | None) -> None:
    """Book a call that was answered or broken off, unless it was booked as one that failed."""
    if answer is not None:
        live.overflowed = False
    if call is None or not call.is_open:
        return
    try:
        if answer is None:
            live.run.settle(call, failed=True, aborted=True)
            return
        usage = call.counted if call.reported else usage_of(answer.usage)
        known = usage is not None and (usage.input or usage.output)
        estimate = 0 if known else estimate_tokens(answer.message["content"])
        live.run.settle(call, usage, output_estimate=estimate)
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        note("binding", error)


@never_raises("binding")
def _gives_up(live: Live, call: OpenCall | None, error: Exception) -> bool:
    """Tell whether a failed call is a halt: a gateway's budget is spent, or it was the last."""
    live.overflowed = isinstance(error, ContextWindowOverflowException)
    if call is not None and call.is_open:
        live.run.settle(call, failed=True)
    verdict = budget_refusal(error) or live.wrapping
    if verdict is None:
        return False
    live.verdict, live.wrapping = verdict, None
    return True


def _perform(
    agent: Agent, live: Live, message: Message, verdict: Verdict, action: ActionTaken
) -> None:
    """The halt is a fact now: tell it, mark its message and the live span."""
    live.run.halt(verdict, action)
    live.marked = message
    stop = live.run.stop(verdict.reason)
    synthetic = action != "wrapped_up"
    mark(cast("dict[str, Any]", message), stop, synthetic=synthetic)
    write_halt(agent.trace_span, verdict, live.run, synthetic=synthetic)


@never_raises("binding")
def _perform_if_due(agent: Agent, live: Live, message: Message) -> None:
    """Perform the halt under way when this is its message, unless that was done."""
    if live.marked is not None or live.verdict is None:
        return
    if message["content"] == [{"text": halt_text(live.verdict)}]:
        _perform(agent, live, message, live.verdict, _taken(live))


def _taken(live: Live) -> ActionTaken:
    """What the halt under way is called, with a synthetic message."""
    action = (live.verdict and live.verdict.action) or live.run.policy.action
    return "raised" if action == "raise" else "halted"


def _unless_forced(verdict: Verdict, context: InvokeModelContext) -> Verdict | None:
    """Let the call that only forces structured output pass the limits that yield to it."""
    if context.structured_output_model is None:
        return verdict
    return verdict_of(
        tuple(
            breach
            for breach in verdict.breaches
            if breach.limit not in LIMITS or not LIMITS[breach.limit].yields_to_output
        )
    )
