"""Current prices of recorded calls, and the command that stores them.

The price with which a call was recorded is kept next to the new one, with its source.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from otel_limits.core.price_lookup import NO_PRICE
from otel_limits.core.terms import BASIS, BillableCall, billable_call_in_ledger
from otel_limits.core.usage import EXACT, Usage
from otel_limits.ledger.rows import (
    EPOCH,
    MAX_INTEGER,
    PICODOLLARS,
    Row,
    picodollars,
    signed_picodollars,
    time_of,
)
from otel_limits.ledger.schema import CALL_TOKENS, CALLS, DAY_MICROSECONDS, MODEL_CALL_TABLE
from otel_limits.ledger.selection import Joins, Selection
from otel_limits.ledger.totals import add_prices

if TYPE_CHECKING:
    from otel_limits.core.price import Quote
    from otel_limits.core.price_lookup import Prices
    from otel_limits.core.wording import ProgressBar
    from otel_limits.ledger.database import Database


# --- current prices -------------------------------------------------------------------------------

CACHED: Final = 20_000
"""Cached rates: the names of models come from outside."""
PER_TOKEN: Final = PICODOLLARS // 1_000_000
"""From USD per million tokens to picodollars per token."""
MICROSECOND: Final = timedelta(microseconds=1)


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
            bisect_right(self._times, row.at_us % DAY_MICROSECONDS),
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


# --- storing them ---------------------------------------------------------------------------------

PORTION: Final = 2_000

UNPRICED: Final = "none"
"""Recorded source of a call without a price."""


class PricedRow(NamedTuple):
    """The columns of a call that repricing reads."""

    id: int
    at_us: int
    invocation_id: str
    model: str
    provider: str
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    cache_write_1h_tokens: int | None
    tier: str | None
    price_basis: str | None
    stated_pico: int | None
    price_pico: int | None
    price_source: str | None
    price_version: str | None


NEEDED: Final = tuple(CALLS[name] for name in PricedRow._fields)


@dataclass(slots=True)
class Change:
    """Price changes of one model."""

    calls: int = 0
    was_unpriced: int = 0
    former_pico: int = 0
    now_pico: int = 0

    @property
    def former(self) -> Decimal:
        """Previous cost in USD of calls that had a price."""
        return EXACT.divide(self.former_pico, PICODOLLARS)

    @property
    def now(self) -> Decimal:
        """Current cost in USD of all of them."""
        return EXACT.divide(self.now_pico, PICODOLLARS)


@dataclass(slots=True)
class Repriced:
    """The result of repricing."""

    seen: int = 0
    """Calls that were checked."""
    still_unpriced: Counter[str] = field(default_factory=Counter)
    """Calls without a price, by model."""
    kept: Counter[str] = field(default_factory=Counter)
    """Calls that keep their price, as there is no current one, by model."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why the first call of a model has no current price."""
    by_model: dict[str, Change] = field(default_factory=dict)
    """Changes by model."""

    @property
    def changed(self) -> int:
        """Calls whose price changed."""
        return sum(change.calls for change in self.by_model.values())


def reprice(
    database: Database,
    prices: Prices,
    selection: Selection,
    work: ProgressBar,
    *,
    every: bool = False,
    writes: bool = True,
) -> Repriced:
    """Reprice calls. Idempotent.

    A call is priced for its own time. An existing price is kept if there is no new one.

    Args:
        database: The ledger.
        prices: What calls cost.
        selection: Which calls.
        work: Reports progress.
        every: Include calls that have a price.
        writes: False for a dry run.
    """
    done = Repriced()
    current = RowPrices(prices)
    # In portions, each a transaction: live processes that record wait for one at most.
    for portion in work.through(_portions(database, selection, every=every)):
        changed = [row for row in portion if _is_changed(row, current, done)]
        if changed and writes:
            _write(database, [_new_price(row, current.quote(row)) for row in changed])
    return done


def _portions(
    database: Database, selection: Selection, *, every: bool
) -> Iterator[Sequence[PricedRow]]:
    """Yield calls with tokens, ordered by ID."""
    wanted = CALL_TOKENS > 0
    if not every:
        wanted &= CALLS.price_pico.is_(None)
    # From ID to ID: an OFFSET would reread the skipped rows each time.
    last = -1
    while True:
        statement = Joins(MODEL_CALL_TABLE).select(selection, *NEEDED)
        following = statement.where(wanted, CALLS.id > last).order_by(CALLS.id).limit(PORTION)
        with database.reading() as connection:
            rows = connection.execute(following).all()
        if not rows:
            return
        # SQLAlchemy's rows take several times as long to read by name.
        yield list(map(PricedRow._make, rows))
        last = rows[-1].id


def _is_changed(row: PricedRow, current: RowPrices, done: Repriced) -> bool:
    """Compare the price of a call with its current price, and count it."""
    pico = current.picodollars(row)
    done.seen += 1
    if pico is None:
        if row.model not in done.reasons:
            done.reasons[row.model] = current.quote(row).unknown or NO_PRICE
        (done.still_unpriced if row.price_pico is None else done.kept)[row.model] += 1
        return False
    if pico == row.price_pico:
        return False
    change = done.by_model.setdefault(row.model, Change())
    change.calls += 1
    change.was_unpriced += row.price_pico is None
    change.former_pico += row.price_pico or 0
    change.now_pico += pico
    return True


def _new_price(row: PricedRow, quote: Quote) -> Row:
    """Return the parameters of `UPDATE` for a call."""
    return {
        "of": row.id,
        "invocation": row.invocation_id,
        "new_pico": picodollars(quote.price),
        "new_source": quote.source,
        "new_version": quote.version,
        "new_saved": signed_picodollars(quote.cache_saved),
        "old_pico": row.price_pico,
        "old_source": row.price_source or UNPRICED,
        "old_version": row.price_version,
    }


# The first recorded price is kept: it is what the limits applied at the time.
IS_FIRST: Final = CALLS.former_price_source.is_(None)
UPDATE: Final = (
    MODEL_CALL_TABLE.update()
    .where(CALLS.id == sa.bindparam("of"))
    .values(
        price_pico=sa.bindparam("new_pico"),
        price_source=sa.bindparam("new_source"),
        price_version=sa.bindparam("new_version"),
        cache_saved_pico=sa.bindparam("new_saved", type_=sa.BigInteger()),
        former_price_pico=sa.case(
            (IS_FIRST, sa.bindparam("old_pico", type_=sa.BigInteger())),
            else_=CALLS.former_price_pico,
        ),
        former_price_source=sa.func.coalesce(
            CALLS.former_price_source, sa.bindparam("old_source", type_=sa.Text())
        ),
        former_price_version=sa.case(
            (IS_FIRST, sa.bindparam("old_version", type_=sa.Text())),
            else_=CALLS.former_price_version,
        ),
    )
)


def _write(database: Database, changes: list[Row]) -> None:
    """Write the prices of some calls, with the totals of their invocations, in one transaction."""
    invocations = sorted({change.pop("invocation") for change in changes})
    with database.changing() as connection:
        connection.execute(UPDATE, changes)
        add_prices(connection, invocations)


RECORDED_PICO: Final[sa.ColumnElement[Any]] = sa.case(
    (CALLS.former_price_source.is_(None), CALLS.price_pico), else_=CALLS.former_price_pico
)
"""The price with which a call was recorded."""
