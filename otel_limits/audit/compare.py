"""Change in spend compared with another period, the largest first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Column, Table, written
from otel_limits.audit.parsing import PREVIOUS, Against
from otel_limits.audit.sums import DATES, Groups, Sums
from otel_limits.core.errors import LedgerError
from otel_limits.ledger.calendar import PERIODS, label, span
from otel_limits.ledger.rows import MICROSECONDS, dollars

if TYPE_CHECKING:
    from otel_limits.ledger.options import Condition
    from otel_limits.ledger.selection import Selection

DAY_MICROSECONDS: Final = 24 * 3600 * MICROSECONDS
TOO_EARLY: Final = "--compare needs two periods after 1970, as ledgers have no earlier rows."

CHANGES: Final = (
    Column("cost_before_usd", "Cost before", "money"),
    Column("cost_usd", "Cost", "money", is_key=True),
    Column("cost_change_usd", "Change", "money", is_key=True),
    Column("cost_change_share", "Change, %", "share"),
    Column("tokens_before", "Tokens before", "count"),
    Column("tokens", "Tokens", "count", is_key=True),
    Column("tokens_change", "Change, tokens", "count"),
)


@dataclass(frozen=True, slots=True)
class TwoPeriods:
    """The same selection in two periods."""

    before: Selection
    now: Selection

    @property
    def about(self) -> str:
        """Describe both periods."""
        return f"{_described(self.now)} against {_described(self.before)}"


def _described(selection: Selection) -> str:
    since, until = selection.since_us or 0, selection.until_us or 0
    days = (until - since) / DAY_MICROSECONDS
    length = f"{days:,.1f} days"
    if days < 1:  # an hour would be 0.0 days
        length = f"{days * 24:,.1f} hours" if days * 24 >= 1 else f"{days * 24 * 60:,.1f} minutes"
    return f"{written(since, 'time')} to {written(until, 'time')} UTC ({length})"


def periods_of(selection: Selection, against: Against, by: Sequence[str]) -> TwoPeriods:
    """Determine the two periods.

    Raises:
        LedgerError: They are ambiguous, empty or in the future.
    """
    dates = [name for name in by if name in DATES]
    if dates:
        raise LedgerError(
            f"--compare compares two periods, which have no {dates[0]} in common. "
            f"Remove {dates[0]} from --by."
        )
    named = [each for each in selection.where if each.name in PERIODS]
    if any(each.is_excluded for each in named):
        raise LedgerError("--compare takes one period, and cannot exclude one by != in --where.")
    if len(named) > 1:
        raise LedgerError(f"--compare takes one period, got {len(named)} in --where.")
    # Read once, so that both periods end at the same time.
    now_us = round(time.time() * MICROSECONDS)
    kept = tuple(each for each in selection.where if each.name not in PERIODS)
    part = replace(selection, where=kept)
    if named:
        begin, end = span(named[0].name, named[0].value, selection.zone)
        part = replace(
            part,
            since_us=max(begin, selection.since_us or begin),
            until_us=min(end, selection.until_us or end),
        )
    return _paired(part, named, against, now_us)


def _paired(
    part: Selection, named: Sequence[Condition], against: Against, now_us: int
) -> TwoPeriods:
    zone, until = part.zone, min(part.until_us or now_us, now_us)
    since = part.since_us
    if since is None:
        since = _present(against, until, zone)
    if until <= since:
        raise LedgerError("The period to compare has not started, or is empty.")
    if against.period:
        begin, end = span(against.period, against.text, zone)
        # Only the elapsed part of a period: the rest would count as days of 0.
        end = min(end, now_us)
        if end <= begin:
            raise LedgerError(f"--compare {against.text} is a period that has not started.")
    else:
        # As long as the current one, up to the same point: half a month is not compared with a
        # whole one.
        begin = since - (against.microseconds or until - since)
        end = begin + until - since
        if against.text == PREVIOUS and named:
            begin, end = _previous(since, until, named[0].name, named[0].value, zone)
    if begin < 0:
        # Earlier times are negative in a ledger, which has no such rows.
        raise LedgerError(TOO_EARLY)
    return TwoPeriods(
        before=replace(part, since_us=begin, until_us=end),
        now=replace(part, since_us=since, until_us=until),
    )


def _present(against: Against, until: int, zone: tzinfo) -> int:
    """Return the start of the current period if none is named: one of the same kind."""
    if against.text == PREVIOUS:
        raise LedgerError(
            "--compare previous needs a period, e.g. --since 7d or --where month=2026-11."
        )
    if against.period:
        local = datetime.fromtimestamp(until / MICROSECONDS, zone)
        return span(against.period, label(against.period, local), zone)[0]
    return until - against.microseconds


def _previous(since: int, until: int, name: str, value: str, zone: tzinfo) -> tuple[int, int]:
    """Return the previous calendar period, or the same part of it."""
    begin, end = span(name, value, zone)
    if begin <= 0:
        raise LedgerError(TOO_EARLY)
    # By calendar, as months, and days of clock changes, differ in length.
    day_before = datetime.fromtimestamp(begin / MICROSECONDS - 1, zone)
    first, last = span(name, label(name, day_before), zone)
    return first + since - begin, last if until == end else min(last, first + until - begin)


def changes_table(
    before: Groups, now: Groups, keys: Sequence[Column], top: int | None, about: str
) -> Table:
    """Build a table with one row per group, the largest change first, and `top` rows at most."""
    # Groups in only one of the periods matter most.
    pairs = {key: (before.get(key, Sums()), now.get(key, Sums())) for key in {*before, *now}}
    ranked = sorted(pairs.items(), key=lambda item: (*_rank(*item[1]), *map(str, item[0])))
    rows = [(*key, *_figures(*pair)) for key, pair in ranked]
    blank = tuple("" for _ in keys[1:])
    if top is not None and keys and top < len(rows):
        others = _added([pair for _, pair in ranked[top:]])
        rows[top:] = [(f"({len(rows) - top:,} others)", *blank, *_figures(*others))]
    total = _added([pair for _, pair in ranked])
    # Without rows, the note is not shown.
    periods = "" if rows else f": {about}"
    return Table(
        name="changes",
        title=f"Change in spend by {', '.join(each.title for each in keys)}{periods}",
        columns=(*keys, *CHANGES),
        rows=rows,
        total=("total", *blank, *_figures(*total)),
        note=f"{about}. Cost covers calls with a known price.",
    )


def _added(pairs: Sequence[tuple[Sums, Sums]]) -> tuple[Sums, Sums]:
    before, now = Sums(), Sums()
    for one, other in pairs:
        before.merge(one)
        now.merge(other)
    return before, now


def _rank(before: Sums, now: Sums) -> tuple[int, int]:
    return -abs(now.pico - before.pico), -abs(now.tokens - before.tokens)


def _figures(before: Sums, now: Sums) -> tuple[Any, ...]:
    """The values of `CHANGES`: no spend before is $0, an unknown price is not."""
    change = now.pico - before.pico
    is_known = before.has_price or now.has_price
    return (
        _cost(before),
        _cost(now),
        dollars(change) if is_known else None,
        change / before.pico if before.pico else None,
        before.tokens,
        now.tokens,
        now.tokens - before.tokens,
    )


def _cost(sums: Sums) -> Any:
    return dollars(sums.pico) if sums.has_price or not sums.calls else None
