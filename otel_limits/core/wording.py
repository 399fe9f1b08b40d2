"""Numbers of things in a sentence."""

from __future__ import annotations


def pluralize(number: int, one: str, several: str = "") -> str:
    """Write a number of things, such as `1 row` and `2 rows`, or `1 row waits` and `2 rows wait`.

    Args:
        number: How many there are.
        one: What one of them is.
        several: What none or several are, where that is not `one` with an s.
    """
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"
