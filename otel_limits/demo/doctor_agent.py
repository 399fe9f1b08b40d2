"""The runaway agent that `otel-limits doctor` runs instead of an application.

Usage: python app.py REPORT EXPECTED

A copy of this file is started by the launcher under test. Until its agent has ended, it imports
nothing that enables limits; then it writes what happened to the file REPORT, as JSON. EXPECTED is a
JSON object of the OTEL_LIMITS_* variables it was started with. If the launcher changed one of them,
the agent is not called, because it could write to a real ledger or use a real quota.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from strands import Agent, tool

MOST_CALLS: Final = 30
"""Tool calls after which it ends if it is not halted."""

OBSERVED: Final[dict[str, Any]] = {}
"""Observations that the tool makes about its invocation."""


@tool
def search() -> str:
    """Search."""
    from otel_limits.runs.tree import current

    OBSERVED["spans"] = not getattr(current(), "unsampled", True)
    return "nothing found"


def changed(expected: dict[str, str]) -> list[str]:
    """Return the names of OTEL_LIMITS_* variables that differ from the expected ones."""
    from otel_limits.settings.table import PREFIX
    from otel_limits.settings.variables import environment

    ours = {name: text for name, text in environment().items() if name.startswith(PREFIX)}
    return sorted(name for name in ours.keys() | expected if ours.get(name) != expected.get(name))


def call() -> dict[str, Any]:
    """Call an agent; return its model calls and the reason for its end."""
    from otel_limits.testing import ScriptedModel, says, uses

    model = ScriptedModel([*[uses("search")] * MOST_CALLS, says("not halted")])
    agent = Agent(model=model, tools=[search], name="runaway", callback_handler=None)
    reason = str(agent("go").stop_reason)
    return {"calls": model.calls, "reason": reason}


def call_in_child() -> dict[str, Any]:
    """Do the same in a child process."""
    try:
        # Spawned: a forked child has the limits of its parent anyway.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(call)
    except Exception as error:  # noqa: BLE001  e.g. without shared memory
        return {"error": repr(error)}


def isolating_option() -> str | None:
    """Return the option with which Python ignores PYTHONPATH or `sitecustomize`."""
    if sys.flags.no_site:
        return "-S"
    return "-I or -E" if sys.flags.ignore_environment else None


def run() -> dict[str, Any]:
    """Call the agent and return the report."""
    from opentelemetry import trace

    from otel_limits.bindings.known import FRAMEWORKS
    from otel_limits.runtime.autoload import installed_autoload
    from otel_limits.runtime.guard import probed
    from otel_limits.runtime.runtime import RUNTIME

    here = call()
    with ThreadPoolExecutor(1) as pool:
        threaded = pool.submit(call).result()
    enforcement = RUNTIME.enforcement()
    # Enabling otel-limits probes frameworks, but it may have failed here.
    gaps = enforcement if enforcement.source else probed(FRAMEWORKS)
    provider = type(trace.get_tracer_provider())
    return {
        **here,
        "thread": threaded,
        "child": call_in_child() if enforcement.source else {},
        "source": enforcement.source,
        "obstacles": gaps.obstacles,
        "weakened": gaps.fallbacks,
        "spans": OBSERVED.get("spans", False),
        "provider": f"{provider.__module__}.{provider.__qualname__}",
        "strands": version("strands-agents"),
        "python": sys.executable,
        "option": isolating_option(),
        "autoload": str(installed_autoload() or ""),
    }


if __name__ == "__main__":
    names = changed(json.loads(sys.argv[2]))
    report = {"changed": names} if names else run()
    Path(sys.argv[1]).write_text(json.dumps(report), encoding="utf-8")
    sys.stdout.flush()
    # Skip exit handlers, which would export this agent's telemetry.
    os._exit(0)
