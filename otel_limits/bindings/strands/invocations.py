"""Invocations of Strands agents in progress: their start, state and end."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_limits.bindings.admission import Admission
from otel_limits.bindings.extensions import extend
from otel_limits.bindings.strands.a2a import attach_stop
from otel_limits.bindings.strands.approval import (
    answer_of,
    consume_answer,
    declined_verdict,
)
from otel_limits.bindings.strands.marks import HOST, stops_of
from otel_limits.bindings.strands.projection import ConversationTokens
from otel_limits.bindings.strands.readers import audit_attributes, model_id
from otel_limits.bindings.strands.requests import call_to
from otel_limits.core.errors import LimitReachedError, stop_of_error
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.policy import Verdict
from otel_limits.runs.current import CURRENT, TASK_SCOPE, for_threads
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.context import Context
    from strands.agent import AgentResult
    from strands.agent.agent import Agent
    from strands.hooks import HookRegistry
    from strands.middleware import InvokeModelContext
    from strands.types.content import Message
    from strands.types.events import ModelStopReason

    from otel_limits.bindings.strands.batch import Batch
    from otel_limits.core.events import Stop
    from otel_limits.core.policy import Policy
    from otel_limits.runs.current import TaskScope
    from otel_limits.runs.run import Run


@dataclass(slots=True, eq=False)
class LiveInvocation(Admission):
    """The state of an invocation in progress; replaced for each leg."""

    agent: weakref.ref[Agent]
    hooks: HookRegistry | None
    """The registry with our hooks, which an application may replace."""
    against: Verdict | None = None
    """A quota's refusal of the next model call."""
    is_cancelled: bool = False
    """True if the application cancelled the agent before its model call was sent."""
    ending: Any = None
    """The stop event, once the leg has ended; its hooks may still be running."""
    marked: Message | None = None
    """The message written by the halt."""
    has_streamed_text: bool = False
    """True once the end user's text was streamed."""
    has_output: bool = False
    """True once the leg has produced its structured output."""
    refused: bool = False
    """True if the leg ended because a model call was refused."""
    overflowed: bool = False
    """True if the last model call overflowed the context."""
    asked: bool = False
    """True from when a response is requested until it is added to the conversation."""
    response: ModelStopReason | None = None
    """The model's response to that request."""
    is_cut: bool = False
    """True if the response was broken off because the invocation was ended."""
    last_response: Message | None = None
    """The last response added to the conversation: its tools belong to this invocation."""
    forced_after: int | None = None
    """Turns before the call that only forces structured output; a second such call counts."""
    staged: bool = False
    """True while our stage tracks the leg: copied middleware may have it twice."""
    batch: Batch | None = None
    inner_stops: Sequence[Stop] = ()
    """The stops of the sub-agent that ended last."""
    delegated: Sequence[Stop] = ()
    """The stops of an agent whose answer becomes the next message."""
    text: str = ""
    """Text of the model in the current turn."""

    def only_forces(self, context: InvokeModelContext) -> bool:
        """Return whether a call is the leg's first that only forces structured output.

        One such call follows a response that ended the leg. Later ones try to correct an invalid
        output, and count as turns.
        """
        if context.structured_output_model is None:
            return False
        if self.forced_after is None:
            self.forced_after = self.run.tally.turns
        return self.forced_after == self.run.tally.turns


class AgentState:
    """Invocations and tools of one agent."""

    def __init__(self) -> None:
        """Create the state of an idle agent."""
        self.own: Callable[[str], Policy] | None = None
        """Returns its policy by its name, if it has a plugin."""
        self.live: list[LiveInvocation] = []
        """Several if an agent is used re-entrantly."""
        self.session: Any = None
        """Its realtime session in progress: a `sessions.Session`, which imports this module."""
        self.direct: list[Run] = []
        """Direct requests for structured output, e.g. by a tool of the agent."""
        self.requested: dict[tuple[int, str], tuple[TaskScope, Context]] = {}
        """Scope and span of its tools, from request to end."""
        self.tokens = ConversationTokens()
        self.lock = threading.Lock()
        """Held while an invocation is removed: a later cancel would hit the next one."""

    def current(self) -> LiveInvocation | None:
        """Return the invocation of the current task, or else the newest."""
        several, scope = tuple(self.live), CURRENT.get()
        while len(several) > 1 and scope is not None:
            for live in several:
                if live.run is scope:
                    return live
            scope = scope.parent
        return several[-1] if several else None

    def leave(self) -> Run | None:
        """Remove the current invocation."""
        with self.lock:
            live = self.current()
            if live is None:
                return None
            self.live.remove(live)
        # A thread that outlives it keeps the invocation, but must not keep the agent alive by its
        # hooks.
        live.hooks = None
        return live.run

    def abort(self) -> None:
        """End all invocations when otel-limits is disabled."""
        # Each is finished outside the lock, as that calls observers, which are third-party code.
        while (run := self.leave()) is not None:
            run.released = True
            run.finish(run.reason or "aborted")
        if (session := self.session) is not None:
            self.session, session.run.released = None, True
            session.run.finish("aborted")
        while self.direct:
            run = self.direct.pop()
            run.released = True
            run.finish("aborted")


