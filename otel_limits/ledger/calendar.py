"""Hours, days, weeks and months of a time zone: their bounds and names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import Final

from otel_limits.core.errors import LedgerError
from otel_limits.core.secrets import quote_value
from otel_limits.ledger.rows import MICROSECONDS

QUARTER: Final = "(quarter)"
"""Quarters of an hour since the epoch; no audit key can have this name. All zones differ from UTC
by whole quarters, so the days of any zone consist of them."""
QUARTER_SECONDS: Final = 15 * 60

PERIODS: Final[Mapping[str, str]] = {
    "hour": "2026-11-22 09:00",
    "day": "2026-11-22",
    "week": "2026-W47",
    "month": "2026-11",
}
"""Periods, with an example of each."""


def label(name: str, local: datetime) -> str:
    """Name the hour, day, week (ISO 8601) or month of a time."""
    if name == "hour":
        return f"{local:%Y-%m-%d %H}:00"
    if name == "week":
        # By the ISO year: the last days of December may belong to week 1 of the next year.
        year, week, _ = local.isocalendar()
        return f"{year}-W{week:02}"
    return f"{local:%Y-%m}" if name == "month" else f"{local:%Y-%m-%d}"


def span(name: str, value: str, zone: tzinfo) -> tuple[int, int]:
    """Return the first microsecond of a period, and of the next one.

    Raises:
        LedgerError: It is not the name of one.
    """
    try:
        begin, end = BOUNDS[name](value)
        return _microseconds(begin, zone), _microseconds(end, zone)
    # AttributeError: a week that does not match its pattern has no groups.
    except (ValueError, OverflowError, AttributeError):
        raise LedgerError(
            f"{name} must be like {PERIODS[name]}, got {quote_value(value)}."
        ) from None


def kind_of(text: str) -> str | None:
    """Return which kind of period a text names: hour, day, week or month."""
    for name, bounds in BOUNDS.items():
        with contextlib.suppress(ValueError, OverflowError, AttributeError):
            # Formatted back, as `strptime` accepts 2026-1 for 2026-01, and a query must be
            # unambiguous.
            if label(name, bounds(text)[0]) == text:
                return name
    return None


def _microseconds(local: datetime, zone: tzinfo) -> int:
    # By way of UTC: `zoneinfo` (PEP 495) reads a skipped time as one before the change.
    utc = local.replace(tzinfo=zone).astimezone(timezone.utc)
    return round(utc.timestamp()) * MICROSECONDS


def _hour(text: str) -> tuple[datetime, datetime]:
    begin = datetime.strptime(text, "%Y-%m-%d %H:00")  # noqa: DTZ007  its zone is added later
    return begin, begin + timedelta(hours=1)


def _day(text: str) -> tuple[datetime, datetime]:
    begin = datetime.strptime(text, "%Y-%m-%d")  # noqa: DTZ007
    return begin, begin + timedelta(days=1)


def _week(text: str) -> tuple[datetime, datetime]:
    year, week = re.fullmatch(r"(\d{4})-W(\d\d)", text).groups()  # type: ignore[union-attr]
    begin = datetime.combine(date.fromisocalendar(int(year), int(week), 1), datetime.min.time())
    return begin, begin + timedelta(weeks=1)


def _month(text: str) -> tuple[datetime, datetime]:
    begin = datetime.strptime(text, "%Y-%m")  # noqa: DTZ007
    # In months since the year 0, so that January follows December.
    months = begin.year * 12 + begin.month
    return begin, begin.replace(year=months // 12, month=months % 12 + 1)


BOUNDS: Final[Mapping[str, Callable[[str], tuple[datetime, datetime]]]] = {
    "hour": _hour,
    "day": _day,
    "week": _week,
    "month": _month,
}
