"""Tools of a run that come from an MCP server in another process."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from agents import (
    Agent,
    Runner,
)
from agents.mcp import MCPServerStdio

from otel_limits import (
    Event,
    enable,
)
from otel_limits.testing import ScriptedAgentsModel, says, uses
from tests.openai_agents.runs import (
    UNTRACED,
    halt_of,
    search,
    streamed,
)
from tests.paths import SCRIPTS
from tests.unit.openai_agents.test_run_tools import used

SERVER = SCRIPTS / "mcp_server.py"


# --- MCP ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True], ids=["run", "run_streamed"])
def test_tools_of_an_mcp_server_are_limited(
    is_streamed: bool,  # noqa: FBT001  a parameter of pytest
    events: list[Event],
) -> None:
    """A real server at the other end of a pipe."""
    enable(max_tool_calls=2, observers=[events.append])
    script = [uses("add", arguments={"a": 1, "b": 2}), uses("add", "search", arguments={"a": 3})]
    model = ScriptedAgentsModel([*script, says("done")])

    async def main() -> Any:
        command: Any = {"command": sys.executable, "args": [str(SERVER)]}
        async with MCPServerStdio(command, client_session_timeout_seconds=60) as server:
            boss = Agent("boss", model=model, tools=[search], mcp_servers=[server])
            if is_streamed:
                return await streamed(boss)
            return await Runner.run(boss, "go", run_config=UNTRACED)

    result = asyncio.run(main())
    assert halt_of(result).reason == "max_tool_calls"
    outputs = [each["output"] for each in result.to_input_list() if "output" in each]
    assert "3" in str(outputs[0])
    assert used(events) == [("add", "success"), ("add", "error"), ("search", "refused")]
