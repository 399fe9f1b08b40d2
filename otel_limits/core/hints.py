"""Guesses what somebody meant who mistyped a name."""

from __future__ import annotations

import os.path
from collections.abc import Collection
from typing import Final

LETTERS_PER_MISTAKE: Final = 4
"""A short name may have one mistake, one of eight letters two: `colour` does not mean `hour`."""

SHORTEST_PART: Final = 3
"""From how many letters on the beginning of a name stands for it, as `--max-cost` does."""


def closest_match(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is nearest, if one is near; upper and lower case are the same."""
    # What all have in front, such as OTEL_LIMITS_, would make every name long, and thereby near.
    common = len(os.path.commonprefix([name, *known]))  # noqa: RUF071  by letters is what is meant
    typed = name[common:].casefold()

    def mistakes(each: str) -> int:
        return _mistakes(typed, each[common:].casefold())

    # Its length alone rules out most names, of which a list of time zones has hundreds.
    alike = [each for each in known if _is_as_long(typed, each[common:].casefold())]
    near = [each for each in alike if mistakes(each) <= _permitted(each[common:])]
    begun = [each for each in known if _is_begun(name.casefold(), each.casefold())]
    # A mistyped name wins over one with the same beginning, which is a mere abbreviation.
    return min(near or begun, key=mistakes, default=None)


def _permitted(name: str) -> int:
    return max(1, len(name) // LETTERS_PER_MISTAKE)


def _is_as_long(typed: str, known: str) -> bool:
    """Tell whether no more letters are missing or added than may be mistaken."""
    return abs(len(typed) - len(known)) <= _permitted(known)


def _is_begun(name: str, known: str) -> bool:
    """Tell whether one is the beginning of the other, also in the plural."""
    shorter, longer = sorted((name.lstrip("-"), known.lstrip("-")), key=len)
    return len(shorter) >= SHORTEST_PART and longer.startswith(shorter.rstrip("s"))


def _mistakes(typed: str, known: str) -> int:
    """Count the letters that are missing, added or wrong, or that two have changed places.

    This is the optimal string alignment distance, row by row:
    https://en.wikipedia.org/wiki/Damerau-Levenshtein_distance.
    """
    # The row before the last one as well, since two letters that changed places reach back to it.
    before: list[int] = []
    last = list(range(len(known) + 1))
    for row, letter in enumerate(typed, start=1):
        here = [row]
        for column, other in enumerate(known, start=1):
            fewest = min(last[column] + 1, here[-1] + 1, last[column - 1] + (letter != other))
            is_swapped = row > 1 < column and typed[row - 2 : row] == other + known[column - 2]
            here.append(min(fewest, before[column - 2] + 1) if is_swapped else fewest)
        before, last = last, here
    return last[-1]
