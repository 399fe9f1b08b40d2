"""Days, weeks and months of a time zone: by which calls are selected and grouped."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.cli import main
from otel_limits.core.errors import LedgerError
from otel_limits.ledger.calendar import PERIODS, label, span
from otel_limits.ledger.rows import MICROSECONDS
from tests.ledger.book import Call, Entry, write

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

LATE = datetime(2026, 11, 22, 22, 30, tzinfo=timezone.utc).timestamp()
"""Still the 22nd in UTC, the 22nd at 23:30 in Berlin, the 23rd in Kathmandu."""
LATER = LATE + 3600


@pytest.fixture
def night(ledger: LedgerFile) -> LedgerFile:
    """100 tokens before midnight in Berlin, 200 after it, on the last Sunday of a week."""
    write(
        ledger.address,
        Entry(calls=[Call(input=100, output=0)], at=LATE),
        Entry(calls=[Call(input=200, output=0)], at=LATER),
    )
    return ledger


Output = pytest.CaptureFixture[str]


def tokens(capsys: Output, *arguments: str) -> list[tuple[Any, ...]]:
    """Groups and their tokens."""
    assert main(["audit", "spend", "--format", "json", *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)["spend"]
    return [(*(row[name] for name in PERIODS if name in row), row["tokens"]) for row in rows]


@pytest.mark.parametrize(
    "condition", ["day=2026-11-22", "month=2026-11", "week=2026-W47", "hour=2026-11-22 22:00"]
)
def test_a_period_selects_its_calls(night: LedgerFile, capsys: Output, condition: str) -> None:
    """In UTC both calls are of that day, week and month, and one of that hour."""
    wanted = 100 if condition.startswith("hour") else 300
    assert tokens(capsys, "--by", "agent", "--where", condition) == [(wanted,)]


def test_two_days_are_either_of_them(night: LedgerFile, capsys: Output) -> None:
    """As with every other name that is given twice."""
    zone = ("--time-zone", "Europe/Berlin", "--by", "agent")
    days = ("--where", "day=2026-11-22", "--where", "day=2026-11-23")
    assert tokens(capsys, *zone, *days) == [(300,)]


@pytest.mark.parametrize("question", ["stops", "suggest"])
def test_other_questions_know_days(night: LedgerFile, capsys: Output, question: str) -> None:
    """Invocations are of the day on which they began."""
    more = ("--where", "day=2026-11-23", "--time-zone", "Europe/Berlin")
    assert main(["audit", question, "--format", "json", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    if question == "stops":
        assert found["totals"]["stops"]["invocations"] == 1


@pytest.mark.parametrize("name", ["day", "week", "month"])
def test_days_are_those_of_the_zone(
    night: LedgerFile, capsys: Output, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Midnight in Berlin is 23:00 in UTC, and there a Monday and a week began."""
    monkeypatch.setenv("OTEL_LIMITS_TIME_ZONE", "Europe/Berlin")
    groups = {
        "day": [("2026-11-22", 100), ("2026-11-23", 200)],
        "week": [("2026-W47", 100), ("2026-W48", 200)],
        "month": [("2026-11", 300)],
    }
    assert tokens(capsys, "--by", name) == groups[name]
    assert tokens(capsys, "--by", f"{name},agent,provider") == groups[name]
    assert tokens(capsys, "--by", name, "--time-zone", "UTC")[0][-1] == 300


def test_zones_of_quarters_of_an_hour(night: LedgerFile, capsys: Output) -> None:
    """Kathmandu is 5:45 before UTC: its 23rd began at 18:15."""
    zone = ("--time-zone", "Asia/Kathmandu")
    assert tokens(capsys, "--by", "hour", *zone) == [
        ("2026-11-23 04:00", 100),
        ("2026-11-23 05:00", 200),
    ]


@pytest.mark.parametrize(
    ("since", "found"),
    [("2026-11-23", 200), ("2026-11-23T00:00", 200), ("2026-11-22T22:00Z", 300)],
)
def test_a_time_without_an_offset_is_of_the_zone(
    night: LedgerFile, capsys: Output, since: str, found: int
) -> None:
    """One with an offset stays what it is."""
    more = ("--by", "agent", "--since", since, "--time-zone", "Europe/Berlin")
    assert tokens(capsys, *more) == [(found,)]


@pytest.mark.parametrize("condition", ["day=tomorrow", "day=2026-11-*", "month=9999-13", "week=x"])
def test_invalid_day_is_rejected(night: LedgerFile, capsys: Output, condition: str) -> None:
    """With a sentence that has the name and an example, never with 0 rows."""
    assert main(["audit", "spend", "--where", condition]) == 2
    name, _, value = condition.partition("=")
    assert f"{name} must be like {PERIODS[name]}, got '{value}'." in capsys.readouterr().err


def test_an_unknown_zone_is_refused(night: LedgerFile, capsys: Output) -> None:
    """The option is named."""
    assert main(["audit", "spend", "--time-zone", "Mars/Base"]) == 2
    assert "--time-zone must be a time zone, e.g. UTC or Europe/Berlin" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["99", "99%", "0.99"])
def test_a_percentile_as_people_write_it(night: LedgerFile, capsys: Output, text: str) -> None:
    """99 is the 99th percentile."""
    assert main(["audit", "suggest", "--percentile", text]) == 0
    assert "99%" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "101", "nan", "x", "-1"])
def test_invalid_percentile_is_rejected(capsys: Output, text: str) -> None:
    """With its bounds, not with a traceback."""
    with pytest.raises(SystemExit):
        main(["audit", "suggest", f"--percentile={text}"])
    assert "a percentile above 0 and up to 100" in capsys.readouterr().err


ZONES = ("UTC", "Europe/Berlin", "Asia/Kathmandu", "America/New_York", "Australia/Lord_Howe")


@given(
    st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1)),  # noqa: DTZ001
    st.sampled_from(ZONES),
    st.sampled_from(sorted(PERIODS)),
)
def test_every_time_is_in_the_period_of_its_name(when: datetime, zone: str, name: str) -> None:
    """Across clock changes, grouping by a period and selecting it mean the same."""
    moment = when.replace(tzinfo=timezone.utc)
    local = moment.astimezone(ZoneInfo(zone))
    begin, end = span(name, label(name, local), ZoneInfo(zone))
    assert begin <= moment.timestamp() * MICROSECONDS < end


def test_the_last_month_of_the_calendar_is_refused() -> None:
    """The next one has no name."""
    with pytest.raises(LedgerError, match="month must be"):
        span("month", "9999-12", timezone.utc)
