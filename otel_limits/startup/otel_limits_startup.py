"""Enables otel-limits when a framework is imported.

Imported by our `sitecustomize`, and copied into an environment by `otel-limits autoload install`.
It runs in every Python process there, with or without agents. So it imports otel-limits only when
needed, and never raises. It is imported by itself, because importing the package takes 0.2 seconds.
It must run on Python 3.6, because it is also on the path of interpreters of other environments, and
may find no otel-limits there.
"""

import gc
import os
import sys
from _thread import RLock, get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# A test compares these tables with those of `otel_limits.bindings`, which may be missing here.
# `wait` adds the frameworks of other distributions.
FRAMEWORKS = {
    "strands.agent.agent": "strands-agents",
    "langgraph.pregel.main": "langgraph",
    "agents.run": "openai-agents",
}
"""The module of each framework that every program with agents imports, and its distribution; empty
if the name of the module is all that is known."""
CLASSES = {
    "strands.agent.agent": (
        ("strands.agent.agent", "Agent"),
        ("strands.hooks.registry", "HookRegistry"),
        ("strands.models.model", "Model"),
        ("strands.tools.registry", "ToolRegistry"),
    ),
    "langgraph.pregel.main": (
        ("langgraph.pregel.main", "Pregel"),
        ("langgraph.errors", "GraphRecursionError"),
        ("langgraph.graph.state", "StateGraph"),
        ("langgraph.pregel.protocol", "PregelProtocol"),
    ),
    "agents.run": (
        ("agents.run", "AgentRunner"),
        ("agents.agent", "AgentBase"),
        ("agents.guardrail", "InputGuardrail"),
        ("agents.lifecycle", "RunHooksBase"),
        ("agents.models.interface", "ModelTracing"),
    ),
}
"""Modules and classes by which each framework is recognized outside its distribution, by two of
them: another release may have moved or renamed one."""
PACKAGES = {"agents", "langchain", "langchain_core", "langgraph", "strands"}
"""The top-level packages of all frameworks. Their modules import each other in circles, so that one
of them can be complete while what it needs is not."""
EARLY = ("opentelemetry.sdk.trace", "prometheus_client")
"""Other imports after which otel-limits can attach, to a provider that is created early, and to
export that limits are enforced before there is an agent."""

FOUND = ""
"""The entry points of frameworks of other distributions, such as `module=binding:OBJECT@name@name`,
separated by spaces. `otel-limits autoload install` writes them here, because looking for them takes
too long at every start of Python."""

HANDED = "_OTEL_LIMITS_FRAMEWORKS"
"""Variable with the same, for this process and its children."""

ENABLING = "otel_limits.runtime.enable"
"""The module to import once agents can be limited."""

WAYS = {
    "run": "enable_for_run",
    "autoload": "enable_for_autoload",
    "parent": "enable_for_parent",
}
"""Its function to call, by source."""

RUN = "_RUN_BY_OTEL_LIMITS"
"""Variable with the ID of the process that `otel-limits run` became."""

NOTE = "_OTEL_LIMITS_RAN"
"""Variable with a file by which that process knows that a child may have called an agent."""

SETTINGS = "otel_limits_autoload.env"
"""The file next to a copy of this module with the settings that autoload keeps."""

ENDPOINT = ("OTEL_LIMITS_PROMETHEUS_PORT", "PROMETHEUS_MULTIPROC_DIR")
"""Variables with which the endpoint of one process has the metrics of all workers."""

LONGEST_WAIT_SECONDS = 30
"""How long a thread waits until another one has enabled otel-limits."""


def autoload() -> None:
    """Wait for agents if a variable is set. Called at the start of Python by autoload."""
    here = os.path.dirname(os.path.abspath(__file__))
    for name, value in kept_settings(os.path.join(here, SETTINGS)).items():
        if not os.environ.get(name, "").strip():  # an empty variable is unset
            os.environ[name] = value
    if any(name.startswith("OTEL_LIM") for name in os.environ):  # also OTEL_LIMIT_MAX_TURNS
        handed = os.environ.get(HANDED, "").split()  # by a parent, maybe of another environment
        own = FOUND.split()
        os.environ[HANDED] = " ".join(own + [each for each in handed if each not in own])
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
    for entry in os.environ.get(HANDED, "").split():
        module = entry.partition("=")[0]
        FRAMEWORKS.setdefault(module, "")
        PACKAGES.add(module.partition(".")[0])
    if not FINDER.is_done and FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    FINDER.end("", lambda: None)  # for imports before, e.g. by a .pth file of another package


