"""Reads the counts of a usage, in any spelling, nesting and order, by the words of names."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import numbers
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, SupportsIndex, cast

from otel_limits.core.usage import MAX_TOKENS
from otel_limits.vendors.facts import facts
from otel_limits.vendors.records import Rest, UsageRule, vendors

# --- numbers of tokens ----------------------------------------------------------------------------

DIGITS: Final = len(str(MAX_TOKENS))


def token_count(value: object) -> int | None:
    """Return a number of tokens, or `None` if the value is not one.

    Whole floats, numpy integers and decimal digits as text are numbers. Booleans, other text, NaN,
    infinities, negative numbers and numbers above `MAX_TOKENS` are not.
    """
    if type(value) is int:  # nearly always
        count = value
    elif value is None or isinstance(value, bool):
        return None
    elif isinstance(value, str):
        # Micrometer's tags are text, as are the 64-bit integers of protobuf's JSON.
        if len(value) > DIGITS or not (value.isascii() and value.isdigit()):
            return None
        count = int(value)
    elif isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        number = float(value)
        if not number.is_integer():
            return None
        count = int(number)
    else:
        try:
            count = operator.index(cast("SupportsIndex", value))
        except TypeError:
            return None
    return count if 0 <= count <= MAX_TOKENS else None


# --- the meaning of a name ------------------------------------------------------------------------

REMEMBERED_PATHS: Final = 2_048
"""Cached names; those of a span's attributes can come from outside."""

LONGEST_PATH: Final = 200
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


@functools.lru_cache(REMEMBERED_PATHS)
def meaning_of(path: str) -> Meaning | None:
    """Return what a count within a usage means; `None` if it is none of tokens.

    Args:
        path: Its names from the outermost to the innermost, joined by dots.
    """
    if len(path) > LONGEST_PATH:
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


# --- the counts of a usage ------------------------------------------------------------------------

MAX_DEPTH: Final = 5
"""Maximum nesting of a count; the deepest known one is three levels down."""

NESTED: Final = 2
"""Objects around a usage in a response: itself, and the part of a vendor."""

REMEMBERED: Final = 4_096
"""Cached names of span attributes."""

LONGEST: Final = 10_000
"""Characters of a usage in a text."""

USAGES: Final = frozenset(
    {
        "usage", "usage details", "usage metadata", "token usage", "tokens", "token count",
        "token counts",
    }
)  # fmt: skip
"""Names of an object that contains a usage."""

OF_TOKENS: Final = re.compile(
    "token|(?:input|output|prompt|completion).*(?:cache|detail|reasoning|thinking)", re.IGNORECASE
)
"""Names of a count that is not of memory or disks."""
OUTSIDE: Final = "/"
UNNAMED: Final = "?"
DETAIL: Final = PRECEDENCE.index("detail")
LOOSE: Final = PRECEDENCE.index("loose")


class FieldNames(NamedTuple):
    """Where attributes of usage are, from `fields.yaml`."""

    prefixes: tuple[str, ...]
    """Prefixes of span attributes about usage."""
    responses: tuple[str, ...]
    """Span attributes with a whole response as JSON."""
    namespaces: frozenset[str]
    """Words before the name of a count that is in no usage."""
    conventional: frozenset[str]
    """Attributes whose presence proves that the conventions are followed."""
    scopes: Mapping[str, UsageRule]
    """Rules by the instrumentation scope of a span, or its prefix."""
    net: tuple[str, ...]
    """Parts of names of models and providers whose own input leaves out cached tokens."""
    rests: Mapping[str, Rest]
    """The meaning of an unexplained rest of a total, by a part of a model's ID."""


@functools.cache
def field_names() -> FieldNames:
    """Return where attributes of usage are."""
    known = facts("usage/fields.yaml")
    return FieldNames(
        prefixes=tuple(known["prefixes"]),
        responses=tuple(known["responses"]),
        namespaces=frozenset(known["namespaces"]),
        conventional=frozenset(known["conventional"]),
        scopes={scope: UsageRule(**rule) for scope, rule in known["scopes"].items()},
        net=tuple(known["net"]),
        rests=known["rests"],
    )


class Doubt(NamedTuple):
    """A part of a usage that no rule can place."""

    name: str
    side: str
    """`input` or `output`; empty if it may be of either."""
    tokens: int


