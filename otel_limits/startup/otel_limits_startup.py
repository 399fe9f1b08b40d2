"""Enables otel-limits when a framework is imported.

Imported by the `sitecustomize` of `otel-limits run` and by the line of `otel-limits autoload
install`, in every Python process, with or without agents. So it imports otel-limits only when
needed and never raises. It is outside the package, because importing the package takes 0.2 seconds.
It must run on Python 3.6, because `run` also adds it to interpreters of other environments.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# The modules of all frameworks in `otel_limits.bindings.known`, which must not be imported yet. A
# test compares the two.
AGENTS = ("strands.agent.agent",)
TRIGGERS = ("opentelemetry.sdk.trace", *AGENTS)
"""Imports after which otel-limits can attach, also to a provider that is created early."""

WAYS = {"run": "enable_for_run", "autoload": "enable_for_autoload"}
"""The function of `otel_limits.runtime.enable` to call, by source."""


def autoload() -> None:
    """Wait for agents if a variable is set. Called at the start of Python by autoload."""
    if any(name.startswith("OTEL_LIM") for name in os.environ):  # also OTEL_LIMIT_MAX_TURNS
        wait("autoload")


def wait(way: str) -> None:
    """Wait for agents. The last caller determines the source."""
    FINDER.way = way
    if not FINDER.is_done and FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


class TriggerFinder:
    """The first import finder, which detects that a trigger has been imported."""

    def __init__(self) -> None:
        """Start waiting."""
        self.way = ""
        self.is_done = False
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
        is_early = name not in AGENTS and any(module in sys.modules for module in AGENTS)
        if self not in sys.meta_path or is_early:
            return
        try:
            from otel_limits.runtime import enable as starting

            # None while the program itself imports otel-limits, and thereby the SDK: the module is
            # incomplete. The import of a framework enables later.
            enable = getattr(starting, WAYS[self.way], None)
            if enable is not None:
                sys.meta_path.remove(self)
                self.is_done = True
                enable()
        except Exception as error:  # noqa: BLE001  must not affect the program
            if name in AGENTS:  # a program with only the SDK needs no limits
                sys.stderr.write(
                    f"otel-limits: limits are not enforced: cannot be imported in {sys.executable} "
                    f"({error}). Run there: pip install otel-limits\n"
                )


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
