"""Pages of time buckets, the form of OpenAI's and Anthropic's reports."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import Any, Final

from otel_limits.audit.bills.bill import BillPage, BillRow, ExportedObject
from otel_limits.audit.bills.exported_values import invalid, moment
from otel_limits.core.labels import clean

DAY: Final = timedelta(days=1)
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