class Fields:
    """The counts of a reported usage, by what they mean."""

    def __init__(self, raw: object, *, is_span: bool = False) -> None:
        """Read a dictionary, an object of a client library, or the attributes of a span."""
        self._found: dict[str, dict[int, dict[int, str]]] = {}
        """Readable counts with their names, by kind and rank."""
        self._named: set[str] = set()
        """Kinds with a value, readable or not."""
        self._unclear: list[tuple[str, Meaning, int]] = []
        self.tier: str | None = None
        """The service tier."""
        self.is_reasoning_apart = False
        """True if the output, by its name, is that of a vendor whose output excludes reasoning."""
        # No recursion: a runaway agent may already be deep in its own.
        left: list[tuple[str, str, Any, int]] = []
        for name, value in _below(raw) or ():
            within = within_usage(str(name)) if is_span else str(name)
            if within is not None:
                left.append((str(name), within, value, 1))
        while left:
            name, path, value, depth = left.pop()
            if type(value) is str and value[:1] in ("{", "["):
                value = _parsed(value)
            # Deeper than any known count: circular data would never end.
            below = _below(value) if depth < MAX_DEPTH else None
            if below is None:
                if value is not None and (meaning := _meaning(path)) is not None:
                    self._note(name, meaning, value)
                continue
            left += [
                (f"{name}.{key}", f"{path}.{key}", each, depth + 1)
                for key, each in below
                if each is not None
            ]

        self._is_named = any(rank < LOOSE for kind in WHOLES for rank in self._found.get(kind, ()))
        """True if the input, the output or the total is in a usage of a known name."""
        # Those of other usages and of the span are then of something else.
        for kind in WHOLES if self._is_named else ():
            ranks = self._found.get(kind, {})
            self._found[kind] = {rank: ranks[rank] for rank in ranks if rank < LOOSE}

    def _note(self, name: str, meaning: Meaning, value: object) -> None:
        kind = meaning.kind
        if kind == TIER:
            self.tier = value if isinstance(value, str) and value else self.tier
            return
        count = token_count(value)
        if not meaning.is_certain:
            if count:
                self._unclear.append((name, meaning, count))
            return
        self._named.add(kind)
        self.is_reasoning_apart |= meaning.is_apart
        if count is not None:
            self._found.setdefault(kind, {}).setdefault(meaning.rank, {})[count] = name

    def is_named(self, kind: str) -> bool:
        """Return whether there is a value under any of its names, readable or not."""
        return kind in self._named

    def counts(self, kind: str) -> dict[int, str]:
        """Return its different counts with their names, those of the first rank that has any.

        A 0 next to another count is one that was not reported.
        """
        ranks = self._found.get(kind)
        if not ranks:
            return {}
        known = ranks[min(ranks)]
        return {count: known[count] for count in known if count} or known

    def count(self, kind: str) -> int | None:
        """Return a number of tokens, the largest if there are several."""
        return max(self.counts(kind), default=None)

    def detail(self, kind: str) -> int | None:
        """Return the count of the same name within the details."""
        ranks = self._found.get(kind, {})
        known = ranks.get(DETAIL) or ranks.get(LOOSE + DETAIL)
        return max(known, default=None) if known else None

    def doubts(self, explained: Iterable[str]) -> list[Doubt]:
        """Return the parts that no rule can place: unknown ones, and those with several counts.

        Args:
            explained: Kinds whose different counts were explained.
        """
        found = []
        for name, meaning, count in self._unclear:
            if self._is_named and meaning.rank >= LOOSE:
                continue
            # An unknown word in the name of a part that is known.
            same = self._found if meaning.kind == PART else [meaning.kind]
            if not any(count in self.counts(kind) for kind in same if kind not in WHOLES):
                found.append(Doubt(name, meaning.side, count))
        for kind in self._found.keys() - {PART, FRESH, *explained}:
            if len(several := self.counts(kind)) > 1:
                side = SIDES.get(kind, INPUT)
                found += [Doubt(name, side, count) for count, name in several.items()]
        return found


WHOLES: Final = (INPUT, OUTPUT, TOTAL)
SIDES: Final = {OUTPUT: OUTPUT, REASONING: OUTPUT, OUTPUT_AUDIO: OUTPUT, TOTAL: ""}


def is_usage(name: str) -> bool:
    """Return whether a span attribute is about usage."""
    within = within_usage(name)
    return within is not None and (within[:1] != UNNAMED or "token" in name.lower())


