"""A plugin with limits for one agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strands.plugins import Plugin

from otel_limits.core.limits import NO_LIMITS, Limits, require_limits, require_tree
from otel_limits.core.origins import caller_location
from otel_limits.core.policy import ACTION, Action

if TYPE_CHECKING:
    from strands.agent.agent import Agent


class LimitsPlugin(Plugin):
    """One agent's own limits: `Agent(plugins=[LimitsPlugin(Limits(max_turns=5))])`.

    They take precedence over `enable()`, cap by cap: a cap that is `None` here is inherited.
    Nothing is counted twice.

    Args:
        limits: This agent's caps.
        action: `observe`, `halt`, `wrap_up`, `raise` or `ask`; the default is that of `enable()`,
            else `halt`.
        tree: Caps for an invocation of this agent including its sub-agents.

    Raises:
        ValueError: `limits` or `tree` are not `Limits`, `action` is not one of these, or a limit
            makes no sense for a tree.
    """

    def __init__(
        self,
        limits: Limits = NO_LIMITS,
        *,
        action: Action | None = None,
        tree: Limits = NO_LIMITS,
    ) -> None:
        """Store the limits until the agent exists."""
        super().__init__()
        if action is not None:
            ACTION.of_value("action", action)
        self._limits = require_limits("limits", limits)
        self._action = action
        self._tree = require_tree(tree)
        self._origin = caller_location("LimitsPlugin")

    @property
    def name(self) -> str:
        """Name of this plugin."""
        return "otel-limits"

    def init_agent(self, agent: Agent) -> None:
        """Attach to `agent`."""
        # Imported here, so that Strands without a name that we use does not break this module.
        from otel_limits.bindings.strands.attach import adopt

        adopt(agent, self._limits, self._action, self._tree, self._origin)
