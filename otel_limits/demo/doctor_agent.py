"""The program that `otel-limits doctor` runs instead of an application: a runaway agent.

Usage: python app.py REPORT EXPECTED FRAMEWORKS

A copy of this file is started by the launcher under test. Until its agents have ended, it imports
nothing that enables limits; then it writes what happened to the file REPORT, as JSON. EXPECTED is a
JSON object of the OTEL_LIMITS_* variables it was started with. If the launcher changed one of them,
no agent is called, because it could write to a real ledger or use a real quota. FRAMEWORKS is a
JSON list: the modules of frameworks, and their distributions. The first that is installed is
imported first, as a program with agents does, and again in a child process. If that fails, the
report has the error.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    for framework, distribution in json.loads(sys.argv[3]):
        with contextlib.suppress(PackageNotFoundError):
            version(distribution)  # of a binding, if that of its framework is not known
            if find_spec(framework.partition(".")[0]) is not None:
                with contextlib.suppress(Exception):  # occurs again below
                    import_module(framework)
                break

MOST_CALLS: Final = 30
"""Tool calls after which an agent ends if it is not halted."""

WITH_SPANS: Final[set[str]] = set()
"""The framework, once its spans were received."""


def changed(expected: dict[str, str]) -> list[str]:
    """Return the names of OTEL_LIMITS_* variables that differ from the expected ones."""
    from otel_limits.core.limits import PREFIX
    from otel_limits.settings.variables import environment

    ours = {name: text for name, text in environment().items() if name.startswith(PREFIX)}
    return sorted(name for name in ours.keys() | expected if ours.get(name) != expected.get(name))


def call(name: str, module: str) -> dict[str, Any]:
    """Call the agent of a framework; return its model calls and the reason for its end."""
    import_module(module)  # before otel-limits, in a child process as well
    from otel_limits.bindings.known import FRAMEWORKS, know_installed
    from otel_limits.bindings.script import runaway
    from otel_limits.runs.current import current

    know_installed()  # in a process that is not limited, too

    def observe() -> None:
        if not getattr(current(), "unsampled", True):
            WITH_SPANS.add(name)

    framework = next(each for each in FRAMEWORKS if each.name == name)
    calls, reason = framework.run_script(runaway(MOST_CALLS, observe))
    return {"calls": calls, "reason": reason}


def call_in_child(name: str, module: str) -> dict[str, Any]:
    """Call the agent of a framework in a child process."""
    try:
        # Spawned: a forked child has the limits of its parent anyway.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(call, (name, module))
    except Exception as error:  # noqa: BLE001  e.g. without shared memory
        return {"error": repr(error)}


def isolating_option() -> str | None:
    """Return the option with which Python ignores PYTHONPATH or `sitecustomize`."""
    if sys.flags.no_site:
        return "-S"
    return "-I or -E" if sys.flags.ignore_environment else None


def run(modules: list[str]) -> dict[str, Any]:
    """Call the agent of the first installed framework, and return the report."""
    from opentelemetry import trace

    from otel_limits.bindings.known import installed_frameworks, know_installed
    from otel_limits.runtime.autoload import installed_autoload, outdated_autoload
    from otel_limits.runtime.runtime import RUNTIME

    know_installed()
    installed = installed_frameworks()
    # Those that only this process knows are last.
    order = [*modules, *(each.module for each in installed)]
    wanted = min(installed, key=lambda each: order.index(each.module), default=None)
    found = {} if wanted is None else report_on(wanted)
    source = RUNTIME.enforcement().source  # first, as asking for the provider may enable
    provider = type(trace.get_tracer_provider())
    return {
        **found,
        "name": wanted and wanted.name,
        "installed": {each.name: (each.module, each.distribution) for each in installed},
        "source": source,
        "provider": f"{provider.__module__}.{provider.__qualname__}",
        "python": sys.executable,
        "option": isolating_option(),
        "autoload": str(installed_autoload() or ""),
        "outdated": outdated_autoload(),
    }


def report_on(framework: Any) -> dict[str, Any]:
    """Call the agent of a framework here, in a thread and in a child; return what happened."""
    from otel_limits.bindings.recognition import release
    from otel_limits.bindings.third_party import BindingError
    from otel_limits.runtime.guard import probed
    from otel_limits.runtime.runtime import RUNTIME

    agent = framework.name, framework.module
    try:
        here = call(*agent)
    except BindingError as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  any code of the framework runs here
        return {"error": f"it failed ({error!r})."}
    with ThreadPoolExecutor(1) as pool:
        threaded = pool.submit(call, *agent).result()
    source, enforcement = RUNTIME.enforcement().source, RUNTIME.enforcement(framework.name)
    # Enabling otel-limits probes the framework, but it may have failed here.
    gaps = enforcement if enforcement.source else probed([framework])
    return {
        "release": release(framework),
        "here": here,
        "thread": threaded,
        "child": call_in_child(*agent) if source else {},
        "obstacles": gaps.obstacles,
        "weakened": gaps.fallbacks,
        "spans": bool(WITH_SPANS),
    }


if __name__ == "__main__":
    names = changed(json.loads(sys.argv[2]))
    report = {"changed": names} if names else run([module for module, _ in json.loads(sys.argv[3])])
    Path(sys.argv[1]).write_text(json.dumps(report), encoding="utf-8")
    sys.stdout.flush()
    # Skip exit handlers, which would export this agent's telemetry.
    os._exit(0)
