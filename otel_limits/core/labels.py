"""Names of agents, models and tools: matched by globs, made safe to show, limited in metrics."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from otel_limits.core.wording import closest_match

WILDCARDS: Final = "*?["

MAX_LENGTH: Final = 128

MAX_AGENTS: Final = 50
"""Default number of distinct agents in metrics, in addition to those named in the policy."""

OTHER: Final = "_other"
"""The label value of all names beyond the limit."""

FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Characters that start a formula in a spreadsheet; the last four are full-width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names in a policy file that are not globs."""

    agents: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    tools: frozenset[str] = frozenset()


NO_NAMES: Final = Names()


def specificity(glob: str) -> tuple[bool, int]:
    """Rank a glob: plain names first, then by the number of literal characters."""
    is_name = not any(wildcard in glob for wildcard in WILDCARDS)
    # Literal characters rather than the length, or `a***` would rank above `ab*`.
    return is_name, sum(character not in "*?[]" for character in glob)


def matching(globs: Iterable[str], name: str) -> list[str]:
    """Return the globs that match `name`, the most specific one last.

    `*` matches any characters, `?` one, `[abc]` one of these; case matters. Of two equally specific
    globs the later one comes later.
    """
    # Not `fnmatch`, which ignores case on Windows: a policy must mean the same on every machine.
    # Sorting is stable, so the later one of two equals comes last.
    return sorted((glob for glob in globs if fnmatch.fnmatchcase(name, glob)), key=specificity)


def misspelled(name: str, globs: Collection[str]) -> str | None:
    """Return the glob with nearly this name; `None` if one matches it or none is near."""
    return None if matching(globs, name) else closest_match(name, globs)


def best_match(globs: Iterable[str], name: str) -> str | None:
    """Return the most specific glob that matches `name`, or `None`."""
    found = matching(globs, name)
    return found[-1] if found else None


@functools.lru_cache(maxsize=4096)
def clean(value: str, limit: int = MAX_LENGTH) -> str:
    """Return `value` without surrogates and control characters, shortened if too long.

    One lone surrogate would break every scrape of the process, and one NUL every row that contains
    it.
    """
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value)
    return shown[:limit]


def quoted(name: str) -> str:
    """Return a name for a sentence or a log line: in quotes, and at most as long as a label."""
    return repr(name[:MAX_LENGTH])


class LabelLimiter:
    """Cleans label values, and replaces those beyond a limit by `_other`.

    Args:
        limit: Number of distinct values, in addition to those that are always kept.
        always: Returns the values that are always kept, such as the names in a policy file: they
            are finite, and all processes agree on them, in whatever order they see names.
        folded: Called each time a value is replaced.
    """

    def __init__(
        self,
        limit: int,
        *,
        always: Callable[[], Collection[str]] = tuple,
        folded: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a limiter without values."""
        self._limit = limit
        self._always = always
        self._folded = folded
        self._admitted: dict[tuple[str, ...], str] = {}
        self._kept = 0

    def __call__(self, value: str, *group: str) -> str:
        """Return the label value to use for a value; values are counted together with `group`."""
        key = (value, *group)
        known = self._admitted.get(key)
        if known is not None:
            return known
        # Read for new names only, and each time: the policy file may have changed since.
        if value in self._always():
            self._kept += 1  # does not count toward the limit
        elif len(self._admitted) - self._kept >= self._limit:
            # Nothing is kept of a replaced name: there can be any number of them.
            self._folded()
            return OTHER
        return self._admitted.setdefault(key, clean(value))


def escape_formula(value: Any) -> Any:
    """Quote text that a spreadsheet would evaluate as a formula.

    As recommended by OWASP: https://owasp.org/www-community/attacks/CSV_Injection
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value
