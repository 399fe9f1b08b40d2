"""Values by name or glob in two versions of a policy file: for which names they differ.

There is no end of names, so globs are compared instead. A name gets the value of the most specific
glob that matches it. If that is a different one in the later version, both globs match the name, so
it is enough to look at each glob and at each two that can match the same name.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_limits.core.labels import specificity

if TYPE_CHECKING:
    from otel_limits.core.comparisons import IsLooser

TOKEN: Final = re.compile(r"\[(?:!|(?!!)).[^\]]*\]|.", re.DOTALL)
"""A set of characters, as `fnmatch` reads it, or one character."""

STAR: Final = "*"

OTHER_CHARACTER: Final = "\0"
"""A character that no glob contains: YAML does not allow it."""

MAX_COMPARED: Final = 100_000
"""Pairs of globs, or of their characters, to compare: this is done in the thread of an agent."""

ABSENT: Final = object()

Globs: TypeAlias = "tuple[str, ...] | None"


class Pattern:
    """A name or a glob.

    Attributes:
        glob: Its text.
        name: The only name that it matches, if it is one.
    """

    __slots__ = ("_has_sets", "_match", "_samples", "_tokens", "glob", "name")

    def __init__(self, glob: str) -> None:
        """Read a glob."""
        self.glob = glob
        self._tokens = TOKEN.findall(glob)
        self._match = re.compile(fnmatch.translate(glob)).match
        # A set of one character, such as `[*]`, is that character.
        self._has_sets = any(len(token) > len("[*]") for token in self._tokens)
        self._samples = tuple(
            "".join(stars if token == STAR else _literal(token) for token in self._tokens)
            for stars in ("", OTHER_CHARACTER)
        )
        is_name = self._samples[0] == self._samples[1] and OTHER_CHARACTER not in self._samples[0]
        self.name = self._samples[0] if is_name else None

    def covers(self, other: Pattern) -> bool:
        """Return whether it certainly matches every name that another one matches."""
        if other.name is not None:
            return self._match(other.name) is not None
        if self.glob == other.glob:
            return True
        # A set may contain some of the characters that the other one matches, and not all.
        return not self._has_sets and all(map(self._match, other._samples))

    def overlaps(self, other: Pattern) -> bool:
        """Return whether one name can match both; long globs are not compared, and may."""
        theirs = other._tokens
        if len(self._tokens) * len(theirs) > MAX_COMPARED:
            return True
        # For each number of tokens of the other one: whether they and the tokens of this one, up to
        # the current one, can match the same text.
        row = [True]
        for their in theirs:
            row.append(row[-1] and their == STAR)
        for token in self._tokens:
            above, row = row, [row[0] and token == STAR]
            for n, their in enumerate(theirs):
                if STAR in (token, their):
                    row.append(row[n] or above[n + 1])
                else:
                    row.append(above[n] and _share_character(token, their))
            if True not in row:
                return False
        return row[-1]


pattern: Final = functools.lru_cache(4096)(Pattern)


class Version:
    """The values of one setting by name or glob, in one version of a file.

    Attributes:
        values: By name or glob, in the order of the file.
        default: The value for names without one.
        patterns: The globs, the most specific one first.
    """

    def __init__(self, values: Mapping[str, Any], default: Any) -> None:
        """Rank the globs."""
        self.values = values
        self.default = default
        ranked = sorted((each for each in values if not _is_name(each)), key=specificity)
        # Of two equally specific globs, the later one applies.
        self.patterns = [pattern(glob) for glob in reversed(ranked)]
        self._ranks = {each.glob: rank for rank, each in enumerate(self.patterns)}

    @property
    def distinct(self) -> list[Any]:
        """The different values that names can have."""
        default = [] if _has_no_default(self.patterns) else [self.default]
        return _distinct((*default, *self.values.values()))

    def value_for(self, *patterns: Pattern) -> Any:
        """Return the value for names that match these, and no other glob by chance."""
        for each in patterns:
            if each.name is not None and _is_name(each.name) and each.name in self.values:
                return self.values[each.name]
        for each in self.patterns:
            if any(map(each.covers, patterns)):
                return self.values[each.glob]
        return self.default

    def first(self, *globs: str) -> str | None:
        """Return which of some globs applies where all match; `None` if it has none of them."""
        present = [glob for glob in globs if glob in self._ranks]
        return min(present, key=self._ranks.__getitem__, default=None)


@dataclass(frozen=True, slots=True)
class ValueChange:
    """Names with another value in the later version."""

    globs: Globs
    """A name, a glob, or two that match them; none for all other names. `None` if too many have
    changed to find those that match the same names."""
    old: Any = None
    new: Any = None


def differences(before: Version, after: Version, is_looser: IsLooser) -> Iterator[ValueChange]:
    """Yield for which names a version has a value that is looser, or may be."""
    globs = {each.glob: each for each in (*before.patterns, *after.patterns)}
    changed = _changed(before, after)
    if (
        not _has_no_default(globs.values())
        and is_looser(before.default, after.default) is not False
    ):
        yield ValueChange((), before.default, after.default)
    if len(changed) * len(globs) > MAX_COMPARED:
        yield from _of_each_glob(before, after, is_looser)
        return
    changing = [each for glob, each in globs.items() if glob in changed]
    for glob in dict.fromkeys((*before.values, *after.values)):
        if glob in changed or (
            glob in globs and any(each.covers(globs[glob]) for each in changing)
        ):
            values = [each.value_for(pattern(glob)) for each in (before, after)]
            if is_looser(*values) is not False:
                yield ValueChange((glob,), *values)
    seen = set[str]()
    for one in changing:
        seen.add(one.glob)
        for other in globs.values():
            if other.glob not in seen:
                yield from _where_both_match(before, after, one, other, is_looser)


def _of_each_glob(before: Version, after: Version, is_looser: IsLooser) -> Iterator[ValueChange]:
    """Yield the same as if each name matched one glob, and `None` if that may not be all."""
    for glob in dict.fromkeys((*before.values, *after.values)):
        values = [each.values.get(glob, each.default) for each in (before, after)]
        if is_looser(*values) is not False:
            yield ValueChange((glob,), *values)
    # Only two of these can apply to the same name.
    old, new = (_distinct(each.values.values()) for each in (before, after))
    if len(old) * len(new) > MAX_COMPARED or any(
        is_looser(*pair) is not False for pair in itertools.product(old, new)
    ):
        yield ValueChange(None)


def _where_both_match(
    before: Version, after: Version, one: Pattern, other: Pattern, is_looser: IsLooser
) -> Iterator[ValueChange]:
    """Yield the difference for names that match two globs, if another one of them applies."""
    old, new = (each.first(one.glob, other.glob) for each in (before, after))
    if old is None or new is None or old == new:
        return
    if is_looser(before.values[old], after.values[new]) is False or not one.overlaps(other):
        return
    # A third glob may apply to these names.
    values = [each.value_for(one, other) for each in (before, after)]
    if is_looser(*values) is not False:
        yield ValueChange((old, new), *values)


def _changed(before: Version, after: Version) -> set[str]:
    """Return names and globs with other values, or in another order."""
    old, new = (
        [each.glob for each in version.patterns if each.glob in other.values]
        for version, other in ((before, after), (after, before))
    )
    moved = {glob for pair in zip(old, new, strict=True) for glob in pair if pair[0] != pair[1]}
    return moved | {
        glob
        for glob in {**before.values, **after.values}
        if before.values.get(glob, ABSENT) != after.values.get(glob, ABSENT)
    }


def _has_no_default(patterns: Iterable[Pattern]) -> bool:
    """Return whether every name matches one of these globs."""
    return any(each.covers(pattern(STAR)) for each in patterns)


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Return different values, by their text, as prices cannot be hashed."""
    return list({repr(each): each for each in values}.values())


def _is_name(glob: str) -> bool:
    return specificity(glob)[0]


def _literal(part: str) -> str:
    """Return the character that a part of a glob matches, or one that no glob contains."""
    if part == "?" or len(part) > len("[*]"):
        return OTHER_CHARACTER
    return part[1] if len(part) > 1 else part


@functools.lru_cache(4096)
def _share_character(one: str, other: str) -> bool:
    """Return whether two tokens other than `*` can match the same character."""
    # Two ranges that overlap contain an end of one of them, or a character next to it.
    near = (ord(character) + step for character in one + other for step in (-1, 0, 1))
    return any(
        fnmatch.fnmatchcase(chr(each), one) and fnmatch.fnmatchcase(chr(each), other)
        for each in near
        if 0 <= each <= sys.maxunicode
    )
