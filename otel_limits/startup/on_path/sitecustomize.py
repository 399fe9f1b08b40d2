"""Enables otel-limits in child processes of a limited program, and in that of `otel-limits run`.

Python imports this module at startup if its directory is on PYTHONPATH: `otel-limits run` and
`otel_limits.enable()` put it there. A process may run another Python version, without otel-limits
or without agents. So it only waits for agents to be imported, and then imports the `sitecustomize`
that it hides. It must run on Python 3.6.
"""

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
STARTUP = os.path.dirname(HERE)
"""Directory of `otel_limits_startup`."""

RUN = "_RUN_BY_OTEL_LIMITS"
"""Variable with the ID of the process that `otel-limits run` became; children inherit it."""
ENABLED = "_ENABLED_BY_OTEL_LIMITS"
"""Variable with the arguments of `enable()` in a parent process."""


def wait_for_agents() -> None:
    """Wait for agents. otel-limits may be installed in another environment than this one."""
    sys.path.insert(0, STARTUP)
    try:
        import otel_limits_startup
    finally:
        sys.path.remove(STARTUP)
    if RUN in os.environ:
        otel_limits_startup.wait("run")
    elif ENABLED in os.environ:
        otel_limits_startup.wait("parent")


def run_hidden() -> None:
    """Import the `sitecustomize` of the user or distribution, which this one hides."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
    ours = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


def prepend_to_path(environ: "MutableMapping[Any, Any]") -> None:
    """Move our directory to the front of PYTHONPATH.

    Launchers such as opentelemetry-instrument prepend their own, and their `sitecustomize` does not
    import ours. If our directory was removed from the path, that was intended.
    """
    path = environ.get("PYTHONPATH", "").split(os.pathsep)
    if HERE in path[1:]:
        environ["PYTHONPATH"] = os.pathsep.join([HERE] + [each for each in path if each != HERE])


def prepend_after_launchers() -> None:
    """Keep our directory first when this process replaces itself, as launchers do.

    All exec functions call one of these two.
    """
    become, become_with = os.execv, os.execve

    def execv(path: "Any", argv: "Any") -> "Any":
        prepend_to_path(os.environ)
        return become(path, argv)

    def execve(path: "Any", argv: "Any", env: "Any") -> "Any":
        if hasattr(env, "__setitem__"):
            prepend_to_path(env)
        return become_with(path, argv, env)

    os.execv, os.execve = execv, execve


def warn_if_unused() -> None:
    """Warn at exit if no agent ran, neither here nor in a child, as the user expected one."""
    if os.getpid() != HERE_IN:  # a child by fork
        return
    registry = sys.modules.get("otel_limits.runs.registry")
    has_run = not NOTE or (registry is not None and registry.LIVE.has_started)
    # What cannot be limited is not tracked either, and was reported.
    enabled = getattr(sys.modules.get("otel_limits.runtime.runtime"), "RUNTIME", None)
    has_run = has_run or (enabled is not None and bool(enabled.enforcement().obstacles))
    if os.path.exists(NOTE):
        has_run = True
        os.remove(NOTE)
    is_silenced = any(
        os.environ.get(name, "").strip().lower() == "true"
        for name in ("OTEL_LIMITS_QUIET", "OTEL_LIMITS_DISABLED")
    )
    if not has_run and not is_silenced:
        sys.stderr.write(
            "otel-limits: no agent ran in this process or in a child process, so no limits were "
            "applied.%s\n" % without_framework()
        )


def without_framework() -> str:
    """Return the reason for it if no agent could run."""
    from importlib.util import find_spec

    startup = sys.modules.get("otel_limits_startup")
    packages = {name.partition(".")[0] for name in getattr(startup, "FRAMEWORKS", ())}
    if startup is None or any(name in sys.modules or find_spec(name) for name in packages):
        return ""
    missing = (
        " No supported agent framework is installed for %s. Install otel-limits there with the "
        "extra strands, langchain or openai-agents." % sys.executable
    )
    for entry in os.environ.get(startup.HANDED, "").split():
        line, distribution, _ = entry.split("@")
        missing += (
            "\notel-limits: %s: its entry point '%s' waits for %s, which is not installed. Install "
            "it, correct the entry point, or uninstall %s."
            % (
                distribution,
                line.replace("=", " = "),
                line.replace("=", ".").partition(".")[0],
                distribution,
            )
        )
    return missing


NOTE = ""
"""File that exists after a child has called an agent; empty if there can be none."""
HERE_IN = os.getpid()
if os.environ.get(RUN) == str(HERE_IN):
    # Handed to children only now: a shell in place of this Python would not remove the file.
    NOTE = os.environ["_OTEL_LIMITS_RAN"] = os.environ.get("_OTEL_LIMITS_RAN_OFFERED", "")
    atexit.register(warn_if_unused)

try:
    wait_for_agents()
    if RUN in os.environ:
        prepend_after_launchers()
except Exception as error:  # noqa: BLE001  must not affect the program
    sys.stderr.write("otel-limits: limits are not enforced: startup failed (%r).\n" % (error,))
try:
    run_hidden()
finally:
    # For child processes: OpenTelemetry prepends its own directory again.
    prepend_to_path(os.environ)
    if "otel_limits_startup" in sys.modules:
        sys.modules["otel_limits_startup"].serve_workers()