class AgentStates:
    """States of agents by identity, as different agents may be equal."""

    def __init__(self) -> None:
        """Create an empty table."""
        # Not a WeakKeyDictionary: a subclass that defines only `__eq__` has no hash.
        self._states: dict[int, tuple[weakref.ref[Agent], AgentState]] = {}

    def __iter__(self) -> Iterator[AgentState]:
        """Iterate over the states of existing agents."""
        return (state for _, state in list(self._states.values()))

    def get(self, agent: object) -> AgentState | None:
        """Return the state of an agent, if it has one."""
        entry = self._states.get(id(agent))
        # Python reuses the ID of a deleted object.
        return entry[1] if entry is not None and entry[0]() is agent else None

    def of(self, agent: Any) -> AgentState:
        """Return the state of an agent, created if needed."""
        state = self.get(agent)
        if state is None:
            key, state = id(agent), AgentState()

            def forget(gone: weakref.ref[Agent]) -> None:
                # Another agent may have the same ID now.
                if self._states.get(key, (None,))[0] is gone:
                    del self._states[key]

            self._states[key] = (weakref.ref(agent, forget), state)
        return state


STATES = AgentStates()


def live_of(agent: object) -> LiveInvocation | None:
    """Return the current invocation of an agent, if it is tracked."""
    state = STATES.get(agent)
    return state.current() if state is not None else None


@suppress_errors("binding")
def is_of_another(agent: Agent, live: LiveInvocation, message: Message) -> bool:
    """Return whether a message requests tools of another concurrent invocation of the agent."""
    others = [each for each in STATES.of(agent).live if each is not live]
    return any(each.last_response is message for each in others)


@suppress_errors("binding")
def begin(agent: Agent, span: trace.Span, policy_of: Callable[[str], Policy]) -> bool:
    """Begin an invocation under `span`.

    After an internal error it is restarted without a span, so that its limits apply.

    Returns:
        True, unless it is not tracked because of an error.
    """
    former = live_of(agent)
    try:
        _begin(agent, span, policy_of)
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        INTERNAL_ERRORS.report("binding", error)
        # Only if none was begun: a second one would never end.
        if live_of(agent) is former:
            _begin(agent, trace.INVALID_SPAN, policy_of)
    return True


def _begin(agent: Agent, span: trace.Span, policy_of: Callable[[str], Policy]) -> None:
    state, answer = STATES.of(agent), answer_of(agent)
    # An invocation that resumes our question begins with the human's extension.
    policy = policy_of(agent.name)
    if answer is not None:
        policy = extend(policy, answer.response)
    declined = declined_verdict(answer)
    run = _start(agent, span, policy)
    live = LiveInvocation(run, weakref.ref(agent), agent.hooks, verdict=declined)
    state.live.append(live)
    run.state = live
    with state.lock:
        if any(each.waits.is_cut for each in state.live):
            agent.cancel_signal.clear()  # of an invocation that is ending and no longer needs it
    consume_answer(agent, answer)
    # Not reset by a token: the stream may be read, and closed, in another context.
    CURRENT.set(run)
    # Nor this: Strands detaches everything attached before an invocation's span starts.
    spans = otel_context.get_current()
    otel_context.attach(for_threads(run, TASK_SCOPE.get(), spans) or spans)
    # Before the deadline starts, which needs a way to end the invocation.
    run.cancel = _canceller(weakref.ref(agent), weakref.ref(run))
    run.time_limit.start()


def _start(agent: Agent, span: trace.Span, policy: Policy, *, direct: bool = False) -> Run:
    context = span.get_span_context()
    assert HOST.host is not None  # set before the patches are applied
    runs = HOST.host.runs
    return runs.start(
        agent.name,
        policy,
        context.trace_id,
        context.span_id,
        sampled=context.trace_flags.sampled,
        model=model_id(agent.model),
        direct=direct,
        session_id=agent.session_id,
        attributes=audit_attributes(agent.trace_attributes, runs.audit_keys),
    )


