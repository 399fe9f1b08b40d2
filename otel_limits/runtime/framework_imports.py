"""Detects that a framework has been imported, and that it is imported again."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import TYPE_CHECKING, Protocol

from otel_limits.bindings.class_patches import (
    at_end_of_import,
    is_under_way,
    under_way,
    when_imported,
)
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from otel_limits.bindings.framework import Framework


class Imported(Protocol):
    """A function to call once a framework has been imported."""

    def __call__(self, framework: Framework, *, is_complete: bool) -> bool | None:
        """Track a framework whose module and the packages around it have been imported.

        Args:
            framework: The framework. It is passed again at later imports.
            is_complete: Neither its binding nor another module of it is being imported. They
                import each other in circles, so that one can be complete while those that it needs
                are not.

        Returns:
            Whether the module is the framework's. A user's package may have the same name.
        """


class FrameworkImports:
    """Reports frameworks that have been imported.

    Args:
        frameworks: The frameworks to wait for. More may be added before each `wait`.
        imported: Called when one has been imported, before other threads can use it.
        again: Called with a framework of which a module is imported again, before that.
    """

    def __init__(
        self,
        frameworks: Sequence[Framework],
        imported: Imported,
        again: Callable[[Framework], None],
    ) -> None:
        """Start without waiting."""
        self._frameworks = frameworks
        self._imported = imported
        self._again = again
        self._awaited: set[str] = set()
        """The names of frameworks whose imports are awaited."""
        self._executed: set[str] = set()
        """Modules whose code has run. Python marks them only later."""
        self._waiting: set[str] = set()
        """Frameworks of which an import that is in progress is awaited."""
        self._known: dict[str, Framework] = {}
        """The modules of frameworks that have been imported, by name."""

    def wait(self) -> None:
        """Report the frameworks that are imported already, and each later import."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for framework in self._frameworks:
            if framework.name in self._awaited:
                self._look(framework)
                continue
            self._awaited.add(framework.name)
            for name in awaited(framework):
                when_imported(name, functools.partial(self._look_after, framework))

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        """Report a module that is imported again or reloaded, and leave it to other finders."""
        # `importlib.util.find_spec` only looks for it.
        if name in self._known and (target is not None or name not in sys.modules):
            self._again(self._known[name])

    def _look_after(self, framework: Framework, module: ModuleType) -> None:
        self._executed.add(module.__name__)
        self._look(framework)

    @suppress_errors("binding")
    def _look(self, framework: Framework) -> None:
        """Report a framework, and look again at the end of an import that is in progress."""
        incomplete = {
            *under_way(framework.packages),
            *filter(is_under_way, with_parents(framework.binding)),
        } - self._executed
        if incomplete.isdisjoint(with_parents(framework.module)) and self._imported(
            framework, is_complete=not incomplete
        ):
            present = filter(sys.modules.__contains__, awaited(framework))
            self._known |= dict.fromkeys(present, framework)
        if not incomplete:
            self._waiting.discard(framework.name)
        elif framework.name not in self._waiting:
            self._waiting.add(framework.name)
            at_end_of_import(min(incomplete), functools.partial(self._look_again, framework))

    def _look_again(self, framework: Framework) -> None:
        if framework.name in self._waiting:  # not if another import has ended since
            self._waiting.discard(framework.name)
            self._look(framework)


def awaited(framework: Framework) -> Sequence[str]:
    """Return the modules of a framework after whose import something can be done."""
    return (*with_parents(framework.module), *framework.parts)


def with_parents(module: str) -> Sequence[str]:
    """Return a module and the packages around it, from the top."""
    return list(itertools.accumulate(module.split("."), "{}.{}".format))
