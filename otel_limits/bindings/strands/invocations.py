"""Live invocations of Strands agents: how each begins and ends, and how far its leg has got."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_limits.bindings.strands.a2a import attach_stop
from otel_limits.bindings.strands.approval import (
    answer_of,
    consume_answer,
    declined_verdict,
    extend,
)
from otel_limits.bindings.strands.marks import HOST
from otel_limits.bindings.strands.pending_waits import PendingWaits
from otel_limits.bindings.strands.projection import ConversationTokens
from otel_limits.bindings.strands.readers import audit_attributes, model_id
from otel_limits.bindings.strands.requests import call_to
from otel_limits.core.errors import LimitReachedError
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.messages import halt_text
from otel_limits.core.policy import Verdict
from otel_limits.runs.tree import CURRENT, TASK_SCOPE, for_threads
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry.context import Context
    from strands.agent import AgentResult
    from strands.agent.agent import Agent
    from strands.hooks import HookRegistry
    from strands.middleware import InvokeModelContext
    from strands.types.content import Message
    from strands.types.events import ModelStopReason

    from otel_limits.bindings.framework import Host
    from otel_limits.bindings.strands.batch import Batch
    from otel_limits.core.policy import Policy
    from otel_limits.runs.run import Run
    from otel_limits.runs.tree import TaskScope


@dataclass(slots=True, eq=False)
class LiveInvocation:
    """A live invocation of an agent, and how far its leg has got; each leg has a new one."""

    run: Run
    agent: weakref.ref[Agent]
    hooks: HookRegistry | None
    """The registry that our hooks are in: an application may put another one in its place."""
    verdict: Verdict | None = None
    """The halt under way."""
    wrapping: Verdict | None = None
    """The halt before which the model gives a last answer."""
    against: Verdict | None = None
    """What a quota has against the next model call."""
    is_cancelled: bool = False
    """True when the application has cancelled the agent before its model call went out."""
    ending: Any = None
    """The stop event, once the leg has come to its end; its hooks may still be at work."""
    marked: Message | None = None
    """The message that the halt left."""
    has_output: bool = False
    """True when the leg has produced its structured output."""
    refused: bool = False
    """True when the leg ended because no further model call was let out."""
    overflowed: bool = False
    """True while the last model call was one that overflowed the context."""
    asked: bool = False
    """True from when a response is asked for until it is taken into the conversation."""
    response: ModelStopReason | None = None
    """What the model has answered to that."""
    is_cut: bool = False
    """True when that was broken off before its end, as the invocation was ended."""
    last_response: Message | None = None
    """The response that was taken last: its tools are this invocation's."""
    forced_after: int | None = None
    """Turns before the call that only forces structured output; a second one counts like any."""
    staged: bool = False
    """True while our stage follows the leg: copied middleware may have it twice."""
    batch: Batch | None = None
    text: str = ""
    """What the model said in the turn under way."""
    side_verdict: Verdict | None = None
    """Why a call was refused that the leg may have asked for beside its own."""
    waits: PendingWaits = field(default_factory=PendingWaits)
    """What the invocation waits for; its legs share them."""

    @property
    def wrapped_up(self) -> bool:
        """True when the model was asked for its last answer: there is only one."""
        return self.run.budget.wrapped_up or self.wrapping is not None

    def only_forces(self, context: InvokeModelContext) -> bool:
        """Tell whether a call only forces structured output: the leg's first that does.

        A response that ended the leg is followed by one such call. What comes after that tries to
        mend an output that was not valid, and those turns count like any other.
        """
        if context.structured_output_model is None:
            return False
        if self.forced_after is None:
            self.forced_after = self.run.tally.turns
        return self.forced_after == self.run.tally.turns


