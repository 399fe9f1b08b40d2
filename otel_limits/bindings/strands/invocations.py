"""Live invocations of Strands agents: how each begins and ends, and how far its leg has got."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from otel_limits.bindings.strands.asking import answer_of, declined_verdict, extend
from otel_limits.bindings.strands.framework import STRANDS
from otel_limits.bindings.strands.reading import (
    audit_attributes,
    estimate_tokens,
    model_id,
    provider_of,
)
from otel_limits.core.errors import LimitReachedError
from otel_limits.core.faults import FAULTS, never_raises
from otel_limits.core.messages import halt_text
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from strands.agent import AgentResult
    from strands.agent.agent import Agent
    from strands.hooks import AfterToolCallEvent, HookRegistry
    from strands.interrupt import Interrupt
    from strands.types.content import Message

    from otel_limits.bindings.framework import Host
    from otel_limits.core.limits import Breach
    from otel_limits.core.policy import Policy, Verdict
    from otel_limits.runs.run import Run


class Batch:
    """The tool calls of one turn, as they come and go."""

    def __init__(self, requests: list[Mapping[str, Any]], *, denied: bool) -> None:
        """Begin with the tool uses, in the order in which the model asked.

        When a hook denied them all, none was admitted.
        """
        self.requests = requests
        self.denied = denied
        self.refusals: dict[str, Breach] = {}
        """Those that a limit refuses, by tool use id."""
        self.results: dict[str, AfterToolCallEvent] = {}
        """The final attempt of each, by tool use id."""


@dataclass(slots=True)
class Live:
    """A live invocation of an agent, and how far its leg has got; each leg has a new one."""

    run: Run
    agent: weakref.ref[Agent]
    hooks: HookRegistry
    """The registry that our hooks are in: an application may put another one in its place."""
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
    asked: bool = False
    """True from when a response is asked for until it is taken into the conversation."""
    staged: bool = False
    """True while our stage follows the leg: copied middleware may have it twice."""
    batch: Batch | None = None
    text: str = ""
    """What the model said in the turn under way."""

    @property
    def wrapped_up(self) -> bool:
        """True when the model was asked for its last answer: there is only one."""
        return self.run.wrapped_up or self.wrapping is not None


class AgentState:
    """What goes on in one agent."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.own: Callable[[str], Policy] | None = None
        """What applies to it by a plugin of its own, by its name."""
        self.live: list[Live] = []
        """More than one where an agent is used re-entrantly; events go to the newest."""
        self.direct: list[Run] = []
        """Requests for structured output without the loop; a tool of the agent may make some."""
        self.lock = threading.Lock()
        """Held while the newest one leaves: who cancels later would hit the next invocation."""

    def leave(self) -> Run | None:
        """Take the newest invocation away."""
        with self.lock:
            live = self.live.pop() if self.live else None
        if live is None:
            return None
        CURRENT.set(live.run.parent)
        return live.run

    def abort(self) -> None:
        """End all that is live here, as nothing is followed any more."""
        while (run := self.leave()) is not None:
            run.finish(run.reason or "aborted")
        while self.direct:
            self.direct.pop().finish("aborted")


class AgentStates:
    """The states of agents, by identity: one that is equal to another is not that one."""

    def __init__(self) -> None:
        """Begin with none."""
        self._states: dict[int, tuple[weakref.ref[Agent], AgentState]] = {}

    def __iter__(self) -> Iterator[AgentState]:
        """Every state of an agent that is alive."""
        return (state for _, state in list(self._states.values()))

    def get(self, agent: object) -> AgentState | None:
        """Return the state of an agent that was followed before."""
        entry = self._states.get(id(agent))
        return entry[1] if entry is not None and entry[0]() is agent else None

    def of(self, agent: Agent) -> AgentState:
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


def live_of(agent: object) -> Live | None:
    """Return the newest live invocation of an agent, if it has one that is followed."""
    state = STATES.get(agent)
    return state.live[-1] if state is not None and state.live else None