def as_said(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the span attributes that are about usage, and the usages in whole responses."""
    said = {name: value for name, value in attributes.items() if within_usage(name) is not None}
    for name in field_names().responses:
        if name in attributes:
            said.update(_usages_in(name, _parsed_response(attributes[name])))
    return said


def _parsed_response(text: object) -> object:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text) if isinstance(text, str) else text
    return None  # it may be cut off


def _usages_in(name: str, value: object, depth: int = NESTED) -> dict[str, Any]:
    """Return the usages of a response, next to its text, or within the part of a vendor."""
    found: dict[str, Any] = {}
    for key, held in value.items() if isinstance(value, dict) and depth else ():
        if " ".join(words_of(key)) in USAGES:
            return {f"{name}.{key}": held}
        found |= _usages_in(f"{name}.{key}", held, depth - 1)
    return found


# Cached, because an instrumentation uses the same names in every span.
@functools.lru_cache(REMEMBERED)
def within_usage(name: str) -> str | None:
    """Return the name of a span attribute within a usage; `None` if it is about something else.

    That of a usage itself is empty. The first character of others says that the count is outside of
    any usage, or in one that may be of memory or disks, unless it is called one of tokens.
    """
    for prefix in field_names().prefixes:
        if f"{name}.".startswith(prefix):
            return name[len(prefix) :]
    lower = name.lower()
    if len(name) > LONGEST_PATH or ("token" not in lower and "usage" not in lower):
        return None
    parts = name.split(".")
    said = [" ".join(words_of(part)) for part in parts]
    if "request" in said or not lexicon().innocent.isdisjoint(words_of(name)):
        return None
    start = next((start for start, part in enumerate(said) if part in USAGES), None)
    if start is None:
        return _outside(parts[-1], said)
    return UNNAMED + ".".join(parts[start:])


def _outside(name: str, said: Sequence[str]) -> str | None:
    """Return the name of a count that is in no usage, if it belongs to a model's response."""
    meaning = meaning_of(name)
    spaces = (word for part in said[:-1] for word in part.split())
    is_count = meaning is not None and meaning.is_certain and "token" in said[-1]
    return OUTSIDE + name if is_count and field_names().namespaces.issuperset(spaces) else None


def _meaning(path: str) -> Meaning | None:
    if path[:1] == UNNAMED and not OF_TOKENS.search(path):
        return None
    found = meaning_of(path)
    is_loose = path[:1] in (OUTSIDE, UNNAMED)
    return found._replace(rank=LOOSE + found.rank) if found and is_loose else found


def _parsed(text: str) -> object:
    """Return a usage in a text: JSON, or a dictionary as Python shows it.

    LangSmith's exporter has written both: https://github.com/ClickHouse/nerve/pull/105.
    """
    if len(text) > LONGEST:
        return None
    # Python warns of an unknown escape, which the application would see.
    for read in (json.loads,) if "\\" in text else (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return None  # attributes may contain anything


def _below(value: object) -> Iterable[tuple[object, Any]] | None:
    """Return the named contents of a container; `None` for a plain value."""
    if type(value) is dict:  # nearly always
        return value.items()
    # Text is a sequence as well, but its characters are not counts.
    if value is None or isinstance(value, (str, bytes, int, float)):
        return None
    if isinstance(value, (list, tuple)):
        return _listed(value).items()
    if isinstance(value, Mapping):
        return value.items()
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or not own:
        return None
    # pydantic keeps unknown fields separately.
    extra = getattr(value, "__pydantic_extra__", None)
    return {**own, **(extra if isinstance(extra, dict) else {})}.items()


def _listed(items: Sequence[object]) -> dict[str, Any]:
    """Return the counts of a list by modality or time to live, as in Bedrock, Gemini and LlamaAPI.

    Those of the same kind add up.
    """
    listed: dict[str, Any] = {}
    for item in items:
        by = {" ".join(words_of(str(key))): value for key, value in _below(item) or ()}
        # The names of Bedrock, Gemini and LlamaAPI, in this order.
        count = by.get("input tokens", by.get("token count", by.get("value")))
        kind = by.get("ttl", by.get("modality", by.get("metric")))
        if kind is None:
            continue
        kind = str(getattr(kind, "value", kind))
        before, more = token_count(listed.get(kind)), token_count(count)
        listed[kind] = count if before is None or more is None else before + more
    return listed
