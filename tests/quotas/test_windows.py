"""Quota windows: calendar units, durations and time zones."""

from __future__ import annotations

import zoneinfo
from datetime import datetime, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.quotas.windows import Window, Windows

DAY = 86_400
MOMENTS = st.integers(min_value=0, max_value=4_000_000_000)
ZONES = st.sampled_from(sorted(zoneinfo.available_timezones() - {"localtime"}))


def at(text: str, zone: str = "UTC") -> float:
    """Seconds since the epoch at a local time."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def shown(window: Window, zone: str = "UTC") -> tuple[str, str]:
    """Start and end in local time."""
    begin, end = (
        datetime.fromtimestamp(each, timezone.utc).astimezone(ZoneInfo(zone))
        for each in (window.start, window.end)
    )
    return begin.strftime("%m-%d %H:%M"), end.strftime("%m-%d %H:%M")


@given(st.sampled_from(["day", "month"]), ZONES, MOMENTS)
def test_every_moment_is_in_one_window_and_the_next_begins_where_it_ends(
    rule: str, zone: str, moment: int
) -> None:
    """Days and months of every time zone follow each other without gaps or overlaps."""
    windows = Windows(rule, zone)
    window = windows.at(moment)
    assert moment in window
    assert windows.at(window.start) == window == windows.at(window.end - 1)
    assert windows.at(window.end).start == window.end
    assert windows.at(window.start - 1).end == window.start


@given(st.sampled_from(["hour", "PT1S", "PT15M", "PT90M", "P7D", "P1DT12H", "P2W"]), MOMENTS)
def test_durations_follow_each_other(rule: str, moment: int) -> None:
    """So do windows of a fixed length."""
    windows = Windows(rule)
    window = windows.at(moment)
    assert moment in window
    assert windows.at(window.end).start == window.end
    assert windows.at(window.start - 1).end == window.start


@pytest.mark.parametrize(
    ("rule", "zone", "moment", "window"),
    [
        ("hour", "UTC", "2026-03-29T01:59:59", ("03-29 01:00", "03-29 02:00")),
        ("day", "UTC", "2026-12-31T23:59:59", ("12-31 00:00", "01-01 00:00")),
        ("day", "Asia/Kolkata", "2026-05-01T05:29:00", ("05-01 00:00", "05-02 00:00")),
        ("month", "UTC", "2026-02-28T23:59:59", ("02-01 00:00", "03-01 00:00")),
        ("month", "UTC", "2028-02-29T12:00:00", ("02-01 00:00", "03-01 00:00")),
        ("month", "UTC", "2026-12-31T12:00:00", ("12-01 00:00", "01-01 00:00")),
        ("month", "America/New_York", "2026-03-31T23:00:00", ("03-01 00:00", "04-01 00:00")),
        ("P7D", "UTC", "1970-01-08T00:00:00", ("01-08 00:00", "01-15 00:00")),
    ],
)
def test_a_window_is_where_the_calendar_has_it(
    rule: str, zone: str, moment: str, window: tuple[str, str]
) -> None:
    """Hours, days, leap days and the ends of months and years."""
    assert shown(Windows(rule, zone).at(at(moment, zone)), zone) == window


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", "2026-03-29T12:00:00", 23),
        ("Europe/Berlin", "2026-10-25T12:00:00", 25),
        ("Europe/Berlin", "2026-06-01T12:00:00", 24),
        ("Australia/Lord_Howe", "2026-10-04T12:00:00", 23.5),
        ("Africa/Cairo", "2026-04-24T12:00:00", 23),
        ("America/Havana", "2026-11-01T12:00:00", 25),
    ],
)
def test_a_day_in_which_the_clocks_change_is_shorter_or_longer(
    zone: str, day: str, hours: float
) -> None:
    """Also where midnight itself is skipped (Cairo) or repeated (Havana)."""
    window = Windows("day", zone).at(at(day, zone))
    assert window.end - window.start == hours * 3600


def test_a_window_around_the_change_of_clocks_is_one_window() -> None:
    """Both passes through the repeated hour count together."""
    windows = Windows("day", "Europe/Berlin")
    first = at("2026-10-25T00:30:00", "UTC")
    assert windows.at(first) == windows.at(first + 3600)


@pytest.mark.parametrize(
    "rule",
    ["", "week", "P", "PT", "P0D", "PT0S", "P1M", "P1Y", "1h", "P367D", "P99999999999999W", "pt1h"],
)
def test_invalid_window_is_rejected(rule: str) -> None:
    """Empty, endless and calendar durations are not windows."""
    with pytest.raises(ValueError, match="window must be hour, day, month, or an ISO duration"):
        Windows(rule)


@pytest.mark.parametrize("zone", ["", "Mars/Olympus", "../etc/passwd", "Europe"])
def test_a_zone_that_does_not_exist_is_refused(zone: str) -> None:
    """So is a path."""
    with pytest.raises(
        ValueError, match=r"time_zone must be a time zone, e\.g\. UTC or Europe/Berlin"
    ):
        Windows("day", zone)


@pytest.mark.parametrize("rule", ["hour", "PT15M"])
def test_a_zone_needs_a_calendar(rule: str) -> None:
    """Hours and durations are counted in UTC."""
    with pytest.raises(ValueError, match="a time zone needs the window day or month"):
        Windows(rule, "Europe/Berlin")
