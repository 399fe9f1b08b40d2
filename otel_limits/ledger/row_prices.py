"""Current prices of recorded calls, without a look-up for each of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from datetime import datetime, time, timedelta, timezone
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.core.terms import BASIS, BillableCall, billable_call_in_ledger
from otel_limits.core.usage import EXACT, Usage
from otel_limits.ledger.rows import EPOCH, MAX_INTEGER, PICODOLLARS, picodollars, time_of

if TYPE_CHECKING:
    from otel_limits.core.price import Quote
    from otel_limits.core.pricing import Prices

CACHED: Final = 20_000
"""Cached rates: the names of models come from outside."""
PER_TOKEN: Final = PICODOLLARS // 1_000_000
"""From USD per million tokens to picodollars per token."""
MICROSECOND: Final = timedelta(microseconds=1)
DAY: Final = timedelta(days=1) // MICROSECOND


class PicoRates(NamedTuple):
    """Exact picodollars per token of each kind, and per call."""

    fresh: int | Fraction
    cache_read: int | Fraction
    cache_write: int | Fraction
    cache_write_1h: int | Fraction
    output: int | Fraction
    call: int | Fraction


FREE: Final = PicoRates(0, 0, 0, 0, 0, 0)
UNSEEN: Final = FREE._replace(call=-1)
"""Rates that were not looked up yet. Those of an unknown price are `None`."""


class RowPrices:
    """The prices that `Prices.quote` has for rows of calls.

    Between two steps of the prices, rows with the same terms have the same rates, so rates are
    looked up once.
    """

    def __init__(self, prices: Prices) -> None:
        """Create the look-up in some prices."""
        self._prices = prices
        self._steps = prices.steps()
        dates, times = ((), ()) if self._steps is None else (self._steps.dates, self._steps.times)
        self._days = [_microseconds(datetime.combine(day, time())) for day in dates]
        self._times = [_microseconds(datetime.combine(EPOCH, each)) for each in times]
        self._rates: dict[Hashable, PicoRates | None] = {}
        """Rates by all that decides them; `None` if the price is unknown."""

    def quote(self, row: Any) -> Quote:
        """Return the price of a row, with its source."""
        return self._prices.quote(call_of(row), time_of(row.at_us))

    def picodollars(self, row: Any) -> int | None:
        """Return the price of a row; `None` if it is unknown."""
        given, read, written = row.input_tokens, row.cache_read_tokens, row.cache_write_tokens
        output, kept = row.output_tokens, row.cache_write_1h_tokens or 0
        # SQLite stores anything, if someone edits a row, and parts may be more than the whole.
        are_counts = (
            type(given) is type(read) is type(written) is type(output) is type(kept) is int
            and read >= 0
            and output >= 0
            and written >= kept >= 0
            and given >= read + written
        )
        # A stated cost is of one call.
        if self._steps is None or not are_counts or row.stated_pico is not None:
            return picodollars(self.quote(row).price)
        key = (
            row.model,
            row.provider,
            row.tier,
            row.price_basis,
            bisect_right(self._days, row.at_us),
            bisect_right(self._times, row.at_us % DAY),
            bisect_left(self._steps.prompts, given),
            # A rate that is unknown only matters to calls that need it.
            given > 0,
            output > 0,
            read > 0,
            written > 0,
            kept > 0,
        )
        rates = self._rates.get(key, UNSEEN)
        if rates is UNSEEN:
            call = call_of(row)
            quote = self._prices.quote(call, time_of(row.at_us))
            # Audio and searches are counted per call.
            if any(getattr(call.usage, name) is not None for name in BASIS):
                return picodollars(quote.price)
            if len(self._rates) >= CACHED:
                self._rates.clear()
            rates = self._rates[key] = _rates_of(quote)
        if rates is None:
            return None
        total = round(
            (given - read - written) * rates.fresh
            + read * rates.cache_read
            + (written - kept) * rates.cache_write
            + kept * rates.cache_write_1h
            + output * rates.output
            + rates.call
        )
        return total if total <= MAX_INTEGER else None


def _rates_of(quote: Quote) -> PicoRates | None:
    """Return the rates of a quoted call that has only tokens of text."""
    if quote.price is None:
        return None
    if quote.rates is None:
        return FREE
    at = quote.rates
    per_million = (at.input, *at.cache_rates, at.output)
    per_token = (Fraction(each) * PER_TOKEN for each in per_million)
    exact = (*per_token, Fraction(at.per_request) * PICODOLLARS)
    # Almost all are whole, and integers are faster.
    return PicoRates(*(int(each) if each.denominator == 1 else each for each in exact))


def call_of(row: Any) -> BillableCall:
    """Return the call of a row, with the columns that decide its price."""
    usage = Usage(
        input=row.input_tokens,
        output=row.output_tokens,
        cache_read=row.cache_read_tokens,
        cache_write=row.cache_write_tokens,
        cache_write_1h=row.cache_write_1h_tokens,
    )
    told = row.stated_pico
    stated = None if told is None else EXACT.divide(told, PICODOLLARS)
    return billable_call_in_ledger(
        row.model, row.provider, usage, row.tier, row.price_basis, stated
    )


def _microseconds(moment: datetime) -> int:
    """Return the stored form of a time in UTC."""
    return (moment.replace(tzinfo=timezone.utc) - EPOCH) // MICROSECOND
