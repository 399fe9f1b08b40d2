"""Quota windows: calendar units, durations and time zones."""

from __future__ import annotations

import zoneinfo
from datetime import datetime, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.quotas.windows import CALENDAR, Window, Windows

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


@given(st.sampled_from(CALENDAR), ZONES, MOMENTS)
def test_every_moment_is_in_one_window_and_the_next_begins_where_it_ends(
    rule: str, zone: str, moment: int
) -> None:
    """Calendar units of every time zone follow each other without gaps or overlaps."""
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
        ("hour", "Asia/Kolkata", "2026-05-01T05:29:00", ("05-01 05:00", "05-01 06:00")),
        ("hour", "Australia/Lord_Howe", "2026-10-04T23:45:00", ("10-04 23:30", "10-05 00:00")),
        ("week", "UTC", "2026-11-29T23:59:59", ("11-23 00:00", "11-30 00:00")),
        ("week", "Europe/Berlin", "2026-03-29T12:00:00", ("03-23 00:00", "03-30 00:00")),
        ("week", "UTC", "2027-01-01T12:00:00", ("12-28 00:00", "01-04 00:00")),
        ("quarter", "UTC", "2026-12-31T12:00:00", ("10-01 00:00", "01-01 00:00")),
        ("quarter", "America/New_York", "2026-03-31T23:59:59", ("01-01 00:00", "04-01 00:00")),
        ("year", "Asia/Tokyo", "2028-02-29T12:00:00", ("01-01 00:00", "01-01 00:00")),
        ("P7D", "UTC", "1970-01-08T00:00:00", ("01-08 00:00", "01-15 00:00")),
    ],
)
def test_a_window_is_where_the_calendar_has_it(
    rule: str, zone: str, moment: str, window: tuple[str, str]
) -> None:
    """Leap days, weeks from Monday, clock changes, and the ends of months and years."""
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


@pytest.mark.parametrize("rule", ["", "P", "PT", "P0D", "PT0S", "P2M", "P367D", "P99999999999999W"])
def test_invalid_window_is_rejected_with_the_valid_ones(rule: str) -> None:
    """Empty, endless and unsupported calendar durations are not windows."""
    with pytest.raises(
        ValueError,
        match=r"^window must be hour, day, week, month, quarter or year, or an ISO duration .* got "
        r"'\w*'\.$",
    ):
        Windows(rule)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("daily", "day"),
        ("Day", "day"),
        ("days", "day"),
        ("1d", "day"),
        ("weekly", "week"),
        ("quaterly", "quarter"),
        ("annual", "year"),
        ("hourly", "hour"),
        ("1h", "hour"),
        ("24h", "PT24H"),
        ("24 hours", "PT24H"),
        ("7d", "P7D"),
        ("15m", "PT15M"),
        ("per minute", "PT1M"),
        ("60s", "PT60S"),
        ("pt1h", "PT1H"),
        ("P1M", "month"),
        ("P3M", "quarter"),
        ("12M", "year"),
        ("P1Y", "year"),
    ],
)
def test_near_miss_of_a_window_is_named(written: str, meant: str) -> None:
    """Other products write windows differently: the right word saves a look at the manual."""
    with pytest.raises(ValueError, match=rf"got '{written}'\. Did you mean {meant}\?$"):
        Windows(written)
    Windows(meant)


@pytest.mark.parametrize("zone", ["", "Mars/Olympus", "../etc/passwd", "Europe"])
def test_a_zone_that_does_not_exist_is_refused(zone: str) -> None:
    """So is a path."""
    with pytest.raises(
        ValueError, match=r"time_zone must be a time zone, e\.g\. UTC or Europe/Berlin"
    ):
        Windows("day", zone)


@pytest.mark.parametrize("rule", ["PT1H", "P7D"])
def test_time_zone_with_a_duration_is_rejected(rule: str) -> None:
    """Durations are counted in UTC, whatever zone the author expects."""
    with pytest.raises(ValueError, match=r"time_zone needs the window hour, .* or year, got"):
        Windows(rule, "Europe/Berlin")
