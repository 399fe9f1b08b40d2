"""Calls functions once modules of a framework have been imported, by this or another thread."""

from __future__ import annotations

import sys
import weakref
from importlib import _bootstrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator


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
