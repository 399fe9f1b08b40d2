"""Replaces methods of a framework's classes, also of those that are derived later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Patches:
    """Replaced methods of classes, and their originals."""

    def __init__(self) -> None:
        """Create an empty set of patches."""
        self._originals: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def __contains__(self, attribute: tuple[Any, str]) -> bool:
        """Return whether an attribute of a class is patched."""
        return attribute in self._originals

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Wrap a method that a class itself defines.

        Raises:
            AttributeError: The class has no such method.
        """
        getattr(owner, name)  # a misspelt one would be limited nowhere
        # Not inherited ones: each call would be tracked twice, here and in the parent class.
        original = vars(owner).get(name)
        if original is not None and (owner, name) not in self:
            self.put(owner, name, wrapper(original))

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Set an attribute of a class and remember the original, if any."""
        self._originals[owner, name] = vars(owner).get(name), ours
        setattr(owner, name, ours)

    def wrap_all(self, owner: type, wrappers: Mapping[str, Callable[[Any], Any]]) -> None:
        """Wrap methods of a class and of those that are derived from it, now and later.

        Raises:
            AttributeError: The class has no such method.
        """

        def wrap(derived: type) -> None:
            for name, wrapper in wrappers.items():
                self.wrap(derived, name, wrapper)

        self.watch_subclasses(owner, wrap)
        for each in (owner, *subclasses_of(owner)):
            wrap(each)

    def watch_subclasses(self, owner: Any, watch: Callable[[Any], None]) -> None:
        """Call `watch` with each class that is derived from `owner` from now on, only once."""
        if (owner, "__init_subclass__") in self:
            return
        original = vars(owner).get("__init_subclass__")

        def init_subclass(derived: type, /, **kwargs: Any) -> None:
            if original is None:
                super(owner, derived).__init_subclass__(**kwargs)  # type: ignore[misc]
            else:
                original.__get__(None, derived)(**kwargs)
            watch(derived)

        self.put(owner, "__init_subclass__", classmethod(init_subclass))

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


def subclasses_of(owner: type) -> list[type]:
    """Return all current subclasses of `owner`; one with two parents occurs twice."""
    derived: list[type] = owner.__subclasses__()
    for each in derived:  # grows during the loop
        derived += each.__subclasses__()
    return derived
