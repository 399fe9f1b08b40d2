"""The rows of a bill, the protocol of a reader of exports, and the values in them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol, TypeAlias

from otel_limits.core.errors import LedgerError
from otel_limits.core.labels import clean
from otel_limits.core.secrets import quote_value, redact_value
from otel_limits.ledger.otlp import MAX_FIELD, opened
from otel_limits.ledger.rows import MAX_INTEGER

Kind: TypeAlias = Literal["fresh", "cache_read", "cache_write", "output"]
KINDS: Final[tuple[Kind, ...]] = ("fresh", "cache_read", "cache_write", "output")
"""Kinds of tokens that vendors price apart. Together the first three are the input."""

DAY: Final = timedelta(days=1)

ExportedObject: TypeAlias = Mapping[str, Any]
"""An object of a JSON file, or a row of a CSV file by its columns."""


class BilledTokens(NamedTuple):
    """Tokens by kind; a cache is `None` if the export does not separate it from the input."""

    fresh: int = 0
    cache_read: int | None = None
    cache_write: int | None = None
    output: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BillRow:
    """Use of one model on one day, its cost, or both."""

    identity: Hashable
    """Rows with the same identity are the same row, exported twice."""
    day: date
    """In the time zone of the bill."""
    models: tuple[str, ...] = ()
    """The names of the model; none if the export is not divided by model."""
    tokens: BilledTokens | None = None
    """`None` in a row that has only a cost."""
    requests: int | None = None
    cost: Decimal | None = None
    """USD, exactly; `None` in a row that has only tokens."""
    kind: Kind | None = None
    """The tokens that the cost is for, if the export is divided by them."""
    owner: str = ""
    """The key, project or user, as the vendor names it."""
    is_call: bool = False
    """Whether the row is a single call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BillPage:
    """A part of an export: a page, or a whole file."""

    file: str
    report: str
    """Which of the vendor's reports it belongs to."""
    rows: Sequence[BillRow]
    buckets: Sequence[tuple[datetime, datetime]] = ()
    """The times that it covers, also without rows."""
    grouping: frozenset[str] = frozenset()
    """How its rows divide a day: reports that divide it differently contain the same use twice."""
    next_page: str | None = None
    """How to request the rest, if there is more."""
    number: tuple[int, int] | None = None
    """Number of the page, and how many there are."""


