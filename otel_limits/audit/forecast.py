"""Forecast of spend by the end of the day, the week and the month, with an interval.

It is based on the last four weeks: what each day spent in total, and after the current time of day;
by day of the week if there are three of each. The interval is the prediction interval of Student's
t for the sum of the remaining days, which are assumed independent. With fewer than seven whole days
there is no forecast.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Forecast, Projection, column_texts
from otel_limits.audit.parsing import to_microseconds
from otel_limits.audit.survival import Z
from otel_limits.core.wording import pluralize
from otel_limits.ledger.calendar import PERIODS, QUARTER_SECONDS, label, span
from otel_limits.ledger.rows import MICROSECONDS, dollars

if TYPE_CHECKING:
    from otel_limits.audit.question import AuditQuery

HISTORY_DAYS: Final = 28
ENOUGH_DAYS: Final = 7
BY_WEEKDAY: Final = 21
"""Days from which each day of the week has its own mean."""
PERIODS_AHEAD: Final = ("day", "week", "month")


def forecast(inquiry: AuditQuery) -> Forecast | None:
    """Forecast spend; `None` for a selection of the past."""
    from otel_limits.ledger import spending

    selection = inquiry.selection
    # A part of a day does not predict its rest.
    if selection.until_us is not None or any(each.name in PERIODS for each in selection.where):
        return None
    now = datetime.fromtimestamp(time.time(), selection.zone)
    since = min(midnight(now, -HISTORY_DAYS), *(bounds(each, now)[0] for each in PERIODS_AHEAD))
    until = to_microseconds(now)
    part = replace(selection, since_us=since, until_us=until)
    groups = list(spending.by_quarter(inquiry.connection, part))
    is_money = any(pico is not None for _, pico, _, _ in groups)
    spent = {
        int(quarter): int((pico if is_money else tokens) or 0)
        for quarter, pico, tokens, _ in groups
    }
    has_unpriced = is_money and any(unpriced for *_, unpriced in groups)
    return build_forecast(spent, now, is_money=is_money, has_unpriced=has_unpriced)


def build_forecast(
    spent: Mapping[int, int], now: datetime, *, is_money: bool, has_unpriced: bool = False
) -> Forecast:
    """Build a forecast from the spend of each quarter hour since the epoch."""
    days = PastDays(spent, now)
    # Fewer would not include each day of the week.
    if len(days.wholes) < ENOUGH_DAYS:
        seen = pluralize(len(days.wholes), "whole day")
        return Forecast(f"No forecast: {seen} of spend in the last four weeks, at least 7 needed.")
    ahead = [_projection(name, days, spent, is_money=is_money) for name in PERIODS_AHEAD]
    kind: Any = "money" if is_money else "count"
    parts = [_in_words(each, kind) for each in ahead]
    more = " Excludes calls without a known price." if has_unpriced else ""
    sentence = (
        f"Forecast: {', '.join(parts)}; 95% intervals, from {len(days.wholes)} whole days.{more}"
    )
    return Forecast(sentence, "usd" if is_money else "tokens", len(days.wholes), ahead)


def _in_words(projection: Projection, kind: Any) -> str:
    """Format a projection with its interval, all amounts with the same number of decimals."""
    expected, low, high = column_texts([projection.expected, projection.low, projection.high], kind)
    unit = "" if kind == "money" else " tokens"
    interval = "" if low == high else f" ({low} to {high})"
    return f"{expected}{unit} by the end of the {projection.period}{interval}"


def midnight(now: datetime, days: int = 0) -> int:
    """Return the start of a day, in microseconds since the epoch."""
    return span("day", f"{now + timedelta(days=days):%Y-%m-%d}", now.tzinfo or timezone.utc)[0]


def bounds(period: str, now: datetime) -> tuple[int, int]:
    """Return the first microsecond of the current period, and of the next one."""
    return span(period, label(period, now), now.tzinfo or timezone.utc)


class PastDays:
    """Spend of past days, in total and after the current time of day."""

    def __init__(self, spent: Mapping[int, int], now: datetime) -> None:
        """Add up quarter hours."""
        self.now, zone = now, now.tzinfo or timezone.utc
        today, first = now.date(), now.date() - timedelta(days=HISTORY_DAYS)
        wholes: dict[date, float] = {}
        rests: dict[date, float] = {}
        for quarter, amount in sorted(spent.items()):
            begin = datetime.fromtimestamp(quarter * QUARTER_SECONDS, zone)
            if first <= begin.date() < today:
                wholes[begin.date()] = wholes.get(begin.date(), 0.0) + amount
                rest = amount * _part_after(begin, now)
                rests[begin.date()] = rests.get(begin.date(), 0.0) + rest
        # The first day may precede the start of recording. Later days count even without spend.
        begun = min(wholes, default=today)
        counted = [begun + timedelta(days=n) for n in range(1, (today - begun).days)]
        self.wholes = {day: wholes.get(day, 0.0) for day in counted}
        self.rests = {day: rests.get(day, 0.0) for day in counted}

    def ahead(self, until: datetime) -> Sequence[date]:
        """List the whole days before `until`, which is a midnight."""
        left = (until.date() - self.now.date()).days
        return [self.now.date() + timedelta(days=n) for n in range(1, left)]


def _part_after(begin: datetime, now: datetime) -> float:
    """Return which fraction of a quarter hour is after the current time of day."""
    # By time of day, so that clock changes shift the rest of a day with it.
    at = (now.hour * 60 + now.minute) * 60 + now.second
    start = (begin.hour * 60 + begin.minute) * 60
    return min(1.0, max(0.0, 1 - (at - start) / QUARTER_SECONDS))


def _projection(
    name: str, days: PastDays, spent: Mapping[int, int], *, is_money: bool
) -> Projection:
    begin, end = bounds(name, days.now)
    sofar = sum(
        amount
        for quarter, amount in spent.items()
        if quarter * QUARTER_SECONDS * MICROSECONDS >= begin
    )
    zone: tzinfo = days.now.tzinfo or timezone.utc
    until = datetime.fromtimestamp(end // MICROSECONDS, zone)
    today, others = days.now.date(), days.ahead(until)
    # Today is predicted from the rests of other days, as its own first part is known.
    parts = [predicted(days.rests, [today]), *([predicted(days.wholes, others)] if others else [])]
    mean = sum(part.mean for part in parts)
    half = student(min(part.freedom for part in parts)) * math.sqrt(
        sum(part.variance for part in parts)
    )
    # Spend never decreases below what is already spent.
    low, high = max(0.0, mean - half), mean + half

    def amount(more: float) -> Any:
        total = sofar + round(more)
        return dollars(total) if is_money else total

    return Projection(name, end, amount(0), amount(mean), amount(low), amount(high))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted sum over coming days."""

    mean: float
    variance: float
    """Of the sum and of its estimated mean."""
    freedom: int
    """Degrees of freedom: days minus estimated means."""


def predicted(seen: Mapping[date, float], ahead: Sequence[date]) -> Prediction:
    """Predict the sum of some days from past ones."""
    # A mean per weekday needs a few weeks of data.
    by_weekday = len(seen) >= BY_WEEKDAY

    def group(day: date) -> int:
        return day.weekday() if by_weekday else 0

    groups: dict[int, list[float]] = {}
    for day, amount in seen.items():
        groups.setdefault(group(day), []).append(amount)
    means = {each: math.fsum(amounts) / len(amounts) for each, amounts in groups.items()}
    # One variance for all weekdays: seven from three or four days each would be guesses.
    freedom = len(seen) - len(groups)
    spread = math.fsum((amount - means[group(day)]) ** 2 for day, amount in seen.items()) / freedom
    counts = Counter(map(group, ahead))
    return Prediction(
        mean=sum(means[each] * count for each, count in counts.items()),
        variance=spread * sum(n + n * n / len(groups[each]) for each, n in counts.items()),
        freedom=freedom,
    )


def student(freedom: int) -> float:
    """Return the 97.5th percentile of Student's t (Abramowitz and Stegun, 26.7.5) for 5 or more."""
    terms = (
        Z,
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
