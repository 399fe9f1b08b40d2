"""Partition keys of quotas, from agent, model, baggage and attributes.

Baggage and attributes are untrusted: they are read only if a quota names them, values that are not
short printable text share one key, and stores see hashes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from otel_limits.core.secrets import quote_value
from otel_limits.core.values import KEY_SOURCE

MISSING: Final = "(missing)"
"""Replaces an absent value: omitting it does not bypass a keyed quota."""
INVALID: Final = "(invalid)"
"""Replaces an unusable value, for the same reason."""
EVERYTHING: Final = "(all)"
"""Displayed for a quota without a key, which has one count."""

# Baggage is untrusted: without a bound, one request could store a key of megabytes.
MAX_VALUE_LENGTH: Final = 128
HASH_LENGTH: Final = 32
SHOWN_HASH_LENGTH: Final = 12

PLAIN_SOURCES: Final = ("agent", "model")
"""Sources whose values are displayed without a hash."""
SOURCE: Final = re.compile(rf"agent|model|{KEY_SOURCE.pattern}")
PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
SHOWN_HASH: Final = re.compile(rf"#[0-9a-f]{{{SHOWN_HASH_LENGTH}}}")
"""An untrusted value as it is displayed."""

MOST_READINGS: Final = 16
"""Keys that a typed text may be: their number grows quickly with its separators."""

Lookup = Callable[[str], object]
"""Source, such as `baggage.tenant.id` → its value, or `None`."""


@dataclass(frozen=True, slots=True)
class Key:
    """A partition key of a quota."""

    id: str
    """Hash of quota and values, used in stores."""
    shown: str
    """For display: untrusted values appear as the prefix of their hash."""


@dataclass(frozen=True, slots=True)
class Template:
    """The key template of a quota.

    Raises:
        ValueError: A source is invalid, or two are not separated.
    """

    text: str
    """Such as `agent`, `baggage.tenant.id` or `{agent}/{baggage.tenant.id}`; empty for no key."""

    def __post_init__(self) -> None:
        """Reject invalid and ambiguous templates."""
        for source in self.sources:
            require_source("key", source)
        if "}{" in self.text:
            raise ValueError(
                f"key must separate its parts, e.g. {{a}}/{{b}}, got {quote_value(self.text)}."
            )
        if self.text and not self.sources:
            raise ValueError(
                "key must name a source, or several as {agent}/{model}, got "
                f"{quote_value(self.text)}."
            )

    def __str__(self) -> str:
        """Return it as written."""
        return self.text

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources, in order."""
        if self.text and "{" not in self.text and "}" not in self.text:
            return (self.text,)
        return tuple(PLACEHOLDER.findall(self.text))

    @property
    def has_hashes(self) -> bool:
        """Whether keys show hashes instead of values."""
        return any(source not in PLAIN_SOURCES for source in self.sources)

    def key(self, quota: str, lookup: Lookup) -> Key:
        """Return the key of a model call."""
        return self._key(quota, [key_text(lookup(source)) for source in self.sources])

    def key_of_text(self, quota: str, text: str) -> Key:
        """Return the only key that a typed text can be.

        Raises:
            ValueError: It can be several keys or none.
        """
        keys = self.keys_of_text(quota, text)
        if len(keys) > 1:
            raise ValueError(f"{self.several(quota, text, keys)} {self.separation}")
        return keys[0]

    def keys_of_text(self, quota: str, text: str) -> list[Key]:
        """Return each key that a typed text can be, such as `acme` or `researcher/acme`.

        There are several if a value may contain a separator: `team/researcher/acme`.

        Raises:
            ValueError: It does not match the template, or calls have no such key.
        """
        if not self.sources:
            if text not in ("", EVERYTHING):
                raise ValueError(f"Quota {quote_value(quota)} has no keys: write {EVERYTHING!r}.")
            return [self._key(quota, [])]
        found = list(islice(self._readings(text), MOST_READINGS + 1))
        if not found:
            raise ValueError(
                f"Keys of quota {quote_value(quota)} look like {quote_value(self.text)}, "
                f"got {quote_value(text)}."
            )
        if len(found) > MOST_READINGS:
            raise ValueError(
                f"{quote_value(text)} can be more than {MOST_READINGS} keys of quota "
                f"{quote_value(quota)}: write one as it is shown by otel-limits quotas."
            )
        faults = [self._fault(values) for values in found]
        if all(faults):
            raise ValueError(
                f"Quota {quote_value(quota)} has no key {quote_value(text)}: {faults[0]}"
            )
        return [
            self._key(quota, values)
            for values, fault in zip(found, faults, strict=True)
            if not fault
        ]

    def several(self, quota: str, text: str, keys: Iterable[Key]) -> str:
        """Say that a text can be several keys."""
        shown = dict.fromkeys(key.shown for key in keys)
        # Without hashes, all of them look like the text.
        listed = f": {', '.join(shown)}" if len(shown) > 1 else ""
        return f"{quote_value(text)} can be several keys of quota {quote_value(quota)}{listed}."

    @property
    def separation(self) -> str:
        """How no text can be several keys."""
        example = "|".join(f"{{{source}}}" for source in self.sources)
        return (
            "In the policy file, separate the parts of the key by a text that no value has, e.g. "
            f"key: {example!r}."
        )

    def _readings(self, text: str) -> Iterator[list[str]]:
        """Yield the values of each way to split a text at the separators."""
        # `split` with a group alternates text and placeholders: the even ones are text.
        return readings(text, PLACEHOLDER.split(self._in_braces)[::2])

    def _fault(self, values: Sequence[str]) -> str:
        """Say why calls have no key of these values; empty if they can."""
        for source, value in zip(self.sources, values, strict=True):
            if source not in PLAIN_SOURCES and SHOWN_HASH.fullmatch(value):
                return f"{value} is a hash, so write the value itself."
            if reason := unusable(value):
                return f"a value {reason}"
        return ""

    def _key(self, quota: str, values: list[str]) -> Key:
        if not self.sources:
            return Key(digest(quota), EVERYTHING)
        left = iter(values)
        shown = PLACEHOLDER.sub(lambda match: displayed(match[1], next(left)), self._in_braces)
        return Key(digest(quota, *values), shown)

    @property
    def _in_braces(self) -> str:
        """Return it with each source as a placeholder."""
        return self.text if "{" in self.text else f"{{{self.text}}}"


