"""The meaning of the name of a count, by its words: rules, and a list of exceptions only."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from otel_limits.vendors.facts import facts
from otel_limits.vendors.records import vendors

REMEMBERED: Final = 2_048
"""Cached names; those of a span's attributes can come from outside."""

LONGEST: Final = 200
"""Characters of a name; no longer one is a count."""

WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+(?:[a-z]+|[A-Z]+(?![a-z]))?")
"""A word in any spelling: snake, kebab, camel or upper case, dots and brackets."""

TIMES: Final = (
    (re.compile(r"\b(?:5|five) (?:m|min|mins|minute|minutes)\b"), "5m"),
    (re.compile(r"\b(?:1|one) (?:h|hr|hour)\b|\b60 (?:m|min|minutes)\b"), "1h"),
)
"""The lifetimes of cache entries, in several words."""

INPUT: Final = "input"
OUTPUT: Final = "output"
TOTAL: Final = "total"
CACHE_READ: Final = "cache_read"
CACHE_WRITE: Final = "cache_write"
CACHE_WRITE_5M: Final = "cache_write_5m"
CACHE_WRITE_1H: Final = "cache_write_1h"
REASONING: Final = "reasoning"
TOOL_PROMPT: Final = "tool_prompt"
INPUT_AUDIO: Final = "input_audio"
OUTPUT_AUDIO: Final = "output_audio"
CACHED_AUDIO: Final = "cached_audio"
WEB_SEARCHES: Final = "web_searches"
TIER: Final = "tier"
FRESH: Final = "fresh"
"""Input that is neither read from a cache nor, if that is counted, written to it."""
PART: Final = "part"
"""A part that costs as much as the whole: text, images, predictions, what was not cached."""

ENOUGH: Final = frozenset({INPUT, OUTPUT, TOTAL, REASONING, "read", "write", "ttl_5m", "ttl_1h"})
"""One of these is enough for a number of tokens that is not called one: `input_cache_read`."""

OTHERS: Final = frozenset({"count", "counts", "hit", "hits", "num", "number", "ttl"})
"""With one of these, it must be called one: `cache_hit` is a flag, `prompt_count` of prompts."""

PRECEDENCE: Final = ("billed", "whole", "detail", "loose")
"""Which of several counts is that of the call: the billed one, that of the usage, the same within
its details, and then the same of attributes outside of any known usage."""


class Meaning(NamedTuple):
    """The kind of tokens of a count."""

    kind: str
    """One of the kinds above."""
    side: str = ""
    """`input` or `output`; empty if the name does not say."""
    rank: int = 1
    """Its rank in `PRECEDENCE`."""
    is_apart: bool = False
    """True for an output that excludes reasoning, and for reasoning that is not part of it."""
    is_certain: bool = True
    """False if some of its words are unknown: `kind` is what the others mean."""


class Lexicon(NamedTuple):
    """The contents of `fields.yaml`."""

    words: Mapping[str, str]
    """The meaning of each word."""
    glued: re.Pattern[str]
    """Words without anything between them, as in `prompttokens`."""
    innocent: frozenset[str]
    """Words of an attribute that does not count tokens of a call."""
    exceptions: Mapping[str, Meaning]
    """Names with another meaning than that of their words."""


@functools.cache
def lexicon() -> Lexicon:
    """Return the words of all names, and the exceptions."""
    known = facts("usage/fields.yaml")
    words = {word: says for says, held in known["words"].items() for word in held}
    apart = {name for each in vendors().values() for name in each.apart} | set(known["apart"])
    exceptions = {
        " ".join(words_of(name)): Meaning(kind, rank=0 if name.startswith("billed") else 1)
        for kind, names in known["exceptions"].items()
        for name in names
    }
    exceptions |= {
        " ".join(words_of(name)): Meaning(
            REASONING if "reasoning" in name else OUTPUT, OUTPUT, is_apart=True
        )
        for name in apart
    }
    longest_first = sorted(words, key=len, reverse=True)
    return Lexicon(
        words=words,
        glued=re.compile("|".join(longest_first)),
        innocent=frozenset(known["innocent"]),
        exceptions=exceptions,
    )


def words_of(name: str) -> list[str]:
    """Return the words of a name, in lower case; a time to live is one word."""
    words = " ".join(WORD.findall(name)).lower()
    for pattern, time in TIMES:
        words = pattern.sub(time, words)
    return words.split()