def serve_workers() -> None:
    """Enable now in the process that `otel-limits run` became if it can serve metrics of workers.

    A supervisor imports no agents, and its workers may do so with the first request, or end.
    """
    is_run = os.environ.get(RUN) == str(os.getpid())
    if is_run and all(os.environ.get(name, "").strip() for name in ENDPOINT):
        with LOCK:
            if not FINDER.is_done:
                enable("")


class Finder:
    """An import finder in front of others, which detects the end of each thread's outermost import.

    Modules of frameworks import each other in circles, so those whose import the outermost one
    causes are left to the other finders.
    """

    def __init__(self) -> None:
        """Start without imports."""
        self.way = ""
        self.is_done = False
        # Threads that look up or import a module.
        self._busy = set()  # type: set[int]

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Find a module of interest with the following finders, and wrap its loader."""
        thread = get_ident()
        is_wanted = name in EARLY or name.partition(".")[0] in PACKAGES
        if thread in self._busy or not is_wanted:
            return None
        finders = list(sys.meta_path)
        if self in finders:  # those before this one have been asked
            del finders[: finders.index(self) + 1]
        self._busy.add(thread)  # other finders may look up more
        try:
            for finder in finders:
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find is not None else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = NotifyingLoader(spec.loader)
                    return spec  # type: ignore[no-any-return]
        finally:
            self._busy.discard(thread)
        return None

    def end(self, executed: str, run: "Callable[[], object]") -> None:
        """Execute a module, and enable if its import was the outermost one."""
        thread = get_ident()
        is_outermost = thread not in self._busy
        self._busy.add(thread)  # what follows may import, too
        try:
            run()
            if is_outermost:
                enable_after(executed)
        finally:
            if is_outermost:
                self._busy.discard(thread)


class NotifyingLoader:
    """A loader that executes its module through the finder, and removes itself."""

    def __init__(self, loader: "Any") -> None:
        """Wrap `loader`."""
        self._loader = loader

    def __getattr__(self, name: str) -> "Any":
        """Delegate everything else."""
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Restore the original loader and execute the module."""
        # Restored before the module runs, because its code may use both, e.g. importlib.resources.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        FINDER.end(module.__name__, lambda: self._loader.exec_module(module))


def enable_after(executed: str) -> None:
    """Enable if a trigger has been imported.

    Args:
        executed: The module whose import ends now; empty after a look at those imported already.
    """
    # Another thread that imports agents waits until they are limited. For other imports, the
    # enabling thread may wait, e.g. for that of prometheus_client by the quotas' thread.
    waits = executed.partition(".")[0] in PACKAGES or not executed
    # The end of another thread's import of a framework enables.
    is_early = any(is_under_way(name, executed) for name in FRAMEWORKS)
    for name in EARLY + tuple(FRAMEWORKS):
        if name in FRAMEWORKS:
            is_ready = not is_under_way(name, executed) and is_framework(name)
        else:
            is_ready = name in sys.modules and not is_early
        if is_ready:
            has_lock = LOCK.acquire(timeout=LONGEST_WAIT_SECONDS if waits else 0)
            try:
                if not FINDER.is_done and (has_lock or waits):
                    enable(name)
            finally:
                if has_lock:
                    LOCK.release()


def enable(trigger: str) -> None:
    """Enable otel-limits, or report that it cannot be imported."""
    # What follows creates few cycles, but often enough objects for a collection of all that the
    # framework has loaded, half of the time that this takes.
    collects = gc.isenabled()
    gc.disable()
    try:
        __import__(ENABLING)
        module = sys.modules[ENABLING]
        # It is incomplete while the program itself imports otel-limits, and thereby the SDK. The
        # import of a framework enables later.
        if trigger not in FRAMEWORKS and not hasattr(module, WAYS[FINDER.way]):
            return
        function = getattr(module, WAYS[FINDER.way])
        FINDER.is_done = True  # first, as the triggers are also imported by what follows
        function()
        if FINDER in sys.meta_path:
            sys.meta_path.remove(FINDER)
    except Exception as error:  # noqa: BLE001  must not affect the program
        FINDER.is_done = False
        # The SDK alone needs no limits. One line is enough for several frameworks.
        if trigger in FRAMEWORKS and not REPORTED:
            REPORTED.append(trigger)
            report_missing(error)
    finally:
        if collects:
            gc.enable()


