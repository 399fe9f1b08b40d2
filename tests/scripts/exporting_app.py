"""An application without otel-limits in its code: an agent that would loop forever.

With `--wait` its tool waits for a line of standard input.
"""

import atexit
import sys
import time

from strands import Agent, tool

from otel_limits.testing import ScriptedModel, endless, uses

ENDED = []


@atexit.register
def print_delay() -> None:
    """Say how long the exit took: what was registered first is called last."""
    print(time.monotonic() - ENDED[0])  # noqa: T201  the test reads it


@tool
def search(query: str = "") -> str:
    """Search for a query."""
    if "--wait" in sys.argv:
        sys.stdin.readline()
    return f"nothing about {query!r}"


model = ScriptedModel(endless(uses("search")))
agent = Agent(model=model, tools=[search], name="researcher", callback_handler=None)
result = agent("Find it.")
print(result.stop_reason, model.calls)  # noqa: T201  the test reads it
ENDED.append(time.monotonic())
