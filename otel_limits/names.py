"""Names from outside, made safe to store, to scrape and to show."""

from __future__ import annotations

import functools

MAX_LENGTH = 128


@functools.lru_cache(maxsize=4096)
def clean(value: str, limit: int = MAX_LENGTH) -> str:
    """Return `value` without surrogates and control characters, and not too long.

    One lone surrogate would make every scrape of the process fail, and a NUL every row that has
    it.
    """
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value)
    return shown[:limit]
