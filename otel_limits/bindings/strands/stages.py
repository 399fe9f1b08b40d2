"""Has our two stages called inside of every middleware, next to what Strands itself does there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

from strands.middleware import InvokeModelStage
from strands.middleware._agent_stream import AgentStreamStage
from strands.middleware._registry import MiddlewareRegistry

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from strands.agent.agent import Agent
    from strands.middleware import MiddlewareNext, MiddlewareStage

    Stage: TypeAlias = Callable[[MiddlewareNext[Any, Any], Any], AsyncGenerator[Any, None]]
    """Called with what Strands does in a stage, and the context to do it with."""


class Stages(MiddlewareRegistry):
    """Stands in for an agent's registry of middleware, which keeps its handlers.

    Registered as middleware, each stage of ours would cost a generator more, which every event of
    the agent passes, and its place would depend on who registers first: of a middleware that calls
    the model several times, only what is inside of it sees each call.
    """

    def __init__(self, former: MiddlewareRegistry, agent_stage: Stage, model_stage: Stage) -> None:
        """Stand in for `former`."""
        self.former = former
        self._handlers = former._handlers
        self._agent_stage = agent_stage
        self._model_stage = model_stage

    def invoke(
        self,
        stage: MiddlewareStage[Any, Any, Any],
        context: Any,
        terminal: MiddlewareNext[Any, Any],
    ) -> AsyncGenerator[Any, None]:
        """Run a stage: the middleware of the agent, then ours, then Strands' own part."""
        if stage is InvokeModelStage:
            terminal = functools.partial(self._model_stage, terminal)
        elif stage is AgentStreamStage:
            terminal = functools.partial(self._agent_stage, terminal)
        else:
            return super().invoke(stage, context, terminal)
        if not self._handlers.get(stage):
            return terminal(context)
        return super().invoke(stage, context, terminal)


def stand_in(agent: Agent, agent_stage: Stage, model_stage: Stage) -> None:
    """Have both stages called for `agent` from now on."""
    agent._middleware_registry = Stages(agent._middleware_registry, agent_stage, model_stage)


def step_back(agent: Agent) -> None:
    """Undo `stand_in`."""
    if isinstance(agent._middleware_registry, Stages):
        agent._middleware_registry = agent._middleware_registry.former