@functools.lru_cache(REMEMBERED)
def meaning_of(path: str) -> Meaning | None:
    """Return what a count within a usage means; `None` if it is none of tokens.

    Args:
        path: Its names from the outermost to the innermost, joined by dots.
    """
    if len(path) > LONGEST:
        return None
    known, words = lexicon(), words_of(path)
    if (exception := _exception(words, known)) is not None:
        return exception
    if not known.innocent.isdisjoint(words):
        return None
    words = [part for word in words for part in _unglued(word, known)]
    said = {known.words.get(word, "") for word in words}
    is_unknown = "" in said
    said -= {"", "neutral"}
    counts = "tokens" in said
    # Without the word, numbers of other things look the same: `num_sources_used`, `images`.
    if not counts and (is_unknown or said.isdisjoint(ENOUGH) or not OTHERS.isdisjoint(words)):
        return None
    found = _by_words(said - {"tokens", "count"})
    if found is None:
        return Meaning(PART, is_certain=False) if is_unknown else None
    return found._replace(is_certain=found.is_certain and not is_unknown)


def _exception(words: list[str], known: Lexicon) -> Meaning | None:
    """Return the meaning of a name on the list, which may follow that of its usage."""
    for start, word in enumerate(words):
        if (found := known.exceptions.get(" ".join(words[start:]))) is not None:
            return found
        if known.words.get(word) not in ("neutral", "tokens"):
            return None
    return None


def _unglued(word: str, known: Lexicon) -> list[str]:
    if word in known.words:
        return [word]
    parts = known.glued.findall(word)
    return parts if "".join(parts) == word else [word]


def _by_words(said: set[str]) -> Meaning | None:
    """Return the meaning of what words say, `None` if they say nothing."""
    sides = said & {INPUT, OUTPUT}
    side = next(iter(sides)) if len(sides) == 1 else ""
    kinds = said - sides - {TOTAL, "detail"}
    # Only writing to a cache has a time to live.
    found: Meaning | None
    if kinds & {"cache", "cached"} or ("write" in kinds and kinds & {"ttl_5m", "ttl_1h"}):
        found = _of_cache(kinds, side)
    elif len(sides) == 1 and not kinds - {"tier"}:
        is_detail = "detail" in said
        found = Meaning(side, side, PRECEDENCE.index("detail" if is_detail else "whole"))
    elif said == {TOTAL}:
        found = Meaning(TOTAL)
    elif kinds:
        found = _of_part(kinds - {"tier"}, side)
    else:
        found = Meaning(PART, is_certain=False) if sides else None
    return found


def _of_part(kinds: set[str], side: str) -> Meaning:
    """Return the part of a side that words mean."""
    if kinds == {"reasoning"} and side != INPUT:
        return Meaning(REASONING, OUTPUT)
    if kinds == {"audio"} and side:
        return Meaning(INPUT_AUDIO if side == INPUT else OUTPUT_AUDIO, side)
    if kinds == {"tool"} and side == INPUT:
        return Meaning(TOOL_PROMPT, INPUT)
    if kinds == {"fresh"} and side == INPUT:
        return Meaning(FRESH, INPUT)
    is_known = kinds in ({"fresh"}, {"same"}, {"tool", "same"}, {"reasoning", "same"})
    return Meaning(PART, side, is_certain=is_known)


def _of_cache(kinds: set[str], side: str) -> Meaning:
    """Return which part of a cache words mean: read, written, or that which is in neither."""
    others = kinds - {"cache", "cached", "read", "write", "ttl_5m", "ttl_1h", "tier"}
    said = kinds & {"read", "write", "ttl_5m", "ttl_1h"} or kinds & {"cached"}
    if others and others <= {"not", "fresh"}:
        return Meaning(FRESH if side == INPUT else PART, side)
    # Details of the cached tokens are of both.
    if others == {"same"} and side != OUTPUT:
        return Meaning(PART, INPUT)
    if others == {"audio"} and side != OUTPUT:
        return Meaning(CACHED_AUDIO, INPUT)
    kind = OF_CACHE.get(frozenset(said))
    if kind is None or others or side == OUTPUT:
        return Meaning(PART, side, is_certain=False)
    return Meaning(kind, INPUT)


OF_CACHE: Final[Mapping[frozenset[str], str]] = {
    frozenset({"cached"}): CACHE_READ,
    frozenset({"read"}): CACHE_READ,
    frozenset({"write"}): CACHE_WRITE,
    **{
        frozenset({*words, ttl}): kind
        for words in ((), ("write",))
        for ttl, kind in (("ttl_5m", CACHE_WRITE_5M), ("ttl_1h", CACHE_WRITE_1H))
    },
}
"""The reported parts of a cache."""