class BillReader(Protocol):
    """Reads one form of export."""

    @property
    def vendor(self) -> str:
        """The vendor's name in the ledger."""

    @property
    def title(self) -> str:
        """The vendor's name for readers."""

    @property
    def vendors(self) -> frozenset[str]:
        """The vendors in the ledger whose calls are on this bill."""

    @property
    def passes_on(self) -> bool:
        """Whether the ledger may have its calls under other vendors, as with a gateway."""

    def reads(self, first: ExportedObject) -> bool:
        """Return whether the first object of a file has this form."""

    def pages(self, objects: Sequence[ExportedObject], file: str) -> Iterator[BillPage]:
        """Read the objects of a file.

        Raises:
            LedgerError: A value is not of the documented form, or an amount is not in USD.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """All exports of one vendor, each row once."""

    reader: BillReader
    files: Sequence[str]
    zone: tzinfo
    """The time zone of its days."""
    rows: Sequence[BillRow]
    used_days: frozenset[date]
    """Days of which it has the tokens, also those without any."""
    cost_days: frozenset[date]
    """Days of which it has the costs."""
    has_calls: bool = field(default=False)
    """Whether each of its rows is a single call."""
    covered: Mapping[str, frozenset[date]] = field(default_factory=dict)
    """The days that each report covers without a hole, if its vendor exports days without use."""

    @property
    def days(self) -> frozenset[date]:
        """Days of which it has anything."""
        return self.used_days | self.cost_days

    @property
    def gaps(self) -> Mapping[str, Sequence[date]]:
        """The days of the bill that a report does not cover, by report."""
        whole = every_day(min(self.days), max(self.days)) if self.days else frozenset()
        missing = {report: sorted(whole - covered) for report, covered in self.covered.items()}
        return {report: found for report, found in missing.items() if found}


def every_day(first: date, last: date) -> frozenset[date]:
    """Return all days from the first to the last one, including both."""
    return frozenset(first + DAY * number for number in range((last - first).days + 1))


# --- opening exports ------------------------------------------------------------------------------

JSON_STARTS: Final = ("{", "[")
REST: Final = "(more)"


def objects_in(path: Path) -> Sequence[ExportedObject]:
    """Read the objects of a file: a JSON object, an array, one object per line, or rows of CSV.

    An empty file has none.

    Raises:
        LedgerError: The file cannot be read, or has none of these forms.
    """
    try:
        with opened(path) as lines:
            text = b"".join(lines).decode("utf-8-sig")
        if not text.strip():
            return []
        found = _of_json(text) if text.lstrip().startswith(JSON_STARTS) else _of_csv(text)
    except OSError as error:
        shown = redact_value(str(path))
        raise LedgerError(f"{shown} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError, csv.Error) as error:
        raise LedgerError(
            f"{path} is neither JSON nor CSV: {error}. Export the file again."
        ) from None
    if not all(isinstance(each, dict) for each in found):
        raise LedgerError(f"{path} is not a bill: it has values that are not objects.")
    return found


def _of_json(text: str) -> list[Any]:
    # Amounts are parsed to decimals: a float would round them.
    def parsed(document: str) -> Any:
        return json.loads(document, parse_float=Decimal, parse_constant=_reject)

    try:
        whole = parsed(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2 or not lines[0].rstrip().endswith("}"):  # noqa: PLR2004
            raise
        return [parsed(line) for line in lines]
    return whole if isinstance(whole, list) else [whole]


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _of_csv(text: str) -> list[Any]:
    csv.field_size_limit(MAX_FIELD)
    rows = csv.DictReader(io.StringIO(text, newline=""), restkey=REST, strict=True)
    found: list[Any] = []
    for row in rows:
        if REST in row or None in row.values():
            raise ValueError(f"line {rows.line_num} has not {len(rows.fieldnames or ())} fields")
        found.append({name.strip(): value for name, value in row.items()})
    if not rows.fieldnames or len(rows.fieldnames) == 1:
        raise ValueError("its first line has no column names")
    return found


# --- values of exports ----------------------------------------------------------------------------

MAX_AMOUNT: Final = Decimal(10**12)
"""No bill is higher, and a larger exponent would take all memory to write out."""
MAX_DIGITS: Final = 40
"""Decimal places of an amount. A float that is smaller than a picodollar has some 20."""
UNSET: Final = (None, "")
KEY_START: Final = "sk-"
"""Start of the secret keys of all of these vendors."""


def invalid(file: str, name: str, value: object, expected: str) -> LedgerError:
    """Return the error about a value that has not the documented form."""
    return LedgerError(
        f"{file}: {name} must be {expected}, got {quote_value(str(value))}. Export the file again, "
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


# --- pages of time buckets ------------------------------------------------------------------------

AMOUNT: Final = "amount"
"""The only value that is text."""
NOON: Final = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class TimeBucket:
    """A span of time of a report."""

    report: str
    begin: datetime
    end: datetime
    file: str

    @property
    def day(self) -> date:
        """The day in which it begins; a bucket of a day is that day, in any zone."""
        return self.begin.astimezone(zone_of(self.begin, self.end)).date()

    def identity(self, result: ExportedObject) -> Hashable:
        """Return what identifies a result: its report, its time and its group."""
        # All texts but an amount: vendors add groups.
        group = {
            name: value
            for name, value in result.items()
            if isinstance(value, (str, bool)) and name != AMOUNT
        }
        return (self.report, self.begin, self.end, *sorted(group.items()))


@dataclass(frozen=True, slots=True)
class BucketedPage:
    """The vendor's names in a page."""

    begin: str
    end: str
    report: Callable[[ExportedObject], str]
    """Returns the report that a result belongs to."""
    groups: Sequence[str]
    """Fields that are set in results if the report is grouped by them."""
    row: Callable[[ExportedObject, TimeBucket], BillRow]


def zone_of(begin: datetime, end: datetime) -> tzinfo:
    """Return the time zone in which a bucket of whole days begins at midnight; else UTC."""
    after = begin - begin.replace(hour=0, minute=0, second=0, microsecond=0)
    if not after or end - begin < DAY:
        return timezone.utc
    return timezone(-after if after <= NOON else DAY - after)


def read_pages(
    objects: Sequence[ExportedObject], file: str, form: BucketedPage
) -> Iterator[BillPage]:
    """Read pages of buckets.

    Raises:
        LedgerError: A value is not of the documented form.
    """
    for each in objects:
        if not isinstance(each.get("data"), list):
            raise invalid(file, "data", each.get("data"), "a list of time buckets")
        yield _page(each, file, form)


def _page(page: ExportedObject, file: str, form: BucketedPage) -> BillPage:
    rows: list[BillRow] = []
    times: list[tuple[datetime, datetime]] = []
    grouping: set[str] = set()
    report = ""
    for bucket in page["data"]:
        results = _results(bucket, file)
        begin = moment(bucket.get(form.begin), form.begin, file)
        end = moment(bucket.get(form.end), form.end, file)
        times.append((begin, end))
        for result in results:
            report = form.report(result)
            rows.append(form.row(result, TimeBucket(report, begin, end, file)))
            grouping |= {each for each in form.groups if result.get(each) is not None}
    more = page.get("has_more") is True
    return BillPage(
        file=file,
        report=report,
        rows=rows,
        buckets=times,
        grouping=frozenset(grouping),
        next_page=f"page={clean(str(page.get('next_page')))}" if more else None,
    )


def _results(bucket: Any, file: str) -> list[ExportedObject]:
    # OpenAI's reference calls the field `result`, and its examples `results`.
    found = None
    if isinstance(bucket, dict):
        found = bucket.get("results", bucket.get("result"))
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise invalid(file, "results", found, "a list of results in each time bucket")
    return found
