"""An application with an agent of Strands that loops. It knows nothing of limits."""

from __future__ import annotations

from typing import Any

from strands import Agent, tool

from otel_limits.testing import ScriptedModel, says, uses

MOST_CALLS = 12
"""Where nothing limits it, it ends by itself."""


@tool
def search() -> str:
    """Search."""
    return "nothing found"


def make_agent(name: str = "served") -> Agent:
    """Make an agent."""
    model = ScriptedModel([*[uses("search")] * MOST_CALLS, says("I was never stopped")])
    return Agent(model=model, tools=[search], name=name, callback_handler=None)


def call(name: str = "served") -> dict[str, Any]:
    """Call a new agent."""
    agent = make_agent(name)
    reason = str(agent("go").stop_reason)
    return {"model_calls": agent.model.calls, "stop_reason": reason}  # type: ignore[attr-defined]
