"""The runaway agent of `otel-limits doctor`, which stands in the place of an application.

Usage: python app.py REPORT EXPECTED

It is started as a copy, by whatever launcher is examined, and knows nothing of limits until its
agent has ended. Then it looks at what became of it, and writes that to the file REPORT as JSON.
EXPECTED are the variables of otel-limits that it was started with, as JSON: a launcher that changes
one of them would have the agent write to a real ledger or ask a real quota, so it is not called.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from strands import Agent, tool

MOST_CALLS: Final = 30
"""Tool calls after which it ends by itself, where nothing halts it."""

SEEN: Final[dict[str, Any]] = {}
"""What the tool saw of the invocation that it works for."""


@tool
def search() -> str:
    """Search."""
    from otel_limits.runs.tree import current

    SEEN["spans"] = not getattr(current(), "unsampled", True)
    return "nothing found"


def changed(expected: dict[str, str]) -> list[str]:
    """Name the variables of otel-limits that are not as they were given."""
    from otel_limits.settings.table import PREFIX
    from otel_limits.settings.variables import environment

    ours = {name: text for name, text in environment().items() if name.startswith(PREFIX)}
    return sorted(name for name in ours.keys() | expected if ours.get(name) != expected.get(name))


def run() -> dict[str, Any]:
    """Call the agent, and return what there is to know afterwards."""
    from opentelemetry import trace

    from otel_limits.bindings.known import FRAMEWORKS
    from otel_limits.runtime.autoload import installed_autoload
    from otel_limits.runtime.guard import probed
    from otel_limits.runtime.runtime import RUNTIME
    from otel_limits.testing import ScriptedModel, says, uses

    model = ScriptedModel([*[uses("search")] * MOST_CALLS, says("nobody has stopped me")])
    agent = Agent(model=model, tools=[search], name="runaway", callback_handler=None)
    reason = str(agent("go").stop_reason)
    enforcement = RUNTIME.enforcement()
    # Frameworks are probed in a process that is switched on; here that may have failed.
    gaps = enforcement if enforcement.source else probed(FRAMEWORKS)
    provider = type(trace.get_tracer_provider())
    return {
        "calls": model.calls,
        "reason": reason,
        "source": enforcement.source,
        "obstacles": gaps.obstacles,
        "weakened": gaps.weakened,
        "spans": SEEN.get("spans", False),
        "provider": f"{provider.__module__}.{provider.__qualname__}",
        "strands": version("strands-agents"),
        "python": sys.executable,
        "autoload": str(installed_autoload() or ""),
    }


if __name__ == "__main__":
    names = changed(json.loads(sys.argv[2]))
    report = {"changed": names} if names else run()
    Path(sys.argv[1]).write_text(json.dumps(report), encoding="utf-8")
    sys.stdout.flush()
    # Nobody is to export anything of this agent, which at the end of a process many would.
    os._exit(0)
