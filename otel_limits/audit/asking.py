"""Reads what an auditor asks for: durations, dates, properties, limits."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import datetime
from typing import Final, TypeVar

from otel_limits.core.values import (
    DURATION,
    MONEY,
    SHARE,
    TIME,
    WHOLE_NUMBER,
    CheckedKind,
    Kind,
    UnfitError,
    split_names,
)
from otel_limits.ledger.rows import MICROSECONDS

T = TypeVar("T")


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
    return round(when.timestamp() * MICROSECONDS)


def instant(text: str) -> int:
    """Read a time, as microseconds since the epoch.

    Raises:
        ArgumentTypeError: It is not one.
    """
    return to_microseconds(argument(TIME)(text))


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UnfitError
    return name.strip(), value


def _properties(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise UnfitError
    return names


def _identity(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{8,32}", text):
        raise UnfitError
    return text


CONDITION: Final = CheckedKind[tuple[str, str]](
    phrase="a condition such as tenant.id=acme or agent=res*", check=_condition, parse=str
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

duration = argument(DURATION)
condition = argument(CONDITION)
properties = argument(PROPERTIES)
cap = argument(WHOLE_NUMBER)
usd = argument(MONEY)
share = argument(SHARE)
identity = argument(IDENTITY)
