"""Reads the counts of a usage, in any spelling, nesting and order."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from otel_limits.usage import words
from otel_limits.usage.numbers import token_count
from otel_limits.usage.words import (
    INPUT,
    OUTPUT,
    PART,
    PRECEDENCE,
    TIER,
    TOTAL,
    Meaning,
    lexicon,
    meaning_of,
    words_of,
)
from otel_limits.vendors.facts import facts
from otel_limits.vendors.records import Rest, UsageRule

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
        for kind in self._found.keys() - {PART, words.FRESH, *explained}:
            if len(several := self.counts(kind)) > 1:
                side = SIDES.get(kind, INPUT)
                found += [Doubt(name, side, count) for count, name in several.items()]
        return found


WHOLES: Final = (INPUT, OUTPUT, TOTAL)
SIDES: Final = {OUTPUT: OUTPUT, words.REASONING: OUTPUT, words.OUTPUT_AUDIO: OUTPUT, TOTAL: ""}


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
    if len(name) > words.LONGEST or ("token" not in lower and "usage" not in lower):
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
