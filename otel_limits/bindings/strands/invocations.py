"""Invocations of Strands agents in progress: their start, state, questions and end."""

from __future__ import annotations

import functools
import json
import math
import secrets
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from strands.hooks import AfterMultiAgentInvocationEvent
from strands.interrupt import Interrupt, InterruptException

from otel_limits.bindings import extensions
from otel_limits.bindings.extensions import extension_of
from otel_limits.bindings.invocation import (
    InvocationInProgress,
    RequestedTool,
    RequestedTurn,
    audited,
    conversation_of,
)
from otel_limits.bindings.strands.a2a import attach_stop
from otel_limits.bindings.strands.marks import stops_of
from otel_limits.bindings.strands.private import interrupt_state, session_of
from otel_limits.bindings.strands.readers import model_id, status_of, text_of
from otel_limits.bindings.strands.requests import ConversationTokens, call_to
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.core.errors import LimitReachedError, stop_of_error
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.labels import clean
from otel_limits.core.policy import Verdict
from otel_limits.otel.semconv import CONVERSATION_ID
from otel_limits.runs.current import CURRENT, current
from otel_limits.runs.run import Run
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from opentelemetry import trace
    from strands.agent import AgentResult
    from strands.agent.agent import Agent
    from strands.bidi import BidiAgent
    from strands.hooks import AfterInvocationEvent, AfterToolCallEvent, HookRegistry
    from strands.middleware import InvokeModelContext
    from strands.types.content import Message
    from strands.types.events import ModelStopReason

    from otel_limits.bindings.tool_call import ToolCallInProgress
    from otel_limits.core.events import Invocation, Stop
    from otel_limits.core.policy import Policy
    from otel_limits.runs.tasks import Task


# --- invocations ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Leg:
    """One pass of an agent's loop; a hook that resumes the agent starts another one."""

    is_followed: bool = False
    """True while our stage follows the leg: copied middleware may have it twice."""
    ending: Any = None
    """The stop event, once the leg has ended; its hooks may still be running."""
    message: Message | None = None
    """The message that a halt has written or marked."""
    has_streamed_text: bool = False
    """True once the end user's text was streamed."""
    has_output: bool = False
    """True once the leg has produced its structured output."""
    is_refused: bool = False
    """True if the leg ended because a model call was refused."""
    has_overflowed: bool = False
    """True if the last model call overflowed the context."""
    awaits_response: bool = False
    """True from when a response is requested until it is added to the conversation."""
    response: ModelStopReason | None = None
    """The model's response to that request."""
    last_response: Message | None = None
    """The last response added to the conversation: its tools belong to this invocation."""
    forced_after: int | None = None
    """Turns before the call that only forces structured output; a second such call counts."""
    batch: Batch | None = None
    """The tools of the current turn."""
    inner_stops: Sequence[Stop] = ()
    """The stops of the sub-agent that ended last."""
    delegated: Sequence[Stop] = ()
    """The stops of an agent whose answer becomes the next message."""
    text: str = ""
    """Text of the model in the current turn."""


