"""Attaches to agents through Strands' public `add_hook` and `add_middleware`."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeAlias

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

from otel_limits.bindings.strands.invocations import STATES
from otel_limits.bindings.strands.leg_hooks import (
    after_leg,
    before_leg,
    before_model,
    keep_task_of_leg,
    message_added,
)
from otel_limits.bindings.strands.middleware import agent_stage, model_stage
from otel_limits.bindings.strands.private import AgentStreamStage, middleware_registry
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.bindings.strands.tool_context import forget_request, tool_stage
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

    from otel_limits.core.policy import Overrides, Policy

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
