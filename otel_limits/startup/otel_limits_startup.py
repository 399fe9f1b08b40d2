"""Enables otel-limits when a framework is imported.

Imported by our `sitecustomize`, and copied into an environment by `otel-limits autoload install`.
It runs in every Python process there, with or without agents. So it imports otel-limits only when
needed, and never raises. It is imported by itself, because importing the package takes 0.2 seconds.
It must run on Python 3.6, because it is also on the path of interpreters of other environments.
"""

import os
import sys
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# A test compares this with `otel_limits.bindings.known`, which must not be imported yet.
FRAMEWORKS = {"langgraph.pregel.main": "langgraph", "strands.agent.agent": "strands-agents"}
"""The module of each framework that every program with agents imports, and its distribution."""
TRIGGERS = ("opentelemetry.sdk.trace", "prometheus_client") + tuple(FRAMEWORKS)  # noqa: RUF005  Python 3.6
"""Imports after which otel-limits can attach, also to a provider that is created early, and export
that limits are enforced before there is an agent."""

WAYS = {
    "run": "enable_for_run",
    "autoload": "enable_for_autoload",
    "parent": "enable_for_parent",
}
"""The function of `otel_limits.runtime.enable` to call, by source."""

RUN = "_RUN_BY_OTEL_LIMITS"
"""Variable with the ID of the process that `otel-limits run` became."""

SETTINGS = "otel_limits_autoload.env"
"""The file next to a copy of this module with the settings that autoload keeps."""

LONGEST_WAIT_SECONDS = 30
"""How long a thread waits until another one has enabled otel-limits."""


def autoload() -> None:
    """Wait for agents if a variable is set. Called at the start of Python by autoload."""
    here = os.path.dirname(os.path.abspath(__file__))
    for name, value in kept_settings(os.path.join(here, SETTINGS)).items():
        if not os.environ.get(name, "").strip():  # an empty variable is unset
            os.environ[name] = value
    if any(name.startswith("OTEL_LIM") for name in os.environ):  # also OTEL_LIMIT_MAX_TURNS
        wait("autoload")


def kept_settings(path: str) -> "dict[str, str]":
    """Return the variables in a file of lines such as NAME=VALUE, if there is one."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        report("%s cannot be read (%s)." % (path, error))
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line)


def wait(way: str) -> None:
    """Wait for agents, or enable otel-limits now if they are imported already.

    The last caller determines the source.
    """
    FINDER.way = way
    if not FINDER.is_done and FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    for name in TRIGGERS:
        if name in sys.modules:  # e.g. by a .pth file of another package
            FINDER.loaded(name)


class TriggerFinder:
    """The first import finder, which detects that a trigger has been imported."""

    def __init__(self) -> None:
        """Start waiting."""
        self.way = ""
        self.is_done = False
        self._lock = RLock()
        # Names being looked up: other finders may start another lookup.
        self._asking = set()  # type: set[str]

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Find a trigger with the other finders, and wrap its loader."""
        if name not in TRIGGERS or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._asking.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = NotifyingLoader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def _ask_others(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                return spec  # type: ignore[no-any-return]
        return None

    def loaded(self, name: str) -> None:
        """Enable, unless this has been done or a framework is still being imported."""
        if name not in FRAMEWORKS and any(module in sys.modules for module in FRAMEWORKS):
            return
        # Another thread that imports agents waits until they are limited.
        has_lock = self._lock.acquire(timeout=LONGEST_WAIT_SECONDS)
        try:
            if not self.is_done:
                self._enable(name)
        finally:
            if has_lock:
                self._lock.release()

    def _enable(self, name: str) -> None:
        try:
            from otel_limits.runtime import enable as starting

            # It is incomplete while the program itself imports otel-limits, and thereby the SDK.
            # The import of a framework enables later.
            if name not in FRAMEWORKS and not hasattr(starting, WAYS[self.way]):
                return
            enable = getattr(starting, WAYS[self.way])
            self.is_done = True  # first, as the triggers are also imported by what follows
            enable()
            if self in sys.meta_path:
                sys.meta_path.remove(self)
        except Exception as error:  # noqa: BLE001  must not affect the program
            self.is_done = False
            if is_installed(FRAMEWORKS.get(name)):  # the SDK alone needs no limits
                report_missing(error)


def is_installed(distribution: "str | None") -> bool:
    """Return whether a framework is installed here; other modules may have the same name."""
    try:
        from importlib.metadata import version  # Python 3.8; all frameworks need a later one

        return distribution is not None and bool(version(distribution))
    except Exception:  # noqa: BLE001  must not affect the program
        return False


def report_missing(error: Exception) -> None:
    """Report that agents are not limited here; end the process if it must not run without limits.

    It must not if OTEL_LIMITS_STRICT is set, or if `otel-limits run` became this process.
    """
    if is_true("OTEL_LIMITS_DISABLED"):
        return
    report(
        "otel-limits cannot be imported in %s (%s). Run there: pip install otel-limits"
        % (sys.executable, error)
    )
    if is_true("OTEL_LIMITS_STRICT") or os.environ.get(RUN) == str(os.getpid()):
        try:
            sys.stdout.flush()  # `os._exit` flushes nothing
        except (AttributeError, OSError, ValueError):
            pass
        os._exit(2)  # an exception could be handled


def report(reason: str) -> None:
    """Write on standard error why limits are not enforced."""
    try:  # a stream can be missing or closed
        sys.stderr.write("otel-limits: limits are not enforced: %s\n" % reason)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass


def is_true(name: str) -> bool:
    """Return whether a variable is set to true."""
    return os.environ.get(name, "").strip().lower() == "true"


class NotifyingLoader:
    """A loader that reports when its module has been executed, and removes itself."""

    def __init__(self, loader: "Any", finder: TriggerFinder) -> None:
        """Wrap `loader`."""
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> "Any":
        """Delegate everything else."""
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "Any":
        """Delegate."""
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        """Restore the original loader, execute the module and report."""
        # Restored before the module runs, because its code may use both, e.g. importlib.resources.
        spec = module.__spec__
        module.__loader__ = self._loader
        if spec is not None:
            spec.loader = self._loader
        self._loader.exec_module(module)
        self._finder.loaded(module.__name__)


FINDER = TriggerFinder()
