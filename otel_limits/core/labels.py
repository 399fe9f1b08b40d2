"""Names from outside, made safe to store, to scrape and to show, and not too many for metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

MAX_LENGTH: Final = 128

MAX_AGENTS: Final = 8
"""Distinct agents that metrics tell apart unless told otherwise.

When all names are taken that is some 1,100 samples. On a core of a small server a scrape of them
takes 30 ms of CPU time, and 45 ms for Prometheus 2, for which every name is escaped.
"""

OTHER: Final = "_other"
"""The label of all names beyond the number that metrics tell apart."""


@functools.lru_cache(maxsize=4096)
def clean(value: str, limit: int = MAX_LENGTH) -> str:
    """Return `value` without surrogates and control characters, and not too long.

    One lone surrogate would make every scrape of the process fail, and a NUL every row that has
    it.
    """
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value)
    return shown[:limit]


class LabelValues:
    """Cleans label values, and folds all beyond a number of them into `_other`."""

    def __init__(self, limit: int, full: Callable[[], None] | None = None) -> None:
        """Admit `limit` distinct values, and call `full` once, when the first one is folded."""
        self._limit = limit
        self._full = full
        self._admitted: dict[tuple[str, ...], str] = {}

    def __call__(self, value: str, *scope: str) -> str:
        """Return the value to use as a label, one of those admitted together with `scope`."""
        key = (value, *scope)
        known = self._admitted.get(key)
        if known is not None:
            return known
        if len(self._admitted) < self._limit:
            return self._admitted.setdefault(key, clean(value))
        # Nothing is kept of a name that is folded: there is no end to them.
        full, self._full = self._full, None
        if full is not None:
            full()
        return OTHER
