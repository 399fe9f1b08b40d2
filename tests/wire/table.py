"""Formats the counts of each vendor next to its bill: the tables of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.wire.cases import CASES, NOTHING, Ask
from tests.wire.providers import PROVIDERS, Provider
from tests.wire.run import MODES
from tests.wire.usages import Bill

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tests.wire.run import Results

EXACT: Final = "exact"
ESTIMATED: Final = "estimated"
BY_CLIENT: Final = "client estimate"
NONE: Final = "-"

PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "input": ("input", "input"),
    "output": ("output", "output"),
    "cached tokens": ("cache_read", "read"),
    "cache writes": ("cache_write", "write"),
    "one-hour writes": ("cache_write_1h", "write_1h"),
}
"""Names of usage fields in a cell, by the field of an event and of a bill."""

TOPICS: Final[Mapping[str, tuple[str, ...]]] = {
    "Responses with usage": tuple(CASES)[:9],
    "Responses without usage, structured output": tuple(CASES)[9:11] + tuple(CASES)[18:],
    "Filters and errors": tuple(CASES)[11:18],
}
"""The columns of each table."""


def counted(record: Mapping[str, Any]) -> Bill:
    """Add up the calls of one case."""
    sums = {
        bill: sum(call[event] or 0 for call in record["calls"]) for event, bill in PARTS.values()
    }
    return Bill(**sums)


def is_estimated(record: Mapping[str, Any]) -> bool:
    """Return whether there is any call."""
    return any(call["estimated"] for call in record["calls"])


def cell(ask: Ask | None, record: Mapping[str, Any] | None) -> str:
    """Compare the count with the vendor's bill, in a word."""
    if ask is None or record is None:
        return NONE
    sums = counted(record)
    if is_estimated(record):
        return ESTIMATED
    if not ask.is_known:
        return BY_CLIENT if sums != NOTHING else "0"
    if sums == plainly(ask.bill):
        return EXACT if sums != NOTHING else "0"
    said, told = vars(sums), vars(ask.bill)
    lost = [name for name, (_, part) in PARTS.items() if said[part] != told[part]]
    return f"no {', '.join(lost)}"


def plainly(bill: Bill) -> Bill:
    """Return a bill without fields that cost nothing."""
    return Bill(
        input=bill.input,
        output=bill.output,
        read=bill.read,
        write=bill.write,
        write_1h=bill.write_1h,
    )


def cells(results: Results) -> Iterator[tuple[Provider, str, set[str]]]:
    """Yield every vendor and case with the results of the modes: one word if they agree."""
    for provider in PROVIDERS:
        for name, case in CASES.items():
            ask = case(provider)
            found = (results[mode].get(provider.name) for mode in MODES)
            records = (each.get(name) for each in found if each is not None)
            yield provider, name, {cell(ask, record) for record in records}


def vendors(results: Results) -> str:
    """Lay out the tables."""
    words = {(each.name, name): " / ".join(sorted(said)) for each, name, said in cells(results)}
    return "\n".join(
        f"### {topic}\n\n" + table(("vendor", *names), rows(names, words))
        for topic, names in TOPICS.items()
    )


def rows(names: Iterable[str], words: Mapping[tuple[str, str], str]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each vendor, whose name links to its documentation of billing."""
    columns = tuple(names)
    for each in PROVIDERS:
        yield f"[{each.name}]({each.bills})", *(words[each.name, name] for name in columns)


def table(titles: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Lay out a Markdown table."""
    written = [tuple(titles), *map(tuple, lines)]
    written.insert(1, ("---",) * len(written[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in written)
