"""An application with an agent of the OpenAI Agents SDK that loops. It knows nothing of limits.

As a script it imports the SDK, runs the agent immediately, and prints the outcome as JSON.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agents import Agent, RunConfig, Runner, function_tool

from otel_limits import stop_of
from otel_limits.testing import ScriptedAgentsModel, says, uses

MOST_CALLS = 12
"""Where nothing limits it, it ends by itself."""


@function_tool
def search() -> str:
    """Search."""
    return "nothing found"


async def run(name: str) -> dict[str, Any]:
    """Run a new agent."""
    model = ScriptedAgentsModel([*[uses("search")] * MOST_CALLS, says("I was never stopped")])
    agent = Agent(name=name, model=model, tools=[search])
    config = RunConfig(tracing_disabled=True)  # otherwise it is sent to OpenAI
    result = await Runner.run(agent, "go", max_turns=MOST_CALLS + 2, run_config=config)
    stop = stop_of(result)
    return {"model_calls": model.calls, "stop_reason": stop.reason if stop else None}


def call(name: str = "served") -> dict[str, Any]:
    """Run a new agent, also for a server whose event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run(name))
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, name).result()


if __name__ == "__main__":
    print(json.dumps(call()))  # noqa: T201  its output
