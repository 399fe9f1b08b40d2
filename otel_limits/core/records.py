"""Values that never change: cheap to declare, since every program declares them, and to make.

A frozen dataclass takes several times as long to make, and what is generated for each one takes
two milliseconds of an import. So these are frozen for type checkers alone, and what all do alike
they inherit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")


class Record:
    """What records have in common: their fields say whether two are equal, and show them."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Compare what is to be compared."""
        if type(self) is not type(other):
            return NotImplemented
        return _compared(self) == _compared(other)

    def __hash__(self) -> int:
        """Agree with what is compared."""
        return hash(_compared(self))

    def __repr__(self) -> str:
        """Show the fields as they are written in code."""
        values = (
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)  # type: ignore[arg-type]
            if each.repr
        )
        return f"{type(self).__qualname__}({', '.join(values)})"

    def __getstate__(self) -> list[Any]:
        """Be pickled by any protocol, as slots alone cannot be."""
        return [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]

    def __setstate__(self, state: list[Any]) -> None:
        """Take the values back."""
        for each, value in zip(fields(self), state, strict=True):  # type: ignore[arg-type]
            setattr(self, each.name, value)


def _compared(record: Any) -> tuple[object, ...]:
    return tuple(getattr(record, each.name) for each in fields(record) if each.compare)


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True, kw_only_default=True)
    def record(declared: type[T]) -> type[T]:
        """Make a class a record, whose fields are given by name."""

    @dataclass_transform(frozen_default=True)
    def short_record(declared: type[T]) -> type[T]:
        """Make a class a record, whose few fields can be given by position."""

else:
    record = dataclass(slots=True, kw_only=True, eq=False, repr=False)
    short_record = dataclass(slots=True, eq=False, repr=False)
