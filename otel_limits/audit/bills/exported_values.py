"""Values of exports, each checked: a count, an amount, a time."""

from __future__ import annotations

import re
from datetime import date, datetime, timezone
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.errors import LedgerError
from otel_limits.core.labels import clean, quoted
from otel_limits.ledger.rows import MAX_INTEGER

if TYPE_CHECKING:
    from otel_limits.audit.bills.bill import ExportedObject

MAX_AMOUNT: Final = Decimal(10**12)
"""No bill is higher, and a larger exponent would take all memory to write out."""
UNSET: Final = (None, "")
KEY_START: Final = "sk-"
"""Start of the secret keys of all of these vendors."""


def invalid(file: str, name: str, value: object, expected: str) -> LedgerError:
    """Return the error about a value that has not the documented form."""
    return LedgerError(
        f"{file}: {name} must be {expected}, got {quoted(str(value))}. Export the file again, "
        "without editing it."
    )


def count(row: ExportedObject, name: str, file: str) -> int:
    """Return a number of tokens or requests; 0 if unset."""
    value = row.get(name)
    if value in UNSET:
        return 0
    text = str(value).removesuffix(".0")
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal()):
        raise invalid(file, name, value, "a whole number of 0 or more")
    number = int(text) if len(text) <= len(str(MAX_INTEGER)) else MAX_INTEGER + 1
    if number > MAX_INTEGER:
        raise invalid(file, name, value, f"at most {MAX_INTEGER:,}")
    return number


def optional_count(row: ExportedObject, name: str, file: str) -> int | None:
    """Return a count; `None` if the export does not have it."""
    return None if row.get(name) in UNSET else count(row, name, file)


def amount(value: Any, name: str, file: str) -> Decimal:
    """Return an amount of money exactly. It may be negative, as credits are; 0 if unset."""
    if value in UNSET:
        return Decimal(0)
    try:
        # JSON is parsed to decimals, so that no value has been a float.
        found = Decimal("nan") if isinstance(value, (bool, float)) else Decimal(value)
    except (InvalidOperation, TypeError, ValueError):
        found = Decimal("nan")
    if not found.is_finite() or abs(found) > MAX_AMOUNT or found.adjusted() < -MAX_DIGITS:
        raise invalid(file, name, value, "an amount, e.g. 0.06")
    return found


MAX_DIGITS: Final = 40
"""Decimal places of an amount. A float that is smaller than a picodollar has some 20."""


def require_usd(currency: object, file: str) -> None:
    """Reject amounts in another currency.

    Raises:
        LedgerError: They are not in USD.
    """
    if str(currency).upper() != "USD":
        raise LedgerError(
            f"{file} has amounts in {clean(str(currency))}, and the ledger has USD. Export the "
            "bill in USD, or pass only its usage report to compare tokens."
        )


TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d(?::?\d\d)?)?)?"
)
"""PostgreSQL leaves out the zone of a time in UTC, the minutes of a zone, and trailing zeros."""


def moment(value: object, name: str, file: str) -> datetime:
    """Return a time in UTC: seconds since 1970, or ISO 8601, without a zone in UTC."""
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, timezone.utc)
        if found := TIME.fullmatch(str(value)):
            day, time, fraction, zone = found.groups()
            zone = "+00:00" if zone in (None, "Z") else f"{zone[:3]}:{zone[3:].lstrip(':') or '00'}"
            digits = f"{fraction or '':0<6}"[:6]
            written = f"{day}T{time or '00:00:00'}.{digits}{zone}"
            return datetime.fromisoformat(written).astimezone(timezone.utc)
    except (ValueError, OverflowError, OSError):
        pass
    raise invalid(file, name, value, "a time, e.g. 2026-11-03T12:00:00Z")


def day_of(value: object, name: str, file: str) -> date:
    """Return the day of a time or date, in UTC."""
    return moment(value, name, file).date()


def named(row: ExportedObject, *names: str) -> str:
    """Return the first of some columns that has a text."""
    return next((clean(str(row[name])) for name in names if row.get(name) not in UNSET), "")


def owner_of(row: ExportedObject, names: tuple[str, ...]) -> str:
    """Return the key, project or user of a row, with the vendor's name of the column."""
    given = {name: clean(str(row[name])) for name in names if row.get(name) not in UNSET}
    # The exports have hashes and IDs, and an edited one may have a key itself.
    return ", ".join(
        f"{name}={'(a secret key)' if value.startswith(KEY_START) else value}"
        for name, value in given.items()
    )
