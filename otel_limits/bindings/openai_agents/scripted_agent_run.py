"""Agents of the commands `doctor` and `demo`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agents import Agent, RunConfig, Runner, function_tool

from otel_limits.bindings.openai_agents.run_marks import markers_of
from otel_limits.bindings.openai_agents.scripted_agents_model import ScriptedAgentsModel
from otel_limits.bindings.script import MOST_TURNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from agents import Tool

    from otel_limits.bindings.script import ScriptedRun


def run_script(run: ScriptedRun) -> tuple[int, str]:
    """Run an agent until its script ends or it is halted."""
    model = ScriptedAgentsModel(run.script, run.model)
    tools = [make_tool(*each) for each in run.tools.items()]
    agent = Agent(name=run.agent, model=model, tools=tools)
    # Without tracing, which would send the run to OpenAI.
    config = RunConfig(tracing_disabled=True)
    # Not by `run_sync`, which leaves its event loop open.
    result = asyncio.run(Runner.run(agent, "go", max_turns=MOST_TURNS, run_config=config))
    stops = markers_of(result)
    return model.calls, stops[-1]["reason"] if stops else "end_turn"


def make_tool(name: str, action: Callable[[], str]) -> Tool:
    """Make a tool that calls a function without arguments."""

    @function_tool(name_override=name, description_override=name)
    def act(query: str = "") -> str:  # noqa: ARG001  it tells calls apart
        return action()

    return act
