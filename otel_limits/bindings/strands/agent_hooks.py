"""Attaches to agents through Strands' public hooks, for legs, model calls and tools."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from strands.hooks import (
    AfterInvocationEvent,
    AfterToolCallEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    MessageAddedEvent,
)
from strands.middleware import ExecuteToolStage, InvokeModelStage

from otel_limits.bindings.span_writer import write_warnings
from otel_limits.bindings.strands.halting import apply_halt, apply_halt_if_due, is_ours
from otel_limits.bindings.strands.invocations import (
    STATES,
    Batch,
    StrandsInvocation,
    invocation_of,
    is_answered_by_person,
    is_direct,
    is_unanswered,
    keep_task,
    note_denial,
    note_result,
    note_run,
)
from otel_limits.bindings.strands.leg_stage import agent_stage
from otel_limits.bindings.strands.loop_requests import model_stage
from otel_limits.bindings.strands.marks import put_stop
from otel_limits.bindings.strands.nested_stops import note_delegation, put_delegated
from otel_limits.bindings.strands.notes import append_nudge, reword_results
from otel_limits.bindings.strands.private import (
    AgentStreamStage,
    middleware_registry,
    will_end_anyway,
)
from otel_limits.bindings.strands.readers import (
    acceptance_of,
    denial_of,
    tool_uses,
)
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.bindings.strands.tool_context import (
    attempt_of,
    begin_tool,
    forget_request,
    tool_stage,
)
from otel_limits.core.errors import limit_reached
from otel_limits.core.halt_texts import TOOLS_REMARK, not_run_note
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.policy import KILLED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strands.agent.agent import Agent
    from strands.hooks import HookEvent
    from strands.types.content import Message

    from otel_limits.core.errors import LimitReachedError
    from otel_limits.core.events import ActionTaken
    from otel_limits.core.policy import Overrides, Policy


# --- legs, model calls and messages ---------------------------------------------------------------


@suppress_errors("binding")
def before_leg(event: BeforeInvocationEvent) -> None:
    """Begin a leg; the first one keeps what the invocation began with."""
    invocation, agent = invocation_of(event.agent), event.agent
    # `structured_output_async` (1.62) fires both events of an invocation without running the loop.
    # Inside a tool, the current invocation is that of the surrounding loop.
    if invocation is None or is_direct(agent):
        return
    # Strands fires the same event for each leg; for the first one `invocation` is already complete.
    if not invocation.run.part.cycles:
        return
    invocation.run.leg()
    invocation.begin_leg()


@suppress_errors("binding")
def keep_task_of_leg(event: AfterInvocationEvent) -> None:
    """Keep the task of a leg that ends with interrupts."""
    invocation = invocation_of(event.agent)
    if (
        invocation is not None
        and event.result is not None
        and event.result.stop_reason == "interrupt"
    ):
        invocation.run.measure_time()
        invocation.run.task.handoffs = invocation.run.handoffs.count
        keep_task(event.agent, invocation.run.task)


def after_leg(event: AfterInvocationEvent) -> None:
    """End a leg, and with the last one the invocation."""
    if (error := _end_leg(event)) is not None:
        raise error


@suppress_errors("binding")
def _end_leg(event: AfterInvocationEvent) -> LimitReachedError | None:
    """End a leg. One that was refused, or has an open question, is not resumed.

    Returns:
        The error to raise, if that is the action.
    """
    invocation = invocation_of(event.agent)
    if invocation is None or is_direct(event.agent):
        return None
    invocation.leg.batch = None
    invocation.drop_turns()  # a hook interrupted the turn before any tool ran
    invocation.run.calls.release_unused()
    # Otherwise a hook could resume forever: each further leg would be refused, too. It would also
    # replace the last answer of an invocation that was wrapped up.
    is_over = invocation.leg.is_refused or invocation.run.budget.wrapped_up
    if is_over or (event.resume is not None and is_unanswered(event)):
        event.resume = None
    if event.resume is None and invocation.run.freeze_outcome() and invocation.leg.message is None:
        return _report_late_kill(event, invocation)
    return None


def _report_late_kill(
    event: AfterInvocationEvent, invocation: StrandsInvocation
) -> LimitReachedError | None:
    """Report a kill that came after the answer, which stays unchanged."""
    result, run = event.result, invocation.run
    if result is None or invocation.leg.ending is None:
        return None
    action: ActionTaken = "raised" if run.policy.action == "raise" else "halted"
    apply_halt(event.agent, invocation, result.message, KILLED, action)
    put_stop(invocation.leg.ending, KILLED.reason)
    run.reason, result.stop_reason = KILLED.reason, cast("Any", KILLED.reason)
    return limit_reached(KILLED, run.stop(KILLED.reason)) if action == "raised" else None


@suppress_errors("binding")
def before_model(event: BeforeModelCallEvent) -> None:
    """Note that a response is requested, from the model or from a middleware."""
    invocation = invocation_of(event.agent)
    if invocation is not None and not event.cancel:
        invocation.leg.awaits_response = invocation.waits.is_requesting = True


@suppress_errors("binding")
def message_added(event: MessageAddedEvent) -> None:
    """Count a turn, or tag the message that a halt left."""
    invocation, message = invocation_of(event.agent), event.message
    if invocation is None or message["role"] != "assistant":
        return
    # Other assistant messages are earlier responses, denials or halts.
    if not (invocation.leg.awaits_response and _is_response(invocation, message)):
        put_delegated(invocation, cast("Any", message))
        apply_halt_if_due(event.agent, invocation, message)
        return
    invocation.leg.awaits_response = invocation.waits.is_requesting = False
    invocation.leg.response, invocation.leg.last_response = None, message
    run = invocation.run
    run.count_turn()
    if run.policy.warn_at or run.loops is not None or invocation.wrapping is not None:
        _look_at_turn(event.agent, invocation, message)


def _is_response(invocation: StrandsInvocation, message: Message) -> bool:
    """Return whether a message is a model's response.

    Strands writes metadata into each response; a hook may remove it from the object that the model
    stage passed on.
    """
    response = invocation.leg.response
    if "metadata" in message:
        return True
    if response is None or response.stop_reason == "cancelled":
        return False
    return message is response.message or response.stop_reason == "max_tokens"


def _look_at_turn(agent: Agent, invocation: StrandsInvocation, message: Message) -> None:
    """Apply limits that need each response added to the conversation."""
    if invocation.run.policy.warn_at:
        write_warnings(agent.trace_span, invocation.run.warn())
    if invocation.run.loops is not None:
        invocation.leg.text = "".join(block.get("text", "") for block in message["content"])
    if invocation.wrapping is not None and not any(
        "toolUse" in each for each in message["content"]
    ):
        is_halt = is_ours(message, invocation, invocation.wrapping)
        taken: ActionTaken = "halted" if is_halt else "wrapped_up"
        apply_halt(agent, invocation, message, invocation.wrapping, taken)


# --- tools of a turn ------------------------------------------------------------------------------
# Admitted in the order of the requests, recorded when all have ended.


@suppress_errors("binding")
def before_tools(event: BeforeToolsEvent) -> None:
    """Decide in request order which calls may run, before any of them does."""
    invocation = invocation_of(event.agent)
    if invocation is None:
        return
    against = invocation.wrapping or invocation.verdict
    if against is not None:  # requested by the last answer, or before a kill
        event.cancel = not_run_note(against)
        return
    requests = tool_uses(event.agent, event.message)
    if event.cancel:  # a turn that a hook denied as a whole uses no budget
        invocation.leg.batch = Batch(requests)
        return
    # Before any of them starts: tools run concurrently, and the order of the requests decides. By
    # position, as some models use one ID for several of them.
    invocation.leg.batch = batch = Batch(requests)
    invocation.request_tools(invocation.leg.text, batch.tools)
    batch.turn = invocation.turns[-1]


@suppress_errors("binding")
def before_tool(event: BeforeToolCallEvent) -> None:
    """Refuse a tool call that exceeds a limit, or whose invocation was ended."""
    invocation = invocation_of(event.agent)
    batch = None if invocation is None else invocation.leg.batch
    attempt = begin_tool(event, None if batch is None else batch.tool_of(event.tool_use))
    if invocation is None or attempt is None or attempt.invocation is not invocation:
        return
    if attempt.requested.refusal is not None or not event.cancel_tool:
        event.cancel_tool = attempt.refusal() or event.cancel_tool


@suppress_errors("binding")
def after_tool(event: AfterToolCallEvent) -> None:
    """Keep the final attempt: each retry overwrites it."""
    invocation, attempt = invocation_of(event.agent), attempt_of(event)
    # The result of a delegation becomes the answer to the end user.
    if attempt is not None and not getattr(event.selected_tool, "delegate", False):
        event.result = attempt.end(event.result) or event.result
    is_own = invocation is not None and (attempt is None or attempt.invocation is invocation)
    if invocation is not None and invocation.leg.batch is not None and is_own:
        position = invocation.leg.batch.position_of(event.tool_use)
        if position is not None:
            # The event, as hooks that run after ours may still replace its result.
            invocation.leg.batch.results[position] = event


@suppress_errors("binding")
def after_tools(event: AfterToolsEvent) -> None:
    """End the loop if a limit was reached and the loop would continue."""
    invocation = invocation_of(event.agent)
    if invocation is None:
        return
    note_delegation(invocation, event)
    # Removed, so that `after_leg` finds a batch only if a hook ended the turn early.
    batch, invocation.leg.batch = invocation.leg.batch, None
    if batch is not None:
        _end_turn(invocation, batch, event)
    # Only after the whole turn is recorded: the last tool may reach a limit.
    verdict = invocation.run.check_limits()
    if invocation.wrapping is not None:
        verdict = replace(invocation.wrapping, remark=TOOLS_REMARK)
    if (
        verdict is not None
        and not _ends_anyway(invocation, event)
        and invocation.ends_loop(verdict)
    ):
        invocation.verdict, invocation.wrapping = verdict, None
        event.end_turn = invocation.text_of(verdict)
    # Of delegations, after their answer was taken from them.
    reword_results(event.message, invocation.run)


def _end_turn(invocation: StrandsInvocation, batch: Batch, event: AfterToolsEvent) -> None:
    """Note how each call was answered, record them, and warn the model about a repetition."""
    turn = batch.turn or batch.denied
    for position, tool in enumerate(tuple(turn.tools.values())):
        if tool.refusal is None and not _note_answer(invocation, batch, position, event):
            del turn.tools[str(position)]
    if not event.message["content"]:  # all of it waits for a human
        invocation.drop_turns()
        return
    invocation.turns.clear()
    invocation.end_turn(turn)
    if invocation.nudge is not None:
        (identity, note), invocation.nudge = invocation.nudge, None
        number = int(identity)
        done = batch.results.get(number)
        shown = None if done is not None else batch.result_in(number, event.message)
        append_nudge(event.message, shown if done is None else done.result, note)


def _note_answer(
    invocation: StrandsInvocation, batch: Batch, position: int, event: AfterToolsEvent
) -> bool:
    """Note the answer to a call that no limit refused, if any; only calls that ran count."""
    tool, done = (batch.turn or batch.denied).tools[str(position)], batch.results.get(position)
    if done is not None and done.cancel_message is None and done.selected_tool is not None:
        note_run(tool, done)
        return True
    # Success without an event: the tool continues as a background task.
    shown = batch.result_in(position, event.message)
    if done is None and (accepted := acceptance_of(shown)) is not None:
        note_result(tool, accepted)
        return True
    # Only admitted calls have used budget.
    if batch.turn is not None:
        invocation.run.tools.release(tool.name)
    denial: Mapping[str, Any] | None = done.result if done is not None else denial_of(shown, event)
    if denial is not None:
        note_denial(tool, denial)
        tool.is_rejected = is_answered_by_person(event.agent, batch.requests[position])
    return denial is not None


def _ends_anyway(invocation: StrandsInvocation, event: AfterToolsEvent) -> bool:
    """Return whether the loop ends after these tools anyway: a natural end wins."""
    return bool(
        event.end_turn
        or invocation.leg.has_output
        or will_end_anyway(event.agent)
        or event.agent.cancel_signal.is_set()
        or event.invocation_state.get("request_state", {}).get("stop_event_loop")
    )


# --- attaching to an agent ------------------------------------------------------------------------

Hooks: TypeAlias = "tuple[tuple[Any, Callable[[Any], Any], float], ...]"
"""Event types, their handlers, and the order of each."""

# Beyond HookOrder.SDK_FIRST and SDK_LAST, which applications may use.
FIRST: Final = -math.inf
LAST: Final = math.inf

HOOKS: Final[Hooks] = (
    (MessageAddedEvent, message_added, FIRST),  # before a session manager stores the message
    (BeforeModelCallEvent, before_model, LAST),  # no other hook can still cancel the call
    # Last, so that an application's hook can deny the whole turn first.
    (BeforeToolsEvent, before_tools, LAST),
    (BeforeToolCallEvent, before_tool, LAST),
    # First, so that the call is known even if a later hook raises. Changes by later hooks are still
    # seen, as the event is read only when all tools of the turn have ended.
    (AfterToolCallEvent, after_tool, FIRST),
    # Last, when no other hook can still request a retry.
    (AfterToolCallEvent, forget_request, LAST),
    # Last, as a turn ended by another hook is a natural end, which wins over a halt.
    (AfterToolsEvent, after_tools, LAST),
    (AfterInvocationEvent, keep_task_of_leg, FIRST),  # before a session manager stores the agent
    # Last, as other hooks decide here whether the agent is resumed, and we may have to revoke that.
    (AfterInvocationEvent, after_leg, LAST),
)


class Attachment:
    """The first hook of a tracked agent.

    It holds the limits of the agent's plugin. Copies of the agent's hooks share it, so that a copy
    of the agent keeps the limits.
    """

    def __init__(self, agent: Agent) -> None:
        """Create an attachment without limits."""
        self.agent = weakref.ref(agent)
        """The original agent: copies share the attachment."""
        self.own: Callable[[str], Policy] | None = None
        self.has_stages = False

    @suppress_errors("binding")
    def __call__(self, event: BeforeInvocationEvent) -> None:
        """Begin a leg."""
        before_leg(event)

    # Shared: a deep copy would include `own`, a bound method of the runtime, with its locks.
    def __copy__(self) -> Attachment:
        """Share the attachment with the copy."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """Share the attachment with the copy."""
        return self


ALL_WITH_OWN: Final[weakref.WeakSet[Attachment]] = weakref.WeakSet()
"""Attachments of agents with a plugin."""

STAGED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Middleware registries that have our stages."""


