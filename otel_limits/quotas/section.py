"""How a policy file writes quotas: one table of what can be said, and what reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple

from otel_limits.core.errors import ConfigurationError
from otel_limits.core.limits import ACTIONS, require_choice
from otel_limits.quotas.keys import Template, require_source
from otel_limits.quotas.quota import (
    BACKEND_ERRORS,
    MAX_PARTS,
    PARTS_PER_USD,
    UNITS,
    Quota,
    in_unit,
    parts_of_usd,
)
from otel_limits.quotas.windows import UTC, Windows, length_of, zone_of

NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.\-]{0,63}")
QUOTA_ACTIONS: Final = tuple(each for each in ACTIONS if each != "ask")


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that can be said about a quota."""

    read: Callable[[str, Any], Any]
    """Takes the key and its value; raises `ValueError` with a sentence that begins with the key."""
    schema: Mapping[str, Any]
    """The same as JSON Schema."""
    help: str


class Mistake(NamedTuple):
    """What is wrong, and where: the keys that lead there from the section."""

    path: tuple[str, ...]
    sentence: str


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_PARTS:
        raise ValueError(f"{key} must be a whole number from 1 to {MAX_PARTS}, got {value!r}.")
    return value


def _usd(key: str, value: object) -> int:
    exact = isinstance(value, (int, float, str, Decimal)) and not isinstance(value, bool)
    try:
        amount = Decimal(str(value)) if exact else Decimal(0)
    except ArithmeticError:
        amount = Decimal(0)
    if not amount.is_finite() or not 0 < amount <= in_unit("usd", MAX_PARTS):
        raise ValueError(f"{key} must be USD above 0 and up to 9000000, got {str(value)!r}.")
    return parts_of_usd(amount)


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} must be text, got {value!r}.")  # noqa: TRY004  all are ValueErrors
    return value


def _rule(key: str, value: object) -> str:
    rule = _text(key, value)
    if rule not in ("day", "month"):
        length_of(rule)
    return rule


def _zone(key: str, value: object) -> str:
    return zone_of(_text(key, value)).key


def _template(key: str, value: object) -> Template:
    return Template(_text(key, value))


def _conditions(key: str, value: object) -> tuple[tuple[str, str], ...]:
    globs = value if isinstance(value, Mapping) else {}
    if not globs or not all(isinstance(glob, str) for glob in globs.values()):
        raise ValueError(f"{key} must map sources to globs, such as agent: nightly-*.")
    return tuple((require_source(key, str(source)), glob) for source, glob in globs.items())


def _choice(*choices: str) -> tuple[Callable[[str, Any], str], Mapping[str, Any]]:
    def read(key: str, value: object) -> str:
        return require_choice(key, value, choices)

    return read, {"enum": list(choices)}


WHOLE: Final = {"type": "integer", "minimum": 1, "maximum": MAX_PARTS}
TEXT: Final = {"type": "string"}
GLOBS: Final = {"type": "object", "additionalProperties": TEXT, "minProperties": 1}
MONEY: Final = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_PARTS // PARTS_PER_USD}

FIELDS: Final[Mapping[str, Field]] = {
    "tokens": Field(_count, WHOLE, "Input and output tokens per window."),
    "usd": Field(_usd, MONEY, "USD per window, by the price of each model call."),
    "model_calls": Field(_count, WHOLE, "Requests to providers per window, retries included."),
    "invocations": Field(_count, WHOLE, "Invocations per window that ask a model at all."),
    "window": Field(
        _rule,
        TEXT,
        "hour, day, month, or an ISO duration such as PT15M or P7D, counted from 1970-01-01 UTC.",
    ),
    "time_zone": Field(_zone, TEXT, "Where days and months begin at midnight; UTC unless set."),
    "key": Field(
        _template,
        TEXT,
        "Whose share is counted: agent, model, baggage.NAME, attribute.NAME, or several as "
        "{agent}/{baggage.tenant.id}. Each value has the whole amount. Unset: one for all.",
    ),
    "where": Field(
        _conditions, GLOBS, "What a model call must be for the quota to apply: sources and globs."
    ),
    "action": Field(
        *_choice(*QUOTA_ACTIONS), "What is done when it is exceeded; unset, what the agent does."
    ),
    "on_backend_error": Field(
        *_choice(*BACKEND_ERRORS),
        "What is done while the store does not answer: deny (the default), allow, or local "
        "(each process uses what was left).",
    ),
}
"""Every key of a quota; the reader, the schema and the documentation are made of this."""


