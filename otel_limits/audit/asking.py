"""Reads what an auditor asks for: durations, dates, properties, limits."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from datetime import datetime, timedelta, timezone
from decimal import Decimal, InvalidOperation
from typing import Final

from otel_limits.ledger.rows import MICROSECONDS

DURATION: Final = re.compile(r"(\d+)([smhdw])")
UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def duration(text: str) -> timedelta:
    """Read `30m`, `12h`, `7d` or `2w`.

    Raises:
        ArgumentTypeError: It is none of these.
    """
    found = DURATION.fullmatch(text.strip())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is no duration such as 30m, 12h, 7d or 2w.")
    try:
        return timedelta(**{UNITS[found[2]]: int(found[1])})
    except OverflowError:
        raise ArgumentTypeError(f"{text!r} is longer than any ledger.") from None


def moment(text: str) -> int:
    """Read a time, as microseconds since the epoch: `7d` ago, or an ISO date or time, in UTC.

    Raises:
        ArgumentTypeError: It is none of these.
    """
    try:
        if DURATION.fullmatch(text.strip()):
            return to_microseconds(datetime.now(timezone.utc) - duration(text))
        found = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except (ValueError, OverflowError):
        raise ArgumentTypeError(
            f"{text!r} is no time: write 7d for seven days ago, 2026-11-01 or 2026-11-01T12:00."
        ) from None
    return to_microseconds(found if found.tzinfo else found.replace(tzinfo=timezone.utc))


def to_microseconds(when: datetime) -> int:
    """Whole microseconds since the epoch."""
    return round(when.timestamp() * MICROSECONDS)


def condition(text: str) -> tuple[str, str]:
    """Read `tenant.id=acme`.

    Raises:
        ArgumentTypeError: It is no name and value.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ArgumentTypeError(f"{text!r} is no condition such as tenant.id=acme or agent=res*.")
    return name.strip(), value


def properties(text: str) -> tuple[str, ...]:
    """Read `agent,model,day`.

    Raises:
        ArgumentTypeError: There is nothing in it.
    """
    names = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not names:
        raise ArgumentTypeError("name at least one property to group by, such as agent.")
    return names


def cap(text: str) -> int:
    """Read a limit.

    Raises:
        ArgumentTypeError: It is no whole number of 1 or more.
    """
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ArgumentTypeError(f"a limit is a whole number of 1 or more, got {text!r}.")
    return int(text)


def usd(text: str) -> Decimal:
    """Read an amount of money.

    Raises:
        ArgumentTypeError: It is no amount above 0.
    """
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal(0)
    if not amount.is_finite() or amount <= 0:
        raise ArgumentTypeError(f"an amount of USD is a number above 0, got {text!r}.")
    return amount


def share(text: str) -> float:
    """Read a part of 1, as `0.01` or `1%`.

    Raises:
        ArgumentTypeError: It is no number of 0 or more.
    """
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"a share is a number such as 0.01 or 1%, got {text!r}.")
    return value


def identity(text: str) -> str:
    """Read the beginning of a trace or invocation id.

    Raises:
        ArgumentTypeError: It is too short, or not hexadecimal.
    """
    if not re.fullmatch(r"[0-9a-f]{8,32}", text.lower()):
        raise ArgumentTypeError(
            f"{text!r} is no trace id or invocation id: write its 32 hexadecimal digits, or the "
            f"first 8 or more of them."
        )
    return text.lower()
