"""Detects that a framework is imported again, which creates classes that are not patched."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ReimportFinder:
    """An import finder that finds nothing, and reports imports of modules imported before.

    Programs that reload code delete modules from `sys.modules` or call `importlib.reload`. wrapt
    calls the hooks of a module once, so it does not report the second import.

    Args:
        report: Called with the name of the module.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        """Start without modules."""
        self._report = report
        self._names: set[str] = set()

    def watch(self, name: str) -> None:
        """Report further imports of a module that has just been imported."""
        self._names.add(name)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # the others would find the module

    def forget(self, names: Iterable[str]) -> None:
        """No longer report these modules."""
        self._names.difference_update(names)

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Report `name` if it was imported before. The other finders find it."""
        if name in self._names:
            self._report(name)
        return None
