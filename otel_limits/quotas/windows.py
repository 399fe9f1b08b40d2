"""Time windows of quotas: calendar units and durations."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import ClassVar, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from otel_limits.core.secrets import quote_value
from otel_limits.core.wording import closest_match

UTC: Final = "UTC"
HOUR_SECONDS: Final = 3600
DAY_SECONDS: Final = 86_400
WEEK_DAYS: Final = 7
# A leap year. Bounded, because a store keeps a count for as long as its window.
LONGEST_DAYS: Final = 366

DURATION: Final = re.compile(
    r"P(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?"
    r"(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+)S)?)?"
)
MONTHS: Final[Mapping[str, int]] = {"month": 1, "quarter": 3, "year": 12}
MONTH_SECONDS: Final = 2_629_746
UNIT_SECONDS: Final = {
    "hour": HOUR_SECONDS,
    "day": DAY_SECONDS,
    "week": WEEK_DAYS * DAY_SECONDS,
}
CALENDAR: Final = (*UNIT_SECONDS, *MONTHS)
CALENDAR_TEXT: Final = f"{', '.join(CALENDAR[:-1])} or {CALENDAR[-1]}"

# A number and a unit, as other products write durations. "M" is a month, "m" a minute.
SPOKEN: Final = re.compile(
    r"(?:per |every |[Pp])?(?P<number>\d*) ?(?:(?P<S>s|sec|seconds?)|(?P<minutes>m|min|minutes?)"
    r"|(?P<H>h|hr|hrs|hours?)|(?P<D>d|days?)|(?P<W>w|wk|weeks?)|(?P<months>M|mo|mon|months?)"
    r"|(?P<quarters>q|Q|quarters?)|(?P<years>y|Y|yr|years?))"
)
ADVERBS: Final = {"daily": "day", "annual": "year", **{f"{each}ly": each for each in CALENDAR}}


@dataclass(frozen=True, slots=True)
class Window:
    """A time interval, identified by its start: workers with the same start share a count."""

    start: int
    """First second in it, since the epoch."""
    end: int
    """First second after it."""

    def __contains__(self, seconds: float) -> bool:
        """Return whether it contains a time, in seconds since the epoch."""
        return self.start <= seconds < self.end


@dataclass(frozen=True, slots=True)
class Windows:
    """A rule that divides time into windows without gaps or overlap.

    Calendar units begin at midnight in a time zone, so one with a clock change is shorter or
    longer. Weeks begin on Monday, and hours are counted from midnight. Durations are counted from
    the epoch in UTC.

    Raises:
        ValueError: The rule or the time zone is not valid, or the two don't go together.
    """

    rule: str
    """A unit of `CALENDAR`, or an ISO 8601 duration such as `PT15M` or `P7D`."""
    time_zone: str = UTC

    def __post_init__(self) -> None:
        """Reject invalid rules."""
        zone_of(self.time_zone)
        if self.rule in CALENDAR:
            return
        length_of(self.rule)
        if self.time_zone != UTC:
            raise ValueError(
                f"time_zone needs the window {CALENDAR_TEXT}, got {quote_value(self.rule)}. "
                "Use one of them, or remove time_zone: durations are counted in UTC."
            )

    @property
    def mean_seconds(self) -> int:
        """Their average length; a month is a twelfth of a year of 365.2425 days."""
        if self.rule in MONTHS:
            return MONTHS[self.rule] * MONTH_SECONDS
        return UNIT_SECONDS.get(self.rule) or length_of(self.rule)

    def at(self, seconds: float) -> Window:
        """Return the window around a time, in seconds since the epoch."""
        if self.rule not in CALENDAR:
            # From the epoch, so that workers agree without communicating.
            length = length_of(self.rule)
            start = int(seconds // length) * length
            return Window(start, start + length)
        return self._calendar(seconds)

    def _calendar(self, seconds: float) -> Window:
        """Return the calendar unit around a time."""
        zone = zone_of(self.time_zone)
        today = datetime.fromtimestamp(seconds, zone).date()
        first = self._first(today)
        # Where the zone skipped or repeated midnight, a time may be in the window before or after.
        for begin in (first, self._step(first, 1), self._step(first, -1)):
            window = Window(_midnight(begin, zone), _midnight(self._step(begin, 1), zone))
            if seconds in window:
                return window if self.rule != "hour" else _hour_of(window, seconds)
        raise AssertionError("no window holds this time")  # pragma: no cover

    def _first(self, day: date) -> date:
        """Return the first day of the unit around a day; an hour is found within its day."""
        if self.rule == "week":
            return day - timedelta(days=day.weekday())
        if self.rule in MONTHS:
            months = MONTHS[self.rule]
            return day.replace(month=(day.month - 1) // months * months + 1, day=1)
        return day

    def _step(self, begin: date, steps: int) -> date:
        if self.rule not in MONTHS:
            return begin + timedelta(days=steps * (WEEK_DAYS if self.rule == "week" else 1))
        months = begin.year * 12 + begin.month - 1 + steps * MONTHS[self.rule]
        return date(months // 12, months % 12 + 1, 1)


@dataclass(frozen=True, slots=True)
class UnboundedWindow:
    """A window that never ends, for concurrency and token buckets."""

    mean_seconds: ClassVar = 1
    """The same for all of them, so that amounts can be compared."""

    def at(self, seconds: float) -> Window:
        """Return a window that starts at the epoch and lasts at least another day.

        It has an end so that stores can drop unused counts; its start identifies it.
        """
        return Window(0, (int(seconds) // DAY_SECONDS + 2) * DAY_SECONDS)


def zone_of(name: str, setting: str = "time_zone") -> ZoneInfo:
    """Return the time zone named by `setting`.

    Raises:
        ValueError: The time zone database has no such name.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        near = closest_match(name, available_timezones())
        hint = f" Did you mean {near}?" if near else ""
        raise ValueError(
            f"{setting} must be a time zone, e.g. UTC or Europe/Berlin, "
            f"got {quote_value(name)}.{hint}"
        ) from None