def _canceller(
    agent_ref: weakref.ref[Agent], run_ref: weakref.ref[Run]
) -> Callable[[Verdict], None]:
    """Return a function that ends an invocation from any thread, without keeping it alive."""

    @suppress_errors("binding")
    def cancel(verdict: Verdict) -> None:
        agent, run = agent_ref(), run_ref()
        state = STATES.get(agent)
        if agent is None or run is None or state is None:
            return
        # Under the lock, or `agent.cancel` could hit the next invocation.
        with state.lock:
            live = next((each for each in state.live if each.run is run), None)
            # The first halt wins.
            if live is None or live.ending is not None or live.verdict is not None:
                return  # its hooks may finish; a leg that one of them resumes is refused
            live.verdict = verdict
            # This also reaches tools, but it ends every invocation of the agent.
            if len(state.live) == 1:
                agent.cancel(message=live.text_of(verdict))
            # Strands checks that between chunks only, and there may be no further chunk.
            live.waits.cut()

    return cancel


@suppress_errors("binding")
def end(
    agent: Agent,
    response: AgentResult | None,
    error: Exception | None,
    cancellation: BaseException | None,
) -> None:
    """End the current invocation after a result, an exception or a cancellation."""
    state = STATES.get(agent)
    # Removed before observers are called, as they may even call the agent again.
    # Repeated after an internal error: an invocation that is not removed never ends.
    run = None if state is None else _leave(state) or _leave(state)
    if run is None:
        return
    attach_stop(run, response)
    parent = None if run.parent is None else getattr(run.parent, "state", None)
    if isinstance(parent, LiveInvocation):
        parent.inner_stops = stops_of(response)
    if response is not None:
        run.finish(response.stop_reason)
    elif isinstance(error, LimitReachedError) and _is_raised_by(error, run):
        run.finish(error.stop.reason)  # type: ignore[union-attr]
    elif isinstance(error, LimitReachedError) and run.verdict is not None:
        run.finish(run.verdict.reason)
    elif error is not None and _is_noted_by(error, run):
        run.finish(run.verdict.reason)  # type: ignore[union-attr]
    # The reason of its last leg, if that ended before the cancellation.
    elif cancellation is not None:
        run.finish(run.reason or "aborted")
    else:
        run.finish("error" if error is not None else "aborted")


@suppress_errors("binding")
def _leave(state: AgentState) -> Run | None:
    return state.leave()


def _is_noted_by(error: Exception, run: Run) -> bool:
    """Return whether an application's own error ended an invocation with the action `raise`."""
    stop = stop_of_error(error)
    return run.verdict is not None and stop is not None and stop.invocation_id == run.invocation.id


def _is_raised_by(error: LimitReachedError, run: Run) -> bool:
    """Return whether an invocation was ended by a refusal, and publish that as its halt.

    This happens when a hook calls a model after the loop and does not handle the refusal.
    """
    stop = error.stop
    if stop is None or run.verdict is not None or stop.invocation_id != run.invocation.id:
        return False
    run.halt(Verdict(stop.reason, stop.breaches), "raised")
    return True


@suppress_errors("binding")
def begin_direct(agent: Agent, policy_of: Callable[[str], Policy]) -> Run:
    """Begin a direct request for structured output, which calls the model without the loop.

    It cannot be broken off: `agent.cancel` would hit the next invocation.
    """
    state, policy = STATES.of(agent), policy_of(agent.name)
    try:
        run = _start(agent, trace.INVALID_SPAN, policy, direct=True)
    except Exception as error:  # noqa: BLE001  repeated, like any invocation
        INTERNAL_ERRORS.report("binding", error)
        run = _start(agent, trace.INVALID_SPAN, policy, direct=True)
    state.direct.append(run)
    CURRENT.set(run)
    return run


@suppress_errors("binding")
def end_direct(run: Run | None, agent: Agent, prompt: object, output: object | None) -> None:
    """End a direct request; it has no output if it failed."""
    state = STATES.get(agent)
    # `disable()` may have ended it before.
    if run is None or state is None or run not in state.direct:
        return
    state.direct.remove(run)
    CURRENT.set(run.parent)
    # Most providers request structured output without `Model.stream`, where we would track it.
    if output is not None and not run.tally.model_calls:
        _record_unseen(run, agent, prompt, output)
    # Such a request has no loop: it is halted by a refusal.
    if output is None and run.verdict is not None and run.raised:
        run.finish(run.verdict.reason)
    else:
        run.finish("end_turn" if output is not None else "error")


@suppress_errors("binding")
def _record_unseen(run: Run, agent: Agent, prompt: object, output: object) -> None:
    """Record a request of which only the texts are known."""
    call = call_to(agent.model, [*agent.messages, prompt])
    call.parts.append(as_json(output))
    run.calls.settle(run.calls.open(call))


def is_direct(agent: Agent) -> bool:
    """Return whether the current task makes a direct request, which is not a leg of the loop."""
    state = STATES.get(agent)
    return state is not None and bool(state.direct) and CURRENT.get() in state.direct
