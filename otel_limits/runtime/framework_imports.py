"""Detects that a framework has been imported, and imports of it that mix old and new classes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.startup.otel_limits_startup import (
    EXECUTED,
    OutermostFinder,
    is_under_way,
    spec_under_way,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType

    from otel_limits.bindings.framework import Framework


class FrameworkImports(OutermostFinder):
    """Reports the end of each outermost import of a framework's module.

    Args:
        frameworks: The frameworks to wait for.
        imported: Called with each framework at the end of such an import, not only with its own.
        again: Called with a framework of which one module is imported again, before that.
    """

    def __init__(
        self,
        frameworks: Sequence[Framework],
        imported: Callable[[Framework], None],
        again: Callable[[Framework], None],
    ) -> None:
        """Start without waiting."""
        super().__init__()
        self._frameworks = frameworks
        self._imported = imported
        self._again = again
        self._packages = {name for framework in frameworks for name in framework.packages}
        self._seen: dict[str, tuple[Framework, ModuleType]] = {}
        """Imported modules by name, with their framework and its module of that import."""

    def wait(self) -> None:
        """Report the frameworks that are imported already, and each later import."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # the others would find the modules
            # Imports of any thread that are in progress were looked up before.
            for name in filter(self.is_wanted, list(sys.modules)):
                if (spec := spec_under_way(name)) is not None:
                    call_at_end(spec, self.look)
        self.look()

    def is_wanted(self, name: str) -> bool:
        """Return whether a module belongs to a framework."""
        return name.partition(".")[0] in self._packages

    @suppress_errors("binding")
    def imported(self, name: str) -> None:  # noqa: ARG002  all are looked at
        """Report every framework that is complete."""
        incomplete = packages_under_way()
        for framework in self._frameworks:
            if incomplete.isdisjoint(framework.packages) and not is_under_way(framework.module):
                self._imported(framework)

    def see(self, framework: Framework, module: ModuleType, names: Iterable[str]) -> None:
        """Note which modules of a framework are imported.

        Args:
            framework: The framework.
            module: Its module that every program imports.
            names: The names of that module, and of parts.
        """
        self._seen |= dict.fromkeys(names, (framework, module))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Report a module that is imported again or reloaded, unless its whole framework is."""
        is_reloaded = target is not None
        # `importlib.util.find_spec` only looks for it.
        if name in self._seen and (is_reloaded or name not in sys.modules):
            framework, module = self._seen[name]
            if sys.modules.get(framework.module) is module:
                self._again(framework)
        return super().find_spec(name, path, target)


def call_at_end(spec: ModuleSpec, ended: Callable[[], object]) -> None:
    """Call a function at the end of an import in progress, in the thread that imports.

    Args:
        spec: The specification of the module.
        ended: The function. Other threads can use the module only after it has returned, as at the
            end of an import that a finder has looked up. It is not called if the import fails.
    """
    original = type(spec)

    # Python ends an import with `spec._initializing = False`, also for threads that wait for it.
    def set_attribute(spec: Any, name: str, value: object) -> None:
        try:
            if name == "_initializing" and not value:
                spec.__class__ = original
                if spec.name in sys.modules:
                    setattr(spec, EXECUTED, True)
                    ended()
        finally:
            original.__setattr__(spec, name, value)

    spec.__class__ = type(original.__name__, (original,), {"__setattr__": set_attribute})


def packages_under_way() -> set[str]:
    """Return the top-level packages of which this thread is importing modules."""
    found = set()
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  documented
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "<module>" and spec_under_way(name) is not None:
            found.add(name.partition(".")[0])
        frame = frame.f_back
    return found
