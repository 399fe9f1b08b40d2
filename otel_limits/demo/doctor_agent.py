"""The program that `otel-limits doctor` runs instead of an application: a runaway agent.

Usage: python app.py REPORT EXPECTED FRAMEWORKS

A copy of this file is started by the launcher under test. Until its agents have ended, it imports
nothing that enables limits; then it writes what happened to the file REPORT, as JSON. EXPECTED is a
JSON object of the OTEL_LIMITS_* variables it was started with. If the launcher changed one of them,
no agent is called, because it could write to a real ledger or use a real quota. FRAMEWORKS is a
JSON object: the modules of all frameworks, and their distributions. Those that are installed are
imported first, as a program with agents does, and again in a child process.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeAlias

if __name__ == "__main__":
    for module, distribution in json.loads(sys.argv[3]).items():
        with contextlib.suppress(PackageNotFoundError):
            version(distribution)
            import_module(module)

MOST_CALLS: Final = 30
"""Tool calls after which an agent ends if it is not halted."""

Agents: TypeAlias = "list[tuple[str, str]]"
"""The name and the module of each framework whose agent is called."""

WITH_SPANS: Final[set[str]] = set()
"""The frameworks whose spans were received."""


def changed(expected: dict[str, str]) -> list[str]:
    """Return the names of OTEL_LIMITS_* variables that differ from the expected ones."""
    from otel_limits.settings.table import PREFIX
    from otel_limits.settings.variables import environment

    ours = {name: text for name, text in environment().items() if name.startswith(PREFIX)}
    return sorted(name for name in ours.keys() | expected if ours.get(name) != expected.get(name))


def call(name: str, module: str) -> dict[str, Any]:
    """Call the agent of a framework; return its model calls and the reason for its end."""
    import_module(module)  # before otel-limits, in a child process as well
    from otel_limits.bindings.known import FRAMEWORKS
    from otel_limits.runs.tree import current

    def observe() -> None:
        if not getattr(current(), "unsampled", True):
            WITH_SPANS.add(name)

    framework = next(each for each in FRAMEWORKS if each.name == name)
    calls, reason = framework.run_away(MOST_CALLS, observe)
    return {"calls": calls, "reason": reason}


def call_each(agents: Agents) -> dict[str, dict[str, Any]]:
    """Call the agents of several frameworks; return what happened by framework."""
    return {name: call(name, module) for name, module in agents}


def call_in_child(agents: Agents) -> dict[str, dict[str, Any]]:
    """Do the same in a child process."""
    try:
        # Spawned: a forked child has the limits of its parent anyway.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(call_each, (agents,))
    except Exception as error:  # noqa: BLE001  e.g. without shared memory
        return {name: {"error": repr(error)} for name, _ in agents}


def call_in_children(agents: Agents) -> dict[str, dict[str, Any]]:
    """Call all agents in one child process, which saves time, or each in its own."""
    from otel_limits.settings.variables import variable

    if variable("OTEL_PYTHON_TRACER_PROVIDER") is None:
        return call_in_child(agents)
    # A framework that requests a tracer would enable the limits of one that does not.
    return {name: call_in_child([(name, module)])[name] for name, module in agents}


def isolating_option() -> str | None:
    """Return the option with which Python ignores PYTHONPATH or `sitecustomize`."""
    if sys.flags.no_site:
        return "-S"
    return "-I or -E" if sys.flags.ignore_environment else None


def run() -> dict[str, Any]:
    """Call the agents and return the report."""
    from opentelemetry import trace

    from otel_limits.bindings.installed import installed_frameworks
    from otel_limits.runtime.autoload import installed_autoload
    from otel_limits.runtime.runtime import RUNTIME

    frameworks = installed_frameworks()
    reports = [report_on(each) for each in frameworks]
    source = RUNTIME.enforcement().source
    in_child = call_in_children([(each.name, each.module) for each in frameworks]) if source else {}
    provider = type(trace.get_tracer_provider())
    return {
        "frameworks": [{**each, "child": in_child.get(each["name"], {})} for each in reports],
        "source": source,
        "provider": f"{provider.__module__}.{provider.__qualname__}",
        "python": sys.executable,
        "option": isolating_option(),
        "autoload": str(installed_autoload() or ""),
    }


def report_on(framework: Any) -> dict[str, Any]:
    """Call the agent of a framework here and in a thread; return what happened."""
    from otel_limits.bindings.probing import release
    from otel_limits.runtime.guard import probed
    from otel_limits.runtime.runtime import RUNTIME

    agent = framework.name, framework.module
    here = call(*agent)
    with ThreadPoolExecutor(1) as pool:
        threaded = pool.submit(call, *agent).result()
    enforcement = RUNTIME.enforcement(framework.name)
    # Enabling otel-limits probes frameworks, but it may have failed here.
    gaps = enforcement if enforcement.source else probed([framework])
    return {
        "name": framework.name,
        "release": release(framework),
        "here": here,
        "thread": threaded,
        "obstacles": gaps.obstacles,
        "weakened": gaps.fallbacks,
        "spans": framework.name in WITH_SPANS,
    }


if __name__ == "__main__":
    names = changed(json.loads(sys.argv[2]))
    report = {"changed": names} if names else run()
    Path(sys.argv[1]).write_text(json.dumps(report), encoding="utf-8")
    sys.stdout.flush()
    # Skip exit handlers, which would export this agent's telemetry.
    os._exit(0)