@never_raises("binding")
def begin(agent: Agent, span: trace.Span, policy_of: Callable[[str], Policy]) -> None:
    """An invocation begins under `span`.

    A fault must not leave it without its limits: it is begun once more, as one without a span.
    """
    former = live_of(agent)
    try:
        _begin(agent, span, policy_of)
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        FAULTS.report("binding", error)
        if live_of(agent) is former:
            _begin(agent, trace.INVALID_SPAN, policy_of)


def _begin(agent: Agent, span: trace.Span, policy_of: Callable[[str], Policy]) -> None:
    state, answer = STATES.of(agent), answer_of(agent)
    # An invocation that resumes our question begins with what the human gave it more.
    policy = policy_of(agent.name)
    if answer is not None:
        policy = extend(policy, answer.response)
    declined = declined_verdict(answer)
    run = _start(agent, span, policy)
    live = Live(run, weakref.ref(agent), agent.hooks, verdict=declined, answer=answer)
    state.live.append(live)
    run.state = live
    # Not reset by a token: the stream may be read, and closed, in another context than this one.
    CURRENT.set(run)
    run.cancel = _canceller(weakref.ref(agent), weakref.ref(run))
    run.time_limit.start()


def _host() -> Host:
    assert STRANDS.host is not None  # it is what switched the patches on
    return STRANDS.host


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

    def cancel(verdict: Verdict) -> None:
        agent, run = agent_ref(), run_ref()
        state = STATES.get(agent)
        if agent is None or state is None:
            return
        # Under the lock, as `agent.cancel` would otherwise hit the invocation that begins next.
        with state.lock:
            live = state.live[-1] if state.live else None
            if live is not None and live.run is run and live.verdict is None:
                live.verdict = verdict
                agent.cancel(message=halt_text(verdict))

    return cancel


@never_raises("binding")
def end(
    agent: Agent,
    response: AgentResult | None,
    error: Exception | None,
    cancellation: BaseException | None,
) -> None:
    """The newest invocation is over, with a result, an exception, or nobody waiting for it."""
    state = STATES.get(agent)
    run = state.leave() if state is not None else None
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
def begin_direct(agent: Agent, policy_of: Callable[[str], Policy]) -> Run:
    """A direct request for structured output begins, which asks the model without the loop.

    Nothing breaks it off: `agent.cancel` would hit the next invocation.
    """
    state, policy = STATES.of(agent), policy_of(agent.name)
    try:
        run = _start(agent, trace.INVALID_SPAN, policy, direct=True)
    except Exception as error:  # noqa: BLE001  once more, as any invocation
        FAULTS.report("binding", error)
        run = _start(agent, trace.INVALID_SPAN, policy, direct=True)
    state.direct.append(run)
    CURRENT.set(run)
    return run


@never_raises("binding")
def end_direct(run: Run | None, agent: Agent, prompt: object, output: object | None) -> None:
    """A direct request is over, without an output where it failed."""
    state = STATES.get(agent)
    if run is None or state is None or run not in state.direct:
        return
    state.direct.remove(run)
    CURRENT.set(run.parent)
    # Most providers ask for structured output without `Model.stream`, where we would have seen it.
    if output is not None and not run.tally.model_calls:
        _book_unseen(run, agent, prompt, output)
    run.finish("end_turn" if output is not None else "error")


@never_raises("binding")
def _book_unseen(run: Run, agent: Agent, prompt: object, output: object) -> None:
    """Book a request that a provider made by itself: only its texts are known."""
    asked = estimate_tokens([agent.messages, prompt])
    call = run.calls.open(model_id(agent.model), asked, provider_of(type(agent.model)))
    run.calls.settle(call, output_estimate=estimate_tokens(output))


def is_direct(agent: Agent) -> bool:
    """Tell whether the present task makes a direct request, which is not a leg of the loop."""
    state = STATES.get(agent)
    return state is not None and bool(state.direct) and CURRENT.get() in state.direct
