"""Parses the options of audit questions: durations, dates, properties, limits."""

from __future__ import annotations

import functools
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from otel_limits.core.labels import MAX_LENGTH, OTHER
from otel_limits.core.values import (
    DURATION,
    DURATION_TEXT,
    MONEY,
    SHARE,
    TIME,
    WHOLE_NUMBER,
    CheckedKind,
    InvalidValueError,
    Kind,
    choice,
    split_names,
)
from otel_limits.ledger.calendar import kind_of
from otel_limits.ledger.options import AUDIT_KEY, KEY_PREFIX, Condition
from otel_limits.ledger.rows import MICROSECONDS
from otel_limits.settings.variables import authorization_in

if TYPE_CHECKING:
    from otel_limits.core.secrets import Secret

T = TypeVar("T")

Conditions: TypeAlias = tuple[Condition, ...]


def argument(kind: Kind[T]) -> Callable[[str], T]:
    """Create an `argparse` type, which adds the argument's name to errors."""

    def read(text: str) -> T:
        try:
            return kind.of_text("", text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return read


def to_microseconds(when: datetime) -> int:
    """Convert to whole microseconds since the epoch."""
    # Rounded, as a float may be slightly below the intended microsecond.
    return round(when.timestamp() * MICROSECONDS)


@dataclass(frozen=True, slots=True)
class Instant:
    """A time on the command line; without an offset it is in the time zone of the query."""

    # The zone may follow on the command line, so both are combined later.
    when: datetime
    is_local: bool

    def microseconds(self, zone: tzinfo) -> int:
        """Convert to whole microseconds since the epoch."""
        when = self.when
        if self.is_local:
            when = when.replace(tzinfo=zone).astimezone(timezone.utc)
        return to_microseconds(when)


def instant(text: str) -> Instant:
    """Parse a time.

    Raises:
        ArgumentTypeError: It is invalid.
    """
    when = argument(TIME)(text)
    # `fromisoformat` accepts a Z only since Python 3.11.
    written = text.strip().replace("Z", "+00:00")
    is_age = DURATION_TEXT.fullmatch(written) is not None
    return Instant(when, is_local=not is_age and datetime.fromisoformat(written).tzinfo is None)


def authorization_file(text: str) -> Secret:
    """Read an `Authorization` header from a file.

    Raises:
        ArgumentTypeError: It cannot be read, or is not a header value.
    """
    try:
        return authorization_in(Path(text).expanduser())
    except (ValueError, RuntimeError) as error:
        raise ArgumentTypeError(str(error)) from None


SEPARATOR: Final = re.compile(rf",(?=(?:{KEY_PREFIX})?{AUDIT_KEY.pattern}!?=)")
"""Values may contain commas: what follows a separator must look like a condition."""


def _conditions(text: str) -> Conditions:
    return tuple(map(_condition, SEPARATOR.split(text)))


def _condition(text: str) -> Condition:
    name, equals, value = text.partition("=")
    is_excluded = name.endswith("!")
    name = name.removesuffix("!").strip()
    if not equals or not name:
        raise InvalidValueError
    return Condition(name, value, is_excluded)


SELECTABLE: Final = ("agent", "model", "reason")
"""Dashboard variables that are also properties of a ledger."""

ALL: Final = ("All", "$__all")
"""Grafana's placeholders for no selection, before version 11 and since."""


def _selected(variables: list[tuple[str, str]]) -> Conditions:
    named = [(name.removeprefix("var-"), value) for name, value in variables]
    # Ignoring a variable would make the answer cover too much.
    if any(name not in SELECTABLE for name, _ in named):
        raise InvalidValueError("Only agents, models and reasons can be selected.")
    if any(value == OTHER for _, value in named):
        raise InvalidValueError(
            f"{OTHER} combines several names, which a ledger records separately: select All."
        )
    return tuple(Condition(name, _uncut(value)) for name, value in named if value not in ALL)


def _uncut(value: str) -> str:
    # Metrics cut names earlier than ledgers.
    return value if len(value) < MAX_LENGTH else f"{value}*"


def _properties(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise InvalidValueError
    return names


def _identity(text: str) -> str:
    # Fewer than eight digits would often match several IDs.
    if not re.fullmatch(r"[0-9a-f]{8,32}", text):
        raise InvalidValueError
    return text


def _percentile(text: str) -> float:
    """Parse 99, 99% or 0.99. A number above 1 is a percentage."""
    number = float(text.strip().removesuffix("%"))
    share = number / 100 if "%" in text or number > 1 else number
    if not 0 < share <= 1:
        raise InvalidValueError
    return share


PREVIOUS: Final = "previous"


@dataclass(frozen=True, slots=True)
class Against:
    """The period to compare with."""

    text: str
    """`previous`, a duration, or the name of a period."""
    period: str | None = None
    """Which kind of period it names, e.g. `month`."""
    microseconds: int = 0
    """How much earlier it starts, if a duration."""


def _against(text: str) -> Against:
    if DURATION_TEXT.fullmatch(text):
        micros = round(DURATION.of_text("", text).total_seconds() * MICROSECONDS)
        return Against(text, microseconds=micros)
    period = kind_of(text)
    if text != PREVIOUS and period is None:
        raise InvalidValueError
    return Against(text, period)


PRICES: Final = ("current", "recorded")

CONDITIONS: Final = CheckedKind[Conditions](
    phrase="a condition, e.g. tenant.id=acme or agent=res*", check=_conditions, parse=str
)
SELECTED: Final = CheckedKind[Conditions](
    phrase="dashboard variables, e.g. var-agent=research&var-reason=max_turns",
    check=_selected,
    parse=functools.partial(parse_qsl, keep_blank_values=True, strict_parsing=True),
)
PROPERTIES: Final = CheckedKind[tuple[str, ...]](
    phrase="one or more properties to group by, e.g. agent,model",
    check=_properties,
    parse=split_names,
)
IDENTITY: Final = CheckedKind[str](
    phrase="a trace ID or invocation ID of 32 hexadecimal digits, or at least its first 8",
    check=_identity,
    parse=str.lower,
)

PERCENTILE: Final = CheckedKind[float](
    phrase="a percentile above 0 and up to 100, e.g. 99, 99% or 0.99",
    check=_percentile,
    parse=str,
)
WHICH_PRICES: Final = choice(*PRICES)

AGAINST: Final = CheckedKind[Against](
    phrase="previous, a duration, e.g. 7d, or a period, e.g. 2026-10, 2026-W41 or 2026-10-03",
    check=_against,
    parse=str.strip,
)

against = argument(AGAINST)
duration = argument(DURATION)
conditions = argument(CONDITIONS)
selected = argument(SELECTED)
properties = argument(PROPERTIES)
cap = argument(WHOLE_NUMBER)
usd = argument(MONEY)
share = argument(SHARE)
percentile = argument(PERCENTILE)
identity = argument(IDENTITY)
prices = argument(WHICH_PRICES)
