"""What was spent: model calls, tokens and money, by any property of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answers import Column, Kind, Table
from otel_limits.ledger.rows import dollars

if TYPE_CHECKING:
    from decimal import Decimal

EPOCH: Final = date(1970, 1, 1)

KEY_KINDS: Final[Mapping[str, Kind]] = {"trace": "id", "invocation": "id", "root": "id"}

FIGURES: Final = (
    Column("calls", "Calls", "count"),
    Column("input_tokens", "Input", "count"),
    Column("output_tokens", "Output", "count"),
    Column("tokens", "Tokens", "count"),
    Column("cached_share", "Cached", "share"),
    Column("cost_usd", "Cost", "money"),
    Column("unpriced_tokens", "Unpriced tokens", "count"),
    Column("unmeasured_calls", "Unmeasured calls", "count"),
)


@dataclass(slots=True)
class Sums:
    """Model calls added up."""

    calls: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    pico: int = 0
    has_price: bool = False
    unpriced_tokens: int = 0
    unmeasured_calls: int = 0

    def add(self, row: Sequence[Any]) -> None:
        """Add one group of calls, as the ledger sums them."""
        calls, sent, received, cached, pico, unpriced, unmeasured = row
        self.calls += int(calls)
        self.input += int(sent)
        self.output += int(received)
        self.cached += int(cached)
        self.pico += int(pico or 0)
        self.has_price |= pico is not None
        self.unpriced_tokens += int(unpriced)
        self.unmeasured_calls += int(unmeasured)

    @property
    def tokens(self) -> int:
        """Input and output together."""
        return self.input + self.output

    @property
    def cost(self) -> Decimal | None:
        """USD of the calls with a price; `None` when none has one."""
        return dollars(self.pico) if self.has_price else None

    @property
    def cached_share(self) -> float | None:
        """The part of the input that came from a cache."""
        return self.cached / self.input if self.input else None

    def figures(self) -> tuple[Any, ...]:
        """What `FIGURES` name."""
        return (
            self.calls,
            self.input,
            self.output,
            self.tokens,
            self.cached_share,
            self.cost,
            self.unpriced_tokens,
            self.unmeasured_calls,
        )


Groups = dict[tuple[Any, ...], Sums]
Rows = Iterable[tuple[Mapping[str, Any], Sequence[Any]]]


def fold(rows: Rows, by: Sequence[str]) -> Groups:
    """Add up groups that may be finer than `by`."""
    groups: Groups = {}
    for keys, sums in rows:
        key = tuple(property_of(keys, name) for name in by)
        groups.setdefault(key, Sums()).add(sums)
    return groups


def property_of(keys: Mapping[str, Any], name: str) -> Any:
    """One property of a group of calls, days and hours as text in UTC."""
    if name == "hour":
        moment = datetime.fromtimestamp(int(keys["hour"]) * 3600, timezone.utc)
        return f"{moment:%Y-%m-%d %H}:00"
    if name not in ("day", "week", "month"):
        return keys[name]
    day = EPOCH + timedelta(days=int(keys["day"]))
    if name == "week":
        year, week, _ = day.isocalendar()
        return f"{year}-W{week:02}"
    return f"{day:%Y-%m}" if name == "month" else day.isoformat()


def spend_table(rows: Rows, by: Sequence[str]) -> Table:
    """One row per group, dates in their order, the most expensive first among the others."""
    groups = fold(rows, by)
    total = Sums()
    for sums in groups.values():
        merge(total, sums)
    in_order = sorted(groups.items(), key=lambda item: _rank(item[0], item[1], by))
    return Table(
        name="spend",
        title="Spend by " + ", ".join(by) if by else "Spend",
        columns=(*(Column(name, name, KEY_KINDS.get(name, "text")) for name in by), *FIGURES),
        rows=[(*key, *sums.figures()) for key, sums in in_order],
        total=(*total_keys(by), *total.figures()),
        note="Input includes cached tokens. Cost is that of the calls with a known price; tokens "
        "of the others are unpriced. Calls whose provider reported no usage are unmeasured, and "
        "count with their estimate.",
    )


def total_keys(by: Sequence[str]) -> tuple[str, ...]:
    """What stands under the properties in the last row."""
    return ("total", *("" for _ in by[1:])) if by else ()


def merge(total: Sums, part: Sums) -> None:
    """Add one sum to another."""
    total.calls += part.calls
    total.input += part.input
    total.output += part.output
    total.cached += part.cached
    total.pico += part.pico
    total.has_price |= part.has_price
    total.unpriced_tokens += part.unpriced_tokens
    total.unmeasured_calls += part.unmeasured_calls


def _rank(key: tuple[Any, ...], sums: Sums, by: Sequence[str]) -> tuple[Any, ...]:
    dates = tuple(
        str(value)
        for name, value in zip(by, key, strict=True)
        if name in ("hour", "day", "week", "month")
    )
    return (dates, -sums.pico, -sums.tokens, tuple(str(value) for value in key))
