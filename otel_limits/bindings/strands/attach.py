"""Attaches to agents through Strands' public doors: `add_hook` and `add_middleware`."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    MessageAddedEvent,
)
from strands.middleware import ExecuteToolStage, InvokeModelStage

from otel_limits.bindings.strands.activities import forget_request, tool_stage
from otel_limits.bindings.strands.invocations import STATES
from otel_limits.bindings.strands.leg_hooks import (
    admit_by_quota,
    after_leg,
    before_leg,
    before_model,
    message_added,
    settle_quota,
)
from otel_limits.bindings.strands.marks import HOST
from otel_limits.bindings.strands.private import AgentStreamStage, middleware_registry
from otel_limits.bindings.strands.stages import agent_stage, model_stage
from otel_limits.bindings.strands.tool_hooks import (
    after_tool,
    after_tools,
    before_tool,
    before_tools,
)
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands.agent.agent import Agent
    from strands.hooks import HookEvent

    from otel_limits.core.limits import Limits
    from otel_limits.core.policy import Action, Policy

Hooks: TypeAlias = "tuple[tuple[Any, Callable[[Any], Any], float], ...]"
"""Types of events, what is called for each, and in which order."""

# An application may register hooks beyond HookOrder.SDK_FIRST and SDK_LAST.
FIRST: Final = -math.inf
LAST: Final = math.inf

HOOKS: Final[Hooks] = (
    (MessageAddedEvent, message_added, FIRST),  # before a session manager stores the message
    (BeforeModelCallEvent, before_model, LAST),  # when nobody can cancel the call any more
    # Last, so that a hook of the application which denies the whole turn has done so by then.
    (BeforeToolsEvent, before_tools, LAST),
    (BeforeToolCallEvent, before_tool, LAST),
    # First, so that the call is known also where a later hook raises; what such a hook changes in
    # the event is still seen, as it is read only when all tools of the turn have ended.
    (AfterToolCallEvent, after_tool, FIRST),
    # Last, when no hook can have it tried again any more.
    (AfterToolCallEvent, forget_request, LAST),
    # Last, as a hook that ends the turn by itself is a natural end, which wins over a halt.
    (AfterToolsEvent, after_tools, LAST),
    # Last, as a hook decides here whether the agent is resumed, and we may have to take that back.
    (AfterInvocationEvent, after_leg, LAST),
)


GATE_HOOKS: Final[Hooks] = (
    # First, so that no slow hook of the application keeps a reservation from other processes.
    (AfterModelCallEvent, settle_quota, FIRST),
    # Last, as a reservation for a call that another hook cancels would wait for its lease to end.
    (BeforeModelCallEvent, admit_by_quota, LAST),
)
"""What an agent needs besides while quotas are set."""


class Attachment:
    """The first hook of an agent that is followed.

    It carries the limits that the agent was given for itself, and goes along into copies of the
    agent's hooks as itself, so that a copy keeps them. Whose event it is, every event says.
    """

    def __init__(self, agent: Agent) -> None:
        """Begin without limits of the agent's own."""
        self.agent = weakref.ref(agent)
        """Whom it was made for: copies share it."""
        self.own: Callable[[str], Policy] | None = None
        self.has_stages = False

    @suppress_errors("binding")
    def __call__(self, event: BeforeInvocationEvent) -> None:
        """Begin a leg."""
        before_leg(event)

    # As itself: a deep copy would go on into `own`, a bound method of the runtime, with its locks.
    def __copy__(self) -> Attachment:
        """Go along into a copy."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """Go along into a copy."""
        return self


ALL_WITH_OWN: Final[weakref.WeakSet[Attachment]] = weakref.WeakSet()
"""Attachments of agents that were given limits of their own."""

STAGED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Registries of middleware that have our stages."""


def attachment_of(agent: Agent) -> Attachment | None:
    """Find the attachment among the agent's hooks; it stands first."""
    # The public way to see what is registered wants an event, not its type.
    for callback in agent.hooks.get_callbacks_for(BeforeInvocationEvent(agent=agent)):
        if isinstance(callback, Attachment):
            return callback
    return None


def ensure_attached(agent: Agent) -> Attachment:
    """Return the attachment of an agent, which is added to it if it has none."""
    attachment = attachment_of(agent)
    if attachment is None:
        attachment = Attachment(agent)
        agent.add_hook(attachment, BeforeInvocationEvent, order=FIRST)
    return attachment


def adopt(agent: Agent, limits: Limits, action: Action | None, tree: Limits, origin: str) -> None:
    """Give one agent limits of its own, set at `origin`. Copies of the agent keep them.

    Raises:
        ConfigurationError: A limit on cost is set but no price can be known.
    """
    assert HOST.host is not None  # set by importing `otel_limits.plugin`
    own = HOST.host.own_policy(limits, action, tree, origin)
    if own is None:
        return
    attachment = ensure_attached(agent)
    STATES.of(agent).own = own
    if attachment.agent() is agent:  # limits given to a copy must not change the original
        attachment.own = own
    ALL_WITH_OWN.add(attachment)


def attach(agent: Agent) -> Attachment:
    """Be told what `agent` does from now on; again is harmless.

    Strands cannot remove middleware, so that all of it stays where it is for ever, and passes
    everything through while nothing is live. It is added at the first invocation and not before:
    what an application has given the agent by then stands around ours.
    """
    # Hooks and middleware have a registry each: an application may replace one without the other.
    attachment = ensure_attached(agent)
    add_once(agent, HOOKS, AfterInvocationEvent(agent=agent))
    registry = middleware_registry(agent)
    # Where the registry cannot be seen, the attachment remembers. A deep copy of one is new to us
    # although it has our stages, and gets them twice: `Live.staged` and `PASS` keep the inner ones
    # from following anything.
    if not attachment.has_stages if registry is None else registry not in STAGED:
        if AgentStreamStage is not None:
            agent.add_middleware(AgentStreamStage, agent_stage)
        agent.add_middleware(InvokeModelStage, model_stage)
        agent.add_middleware(ExecuteToolStage, tool_stage)
        attachment.has_stages = True
        if registry is not None:
            STAGED.add(registry)
    return attachment


def attach_quota_hooks(agent: Agent) -> None:
    """Add the hooks that wait, once: whoever dispatches an event by hand cannot await them."""
    add_once(agent, GATE_HOOKS, BeforeModelCallEvent(agent=agent, invocation_state={}))


def add_once(agent: Agent, hooks: Hooks, event: HookEvent) -> None:
    """Add hooks, unless the last of them is there: a copy of a registry has what it had."""
    # The last one is looked for, as it alone shows that all of them are there.
    there: list[Any] = list(agent.hooks.get_callbacks_for(event))
    if hooks[-1][1] not in there:
        for kind, handler, order in hooks:
            agent.add_hook(handler, kind, order=order)


def has_stages(agent: Agent) -> bool:
    """Tell whether our stages are where the agent runs its stages, as far as can be known."""
    registry = middleware_registry(agent)
    return registry is None or registry in STAGED
