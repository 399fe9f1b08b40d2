"""Names from outside, made safe to store, to scrape and to show, and not too many for metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

MAX_LENGTH: Final = 128

MAX_AGENTS: Final = 50
"""Distinct agents that metrics tell apart unless told otherwise, beside those of the policy."""

OTHER: Final = "_other"
"""The label of all names beyond the number that metrics tell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names that an operator has written down, in a policy file, without a glob."""

    agents: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    tools: frozenset[str] = frozenset()


NO_NAMES: Final = Names()


@functools.lru_cache(maxsize=4096)
def clean(value: str, limit: int = MAX_LENGTH) -> str:
    """Return `value` without surrogates and control characters, and not too long.

    One lone surrogate would make every scrape of the process fail, and a NUL every row that has
    it.
    """
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value)
    return shown[:limit]


class LabelLimiter:
    """Cleans label values, and folds into `_other` those of a label that has too many.

    Args:
        limit: Distinct values that are told apart, beside those that are always kept.
        always: Returns what is always kept, such as the names that a policy file gives: they are
            finite, and processes that meet names in another order agree on them.
        folded: Called each time that a value is folded.
    """

    def __init__(
        self,
        limit: int,
        *,
        always: Callable[[], Collection[str]] = tuple,
        folded: Callable[[], None] = lambda: None,
    ) -> None:
        """Admit nothing yet."""
        self._limit = limit
        self._always = always
        self._folded = folded
        self._admitted: dict[tuple[str, ...], str] = {}
        self._kept = 0

    def __call__(self, value: str, *scope: str) -> str:
        """Return the value to use as a label, one of those admitted together with `scope`."""
        key = (value, *scope)
        known = self._admitted.get(key)
        if known is not None:
            return known
        # Asked for new names only, and each time: the policy file may have been changed since.
        if value in self._always():
            self._kept += 1  # it takes the place of no other
        elif len(self._admitted) - self._kept >= self._limit:
            # Nothing is kept of a name that is folded: there is no end to them.
            self._folded()
            return OTHER
        return self._admitted.setdefault(key, clean(value))


FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are as wide as a Chinese character."""


def escape_formula(value: Any) -> Any:
    """Quote text that a spreadsheet would take for a formula.

    As OWASP has it: https://owasp.org/www-community/attacks/CSV_Injection
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value
