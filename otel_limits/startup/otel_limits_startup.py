"""Waits in a Python that has just started until there are agents, and then switches on.

Two ways lead here: the `sitecustomize` of `otel-limits run`, and the line that
`otel-limits autoload install` puts into an environment. Neither knows whether this Python has
anything to do with agents. So nothing is imported until something is that matters, and nothing is
ever raised. It stands outside the package, whose import takes a fifth of a second. Syntax and
imports are those of any Python 3.6, as `run` brings it into interpreters of other environments.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# The module of every framework in `otel_limits.bindings.known`, which cannot be asked before it is
# imported. A test holds that they are the same.
AGENTS = ("strands.agent.agent",)
TRIGGERS = ("opentelemetry.sdk.trace", *AGENTS)
"""After these, otel-limits has something to attach to; a provider made early is seen, too."""

WAYS = {"run": "enable_for_run", "autoload": "enable_for_autoload"}
"""What is called in `otel_limits.runtime.enable`, by who waits."""


def autoload() -> None:
    """Wait where something is set; what an environment that was told to autoload begins with."""
    if any(name.startswith("OTEL_LIM") for name in os.environ):  # also OTEL_LIMIT_MAX_TURNS
        wait("autoload")


def wait(way: str) -> None:
    """Wait for agents; whoever comes later waits in the place of who came before."""
    FINDER.way = way
    if not FINDER.is_done and FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


class TriggerFinder:
    """Stands first among the finders, to know when a trigger has been loaded."""

    def __init__(self) -> None:
        """Begin to wait."""
        self.way = ""
        self.is_done = False
        # What is being asked of the others now: a finder among them may ask all finders again.
        self._asking = set()  # type: set[str]

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Find a trigger as the other finders do, with a loader that reports when it is done."""
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
        """Switch on, unless that has been done or a framework is in the middle of being loaded."""
        is_early = name not in AGENTS and any(module in sys.modules for module in AGENTS)
        if self not in sys.meta_path or is_early:
            return
        try:
            from otel_limits.runtime import enable as starting

            # None while the program itself imports otel-limits, which imports the SDK: only half of
            # the module is there. The import of a framework, later, switches on.
            enable = getattr(starting, WAYS[self.way], None)
            if enable is not None:
                sys.meta_path.remove(self)
                self.is_done = True
                enable()
        except Exception as error:  # noqa: BLE001  the program must not feel it
            if name in AGENTS:  # a program that only has the SDK may do without limits
                sys.stderr.write(
                    f"otel-limits: it cannot be loaded in {sys.executable} ({error}), "
                    f"so no limit is in force there. Install it there: pip install otel-limits\n"
                )


class NotifyingLoader:
    """A loader that reports when its module has been loaded, and then leaves no trace."""

    def __init__(self, loader: "Any", finder: TriggerFinder) -> None:
        """Stand in for `loader`."""
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> "Any":
        """Be like the other loader in everything else."""
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "Any":
        """Do as the other loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        """Do as the other loader does, and report."""
        # Before the module runs: its own code, such as importlib.resources, may look at both.
        spec = module.__spec__
        module.__loader__ = self._loader
        if spec is not None:
            spec.loader = self._loader
        self._loader.exec_module(module)
        self._finder.loaded(module.__name__)


FINDER = TriggerFinder()
