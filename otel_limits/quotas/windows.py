"""Time windows of quotas: hours, days, months and durations."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from otel_limits.core.secrets import redact_url
from otel_limits.core.wording import closest_match

UTC: Final = "UTC"
HOUR_SECONDS: Final = 3600
DAY_SECONDS: Final = 86_400
# A leap year. Bounded, because a store keeps a count for as long as its window.
LONGEST_DAYS: Final = 366

DURATION: Final = re.compile(
    r"P(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?"
    r"(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+)S)?)?"
)
CALENDAR: Final = ("day", "month")


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

    Days and months begin at midnight in a time zone, so one with a clock change is shorter or
    longer. Hours and durations are counted from the epoch in UTC.

    Raises:
        ValueError: The rule or the time zone is not valid, or the two don't go together.
    """

    rule: str
    """`hour`, `day`, `month`, or an ISO 8601 duration such as `PT15M` or `P7D`."""
    time_zone: str = UTC

    def __post_init__(self) -> None:
        """Reject invalid rules."""
        zone_of(self.time_zone)
        if self.rule in CALENDAR:
            return
        length_of(self.rule)
        if self.time_zone != UTC:
            raise ValueError(
                f"a time zone needs the window day or month, got {self.rule!r}. "
                f"Leave time_zone out: hours and durations are counted in UTC."
            )

    def at(self, seconds: float) -> Window:
        """Return the window around a time, in seconds since the epoch."""
        if self.rule not in CALENDAR:
            # From the epoch, so that workers agree without communicating.
            length = length_of(self.rule)
            start = int(seconds // length) * length
            return Window(start, start + length)
        return self._calendar(seconds)

    def _calendar(self, seconds: float) -> Window:
        """Return the day or month around a time."""
        zone = zone_of(self.time_zone)
        today = datetime.fromtimestamp(seconds, zone).date()
        first = today.replace(day=1) if self.rule == "month" else today
        # Where the zone skipped or repeated midnight, a time may be in the window before or after.
        for begin in (first, self._step(first, 1), self._step(first, -1)):
            window = Window(_midnight(begin, zone), _midnight(self._step(begin, 1), zone))
            if seconds in window:
                return window
        raise AssertionError("no window holds this time")  # pragma: no cover

    def _step(self, begin: date, steps: int) -> date:
        if self.rule == "day":
            return begin + timedelta(days=steps)
        months = begin.year * 12 + begin.month - 1 + steps
        return date(months // 12, months % 12 + 1, 1)


@dataclass(frozen=True, slots=True)
class UnboundedWindow:
    """A window that never ends, for concurrency."""

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
            f"got {redact_url(name)!r}.{hint}"
        ) from None


@functools.cache
def length_of(rule: str) -> int:
    """Return the seconds of a window of fixed length.

    Raises:
        ValueError: It is not a rule, or its length is 0 or more than 366 days.
    """
    if rule == "hour":
        return HOUR_SECONDS
    match = DURATION.fullmatch(rule)
    parts = {name: int(text) for name, text in match.groupdict("0").items()} if match else {}
    # Checked first, because huge numbers overflow a timedelta.
    is_sane = max(parts.values(), default=0) <= LONGEST_DAYS * 86_400
    length = int(timedelta(**parts).total_seconds()) if is_sane else 0
    if not 0 < length <= LONGEST_DAYS * 86_400:
        raise ValueError(
            "window must be hour, day, month, or an ISO duration in weeks, days, hours, minutes "
            f"and seconds of up to {LONGEST_DAYS} days, such as PT15M or P7D, got {rule!r}."
        )
    return length


def shown_time(seconds: float) -> str:
    """Format a time, in seconds since the epoch, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _midnight(day: date, zone: ZoneInfo) -> int:
    """Return the first second of `day`, also if midnight was skipped."""
    local = datetime(day.year, day.month, day.day, tzinfo=zone)
    # Via UTC: `zoneinfo` (PEP 495) interprets a skipped time with the offset before the change.
    return int(local.astimezone(timezone.utc).timestamp())
