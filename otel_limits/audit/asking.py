"""Reads what an auditor asks for: durations, dates, properties, limits."""

from __future__ import annotations

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
from otel_limits.ledger.rows import MICROSECONDS
from otel_limits.settings.credentials import authorization_in

if TYPE_CHECKING:
    from otel_limits.core.secrets import Secret

T = TypeVar("T")

Conditions: TypeAlias = tuple[tuple[str, str], ...]
"""Names with the values that rows must have; of several for one name any."""


def argument(kind: Kind[T]) -> Callable[[str], T]:
    """Make what `argparse` reads an argument with; it puts the argument's name before mistakes."""

    def read(text: str) -> T:
        try:
            return kind.of_text("", text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return read


def to_microseconds(when: datetime) -> int:
    """Whole microseconds since the epoch."""
    # Rounded, as a float can lie a little below the microsecond that was meant.
    return round(when.timestamp() * MICROSECONDS)


@dataclass(frozen=True, slots=True)
class Instant:
    """A time as an auditor wrote it; without an offset it is one of the zone that is asked in."""

    # The zone may stand behind the time on the command line, so that both are put together later.
    when: datetime
    is_local: bool

    def microseconds(self, zone: tzinfo) -> int:
        """Whole microseconds since the epoch."""
        when = self.when
        if self.is_local:
            when = when.replace(tzinfo=zone).astimezone(timezone.utc)
        return to_microseconds(when)


def instant(text: str) -> Instant:
    """Read a time.

    Raises:
        ArgumentTypeError: It is not one.
    """
    when = argument(TIME)(text)
    # `fromisoformat` reads a Z only from Python 3.11 on.
    written = text.strip().replace("Z", "+00:00")
    is_age = DURATION_TEXT.fullmatch(written) is not None
    return Instant(when, is_local=not is_age and datetime.fromisoformat(written).tzinfo is None)


def authorization_file(text: str) -> Secret:
    """Read what a file has for the header `Authorization`.

    Raises:
        ArgumentTypeError: It cannot be read, or has something else in it.
    """
    try:
        return authorization_in(Path(text).expanduser())
    except (ValueError, RuntimeError) as error:
        raise ArgumentTypeError(str(error)) from None


def _conditions(text: str) -> Conditions:
    # A comma is also part of values: what follows it has to look like another condition.
    return tuple(map(_condition, re.split(r",(?=[\w.:-]+=)", text)))


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InvalidValueError
    return name.strip(), value


SELECTABLE: Final = ("agent", "model", "reason")
"""Variables of the dashboards that a ledger knows, under the same names."""

ALL: Final = ("All", "$__all")
"""What an address of Grafana has instead of a value, before version 11 and since."""


def _selected(variables: list[tuple[str, str]]) -> Conditions:
    named = [(name.removeprefix("var-"), value) for name, value in variables]
    # What a ledger cannot know would otherwise be left out, and the answer be of too much.
    if any(name not in SELECTABLE for name, _ in named):
        raise InvalidValueError("A ledger knows agents, models and reasons alone.")
    if any(value == OTHER for _, value in named):
        raise InvalidValueError(
            f"{OTHER} stands for many names, and a ledger has each: select All."
        )
    return tuple((name, _uncut(value)) for name, value in named if value not in ALL)


def _uncut(value: str) -> str:
    # Metrics cut a name where a ledger still has more of it.
    return value if len(value) < MAX_LENGTH else f"{value}*"


def _variables(text: str) -> list[tuple[str, str]]:
    return parse_qsl(text, keep_blank_values=True, strict_parsing=True)


def _properties(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise InvalidValueError
    return names


def _identity(text: str) -> str:
    # Fewer than eight digits would often be the beginning of several ids.
    if not re.fullmatch(r"[0-9a-f]{8,32}", text):
        raise InvalidValueError
    return text


def _percentile(text: str) -> float:
    """Read 99, 99% or 0.99: nobody wants to keep less than one in a hundred."""
    number = float(text.strip().removesuffix("%"))
    share = number / 100 if "%" in text or number > 1 else number
    if not 0 < share <= 1:
        raise InvalidValueError
    return share


PREVIOUS: Final = "previous"


@dataclass(frozen=True, slots=True)
class Against:
    """What a period is compared with."""

    text: str
    """`previous`, or the name of a period."""
    period: str | None = None
    """What it is the name of, such as `month`."""
    microseconds: int = 0
    """How much earlier it is, where that was said."""


def _against(text: str) -> Against:
    if DURATION_TEXT.fullmatch(text):
        micros = round(DURATION.of_text("", text).total_seconds() * MICROSECONDS)
        return Against(text, microseconds=micros)
    period = kind_of(text)
    if text != PREVIOUS and period is None:
        raise InvalidValueError
    return Against(text, period)


PRICES: Final = ("present", "former")

CONDITIONS: Final = CheckedKind[Conditions](
    phrase="a condition such as tenant.id=acme or agent=res*", check=_conditions, parse=str
)
SELECTED: Final = CheckedKind[Conditions](
    phrase="variables of a dashboard such as var-agent=research&var-reason=max_turns",
    check=_selected,
    parse=_variables,
)
PROPERTIES: Final = CheckedKind[tuple[str, ...]](
    phrase="one or more properties to group by, such as agent,model",
    check=_properties,
    parse=split_names,
)
IDENTITY: Final = CheckedKind[str](
    phrase="a trace id or invocation id: its 32 hexadecimal digits, or the first 8 or more of them",
    check=_identity,
    parse=str.lower,
)

PERCENTILE: Final = CheckedKind[float](
    phrase="a percentile above 0 and up to 100, such as 99, 99% or 0.99",
    check=_percentile,
    parse=str,
)
WHICH_PRICES: Final = choice(*PRICES)

AGAINST: Final = CheckedKind[Against](
    phrase="previous, a duration such as 7d, or a period such as 2026-10, 2026-W41 or 2026-10-03",
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
