"""Comparisons of two versions of a setting or of a quota: which one is looser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, TypeAlias

from otel_limits.core.secrets import redact_value
from otel_limits.core.values import duration_text

IsLooser: TypeAlias = Callable[[Any, Any], "bool | None"]
"""Whether a value is looser than an earlier one, which comes first; `None` if unknown."""

NO_CAP: Final = math.inf
"""In place of a cap that is not set."""

NOT_COMPARABLE: Final = " (not comparable)"
"""End of a phrase about a change that may be looser."""


def loosest(*values: object) -> IsLooser:
    """Return the comparison of words: these are looser than all others, the first one most."""

    def rank(value: object) -> int:
        return values.index(value) if value in values else len(values)

    return lambda old, new: rank(new) < rank(old)


def changed(old: object, new: object) -> bool | None:
    """Compare values without an order."""
    return None if old != new else False


def higher(old: Any, new: Any) -> bool:
    """Compare numbers of which the higher one is looser."""
    return bool(new > old)


def shorter(old: Any, new: Any) -> bool:
    """Compare times of which the shorter one is looser."""
    return bool(new < old)


def excepted(old: object, new: object) -> bool:
    """Compare whether something is an exception from a limit."""
    return bool(new) and not old


def narrower(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool | None:
    """Compare conditions that must all be met for a limit to apply: more of them are looser."""
    if set(new) <= set(old):
        return False
    return True if set(old) < set(new) else None


def change(name: str, old: object, new: object, is_looser: IsLooser) -> Iterator[str]:
    """Yield a phrase about a value that is looser than an earlier one, or may be."""
    verdict = is_looser(old, new)
    if verdict is not False:
        former, now = redact_value(_shown(old)), redact_value(_shown(new))
        yield f"{redact_value(name)} {former} -> {now}" + ("" if verdict else NOT_COMPARABLE)


def changes(old: object, new: object, comparisons: Mapping[str, IsLooser]) -> Iterator[str]:
    """Yield a phrase for each of these attributes that is looser, or may be."""
    for name, is_looser in comparisons.items():
        yield from change(name, getattr(old, name), getattr(new, name), is_looser)


def _shown(value: object) -> str:
    """Return a value as a policy file has it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_braces(each)}" for key, each in value.items())
    if value is None:
        return "unset"
    return "no limit" if value == NO_CAP else _in_braces(value) or "unset"


def _in_braces(value: object) -> str:
    """Return a value within another one."""
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_in_braces(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_in_braces, value)) + "]"
    if isinstance(value, tuple):
        return ",".join("=".join(each) if isinstance(each, tuple) else each for each in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
