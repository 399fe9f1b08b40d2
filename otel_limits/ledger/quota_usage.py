"""Usage of quotas, as model calls and operators' changes in a ledger record it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.ledger.database import DatabaseError
from otel_limits.ledger.options import KEY_PREFIX
from otel_limits.ledger.queries import PORTION, quota_changes
from otel_limits.ledger.reading import open_for_query
from otel_limits.ledger.rows import MICROSECONDS
from otel_limits.ledger.schema import CALLS, DAY_MICROSECONDS, MODEL_CALL_TABLE
from otel_limits.ledger.selection import Joins, Selection

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address


class QuotaReset(NamedTuple):
    """An operator's reset of a key."""

    quota: str
    shown: str
    """The key as displayed."""
    at: float
    """Seconds since the epoch."""


class ChargedCall(NamedTuple):
    """Quota charges of a model call."""

    at: float
    """Seconds since the epoch."""
    operation: str
    charges: str


def charges_in(address: Address, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Return those of `operations` that are in a ledger, with the quota charges of each call.

    An unreadable ledger returns none: it is queried again later.
    """
    statement = (
        sa.select(CALLS.quota_operation, CALLS.quota_charges)
        .where(CALLS.quota_operation.in_(operations))
        .order_by(CALLS.number)
    )
    with (
        contextlib.suppress(LedgerError, DatabaseError, OSError),
        open_for_query(address) as (connection, _),
    ):
        # Read before the ledger is closed, which a generator would defer.
        return [(each[0], each[1]) for each in connection.execute(statement)]
    return ()


def calls_since(
    connection: sa.Connection, keys: Sequence[str], since: float | None, *, whole: bool = False
) -> Iterator[tuple[sa.Row[Any], dict[str, str | None]]]:
    """Iterate over model calls by time, with the values of audit keys.

    Args:
        connection: The ledger.
        keys: The audit keys.
        since: Seconds since the epoch.
        whole: Begin with the first call of any invocation that has one since then.
    """
    joins = Joins(MODEL_CALL_TABLE)
    # Numbered, as an audit key may have the name of any column.
    values = [joins.column(KEY_PREFIX + key).label(f"k{n}") for n, key in enumerate(keys)]
    columns = [CALLS[name] for name in CALLS_OF_QUOTAS]
    selection = Selection(since_us=None if since is None else int(since * MICROSECONDS))
    if whole and since is not None:
        later = Joins(MODEL_CALL_TABLE).select(selection, CALLS.invocation_id)
        first = sa.select(sa.func.min(CALLS.at_us)).where(CALLS.invocation_id.in_(later))
        selection = Selection(since_us=connection.scalar(first) or selection.since_us)
    statement = joins.select(selection, *columns, *values).order_by(
        CALLS.day, CALLS.at_us, CALLS.id
    )
    for row in connection.execute(statement, execution_options={"yield_per": PORTION}):
        yield row, dict(zip(keys, row[len(columns) :], strict=True))


CALLS_OF_QUOTAS: Final = (
    *("at_us", "duration_us", "agent", "model", "invocation_id"),
    *("input_tokens", "output_tokens", "price_pico", "quota_charges"),
)


def charges_between(address: Address, since: float, until: float) -> Iterator[ChargedCall]:
    """Iterate over the quota charges of model calls between two times.

    Raises:
        LedgerError: The ledger is not readable, or rows wait that it lacks.
    """
    first, last = int(since * MICROSECONDS), int(until * MICROSECONDS)
    statement = sa.select(CALLS.at_us, CALLS.quota_operation, CALLS.quota_charges).where(
        # By day, as an index begins with it.
        CALLS.day >= first // DAY_MICROSECONDS,
        CALLS.at_us >= first,
        CALLS.at_us < last,
        CALLS.quota_charges.is_not(None),
    )
    try:
        with open_for_query(address) as (connection, waiting):
            if waiting.is_partial:
                raise LedgerError(f"{waiting}.")
            found = connection.execute(statement, execution_options={"yield_per": PORTION})
            for at_us, operation, charges in found:
                yield ChargedCall(at_us / MICROSECONDS, operation, charges)
    except (DatabaseError, OSError) as error:
        raise LedgerError(str(error)) from error


def resets_since(address: Address, since: float) -> list[QuotaReset]:
    """Return the resets of quota keys since a time.

    Raises:
        LedgerError: The ledger is not readable.
    """
    try:
        with open_for_query(address) as (connection, _):
            changes = quota_changes(connection, Selection(since_us=int(since * MICROSECONDS)))
            return [
                QuotaReset(each.quota, each.share, each.at_us / MICROSECONDS)
                for each in changes
                if each.change == "reset"
            ]
    except (DatabaseError, OSError) as error:
        raise LedgerError(str(error)) from error
