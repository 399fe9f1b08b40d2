"""Reports the methods of a model class whose calls cannot be counted.

LangChain's own methods that call a model use one that is followed. A class may override one of them
and send its requests there itself.
"""

from __future__ import annotations

import builtins
import inspect
import logging
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

logger = logging.getLogger("otel_limits")

PACKAGE: Final = "langchain_core."
ASKED: Final = ("input", "inputs", "messages", "prompts", "prompt")
"""Names of the first argument of the methods that call a model."""
COUNTED: Final = ("int", int)
"""Return types of methods that count tokens, without a model call."""

REPORTED: Final[WeakSet[type]] = WeakSet()
"""Classes that were reported."""


def report_unfollowed(model: type, followed: Collection[str]) -> None:
    """Log once the methods of a class that send requests themselves, and are not followed.

    Args:
        model: The class.
        followed: The names of the methods that are followed.
    """
    own = {name: _function_in(value) for name, value in vars(model).items() if name[0] != "_"}
    new = {name: each for name, each in own.items() if name not in followed and _asks(each)}
    if not new or model in REPORTED:
        return
    asking = {*followed, *_asking(model)}
    unfollowed = [
        f"{name}()"
        for name, function in new.items()
        if name in asking and function is not None and _answers(function, model, asking)
    ]
    if unfollowed:
        REPORTED.add(model)
        logger.warning(
            "otel-limits: model calls in %s of %s.%s are neither counted nor limited, as it calls "
            "no method of LangChain's models. Send requests in _generate() or _stream().",
            " and ".join(unfollowed),
            model.__module__,
            model.__qualname__,
        )


def _asking(model: type) -> Iterator[str]:
    """Yield the names of LangChain's public methods that call a model."""
    for each in model.__mro__[1:]:
        if each.__module__.startswith(PACKAGE):
            for name, value in vars(each).items():
                if name[0] != "_" and _asks(_function_in(value)):
                    yield name


def _asks(function: FunctionType | None) -> bool:
    """Return whether a method takes the input of a model."""
    if function is None or function.__annotations__.get("return") in COUNTED:
        return False
    code = function.__code__
    return code.co_argcount > 1 and code.co_varnames[1] in ASKED


def _function_in(value: object) -> FunctionType | None:
    """Return the function of a method, below its decorators."""
    found: Any = inspect.unwrap(value) if callable(value) else None
    return found if isinstance(found, FunctionType) else None


def _answers(function: FunctionType, model: type, asking: set[str]) -> bool:
    """Return whether a method sends requests itself: it and its helpers call no model.

    A method that names nothing but errors refuses to be called.
    """
    names = _names_in(function, model)
    return asking.isdisjoint(names) and any(not hasattr(builtins, name) for name in names)


def _names_in(function: FunctionType, model: type) -> set[str]:
    """Return all names in the code of a function and of its helpers."""
    names: set[str] = set()
    pending: list[Any] = [function]
    while pending:
        each = pending.pop()
        for name in set(_names_of(each.__code__)) - names:
            names.add(name)
            helper = getattr(model, name, None) or each.__globals__.get(name)
            found = _function_in(helper)
            if found is not None and not found.__module__.startswith(PACKAGE):
                pending.append(found)
    return names


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)
