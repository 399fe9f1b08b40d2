"""What is told how far something has got that may take long, such as a progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Something that may take long."""

    def through(self, items: Iterable[T], total: int | None = None) -> Iterator[T]:
        """Pass on `items`, each a step of `total`, where that is known."""
