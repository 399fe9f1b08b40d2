"""A dictionary that nobody can change, for the events and limits that hold one."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dictionary that refuses to be written to.

    It is a `dict`, and not a `MappingProxyType`, so that whoever is told an event can write it as
    JSON, pickle it and copy it.
    """

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("Facts and limits cannot be changed. Write to a copy of this dictionary.")

    __setitem__ = __delitem__ = __ior__ = _refuse
    # Each by itself, as those of `dict` do not go through `__setitem__`.
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        """Agree with what is compared; what holds it can be hashed as well."""
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled and copied as a whole: item by item would be refused."""
        return type(self), (dict(self),)