def is_under_way(name: str, executed: str) -> bool:
    """Return whether a module, or a package that contains it, is being imported by any thread.

    Python marks the end of the import of `executed` only later.
    """
    while name:
        try:
            # Not `getattr`, which would load a lazy module.
            spec = object.__getattribute__(sys.modules[name], "__spec__")
        except (AttributeError, KeyError):
            spec = None
        if getattr(spec, "_initializing", False) and name != executed:
            return True
        name = name.rpartition(".")[0]
    return False


def is_framework(trigger: str) -> bool:
    """Return whether a framework is imported, and not a package of the user with the same name."""
    package, _, module = trigger.partition(".")
    places = list(getattr(sys.modules.get(package), "__path__", ()))
    # A release without the module that every program with agents imports cannot be limited.
    files = [os.path.join(place, *module.split(".")) for place in places]
    is_lacking = not any(os.path.exists(each + ".py") or os.path.isdir(each) for each in files)
    if not FRAMEWORKS[trigger]:
        return trigger in sys.modules or (package in sys.modules and is_lacking)
    if not places or not (trigger in sys.modules or is_lacking):
        return False
    classes = CLASSES.get(trigger, ())
    found = [name for module, name in classes if hasattr(sys.modules.get(module), name)]
    # Tools that make small images delete the metadata, and a checkout on the path has none.
    return len(found) > 1 or any(
        has_metadata(os.path.dirname(place), FRAMEWORKS[trigger]) for place in places
    )


def has_metadata(directory: str, distribution: str) -> bool:
    """Return whether a distribution is installed in a directory."""
    try:
        names = os.listdir(directory or os.curdir)
    except OSError:  # e.g. an archive
        return False
    start = distribution.replace("-", "_") + "-"
    return any(name.startswith(start) and name.endswith(".dist-info") for name in names)


def report_missing(error: Exception) -> None:
    """Report that agents are not limited here; end the process if it must not run without limits.

    It must not if OTEL_LIMITS_STRICT is set, or if `otel-limits run` became this process.
    """
    if is_true("OTEL_LIMITS_DISABLED"):
        return
    hiding = hiding_file(error)
    if hiding is None:
        because, advice = str(error), "Install otel-limits there" + or_delete_autoload()
    else:
        because = "%s: %s, in %s" % (type(error).__name__, error, hiding)
        advice = "Correct that file, or rename it if it hides another module"
    report("otel-limits cannot be imported in %s (%s). %s." % (sys.executable, because, advice))
    is_run = os.environ.get(RUN) == str(os.getpid())
    if os.environ.get(NOTE) and not is_run:
        try:
            open(os.environ[NOTE], "a").close()
        except OSError:
            pass
    if is_true("OTEL_LIMITS_STRICT") or is_run:
        try:
            sys.stdout.flush()  # `os._exit` flushes nothing
        except (AttributeError, OSError, ValueError):
            pass
        os._exit(2)  # an exception could be handled


def hiding_file(error: Exception) -> "str | None":
    """Return the file that cannot be imported, unless otel-limits or what it needs is missing.

    A script's directory is the first on Python's path, so that a file `token.py` hides the module
    of that name.
    """
    file = getattr(error, "filename", None)  # of a SyntaxError
    if isinstance(error, ImportError):
        file = error.path  # where a name is missing; of a missing module, there is none
    elif file is None:
        trace = error.__traceback__
        while trace is not None:
            file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    is_ours = file is not None and "otel_limits" in file.split(os.sep)
    return None if is_ours else file


def or_delete_autoload() -> str:
    """Return how to end autoload without the package, if this is the copy that autoload loads."""
    here, this = os.path.split(os.path.abspath(__file__))
    try:
        names = sorted(
            name for name in os.listdir(here) if name.startswith("otel_limits_autoload.")
        )
    except OSError:
        return ""
    if not names:
        return ""
    return ", or delete %s and %s in %s" % (", ".join(names), this, here)


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


FINDER = Finder()
LOCK = RLock()
REPORTED = []  # type: list[str]
