"""Agents of the commands `doctor` and `demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strands import Agent, tool

from otel_limits.bindings.strands.scripted_model import ScriptedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands.types.tools import AgentTool

    from otel_limits.bindings.script import ScriptedRun


def run_script(run: ScriptedRun) -> tuple[int, str]:
    """Run an agent until its script ends or it is halted."""
    model = ScriptedModel(run.script, run.model)
    tools = [make_tool(*each) for each in run.tools.items()]
    agent = Agent(model=model, tools=[*tools], name=run.agent, callback_handler=None)
    reason = str(agent("go").stop_reason)
    return model.calls, reason


def make_tool(name: str, action: Callable[[], str]) -> AgentTool:
    """Make a tool that calls a function without arguments."""

    @tool(name=name, description=name)
    def act(query: str = "") -> str:  # noqa: ARG001  it tells calls apart
        return action()

    return act