def parse_quotas(section: object) -> tuple[Quota, ...]:
    """Read the section `quotas` of a policy file: a mapping of names to quotas.

    Raises:
        ConfigurationError: Something is wrong with it; one sentence per mistake. It is a
            `ValueError`.
    """
    quotas, mistakes = read_quotas(section)
    if mistakes:
        raise ConfigurationError([mistake.sentence for mistake in mistakes])
    return tuple(quotas.values())


def read_quotas(section: object) -> tuple[dict[str, Quota], list[Mistake]]:
    """Read every quota that is one, and what is wrong with the others."""
    if not isinstance(section, Mapping):
        return {}, [Mistake((), "quotas must map names to quotas, such as daily: {tokens: 5000}.")]
    quotas: dict[str, Quota] = {}
    mistakes: list[Mistake] = []
    for name, entry in section.items():
        reading = _Reading(name, entry)
        quota = reading.quota()
        mistakes += reading.mistakes
        if quota is not None and not reading.mistakes:
            quotas[name] = quota
    return quotas, mistakes


class _Reading:
    """Reads one entry and collects what is wrong with it."""

    def __init__(self, name: object, entry: object) -> None:
        self._name = str(name)
        self._entry: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
        self.mistakes: list[Mistake] = []
        if not isinstance(name, str) or not NAME.fullmatch(name):
            self._refuse("must have a name of up to 64 lower case letters, digits, '.', '-', '_'.")
        elif not isinstance(entry, Mapping):
            self._refuse("must be a mapping with an amount and a window.")

    def quota(self) -> Quota | None:
        """Read what is there; `None` when too little is."""
        if self.mistakes:
            return None
        values = {key: self._read(key, value) for key, value in self._entry.items()}
        given = [unit for unit in UNITS if values.get(unit) is not None]
        if len([unit for unit in UNITS if unit in self._entry]) != 1:
            self._refuse(f"must have exactly one of {', '.join(UNITS)}.")
        if "window" not in self._entry:
            self._refuse("must have a window, such as day.")
        if self.mistakes:
            return None
        windows = self._windows(values)
        if windows is None:
            return None
        return Quota(
            name=self._name,
            unit=given[0],
            amount=values[given[0]],
            windows=windows,
            **{key: values[key] for key in self._entry if key in OPTIONAL},
        )

    def _read(self, key: str, value: object) -> Any:
        field = FIELDS.get(key)
        if field is None:
            self._refuse(f"has no setting {key!r}. Known here: {', '.join(FIELDS)}.", key)
            return None
        try:
            return field.read(key, value)
        except ValueError as error:
            self.mistakes.append(Mistake((self._name, key), f"{self._where}: {error}"))
            return None

    def _windows(self, values: Mapping[str, Any]) -> Windows | None:
        try:
            return Windows(values["window"], values.get("time_zone", UTC))
        except ValueError as error:
            self.mistakes.append(Mistake((self._name, "time_zone"), f"{self._where}: {error}"))
            return None

    @property
    def _where(self) -> str:
        return f'quotas["{self._name}"]'

    def _refuse(self, text: str, *keys: str) -> None:
        self.mistakes.append(Mistake((self._name, *keys), f"{self._where} {text}"))


OPTIONAL: Final = ("key", "where", "action", "on_backend_error")


def schema() -> dict[str, Any]:
    """Make the JSON Schema of the section."""
    properties = {
        name: {"description": field.help, **field.schema} for name, field in FIELDS.items()
    }
    quota = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": ["window"],
        "oneOf": [{"required": [unit]} for unit in UNITS],
    }
    return {
        "type": "object",
        "propertyNames": {"pattern": f"^{NAME.pattern}$"},
        "additionalProperties": quota,
    }