@dataclass(eq=False)
class StrandsInvocation(InvocationInProgress):
    """An invocation of a Strands agent, which makes its spans itself."""

    agent_ref: weakref.ref[Agent] = field(kw_only=True)
    hooks: HookRegistry | None = field(kw_only=True)
    """The registry with our hooks, which an application may replace."""
    leg: Leg = field(default_factory=Leg, kw_only=True)

    def __post_init__(self) -> None:
        """Let hooks find it by its agent; before its deadline starts, which may end it."""
        agent = self.agent_ref()
        state = STATES.of(agent)
        with state.lock:
            state.invocations.append(self)
            if agent is not None and any(each.waits.is_cut for each in state.invocations):
                agent.cancel_signal.clear()  # of an invocation that is ending and needs it no more

    @classmethod
    def begin(cls, agent: Agent, span: trace.Span, policy: Policy, given: object) -> None:
        """Begin an invocation under a span of Strands.

        Args:
            agent: The agent.
            span: The span.
            policy: The policy of the agent.
            given: The user's input.
        """
        # An invocation that resumes our question begins with the human's extension.
        answer = answer_of(agent)
        assert STRANDS.host is not None  # set before the patches are applied
        own = cls.start(
            STRANDS.host,
            agent.name,
            policy=policy,
            attributes=agent.trace_attributes,
            session_id=agent.session_id,
            conversation=own_conversation_of(agent),
            span=span,
            model=model_id(agent.model),
            agent_ref=weakref.ref(agent),
            hooks=agent.hooks,
            verdict=declined_verdict(answer),
            answers=answered_keys(agent),
            more=None if answer is None else extension_of(answer.reason, answer.response),
            given=_without_ids(given),
        )
        consume_answer(agent, answer)
        # Strands does not set it, and its own ID of an agent without a session is random.
        if session := session_of(agent):
            span.set_attribute(CONVERSATION_ID, session)
        # Never left: the stream may be read, and closed, in another context, and Strands detaches
        # everything that was attached before the span starts.
        own.__enter__()

    def begin_leg(self) -> None:
        """Begin a further leg: what ended the previous one must not end this one."""
        agent, self.leg = self.agent_ref(), Leg()
        self.verdict = self.wrapping = self.side_verdict = None
        answer = None if agent is None else answer_of(agent)  # to our question, if a hook resumes
        if agent is None or answer is None:
            return
        if (more := extension_of(answer.reason, answer.response)) is not None:
            self.run.extend(more)
        self.verdict = declined_verdict(answer)
        consume_answer(agent, answer)

    @property
    def is_cancelled(self) -> bool:
        """True if the application has cancelled the agent, or it was halted."""
        agent = self.agent_ref()
        is_cancelled = agent is not None and agent.cancel_signal.is_set()
        return self.verdict is not None or is_cancelled

    def drop_turns(self) -> None:
        """Release tools that did not run, as a hook or a human is to decide on them first.

        When they are requested again, they are admitted again.
        """
        for tool in (each for turn in self.turns for each in turn.tools.values()):
            if tool.refusal is None and not tool.is_answered:
                self.run.tools.release(tool.name)
        self.turns.clear()
        self.tools.clear()

    def only_forces(self, context: InvokeModelContext) -> bool:
        """Return whether a call is the leg's first that only forces structured output.

        One such call follows a response that ended the leg. Later ones try to correct an invalid
        output, and count as turns.
        """
        if context.structured_output_model is None:
            return False
        if self.leg.forced_after is None:
            self.leg.forced_after = self.run.tally.turns
        return self.leg.forced_after == self.run.tally.turns

    # --- its end ----------------------------------------------------------------------------------

    @suppress_errors("binding")
    def cancel(self, verdict: Verdict) -> None:
        """End the invocation now, from any thread: a deadline has passed, or it was killed."""
        agent = self.agent_ref()
        state = STATES.get(agent)
        if agent is None or state is None:
            return
        # Under the lock, or `agent.cancel` could hit the next invocation.
        with state.lock:
            # The first halt wins. The hooks of a leg that has ended may finish; another leg that
            # one of them starts is refused.
            if (
                self not in state.invocations
                or self.leg.ending is not None
                or self.verdict is not None
            ):
                return
            self.verdict = verdict
            # This also reaches tools, but it ends every invocation of the agent.
            if len(state.invocations) == 1:
                agent.cancel(message=self.text_of(verdict))
            # Strands checks that between chunks only, and there may be no further chunk.
            self.waits.cut()

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End it, also if it was only removed."""
        self.leave()
        super().finish(reason, error)

    @suppress_errors("binding")
    def leave(self) -> None:
        """Remove it: its agent may be called again, and a later `cancel` would hit that call."""
        if (state := STATES.get(self.agent_ref())) is not None:
            with state.lock:
                if self in state.invocations:
                    state.invocations.remove(self)
        # A thread that outlives it keeps the invocation, but must not keep the agent alive by its
        # hooks.
        self.hooks = None

    def close_span(self, error: BaseException | None) -> None:
        """Do nothing: Strands has ended the span, and `write_end` was called before."""


class AgentState:
    """Invocations and tools of one agent."""

    def __init__(self) -> None:
        """Create the state of an idle agent."""
        self.own: Callable[[str], Policy] | None = None
        """Returns its policy by its name, if it has a plugin."""
        self.invocations: list[StrandsInvocation] = []
        """Several if an agent is used re-entrantly."""
        self.realtime: Any = None
        """Its invocation, if it is a realtime agent: a `realtime.RealtimeInvocation`."""
        self.direct: list[Run] = []
        """Direct requests for structured output, e.g. by a tool of the agent."""
        self.requested: dict[tuple[int, str], ToolCallInProgress] = {}
        """Its tools, from request to end."""
        self.tokens = ConversationTokens()
        self.conversation = ""
        """Identifies the conversation in its messages; empty before the first."""
        self.lock = threading.RLock()
        """Held while an invocation is removed: a later cancel would hit the next one."""

    def current(self) -> StrandsInvocation | None:
        """Return the invocation of the current task, or else the newest."""
        several, owner = tuple(self.invocations), CURRENT.get()
        while len(several) > 1 and owner is not None:
            for invocation in several:
                if invocation.run is owner:
                    return invocation
            owner = owner.parent
        return several[-1] if several else None

    def abort(self) -> None:
        """End all invocations when otel-limits is disabled."""
        # Each is finished outside the lock, as that calls observers, which are third-party code.
        for invocation in self.invocations[::-1]:
            invocation.run.released = True
            invocation.finish(invocation.run.reason or "aborted")
        if (realtime := self.realtime) is not None:
            self.realtime, realtime.run.released = None, True
            realtime.finish("aborted")
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


@suppress_errors("binding")
def own_conversation_of(agent: Agent | BidiAgent) -> str | None:
    """Return the ID of an agent's conversation: its session, or else the agent object."""
    if session := session_of(agent):
        return json.dumps([session, agent.agent_id])
    # An agent that another one uses may serve the conversations of all users.
    if current() is not None:
        return ""
    state = STATES.of(agent)
    # A vendor keeps the messages of a stateful model.
    is_new = not (agent.messages or getattr(agent.model, "stateful", False))
    if is_new or not state.conversation:
        state.conversation = secrets.token_hex()
    return state.conversation


