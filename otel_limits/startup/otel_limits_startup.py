"""Enables otel-limits when a framework is imported.

Imported by our `sitecustomize`, and copied into an environment by `otel-limits autoload install`.
It runs in every Python process there, with or without agents. So it imports otel-limits only when
needed, and never raises. It is imported by itself, because importing the package takes 0.2 seconds.
It must run on Python 3.6, because it is also on the path of interpreters of other environments.
"""

import os
import sys
from _thread import RLock, get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# A test compares this with `otel_limits.bindings.known`, which must not be imported yet.
FRAMEWORKS = {
    "strands.agent.agent": "strands-agents",
    "langgraph.pregel.main": "langgraph",
    "agents.run": "openai-agents",
}
"""The module of each framework that every program with agents imports, and its distribution."""
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
PACKAGES = ("agents", "langchain", "langchain_core", "langgraph", "strands")
"""The top-level packages of all frameworks. Their modules import each other in circles, so that one
of them can be complete while what it needs is not."""
TRIGGERS = ("opentelemetry.sdk.trace", "prometheus_client") + tuple(FRAMEWORKS)  # noqa: RUF005  Python 3.6
"""Imports after which otel-limits can attach, also to a provider that is created early, and export
that limits are enforced before there is an agent."""

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
    FINDER.look()  # e.g. by a .pth file of another package


def unseen_by_warnings(function: "Any") -> "Any":
    """Let warnings skip the frames of a function, as those of Python's own import system.

    A module may warn about its own import: the warning is for the code that imports it.
    """
    code = function.__code__
    if hasattr(code, "replace"):  # since Python 3.8
        # `warnings` recognizes frames of the import system by these words.
        function.__code__ = code.replace(co_filename="<otel-limits importlib._bootstrap>")
    return function