def readings(text: str, between: Sequence[str]) -> Iterator[list[str]]:
    """Yield each way to read a text as values that are not empty, with texts between them.

    Args:
        text: The text.
        between: The texts before, between and after the values.
    """
    first, *others = between
    if not others:
        if text == first:
            yield []
        return
    last = others.pop()
    if text.startswith(first) and text.endswith(last):
        yield from _split(text[len(first) : len(text) - len(last)], others)


def _split(text: str, separators: Sequence[str]) -> Iterator[list[str]]:
    if not separators:
        if text:
            yield [text]
        return
    separator, *others = separators
    at = text.find(separator, 1)
    while at > 0:
        for values in _split(text[at + len(separator) :], others):
            yield [text[:at], *values]
        at = text.find(separator, at + 1)


def require_source(setting: str, source: str) -> str:
    """Return `source` if it is valid.

    Raises:
        ValueError: It is not.
    """
    if not SOURCE.fullmatch(source):
        raise ValueError(
            f"{setting} must consist of agent, model, baggage.NAME and attribute.NAME, "
            f"got {quote_value(source)}."
        )
    return source


def value_text(value: object) -> str:
    """Return a value as text, or a placeholder if it is absent or neither text nor an integer."""
    if value is None or value == "":
        return MISSING
    return str(value) if isinstance(value, (str, int)) else INVALID


def key_text(value: object) -> str:
    """Return a value as key text, or a placeholder if it is absent or unusable."""
    text = value_text(value)
    # All invalid values share one count, so a caller cannot get a new amount with each.
    return INVALID if unusable(text) else text


def unusable(text: str) -> str:
    """Say why a text cannot be part of a key, and how it counts; empty if it can."""
    if len(text) > MAX_VALUE_LENGTH:
        reason = f"has {len(text)} characters, more than {MAX_VALUE_LENGTH}"
    elif not text.isprintable():
        character = next(each for each in text if not each.isprintable())
        reason = f"contains the character {character!a}, which is not printable"
    else:
        return ""
    return f"{reason}. Calls with such a value count as {INVALID!r}."


def displayed(source: str, value: str) -> str:
    """Return the displayed form of a value."""
    # Untrusted values may be names of people, which metrics and logs must not contain.
    if source in PLAIN_SOURCES or value in (MISSING, INVALID):
        return value
    return "#" + digest(value)[:SHOWN_HASH_LENGTH]


def digest(*parts: str) -> str:
    """Hash a list of texts without control characters."""
    # The separator is a control character, so different lists never join to the same text.
    joined = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(joined, digest_size=HASH_LENGTH // 2).hexdigest()


def fits(conditions: tuple[tuple[str, str], ...], lookup: Lookup) -> bool:
    """Return whether every source has a value that matches its glob."""
    return all(matches(lookup(source), glob) for source, glob in conditions)


def matches(value: object, glob: str) -> bool:
    """Return whether a value matches a glob, also one that is unusable as part of a key."""
    return fnmatch.fnmatchcase(value_text(value), glob)