def _without_ids(given: object) -> object:
    """Return messages of a user without what Strands adds to them, such as IDs."""
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        return given
    return [(each.get("role"), each.get("content", each)) for each in given]


def invocation_of(agent: object) -> StrandsInvocation | None:
    """Return the current invocation of an agent, if it is tracked."""
    state = STATES.get(agent)
    if state is None:
        return None
    several = tuple(state.invocations)  # usually one: every hook asks
    return several[0] if len(several) == 1 else state.current()


@suppress_errors("binding")
def is_of_another(agent: Agent, invocation: StrandsInvocation, message: Message) -> bool:
    """Return whether a message requests tools of another concurrent invocation of the agent."""
    others = [each for each in STATES.of(agent).invocations if each is not invocation]
    return any(each.leg.last_response is message for each in others)


@suppress_errors("binding")
def end(
    agent: Agent,
    response: AgentResult | None,
    error: Exception | None,
    cancellation: BaseException | None,
) -> None:
    """End the current invocation after a result, an exception or a cancellation."""
    if (invocation := invocation_of(agent)) is None:
        return
    invocation.leave()  # first, as observers may even call the agent again
    reason: str = "aborted"
    try:
        reason = _reason_of(invocation.run, response, error, cancellation)
        attach_stop(invocation.run)
        interrupts = (response and response.interrupts) or ()
        invocation.interrupts = keys_of(agent, [each.id for each in interrupts])
        parent = (
            None if invocation.run.parent is None else getattr(invocation.run.parent, "state", None)
        )
        if isinstance(parent, StrandsInvocation):
            parent.leg.inner_stops = stops_of(response)
    finally:
        invocation.finish(reason, error)


def _reason_of(
    run: Run,
    response: AgentResult | None,
    error: Exception | None,
    cancellation: BaseException | None,
) -> str:
    if response is not None:
        return response.stop_reason
    if isinstance(error, LimitReachedError):
        if error.stop is not None and _is_raised_by(error, run):
            return error.stop.reason
        if run.verdict is not None:
            return run.verdict.reason
    if error is not None and run.verdict is not None and _is_noted_by(error, run):
        return run.verdict.reason
    # The reason of its last leg, if that ended before the cancellation.
    if cancellation is not None:
        return run.reason or "aborted"
    return "error" if error is not None else "aborted"


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
    assert STRANDS.host is not None  # set before the patches are applied
    runs, policy = STRANDS.host.runs, policy_of(agent.name)
    run = runs.start(
        agent.name,
        policy,
        model=model_id(agent.model),
        direct=True,
        session_id=agent.session_id,
        conversation=conversation_of(policy, agent.trace_attributes, own_conversation_of(agent)),
        attributes=audited(agent.trace_attributes, runs.audit_keys),
    )
    STATES.of(agent).direct.append(run)
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


# --- tools of a turn ------------------------------------------------------------------------------
# By position, as some models use one ID for several calls.

HANDOFF: Final = "handoff_to_agent"
"""The tool that each agent of a `Swarm` has, by its documentation."""