class AgentState:
    """What goes on in one agent."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.own: Callable[[str], Policy] | None = None
        """What applies to it by a plugin of its own, by its name."""
        self.live: list[LiveInvocation] = []
        """More than one where an agent is used re-entrantly."""
        self.direct: list[Run] = []
        """Requests for structured output without the loop; a tool of the agent may make some."""
        self.requested: dict[tuple[int, str], tuple[TaskScope, Context]] = {}
        """For whom its tools run, and within which span, from their request to their end."""
        self.tokens = ConversationTokens()
        self.lock = threading.Lock()
        """Held while one leaves: who cancels later would hit the next invocation."""

    def current(self) -> LiveInvocation | None:
        """Return the invocation that the present task works for, or else the newest."""
        several, scope = tuple(self.live), CURRENT.get()
        while len(several) > 1 and scope is not None:
            for live in several:
                if live.run is scope:
                    return live
            scope = scope.parent
        return several[-1] if several else None

    def leave(self) -> Run | None:
        """Take the present invocation away."""
        with self.lock:
            live = self.current()
            if live is None:
                return None
            self.live.remove(live)
        # A thread that outlives it keeps the invocation, and must not keep the agent by its hooks.
        live.hooks = None
        CURRENT.set(live.run.parent)
        return live.run

    def abort(self) -> None:
        """End all that is live here, as nothing is followed any more."""
        # Each is finished outside the lock: that tells observers, which are foreign code.
        while (run := self.leave()) is not None:
            run.released = True
            run.finish(run.reason or "aborted")
        while self.direct:
            run = self.direct.pop()
            run.released = True
            run.finish("aborted")


class AgentStates:
    """The states of agents, by identity: one that is equal to another is not that one."""

    def __init__(self) -> None:
        """Begin with none."""
        # Not a WeakKeyDictionary, which asks for a hash: a subclass that defines `__eq__` alone has
        # none.
        self._states: dict[int, tuple[weakref.ref[Agent], AgentState]] = {}

    def __iter__(self) -> Iterator[AgentState]:
        """Every state of an agent that is alive."""
        return (state for _, state in list(self._states.values()))

    def get(self, agent: object) -> AgentState | None:
        """Return the state of an agent that was followed before."""
        entry = self._states.get(id(agent))
        # Python gives the id of an object that is gone to the next one that is made.
        return entry[1] if entry is not None and entry[0]() is agent else None

    def of(self, agent: Any) -> AgentState:
        """Return the state of an agent, made when it is new."""
        state = self.get(agent)
        if state is None:
            key, state = id(agent), AgentState()

            def forget(gone: weakref.ref[Agent]) -> None:
                # By then another agent may have been made in the same place.
                if self._states.get(key, (None,))[0] is gone:
                    del self._states[key]

            self._states[key] = (weakref.ref(agent, forget), state)
        return state


STATES = AgentStates()


def live_of(agent: object) -> LiveInvocation | None:
    """Return the present live invocation of an agent, if it has one that is followed."""
    state = STATES.get(agent)
    return state.current() if state is not None else None


@suppress_errors("binding")
def is_of_another(agent: Agent, live: LiveInvocation, message: Message) -> bool:
    """Tell whether a message asks for tools of another invocation that the agent runs at once."""
    others = [each for each in STATES.of(agent).live if each is not live]
    return any(each.last_response is message for each in others)


@suppress_errors("binding")
def begin(agent: Agent, span: trace.Span, policy_of: Callable[[str], Policy]) -> bool:
    """An invocation begins under `span`.

    A fault must not leave it without its limits: it is begun once more, as one without a span.

    Returns:
        True, unless it could not be begun and is not followed.
    """
    former = live_of(agent)
    try:
        _begin(agent, span, policy_of)
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        INTERNAL_ERRORS.report("binding", error)
        # Only where nothing was begun: a second one on top would never be ended.
        if live_of(agent) is former:
            _begin(agent, trace.INVALID_SPAN, policy_of)
    return True


def _begin(agent: Agent, span: trace.Span, policy_of: Callable[[str], Policy]) -> None:
    state, answer = STATES.of(agent), answer_of(agent)
    # An invocation that resumes our question begins with what the human gave it more.
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
            agent.cancel_signal.clear()  # of one that is ending, and needs it no more
    consume_answer(agent, answer)
    # Not reset by a token: the stream may be read, and closed, in another context than this one.
    CURRENT.set(run)
    # Nor this: Strands takes back all that is attached until the span of an invocation has begun.
    spans = otel_context.get_current()
    otel_context.attach(for_threads(run, TASK_SCOPE.get(), spans) or spans)
    # Before the deadline, which is not waited for where nothing could be broken off.
    run.cancel = _canceller(weakref.ref(agent), weakref.ref(run))
    run.time_limit.start()


def _host() -> Host:
    assert HOST.host is not None  # it is what switched the patches on
    return HOST.host


def _start(agent: Agent, span: trace.Span, policy: Policy, *, direct: bool = False) -> Run:
    context, runs = span.get_span_context(), _host().runs
    return runs.start(
        agent.name,
        policy,
        context.trace_id,
        context.span_id,
        sampled=context.trace_flags.sampled,
        model=model_id(agent.model),
        direct=direct,
        session_id=agent.session_id,
        attributes=audit_attributes(agent, runs.audit_keys),
    )


def _canceller(
    agent_ref: weakref.ref[Agent], run_ref: weakref.ref[Run]
) -> Callable[[Verdict], None]:
    """Make what ends an invocation from any thread, without keeping it or its agent alive."""

    @suppress_errors("binding")
    def cancel(verdict: Verdict) -> None:
        agent, run = agent_ref(), run_ref()
        state = STATES.get(agent)
        if agent is None or run is None or state is None:
            return
        # Under the lock, as `agent.cancel` would otherwise hit the invocation that begins next.
        with state.lock:
            live = next((each for each in state.live if each.run is run), None)
            # The halt that came first stands.
            if live is None or live.ending is not None or live.verdict is not None:
                return  # what its hooks still do is theirs; a leg that one resumes is refused
            live.verdict = verdict
            # Tools hear of it as well, but it would end every invocation of the agent.
            if len(state.live) == 1:
                agent.cancel(message=halt_text(verdict, run.invocation.agent))
            # Strands looks at that between chunks only, and there may never be another one.
            live.waits.cut()

    return cancel


@suppress_errors("binding")
def end(
    agent: Agent,
    response: AgentResult | None,
    error: Exception | None,
    cancellation: BaseException | None,
) -> None:
    """The present invocation is over, with a result, an exception, or nobody waiting for it."""
    state = STATES.get(agent)
    # It leaves before anybody is told, as what an observer does then (even calling the agent) comes
    # later than this invocation.
    # Once more where a fault broke it off: what has not left is never told as ended.
    run = None if state is None else _leave(state) or _leave(state)
    if run is None:
        return
    attach_stop(run, response)
    if response is not None:
        run.finish(response.stop_reason)
    elif isinstance(error, LimitReachedError) and _is_raised_by(error, run):
        run.finish(error.stop.reason)  # type: ignore[union-attr]
    elif isinstance(error, LimitReachedError) and run.verdict is not None:
        run.finish(run.verdict.reason)
    # The reason of its last leg, if that came to its end before nobody waited any more.
    elif cancellation is not None:
        run.finish(run.reason or "aborted")
    else:
        run.finish("error" if error is not None else "aborted")


@suppress_errors("binding")
def _leave(state: AgentState) -> Run | None:
    return state.leave()


def _is_raised_by(error: LimitReachedError, run: Run) -> bool:
    """Tell whether it was a refusal that ended an invocation, and tell that as its halt.

    A hook that runs after the loop asked a model, and did nothing about the refusal.
    """
    stop = error.stop
    if stop is None or run.verdict is not None or stop.invocation_id != run.invocation.id:
        return False
    run.halt(Verdict(stop.reason, stop.breaches), "raised")
    return True


@suppress_errors("binding")
def begin_direct(agent: Agent, policy_of: Callable[[str], Policy]) -> Run:
    """A direct request for structured output begins, which asks the model without the loop.

    Nothing breaks it off: `agent.cancel` would hit the next invocation.
    """
    state, policy = STATES.of(agent), policy_of(agent.name)
    try:
        run = _start(agent, trace.INVALID_SPAN, policy, direct=True)
    except Exception as error:  # noqa: BLE001  once more, as any invocation
        INTERNAL_ERRORS.report("binding", error)
        run = _start(agent, trace.INVALID_SPAN, policy, direct=True)
    state.direct.append(run)
    CURRENT.set(run)
    return run


@suppress_errors("binding")
def end_direct(run: Run | None, agent: Agent, prompt: object, output: object | None) -> None:
    """A direct request is over, without an output where it failed."""
    state = STATES.get(agent)
    # `disable()` ends direct requests that are under way, and what it has ended is over.
    if run is None or state is None or run not in state.direct:
        return
    state.direct.remove(run)
    CURRENT.set(run.parent)
    # Most providers ask for structured output without `Model.stream`, where we would have seen it.
    if output is not None and not run.tally.model_calls:
        _record_unseen(run, agent, prompt, output)
    # A refusal is how such a request is halted: it has no loop that could end.
    if output is None and run.verdict is not None and run.action == "raised":
        run.finish(run.verdict.reason)
    else:
        run.finish("end_turn" if output is not None else "error")


@suppress_errors("binding")
def _record_unseen(run: Run, agent: Agent, prompt: object, output: object) -> None:
    """Book a request that a provider made by itself: only its texts are known."""
    call = call_to(agent.model, [*agent.messages, prompt])
    call.parts.append(as_json(output))
    run.calls.settle(run.calls.open(call))


def is_direct(agent: Agent) -> bool:
    """Tell whether the present task makes a direct request, which is not a leg of the loop."""
    state = STATES.get(agent)
    return state is not None and bool(state.direct) and CURRENT.get() in state.direct
