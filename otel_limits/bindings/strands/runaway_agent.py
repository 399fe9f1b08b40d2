"""The runaway agent of `otel-limits doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strands import Agent, tool

from otel_limits.bindings.script import runaway_script
from otel_limits.bindings.strands.scripted_model import ScriptedModel

if TYPE_CHECKING:
    from collections.abc import Callable


def run_away(most_calls: int, observe: Callable[[], None]) -> tuple[int, str]:
    """Run an agent that calls a tool `most_calls` times unless it is halted."""

    @tool
    def search() -> str:
        """Search."""
        observe()
        return "nothing found"

    model = ScriptedModel(runaway_script(most_calls))
    agent = Agent(model=model, tools=[search], name="runaway", callback_handler=None)
    reason = str(agent("go").stop_reason)
    return model.calls, reason