class Batch:
    """The tool calls of one turn, by position."""

    def __init__(self, requests: list[Mapping[str, Any]]) -> None:
        """Create a batch of tool uses in the model's order."""
        self.requests = requests
        self.turn: RequestedTurn | None = None
        """The turn that has requested them; `None` if they were all denied."""
        self.results: dict[int, AfterToolCallEvent] = {}
        """The final attempt of each call, by position."""
        self._uses = list(requests)
        """The same objects, or their replacements by hooks."""
        self._seen: set[int] = set()

    def position_of(self, use: Mapping[str, Any]) -> int | None:
        """Return the position of the request that an event is about.

        The framework passes the object in the message. If a hook has replaced it, the ID decides;
        among several with that ID, it is the first that has not started, since calls start in the
        order of the requests.
        """
        for position, known in enumerate(self._uses):
            if known is use:
                self._seen.add(position)
                return position
        alike = self._alike(use)
        waiting = [each for each in alike if each not in self._seen]
        running = [each for each in alike if each not in self.results]
        found = next(iter(waiting or running or alike), None)
        if found is not None:
            self._seen.add(found)
            self._uses[found] = use
        return found

    def tool_of(self, use: Mapping[str, Any]) -> RequestedTool | None:
        """Return the request of the turn that an event is about, if any."""
        position = self.position_of(use)
        turn = self.turn
        return None if turn is None or position is None else turn.tools.get(str(position))

    @property
    def tools(self) -> Iterator[tuple[str, str, object]]:
        """The requests, each with its position as its ID."""
        for position, use in enumerate(self.requests):
            yield str(position), use["name"], use["input"]

    @functools.cached_property
    def denied(self) -> RequestedTurn:
        """The turn of calls that were denied together: none was admitted."""
        tools = {number: RequestedTool(name, use) for number, name, use in self.tools}
        return RequestedTurn("", tools)

    def result_in(self, position: int, message: Message) -> Mapping[str, Any] | None:
        """Return the result of a request in the message to the model: IDs come in order."""
        number = self._alike(request := self.requests[position]).index(position)
        results: list[Any] = [block["toolResult"] for block in message["content"]]
        alike = [each for each in results if each["toolUseId"] == request["toolUseId"]]
        return alike[number] if number < len(alike) else None

    def _alike(self, use: Mapping[str, Any]) -> list[int]:
        identity = use.get("toolUseId")
        return [n for n, each in enumerate(self.requests) if each["toolUseId"] == identity]


class RealtimeBatch(Batch):
    """The tool calls of a response of a realtime model."""

    def __init__(self, requests: list[Mapping[str, Any]], against: Verdict | None) -> None:
        """Create a batch without results."""
        super().__init__(requests)
        self.against = against
        """Why none of them runs, if the agent was about to end when they were requested."""
        self.attempts: dict[int, ToolCallInProgress] = {}
        """The tools that have begun, by position."""


def note_run(tool: RequestedTool, event: AfterToolCallEvent[Any]) -> None:
    """Note a call that ran, as the hooks of the application have changed it."""
    tool.name, tool.arguments = event.tool_use["name"], event.tool_use["input"]
    tool.seconds = event.duration
    tool.is_handoff = tool.name == HANDOFF
    note_result(tool, event.result)


def note_denial(tool: RequestedTool, result: Mapping[str, Any]) -> None:
    """Note the answer to a call that did not run, whose name the model may have invented."""
    tool.name, tool.seconds = clean(tool.name), None
    note_result(tool, result)


def note_result(tool: RequestedTool, result: Mapping[str, Any]) -> None:
    """Note the result of a call."""
    tool.status, tool.result = status_of(result), text_of(result)


# --- questions to a human -------------------------------------------------------------------------

INTERRUPT_NAME: Final = "otel_limits"
"""Name of our interrupts, the prefix of their IDs, and our key in what Strands keeps with them."""


def is_unanswered(event: AfterInvocationEvent) -> bool:
    """Return whether a hook resumes a leg that ended with our question without answering it.

    Strands raises an exception for that, which the hook would never get without otel-limits.
    """
    interrupts = (event.result and event.result.interrupts) or ()
    # Each of them must be answered; the last one is certainly ours.
    asked = [each.id for each in interrupts if each.name == INTERRUPT_NAME]
    return bool(asked) and not _answers(event.resume, asked[-1])


def _answers(resume: object, question_id: str) -> bool:
    """Return whether a hook resumes only with answers, including one to a question."""
    if not isinstance(resume, list) or not all(isinstance(each, Mapping) for each in resume):
        return False
    answers = [each.get("interruptResponse") for each in resume]
    ids = [each.get("interruptId") for each in answers if isinstance(each, Mapping)]
    return len(ids) == len(resume) and question_id in ids


