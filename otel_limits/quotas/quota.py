"""One quota: who shares how much of what over which window. And how a policy file writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final, Literal, cast

from otel_limits.errors import ConfigurationError
from otel_limits.limits import ACTIONS, Action, Number, require_choice
from otel_limits.quotas.keys import Template, require_source
from otel_limits.quotas.windows import UTC, Windows

Unit = Literal["tokens", "usd", "model_calls", "invocations"]
UNITS: Final[tuple[Unit, ...]] = ("tokens", "usd", "model_calls", "invocations")

BackendError = Literal["deny", "allow", "local"]
BACKEND_ERRORS: Final[tuple[BackendError, ...]] = ("deny", "allow", "local")

QUOTA_ACTIONS: Final[tuple[Action, ...]] = tuple(each for each in ACTIONS if each != "ask")

PARTS_PER_USD: Final = 10**9
"""Money is counted in whole billionths of a dollar, so that stores add integers."""

MAX_PARTS: Final = 2**53 - 1
"""Beyond this a script of Redis no longer counts exactly."""

NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.\-]{0,63}")
KEYS: Final = ("key", "where", "window", "time_zone", "action", "on_backend_error", *UNITS)


NO_KEY: Final = Template("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A budget over a time window, shared by many invocations and processes."""

    name: str
    unit: Unit
    amount: int
    """In whole parts: tokens, calls, invocations, or billionths of a dollar."""
    windows: Windows
    key: Template = NO_KEY
    """Each value of the key has the whole amount for itself."""
    where: tuple[tuple[str, str], ...] = ()
    """Sources and globs that a model call must fit for the quota to apply."""
    action: Action | None = None
    """What is done when it is exceeded; `None` for what the agent's policy says."""
    on_backend_error: BackendError = "deny"
    """What is done while the store does not answer."""


def parts_of_usd(amount: Decimal) -> int:
    """Return money as whole parts, rounded up: no call is cheaper than its price."""
    return int((amount * PARTS_PER_USD).to_integral_value(ROUND_CEILING))


def in_unit(unit: Unit, parts: int) -> Number:
    """Return an amount as people write it."""
    return Decimal(parts) / PARTS_PER_USD if unit == "usd" else parts


def unit_name(unit: Unit) -> str:
    """Return the unit as it stands behind a number."""
    return {"usd": "USD", "model_calls": "model calls"}.get(unit, unit)


def in_words(unit: Unit, parts: int) -> str:
    """Return an amount with its unit."""
    return f"{in_unit(unit, parts):{'f' if unit == 'usd' else 'd'}} {unit_name(unit)}"


def parse_quotas(section: object) -> tuple[Quota, ...]:
    """Read the section `quotas` of a policy file: a mapping of names to quotas.

    Raises:
        ConfigurationError: Something is wrong with it; one sentence per mistake, each of which
            begins with the key that it is about. It is a `ValueError`.
    """
    if not isinstance(section, Mapping):
        raise ConfigurationError([f"quotas must map names to quotas, got {section!r}."])
    quotas, mistakes = [], []
    for name, entry in section.items():
        quota, wrong = read_quota(name, entry)
        mistakes.extend(wrong)
        if quota is not None:
            quotas.append(quota)
    if mistakes:
        raise ConfigurationError(mistakes)
    return tuple(quotas)


def read_quota(name: object, entry: object) -> tuple[Quota | None, list[str]]:
    """Read one quota; `None` and what is wrong with it when it is none."""
    where = f"quotas.{name}"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None, [
            f"{where} must have a name of up to 64 lower case letters, digits, '.', '-' and '_'."
        ]
    if not isinstance(entry, Mapping):
        return None, [f"{where} must be a mapping with an amount and a window, got {entry!r}."]
    reading = _Reading(where, entry)
    quota = reading.quota(name)
    return (None if reading.mistakes else quota), reading.mistakes


class _Reading:
    """Reads one entry and collects what is wrong with it."""

    def __init__(self, where: str, entry: Mapping[Any, Any]) -> None:
        self._where = where
        self._entry = entry
        self.mistakes = [
            f"{where}.{key} is no setting of a quota. Known are: {', '.join(KEYS)}."
            for key in entry
            if key not in KEYS
        ]

    def quota(self, name: str) -> Quota:
        """Read what is right of it."""
        unit, amount = self._amount()
        return Quota(
            name=name,
            unit=unit,
            amount=amount,
            windows=self._windows(),
            key=self._read("key", _template, NO_KEY),
            where=self._read("where", _conditions, ()),
            action=self._read("action", _choice(QUOTA_ACTIONS), None),
            on_backend_error=self._read("on_backend_error", _choice(BACKEND_ERRORS), "deny"),
        )

    def _read(self, key: str, read: Callable[[object], Any], default: Any) -> Any:
        value = self._entry.get(key)
        if value is None:
            return default
        try:
            return read(value)
        except ValueError as error:
            self.mistakes.append(f"{self._where}.{key}: {error}")
            return default

    def _amount(self) -> tuple[Unit, int]:
        given: list[Unit] = [unit for unit in UNITS if self._entry.get(unit) is not None]
        if len(given) != 1:
            self.mistakes.append(
                f"{self._where} must have exactly one of {', '.join(UNITS)}, got "
                f"{', '.join(given) or 'none'}."
            )
            return "tokens", 1
        return given[0], self._read(given[0], _usd if given[0] == "usd" else _count, 1)

    def _windows(self) -> Windows:
        rule = self._entry.get("window")
        if rule is None:
            self.mistakes.append(f"{self._where} must have a window, such as day.")
            return Windows("hour")
        zone = self._entry.get("time_zone", UTC)
        return cast(
            "Windows", self._read("window", lambda _: _windows(rule, zone), Windows("hour"))
        )


def _windows(rule: object, zone: object) -> Windows:
    if not isinstance(rule, str) or not isinstance(zone, str):
        raise ValueError(f"window and time_zone must be text, got {rule!r} and {zone!r}.")  # noqa: TRY004
    return Windows(rule, zone)


def _template(value: object) -> Template:
    if not isinstance(value, str):
        raise ValueError(f"must be text, got {value!r}.")  # noqa: TRY004  all mistakes are ValueErrors
    return Template(value)


def _conditions(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must map sources to globs, such as agent: 'nightly-*', got {value!r}.")  # noqa: TRY004
    for glob in value.values():
        if not isinstance(glob, str):
            raise ValueError(f"must map sources to globs in quotes, got {glob!r}.")  # noqa: TRY004
    return tuple((require_source(str(source)), glob) for source, glob in value.items())


def _choice(choices: tuple[str, ...]) -> Callable[[object], str]:
    return lambda value: require_choice("it", value, choices)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_PARTS:
        raise ValueError(f"must be a whole number from 1 to {MAX_PARTS}, got {value!r}.")
    return value


def _usd(value: object) -> int:
    exact = isinstance(value, (int, float, str, Decimal)) and not isinstance(value, bool)
    try:
        amount = Decimal(str(value)) if exact else Decimal(0)
    except ArithmeticError:
        amount = Decimal(0)
    if not amount.is_finite() or not 0 < amount <= Decimal(MAX_PARTS) / PARTS_PER_USD:
        raise ValueError(f"must be an amount of USD from 0.000000001 to 9000000, got {value!r}.")
    return parts_of_usd(amount)
