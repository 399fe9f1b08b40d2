"""Whose share of a quota a call counts for: keys from agent, model, baggage and attributes.

What comes from outside (baggage, attributes) is untrusted: it is read only where a quota names it,
values that are not short printable text share one key, and stores see hashes of them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MISSING: Final = "(missing)"
"""Stands for a value that is not there: omitting it does not bypass a keyed quota."""
INVALID: Final = "(invalid)"
"""Stands for a value that cannot be used, for the same reason."""
EVERYTHING: Final = "(all)"
"""Shown for a quota without a key: one count for all that it applies to."""

# Baggage comes from outside: without a bound one request could fill a store with a
# key of megabytes.
MAX_VALUE_LENGTH: Final = 128
HASH_LENGTH: Final = 32
SHOWN_HASH_LENGTH: Final = 12

# No space and no brace, so that a template can be read in one way only.
SOURCE: Final = re.compile(r"agent|model|(?:baggage|attribute)\.[A-Za-z0-9][A-Za-z0-9_.\-/]{0,127}")
PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")

Lookup = Callable[[str], object]
"""Source, such as `baggage.tenant.id` → its value, or `None`."""


@dataclass(frozen=True, slots=True)
class Key:
    """Whose share of a quota is counted."""

    id: str
    """Hash of quota and values: what a store sees."""
    shown: str
    """For people: values from outside appear as the beginning of their hash."""


@dataclass(frozen=True, slots=True)
class Template:
    """How the key of a quota is made up.

    Raises:
        ValueError: A source is not valid, or two of them are not kept apart.
    """

    text: str
    """Such as `agent`, `baggage.tenant.id` or `{agent}/{baggage.tenant.id}`; empty for no key."""

    def __post_init__(self) -> None:
        """Refuse what cannot be read, or can be read in two ways."""
        for source in self.sources:
            require_source("key", source)
        if "}{" in self.text:
            raise ValueError(f"key must separate its parts, e.g. {{a}}/{{b}}, got {self.text!r}.")
        if self.text and not self.sources:
            raise ValueError(
                f"key must name a source, or several as {{agent}}/{{model}}, got {self.text!r}."
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """What it reads, in order."""
        if self.text and "{" not in self.text and "}" not in self.text:
            return (self.text,)
        return tuple(PLACEHOLDER.findall(self.text))

    def key(self, quota: str, lookup: Lookup) -> Key:
        """Make the key of one model call."""
        return self._key(quota, [key_text(lookup(source)) for source in self.sources])

    def key_of_text(self, quota: str, text: str) -> Key:
        """Make the key that a person writes, such as `acme` or `researcher/acme`.

        Raises:
            ValueError: It does not have the parts of the template.
        """
        if not self.sources:
            if text not in ("", EVERYTHING):
                raise ValueError(f"Quota {quota!r} has no keys: write {EVERYTHING!r}.")
            return self._key(quota, [])
        match = self._pattern().fullmatch(text)
        if match is None:
            raise ValueError(f"Keys of quota {quota!r} look like {self.text!r}, got {text!r}.")
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
        # `split` with a group gives text and placeholder in turns: the odd ones are placeholders.
        return re.compile("".join("(.+?)" if n % 2 else re.escape(p) for n, p in enumerate(parts)))


def require_source(setting: str, source: str) -> str:
    """Return `source` if it can be read.

    Raises:
        ValueError: It cannot be read.
    """
    if not SOURCE.fullmatch(source):
        raise ValueError(
            f"{setting} must be made of agent, model, baggage.NAME and attribute.NAME, "
            f"got {source!r}."
        )
    return source


def key_text(value: object) -> str:
    """Return a value as text that can be a key, or what stands for one that cannot."""
    if value is None or value == "":
        return MISSING
    text = str(value) if isinstance(value, (str, int)) else ""
    # All of them share one count: whoever sends such values must not get a fresh amount with each.
    if not text or len(text) > MAX_VALUE_LENGTH or not text.isprintable():
        return INVALID
    return text


def displayed(source: str, value: str) -> str:
    """Return what people see of a value."""
    # What comes from outside may be somebody's name, which metrics and logs must not contain.
    if source in ("agent", "model") or value in (MISSING, INVALID):
        return value
    return "#" + digest(value)[:SHOWN_HASH_LENGTH]


def digest(*parts: str) -> str:
    """Hash a list of texts without control characters."""
    # The separator is one, so that no two different lists are joined to the same text.
    joined = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(joined, digest_size=HASH_LENGTH // 2).hexdigest()


def fits(conditions: tuple[tuple[str, str], ...], lookup: Lookup) -> bool:
    """Tell whether every source has a value that fits its glob."""
    return all(fnmatch.fnmatchcase(key_text(lookup(source)), glob) for source, glob in conditions)
