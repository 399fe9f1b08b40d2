"""Reprices calls of a ledger: by the current policy file, then by the installed price list.

The price with which a call was recorded is kept next to the new one, with its source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from otel_limits.core.usage import EXACT
from otel_limits.ledger.row_prices import RowPrices
from otel_limits.ledger.rows import PICODOLLARS, Row, picodollars, signed_picodollars
from otel_limits.ledger.schema import CALL_TOKENS, CALLS, MODEL_CALL_TABLE
from otel_limits.ledger.selection import Joins, Selection
from otel_limits.ledger.totals import add_prices

if TYPE_CHECKING:
    from otel_limits.core.price import Quote
    from otel_limits.core.pricing import Prices
    from otel_limits.core.wording import ProgressBar
    from otel_limits.ledger.database import Database

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
        changed = [row for row in portion if _is_changed(row, current.picodollars(row), done)]
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


def _is_changed(row: PricedRow, pico: int | None, done: Repriced) -> bool:
    """Compare the price of a call with its current price, and count it."""
    done.seen += 1
    if pico is None:
        if row.price_pico is None:
            done.still_unpriced[row.model] += 1
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
