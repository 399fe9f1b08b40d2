"""All readers, and bills put together from the files of each vendor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from datetime import date, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Final

from otel_limits.audit.bills.anthropic_bill import AnthropicBill
from otel_limits.audit.bills.bill import (
    DAY,
    Bill,
    BillPage,
    BillReader,
    BillRow,
    every_day,
    objects_in,
    zone_of,
)
from otel_limits.audit.bills.litellm_bill import LiteLLMBill
from otel_limits.audit.bills.openai_bill import OpenAIBill
from otel_limits.audit.bills.openrouter_bill import OpenRouterBill
from otel_limits.core.errors import LedgerError

READERS: Final[Sequence[BillReader]] = (
    OpenAIBill(),
    AnthropicBill(),
    OpenRouterBill(),
    LiteLLMBill(),
)
FORMS: Final = (
    "OpenAI's organization usage and costs (JSON), Anthropic's usage and cost reports (JSON), "
    "OpenRouter's activity (CSV), LiteLLM's spend logs (JSON or CSV)"
)


def read_bills(files: Sequence[Path]) -> list[Bill]:
    """Read files, in any order, into one bill per vendor.

    Raises:
        LedgerError: A file is not a bill, a page is missing, or files contradict each other.
    """
    pages: dict[BillReader, list[BillPage]] = {}
    for file in files:
        reader, found = _read(file)
        pages.setdefault(reader, []).extend(found)
    return [_bill(reader, found) for reader, found in pages.items()]


def _read(file: Path) -> tuple[BillReader, list[BillPage]]:
    objects = objects_in(file)
    if not objects:
        raise LedgerError(f"{file} is empty. Export the file again.")
    reader = next((each for each in READERS if each.reads(objects[0])), None)
    if reader is None:
        fields = ", ".join(sorted(map(str, objects[0]))[:8])
        raise LedgerError(f"{file} is not a known bill: it has {fields}. Known bills: {FORMS}.")
    return reader, list(reader.pages(objects, str(file)))


def _bill(reader: BillReader, pages: Sequence[BillPage]) -> Bill:
    _require_all_pages(reader, pages)
    _require_one_grouping(pages)
    rows: dict[Hashable, tuple[BillRow, str]] = {}
    for page in pages:
        for row in page.rows:
            before, file = rows.setdefault(row.identity, (row, page.file))
            if before != row:
                raise LedgerError(
                    f"{file} and {page.file} have different values for the same row of {row.day}"
                    f"{''.join(f', {name}' for name in row.models[:1])}. Pass only the newer one."
                )
    unique = [row for row, _ in rows.values()]
    used_days = _days(pages, [row.day for row in unique if row.tokens], "usage")
    cost_days = _days(pages, [row.day for row in unique if row.cost is not None], "cost")
    if not unique:
        used_days = frozenset(_bucket_days(pages, ""))
    return Bill(
        reader=reader,
        files=sorted({page.file for page in pages}),
        zone=_zone(pages),
        rows=unique,
        used_days=used_days,
        cost_days=cost_days,
        has_calls=bool(unique) and all(row.is_call for row in unique),
        covered=_covered(pages),
    )


def _require_all_pages(reader: BillReader, pages: Sequence[BillPage]) -> None:
    begins: defaultdict[str, set[object]] = defaultdict(set)
    for page in pages:
        begins[page.report] |= {begin for begin, _ in page.buckets}
    for page in pages:
        end = max((end for _, end in page.buckets), default=None)
        # A report without rows has no name.
        if page.next_page and end not in begins[page.report] | begins[""]:
            raise LedgerError(
                f"{page.file} has more pages (has_more is true). Request the next one with "
                f"{page.next_page}, and pass all files."
            )
    numbers = {page.number for page in pages if page.number}
    for total in {total for _, total in numbers}:
        missing = set(range(1, total + 1)) - {number for number, of in numbers if of == total}
        if missing:
            raise LedgerError(
                f"Page {min(missing)} of {total} of {reader.title}'s logs is missing. Request it "
                f"with page={min(missing)}, and pass all files."
            )


def _require_one_grouping(pages: Sequence[BillPage]) -> None:
    groupings: dict[tuple[str, date], tuple[frozenset[str], str]] = {}
    for page in pages:
        width = {str(end - begin) for begin, end in page.buckets}
        grouping = page.grouping | width
        for day in {row.day for row in page.rows}:
            before, file = groupings.setdefault((page.report, day), (grouping, page.file))
            if before != grouping:
                first, second = (
                    ", ".join(sorted(each)) or "nothing" for each in (before, grouping)
                )
                raise LedgerError(
                    f"{file} and {page.file} have the same use of {day} twice, by {first} and by "
                    f"{second}. Pass one of them."
                )


def _zone(pages: Sequence[BillPage]) -> tzinfo:
    zones = {
        zone_of(begin, end): page.file
        for page in pages
        for begin, end in page.buckets
        if end - begin >= DAY
    }
    if len(zones) > 1:
        raise LedgerError(
            f"{' and '.join(sorted(set(zones.values())))} have days of different time zones: "
            f"{', '.join(sorted(map(str, zones)))}. Export them with the same start time."
        )
    return next(iter(zones), timezone.utc)


def _days(pages: Sequence[BillPage], days: Sequence[date], report: str) -> frozenset[date]:
    """Return the days that a kind of report covers, also those without rows."""
    if not days:
        return frozenset()
    if any(page.buckets for page in pages):
        return frozenset({*days, *_bucket_days(pages, report)})
    # LiteLLM's log has a row per call, and OpenRouter's activity one per call, or per day and
    # endpoint with use (the readers have the sources). So nothing shows whether a day is missing.
    # It counts as a day without use: its calls are then only in the ledger.
    return every_day(min(days), max(days))


def _bucket_days(pages: Sequence[BillPage], report: str) -> Iterator[date]:
    zone = _zone(pages)
    for page in pages:
        # A page without rows does not name its report.
        if report in page.report or not page.report:
            yield from (begin.astimezone(zone).date() for begin, _ in page.buckets)


def _covered(pages: Sequence[BillPage]) -> dict[str, frozenset[date]]:
    """Return the days that each report in buckets covers from midnight to midnight.

    OpenAI and Anthropic export an empty bucket for a time without use, so a time without a bucket
    is missing, also before the first and after the last one: hours are exported from any hour on,
    and 24 by default. Read 2026-11-30: an export of OpenAI's costs with days without an amount, in
    https://github.com/xavierjflanagan/Guardian (openai-usage-and-cost-report-2025-10-12.md), and
    Anthropic's answers for months without use, which have buckets with empty `results`, in
    https://github.com/kingdonb/mecris (docs/anthropic-cost-tracking-investigation.md).
    """
    zone = _zone(pages)
    reports = {page.report for page in pages if page.buckets}
    found = {}
    # A page without rows does not name its report.
    for report in sorted(reports - {""} or reports):
        buckets = [each for page in pages if page.report in (report, "") for each in page.buckets]
        buckets.sort()
        first, last = (_midnight(begin, zone) for begin, _ in (buckets[0], buckets[-1]))
        holes: set[date] = set()
        covered_until = first
        for begin, end in [*buckets, (last + DAY, last + DAY)]:
            if covered_until < begin:
                missing = begin - timedelta.resolution
                holes |= every_day(
                    covered_until.astimezone(zone).date(), missing.astimezone(zone).date()
                )
            covered_until = max(covered_until, end)
        found[report] = frozenset(begin.astimezone(zone).date() for begin, _ in buckets) - holes
    return found


def _midnight(at: datetime, zone: tzinfo) -> datetime:
    return at.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