class OutermostFinder:
    """An import finder in front of others, which detects the end of each thread's outermost import.

    Modules whose import the outermost one causes are left to the other finders.
    """

    def __init__(self) -> None:
        """Start without imports."""
        # By thread. Names being looked up: other finders may start another lookup.
        self._asking = set()  # type: set[tuple[int, str]]
        self._importing = set()  # type: set[int]

    def is_wanted(self, name: str) -> bool:
        """Return whether the end of the import of a module matters."""
        raise NotImplementedError

    def imported(self, name: str) -> None:
        """Called at the end of an outermost import, before other threads can use its module.

        Args:
            name: The module; empty after a look at what is imported already.
        """
        raise NotImplementedError

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Find a wanted module with the following finders, and wrap its loader."""
        if not self.is_wanted(name):
            return None
        thread = get_ident()
        key = thread, name
        if thread in self._importing or key in self._asking:
            return None
        self._asking.add(key)
        try:
            spec = self._ask_following(name, path, target)
        finally:
            self._asking.discard(key)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = NotifyingLoader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def _ask_following(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        finders = list(sys.meta_path)
        if self in finders:  # those before this one have been asked
            del finders[: finders.index(self) + 1]
        for finder in finders:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                return spec  # type: ignore[no-any-return]
        return None

    @unseen_by_warnings
    def execute(self, loader: "Any", module: "ModuleType", spec: "ModuleSpec | None") -> None:
        """Execute a module, and report the end if its import is the outermost one."""
        thread = get_ident()
        if thread in self._importing:  # it was looked up before
            loader.exec_module(module)
            return
        self._importing.add(thread)
        try:
            loader.exec_module(module)
            if spec is not None:
                setattr(spec, EXECUTED, True)
            self.imported(module.__name__)
        finally:
            self._importing.discard(thread)

    def look(self) -> None:
        """Report what is imported already, unless this thread is importing more."""
        thread = get_ident()
        if thread not in self._importing:
            self._importing.add(thread)  # what follows may import, too
            try:
                self.imported("")
            finally:
                self._importing.discard(thread)


class TriggerFinder(OutermostFinder):
    """Enables otel-limits once a trigger has been imported."""

    def __init__(self) -> None:
        """Start waiting."""
        super().__init__()
        self.way = ""
        self.is_reported = False
        self.is_done = False
        self._lock = RLock()

    def is_wanted(self, name: str) -> bool:
        """Return whether a module can cause the import of a trigger."""
        return name in TRIGGERS or name.partition(".")[0] in PACKAGES

    def imported(self, name: str) -> None:
        """Enable if a trigger is there."""
        # Another thread that imports agents waits until they are limited. For other imports, the
        # enabling thread may wait, e.g. for that of prometheus_client by the quotas' thread.
        waits = name.partition(".")[0] in PACKAGES or not name
        is_early = any(is_under_way(name) for name in FRAMEWORKS)  # by another thread
        for trigger in TRIGGERS:
            distribution = FRAMEWORKS.get(trigger)
            if distribution is None:
                # The end of that import enables.
                is_ready = trigger in sys.modules and not is_early
            else:
                is_ready = (
                    not is_under_way(trigger)
                    and (trigger in sys.modules or is_lacking(trigger))
                    and is_of(trigger, distribution)
                )
            if is_ready:
                self.loaded(trigger, waits=waits)

    def loaded(self, name: str, *, waits: bool) -> None:
        """Enable, unless this has been done, or another thread does it."""
        has_lock = self._lock.acquire(timeout=LONGEST_WAIT_SECONDS if waits else 0)
        try:
            if not self.is_done and (has_lock or waits):
                self._enable(name)
        finally:
            if has_lock:
                self._lock.release()

    def _enable(self, name: str) -> None:
        try:
            __import__(ENABLING)
            starting = sys.modules[ENABLING]
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
            # The SDK alone needs no limits. One line is enough for several frameworks.
            if name in FRAMEWORKS and not self.is_reported:
                self.is_reported = True
                report_missing(error)


EXECUTED = "_otel_limits_executed"
"""Attribute of the specification of a module whose code has run. Python marks it only later."""


def is_under_way(name: str) -> bool:
    """Return whether a module, or a package that contains it, is being imported by any thread."""
    while name:
        if spec_under_way(name) is not None:
            return True
        name = name.rpartition(".")[0]
    return False


def spec_under_way(name: str) -> "ModuleSpec | None":
    """Return the specification of a module that any thread is importing, else `None`."""
    try:
        # Not `getattr`, which would load a lazy module.
        spec = object.__getattribute__(sys.modules[name], "__spec__")
    except (AttributeError, KeyError):
        return None
    if getattr(spec, "_initializing", False) and not getattr(spec, EXECUTED, False):
        return spec  # type: ignore[no-any-return]
    return None


def is_lacking(name: str) -> bool:
    """Return whether the top-level package of a module is imported, but has no such module.

    A release without the module that every program with agents imports cannot be limited.
    """
    if name.partition(".")[0] not in sys.modules:
        return False
    try:
        return not exists(name)
    except Exception:  # noqa: BLE001  of another package's finder; it must not affect the program
        return False


def is_of(name: str, distribution: str) -> bool:
    """Return whether the package of a module is imported, and that of a distribution.

    A user's own package may have the name of a framework's.
    """
    package = sys.modules.get(name.partition(".")[0])
    if package is None:
        return False
    places = list(getattr(package, "__path__", ())) or [getattr(package, "__file__", None) or ""]
    roots = _roots(distribution)
    # Frozen programs lack the metadata.
    is_frozen = bool(getattr(sys, "frozen", False)) or hasattr(package, "__compiled__")
    return (
        _are_in(places, roots)
        or (is_frozen and not roots and name in sys.modules)
        or is_recognized(name)
    )


def is_importable(name: str, distribution: str) -> bool:
    """Return whether the import of a module's package would be that of a distribution."""
    is_frozen = getattr(sys, "frozen", False) or "__compiled__" in globals()
    return (
        is_released(name, distribution)
        or (is_frozen and exists(name.partition(".")[0]))
        or is_recognized(name)
    )


def is_released(name: str, distribution: str) -> bool:
    """Return whether the package of a module is a distribution's that states its release."""
    spec = spec_of(name.partition(".")[0])
    if spec is None:
        return False
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return _are_in(places, _roots(distribution))


def is_recognized(name: str) -> bool:
    """Return whether the package of a framework's module is that framework, by its classes.

    Tools that make small images delete the metadata, and a checkout on the path has none.
    """
    try:
        found = [each for each in CLASSES.get(name, ()) if has_name(*each)]
    except Exception:  # noqa: BLE001  as above
        return False
    return len(found) > 1


