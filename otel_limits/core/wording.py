"""Text for people: plurals, suggestions for misspelled names, and progress; and its patterns."""

from __future__ import annotations

import functools
import os.path
import re
from collections.abc import Collection, Iterable, Iterator
from decimal import Decimal
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

STEPS: Final = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
"""Sizes and their suffixes."""

LETTERS_PER_MISTAKE: Final = 4
"""A short name may have one mistake, one of eight letters two: `colour` does not mean `hour`."""

SHORTEST_PREFIX: Final = 3
"""Shortest prefix that is recognized, such as `--max` for `--max-cost`."""


class ProgressBar(Protocol):
    """Shows the progress of a long operation."""

    def through(self, items: Iterable[T], total: int | None = None) -> Iterator[T]:
        """Yield `items`, each a step of `total`, if known."""


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a long pattern on first use: it takes a millisecond, and few processes need it."""
    return re.compile(pattern)


def pluralize(number: int, one: str, several: str = "") -> str:
    """Return a number of things, e.g. `1 row`, `2 rows`, or `1 row waits` and `2 rows wait`.

    Args:
        number: How many there are.
        one: The phrase for one of them.
        several: The phrase for none or several, unless it is `one` with an s.
    """
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def shortest(number: float | Decimal) -> str:
    """Return a number without zeros at its end, e.g. `0.4` for 0.40000000, as sums of prices are.

    Whole numbers keep theirs.
    """
    if not isinstance(number, Decimal):
        return str(number)
    digits = f"{number:f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def abbreviated(number: float) -> str:
    """Return a number in at most five characters, e.g. `1.23M`."""
    for size, suffix in STEPS:
        # After rounding: 999.7 thousand is 1M, not 1000k.
        if number >= size * 0.9995:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def closest_match(name: str, known: Collection[str]) -> str | None:
    """Suggest the closest match for a misspelled name, ignoring case."""
    # A common prefix such as OTEL_LIMITS_ would make every name long, and so allow more mistakes.
    common = len(os.path.commonprefix([name, *known]))  # noqa: RUF071  by letters is intended
    typed = name[common:].casefold()

    def mistakes(each: str) -> int:
        return _mistakes(typed, each[common:].casefold())

    near = []
    for each in known:
        most = max(1, len(each[common:]) // LETTERS_PER_MISTAKE)
        # The length alone rules out most names; a list of time zones has hundreds.
        if abs(len(typed) - len(each[common:].casefold())) <= most and mistakes(each) <= most:
            near.append(each)
    prefixes = [each for each in known if _is_prefix(name.casefold(), each.casefold())]
    # `--turns` instead of `--max-turns`, or `Berlin`.
    end = typed.lstrip("-")
    ends = (f"-{end}", f"_{end}", f"/{end}")
    endings = [each for each in known if end and each.casefold().endswith(ends)]
    # A misspelled name wins over an abbreviation.
    return min(near or prefixes or endings, key=mistakes, default=None)


def suggestion(name: object, known: Collection[str], otherwise: str = "") -> str:
    """Return a question about the closest match for a misspelled name, or another sentence."""
    near = closest_match(name, known) if isinstance(name, str) else None
    return f"Did you mean {near}?" if near else otherwise


def _is_prefix(name: str, known: str) -> bool:
    """Return whether one is a prefix of the other, also in the plural."""
    shorter, longer = sorted((name.lstrip("-"), known.lstrip("-")), key=len)
    return len(shorter) >= SHORTEST_PREFIX and longer.startswith(shorter.rstrip("s"))


def _mistakes(typed: str, known: str) -> int:
    """Count missing, added, wrong and swapped letters.

    This is the optimal string alignment distance, row by row:
    https://en.wikipedia.org/wiki/Damerau-Levenshtein_distance.
    """
    # Two rows back as well, because a swap of two letters reaches that far.
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