def question(verdict: Verdict, invocation: Invocation) -> InterruptException:
    """Create the interrupt that describes the limit that was reached, and the agent.

    Strands keeps the interrupts of all nodes of a graph by ID, so each question needs a unique one.
    """
    identity = f"{INTERRUPT_NAME}:{invocation.agent}:{invocation.id}"
    reason = extensions.question(verdict, invocation)
    return InterruptException(Interrupt(id=identity, name=INTERRUPT_NAME, reason=reason))


def answer_of(agent: Agent) -> Interrupt | None:
    """Return our question with the human's answer, if this leg resumes it.

    An answer of `None` does not raise the limit.
    """
    state = interrupt_state(agent)
    # While tools wait, an interrupt with our name belongs to an agent that is one of the tools.
    if state is None or state.pending_tool_execution is not None:
        return None
    ours = [each for each in state.interrupts.values() if each.name == INTERRUPT_NAME]
    return ours[-1] if ours else None


def keys_of(agent: Agent, interrupts: Iterable[str]) -> list[str]:
    """Return the keys of interrupts of an agent, which has the same session when it is resumed.

    Their IDs alone are not enough: those of hooks contain only the ID of a tool call.
    """
    place = ["strands", agent.session_id, agent.agent_id]
    return [json.dumps([*place, each]) for each in interrupts]


def keys_of_group(group: Any, interrupts: Iterable[str]) -> list[str]:
    """Return the keys of interrupts of a graph or swarm."""
    session = getattr(getattr(group, "session_manager", None), "session_id", None) or id(group)
    return [json.dumps(["strands", session, group.id, each]) for each in interrupts]


def answered_keys(agent: Agent) -> list[str]:
    """Return the keys of the interrupts that an invocation answers, if it is resumed."""
    state = interrupt_state(agent)
    keys = [] if state is None else keys_of(agent, state.interrupts)
    recall_task(agent, keys)
    return keys


def keep_task(owner: Any, task: Task) -> None:
    """Add its task to what an agent or group keeps with its interrupts until they are answered."""
    if (state := interrupt_state(owner)) is not None:
        state.context[INTERRUPT_NAME] = task.record()


@suppress_errors("binding")
def watch_group(group: Any) -> None:
    """Add a hook for the end of a graph or swarm, before a session manager stores it."""
    ended = AfterMultiAgentInvocationEvent(group)
    if keep_task_of_group not in list(group.hooks.get_callbacks_for(ended)):
        group.hooks.add_callback(type(ended), keep_task_of_group, order=-math.inf)


@suppress_errors("binding")
def keep_task_of_group(event: AfterMultiAgentInvocationEvent) -> None:
    """Keep the task of a graph or swarm that ends with interrupts."""
    group = current()
    while isinstance(group, Run):
        group = group.parent
    if group is not None:
        group.task.handoffs = group.handoffs.count
        keep_task(event.source, group.task)


@suppress_errors("binding")
def recall_task(owner: Any, keys: Sequence[str]) -> None:
    """Read the task of interrupts that an agent or group has kept, e.g. in a session.

    Args:
        owner: The agent or the group.
        keys: The keys of the interrupts that are answered.
    """
    state = interrupt_state(owner)
    if state is not None and STRANDS.host is not None and INTERRUPT_NAME in state.context:
        STRANDS.host.runs.interrupted.recall([(key, state.context[INTERRUPT_NAME]) for key in keys])


def is_answered_by_person(agent: Agent, use: Mapping[str, Any]) -> bool:
    """Return whether a person has answered a question about a tool call, which a hook asked.

    `BeforeToolCallEvent.interrupt` puts the ID of the call into that of the interrupt.
    """
    state = interrupt_state(agent)
    asked = [] if state is None else state.interrupts.values()
    return any(f":{use['toolUseId']}:" in each.id for each in asked if each.name != INTERRUPT_NAME)


def consume_answer(agent: Agent, answer: Interrupt | None) -> None:
    """Remove an answer once it is used.

    Strands would keep it until the agent ends, and a later resume, which answers a tool's question,
    would find it again.
    """
    state = interrupt_state(agent)
    if answer is not None and state is not None:
        state.interrupts.pop(answer.id, None)


def declined_verdict(answer: Interrupt | None) -> Verdict | None:
    """Restore the verdict of a question that was answered without an extension."""
    return None if answer is None else extensions.declined_verdict(answer.reason, answer.response)