def exists(name: str) -> bool:
    """Return whether a module exists, without importing the packages around it."""
    return name in sys.modules or spec_of(name) is not None


def spec_of(name: str) -> "ModuleSpec | None":
    """Return the specification of a module, without importing the packages around it."""
    spec, path = None, None  # type: ModuleSpec | None, Sequence[str] | None
    for end in [at for at, sign in enumerate(name + ".") if sign == "."]:
        module = sys.modules.get(name[:end])
        if end < len(name) and module is not None:
            path = list(getattr(module, "__path__", ()))
            continue
        spec = _ask_finders(name[:end], path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _ask_finders(name: str, path: "Sequence[str] | None") -> "ModuleSpec | None":
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if find is None or isinstance(finder, OutermostFinder):
            continue
        try:
            spec = find(name, path)
        except KeyError:  # a namespace package in a package that is not imported
            spec = find(name.rpartition(".")[2], path)
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None


def has_name(module: str, path: str) -> "bool | None":
    """Return whether a module has a name such as `Agent.add_hook`, without importing it.

    Its compiled code is read. Attributes of classes may be inherited, and modules may create names
    when they are imported, so `None` is returned if only an import could show it.
    """
    if module in sys.modules:
        value = sys.modules[module]  # type: Any
        for name in path.split("."):
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    if not exists(module):
        return False
    code = code_of(module)
    for depth, name in enumerate(path.split(".")):
        if code is None:
            return None
        if name not in code.co_names:
            makes_names = "__getattr__" in code.co_names or ("*",) in code.co_consts
            return None if depth or makes_names else False
        code = _class_in(code, name)
    return True


def code_of(name: str) -> "Any":
    """Return the compiled code of a module, without executing it, or `None` if it has none."""
    spec = spec_of(name)
    try:
        return spec.loader.get_code(name)  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001  not Python, or with an error that its import raises
        return None


def _class_in(code: "Any", name: str) -> "Any":
    """Return the code of a class in that of its module."""
    for each in code.co_consts:
        if hasattr(each, "co_name"):
            if each.co_name == name:
                return each
            if each.co_name == "<generic parameters of %s>" % name:
                return _class_in(each, name)
    return None


def _are_in(places: "Sequence[str]", roots: "Sequence[tuple[str, bool]]") -> bool:
    for place in places:
        directory = os.path.join(os.path.realpath(os.path.dirname(place)), "")
        for root, is_tree in roots:
            if directory == root or (is_tree and directory.startswith(root)):
                return True
    return False


def _roots(distribution: str) -> "list[tuple[str, bool]]":
    """Return the directories from which a distribution is imported.

    The second value is true for a directory of an editable installation, which contains them.
    """
    roots = []
    try:
        from importlib.metadata import distributions  # Python 3.8; all frameworks need a later one

        for found in distributions(name=distribution):
            roots.append((str(found.locate_file("")), False))
            origin = found.read_text("direct_url.json")
            if origin:
                roots.append((_editable_directory(origin), True))
    except Exception:  # noqa: BLE001, S110  must not affect the program
        pass
    return [(os.path.join(os.path.realpath(root), ""), is_tree) for root, is_tree in roots if root]


def _editable_directory(origin: str) -> str:
    """Return the directory of an editable installation: PEP 610."""
    import json
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    installed = json.loads(origin)
    if not installed.get("dir_info", {}).get("editable"):
        return ""
    return url2pathname(urlsplit(installed["url"]).path)


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
    """A loader that lets a finder execute its module, and removes itself."""

    def __init__(self, loader: "Any", finder: OutermostFinder) -> None:
        """Wrap `loader`."""
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> "Any":
        """Delegate everything else."""
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "Any":
        """Delegate."""
        return self._loader.create_module(spec)

    @unseen_by_warnings
    def exec_module(self, module: "ModuleType") -> None:
        """Restore the original loader and execute the module."""
        # Restored before the module runs, because its code may use both, e.g. importlib.resources.
        spec = module.__spec__
        module.__loader__ = self._loader
        if spec is not None:
            spec.loader = self._loader
        self._finder.execute(self._loader, module, spec)


FINDER = TriggerFinder()
