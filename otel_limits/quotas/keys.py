"""Partition keys of quotas, from agent, model, baggage and attributes.

Baggage and attributes are untrusted: they are read only if a quota names them, values that are not
short printable text share one key, and stores see hashes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
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
        """Return the key for text typed by an operator, such as `acme` or `researcher/acme`.

        Raises:
            ValueError: It does not match the template.
        """
        if not self.sources:
            if text not in ("", EVERYTHING):
                raise ValueError(f"Quota {quote_value(quota)} has no keys: write {EVERYTHING!r}.")
            return self._key(quota, [])
        match = self._pattern().fullmatch(text)
        if match is None:
            raise ValueError(
                f"Keys of quota {quote_value(quota)} look like {quote_value(self.text)}, "
                f"got {quote_value(text)}."
            )
        return self._key(quota, list(match.groups()))

    def _key(self, quota: str, values: list[str]) -> Key:
        if not self.sources:
            return Key(digest(quota), EVERYTHING)
        left = iter(values)
        text = self.text if "{" in self.text else f"{{{self.text}}}"
        shown = PLACEHOLDER.sub(lambda match: displayed(match[1], next(left)), text)
        return Key(digest(quota, *values), shown)

    def _pattern(self) -> re.Pattern[str]:
        if "{" not in self.text:
            return re.compile("(.+)")
        parts = PLACEHOLDER.split(self.text)
        # `split` with a group alternates text and placeholders: the odd ones are placeholders.
        return re.compile("".join("(.+?)" if n % 2 else re.escape(p) for n, p in enumerate(parts)))


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


def key_text(value: object) -> str:
    """Return a value as key text, or a placeholder if it is absent or unusable."""
    if value is None or value == "":
        return MISSING
    text = str(value) if isinstance(value, (str, int)) else ""
    # All invalid values share one count, so a caller cannot get a new amount with each.
    if not text or len(text) > MAX_VALUE_LENGTH or not text.isprintable():
        return INVALID
    return text


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
    return all(fnmatch.fnmatchcase(key_text(lookup(source)), glob) for source, glob in conditions)
