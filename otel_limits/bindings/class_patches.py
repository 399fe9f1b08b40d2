"""Replaces methods of a framework's classes, and restores them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Patches:
    """Replaced methods of classes, and their originals."""

    def __init__(self) -> None:
        """Create an empty set of patches."""
        self._originals: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def __contains__(self, place: tuple[Any, str]) -> bool:
        """Return whether an attribute of a class is patched."""
        return place in self._originals

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Wrap a method that a class itself defines."""
        # Not inherited ones: each call would be tracked twice, here and in the parent class.
        original = vars(owner).get(name)
        if original is not None and (owner, name) not in self:
            self.put(owner, name, wrapper(original))

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Set an attribute of a class and remember the original, if any."""
        self._originals[owner, name] = vars(owner).get(name), ours
        setattr(owner, name, ours)

    def restore(self) -> None:
        """Restore every class."""
        for (owner, name), (original, ours) in self._originals.items():
            if vars(owner).get(name) is not ours:  # another instrumentation has wrapped it
                continue
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()
