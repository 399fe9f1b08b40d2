"""Runs an agent until it waits for a human, or continues such a run: `resumed_run.py STATE WAY`."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import Agent, RunConfig, Runner, RunState, SQLiteSession, function_tool

import otel_limits
from otel_limits.testing import ScriptedAgentsModel, uses


@function_tool(needs_approval=True)
def delete() -> str:
    """Delete."""
    return "deleted"


@function_tool
def search() -> str:
    """Search."""
    return "nothing"


async def main(state: str | None, session: SQLiteSession, way: str) -> dict[str, Any]:
    """Begin a run, or continue the one with a state after the approval of all that waits."""
    asks = [] if state is not None else [uses("search", "delete")]
    model = ScriptedAgentsModel([*asks, *[uses("search")] * 9])
    agent = Agent("boss", model=model, tools=[delete, search])
    given: Any = "go"
    if state is not None:
        given = await RunState.from_json(agent, json.loads(state))
        for item in given.get_interruptions():
            given.approve(item)
    options: Any = {"run_config": RunConfig(tracing_disabled=True), "session": session}
    if way == "run":
        result: Any = await Runner.run(agent, given, **options)
    else:
        result = Runner.run_streamed(agent, given, **options)
        async for _ in result.stream_events():
            pass
    stop = otel_limits.stop_of(result)
    items: list[Any] = list(await session.get_items())
    calls = {item["call_id"] for item in items if item.get("type") == "function_call"}
    outputs = {item["call_id"] for item in items if item.get("type") == "function_call_output"}
    return {
        "state": json.dumps(result.to_state().to_json()) if result.interruptions else None,
        "waiting": [item.name for item in result.interruptions],
        "calls": model.calls,
        "reason": stop and stop.reason,
        "tools": stop and stop.tool_calls,
        "open": len(calls - outputs),
    }


if __name__ == "__main__":
    path = Path(sys.argv[1])
    session = SQLiteSession("1", path.with_suffix(".db"))
    told = asyncio.run(main(path.read_text() if path.exists() else None, session, sys.argv[2]))
    session.close()
    if (state := told.pop("state")) is not None:
        path.write_text(state)
    sys.stdout.write(json.dumps(told))
