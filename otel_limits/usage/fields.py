"""Names of each usage count at all vendors, clients and instrumentations."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from otel_limits.usage.numbers import token_count
from otel_limits.vendors.facts import facts
from otel_limits.vendors.records import vendors
from otel_limits.vendors.vendor import UsageRule

MAX_DEPTH: Final = 4
"""Maximum nesting of a count; the deepest known one is two levels down."""

REMEMBERED: Final = 256
"""Cached names."""


def _spelled_alike(name: str) -> str:
    return name.replace("_", "").lower()


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
WEB_SEARCHES: Final = "web_searches"
TIER: Final = "tier"


class FieldNames(NamedTuple):
    """The contents of `fields.yaml`."""

    prefixes: tuple[str, ...]
    """Prefixes of span attributes about usage."""
    attributes: frozenset[str]
    """Such attributes without a prefix."""
    as_json: tuple[str, ...]
    """Those of them that contain counts as JSON text."""
    meanings: Mapping[str, tuple[str, int, bool]]
    """The count that each name means, its precedence, and whether it is that of an output which
    excludes reasoning."""
    conventional: frozenset[str]
    """Attributes whose presence proves that the conventions are followed."""
    scopes: Mapping[str, UsageRule]
    """Rules by the instrumentation scope of a span, or its prefix."""


@functools.cache
def field_names() -> FieldNames:
    """Return the names of counts at all vendors, clients and instrumentations."""
    known = facts("usage/fields.yaml")
    apart = {name for each in vendors().values() for name in each.apart}
    return FieldNames(
        prefixes=tuple(known["prefixes"]),
        attributes=frozenset(known["as_json"] + known["unprefixed"]),
        as_json=tuple(known["as_json"]),
        meanings={
            _spelled_alike(name): (kind, place, name in apart)
            for kind, names in known["names"].items()
            for place, name in enumerate(names)
        },
        conventional=frozenset(known["conventional"]),
        scopes={scope: UsageRule(**rule) for scope, rule in known["scopes"].items()},
    )


# Cached, because a vendor uses the same names in every answer.
@functools.lru_cache(REMEMBERED)
def _outermost(name: str) -> str:
    for prefix in field_names().prefixes:
        name = name.removeprefix(prefix)
    return _spelled_alike(name)


class Fields:
    """A reported usage, with normalized names.

    `promptTokenCount` becomes `prompt_token_count`, and nested names are joined by dots. For a list
    of counts by modality or by time to live, those are the last part of the name.
    """

    def __init__(self, raw: object) -> None:
        """Read a dictionary, an object of a client library, or the attributes of a span."""
        self._found: dict[str, tuple[int, Any]] = {}
        """Readable values, with the precedence of their names."""
        self._named: set[str] = set()
        """Names with a value, readable or not."""
        self.is_reasoning_apart = False
        """True if the name of the output is that of a vendor whose output excludes reasoning."""
        meanings = field_names().meanings
        # No recursion: a runaway agent may already be deep in its own.
        left: list[tuple[str, Any, int]] = [("", raw, 0)]
        while left:
            name, value, depth = left.pop()
            # Deeper than any known count: circular data would never end.
            below = _below(value) if depth < MAX_DEPTH else None
            if below is None:
                if value is not None and (meaning := meanings.get(name)) is not None:
                    self._note(value, meaning)
                continue
            for key, each in below:
                part = f"{name}.{_spelled_alike(str(key))}" if depth else _outermost(str(key))
                left.append((part, each, depth + 1))

    def _note(self, value: object, meaning: tuple[str, int, bool]) -> None:
        kind, place, is_apart = meaning
        self._named.add(kind)
        self.is_reasoning_apart |= is_apart
        known = self._found.get(kind)
        # Precedence is independent of the position in the response.
        if known is not None and known[0] <= place:
            return
        readable = _text(value) if kind == TIER else token_count(value)
        if readable is not None:
            self._found[kind] = place, readable

    def is_named(self, kind: str) -> bool:
        """Return whether there is a value under any of its names, readable or not."""
        return kind in self._named

    def count(self, kind: str) -> int | None:
        """Return the number of tokens under the first name with a readable value."""
        known = self._found.get(kind)
        return None if known is None else known[1]

    @property
    def tier(self) -> str | None:
        """The service tier under the first of its names that has text."""
        known = self._found.get(TIER)
        return None if known is None else known[1]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def is_usage(name: str) -> bool:
    """Return whether a span attribute is about usage."""
    names = field_names()
    return name.startswith(names.prefixes) or name in names.attributes


def as_said(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the span attributes that are about usage."""
    told = {name: value for name, value in attributes.items() if is_usage(name)}
    for name in field_names().as_json:
        # Attributes of the span take precedence over the contents of its texts.
        if name in told:
            told = {**_within(told.pop(name)), **told}
    return told


def _within(text: object) -> dict[str, Any]:
    try:
        held = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):  # attributes may contain anything
        held = None
    return held if isinstance(held, dict) else {}


def _below(value: object) -> Iterable[tuple[object, Any]] | None:
    """Return the named contents of a container; `None` for a plain value."""
    if type(value) is dict:  # nearly always
        return value.items()
    # Text is a sequence as well, but its characters are not counts.
    if value is None or isinstance(value, (str, bytes, int, float)):
        return None
    if isinstance(value, (list, tuple)):
        return _listed(value)
    if isinstance(value, Mapping):
        return value.items()
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or not own:
        return None
    # pydantic keeps unknown fields separately.
    extra = getattr(value, "__pydantic_extra__", None)
    return {**own, **(extra if isinstance(extra, dict) else {})}.items()


def _listed(items: Sequence[object]) -> Iterator[tuple[object, Any]]:
    """Yield the counts of a list, as in Bedrock, Gemini and LlamaAPI."""
    for item in items:
        by = {_spelled_alike(str(key)): value for key, value in _below(item) or ()}
        # The names of Bedrock, Gemini and LlamaAPI, in this order.
        count = by.get("inputtokens", by.get("tokencount", by.get("value")))
        kind = by.get("ttl", by.get("modality", by.get("metric")))
        if kind is not None:
            yield getattr(kind, "value", kind), count
