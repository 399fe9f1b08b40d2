"""Wraps functions of a framework with functions that are imported at the first call."""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any

from otel_limits.core.internal_errors import suppress_errors


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
