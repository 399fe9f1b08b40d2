"""An agent in a program that uses Logfire: prints how its invocation was followed, as JSON."""

from __future__ import annotations

import json
import sys

import logfire
from strands import Agent, tool

import otel_limits
from otel_limits.testing import ScriptedModel, endless, uses


@tool
def search() -> str:
    """Search."""
    return "nothing found"


events: list[otel_limits.Event] = []


def configure() -> None:
    """Set Logfire up as its documentation does, but for sending and printing anything."""
    logfire.configure(send_to_logfire=False, console=False)


def enable() -> None:
    """Switch otel-limits on."""
    otel_limits.enable(otel_limits.Limits(max_turns=3), observers=[events.append])


steps = [configure, enable] if sys.argv[1] == "configure-first" else [enable, configure]
for step in steps:
    step()
model = ScriptedModel(endless(uses("search")))
result = Agent(model=model, tools=[search], callback_handler=None)("go")
stops = [event for event in events if isinstance(event, otel_limits.Stop)]
print(  # noqa: T201
    json.dumps(
        {
            "unsampled": [f.unsampled for f in events if isinstance(f, otel_limits.Started)],
            "reason": result.stop_reason,
            "calls": model.calls,
            "cycles": stops[0].cycles,
        }
    )
)
