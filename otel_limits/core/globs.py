"""Names matched by globs: which ones fit, and which of those knows best."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Final

WILDCARDS: Final = "*?["


def specificity(glob: str) -> tuple[bool, int]:
    """Rank a glob: a plain name is above every glob, then more characters that must match."""
    is_name = not any(wildcard in glob for wildcard in WILDCARDS)
    # Characters and not the length, or `a***` would rank above `ab*`.
    return is_name, sum(character not in "*?[]" for character in glob)


def matching(globs: Iterable[str], name: str) -> list[str]:
    """Return the globs that fit `name`, the most specific one last.

    `*` stands for any characters, `?` for one, `[abc]` for one of these; upper and lower case
    differ. Of two that are equally specific the later one comes later.
    """
    # Not `fnmatch`, which ignores case on Windows: a policy means the same on every machine.
    # Sorting is stable, which is what puts the later one of two last.
    return sorted((glob for glob in globs if fnmatch.fnmatchcase(name, glob)), key=specificity)


def best_match(globs: Iterable[str], name: str) -> str | None:
    """Return the most specific glob that fits `name`, or `None` when none does."""
    found = matching(globs, name)
    return found[-1] if found else None
