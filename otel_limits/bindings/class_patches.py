"""Replaces methods of a framework's classes, once they are imported."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import weakref
from contextlib import suppress
from importlib import _bootstrap, import_module
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping


MOST_WRAPPED: Final = 100
"""Functions that are looked at to find ours among them."""


class Patches:
    """Replaced methods of classes, and their originals."""

    def __init__(self) -> None:
        """Create an empty set of patches."""
        self._originals: dict[tuple[Any, str], tuple[Any, Any]] = {}
        self._unrestored: dict[tuple[Any, str], list[tuple[Any, Any]]] = {}
        """Those that another instrumentation has wrapped. It keeps calling them."""

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
        if original is None or (owner, name) in self:
            return
        for patch in self._unrestored.get((owner, name), ()):
            if has_inner(original, patch[1]):
                self._originals[owner, name] = patch
                return
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
            if vars(owner).get(name) is not ours:
                unrestored = self._unrestored.setdefault((owner, name), [])
                if all(each[1] is not ours for each in unrestored):
                    unrestored.append((original, ours))
            elif original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()


def has_inner(function: Any, inner: Any) -> bool:
    """Return whether a function calls another one, as far as its attributes and closure show."""
    found = [function]
    for each in found:  # grows during the loop
        if each is inner:
            return True
        cells = getattr(each, "__closure__", None) or ()
        called = [getattr(each, "__wrapped__", None), *(_content(cell) for cell in cells)]
        new = (other for other in called if callable(other) and not any(other is f for f in found))
        found += itertools.islice(new, MOST_WRAPPED - len(found))
    return False


def _content(cell: Any) -> Any:
    with suppress(ValueError):  # it is empty
        return cell.cell_contents
    return None


def subclasses_of(owner: type) -> list[type]:
    """Return all current subclasses of `owner`; one with two parents occurs twice."""
    derived: list[type] = owner.__subclasses__()
    for each in derived:  # grows during the loop
        derived += each.__subclasses__()
    return derived


# --- wrappers imported at the first call ----------------------------------------------------------


def wrapped_at_first_call(module: str, name: str, original: Any) -> Any:
    """Wrap a function of a framework, with a wrapper that is imported at its first call.

    Modules of a framework import each other in circles, so while one of them is imported, ours
    cannot import the others.

    Args:
        module: Our module.
        name: The function in it that wraps the original.
        original: The framework's function.
    """

    @functools.cache
    def wrapped() -> Any:
        return _wrapped(module, name, original) or original

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return wrapped()(*args, **kwargs)

    @functools.wraps(original)
    async def coroutine_method(*args: Any, **kwargs: Any) -> Any:
        return await wrapped()(*args, **kwargs)

    # Applications look at the kind of a function, e.g. to mock it.
    return coroutine_method if inspect.iscoroutinefunction(original) else method


@suppress_errors("binding")
def _wrapped(module: str, name: str, original: Any) -> Any:
    return getattr(import_module(module), name)(original)


# --- calls after an import ------------------------------------------------------------------------


def when_imported(name: str, call: Callable[[Any], object]) -> None:
    """Call a function with a module, now or at the end of its next import.

    Args:
        name: The module.
        call: The function. Other threads can use the module only after it has returned.
    """
    import wrapt  # here, as commands that only read a ledger import this module

    if is_under_way(name):  # wrapt would take it for complete
        at_end_of_import(name, lambda: when_imported(name, call))
    else:
        wrapt.register_post_import_hook(call, name)


def at_end_of_import(name: str, call: Callable[[], object]) -> None:
    """Call a function when an import in progress ends or fails, in the thread that imports.

    Python then drops the lock of the module, which nothing else keeps, except for threads that wait
    for the same import: then the last of them calls the function.
    """
    of_module = _bootstrap._get_module_lock  # type: ignore[attr-defined]
    weakref.finalize(of_module(name), call).atexit = False


def is_under_way(name: str) -> bool:
    """Return whether a module is being imported, by any thread."""
    try:
        # Not `getattr`, which would load a lazy module.
        spec = object.__getattribute__(sys.modules[name], "__spec__")
    except (AttributeError, KeyError):
        return False
    return bool(getattr(spec, "_initializing", False))


def under_way(packages: Collection[str]) -> Iterator[str]:
    """Yield the modules of top-level packages that are being imported, by any thread."""
    # Python keeps a lock of each of them: looking at all modules took half of the time of `enable`.
    for name in list(_bootstrap._module_locks):  # type: ignore[attr-defined]
        if name.partition(".")[0] in packages and is_under_way(name):
            yield name
