"""Formats the counts of each vendor next to its bill: the tables of the page."""

from __future__ import annotations

from collections import Counter
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
    """Lay out how each case is counted, with the vendors at which it differs."""
    words = {(name, each.name): " / ".join(sorted(said)) for each, name, said in cells(results)}
    return sources() + table(("case", "counted", "differs at"), exceptions(words))


def sources() -> str:
    """List the vendors, each with a link to its documentation of billing."""
    return ", ".join(f"[{each.name}]({each.bills})" for each in PROVIDERS) + ".\n\n"


def exceptions(words: Mapping[tuple[str, str], str]) -> Iterator[tuple[str, ...]]:
    """Yield cases that are counted alike at all vendors that have them, then each other one."""
    alike: dict[str, list[str]] = {}
    others = []
    for name in CASES:
        said = {vendor: word for (case, vendor), word in words.items() if case == name}
        by_word = Counter(word for word in said.values() if word != NONE)
        usual, *rest = (word for word, _ in by_word.most_common())
        if not rest:
            alike.setdefault(usual, []).append(name)
            continue
        differing = (
            f"{word}: {'; '.join(vendor for vendor in said if said[vendor] == word)}"
            for word in rest
        )
        others.append((name, usual, ". ".join(differing)))
    yield from ((", ".join(names), word, "no vendor") for word, names in alike.items())
    yield from others


def table(titles: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Lay out a Markdown table."""
    written = [tuple(titles), *map(tuple, lines)]
    written.insert(1, ("---",) * len(written[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in written)