def attachment_of(agent: Agent) -> Attachment | None:
    """Return the attachment among the agent's hooks, where it is first."""
    # The public way to list hooks needs an event, not its type.
    for callback in agent.hooks.get_callbacks_for(BeforeInvocationEvent(agent=agent)):
        if isinstance(callback, Attachment):
            return callback
    return None


def ensure_attached(agent: Agent) -> Attachment:
    """Return the attachment of an agent, added if it has none."""
    attachment = attachment_of(agent)
    if attachment is None:
        attachment = Attachment(agent)
        agent.add_hook(attachment, BeforeInvocationEvent, order=FIRST)
    return attachment


def adopt(agent: Agent, overrides: Overrides) -> None:
    """Set limits for one agent. Copies of the agent keep them.

    Raises:
        ConfigurationError: A limit on cost is set but no price can be known.
    """
    assert STRANDS.host is not None  # set by importing `otel_limits.plugin`
    own = STRANDS.host.own_policy("strands", overrides)
    if own is None:
        return
    attachment = ensure_attached(agent)
    STATES.of(agent).own = own
    if attachment.agent() is agent:  # limits given to a copy must not change the original
        attachment.own = own
    ALL_WITH_OWN.add(attachment)


def attach(agent: Agent) -> Attachment:
    """Attach to `agent`. Idempotent.

    Strands cannot remove middleware, so ours stays attached and passes everything through while
    no invocation is tracked. It is added at the first invocation, so the application's middleware
    usually wraps it.
    """
    # Hooks and middleware have a registry each: an application may replace one without the other.
    attachment = ensure_attached(agent)
    add_once(agent, HOOKS, AfterInvocationEvent(agent=agent))
    registry = middleware_registry(agent)
    # If the registry is not accessible, the attachment remembers. A deep copy of a registry seems
    # new although it has our stages, and gets them twice: `Leg.is_followed` and `enclosing_request`
    # keep the inner ones inactive.
    if not attachment.has_stages if registry is None else registry not in STAGED:
        if AgentStreamStage is not None:
            agent.add_middleware(AgentStreamStage, agent_stage)
        agent.add_middleware(InvokeModelStage, model_stage)
        agent.add_middleware(ExecuteToolStage, tool_stage)
        attachment.has_stages = True
        if registry is not None:
            STAGED.add(registry)
    return attachment


def add_once(agent: Agent, hooks: Hooks, event: HookEvent) -> None:
    """Add hooks unless they are present, e.g. in a copy of a registry."""
    # The last one shows that all of them are present.
    there: list[Any] = list(agent.hooks.get_callbacks_for(event))
    if hooks[-1][1] not in there:
        for kind, handler, order in hooks:
            agent.add_hook(handler, kind, order=order)


def has_stages(agent: Agent) -> bool:
    """Return whether the agent's middleware registry has our stages, as far as is known."""
    registry = middleware_registry(agent)
    return registry is None or registry in STAGED
