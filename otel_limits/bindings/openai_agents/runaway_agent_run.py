"""The runaway agent of `otel-limits doctor`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agents import Agent, RunConfig, Runner, function_tool

from otel_limits.bindings.openai_agents.run_marks import markers_of
from otel_limits.bindings.openai_agents.scripted_agents_model import ScriptedAgentsModel
from otel_limits.bindings.script import runaway_script

if TYPE_CHECKING:
    from collections.abc import Callable


def run_away(most_calls: int, observe: Callable[[], None]) -> tuple[int, str]:
    """Run an agent that calls a tool `most_calls` times unless it is halted."""

    @function_tool
    def search() -> str:
        """Search."""
        observe()
        return "nothing found"

    model = ScriptedAgentsModel(runaway_script(most_calls))
    agent = Agent(name="runaway", model=model, tools=[search])
    # Without tracing, which would send the run to OpenAI.
    config = RunConfig(tracing_disabled=True)
    # Not by `run_sync`, which leaves its event loop open.
    run = Runner.run(agent, "go", max_turns=most_calls + 2, run_config=config)
    result = asyncio.run(run)
    stops = markers_of(result)
    return model.calls, stops[-1]["reason"] if stops else "end_turn"
