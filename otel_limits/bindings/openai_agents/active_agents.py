"""Learns from the SDK's own hooks which agent of a run is active, and what its loop sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agents import RunHooks
from agents.lifecycle import RunHooksBase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from otel_limits.bindings.openai_agents.agent_runs import AgentRun


class ActiveAgentHooks(RunHooks):
    """Calls the hooks of the application, and notes the agent of each model call."""

    # Set by `around`: a subclass of the application's hooks may need arguments.
    application: RunHooks
    agent_run: AgentRun

    @classmethod
    def around(cls, application: Any, agent_run: AgentRun) -> Any:
        """Return hooks around those of the application. The SDK rejects anything else."""
        if application is None:
            application = RunHooks()
        elif not isinstance(application, RunHooksBase):
            return application
        hooks = cls()
        hooks.application, hooks.agent_run = application, agent_run
        return hooks

    async def on_llm_start(
        self, context: Any, agent: Any, system_prompt: Any, input_items: Any
    ) -> None:
        """Note the active agent: after a hand-off it is another one than before."""
        self.agent_run.activate(agent.name)
        self.agent_run.next_input = input_items
        await self.application.on_llm_start(context, agent, system_prompt, input_items)


def _passed_on(name: str) -> Callable[..., Awaitable[None]]:
    async def hook(self: ActiveAgentHooks, *args: Any, **named: Any) -> None:
        await getattr(self.application, name)(*args, **named)

    return hook


# Every other hook of the installed release, including those that are newer than this file.
for _name in vars(RunHooksBase):
    if _name.startswith("on_") and _name not in vars(ActiveAgentHooks):
        setattr(ActiveAgentHooks, _name, _passed_on(_name))
