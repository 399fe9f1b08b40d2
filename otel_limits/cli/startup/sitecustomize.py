"""Switches otel-limits on in every Python that a program under `otel-limits run` consists of.

Python imports it by itself, also in interpreters that the program starts: those are limited too,
which is wanted. They may be of another version, without otel-limits, or have nothing to do with
agents. So it only begins to wait for agents, and lets the `sitecustomize` that it hides run as if
it weren't there. Syntax and imports are those of any Python 3.6.
"""

import atexit
import os
import sys
from collections.abc import MutableMapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
STARTUP = os.path.join(os.path.dirname(os.path.dirname(HERE)), "startup")
"""Where `otel_limits_startup` is, and nothing else."""


def wait_for_agents() -> None:
    """Wait, with the help of what may be installed in another environment than this one."""
    sys.path.insert(0, STARTUP)
    try:
        import otel_limits_startup
    finally:
        sys.path.remove(STARTUP)
    otel_limits_startup.wait("run")


def run_hidden() -> None:
    """Import the `sitecustomize` that stands behind this one; its errors are its own."""
    # Python finds one `sitecustomize`, so that this one would hide the user's or a distribution's.
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
    """Go back to the front of a path for Python that somebody has put another directory before.

    Launchers such as opentelemetry-instrument do, and their `sitecustomize` does not run ours.
    A path that we have been taken from is left as it is: that was meant.
    """
    path = environ.get("PYTHONPATH", "").split(os.pathsep)
    if HERE in path[1:]:
        environ["PYTHONPATH"] = os.pathsep.join([HERE, *(each for each in path if each != HERE)])


def prepend_after_launchers() -> None:
    """See to it that a launcher, which is a Python that becomes another program, leaves us first.

    The functions that it calls for that all end in one of these two.
    """
    become, become_with = os.execv, os.execve

    def execv(path: "Any", argv: "Any") -> "Any":
        prepend_to_path(os.environ)
        return become(path, argv)

    def execve(path: "Any", argv: "Any", env: "Any") -> "Any":
        if isinstance(env, MutableMapping):
            prepend_to_path(env)
        return become_with(path, argv, env)

    os.execv, os.execve = execv, execve


def warn_if_unused() -> None:
    """Say at the exit that there was no agent: whoever started the program expected one."""
    registry = sys.modules.get("otel_limits.runs.registry")
    has_started = registry is not None and registry.LIVE.has_started
    is_silenced = any(
        os.environ.get(name, "").strip().lower() == "true"
        for name in ("OTEL_LIMITS_QUIET", "OTEL_LIMITS_DISABLED")
    )
    # Of a process that was forked meanwhile, its children may have called agents.
    if not (has_started or is_silenced or FORKED) and os.getpid() == HERE_IN:
        sys.stderr.write(
            "otel-limits: no agent of a followed framework (Strands) was called in this process, "
            "so that nothing was limited in it.\n"
        )


FORKED = []  # type: list[bool]
HERE_IN = os.getpid()
if os.environ.get("_RUN_BY_OTEL_LIMITS") == str(HERE_IN):
    atexit.register(warn_if_unused)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_parent=lambda: FORKED.append(True))

wait_for_agents()
prepend_after_launchers()
try:
    run_hidden()
finally:
    # For the interpreters that this one starts: OpenTelemetry puts itself first again.
    prepend_to_path(os.environ)