@functools.cache
def length_of(rule: str) -> int:
    """Return the seconds of a window of fixed length.

    Raises:
        ValueError: It is not a duration, or its length is 0 or more than 366 days.
    """
    length = _seconds(rule)
    if not length:
        near = _suggest_window(rule)
        hint = f" Did you mean {near}?" if near else ""
        raise ValueError(
            f"window must be {CALENDAR_TEXT}, or an ISO duration in weeks, days, hours, minutes "
            f"and seconds of up to {LONGEST_DAYS} days, such as PT15M or P7D, "
            f"got {quote_value(rule)}.{hint}"
        )
    return length


def _seconds(rule: str) -> int:
    """Return the seconds of an ISO duration; 0 if it is not a valid window."""
    match = DURATION.fullmatch(rule)
    parts = {name: int(text) for name, text in match.groupdict("0").items()} if match else {}
    # Checked first, because huge numbers overflow a timedelta.
    is_sane = max(parts.values(), default=0) <= LONGEST_DAYS * DAY_SECONDS
    length = int(timedelta(**parts).total_seconds()) if is_sane else 0
    return length if length <= LONGEST_DAYS * DAY_SECONDS else 0


def _suggest_window(text: str) -> str | None:
    """Return the window that a misspelled one probably means."""
    match = SPOKEN.fullmatch(text) or SPOKEN.fullmatch(text.casefold())
    if match is None:
        near = closest_match(text, (*CALENDAR, *ADVERBS))
        return text.upper() if _seconds(text.upper()) else ADVERBS.get(near or "", near)
    unit, number = match.lastgroup, int(match["number"] or 1)
    if unit in ("months", "quarters", "years"):
        months = number * {"months": 1, "quarters": 3, "years": 12}[unit]
        return next((name for name, length in MONTHS.items() if length == months), None)
    if number == 1 and unit in ("H", "D", "W"):
        return {"H": "hour", "D": "day", "W": "week"}[unit]
    time = "" if unit in ("D", "W") else "T"
    near = f"P{time}{number}{'M' if unit == 'minutes' else unit}"
    return near if _seconds(near) else None


def shown_time(seconds: float) -> str:
    """Format a time, in seconds since the epoch, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _midnight(day: date, zone: ZoneInfo) -> int:
    """Return the first second of `day`, also if midnight was skipped."""
    local = datetime(day.year, day.month, day.day, tzinfo=zone)
    # Via UTC: `zoneinfo` (PEP 495) interprets a skipped time with the offset before the change.
    return int(local.astimezone(timezone.utc).timestamp())


def _hour_of(day: Window, seconds: float) -> Window:
    """Return the hour around a time: the last one ends with its day."""
    start = day.start + int(seconds - day.start) // HOUR_SECONDS * HOUR_SECONDS
    return Window(start, min(start + HOUR_SECONDS, day.end))
