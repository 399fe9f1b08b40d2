"""A plugin with limits for one agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strands.plugins import Plugin

from otel_limits.core.limits import LIMITS, NO_LIMITS, Limits, caller_location, explained
from otel_limits.core.policy import Action, Overrides
from otel_limits.core.secrets import quote_value

if TYPE_CHECKING:
    from strands.agent.agent import Agent


def _within_limits(name: str, value: object) -> str | None:
    """Explain where a limit is given."""
    limit = f"{name}={quote_value(value)}"
    return f"Pass LimitsPlugin(Limits({limit}))." if name in LIMITS else None


class LimitsPlugin(Plugin):
    """One agent's own limits: `Agent(plugins=[LimitsPlugin(Limits(max_turns=5))])`.

    They take precedence over `enable()`, cap by cap: a cap that is `None` here is inherited.
    Nothing is counted twice.

    Args:
        limits: This agent's caps.
        action: `observe`, `halt`, `wrap_up`, `raise` or `ask`; the default is that of `enable()`,
            else `halt`.
        tree: Caps for an invocation of this agent including its sub-agents.
        conversation: Caps for all invocations of a conversation of this agent.
        halt_message: Text of a halt for the end user, with any of the fields `{agent}`, `{reason}`,
            `{limit}` and `{used}`; the default is that of `enable()`.

    Raises:
        ValueError: `limits`, `tree` or `conversation` are not `Limits`, `action` is not one of
            these, a limit makes no sense for a tree or a conversation, or `halt_message` is blank
            or has other fields.
    """

    @explained(_within_limits)
    def __init__(
        self,
        limits: Limits = NO_LIMITS,
        *,
        action: Action | None = None,
        tree: Limits = NO_LIMITS,
        conversation: Limits = NO_LIMITS,
        halt_message: str | None = None,
    ) -> None:
        """Store the limits until the agent exists."""
        super().__init__()
        self._own = Overrides(
            limits=limits,
            tree=tree,
            conversation=conversation,
            action=action,
            halt_message=halt_message,
            origin=caller_location("LimitsPlugin"),
        )

    @property
    def name(self) -> str:
        """Name of this plugin."""
        return "otel-limits"

    def init_agent(self, agent: Agent) -> None:
        """Attach to `agent`."""
        # Imported here, so that Strands without a name that we use does not break this module.
        from otel_limits.bindings.strands.agent_hooks import adopt

        adopt(agent, self._own)
